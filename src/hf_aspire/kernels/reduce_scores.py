"""Turns what the attention pass leaves of scored queries into scores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .score_store import RawScores, decode, discard, in_order
from .table_entry import (
    ROW_COLUMNS,
    ROW_LENGTH,
    ROW_SCORE_COUNT,
    ROW_SCORE_FIRST,
    ROW_SCORE_STEP,
    ROW_START,
    ROW_TOKEN,
    entry,
)

_FEWEST = 16
"""Codes of a line per program, at least: a kernel's block of tokens, or two of them where units are summed. With 64,
two rows took 1 us longer, and 32 rows no less (H200, 2026-11-30)."""
_LINES = 64
"""Lines that a program loads at a time. One warp each: nothing is passed between warps."""


def reduce_scores(
    raw_scores: RawScores,
    row_lse: Tensor,
    rows: Tensor,
    scored_rows: Tensor,
    scores: Tensor,
    unit: int,
    window: int = 0,
) -> None:
    """Softmax weights of the scored queries, summed per unit, averaged over heads and queries.

    Args:
        raw_scores: As in `mixed_attention`, made for scores of this unit; holds anything afterwards.
        row_lse: `[T, Hq]` float32.
        rows: `[R, ROW_COLUMNS]` int32.
        scored_rows: `[score slots]` int32: the row of every score slot, -1 for none.
        scores: `[score slots, units]` float32; gets the scores of every row's units, and nothing behind them.
        unit: Context tokens per score, a power of two up to 64.
        window: As in `mixed_attention`.
    """
    blocks, slots, _ = raw_scores.pieces.shape
    per_block = raw_scores.words * 8
    places = max(_FEWEST, per_block)
    _score_kernel[(triton.cdiv(blocks * per_block, places), slots)](
        raw_scores.pieces,
        row_lse,
        rows,
        scored_rows,
        scores,
        raw_scores.pieces.stride(0),
        raw_scores.pieces.stride(1),
        scores.stride(0),
        window or 1 << 30,
        blocks,
        HEADS=row_lse.shape[1],
        GROUP=raw_scores.group,
        LINE_BLOCK=min(_LINES, triton.next_power_of_2(raw_scores.lines)),
        SCORED_QUERIES=raw_scores.lines // row_lse.shape[1],
        UNIT=unit,
        STORED=raw_scores.unit,
        PLACES=places,
        BLOCK_N=per_block * raw_scores.unit,
        DISCARD=scores.is_cuda,
        num_warps=1,
    )


@triton.jit
def _score_kernel(
    raw_scores: tl.tensor,
    row_lse: tl.tensor,
    rows: tl.tensor,
    scored_rows: tl.tensor,
    scores: tl.tensor,
    block_stride: tl.tensor,
    raw_stride: tl.tensor,
    score_stride: tl.tensor,
    window: tl.tensor,
    blocks: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LINE_BLOCK: tl.constexpr,
    SCORED_QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    STORED: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DISCARD: tl.constexpr,
) -> None:
    PER_BLOCK: tl.constexpr = BLOCK_N // STORED
    BLOCKS: tl.constexpr = PLACES // PER_BLOCK
    LINES: tl.constexpr = SCORED_QUERIES * HEADS
    WORDS: tl.constexpr = PER_BLOCK // 8
    UNITS: tl.constexpr = PLACES * STORED // UNIT
    slot = tl.program_id(1)
    row_index = entry(scored_rows + slot)
    if row_index < 0:
        return
    row = rows + row_index * ROW_COLUMNS
    length = entry(row + ROW_LENGTH)
    first = tl.program_id(0) * (PLACES * STORED)
    if first >= length:
        return
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    raw_scores += first_block * block_stride + slot * raw_stride
    block = tl.arange(0, BLOCKS)
    begin = first + block * BLOCK_N
    word = tl.arange(0, BLOCKS * WORDS)
    i_word = word // WORDS * block_stride + word % WORDS
    there = first_block + word // WORDS < blocks
    count = entry(row + ROW_SCORE_COUNT)
    step = entry(row + ROW_SCORE_STEP)
    query = entry(row + ROW_SCORE_FIRST)
    start = entry(row + ROW_START)
    row_lse += entry(row + ROW_TOKEN).to(tl.int64) * HEADS
    score = tl.zeros((BLOCKS * WORDS, 2, 2, 2), tl.float32)
    for first_line in tl.static_range(0, LINES, LINE_BLOCK):
        line = first_line + tl.arange(0, LINE_BLOCK)
        i_scored = line // GROUP % SCORED_QUERIES
        i_head = line // (GROUP * SCORED_QUERIES) * GROUP + line % GROUP
        used = (line < LINES) & (i_scored < count)
        i_query = query + i_scored * step
        lse = tl.load(row_lse + i_query * HEADS + i_head, mask=used, other=float("inf"))
        peaks = tl.load(
            raw_scores + (LINES * WORDS + line)[:, None] + block[None, :] * block_stride,
            mask=(line < LINES)[:, None] & (first_block + block < blocks)[None, :],
            other=0,
        ).to(tl.float32, bitcast=True)
        # Lines that nobody uses and blocks that nobody wrote hold anything, and are loaded: masks of theirs would have
        # the loads wait for the row, and split them.
        p_words = raw_scores + line[:, None] * WORDS + i_word[None, :]
        words = tl.load(p_words, mask=(line < LINES)[:, None] & there[None, :], other=0)
        position = (start + i_query)[:, None]
        seen = (
            (begin < length)[None, :]
            & (begin[None, :] <= position)
            & (begin[None, :] + BLOCK_N > position - window + 1)
        )
        factor = tl.where(used[:, None] & seen & (peaks > float("-inf")), tl.exp2(peaks - lse[:, None]), 0.0)
        factor = tl.reshape(
            tl.broadcast_to(factor[:, :, None], (LINE_BLOCK, BLOCKS, WORDS)), (LINE_BLOCK, BLOCKS * WORDS)
        )
        score += decode(words, factor)
    score = tl.reshape(score, (PLACES,)) * STORED / (count * HEADS)
    score = in_order(score, PLACES, PER_BLOCK, STORED)
    if UNIT > STORED:
        score = tl.sum(tl.reshape(score, (UNITS, UNIT // STORED)), 1)
    unit = first // UNIT + tl.arange(0, UNITS)
    tl.store(scores + slot * score_stride + unit, score, mask=unit * UNIT < length)
    if DISCARD:
        discard(raw_scores, block_stride, blocks - first_block, tl.max(score, 0), BLOCKS, LINES * (WORDS + 1))
