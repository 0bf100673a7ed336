"""Chooses and commits the tokens of a planned step on the device."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from .device_state import DeviceState
from .graphs import Captures
from .kernels.highest import highest
from .noise import Draws
from .processing import Processing
from .sampler import Choices, Sampler
from .step_tables import Plan


class Choice:
    """What follows a step's logits: processors, sampler, commit.

    The highest logit is chosen within the forward and its graph. Everything else has graphs of its own, which are made
    in milliseconds: sampling parameters change from call to call, and the forwards stay.

    Args:
        state: The requests.
        processing: Processors that look at scores alone.
        sampler: Drafts and decides.
        captures: Graphs of choices by these processors and this sampler.
    """

    def __init__(
        self, state: DeviceState, processing: Processing, sampler: Sampler, captures: Captures[Hashable]
    ) -> None:
        self._state = state
        self._processing = processing
        self._sampler = sampler
        self._captures = captures

    @property
    def in_forward(self) -> bool:
        """Whether it belongs to the forward's graph."""
        return self._sampler.takes_highest and not self._processing

    def knows(self, plan: Plan, logits: Tensor) -> bool:
        """Whether `run` captures nothing."""
        return not self._captures.enabled or self._captures.knows(_place(plan, logits))

    def run(self, plan: Plan, logits: Tensor) -> Tensor:
        """`settle` for a step whose forward returned `logits`."""
        if not self._captures.enabled:
            return self.settle(plan, logits)
        return self._captures.run(_place(plan, logits), lambda: self.settle(plan, logits))

    def settle(self, plan: Plan, logits: Tensor) -> Tensor:
        """Commits a step's tokens.

        Args:
            plan: The step, filled in and not settled yet.
            logits: `[T, V]`.

        Returns:
            What a step tells the host (see `settle_rows`).
        """
        if self.in_forward:
            return self._state.settle(plan.owners, Choices(*highest(logits)))
        queries = self._state.queries(plan.tokens, plan.owners)
        draws = Draws(self._state.noise_keys[queries.slots], queries.positions, queries.rounds)
        return self._state.settle(plan.owners, self._sampler.choose(self._processing.warp(logits), draws, queries))


def _place(plan: Plan, logits: Tensor) -> Hashable:
    """What a captured choice reads: tables where the shape puts them, and logits."""
    return plan.shape, logits.data_ptr()
