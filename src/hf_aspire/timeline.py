"""Every forward of a call with its rows. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

from .request import RowKind

_COLUMNS = 6


@dataclass(slots=True)
class RowRecord:
    """What one row of a step did.

    Args:
        request: Index of the returned row.
        kind: What the row was.
        queries: Query tokens it put into the forward.
        drafted: Drafts that it judged (VERIFY only), less those behind a stop.
        accepted: Drafts among them that were kept.
        committed: Tokens it added to the output: 1 for DECODE and for the chunk that ends a prompt, `accepted + 1`
            for VERIFY, less those behind a stop; 0 otherwise.
        place: Where a timeline keeps it; -1: in none.
    """

    request: int
    kind: RowKind
    queries: int
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    place: int = field(default=-1, repr=False, compare=False)


@dataclass(slots=True)
class StepRecord:
    """One model forward: its rows, and when it began and ended in seconds after the call's first forward began."""

    start: float
    end: float
    rows: tuple[RowRecord, ...]


class Timeline(Sequence[StepRecord]):
    """Records of a call's steps. They are kept as numbers, and made anew whenever somebody looks.

    A call has tens of thousands of rows. As objects that stay they set off Python's full garbage collection once in
    some calls, in the middle of one. It looks at all objects of the process: 0.4 s, where compiled models left half a
    million (two CPU cores, 2026-11-30; 64 rows and 200 steps per call, once in seven).
    """

    def __init__(self) -> None:
        self._times = array("d")  # start, end of every step
        self._first = array("q", [0])  # first row of every step, and of the next one
        self._rows = array("q")

    def add(self, start: float, end: float, rows: Sequence[RowRecord]) -> None:
        """Appends a step.

        Args:
            start: Seconds after the call's first forward began.
            end: Likewise.
            rows: Its rows; they may be decided later, see `update`.
        """
        for row in rows:
            row.place = len(self._rows)
            self._rows.extend((row.request, row.kind, row.queries, row.drafted, row.accepted, row.committed))
        self._times.extend((start, end))
        self._first.append(len(self._rows) // _COLUMNS)

    def update(self, row: RowRecord) -> None:
        """Notes what has been decided of a row since it was added."""
        self._rows[row.place + 3 : row.place + _COLUMNS] = array("q", (row.drafted, row.accepted, row.committed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    def __len__(self) -> int:
        return len(self._first) - 1

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        step = range(len(self))[index]
        rows = tuple(self._row(i * _COLUMNS) for i in range(self._first[step], self._first[step + 1]))
        return StepRecord(self._times[2 * step], self._times[2 * step + 1], rows)

    def _row(self, place: int) -> RowRecord:
        request, kind, queries, drafted, accepted, committed = self._rows[place : place + _COLUMNS]
        return RowRecord(request, RowKind(kind), queries, drafted, accepted, committed, place)
