"""The work list covers every row's context once, in pieces of about equal work."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_aspire.kernels import work


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=12),
    per_tile=st.integers(1, 16),
    group=st.integers(1, 16),
    slots=st.integers(1, 64),
    window=st.sampled_from([0, 1, 100]),
    room=st.just(math.inf) | st.integers(0, 80),
)
def test_pieces_cover_what_each_tile_sees_and_mergers_the_rows_of_those_that_are_cut(
    rows, per_tile, group, slots, window, room
):
    queries = np.array([q for q, _ in rows])
    starts = np.array([s for _, s in rows])
    zeros = np.zeros_like(queries)
    table = work.row_table(queries, starts, starts + queries, zeros, zeros + 4, zeros)
    plan = work.plan_work(table, per_tile, group, slots, block=32, window=window, room=room)
    if plan.size.time < math.inf:
        assert plan.used_items <= room
    pieces, mergers = plan.items[: plan.pieces], plan.items[plan.pieces : plan.used_items]
    assert (pieces[:, work.ITEM_MERGERS] == 0).all() and (mergers[:, work.ITEM_MERGERS] > 0).all()
    assert (plan.items[plan.used_items :] == -1).all()
    slots = []
    for i, (count, start) in enumerate(rows):
        for first in range(0, count, per_tile):
            mine, merging = (of_tile(items, i, first) for items in (pieces, mergers))
            mine = mine[np.argsort(mine[:, work.ITEM_BEGIN])]
            end = start + min(first + per_tile, count)
            assert (mine[1:, work.ITEM_BEGIN] == mine[:-1, work.ITEM_END]).all()
            assert mine[-1, work.ITEM_END] == end
            begin = mine[0, work.ITEM_BEGIN]
            assert (
                begin == 0
                if not window
                else max(0, start + first - window + 1) - 32 < begin <= max(0, start + first - window + 1)
            )
            assert (mine[:, work.ITEM_BEGIN] % 32 == 0).all()
            assert (mine[:, work.ITEM_PIECES] == len(mine)).all()
            assert (mine[:, work.ITEM_INDEX] == range(len(mine))).all()
            if len(mine) == 1:
                assert mine[0, work.ITEM_SLOT] == -1 and len(merging) == 0
                continue
            used = min(per_tile, count - first) * group
            assert (len(merging) - 1) * work.MERGED_ROWS < used <= len(merging) * work.MERGED_ROWS
            assert (merging[:, work.ITEM_INDEX] == range(len(merging))).all()
            assert (merging[:, work.ITEM_MERGERS] == len(merging)).all()
            assert (merging[:, work.ITEM_PIECES] == len(mine)).all()
            assert {*merging[:, work.ITEM_SLOT], *mine[:, work.ITEM_SLOT]} == {mine[0, work.ITEM_SLOT]}
            slots += (mine[:, work.ITEM_SLOT] + mine[:, work.ITEM_INDEX]).tolist()
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= plan.partials


def of_tile(items, row, first):
    return items[(items[:, work.ITEM_ROW] == row) & (items[:, work.ITEM_QUERY] == first)]


@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=30),
    slots=st.integers(1, 64),
    room=st.integers(0, 130),
)
def test_less_room_never_ends_sooner_and_what_fits_is_left_as_it_is(lengths, slots, room):
    best, cut = plan_of([1] * len(lengths), lengths, slots), plan_of([1] * len(lengths), lengths, slots, room)
    if best.used_items <= room:
        assert np.array_equal(best.items, cut.items) and best.size.time == cut.size.time
    else:
        assert cut.size.time >= best.size.time
    if room < len(lengths):
        assert cut.size.time == math.inf


def test_work_is_cut_to_fit_where_that_hardly_takes_longer():
    best = plan_of([1] * 4, [8192] * 4, 33)
    fewer = plan_of([1] * 4, [8192] * 4, 33, best.used_items - 1)
    assert (best.pieces, best.used_items) == (32, 36) and (fewer.pieces, fewer.used_items) == (28, 32)
    assert best.size.time < fewer.size.time < 1.05 * best.size.time
    assert plan_of([1] * 4, [8192] * 4, 33, 3).size.time == math.inf


def lengths_of(plan):
    items = plan.items[: plan.pieces]
    return items[:, work.ITEM_END] - items[:, work.ITEM_BEGIN]


def plan_of(queries, lengths, slots, room=math.inf):
    queries, lengths = np.array(queries), np.array(lengths)
    zeros = np.zeros_like(lengths)
    table = work.row_table(queries, lengths - queries, lengths, zeros, zeros + 4, zeros)
    return work.plan_work(table, 8, 4, slots, block=64, room=room)


def test_work_is_split_by_length_not_by_row():
    """A verify row of 32k beside 28 drafts of 2k: the slots end together."""
    size = lengths_of(plan_of([1] * 28 + [8] * 4, [2294] * 28 + [32768] * 4, slots=33))
    assert (np.diff(size) <= 0).all(), "longest first"
    ends = np.zeros(33)
    for length in size:
        ends[ends.argmin()] += length
    assert ends.max() <= 1.1 * size.sum() / 33


def test_a_single_row_fills_the_device():
    assert 32 <= len(lengths_of(plan_of([1], [32768], slots=33))) <= 33


def test_few_rows_are_cut_so_that_one_wave_of_programs_reads_them():
    """20 items would leave a third of the slots empty, and two programs on some multiprocessors: 35 % slower."""
    assert len(lengths_of(plan_of([8] * 4, [32768] * 4, slots=33))) == 32


def test_short_lists_stay_whole_beside_long_rows():
    """The last programs read faster: cutting every list, to end at the same time, costs more than it gains."""
    plan = plan_of([1] * 28 + [8] * 4, [2294] * 28 + [32768] * 4, slots=33)
    assert len(set(plan.items[plan.pieces : plan.used_items, work.ITEM_ROW])) == 4


def test_rows_that_fill_the_device_are_left_whole():
    plan = plan_of([1] * 32, [16384] * 32, slots=33)
    assert plan.used_items == plan.pieces == 32 and plan.partials == 0


def test_buckets_grow_by_half_steps():
    assert [work.bucket(n) for n in (0, 16, 17, 24, 25, 33, 49, 97)] == [16, 16, 24, 24, 32, 48, 64, 128]
