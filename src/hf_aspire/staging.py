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


class Part(NamedTuple):
    """A table to send, filled up to `length` entries with a `filler`."""

    entries: NDArray[np.integer]
    length: int
    filler: int | list[int]


@dataclass(frozen=True)
class _Layout:
    """Where tables lie, one behind the other.

    Attributes:
        size: Numbers in all.
        places: Those of each table.
        shapes: The tables' shapes.
        views: The tables, on the device.
    """

    size: int
    places: list[slice]
    shapes: list[tuple[int, ...]]
    views: list[Tensor]


class Staging:
    """Int32 tables on the device, at addresses that the shape of a step determines.

    Args:
        room: Most numbers of a step's tables.
        device: Where they go.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self._buffer = torch.zeros(room, dtype=torch.int32, device=device)
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
        staged = torch.empty(layout.size, dtype=torch.int32, device="cpu", pin_memory=self._buffer.is_cuda)
        flat = staged.numpy()
        for (entries, _, filler), place, sides in zip(parts, layout.places, layout.shapes, strict=True):
            table = flat[place].reshape(sides)
            table[: len(entries)] = entries
            table[len(entries) :] = filler
        self._buffer[: layout.size].copy_(staged, non_blocking=True)
        return layout.views

    def _layout(self, parts: Sequence[Part]) -> _Layout:
        """Every table starts at a multiple of 16 bytes."""
        shapes = [(part.length, *part.entries.shape[1:]) for part in parts]
        places, size = [], 0
        for sides in shapes:
            places.append(slice(size, size + math.prod(sides)))
            size += -(-math.prod(sides) // 4) * 4
        assert size <= len(self._buffer)
        views = [self._buffer[place].view(sides) for place, sides in zip(places, shapes, strict=True)]
        return _Layout(size, places, shapes, views)
