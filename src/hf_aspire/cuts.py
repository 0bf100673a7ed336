"""Work that is cut once for several steps, or as in the step before. Numpy only."""

from __future__ import annotations

from collections.abc import Callable

from .kernels import work

SPARE = 16
"""Tokens that rows may grow by until they are cut anew; they may also be as many shorter than what they were cut for,
since corrected bounds and new lists are. Kernels read blocks of 32 to 128 tokens and end where the row does."""


class Cuts:
    """The last cuts of every view.

    From one step to the next in which every row has one query (drafts, or plain decoding) every row grows by a token,
    and cutting takes longer than everything else in a step's tables (64 drafts of an 8B shape: 170 us or more beside
    130 on a CPU, medians of 443 steps). Of other steps only the size of the pieces is kept, where they are alike: most
    of the time goes by with trying sizes (60 drafts and 4 verifications: 215 us in all, 70 with a known size, medians
    of 1,036 steps).
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[work.Table, work.Work]] = {}  # of single queries: ends that it serves at most, it
        self._last: dict[int, work.Work] = {}  # of other steps

    def of(self, view: int, rows: work.Table, cut: Callable[..., work.Work]) -> work.Work:
        """The work of a view's rows, which ends at most `2 * SPARE` tokens behind each of them.

        Args:
            view: Which view.
            rows: Its row table.
            cut: Cuts a row table, `like` other work.
        """
        if rows[:, work.ROW_QUERIES].max() > 1:
            self._last[view] = cut(rows, like=self._last.get(view))
            return self._last[view]
        ends = rows[:, work.ROW_LENGTH]
        if view in self._kept:
            most, kept = self._kept[view]
            if len(most) == len(ends) and (most >= ends).all() and (most <= ends + 2 * SPARE).all():
                return kept
        roomy = rows.copy()
        roomy[:, [work.ROW_START, work.ROW_LENGTH]] += SPARE
        self._kept[view] = roomy[:, work.ROW_LENGTH], cut(roomy)
        return self._kept[view][1]
