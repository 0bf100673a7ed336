"""Attention of one piece of one row's context for one KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from .combine import report_piece
from .score_store import kept_rows, store_scores, tile_query
from .table_entry import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_INDEX,
    ITEM_PIECES,
    ITEM_QUERY,
    ITEM_SLOT,
    ROW_LENGTH,
    ROW_LISTED,
    ROW_QUERIES,
    ROW_SCORE,
    ROW_SCORE_COUNT,
    ROW_SCORE_FIRST,
    ROW_SCORE_STEP,
    ROW_SHIFT,
    ROW_START,
    ROW_TABLE,
    ROW_TOKEN,
    entry,
)

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _places(units: tl.tensor, tokens: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Token slots of tokens in their units; unsigned, so that dividing by a page's size is one shift."""
    return ((units << shift) + (tokens & ((1 << shift) - 1))).to(tl.uint32)


@triton.jit
def _fetch(table: tl.tensor, tokens: tl.tensor, shift: tl.tensor, PLACES: tl.constexpr) -> tl.tensor:
    """Units of tokens, or places."""
    units = tl.load(table + (tokens >> shift))
    if PLACES:
        units = _places(units, tokens, shift)
    return units


@triton.jit
def _visible(tokens: tl.tensor, newest: tl.tensor, oldest: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Which tokens queries see that see up to `newest`: [queries, tokens]."""
    visible = tokens[None, :] <= newest[:, None]
    if WINDOW:
        visible = visible & (tokens[None, :] > oldest[:, None])
    return visible


@triton.jit
def _logits(
    query: tl.tensor,
    keys: tl.tensor,
    visible: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Logits times log2(e), -inf where a query does not see a token: [BLOCK_M, BLOCK_N]."""
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if SOFTCAP:
        bent = 1.0 - 2.0 / (1.0 + tl.exp2(products * (2.0 * _LOG2E * scaling / softcap)))
        products = bent * (softcap * _LOG2E)
    else:
        products = products * (scaling * _LOG2E)
    return tl.where(visible, products, float("-inf"))


@triton.jit
def attend_piece(
    item: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    lists: tl.tensor,
    output: tl.tensor,
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
    arrived: tl.tensor,
    row_lse: tl.tensor,
    raw_scores: tl.tensor,
    sinks: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    table_stride: tl.tensor,
    list_stride: tl.tensor,
    block_stride: tl.tensor,
    score_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCORED: tl.constexpr,
    SCORED_QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    FEW: tl.constexpr,
    IN_PLACE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PARTIAL_M: tl.constexpr,
) -> None:
    """One piece with tiles of BLOCK_M rows; see `mixed_attention` for the tensors."""
    first = entry(item + ITEM_QUERY)
    begin = entry(item + ITEM_BEGIN)
    pieces = entry(item + ITEM_PIECES)
    queries = entry(row + ROW_QUERIES)
    start = entry(row + ROW_START)
    shift = entry(row + ROW_SHIFT)
    listed = entry(row + ROW_LISTED)
    i_table = entry(row + ROW_TABLE).to(tl.int64)

    # Rows of the tile: the heads of a group side by side, query after query.
    m = tl.arange(0, BLOCK_M)
    i_query = tile_query(row, first, m, GROUP, BLOCK_M, FEW)
    i_head = head * GROUP + m % GROUP
    used = (m < (BLOCK_M // GROUP) * GROUP) & (i_query < queries)
    token = (entry(row + ROW_TOKEN) + i_query).to(tl.int64)
    position = start + i_query
    oldest = position - tl.where(listed > 0, 1 << 30, window)  # a list has no window
    last = start + tl.minimum(first + BLOCK_M // GROUP, queries)  # one behind the newest token that the tile sees
    end = tl.minimum(tl.minimum(entry(item + ITEM_END), entry(row + ROW_LENGTH)), last)
    final = tl.maximum(end, 1) - 1  # what is behind it is read as this one and weighs nothing: cheaper than masks
    newest = tl.minimum(position, final)

    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    p_query = query + token * query_token_stride + i_head * query_head_stride
    b_query = tl.load(p_query[:, None] + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)

    if SCORED:
        score_slot = entry(row + ROW_SCORE)
        step = entry(row + ROW_SCORE_STEP)
        kept = kept_rows(BLOCK_M, FEW)
        i_kept = tile_query(row, first, kept, GROUP, BLOCK_M, FEW)
        ahead = i_kept - entry(row + ROW_SCORE_FIRST)
        i_scored = ahead // step
        wanted = (kept < (BLOCK_M // GROUP) * GROUP) & (i_kept < queries)
        wanted = wanted & (ahead >= 0) & (ahead % step == 0) & (i_scored < entry(row + ROW_SCORE_COUNT))
        line = (head * SCORED_QUERIES + i_scored) * GROUP + kept % GROUP
        p_scores = raw_scores + score_slot * score_stride

    table = page_table + i_table * table_stride
    if listed > 0:
        table = lists + i_table * list_stride
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # summed once at the end: a sum across warps costs a barrier
    b_output = tl.zeros((BLOCK_M, DV_PAD), tl.float32)
    n = tl.arange(0, BLOCK_N)
    p_keys = keys + head * (PAGE * D) + d[None, :]
    p_values = values + head * (PAGE * DV) + dv[None, :]
    # Units are loaded a block ahead. Where only the next block waits for them, the compiler puts the loads behind the
    # copies of this one's keys and values, and a small tile on a large one's four warps then takes longer: 30 drafts
    # beside two verify rows of 16 queries at 16k 78 us, and 73 if units become places at once. A tile of its own loses
    # 1 % by that, and large ones with scores 4 % (H200, 2026-12-01).
    PLACES: tl.constexpr = BLOCK_M < PARTIAL_M
    fetched = _fetch(table, tl.minimum(begin + n, final), shift, PLACES)
    for block in range(begin, end, BLOCK_N):
        tokens = block + n
        place = fetched if PLACES else _places(fetched, tl.minimum(tokens, final), shift)
        fetched = _fetch(table, tl.minimum(tokens + BLOCK_N, final), shift, PLACES)
        i_place = (place + (place // PAGE) * ((KV_HEADS - 1) * PAGE)).to(tl.int64)
        b_keys = tl.load(p_keys + (i_place * D)[:, None], mask=(d < D)[None, :], other=0.0)
        visible = _visible(tokens, newest, oldest, WINDOW)
        logits = _logits(b_query, b_keys, visible, scaling, softcap, SOFTCAP)
        peak = tl.max(logits, 1)
        highest = tl.maximum(maximum, peak)
        base = tl.where(highest == float("-inf"), 0.0, highest)  # a query that sees nothing of the block
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(maximum - base)
        b_values = tl.load(p_values + (i_place * DV)[:, None], mask=(dv < DV)[None, :], other=0.0)
        b_total = b_total * shrink[:, None] + weights
        b_output = b_output * shrink[:, None]
        b_output = tl.dot(weights.to(b_values.dtype), b_values, b_output, input_precision="ieee")
        if SCORED:  # without a branch for rows that want none: it saves no time
            store_scores(
                p_scores + tl.cast(block // BLOCK_N, tl.int64) * block_stride,
                line,
                wanted,
                weights,
                base,
                peak,
                BLOCK_M,
                BLOCK_N,
                UNIT,
                KV_HEADS * SCORED_QUERIES * GROUP,
                FEW,
                IN_PLACE,
            )
        maximum = highest

    total = tl.sum(b_total, 1)
    column = used[:, None] & (dv < DV)[None, :]
    if pieces == 1:
        if SINKS:
            sink = tl.load(sinks + i_head, mask=used, other=float("-inf")) * _LOG2E
            highest = tl.maximum(maximum, sink)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp2(maximum - base) + tl.exp2(sink - base)
            b_output = b_output * tl.exp2(maximum - base)[:, None]
            maximum = highest
        result = b_output / tl.where(total == 0.0, 1.0, total)[:, None]
        p_output = output + token * output_token_stride + i_head * output_head_stride
        tl.store(p_output[:, None] + dv[None, :], result.to(output.dtype.element_ty), mask=column)
        if SCORED:
            tl.store(row_lse + token * (KV_HEADS * GROUP) + i_head, maximum + tl.log2(total), mask=used)
    else:
        result = b_output / tl.where(total == 0.0, 1.0, total)[:, None]
        tile_slot = entry(item + ITEM_SLOT).to(tl.int64)
        i_partial = ((tile_slot + entry(item + ITEM_INDEX)) * KV_HEADS + head) * PARTIAL_M + m
        tl.store(partial_lse + i_partial, maximum + tl.log2(total), mask=used)
        tl.store(partial_output + (i_partial * DV)[:, None] + dv[None, :], result, mask=column)
        report_piece(arrived + tile_slot * KV_HEADS + head)
