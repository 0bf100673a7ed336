"""The queries of a step whose lengths and drafts only the device knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Queries:
    """T queries of R rows; all int64. Rows that are not used, and their queries, belong to a slot that keeps nothing.

    Attributes:
        slots: `[T]` request slots.
        positions: `[T]` index of the token behind each among its request's generated ones.
        columns: `[T]` its history column.
        following: `[T]` the draft that stands there; of a row's last query, anything.
        rows: `[T]` rows.
        depths: `[T]` which query of its row each is.
        owners: `[R]` request slots.
        first: `[R]` first queries.
        held: `[R]` drafts that a draft row holds already.
        drafts: `[R]` drafts that a full row decides on; -1: the row drafts.
        forced: `[R]` drafts to accept whatever the scores say; -1: the scores decide.
        rounds: `[T]` rounds that the request has behind it.
        most: `[n]` 0 ... n - 1, for the most queries of a row.
    """

    slots: Tensor
    positions: Tensor
    columns: Tensor
    following: Tensor
    rows: Tensor
    depths: Tensor
    owners: Tensor
    first: Tensor
    held: Tensor
    drafts: Tensor
    forced: Tensor
    rounds: Tensor
    most: Tensor

    @property
    def drafting(self) -> Tensor:
        """`[R]` whether a row drafts."""
        return self.drafts < 0

    def accepted(self, agree: Tensor) -> Tensor:
        """Leading drafts `[R]` of the full rows that the target agrees with; `agree` `[T]` is query by query."""
        place = (self.first[:, None] + self.most).clamp(max=len(agree) - 1)
        leading = (agree[place] & (self.most < self.drafts[:, None])).long().cumprod(1).sum(1)
        return torch.where(self.forced >= 0, self.forced, leading)

    def text(self, accepted: Tensor, chosen: Tensor) -> Tensor:
        """The tokens `[T]` behind the queries: accepted drafts, then what was chosen."""
        return torch.where(self.depths < accepted[self.rows], self.following, chosen)
