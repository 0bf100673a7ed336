"""Kernels that need not wait for each other, side by side in a captured CUDA graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

one_capture = threading.Lock()
"""Held while a graph is captured: all captures of a process share the side streams."""


class SideStreams:
    """Streams beside the current one, while a graph is captured.

    Elsewhere everything runs on the current stream: what starts kernels one by one is slower than small kernels are.
    """

    def __init__(self) -> None:
        self._forked: list[torch.cuda.Stream] = []

    @contextmanager
    def fork(self, index: int = 0) -> Iterator[None]:
        """What the block starts waits for all that the current stream was given so far, and for nothing behind it."""
        if not _capturing():
            yield
            return
        stream = _side_stream(torch.cuda.current_device(), index)
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


@functools.cache
def _side_stream(device: int, index: int) -> torch.cuda.Stream:
    """The same one every time: cuBLAS keeps memory of its own for every stream that it has met."""
    return torch.cuda.Stream(device)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
