"""Hooks for tests and benchmarks. They change what is drafted or accepted, for the calls made inside the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import numpy as np

DraftFunction = Callable[[int, int, int], int]


@dataclass(frozen=True)
class Hooks:
    """What a call asks before it drafts or verifies."""

    draft: DraftFunction | None = None
    acceptance: tuple[float, ...] | None = None
    seed: int = 0
    random_context: bool = False


_NONE = Hooks()
_active: ContextVar[Hooks] = ContextVar("aspire_hooks", default=_NONE)


def active_hooks() -> Hooks:
    """The hooks of the current context."""
    return _active.get()


@contextmanager
def forced_drafts(fn: DraftFunction) -> Iterator[None]:
    """Replaces every drafted token by `fn(row, position, sampled_token)`.

    `row` is the index in the returned batch, `position` the index among that row's generated tokens. A replaced draft
    counts as proposed with probability one.
    """
    token = _active.set(replace(_active.get(), draft=fn))
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def replay_acceptance(profile: Sequence[float], seed: int = 0) -> Iterator[None]:
    """Draws acceptance from `profile[depth]`, whatever the logits say: for benchmarks on random weights.

    The text is not the model's: an accepted draft is committed as it is. The last entry serves all deeper depths.

    Raises:
        ValueError: An empty profile, or a probability outside [0, 1].
    """
    values = tuple(float(p) for p in profile)
    if not values or not all(0 <= p <= 1 for p in values):
        raise ValueError(f"replay_acceptance: got {profile!r}, expected one or more probabilities in [0, 1]")
    token = _active.set(replace(_active.get(), acceptance=values, seed=seed))
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def random_context() -> Iterator[None]:
    """Fills the pages with random keys and values and computes only the last eight tokens of every prompt.

    For benchmarks of decoding at contexts whose prompts would take minutes to read. The text is not the model's.
    """
    token = _active.set(replace(_active.get(), random_context=True))
    try:
        yield
    finally:
        _active.reset(token)


class Replay:
    """Acceptance drawn from a profile."""

    def __init__(self, profile: Sequence[float], seed: int) -> None:
        self._profile = profile
        self._random = np.random.default_rng(seed)

    def accepted(self, drafted: int) -> int:
        """How many of `drafted` drafts this round keeps."""
        for depth in range(drafted):
            if self._random.random() >= self._profile[min(depth, len(self._profile) - 1)]:
                return depth
        return drafted
