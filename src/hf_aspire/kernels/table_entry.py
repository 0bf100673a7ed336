"""Reads of a step's tables, which every layer repeats, and the tables' columns as the kernels' constants."""

import triton
import triton.language as tl

from . import work

ROW_TOKEN = tl.constexpr(work.ROW_TOKEN)
ROW_QUERIES = tl.constexpr(work.ROW_QUERIES)
ROW_START = tl.constexpr(work.ROW_START)
ROW_LENGTH = tl.constexpr(work.ROW_LENGTH)
ROW_TABLE = tl.constexpr(work.ROW_TABLE)
ROW_SHIFT = tl.constexpr(work.ROW_SHIFT)
ROW_LISTED = tl.constexpr(work.ROW_LISTED)
ROW_SCORE = tl.constexpr(work.ROW_SCORE)
ROW_SCORE_FIRST = tl.constexpr(work.ROW_SCORE_FIRST)
ROW_SCORE_STEP = tl.constexpr(work.ROW_SCORE_STEP)
ROW_SCORE_COUNT = tl.constexpr(work.ROW_SCORE_COUNT)
ROW_COLUMNS = tl.constexpr(work.ROW_COLUMNS)
ITEM_ROW = tl.constexpr(work.ITEM_ROW)
ITEM_QUERY = tl.constexpr(work.ITEM_QUERY)
ITEM_BEGIN = tl.constexpr(work.ITEM_BEGIN)
ITEM_END = tl.constexpr(work.ITEM_END)
ITEM_INDEX = tl.constexpr(work.ITEM_INDEX)
ITEM_PIECES = tl.constexpr(work.ITEM_PIECES)
ITEM_SLOT = tl.constexpr(work.ITEM_SLOT)
ITEM_MERGERS = tl.constexpr(work.ITEM_MERGERS)
ITEM_COLUMNS = tl.constexpr(work.ITEM_COLUMNS)


@triton.jit
def entry(pointer: tl.tensor) -> tl.tensor:
    """A number of a table, kept in the L2 cache for the next layer.

    Keys, values and weights of a layer would drive it out, and a program reads its item, its row and its pages one
    after the other before it can start: of items and rows alone that was 0.8 us of a layer (H200, 2026-11-30, 8B
    shape, 30 drafts and 2 verifies of 16 queries at 16k).
    """
    return tl.load(pointer, eviction_policy="evict_last")
