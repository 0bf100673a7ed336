"""A step's rows column by column. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .request import Row, RowKind

_DRAFT = RowKind.DRAFT  # members of an enum are slow to look up


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
        scored_queries: As in `Row`, or None where no row is scored.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.requests, kinds, queries, starts, contexts, scored, _ = zip(*rows, strict=True)
        self.slots = np.array([request.row for request in self.requests])
        self.drafts = np.array([kind is _DRAFT for kind in kinds])
        self.queries, self.starts, self.contexts = np.array(queries), np.array(starts), np.array(contexts)
        self.scored_queries = [row.scored_queries for row in rows] if any(scored) else None
