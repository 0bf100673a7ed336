"""A cut that is kept covers every row of later steps, and is made anew when it would not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_aspire.cuts import SPARE, Cuts
from hf_aspire.kernels import work


def table_of(lengths, queries=1):
    lengths, zeros = np.array(lengths), np.zeros(len(lengths), dtype=int)
    return work.row_table(zeros + queries, lengths - queries, lengths, zeros, zeros, zeros + 1)


def cut(rows, like=None):
    return work.plan_work(rows, queries_per_tile=4, group=4, slots=33, block=64, like=like)


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    changes=st.lists(st.lists(st.sampled_from([1, 1, 1, 1, -1, -20, 17, 40]), min_size=5, max_size=5), max_size=30),
)
def test_kept_work_ends_behind_every_row_and_not_far_behind(lengths, changes):
    cuts = Cuts()
    for change in [[0] * 5, *changes]:
        lengths = [max(1, length + more) for length, more in zip(lengths, change, strict=False)]
        if change[4] == 40:  # a row leaves, or comes
            lengths = lengths[1:] or [500, 70]
        found = cuts.of(0, table_of(lengths), cut)
        items = found.items[: found.pieces]
        assert set(items[:, work.ITEM_ROW]) == set(range(len(lengths)))
        for row, length in enumerate(lengths):
            mine = items[items[:, work.ITEM_ROW] == row]
            mine = mine[mine[:, work.ITEM_BEGIN].argsort()]
            assert mine[0, work.ITEM_BEGIN] == 0 and (mine[1:, work.ITEM_BEGIN] == mine[:-1, work.ITEM_END]).all()
            assert length <= mine[-1, work.ITEM_END] <= length + 2 * SPARE


def test_rows_that_grow_by_a_token_are_cut_once_for_many_steps():
    cuts, made = Cuts(), []

    def note(rows):
        made.append(rows)
        return cut(rows)

    for step in range(2 * (SPARE + 1)):
        for view, length in enumerate((500, 9000)):
            cuts.of(view, table_of([length + step, 700 + step]), note)
    assert len(made) == 2 * 2


def mixture(context, turn):
    """60 drafts that read 7 %, and four rows that verify 16 queries, other ones at every turn."""
    full = (np.arange(64) + turn) % 16 == 0
    return table_of(np.where(full, context + np.arange(64), context // 14), queries=np.where(full, 16, 1))


def test_a_like_step_takes_the_size_of_the_pieces_before(monkeypatch):
    cuts, shares = Cuts(), work._CUTS
    tried = []
    monkeypatch.setattr(work, "_best_size", lambda *a, best=work._best_size: tried.append(a) or best(*a))
    for turn in range(100):
        rows = mixture(7000 + turn, turn)
        found = cuts.of(0, rows, cut)
        searched, best = len(tried), cut(rows)
        monkeypatch.setattr(work, "_CUTS", (found.size.share,))
        same = cut(rows)
        monkeypatch.setattr(work, "_CUTS", shares)
        del tried[searched:]
        assert np.array_equal(found.items, same.items)
        assert best.size.time <= same.size.time <= 1.03 * best.size.time
    assert len(tried) < 20


@pytest.mark.parametrize("other", [mixture(7000, 0)[:60], mixture(7500, 0), mixture(7000, 0)[::16]])
def test_other_steps_are_cut_anew(other):
    cuts = Cuts()
    cuts.of(0, mixture(7000, 0), cut)
    assert np.array_equal(cuts.of(0, other, cut).items, cut(other).items)
    assert cuts.of(0, other, cut).size.total == cut(other).size.total


def test_views_do_not_take_each_others_size():
    cuts, rows = Cuts(), mixture(7000, 0)
    small = cuts.of(0, table_of([500, 700], queries=[1, 5]), cut)
    assert np.array_equal(cuts.of(1, rows, cut).items, cut(rows).items)
    assert cuts.of(0, table_of([500, 700], queries=[1, 5]), cut).size is small.size
