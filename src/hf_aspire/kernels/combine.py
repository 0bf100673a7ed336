"""Merges the pieces of split tiles, and turns raw scores into token scores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import work
from .mixed_attention import PLAIN, Partials, Variant
from .score_store import RawScores, decode, in_order, tile_query
from .table_entry import entry
from .tiles import Tile

_LOG2E = tl.constexpr(1.4426950408889634)
_ROW_TOKEN = tl.constexpr(work.ROW_TOKEN)
_ROW_QUERIES = tl.constexpr(work.ROW_QUERIES)
_ROW_START = tl.constexpr(work.ROW_START)
_ROW_LENGTH = tl.constexpr(work.ROW_LENGTH)
_ROW_SCORE_FIRST = tl.constexpr(work.ROW_SCORE_FIRST)
_ROW_SCORE_STEP = tl.constexpr(work.ROW_SCORE_STEP)
_ROW_SCORE_COUNT = tl.constexpr(work.ROW_SCORE_COUNT)
_ROW_COLUMNS = tl.constexpr(work.ROW_COLUMNS)
_MERGE_ROW = tl.constexpr(work.MERGE_ROW)
_MERGE_QUERY = tl.constexpr(work.MERGE_QUERY)
_MERGE_SLOT = tl.constexpr(work.MERGE_SLOT)
_MERGE_PIECES = tl.constexpr(work.MERGE_PIECES)
_MERGE_COLUMNS = tl.constexpr(work.MERGE_COLUMNS)

_MERGED_ROWS = 4
"""Rows of a tile per program: many small programs hide the latency of reading the pieces."""
_LOOKED = 16
"""Pieces whose sums are read at a time."""
_AHEAD = 8
"""Pieces whose results are read at a time: one after the other, each would take a round trip to memory."""
_SCORED_PLACES = 64
"""Codes of a line per program of the score reduction, at least a kernel's block of them."""
_SCORED_LINES = 64
"""Lines that a program of it loads at a time. One warp each: nothing is passed between warps."""


