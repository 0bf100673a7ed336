"""Merges the pieces of split tiles, and turns raw scores into token scores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import work
from .mixed_attention import PLAIN, Partials, Variant
from .score_store import in_order, token_at
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
# H200, 2026-11-29, 8B shape: of two rows of 16k tokens 5 us (11 us with 256 tokens and 4 warps), of 32 rows 27 (50).
_SCORED_TOKENS = 64
"""Tokens per program of the score reduction, at least a kernel's block of them."""
_SCORED_WARPS = 2
_SCORED_HEADS = 32
"""Heads that a program of it loads at a time."""


def combine(
    partials: Partials,
    rows: Tensor,
    merges: Tensor,
    output: Tensor,
    group: int,
    tile: Tile,
    scored: bool = False,
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
        scored: Whether scores are wanted of some row.
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
        SCORED=scored,
        SINKS=variant.sinks is not None,
        num_warps=4,
    )


def reduce_scores(
    raw_scores: Tensor,
    row_lse: Tensor,
    rows: Tensor,
    scored_rows: Tensor,
    scores: Tensor,
    unit: int,
    by_maximum: bool,
    window: int = 0,
) -> None:
    """Softmax weights of the scored queries, reduced over heads and averaged over the queries.

    Args:
        raw_scores: As in `mixed_attention`.
        row_lse: `[T, Hq]` float32.
        rows: `[R, ROW_COLUMNS]` int32.
        scored_rows: `[score slots]` int32: the row of every score slot, -1 for none.
        scores: `[score slots, units]` float32; gets the scores of every row's units, and nothing behind them.
        unit: Context tokens per score, a power of two up to 128: the sum of their scores.
        by_maximum: Largest head instead of the mean over heads.
        window: As in `mixed_attention`.
    """
    slots, blocks, kv_heads, lines, block_n = raw_scores.shape
    group = row_lse.shape[1] // kv_heads
    _score_kernel[(triton.cdiv(blocks * block_n, _SCORED_TOKENS), slots)](
        raw_scores,
        row_lse,
        rows,
        scored_rows,
        scores,
        raw_scores.stride(0),
        scores.stride(0),
        window or 1 << 30,
        blocks * block_n,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_BLOCK=min(_SCORED_HEADS, triton.next_power_of_2(kv_heads * group)),
        SCORED_QUERIES=lines // group,
        UNIT=unit,
        TOKENS=_SCORED_TOKENS,
        BLOCK_N=block_n,
        BY_MAXIMUM=by_maximum,
        num_warps=_SCORED_WARPS,
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
    SINKS: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * _MERGE_COLUMNS
    row_index = tl.load(merge + _MERGE_ROW)
    if row_index < 0:
        return
    row = rows + row_index * _ROW_COLUMNS
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    i_query = tl.load(merge + _MERGE_QUERY) + m // GROUP
    i_head = head * GROUP + m % GROUP
    used = (m < (BLOCK_M // GROUP) * GROUP) & (i_query < tl.load(row + _ROW_QUERIES))
    if tl.sum(used.to(tl.int32), 0) == 0:
        return
    slot = tl.load(merge + _MERGE_SLOT).to(tl.int64)
    pieces = tl.load(merge + _MERGE_PIECES)
    token = (tl.load(row + _ROW_TOKEN) + i_query).to(tl.int64)
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
        ahead = i_query - tl.load(row + _ROW_SCORE_FIRST)
        behind = tl.load(row + _ROW_SCORE_STEP) * tl.load(row + _ROW_SCORE_COUNT)  # 0 in rows without scores
        wanted = used & (ahead >= 0) & (ahead < behind)
        tl.store(row_lse + token * (KV_HEADS * GROUP) + i_head, maximum + tl.log2(total), mask=wanted)


@triton.jit
def _score_kernel(
    raw_scores: tl.tensor,
    row_lse: tl.tensor,
    rows: tl.tensor,
    scored_rows: tl.tensor,
    scores: tl.tensor,
    raw_stride: tl.tensor,
    score_stride: tl.tensor,
    window: tl.tensor,
    stored_tokens: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SCORED_QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_MAXIMUM: tl.constexpr,
) -> None:
    slot = tl.program_id(1)
    row_index = tl.load(scored_rows + slot)
    if row_index < 0:
        return
    row = rows + row_index * _ROW_COLUMNS
    length = tl.load(row + _ROW_LENGTH)
    if tl.program_id(0) * TOKENS >= length:
        return
    raw_scores += slot.to(tl.int64) * raw_stride
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    stored = place < stored_tokens  # a multiple of 16, so the mask leaves loads of 16 bytes whole
    i_place = place // BLOCK_N * (KV_HEADS * SCORED_QUERIES * GROUP * BLOCK_N) + place % BLOCK_N
    token = token_at(place, BLOCK_N)
    count = tl.load(row + _ROW_SCORE_COUNT)
    query = tl.load(row + _ROW_SCORE_FIRST)
    score = tl.zeros((TOKENS,), tl.float32)
    for i_scored in tl.static_range(SCORED_QUERIES):
        # Tokens that the query does not see hold anything, and are loaded: a mask of theirs would split the loads.
        heads = tl.where(i_scored < count, KV_HEADS * GROUP, 0)
        position = tl.load(row + _ROW_START) + query
        seen = (token <= position) & (token < length) & (token > position - window)
        p_lse = row_lse + (tl.load(row + _ROW_TOKEN) + query).to(tl.int64) * (KV_HEADS * GROUP)
        by_head = tl.zeros((TOKENS,), tl.float32)
        for block in tl.static_range(0, KV_HEADS * GROUP, HEAD_BLOCK):
            head = block + tl.arange(0, HEAD_BLOCK)
            used = head < heads
            lse = tl.load(p_lse + head, mask=used, other=float("inf"))
            i_raw = ((head // GROUP * SCORED_QUERIES + i_scored) * GROUP + head % GROUP) * BLOCK_N
            p_raw = raw_scores + (i_raw[:, None] + i_place[None, :])
            raw = tl.load(p_raw, mask=used[:, None] & stored[None, :], other=0.0).to(tl.float32)
            weights = tl.where(used[:, None] & seen[None, :], tl.exp2(raw - lse[:, None]), 0.0)
            by_head = tl.maximum(by_head, tl.max(weights, 0)) if BY_MAXIMUM else by_head + tl.sum(weights, 0)
        score += by_head if BY_MAXIMUM else by_head / (KV_HEADS * GROUP)
        query += tl.load(row + _ROW_SCORE_STEP)
    unit = tl.program_id(0) * (TOKENS // UNIT) + tl.arange(0, TOKENS // UNIT)
    mass = tl.sum(tl.reshape(in_order(score / count, TOKENS, BLOCK_N), (TOKENS // UNIT, UNIT)), 1)
    tl.store(scores + slot * score_stride + unit, mass, mask=unit * UNIT < length)
