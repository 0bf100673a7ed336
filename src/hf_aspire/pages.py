"""Reference-counted KV pages that prefer contiguous runs. No torch: a page is an index, the pools live elsewhere."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Hands out pages `0..count-1`; a page is free while nobody holds it.

    Free pages are kept as maximal runs, so that a request gets one contiguous run whenever any run is long enough
    (the CPU backend then attends on a view, and copies to the device stay few). The three indexes below describe the
    same runs: two find a run's neighbours when pages come back, one finds the best fit. With R free runs, allocating
    costs O(log R) plus the shift of a short list, whatever the size of the pool.

    A method that raises changes nothing.

    Args:
        count: Pages in the pool, >= 0.

    Raises:
        ValueError: `count` is negative.
    """

    def __init__(self, count: int) -> None:
        self._references: list[int] = []
        self._length_from: dict[int, int] = {}  # first page of a free run -> pages in it
        self._first_before: dict[int, int] = {}  # page behind a free run -> first page of it
        self._by_length: list[tuple[int, int]] = []  # (pages, first page) of every free run, ascending
        self._free = 0
        self.grow(count)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    @property
    def all_free(self) -> bool:
        """Whether nobody holds a page."""
        return self._free == len(self._references)

    def grow(self, count: int) -> None:
        """Adds `count` free pages behind the last one.

        Raises:
            ValueError: `count` is negative.
        """
        _require_count(count)
        first = len(self._references)
        self._references.extend([0] * count)
        self._free += count
        self._give(first, count)

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return 0 <= count <= self._free

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages; each has one holder then.

        One contiguous run if any free run is long enough (the shortest such, the lowest of equals), else the fewest
        runs: whole runs from the longest down, then the best fit for the rest.

        Returns:
            The pages, ascending.

        Raises:
            OutOfPages: Fewer than `count` pages are free.
            ValueError: `count` is negative.
        """
        _require_count(count)
        if count > self._free:
            raise OutOfPages(f"got a request for {count} pages, but only {self._free} are free")
        pages: list[int] = []
        while len(pages) < count:
            rest = count - len(pages)
            fit = bisect_left(self._by_length, (rest, 0))
            length, first = self._by_length[min(fit, len(self._by_length) - 1)]
            taken = min(length, rest)
            self._drop_run(first)
            self._add_run(first + taken, length - taken)
            pages.extend(range(first, first + taken))
        for page in pages:
            self._references[page] = 1
        self._free -= count
        pages.sort()
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds one holder to each page; a page named twice gets two.

        Raises:
            ValueError: A page is not held by anybody.
        """
        for page in pages:
            self._require_held(page, 1)
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes one holder from each page, and frees those that have none left; a page named twice loses two.

        Raises:
            ValueError: A page has fewer holders than `pages` names it.
        """
        times = Counter(pages)
        for page, holders in times.items():
            self._require_held(page, holders)
        freed = []
        for page, holders in times.items():
            self._references[page] -= holders
            if self._references[page] == 0:
                freed.append(page)
        self._free += len(freed)
        for first, length in _runs(sorted(freed)):
            self._give(first, length)

    def is_shared(self, page: int) -> bool:
        """Whether more than one holder reads this page, so that a writer has to copy it first.

        Raises:
            ValueError: The page is not held by anybody.
        """
        self._require_held(page, 1)
        return self._references[page] > 1

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Checks that the free runs and the reference counts tell the same story. O(pages); for tests and debugging.

        Args:
            holders: The page lists of *all* live holders; their pages must then explain every reference count.

        Raises:
            AssertionError: Something disagrees; the message says what.
        """
        free = [page for page, references in enumerate(self._references) if references == 0]
        runs = dict(_runs(free))
        _check(min(self._references, default=0) >= 0, "a page has a negative reference count")
        _check(self._free == len(free), f"free says {self._free}, but {len(free)} pages have no holder")
        _check(self._length_from == runs, "the free runs are not the maximal runs of the pages without a holder")
        behind = {first + length: first for first, length in runs.items()}
        _check(self._first_before == behind, "the ends of the free runs are wrong")
        by_length = sorted((length, first) for first, length in runs.items())
        _check(self._by_length == by_length, "the free runs are not indexed by length")
        if holders is not None:
            self._check_holders(Counter(chain.from_iterable(holders)))

    def _check_holders(self, held: Mapping[int, int]) -> None:
        known = {page: references for page, references in enumerate(self._references) if references}
        for page in sorted(known.keys() | held.keys()):
            expected, got = held.get(page, 0), known.get(page, 0)
            _check(got == expected, f"page {page} has {got} references, but {expected} in the holders' lists")

    def _require_held(self, page: int, times: int) -> None:
        held = self._references[page] if 0 <= page < len(self._references) else 0
        if held < times:
            pool = len(self._references)
            raise ValueError(f"got page {page} {times} time(s), but it is held {held} time(s) (pool of {pool} pages)")

    def _give(self, first: int, length: int) -> None:
        """Adds a free run, merged with the free runs that it touches."""
        if length == 0:
            return
        if (before := self._first_before.get(first)) is not None:
            length += self._drop_run(before)
            first = before
        if first + length in self._length_from:
            length += self._drop_run(first + length)
        self._add_run(first, length)

    def _add_run(self, first: int, length: int) -> None:
        if length:
            self._length_from[first] = length
            self._first_before[first + length] = first
            insort(self._by_length, (length, first))

    def _drop_run(self, first: int) -> int:
        length = self._length_from.pop(first)
        del self._first_before[first + length]
        del self._by_length[bisect_left(self._by_length, (length, first))]
        return length


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of ascending, distinct pages as (first page, length)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def _require_count(count: int) -> None:
    if count < 0:
        raise ValueError(f"got {count} pages, expected a number >= 0")


def _check(holds: bool, message: str) -> None:
    """An assertion that `python -O` keeps."""
    if not holds:
        raise AssertionError(message)
