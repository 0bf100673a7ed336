"""The work list of a step: rows cut into pieces of equal work, planned once on the host for all layers. Pure numpy.

A *row* is n queries over one context. Its queries are tiled so that the heads of a group times the queries of a tile
fit the matrix tile of the kernel; each tile's context is cut into pieces. One *item* is one piece of one tile, and the
kernel's grid is (KV heads, items). Items, rows and merges are int32 tables whose columns are named here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

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
ITEM_SLOT = 4  # where its partial result goes
ITEM_PIECES = 5  # pieces of the tile; 1: the item writes the output itself
ITEM_COLUMNS = 8

# Columns of the merge table: one entry per tile of more than one piece.
MERGE_ROW = 0  # row, or -1: nothing to do
MERGE_QUERY = 1  # first query of the tile
MERGE_SLOT = 2  # first partial result
MERGE_PIECES = 3
MERGE_COLUMNS = 4


# Costs in tokens that a program reads in the same time while all slots are taken: about 32 per microsecond with two
# programs on each of the 132 multiprocessors of an H200. Fitted there to 41 cuts of mixed steps and full rows of 8k to
# 96k tokens, 2026-11-29: 2.6 % from what was measured on average, 11 % at most, up to a factor for every mixture.
_ITEM_COST = 96  # start of a program until its pipeline is full
_MERGE_COST = 96  # the launch that merges pieces
_PIECE_COST = 4  # its time per piece
# Programs share the memory's bandwidth: with a share of the slots taken they read faster by share ** -_FASTER.
_FASTER = 0.7
_FASTEST = 2.0
_CUTS = (2.0, 1.5, 1.33, 1.2, 1.05, 1.0, 0.75, 0.6, 0.45, 0.33, 0.25)
"""Sizes of a piece that are tried, in shares of a slot."""
_MOST_ITEMS = 8  # pieces per slot beyond which nothing is gained


@dataclass(frozen=True)
class Work:
    """What one launch does, and how its tiles are merged.

    Attributes:
        items: `[bucket, ITEM_COLUMNS]`, longest pieces first, unused entries with row -1.
        merges: `[bucket, MERGE_COLUMNS]`, unused entries with row -1.
        partials: Slots of partial results, padded to a bucket.
        used_items: Items that hold work.
        used_merges: Tiles of more than one piece.
    """

    items: Table
    merges: Table
    partials: int
    used_items: int
    used_merges: int


def row_table(
    queries: ArrayLike,
    starts: ArrayLike,
    lengths: ArrayLike,
    tables: ArrayLike,
    shifts: ArrayLike,
    listed: ArrayLike,
    scored: Sequence[tuple[int, ...]] | None = None,
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
        scored: Scored queries per row, evenly spaced and ascending; empty where none are wanted. One or two must
            begin with the row's first. Score slots are given in row order.
        tokens: First packed token of every row; None: the rows are packed one after the other.
    """
    count = np.asarray(queries, dtype=np.int32)
    rows = np.zeros((len(count), ROW_COLUMNS), dtype=np.int32)
    rows[:, ROW_TOKEN] = np.cumsum(count) - count if tokens is None else tokens
    rows[:, ROW_QUERIES] = count
    rows[:, ROW_START] = starts
    rows[:, ROW_LENGTH] = lengths
    rows[:, ROW_TABLE] = tables
    rows[:, ROW_SHIFT] = shifts
    rows[:, ROW_LISTED] = listed
    rows[:, ROW_SCORE] = -1
    rows[:, ROW_SCORE_STEP] = 1
    slot = 0
    for row, wanted in zip(rows, scored or (), strict=False):
        if wanted:
            if len(wanted) <= 2 and wanted[0] != 0:
                raise ValueError(f"row_table: got scored queries {wanted}, expected the first query and one other")
            row[ROW_SCORE] = slot
            row[ROW_SCORE_FIRST] = wanted[0]
            row[ROW_SCORE_STEP] = max(1, wanted[1] - wanted[0]) if len(wanted) > 1 else 1
            row[ROW_SCORE_COUNT] = len(wanted)
            slot += 1
    return rows