def combine(
    partials: Partials,
    rows: Tensor,
    merges: Tensor,
    output: Tensor,
    group: int,
    tile: Tile,
    raw_scores: RawScores | None = None,
    variant: Variant = PLAIN,
) -> None:
    """Merges the pieces of every split tile into `output`.

    Args:
        partials: What `mixed_attention` left; gets the final log2-sum-exp2 of scored rows.
        rows: `[R, ROW_COLUMNS]` int32.
        merges: `[bucket, MERGE_COLUMNS]` int32.
        output: `[T, Hq, Dv]`.
        group: Query heads per KV head.
        tile: As in `mixed_attention`.
        raw_scores: As in `mixed_attention`.
        variant: As in `mixed_attention`.
    """
    kv_heads, value_size = partials.output.shape[1], partials.output.shape[3]
    grid = (kv_heads, merges.shape[0], tile.block_m // _MERGED_ROWS)
    _combine_kernel[grid](
        partials.output,
        partials.lse,
        partials.row_lse,
        rows,
        merges,
        output,
        variant.sinks if variant.sinks is not None else partials.lse,
        output.stride(0),
        output.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        DV=value_size,
        DV_PAD=triton.next_power_of_2(value_size),
        BLOCK_M=tile.block_m,
        ROWS=_MERGED_ROWS,
        LOOKED=_LOOKED,
        AHEAD=_AHEAD,
        SCORED=raw_scores is not None,
        FEW=raw_scores is not None and raw_scores.few,
        SINKS=variant.sinks is not None,
        num_warps=4,
    )


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
        raw_scores: As in `mixed_attention`, made for scores of this unit.
        row_lse: `[T, Hq]` float32.
        rows: `[R, ROW_COLUMNS]` int32.
        scored_rows: `[score slots]` int32: the row of every score slot, -1 for none.
        scores: `[score slots, units]` float32; gets the scores of every row's units, and nothing behind them.
        unit: Context tokens per score, a power of two up to 64.
        window: As in `mixed_attention`.
    """
    blocks, slots, _ = raw_scores.pieces.shape
    per_block = raw_scores.words * 8
    places = max(_SCORED_PLACES, per_block)
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
        LINE_BLOCK=min(_SCORED_LINES, triton.next_power_of_2(raw_scores.lines)),
        SCORED_QUERIES=raw_scores.lines // row_lse.shape[1],
        UNIT=unit,
        STORED=raw_scores.unit,
        PLACES=places,
        BLOCK_N=per_block * raw_scores.unit,
        num_warps=1,
    )


@triton.jit
def _combine_kernel(
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
    row_lse: tl.tensor,
    rows: tl.tensor,
    merges: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    LOOKED: tl.constexpr,
    AHEAD: tl.constexpr,
    SCORED: tl.constexpr,
    FEW: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * _MERGE_COLUMNS
    row_index = entry(merge + _MERGE_ROW)
    if row_index < 0:
        return
    row = rows + row_index * _ROW_COLUMNS
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    i_query = tile_query(row, entry(merge + _MERGE_QUERY), m, GROUP, BLOCK_M, FEW)
    i_head = head * GROUP + m % GROUP
    used = (m < (BLOCK_M // GROUP) * GROUP) & (i_query < entry(row + _ROW_QUERIES))
    if tl.sum(used.to(tl.int32), 0) == 0:
        return
    slot = entry(merge + _MERGE_SLOT).to(tl.int64)
    pieces = entry(merge + _MERGE_PIECES)
    token = (entry(row + _ROW_TOKEN) + i_query).to(tl.int64)
    dv = tl.arange(0, DV_PAD)
    column = used[:, None] & (dv < DV)[None, :]

    # The maximum first: the sum then has no chain from piece to piece, and many loads are on their way at a time.
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:
        maximum = tl.load(sinks + i_head, mask=used, other=float("-inf")) * _LOG2E
    index = tl.arange(0, LOOKED)
    for first in range(0, pieces, LOOKED):
        i_lse = ((slot + first + index[None, :]) * KV_HEADS + head) * BLOCK_M + m[:, None]
        wanted = used[:, None] & (first + index[None, :] < pieces)
        maximum = tl.maximum(maximum, tl.max(tl.load(partial_lse + i_lse, mask=wanted, other=float("-inf")), 1))
    base = tl.where(maximum == float("-inf"), 0.0, maximum)  # no piece held a token
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        total += tl.exp2(tl.load(sinks + i_head, mask=used, other=float("-inf")) * _LOG2E - base)
    result = tl.zeros((ROWS, DV_PAD), tl.float32)
    for first in range(0, pieces, AHEAD):
        for ahead in tl.static_range(AHEAD):
            inside = m * 0 + first + ahead < pieces
            i_partial = ((slot + first + ahead) * KV_HEADS + head) * BLOCK_M + m
            lse = tl.load(partial_lse + i_partial, mask=used & inside, other=float("-inf"))
            part = tl.load(
                partial_output + (i_partial * DV)[:, None] + dv[None, :], mask=column & inside[:, None], other=0.0
            )
            weight = tl.exp2(lse - base)
            total += weight
            result += part * weight[:, None]
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    p_output = output + token * output_token_stride + i_head * output_head_stride
    tl.store(p_output[:, None] + dv[None, :], result.to(output.dtype.element_ty), mask=column)
    if SCORED:
        ahead = i_query - entry(row + _ROW_SCORE_FIRST)
        behind = entry(row + _ROW_SCORE_STEP) * entry(row + _ROW_SCORE_COUNT)  # 0 in rows without scores
        wanted = used & (ahead >= 0) & (ahead < behind)
        tl.store(row_lse + token * (KV_HEADS * GROUP) + i_head, maximum + tl.log2(total), mask=wanted)


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
    LINE_BLOCK: tl.constexpr,
    SCORED_QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    STORED: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    row = rows + row_index * _ROW_COLUMNS
    length = entry(row + _ROW_LENGTH)
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
    count = entry(row + _ROW_SCORE_COUNT)
    step = entry(row + _ROW_SCORE_STEP)
    query = entry(row + _ROW_SCORE_FIRST)
    start = entry(row + _ROW_START)
    row_lse += entry(row + _ROW_TOKEN).to(tl.int64) * HEADS
    score = tl.zeros((BLOCKS * WORDS, 2, 2, 2), tl.float32)
    for first_line in tl.static_range(0, LINES, LINE_BLOCK):
        line = first_line + tl.arange(0, LINE_BLOCK)
        i_scored = line // HEADS
        used = (line < LINES) & (i_scored < count)
        i_query = query + i_scored * step
        lse = tl.load(row_lse + i_query * HEADS + line % HEADS, mask=used, other=float("inf"))
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
