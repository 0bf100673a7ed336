"""Merges the pieces of split tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import work
from .mixed_attention import PLAIN, Partials, Variant
from .score_store import RawScores, tile_query
from .table_entry import entry
from .tiles import Tile

_LOG2E = tl.constexpr(1.4426950408889634)
_ROW_TOKEN = tl.constexpr(work.ROW_TOKEN)
_ROW_QUERIES = tl.constexpr(work.ROW_QUERIES)
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