def plan_work(
    rows: Table,
    queries_per_tile: int,
    slots: int,
    block: int,
    window: int = 0,
    slack: int = 0,
) -> Work:
    """Cuts rows into pieces of equal work.

    Args:
        rows: Row table; starts and lengths may be upper bounds of what the device will find.
        queries_per_tile: Queries that share one pass over the context.
        slots: Items that run at a time (see `Tile.slots`).
        block: Context tokens that the kernel reads at a time; pieces are multiples of it.
        window: Tokens that a query sees, itself included; 0: all. Lists have no window.
        slack: By how much a start may exceed the true one.

    Returns:
        The work; where every piece covers its tile, no merges.
    """
    row, first, begin, end = _tiles(rows, queries_per_tile, block, window, slack)
    work = np.maximum(end - begin, 1)
    pieces = _pieces(work, slots, block)
    slot_of = np.where(pieces > 1, np.cumsum(np.where(pieces > 1, pieces, 0)) - pieces, -1)

    tile = np.repeat(np.arange(len(row)), pieces)
    index = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    blocks = -(-work // block)[tile]
    split = pieces[tile]
    low = begin[tile] + blocks * index // split * block
    high = np.minimum(begin[tile] + blocks * (index + 1) // split * block, end[tile])
    slot = np.where(split > 1, slot_of[tile] + index, -1)
    columns = np.stack([row[tile], first[tile], low, high, slot, split], 1)
    order = np.argsort(low - high, kind="stable")
    items = _padded(columns[order], ITEM_COLUMNS)

    merged = pieces > 1
    merges = _padded(np.stack([row, first, slot_of, pieces], 1)[merged], MERGE_COLUMNS)
    partials = bucket(int(pieces[merged].sum())) if merged.any() else 0
    return Work(items, merges, partials, len(tile), int(merged.sum()))


def _pieces(work: NDArray[np.int64], slots: int, block: int) -> NDArray[np.int64]:
    """Pieces per tile: the cut whose longest-first schedule ends first."""
    share = work.sum() / slots
    taken = np.arange(slots, 0, -1)  # slots that are, before each end
    speed = np.minimum((slots / taken) ** _FASTER, _FASTEST)
    best: tuple[float, NDArray[np.int64]] | None = None
    tried: NDArray[np.int64] | None = None
    for cut in _CUTS:
        piece = max(-(-int(share * cut) // block), 1) * block
        pieces = -(-work // piece)
        if tried is not None and np.array_equal(pieces, tried):
            continue
        if best is not None and len(pieces) + _MOST_ITEMS * slots < pieces.sum():
            break
        tried = pieces
        merging = float(_MERGE_COST + _PIECE_COST * pieces.max()) if (pieces > 1).any() else 0.0
        duration = float((np.diff(_ends(work, pieces, slots), prepend=0.0) / speed).sum()) + merging
        if best is None or duration < best[0]:
            best = duration, pieces
    assert best is not None
    return best[1]


def _ends(work: NDArray[np.int64], pieces: NDArray[np.int64], slots: int) -> NDArray[np.float64]:
    """When each of `slots` workers ends, ascending, if all read as fast and each takes the longest piece left."""
    lengths = np.repeat(work / pieces, pieces) + _ITEM_COST
    lengths[::-1].sort()
    ends = np.zeros(slots)
    ends[: len(lengths)] = lengths[:slots]
    ends = ends[::-1]
    if len(lengths) > slots:
        heap = ends.tolist()  # ascending, so a heap already
        for length in lengths[slots:].tolist():
            heapq.heapreplace(heap, heap[0] + length)
        ends = np.sort(heap)
    return ends


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
    queries = rows[:, ROW_QUERIES].astype(np.int64)
    tiles = -(-queries // queries_per_tile)
    row = np.repeat(np.arange(len(rows)), tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * queries_per_tile
    last = np.minimum(first + queries_per_tile, queries[row]) - 1
    start = rows[row, ROW_START].astype(np.int64)
    end = np.minimum(rows[row, ROW_LENGTH], start + last + 1)
    begin = np.zeros_like(end)
    if window:
        low = np.maximum(0, start - slack + first - window + 1) // block * block
        begin = np.where(rows[row, ROW_LISTED] > 0, 0, np.minimum(low, end))
    return row, first, begin, end


def _padded(entries: NDArray[np.int64], columns: int) -> Table:
    table = np.full((bucket(len(entries)), columns), -1, dtype=np.int32)
    table[: len(entries), : entries.shape[1]] = entries
    return table
