"""A step's tables on their way to the device: filled up, and in one copy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNDER_WAY = 3
"""Steps whose tables may be on their way at a time: one that the device works on, and two ahead."""


class Part(NamedTuple):
    """A table to send, filled up to `length` entries with a `filler`."""

    entries: NDArray[np.integer]
    length: int
    filler: int | list[int]


@dataclass(frozen=True)
class _Layout:
    """Tables of one shape, one behind the other.

    Attributes:
        sources: Their memory on the host, and each of them, for every source.
        target: Their memory on the device.
        views: Each of them there.
    """

    sources: list[tuple[Tensor, list[NDArray[np.int32]]]]
    target: Tensor
    views: list[Tensor]


class Staging:
    """Int32 tables on the device, at addresses that the shape of a step determines.

    Memory on the host is written to again `UNDER_WAY` steps later. Until then the caller has read what came out of
    the step: an event that says so takes as long as the copy (25 us on an H200's host).

    Args:
        room: Most numbers of a step's tables.
        device: Where they go.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self._buffer = torch.zeros(room, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._sources = [
            torch.empty(room, dtype=torch.int32, device="cpu", pin_memory=on_gpu) for _ in range(UNDER_WAY)
        ]
        self._turn = 0
        self._layouts: dict[Hashable, _Layout] = {}

    def send(self, shape: Hashable, parts: Sequence[Part]) -> list[Tensor]:
        """Copies tables to the device in one piece, without waiting for it.

        Args:
            shape: Determines the lengths and columns of all parts.
            parts: The tables.

        Returns:
            The tables on the device, until the next ones are sent.
        """
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = self._layout(parts)
        self._turn = (self._turn + 1) % UNDER_WAY
        source, tables = layout.sources[self._turn]
        for (entries, _, filler), table in zip(parts, tables, strict=True):
            table[: len(entries)] = entries
            table[len(entries) :] = filler
        layout.target.copy_(source, non_blocking=True)
        return layout.views

    def _layout(self, parts: Sequence[Part]) -> _Layout:
        """Every table starts at a multiple of 16 bytes."""
        places, size = [], 0
        shapes = [(part.length, *part.entries.shape[1:]) for part in parts]
        for sides in shapes:
            places.append(slice(size, size + math.prod(sides)))
            size += -(-math.prod(sides) // 4) * 4
        assert size <= len(self._buffer)

        def tables(memory: Tensor) -> list[Tensor]:
            return [memory[place].view(sides) for place, sides in zip(places, shapes, strict=True)]

        sources = [(source[:size], [table.numpy() for table in tables(source)]) for source in self._sources]
        return _Layout(sources, self._buffer[:size], tables(self._buffer))
