"""What a step needs to know of every request, on the device: it can follow one whose outcome is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .request import Request


class Field(IntEnum):
    """Columns of the state."""

    LENGTH = 0  # tokens whose keys and values are final
    GENERATED = 1  # committed tokens
    COLUMN = 2  # history column of the first generated token
    POSITION = 3  # its position id
    CAPACITY = 4  # tokens that the request's pages hold
    TOP = 5  # leading entries of its sparse list: the best-scored tokens
    TAIL = 6  # context index from which on the list holds every token


class DeviceState:
    """State by request slot. One more slot, the last, belongs to the tokens that fill a batch up: it keeps nothing.

    Args:
        slots: Request slots.
        columns: Columns of the history.
        page_table: `[slots + 1, pages]` int32.
        page_size: Tokens per page.
    """

    def __init__(self, slots: int, columns: int, page_table: Tensor, page_size: int) -> None:
        device = page_table.device
        self.filler = slots
        self.page_table = page_table
        self.page_size = page_size
        self.fields = torch.zeros(slots + 1, len(Field), dtype=torch.int64, device=device)
        self.history = torch.zeros(slots + 1, columns, dtype=torch.int64, device=device)
        self.noise_keys = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    def load(self, requests: Sequence[Request], prompt_width: int) -> None:
        """Takes over requests as the host knows them; their history is here already."""
        if not requests:
            return
        rows = [(r.length, r.generated, prompt_width, r.position(0), len(r.pages) * self.page_size) for r in requests]
        device = self.fields.device
        slots = torch.tensor([request.row for request in requests], device=device)
        self.fields[slots, : Field.TOP] = torch.tensor(rows, dtype=torch.int64, device=device)
        self.noise_keys[slots] = torch.tensor([request.noise_key for request in requests], device=device)

    def pack(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of a step.

        Args:
            tokens: `[T, 2 or more]` int32: request slot, and how many tokens ahead of its last committed one.

        Returns:
            Token ids and position ids `[1, T]`, and `[T]` places of their keys and values, -1 for none.
        """
        slot, ahead = tokens[:, :2].long().unbind(1)
        fields = self.fields[slot]
        last = fields[:, Field.GENERATED] - 1 + ahead
        ids = self.history[slot, (fields[:, Field.COLUMN] + last).clamp_min(0)]
        index = fields[:, Field.LENGTH] + ahead
        places = self.places(slot, index)
        kept = index < fields[:, Field.CAPACITY]
        positions = (fields[:, Field.POSITION] + last).clamp_min(0)
        return ids[None], positions[None], torch.where(kept, places, -1)

    def places(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """Pool places of context indices; both `[...]` int64. Indices behind the pages get any place."""
        page = (tokens // self.page_size).clamp(max=self.page_table.shape[1] - 1)
        return self.page_table[slots, page].long() * self.page_size + tokens % self.page_size

    def commit(self, slots: Tensor, tokens: Tensor, committed: Tensor) -> None:
        """Makes tokens part of their requests.

        Args:
            slots: `[V]` int64.
            tokens: `[V, n]` int64, written behind the last committed ones.
            committed: `[V]` int64, how many of them stay; what lies behind is overwritten later.
        """
        first = self.fields[slots, Field.COLUMN] + self.fields[slots, Field.GENERATED]
        columns = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.history[slots[:, None], columns.clamp(max=self.history.shape[1] - 1)] = tokens
        self.fields[slots, Field.LENGTH] += committed
        self.fields[slots, Field.GENERATED] += committed

    def settle(self, tokens: Tensor, rows: Tensor, ids: Tensor, chosen: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Accepts the drafts that agree with what was chosen, and commits; drafts of draft rows are noted.

        Args:
            tokens: `[T, 4]` int32: slot, tokens ahead of its last committed one, row, query of the row.
            rows: `[R, 5]` int32: slot, tokens ahead, first token, drafts (-1: it drafts), accepted drafts if forced.
            ids: `[T]` int64, what was fed.
            chosen: `[T]` int64, the tokens behind.
            most: `[n]` 0 ... n - 1 for the most drafts of a row.

        Returns:
            `[T]` tokens behind the queries as they stay, and `[R]` accepted drafts.
        """
        slot, ahead, row, query = tokens.long().unbind(1)
        owner, _, first, drafts, forced = rows.long().unbind(1)
        following = ids.roll(-1)
        place = (first[:, None] + most).clamp(max=len(ids) - 1)
        agree = (chosen[place] == following[place]) & (most < drafts[:, None])
        accepted = agree.long().cumprod(1).sum(1)
        accepted = torch.where(forced >= 0, forced, accepted)
        text = torch.where(query < accepted[row], following, chosen)
        fields = self.fields[slot]
        column = fields[:, Field.COLUMN] + fields[:, Field.GENERATED] + ahead
        self.history[slot, column.clamp(max=self.history.shape[1] - 1)] = text
        committed = torch.where(drafts >= 0, accepted + 1, 0)
        self.fields[:, Field.LENGTH].index_add_(0, owner, committed)
        self.fields[:, Field.GENERATED].index_add_(0, owner, committed)
        return text, accepted
