"""The queries of a step whose lengths and drafts only the device knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.step_state import Owner


@dataclass(frozen=True)
class Queries:
    """T queries of R rows; all int64. Rows that are not used, and their queries, belong to a slot that keeps nothing.

    Attributes:
        slots: `[T]` request slots.
        positions: `[T]` index of the token behind each among its request's generated ones.
        following: `[T]` the draft that stands there; of a row's last query, anything.
        rows: `[T]` rows.
        depths: `[T]` which query of its row each is.
        rounds: `[T]` rounds that the request has behind it.
        owners: `[R, Owner]`.
        most: `[n]` 0 ... n - 1, for the most queries of a row.
    """

    slots: Tensor
    positions: Tensor
    following: Tensor
    rows: Tensor
    depths: Tensor
    rounds: Tensor
    owners: Tensor
    most: Tensor

    @property
    def drafts(self) -> Tensor:
        """`[R]` drafts that a full row decides on; -1: the row drafts."""
        return self.owners[:, Owner.DRAFTS]

    def accepted(self, agree: Tensor) -> Tensor:
        """Leading drafts `[R]` of the full rows that the target agrees with; `agree` `[T]` is query by query."""
        place = (self.owners[:, Owner.FIRST, None] + self.most).clamp(max=len(agree) - 1)
        leading = (agree[place] & (self.most < self.drafts[:, None])).long().cumprod(1).sum(1)
        forced = self.owners[:, Owner.FORCED]
        return torch.where(forced >= 0, forced, leading)
