"""What a step needs to know of every request, on the device: it can follow one whose outcome is unknown."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels.step_state import Field, Owner, pack_tokens, settle_rows
from .queries import Queries
from .request import Request
from .sampler import Choices


class DeviceState:
    """State by request slot. One more slot, the last, belongs to the tokens that fill a batch up: it keeps nothing.

    Args:
        slots: Request slots.
        columns: Columns of the history.
        page_table: `[slots + 1, pages]` int32.
        page_size: Tokens per page.
        most: Most queries of a row.
    """

    def __init__(self, slots: int, columns: int, page_table: Tensor, page_size: int, most: int) -> None:
        device = page_table.device
        self.filler = slots
        self.page_table = page_table
        self.page_size = page_size
        self.most = most
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
            tokens: `[T, 4]` int32: slot, tokens ahead of its last committed one, row, query of the row.

        Returns:
            Token ids and position ids `[1, T]`, and `[T]` places of their keys and values, -1 for none.
        """
        ids, positions, places = pack_tokens(tokens, self.fields, self.history, self.page_table, self.page_size)
        return ids[None], positions[None], places

    def places(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """Pool places of context indices; both `[...]` int64. Indices behind the pages get any place."""
        page = (tokens // self.page_size).clamp(max=self.page_table.shape[1] - 1)
        return self.page_table[slots, page].long() * self.page_size + tokens % self.page_size

    def queries(self, tokens: Tensor, owners: Tensor) -> Queries:
        """The queries of a step.

        Args:
            tokens: `[T, 4]` int32, as `pack` takes them.
            owners: `[R, Owner]` int32.
        """
        slots, ahead, row, depths = tokens.long().unbind(1)
        owner, fields = owners.long(), self.fields[slots]
        positions = fields[:, Field.GENERATED] + ahead
        columns = (fields[:, Field.COLUMN] + positions).clamp(max=self.history.shape[1] - 1)
        following, rounds = self.history[slots, columns], owner[row, Owner.ROUND]
        most = torch.arange(self.most, device=slots.device)
        return Queries(slots, positions, following, row, depths, rounds, owner, most)

    def settle(self, owners: Tensor, choices: Choices) -> Tensor:
        """Commits a step's tokens; returns what it tells the host (see `settle_rows`)."""
        forced = owners[:, Owner.FORCED] if choices.accepted is None else choices.accepted.int()
        best = choices.best.float()
        return settle_rows(owners, forced, self.fields, self.history, choices.tokens, best, self.most)
