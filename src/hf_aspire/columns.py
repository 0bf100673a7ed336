"""A step's rows column by column. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .request import BOOTSTRAP, Row, RowKind

_DRAFT, _PREFILL = RowKind.DRAFT, RowKind.PREFILL  # members of an enum are slow to look up


class ScoredRows(NamedTuple):
    """Rows that are scored, by which of their queries: a round by its first and last, a prompt by its last eight.

    Attributes:
        rows: `[n]` int64, ascending.
        spans: `[n, 3]` int64, the first such query, the distance to the next, and how many.
    """

    rows: NDArray[np.int64]
    spans: NDArray[np.int64]


class RowColumns:
    """What tables are made of, one entry per row each: read once from the rows, which takes longer than the sums.

    Args:
        rows: The rows.

    Attributes:
        requests: Their requests.
        slots: Request slots, int64.
        drafts: Which are drafts, bool.
        queries: Query tokens, int64.
        starts: Context index of the first query, int64.
        contexts: Context tokens, int64.
        scored: Those that are scored, or None.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.requests, kinds, queries, starts, contexts, scored, _ = zip(*rows, strict=True)
        self.slots = np.array([request.row for request in self.requests])
        self.drafts = np.array([kind is _DRAFT for kind in kinds])
        self.queries, self.starts, self.contexts = np.array(queries), np.array(starts), np.array(contexts)
        self.scored = self._scored(kinds, scored) if any(scored) else None

    def _scored(self, kinds: Sequence[RowKind], scored: Sequence[bool]) -> ScoredRows:
        rows = np.flatnonzero(scored)
        count = self.queries[rows]
        spans = np.array([0 * count, np.maximum(count - 1, 1), np.minimum(count, 2)]).T
        if _PREFILL in kinds:
            prompts = [kinds[row] is _PREFILL for row in rows.tolist()]
            last = np.minimum(count, BOOTSTRAP)
            spans[prompts] = np.array([count - last, 0 * count + 1, last]).T[prompts]
        return ScoredRows(rows, spans)
