"""Kernels that need not wait for each other, side by side in a captured CUDA graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch

one_capture = threading.Lock()
"""Held while a graph is captured: all captures of a process share these streams."""


class Side(IntEnum):
    """A stream beside the one of a capture."""

    FIRST = 0
    SECOND = 1
    IDLE = 2  # for small kernels that nothing waits for soon: programs of all others start first


class SideStreams:
    """Streams beside the current one, while a graph is captured.

    Elsewhere everything runs on the current stream: what starts kernels one by one is slower than small kernels are.
    """

    def __init__(self) -> None:
        self._forked: list[torch.cuda.Stream] = []

    @contextmanager
    def fork(self, side: Side) -> Iterator[None]:
        """What the block starts waits for all that the current stream was given so far, and for nothing behind it."""
        if not _capturing():
            yield
            return
        stream = _stream(torch.cuda.current_device(), side)
        stream.wait_stream(torch.cuda.current_stream())
        self._forked.append(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """What follows on the current stream waits for all forks."""
        forked, self._forked = self._forked, []
        for stream in forked:
            with torch.cuda.stream(stream):
                captured = _capturing()
            if captured:  # else it was forked in a capture that failed
                torch.cuda.current_stream().wait_stream(stream)


def capture_stream() -> torch.cuda.Stream:
    """The stream to capture on. Kernels keep the priority of the stream that they were captured on.

    A multiprocessor parts its memory into cache and room for programs, and cannot while any program runs on it. With
    equal priorities a reduction of 4 us would start first, and the large product beside it only behind it.
    """
    return _stream(torch.cuda.current_device(), None)


@functools.cache
def _stream(device: int, side: Side | None) -> torch.cuda.Stream:
    """The same one every time: cuBLAS keeps memory of its own for every stream that it has met."""
    return torch.cuda.Stream(device, priority=0 if side is Side.IDLE else -1)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
