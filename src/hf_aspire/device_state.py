"""What a step needs to know of every request, on the device: it can follow one whose outcome is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .queries import Queries
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

    def queries(self, tokens: Tensor, rows: Tensor, most: Tensor) -> Queries:
        """The queries of a step.

        Args:
            tokens: `[T, 4]` int32: slot, tokens ahead of its last committed one, row, query of the row.
            rows: `[R, 6]` int32: slot, tokens ahead, first token, drafts (-1: it drafts), accepted drafts if forced
                (else -1), round.
            most: `[n]` 0 ... n - 1 for the most queries of a row.
        """
        slots, ahead, row, depths = tokens.long().unbind(1)
        owners, held, first, drafts, forced, rounds = rows.long().unbind(1)
        fields = self.fields[slots]
        positions = fields[:, Field.GENERATED] + ahead
        columns = (fields[:, Field.COLUMN] + positions).clamp(max=self.history.shape[1] - 1)
        following = self.history[slots, columns]
        return Queries(
            slots, positions, columns, following, row, depths, owners, first, held, drafts, forced, rounds[row], most
        )

    def settle(self, queries: Queries, text: Tensor, accepted: Tensor) -> None:
        """Writes the tokens `[T]` behind the queries down, and commits the accepted drafts `[R]` and one more."""
        self.history[queries.slots, queries.columns] = text
        committed = torch.where(queries.drafting, 0, accepted + 1)
        self.fields[:, Field.LENGTH].index_add_(0, queries.owners, committed)
        self.fields[:, Field.GENERATED].index_add_(0, queries.owners, committed)
