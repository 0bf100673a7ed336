"""The work list of a step: rows cut into pieces of equal work, planned once on the host for all layers. Pure numpy.

A *row* is n queries over one context. Its queries are tiled so that the heads of a group times the queries of a tile
fit the matrix tile of the kernel; each tile's context is cut into pieces. One *item* is one piece of one tile, and the
kernel's grid is (KV heads, items). Items behind all pieces merge the tiles that were cut (see `combine`). Items and
rows are int32 tables whose columns are named here.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Table = NDArray[np.int32]

# Columns of the row table.
ROW_TOKEN = 0  # first packed token
ROW_QUERIES = 1  # query tokens
ROW_START = 2  # context index of the first query; query i sees 0 ... start + i
ROW_LENGTH = 3  # context tokens; with a list, listed tokens
ROW_TABLE = 4  # row of the page table, or of the lists
ROW_SHIFT = 5  # log2 of the tokens behind one table entry
ROW_LISTED = 6  # 1: the context is a list of units, 0: pages
ROW_SCORE = 7  # score slot, or -1
ROW_SCORE_FIRST = 8  # first scored query
ROW_SCORE_STEP = 9  # distance between scored queries
ROW_SCORE_COUNT = 10  # scored queries
ROW_COLUMNS = 12

# Columns of the item table.
ITEM_ROW = 0  # row, or -1: nothing to do
ITEM_QUERY = 1  # first query of the tile
ITEM_BEGIN = 2  # first context token of the piece
ITEM_END = 3  # token behind its last one, an upper bound: the kernel clips it to the row's length
ITEM_INDEX = 4  # which of the tile's pieces it is; or which of its mergers
ITEM_PIECES = 5  # pieces of the tile; 1: the item writes the output itself
ITEM_SLOT = 6  # where the tile's first partial result goes, the others behind it; -1: a single piece
ITEM_MERGERS = 7  # 0: a piece; else a merger, one of so many of the tile
ITEM_COLUMNS = 8

MERGED_ROWS = 8
"""Rows of a tile (heads of a group times queries) per merger: many small programs hide the latency of reading the
pieces."""

# Costs in tokens that a program reads in the same time while all slots are taken: about 32 per microsecond with two
# programs on each of the 132 multiprocessors of an H200. Fitted there to 149 cuts of 17 batches (mixed steps, lists,
# full rows of 4k to 96k tokens), 2026-12-01: 3.6 % from what was measured on average, up to a factor for every batch.
# The sizes that are chosen take 0.6 % longer than the best that was tried on average, 3.8 % at most.
_ITEM_COST = 48  # start of a program until its pipeline is full
_ROW_COST = 5  # a row of a piece's result, which is written and read again
_MERGE_COST = 48  # merging pieces
_PIECE_COST = 4  # its time per piece
# Programs share the memory's bandwidth: with a share of the slots taken they read faster by share ** -_FASTER.
_FASTER = 0.8
_FASTEST = 1.8
_CUTS = (2.0, 1.5, 1.33, 1.2, 1.05, 1.0, 0.75, 0.6, 0.45, 0.33, 0.25)
"""Sizes of a piece that are tried, in shares of a slot, descending."""
_ALIKE = 0.02
"""By how much of it the work of steps differs that take the same size."""


class Size(NamedTuple):
    """A size of pieces, and what it was chosen for.

    Attributes:
        share: The size, in shares of a slot.
        total: Context tokens of all tiles.
        time: When all should be merged, in tokens that a program reads meanwhile.
    """

    share: float
    total: int
    time: float


@dataclass(frozen=True)
class Work:
    """What one launch does.

    Attributes:
        items: `[bucket, ITEM_COLUMNS]`, pieces, longest first, then mergers, then unused entries with row -1.
        partials: Slots of partial results, padded to a bucket.
        used_items: Items that hold work.
        pieces: Those that are pieces.
        size: How large the pieces are.
    """

    items: Table
    partials: int
    used_items: int
    pieces: int
    size: Size


def row_table(
    queries: ArrayLike,
    starts: ArrayLike,
    lengths: ArrayLike,
    tables: ArrayLike,
    shifts: ArrayLike,
    listed: ArrayLike,
    tokens: ArrayLike | None = None,
) -> Table:
    """The row table `[rows, ROW_COLUMNS]`.

    Args:
        queries: Queries per row, at least 1.
        starts: Context index of every row's first query.
        lengths: Context tokens per row.
        tables: Row of the page table or of the lists.
        shifts: log2 of the tokens behind one table entry: of the page size, or of a list's granule.
        listed: Whether the row's context is a list.
        tokens: First packed token of every row; None: the rows are packed one after the other.
    """
    count = np.asarray(queries, dtype=np.int32)
    rows = np.zeros((len(count), ROW_COLUMNS), dtype=np.int32)
    rows[:, ROW_TOKEN] = count.cumsum() - count if tokens is None else tokens
    rows[:, ROW_QUERIES] = count
    rows[:, ROW_START] = starts
    rows[:, ROW_LENGTH] = lengths
    rows[:, ROW_TABLE] = tables
    rows[:, ROW_SHIFT] = shifts
    rows[:, ROW_LISTED] = listed
    rows[:, ROW_SCORE] = -1
    rows[:, ROW_SCORE_STEP] = 1
    return rows


def ask_scores(rows: Table, which: NDArray[np.int64], slots: NDArray[np.int64], spans: NDArray[np.int64]) -> None:
    """Has some rows of a table scored, which `row_table` leaves without.

    Args:
        rows: Row table, changed.
        which: `[n]` rows.
        slots: `[n]` their score slots.
        spans: `[n, 3]` their first scored query, the distance to the next, and how many. One or two must begin with
            the row's first.

    Raises:
        ValueError: One or two that do not.
    """
    if spans[:, 0].any() and ((spans[:, 0] > 0) & (spans[:, 2] <= 2)).any():
        raise ValueError(
            f"ask_scores: got {spans.tolist()}, expected one or two scored queries to begin with the first"
        )
    rows[which, ROW_SCORE] = slots
    rows[which, ROW_SCORE_FIRST : ROW_SCORE_COUNT + 1] = spans


def plan_work(
    rows: Table,
    queries_per_tile: int,
    group: int,
    slots: int,
    block: int,
    window: int = 0,
    slack: int = 0,
    room: float = math.inf,
    like: Work | None = None,
) -> Work:
    """Cuts rows into pieces of equal work.

    Args:
        rows: Row table; starts and lengths may be upper bounds of what the device will find.
        queries_per_tile: Queries that share one pass over the context.
        group: Query heads per KV head.
        slots: Items that run at a time (see `Tile.slots`).
        block: Context tokens that the kernel reads at a time; pieces are multiples of it.
        window: Tokens that a query sees, itself included; 0: all. Lists have no window.
        slack: By how much a start may exceed the true one.
        room: Items to keep to; where no cut that is tried does, the result has more, and no end in time.
        like: Work of a step before. No other size is tried where pieces and mergers of that one's are as many as they
            were, and all tiles are about as long together as when it was chosen.

    Returns:
        The work; where every piece covers its tile, no mergers.
    """
    row, first, begin, end = _tiles(rows, queries_per_tile, block, window, slack)
    work = np.maximum(end - begin, 1)
    # Of a tile that is cut.
    mergers = -(-np.minimum(queries_per_tile, rows[row, ROW_QUERIES] - first) * group // MERGED_ROWS)
    size, pieces = _size_of(like, work, mergers, slots, block) or _best_size(work, mergers, slots, block, room)
    split = pieces > 1
    ends = np.where(split, pieces, 0).cumsum()
    slot = np.where(split, ends - pieces, -1)

    tile, index = _repeated(pieces)
    blocks, of, start = -(-work // block)[tile], pieces[tile], begin[tile]
    low = start + blocks * index // of * block
    high = np.minimum(start + blocks * (index + 1) // of * block, end[tile])
    columns = np.array([row[tile], first[tile], low, high, index, of, slot[tile], 0 * tile])
    items, count = columns.take((low - high).argsort(kind="stable"), 1), len(tile)
    if split.any():
        tile, index = _repeated(np.where(split, mergers, 0))
        none = 0 * tile
        merging = [row[tile], first[tile], none, none, index, pieces[tile], slot[tile], mergers[tile]]
        items = np.concatenate([items, merging], 1)
    used = items.shape[1]
    table = np.full((bucket(used), ITEM_COLUMNS), -1, dtype=np.int32)
    table[:used] = items.T
    return Work(table, bucket(int(ends[-1])) if split.any() else 0, used, count, size)


def _repeated(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every index as often as it counts, and how often it was there before."""
    index = np.arange(len(counts)).repeat(counts)
    return index, np.arange(len(index)) - (counts.cumsum() - counts)[index]


