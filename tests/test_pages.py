"""The page allocator against a brute-force model: reference counts in a list, runs found by scanning."""

from __future__ import annotations

import copy
from itertools import groupby

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_aspire.pages import OutOfPages, PageAllocator


def runs_of(pages: list[int]) -> list[list[int]]:
    """Maximal runs of ascending pages, by the textbook trick that page - rank is constant in a run."""
    keyed = groupby(enumerate(pages), key=lambda item: item[1] - item[0])
    return [[page for _, page in group] for _, group in keyed]


def expected_pages(free: list[int], count: int) -> list[int] | None:
    """The one run that has to be taken, or None where no run is long enough."""
    long_enough = [run for run in runs_of(free) if len(run) >= count]
    return min(long_enough, key=lambda run: (len(run), run[0]))[:count] if long_enough else None


def fewest_runs(free: list[int], count: int) -> int:
    lengths = sorted((len(run) for run in runs_of(free)), reverse=True)
    return next(number for number in range(len(lengths) + 1) if sum(lengths[:number]) >= count)


class Allocation(RuleBasedStateMachine):
    """Live holders are page lists, as in the engine; the counts follow from them alone."""

    @initialize(count=st.integers(0, 40))
    def start(self, count: int) -> None:
        self.count = count
        self.holders: list[list[int]] = []
        self.pages = PageAllocator(count)

    def references(self, page: int) -> int:
        return sum(holder.count(page) for holder in self.holders)

    def free_pages(self) -> list[int]:
        held = {page for holder in self.holders for page in holder}
        return [page for page in range(self.count) if page not in held]

    def unchanged_by(self, error: type[Exception], call: str, argument: object) -> None:
        before = copy.deepcopy(vars(self.pages))
        with pytest.raises(error):
            getattr(self.pages, call)(argument)
        assert vars(self.pages) == before

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        free = self.free_pages()
        assert self.pages.can_allocate(count) == (count <= len(free))
        if count > len(free):
            self.unchanged_by(OutOfPages, "allocate", count)
            return
        got = self.pages.allocate(count)
        assert got == sorted(set(got)) and set(got) <= set(free) and len(got) == count
        if count and (expected := expected_pages(free, count)) is not None:
            assert got == expected
        taken_from = [run for run in runs_of(free) if set(run) & set(got)]
        assert len(taken_from) == fewest_runs(free, count)
        self.holders.append(got)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        prefix = holder[: data.draw(st.integers(0, len(holder)))]
        self.pages.share(prefix)
        self.holders.append(list(prefix))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release_some(self, data: st.DataObject) -> None:
        """Pages of one holder, in any order, or of two holders at once (then shared pages are named twice)."""
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.holders))), min_size=1, max_size=2, unique=True))
        released = []
        for index in chosen:
            holder = self.holders[index]
            keep = data.draw(st.integers(0, len(holder)))
            released += holder[keep:]
            self.holders[index] = holder[:keep]
        self.pages.release(data.draw(st.permutations(released)))

    @rule(count=st.integers(0, 8))
    def grow(self, count: int) -> None:
        self.pages.grow(count)
        self.count += count

    @rule(data=st.data(), call=st.sampled_from(["share", "release"]))
    def name_a_page_that_is_not_held(self, data: st.DataObject, call: str) -> None:
        wrong = data.draw(st.sampled_from([-1, self.count, *self.free_pages()]))
        held = sorted({page for holder in self.holders for page in holder})
        self.unchanged_by(ValueError, call, data.draw(st.permutations([*held, wrong])))
        with pytest.raises(ValueError, match="held"):
            self.pages.is_shared(wrong)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def release_once_too_often(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([page for holder in self.holders for page in holder]))
        self.unchanged_by(ValueError, "release", [page] * (self.references(page) + 1))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pages.check_integrity(self.holders)
        assert self.pages.free == len(self.free_pages())
        for page in {page for holder in self.holders for page in holder}:
            assert self.pages.is_shared(page) == (self.references(page) > 1)


TestAllocation = Allocation.TestCase


def test_best_fit_keeps_the_long_run_whole() -> None:
    pages = PageAllocator(20)
    held = pages.allocate(20)
    pages.release(held[2:5] + held[8:18])
    assert pages.allocate(3) == [2, 3, 4]
    assert pages.allocate(10) == list(range(8, 18))


def test_without_a_long_run_takes_the_fewest() -> None:
    pages = PageAllocator(20)
    held = pages.allocate(20)
    pages.release(held[1:3] + held[5:6] + held[8:12] + held[15:16])
    # 4 + 1 of the free runs [1, 2], [5], [8..11], [15]: the rest of one page fits [5] best
    assert pages.allocate(5) == [5, 8, 9, 10, 11]


def test_neighbours_merge_in_any_order_of_release() -> None:
    pages = PageAllocator(6)
    held = pages.allocate(6)
    for page in (0, 2, 4, 5, 3, 1):
        pages.release([held[page]])
    assert pages.allocate(6) == held


def test_out_of_pages_names_both_numbers() -> None:
    pages = PageAllocator(7)
    pages.allocate(3)
    with pytest.raises(OutOfPages, match=r"\b5\b.*\b4\b"):
        pages.allocate(5)


@pytest.mark.parametrize("call", ["allocate", "grow", "__init__"])
def test_negative_counts_are_refused(call: str) -> None:
    pages = PageAllocator(4)
    with pytest.raises(ValueError, match="-1"):
        getattr(pages, call)(-1)
    assert not pages.can_allocate(-1)


def test_integrity_finds_a_leak_and_a_use_after_free() -> None:
    pages = PageAllocator(8)
    first, second = pages.allocate(3), pages.allocate(2)
    pages.check_integrity([first, second])
    with pytest.raises(AssertionError, match="page 3 has 1 references, but 0"):
        pages.check_integrity([first])
    pages.release(second)
    with pytest.raises(AssertionError, match="page 3 has 0 references, but 1"):
        pages.check_integrity([first, second])
    with pytest.raises(AssertionError, match="page 0 has 1 references, but 2"):
        pages.check_integrity([first, first[:1]])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("_free", 6),
        ("_references", [1, 1, 1, 1, 0, 0, 0, 0]),
        ("_references", [1, 1, -1, 0, 0, 0, 0, 0]),
        ("_length_from", {3: 4}),
        ("_first_before", {}),
        ("_by_length", []),
    ],
)
def test_integrity_finds_every_damaged_part(attribute: str, value: object) -> None:
    pages = PageAllocator(8)
    pages.allocate(3)
    setattr(pages, attribute, value)
    with pytest.raises(AssertionError):
        pages.check_integrity()
