"""Scores and logits of committed tokens, as plain `generate` returns them."""

from __future__ import annotations

import torch
from torch import Tensor


class Outputs:
    """Collects `[B, V]` per column, each filled row by row as tokens are committed.

    Args:
        rows: B.
        keep_scores: Whether processed scores are wanted.
        keep_logits: Whether raw logits are wanted.
    """

    def __init__(self, rows: int, keep_scores: bool, keep_logits: bool) -> None:
        self._rows = rows
        self._scores: list[Tensor] | None = [] if keep_scores else None
        self._logits: list[Tensor] | None = [] if keep_logits else None

    @property
    def wanted(self) -> bool:
        """Whether anything is collected."""
        return self._scores is not None or self._logits is not None

    def put(self, row: int, column: int, scores: Tensor, logits: Tensor) -> None:
        """Keeps one row's processed scores and raw logits `[V]` of a column."""
        for columns, values in ((self._scores, scores), (self._logits, logits)):
            if columns is not None:
                while len(columns) <= column:
                    columns.append(torch.zeros(self._rows, len(values), dtype=torch.float32, device=values.device))
                columns[column][row] = values

    def scores_so_far(self, columns: int) -> tuple[Tensor, ...] | None:
        """Processed scores of the first `columns` columns, or None if they are not kept."""
        return None if self._scores is None else tuple(self._scores[:columns])

    def logits_so_far(self, columns: int) -> tuple[Tensor, ...] | None:
        """Raw logits of the first `columns` columns, or None if they are not kept."""
        return None if self._logits is None else tuple(self._logits[:columns])
