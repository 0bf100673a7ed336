"""What a sampler is: the rule that turns scores into drafted and committed tokens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .noise import Draws

if TYPE_CHECKING:
    from .queries import Queries  # it imports triton, which a CPU need not have


@dataclass(frozen=True)
class Outcome:
    """What V verified rows decided.

    Attributes:
        accepted: `[V]` int64, drafts kept.
        tokens: `[V, most queries]` int64; the first `accepted + 1` of a row are committed.
        best: `[K]` float32, the highest score of each query; NaN if any of its scores is.
    """

    accepted: Tensor
    tokens: Tensor
    best: Tensor


@dataclass(frozen=True)
class Choices:
    """What is chosen behind the queries of a step, drafts included.

    Attributes:
        tokens: `[T]` int64; behind a row's last kept draft the one that follows, before it anything.
        best: `[T]` highest scores; NaN if any is.
        accepted: `[R]` int64, drafts kept; None: the leading ones that are what was chosen.
    """

    tokens: Tensor
    best: Tensor
    accepted: Tensor | None = None


class Sampler(Protocol):
    """Turns processed scores into tokens."""

    def draft(self, scores: Tensor, draws: Draws, slots: Tensor, depths: Tensor) -> Tensor:
        """Proposes one token for each of R rows.

        Args:
            scores: `[R, V]` float32, processed.
            draws: R draws.
            slots: `[R]` request slots.
            depths: `[R]` drafts the row holds already.

        Returns:
            `[R]` int64.
        """

    def verify(self, scores: Tensor, draws: Draws, drafts: Tensor, counts: Tensor, slots: Tensor) -> Outcome:
        """Decides V rows.

        Args:
            scores: `[K, V]` float32, processed; the rows' queries one after the other.
            draws: K draws.
            drafts: `[V, most drafts]` int64; entries past a row's drafts count for nothing.
            counts: `[V]` int64, queries of each row: its drafts + 1.
            slots: `[V]` request slots.
        """

    def choose(self, scores: Tensor, draws: Draws, queries: Queries) -> Choices:
        """Drafts and decides all rows of a step that only the device knows; waits for nothing, so it can be captured.

        Args:
            scores: `[T, V]` float32, processed.
            draws: T draws.
            queries: The step.
        """

    def step(self, scores: Tensor, draws: Draws, drafts: Tensor, depths: Tensor) -> Tensor:
        """Decides one position of every request slot.

        Args:
            scores: `[B, V]` float32, processed, in slot order.
            draws: B draws.
            drafts: `[B]` int64, the draft at this position, or -1.
            depths: `[B]` int64, which draft of its round it is.

        Returns:
            `[B]` int64; a draft was accepted where its token comes back.
        """

    def can_choose(self, best: float) -> bool:
        """Whether a token can be chosen from scores whose highest is `best`."""

    @property
    def takes_highest(self) -> bool:
        """Whether it always chooses the highest score."""

    @property
    def key(self) -> Hashable:
        """What `choose` does, and the memory of its own that it works on: a captured one serves all of one key."""


def by_row(values: Tensor, counts: Tensor, most: int) -> Tensor:
    """`[K]` one after the other -> `[V, most]`, short rows filled with their neighbours' values."""
    starts = counts.cumsum(0) - counts
    place = starts[:, None] + torch.arange(most, device=counts.device)
    return values[place.clamp(max=values.shape[0] - 1)]


def leading(agree: Tensor, drafts: Tensor) -> Tensor:
    """How many of a row's first `drafts` entries hold before one fails."""
    inside = torch.arange(agree.shape[1], device=agree.device) < drafts[:, None]
    return (agree & inside).to(torch.int64).cumprod(-1).sum(-1)
