"""The kernel behind `mixed_attention`: one piece of one row's context for one KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from . import work
from .score_store import kept_rows, store_scores, tile_query
from .table_entry import entry

_LOG2E = tl.constexpr(1.4426950408889634)
_ROW_TOKEN = tl.constexpr(work.ROW_TOKEN)
_ROW_QUERIES = tl.constexpr(work.ROW_QUERIES)
_ROW_START = tl.constexpr(work.ROW_START)
_ROW_LENGTH = tl.constexpr(work.ROW_LENGTH)
_ROW_TABLE = tl.constexpr(work.ROW_TABLE)
_ROW_SHIFT = tl.constexpr(work.ROW_SHIFT)
_ROW_LISTED = tl.constexpr(work.ROW_LISTED)
_ROW_SCORE = tl.constexpr(work.ROW_SCORE)
_ROW_SCORE_FIRST = tl.constexpr(work.ROW_SCORE_FIRST)
_ROW_SCORE_STEP = tl.constexpr(work.ROW_SCORE_STEP)
_ROW_SCORE_COUNT = tl.constexpr(work.ROW_SCORE_COUNT)
_ROW_COLUMNS = tl.constexpr(work.ROW_COLUMNS)
_ITEM_ROW = tl.constexpr(work.ITEM_ROW)
_ITEM_QUERY = tl.constexpr(work.ITEM_QUERY)
_ITEM_BEGIN = tl.constexpr(work.ITEM_BEGIN)
_ITEM_END = tl.constexpr(work.ITEM_END)
_ITEM_SLOT = tl.constexpr(work.ITEM_SLOT)
_ITEM_PIECES = tl.constexpr(work.ITEM_PIECES)
_ITEM_COLUMNS = tl.constexpr(work.ITEM_COLUMNS)


@triton.jit
def _load_units(table: tl.tensor, tokens: tl.tensor, end: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Units of context tokens; past the end unit 0, which exists but is not read."""
    return tl.load(table + (tokens >> shift), mask=tokens < end, other=0)


