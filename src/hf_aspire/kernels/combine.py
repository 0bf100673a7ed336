"""Merges the pieces of split tiles, in the launch that computes them.

Pieces count themselves, and mergers wait until their tile's are complete. They stand behind all pieces in the work
list, and programs start in the list's order, so what they wait for runs already, or has run. CUDA's documents promise
no order, but NVIDIA's GPUs keep it, and NVIDIA's own scans (CUB) wait for the programs before in the same way. As a
launch of its own, merging took 5.7 us of a layer with its gap (H200, 2026-12-01, 8B shape, 30 drafts and 2 verifies of
16 queries at 16k); here it passes while the last lists are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import work
from .score_store import tile_query
from .table_entry import (
    ITEM_INDEX,
    ITEM_MERGERS,
    ITEM_PIECES,
    ITEM_QUERY,
    ITEM_SLOT,
    ROW_QUERIES,
    ROW_SCORE_COUNT,
    ROW_SCORE_FIRST,
    ROW_SCORE_STEP,
    ROW_TOKEN,
    entry,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_ROWS = tl.constexpr(work.MERGED_ROWS)
_LOOKED = tl.constexpr(16)
"""Pieces whose sums are read at a time."""
_AHEAD = tl.constexpr(8)
"""Pieces whose results are read at a time: one after the other, each would take a round trip to memory."""


@triton.jit
def report_piece(arrived: tl.tensor) -> None:
    """Tells the tile's mergers that what this program stored is there."""
    tl.debug_barrier()  # one thread speaks for all
    tl.atomic_add(arrived, 1, sem="release")


@triton.jit
def merge_pieces(
    item: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
    arrived: tl.tensor,
    row_lse: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCORED: tl.constexpr,
    FEW: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Some rows of one tile; see `mixed_attention` for the tensors.

    Waits for the tile's pieces, and leaves their counter at 0, as the next launch needs it.
    """
    m = entry(item + ITEM_INDEX) * _ROWS + tl.arange(0, _ROWS)
    i_query = tile_query(row, entry(item + ITEM_QUERY), m, GROUP, BLOCK_M, FEW)
    i_head = head * GROUP + m % GROUP
    used = (m < (BLOCK_M // GROUP) * GROUP) & (i_query < entry(row + ROW_QUERIES))
    slot = entry(item + ITEM_SLOT).to(tl.int64)
    pieces = entry(item + ITEM_PIECES)
    token = (entry(row + ROW_TOKEN) + i_query).to(tl.int64)
    dv = tl.arange(0, DV_PAD)
    column = used[:, None] & (dv < DV)[None, :]

    p_arrived = arrived + slot * KV_HEADS + head
    there = tl.atomic_add(p_arrived, 0, sem="acquire")
    while there < pieces:
        there = tl.atomic_add(p_arrived, 0, sem="acquire")
    tl.debug_barrier()  # one thread has looked for all

    # The maximum first: the sum then has no chain from piece to piece, and many loads are on their way at a time.
    index = tl.arange(0, _LOOKED)
    looked = tl.full((_ROWS, _LOOKED), float("-inf"), tl.float32)
    for first in range(0, pieces, _LOOKED):
        i_lse = ((slot + first + index[None, :]) * KV_HEADS + head) * BLOCK_M + m[:, None]
        wanted = used[:, None] & (first + index[None, :] < pieces)
        looked = tl.maximum(looked, tl.load(partial_lse + i_lse, mask=wanted, other=float("-inf")))
    maximum = tl.max(looked, 1)
    if SINKS:
        maximum = tl.maximum(maximum, tl.load(sinks + i_head, mask=used, other=float("-inf")) * _LOG2E)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)  # no piece held a token
    total = tl.zeros((_ROWS,), tl.float32)
    if SINKS:
        total += tl.exp2(tl.load(sinks + i_head, mask=used, other=float("-inf")) * _LOG2E - base)
    result = tl.zeros((_ROWS, DV_PAD), tl.float32)
    for first in range(0, pieces, _AHEAD):
        for ahead in tl.static_range(_AHEAD):
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
        ahead = i_query - entry(row + ROW_SCORE_FIRST)
        behind = entry(row + ROW_SCORE_STEP) * entry(row + ROW_SCORE_COUNT)  # 0 in rows without scores
        wanted = used & (ahead >= 0) & (ahead < behind)
        tl.store(row_lse + token * (KV_HEADS * GROUP) + i_head, maximum + tl.log2(total), mask=wanted)
    # Mergers go on counting where pieces ended: the last one knows that nobody waits any more.
    if tl.atomic_add(p_arrived, 1, sem="relaxed") == pieces + entry(item + ITEM_MERGERS) - 1:
        tl.store(p_arrived, 0)
