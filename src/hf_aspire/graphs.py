"""CUDA graphs of forwards: captured the second time that a shape is seen, replayed from then on."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MOST_GRAPHS = 96
"""Shapes beyond which new ones run without a graph: each takes memory, and capturing takes time."""
_ROOM = 4
"""By how much a captured shape may exceed what is needed: an item without work costs nanoseconds."""


class Shape(NamedTuple):
    """Sizes of a forward's tables.

    Attributes:
        tokens: Query tokens, T.
        block_m: Rows of the kernel's tile.
        scored: Score slots.
        settles: Whether tokens are chosen and committed, too.
        work: (items, merges) of every view.
    """

    tokens: int
    block_m: int
    scored: int
    settles: bool
    work: tuple[tuple[int, int], ...]

    def holds(self, other: Shape) -> bool:
        """Whether a forward of this shape can do the work of another, at little more than its cost."""
        return self._kind == other._kind and all(
            less <= most <= _ROOM * max(less, 16)
            for less, most in zip(other._sizes, self._sizes, strict=True)
            if most or less
        )

    @property
    def _kind(self) -> tuple[int, int, bool, bool]:
        return self.tokens, self.block_m, self.scored > 0, self.settles

    @property
    def _sizes(self) -> list[int]:
        return [self.scored, *(size for pair in self.work for size in pair)]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class Graphs:
    """The captured forwards of one model and one set of tables. They share a memory pool: one runs at a time.

    Args:
        enabled: Whether to capture at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._captured: dict[Shape, _Captured] = {}
        self._seen: Counter[Shape] = Counter()

    def __len__(self) -> int:
        return len(self._captured)

    def shape_for(self, needed: Shape) -> Shape:
        """The captured shape to fill up to, or the needed one."""
        if needed in self._captured:
            return needed
        return min((shape for shape in self._captured if shape.holds(needed)), default=needed, key=sum_of)

    def knows(self, shape: Shape) -> bool:
        """Whether running a shape neither compiles nor captures anything."""
        return shape in self._captured or (not self.enabled and self._seen[shape] > 0)

    def run(self, shape: Shape, forward: Callable[[], Tensor]) -> Tensor:
        """Runs a forward whose every input and output lies at addresses that its shape determines.

        Returns:
            Its result, which the next forward may overwrite.
        """
        captured = self._captured.get(shape)
        if captured is None and self.enabled and self._seen[shape] and len(self._captured) < MOST_GRAPHS:
            captured = self._capture(shape, forward)
        self._seen[shape] += 1
        if captured is None:
            return forward()
        captured.graph.replay()
        return captured.logits

    def _capture(self, shape: Shape, forward: Callable[[], Tensor]) -> _Captured | None:
        graph = torch.cuda.CUDAGraph()
        pool = next((entry.graph.pool() for entry in self._captured.values()), None)
        torch.cuda.synchronize()
        try:
            # A capture that fails leaves its own stream as the current one; the outer block puts the caller's back.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                logits = forward()
        except Exception as error:
            self.enabled = False
            warnings.warn(
                f"hf_aspire runs without CUDA graphs: capturing a forward failed, {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        self._captured[shape] = _Captured(graph, logits)
        return self._captured[shape]


def sum_of(shape: Shape) -> int:
    """The tables' size."""
    return shape.scored + sum(items + merges for items, merges in shape.work)