@triton.jit
def _visible(
    tokens: tl.tensor, inside: tl.tensor, position: tl.tensor, oldest: tl.tensor, WINDOW: tl.constexpr
) -> tl.tensor:
    """Which tokens the queries at `position` see: [queries, tokens]."""
    visible = inside[None, :] & (tokens[None, :] <= position[:, None])
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
def _attend(
    row: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    planned_end: tl.tensor,
    slot: tl.tensor,
    pieces: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    lists: tl.tensor,
    output: tl.tensor,
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
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
    """One item with tiles of BLOCK_M rows."""
    queries = entry(row + _ROW_QUERIES)
    start = entry(row + _ROW_START)
    shift = entry(row + _ROW_SHIFT)
    listed = entry(row + _ROW_LISTED)
    i_table = entry(row + _ROW_TABLE).to(tl.int64)

    # Rows of the tile: the heads of a group side by side, query after query.
    m = tl.arange(0, BLOCK_M)
    i_query = tile_query(row, first, m, GROUP, BLOCK_M, FEW)
    i_head = head * GROUP + m % GROUP
    used = (m < (BLOCK_M // GROUP) * GROUP) & (i_query < queries)
    token = (entry(row + _ROW_TOKEN) + i_query).to(tl.int64)
    position = start + i_query
    oldest = position - tl.where(listed > 0, 1 << 30, window)  # a list has no window
    last = start + tl.minimum(first + BLOCK_M // GROUP, queries)  # one behind the newest token that the tile sees
    end = tl.minimum(tl.minimum(planned_end, entry(row + _ROW_LENGTH)), last)

    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    p_query = query + token * query_token_stride + i_head * query_head_stride
    b_query = tl.load(p_query[:, None] + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)

    if SCORED:
        score_slot = entry(row + _ROW_SCORE)
        step = entry(row + _ROW_SCORE_STEP)
        kept = kept_rows(BLOCK_M, FEW)
        i_kept = tile_query(row, first, kept, GROUP, BLOCK_M, FEW)
        ahead = i_kept - entry(row + _ROW_SCORE_FIRST)
        i_scored = ahead // step
        wanted = (kept < (BLOCK_M // GROUP) * GROUP) & (i_kept < queries)
        wanted = wanted & (ahead >= 0) & (ahead % step == 0) & (i_scored < entry(row + _ROW_SCORE_COUNT))
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
    units = _load_units(table, begin + n, end, shift)
    for block in range(begin, end, BLOCK_N):
        tokens = block + n
        place = (units << shift) + (tokens & ((1 << shift) - 1))
        units = _load_units(table, tokens + BLOCK_N, end, shift)  # ahead: the compiler does not pipeline these
        i_place = (place + (place // PAGE) * ((KV_HEADS - 1) * PAGE)).to(tl.int64)
        inside = tokens < end
        b_keys = tl.load(
            p_keys + (i_place * D)[:, None],
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        )
        visible = _visible(tokens, inside, position, oldest, WINDOW)
        logits = _logits(b_query, b_keys, visible, scaling, softcap, SOFTCAP)
        peak = tl.max(logits, 1)
        highest = tl.maximum(maximum, peak)
        base = tl.where(highest == float("-inf"), 0.0, highest)  # a query that sees nothing of the block
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(maximum - base)
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
        b_values = tl.load(
            p_values + (i_place * DV)[:, None],
            mask=inside[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        b_total = b_total * shrink[:, None] + weights
        b_output = b_output * shrink[:, None]
        b_output = tl.dot(weights.to(b_values.dtype), b_values, b_output, input_precision="ieee")
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
        i_partial = (slot * KV_HEADS + head) * PARTIAL_M + m
        tl.store(partial_lse + i_partial, maximum + tl.log2(total), mask=used)
        tl.store(partial_output + (i_partial * DV)[:, None] + dv[None, :], result, mask=column)


@triton.jit
def attention_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    lists: tl.tensor,
    rows: tl.tensor,
    items: tl.tensor,
    output: tl.tensor,
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
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
    SMALL_M: tl.constexpr,
) -> None:
    """One item for one KV head; see `mixed_attention` for the tensors.

    Rows of up to SMALL_M heads times queries take a tile of their own in the same launch: beside verify rows of 16
    queries, draft rows would spend most of a large tile on padding.
    """
    head = tl.program_id(0)
    item = items + tl.program_id(1) * _ITEM_COLUMNS
    row_index = entry(item + _ITEM_ROW)
    if row_index < 0:
        return
    first = entry(item + _ITEM_QUERY)
    begin = entry(item + _ITEM_BEGIN)
    planned_end = entry(item + _ITEM_END)
    slot = entry(item + _ITEM_SLOT).to(tl.int64)
    pieces = entry(item + _ITEM_PIECES)
    row = rows + row_index * _ROW_COLUMNS
    if entry(row + _ROW_QUERIES) * GROUP <= SMALL_M if SMALL_M > 0 else False:  # no branch without a small tile
        _attend(
            row,
            head,
            first,
            begin,
            planned_end,
            slot,
            pieces,
            query,
            keys,
            values,
            page_table,
            lists,
            output,
            partial_output,
            partial_lse,
            row_lse,
            raw_scores,
            sinks,
            scaling,
            softcap,
            window,
            query_token_stride,
            query_head_stride,
            output_token_stride,
            output_head_stride,
            table_stride,
            list_stride,
            block_stride,
            score_stride,
            KV_HEADS,
            GROUP,
            PAGE,
            D,
            DV,
            D_PAD,
            DV_PAD,
            SMALL_M,
            BLOCK_N,
            SCORED,
            SCORED_QUERIES,
            UNIT,
            FEW,
            IN_PLACE,
            WINDOW,
            SOFTCAP,
            SINKS,
            BLOCK_M,
        )
    else:
        _attend(
            row,
            head,
            first,
            begin,
            planned_end,
            slot,
            pieces,
            query,
            keys,
            values,
            page_table,
            lists,
            output,
            partial_output,
            partial_lse,
            row_lse,
            raw_scores,
            sinks,
            scaling,
            softcap,
            window,
            query_token_stride,
            query_head_stride,
            output_token_stride,
            output_head_stride,
            table_stride,
            list_stride,
            block_stride,
            score_stride,
            KV_HEADS,
            GROUP,
            PAGE,
            D,
            DV,
            D_PAD,
            DV_PAD,
            BLOCK_M,
            BLOCK_N,
            SCORED,
            SCORED_QUERIES,
            UNIT,
            FEW,
            IN_PLACE,
            WINDOW,
            SOFTCAP,
            SINKS,
            BLOCK_M,
        )
