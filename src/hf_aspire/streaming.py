"""Hands tokens to a streamer as plain `generate` does: one column of the whole batch at a time."""

from __future__ import annotations

from typing import Any

import torch


class ColumnStream:
    """Buffers rows that are ahead, and puts a column once every row has it or has ended.

    Args:
        streamer: Receives `put([B])` per column.
        rows: B.
        pad_token: Stands for rows that have ended.
    """

    def __init__(self, streamer: Any, rows: int, pad_token: int) -> None:
        self._streamer = streamer
        self._pad = pad_token
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._column = 0

    def put(self, row: int, tokens: list[int], ended: bool) -> None:
        """Adds a row's new tokens, and streams the columns that they complete."""
        self._tokens[row] += tokens
        self._ended[row] |= ended
        while any(len(t) > self._column for t in self._tokens) and all(
            end or len(t) > self._column for t, end in zip(self._tokens, self._ended, strict=True)
        ):
            column = [t[self._column] if len(t) > self._column else self._pad for t in self._tokens]
            self._streamer.put(torch.tensor(column))
            self._column += 1
