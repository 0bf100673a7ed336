"""CUDA graphs: captured the second time that something runs, replayed from then on."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .kernels.work import bucket
from .side_streams import capture_stream, one_capture

K = TypeVar("K", bound=Hashable)

MOST_GRAPHS = 96
"""Keys that are captured at most: each takes memory. Others then take a captured shape that serves, or no graph."""
_ROOM = 4
"""By how much the tables of a captured shape may exceed what is needed; an item without work returns at once."""
_PATIENCE = 8192
"""Tokens by which larger shapes may have filled steps up before these get a shape of their own: about what that takes
(a step without a graph and a capture, 0.1 s; a token of filling, 4 to 20 us, 135M to 8B parameters on an H200)."""
_LEAST_FILLING = 16
"""What a shape of as many tokens counts that is larger otherwise. Not tuned."""


class Shape(NamedTuple):
    """Sizes of a forward's tables.

    Attributes:
        tokens: Query tokens, T.
        block_m: Rows of the kernel's tile.
        scored: Score slots.
        settles: Whether tokens are chosen and committed, too.
        work: Items of every view.
    """

    tokens: int
    block_m: int
    scored: int
    settles: bool
    work: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """What orders shapes by what they cost."""
        return self.tokens, self.scored + sum(self.work)


class Needs(NamedTuple):
    """What a step needs of a shape; as there, but for counts that were not rounded up.

    Attributes:
        queries_per_tile: Of the tokens that fill the batch up, that many take an item in every view.
    """

    tokens: int
    block_m: int
    scored: int
    settles: bool
    work: tuple[int, ...]
    queries_per_tile: int

    @property
    def least(self) -> Shape:
        """The smallest shape there is that does. Matrix products take about the same time up to 128 tokens.

        Two tokens at least: for a single one, torch would compile the layers once more, in the middle of a call.
        """
        tokens = bucket(self.tokens, least=128) if self.tokens > 128 else power(self.tokens, 2)
        work = tuple(power(items, 64) for items in self.in_batch_of(tokens))
        return Shape(tokens, self.block_m, power(self.scored, 4, 4), self.settles, work)

    def in_batch_of(self, tokens: int) -> tuple[int, ...]:
        """Items of every view, with those of the tokens that fill the batch up."""
        filling = -(-(tokens - self.tokens) // self.queries_per_tile)
        return tuple(items + filling for items in self.work)

    def room_in(self, shape: Shape) -> tuple[int, ...]:
        """Items of every view that a shape has for the step's own tokens."""
        filling = -(-(shape.tokens - self.tokens) // self.queries_per_tile)
        return tuple(items - filling for items in shape.work)

    def fit_but_for_work(self, shape: Shape) -> bool:
        """Whether a forward of a shape can do the work, if that is cut so that it fits."""
        kind = shape.block_m, shape.settles, shape.scored > 0
        same = kind == (self.block_m, self.settles, self.scored > 0)
        return same and shape.tokens >= self.tokens and shape.scored >= self.scored

    def fit(self, shape: Shape) -> bool:
        """Whether a forward of a shape can do the work."""
        rooms = zip(self.work, self.room_in(shape), strict=True)
        return self.fit_but_for_work(shape) and all(items <= room for items, room in rooms)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Tensor


class Captures(Generic[K]):
    """Captured work of one model and one set of tables, by key. It shares a memory pool: one runs at a time.

    Args:
        enabled: Whether to capture at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._captured: dict[K, _Captured] = {}
        self._seen: Counter[K] = Counter()

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: K) -> bool:
        return key in self._captured

    def knows(self, key: K) -> bool:
        """Whether running this neither compiles nor captures anything."""
        return key in self._captured or (not self.enabled and self._seen[key] > 0)

    def run(self, key: K, forward: Callable[[], Tensor]) -> Tensor:
        """Runs what reads and writes at addresses that its key determines.

        Returns:
            Its result, which the next one may overwrite.
        """
        captured = self._captured.get(key)
        if captured is None and self.enabled and self._seen[key] and len(self._captured) < MOST_GRAPHS:
            captured = self._capture(key, forward)
        self._seen[key] += 1
        if captured is None:
            return forward()
        captured.graph.replay()
        return captured.result

    def _capture(self, key: K, forward: Callable[[], Tensor]) -> _Captured | None:
        graph = torch.cuda.CUDAGraph()
        pool = next((entry.graph.pool() for entry in self._captured.values()), None)
        raised: BaseException | None = None
        try:
            # A capture that fails leaves its own stream as the current one; the outer block puts the caller's back.
            with (
                one_capture,
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=pool, stream=capture_stream(), capture_error_mode="thread_local"),
            ):
                try:
                    result = forward()
                except BaseException as error:
                    raised = error  # ending a capture in its middle may raise another one in its place
                    raise
        except Exception as error:
            reason = raised or error
            if not isinstance(reason, Exception):
                raise reason from None
            self.enabled = False
            warnings.warn(
                f"hf_aspire runs without CUDA graphs: capturing a step failed, {type(reason).__name__}: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        self._captured[key] = _Captured(graph, result)
        return self._captured[key]


class Graphs(Captures[Shape]):
    """The captured forwards of one model and one set of tables.

    Args:
        enabled: Whether to capture at all.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
        self._waited: Counter[Shape] = Counter()

    def shape_for(self, needs: Needs, cuttable: Callable[[Shape], bool]) -> Shape:
        """The shape that a step takes: a captured one, or at last one of its own.

        A step without a graph takes several times as long, and capturing one longer still. So a mixture that was not
        seen before fills up a captured shape of about its size or the smallest that it fits into, if need be with its
        work cut in another way: until that has cost as much, or for good where no more can be captured.

        Args:
            needs: Of the step.
            cuttable: Whether the step's work can be cut so that it fits a shape that has too little room for it.
        """
        least = needs.least
        if least in self._captured:
            return least
        large_enough = (shape for shape in self._captured if needs.fit_but_for_work(shape))
        roomy = sorted(large_enough, key=lambda shape: shape.size)
        near = next((shape for shape in roomy if needs.fit(shape) and _is_near(least, shape)), None)
        if near is not None:
            return near
        if self._waited[least] < _PATIENCE or len(self._captured) >= MOST_GRAPHS:
            taken = next((shape for shape in roomy if needs.fit(shape) or cuttable(shape)), None)
            if taken is not None:
                self._waited[least] += max(taken.tokens - least.tokens, _LEAST_FILLING)
                return taken
        return least


def _is_near(least: Shape, shape: Shape) -> bool:
    """Whether a larger shape costs hardly more."""
    pairs = [(least.scored, shape.scored), *zip(least.work, shape.work, strict=True)]
    return least.tokens == shape.tokens and all(more <= _ROOM * max(less, 16) for less, more in pairs)


def power(count: int, least: int, base: int = 2) -> int:
    """The smallest power of `base` times `least` that holds `count`; 0 for 0."""
    size = least if count else 0
    while size < count:
        size *= base
    return size