def _size_of(
    like: Work | None, work: NDArray[np.int64], mergers: NDArray[np.int64], slots: int, block: int
) -> tuple[Size, NDArray[np.int64]] | None:
    """The size of other work and the pieces per tile that it gives, or None where that is not alike."""
    total = int(work.sum())
    if like is None or abs(total - like.size.total) > _ALIKE * like.size.total:
        return None
    pieces = -(-work // _tokens_of(like.size.share, total, slots, block))
    count = int(pieces.sum())
    same = count == like.pieces and count + int(mergers[pieces > 1].sum()) == like.used_items
    return (like.size, pieces) if same else None


def _tokens_of(share: float, total: int, slots: int, block: int) -> int:
    """Context tokens of a piece of that size, a multiple of the block."""
    return max(-(-int(total / slots * share) // block), 1) * block


def _best_size(
    work: NDArray[np.int64], mergers: NDArray[np.int64], slots: int, block: int, room: float
) -> tuple[Size, NDArray[np.int64]]:
    """The size whose longest-first schedule ends first, and the pieces per tile."""
    total = int(work.sum())
    cuts = -(-work // np.array([_tokens_of(share, total, slots, block) for share in _CUTS])[:, None])
    split, rows = cuts > 1, MERGED_ROWS * mergers
    counts, merging, most = cuts.sum(1).tolist(), (split @ mergers).tolist(), cuts.max(1).tolist()
    costs = (_ITEM_COST * cuts.sum(1) + _ROW_COST * ((split * cuts) @ rows)).tolist()
    taken = np.arange(slots, 0, -1)  # slots that are, before each end
    speed = np.minimum((slots / taken) ** _FASTER, _FASTEST)
    shortest, best, tried = math.inf, 0, 0
    for index, count in enumerate(counts):
        if count == tried:  # no tile has fewer pieces than before, so each has as many
            continue
        tried = count
        if count + merging[index] > room:
            break
        merge = _MERGE_COST + _PIECE_COST * most[index] if merging[index] else 0
        if (total + costs[index]) / slots + merge > shortest:
            break  # even if all slots were taken to the end; smaller pieces would take longer still
        pieces = cuts[index]
        ends = _ends((work / pieces + _ITEM_COST + _ROW_COST * split[index] * rows).repeat(pieces), slots)
        ends[1:] -= ends[:-1]  # from each end to the next
        duration = float((ends / speed).sum()) + merge
        if duration < shortest:
            shortest, best = duration, index
    return Size(_CUTS[best], total, shortest), cuts[best]


def _ends(lengths: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """When each of `slots` workers ends, ascending, if all read as fast and each takes the longest piece left."""
    lengths.sort()
    waiting = len(lengths) - slots
    if waiting <= 0:
        return np.concatenate([np.zeros(-waiting), lengths])
    ends = lengths[waiting:].tolist()  # ascending, so a heap already
    for length in lengths[:waiting][::-1].tolist():
        heapq.heapreplace(ends, ends[0] + length)
    return np.sort(ends)


def bucket(count: int, least: int = 16) -> int:
    """The smallest of `least` times 1, 1.5, 2, 3, 4, 6, ... that holds `count`."""
    size = least
    while size < count:
        if size * 3 // 2 >= count:
            return size * 3 // 2
        size *= 2
    return size


def _tiles(
    rows: Table, queries_per_tile: int, block: int, window: int, slack: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Row, first query and context begin and end of every query tile."""
    wide = rows.astype(np.int64)
    queries, start, length = wide[:, ROW_QUERIES], wide[:, ROW_START], wide[:, ROW_LENGTH]
    tiles = -(-queries // queries_per_tile)
    row = np.arange(len(rows)).repeat(tiles)
    first = (np.arange(len(row)) - (tiles.cumsum() - tiles)[row]) * queries_per_tile
    start = start[row]
    end = np.minimum(length[row], start + np.minimum(first + queries_per_tile, queries[row]))
    begin = np.zeros_like(end)
    if window:
        low = np.maximum(0, start - slack + first - window + 1) // block * block
        begin = np.where(rows[row, ROW_LISTED] > 0, 0, np.minimum(low, end))
    return row, first, begin, end
