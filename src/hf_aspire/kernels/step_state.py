"""What a step reads and changes of the requests' state, in one launch each.

The state is `fields` `[slots, Field]` and `history` `[slots, columns]`, int64, by request slot (see `DeviceState`).
The last slot is the filler's, which owns nothing. As tensor operations these were ninety small kernels in a row.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from .table_entry import ROW_COLUMNS, ROW_LENGTH, ROW_LISTED, ROW_QUERIES, ROW_START


class Field(IntEnum):
    """Columns of the fields."""

    LENGTH = 0  # tokens whose keys and values are final
    GENERATED = 1  # committed tokens
    COLUMN = 2  # history column of the first generated token
    POSITION = 3  # its position id
    CAPACITY = 4  # tokens that the request's pages hold
    TOP = 5  # leading entries of its sparse list: the best-scored tokens
    TAIL = 6  # context index from which on the list holds every token


class Owner(IntEnum):
    """Columns of the owner table, which has an entry for every row of a step."""

    SLOT = 0
    AHEAD = 1  # tokens between the last committed one and the first query
    FIRST = 2  # first query among the step's
    DRAFTS = 3  # drafts that a full row decides on; -1: the row drafts
    FORCED = 4  # drafts to accept whatever the scores say, or -1
    ROUND = 5  # rounds that the request has behind it


_LENGTH, _GENERATED, _COLUMN = (tl.constexpr(int(field)) for field in (Field.LENGTH, Field.GENERATED, Field.COLUMN))
_POSITION, _CAPACITY = tl.constexpr(int(Field.POSITION)), tl.constexpr(int(Field.CAPACITY))
_TOP, _TAIL, _FIELDS = tl.constexpr(int(Field.TOP)), tl.constexpr(int(Field.TAIL)), tl.constexpr(len(Field))
_AHEAD, _FIRST, _DRAFTS = (tl.constexpr(int(owner)) for owner in (Owner.AHEAD, Owner.FIRST, Owner.DRAFTS))
_OWNER_COLUMNS = tl.constexpr(len(Owner))
_BLOCK = 64


def pack_tokens(tokens: Tensor, fields: Tensor, history: Tensor, page_table: Tensor, page_size: int) -> list[Tensor]:
    """What a step feeds.

    Args:
        tokens: `[T, 4]` int32: request slot, tokens ahead of its last committed one, row, query of the row.
        fields: State.
        history: State.
        page_table: `[slots, pages]` int32.
        page_size: Tokens per page.

    Returns:
        `[T]` int64 each: token ids, position ids, and pool places of their keys and values, -1 for none.
    """
    count = len(tokens)
    ids, positions, places = (torch.empty(count, dtype=torch.int64, device=tokens.device) for _ in range(3))
    _pack_kernel[(triton.cdiv(count, _BLOCK),)](
        tokens,
        fields,
        history,
        page_table,
        ids,
        positions,
        places,
        count,
        history.stride(0),
        page_table.stride(0),
        page_table.shape[1],
        PAGE=page_size,
        BLOCK=_BLOCK,
    )
    return [ids, positions, places]


def place_rows(table: Tensor, owners: Tensor, fields: Tensor) -> Tensor:
    """A row table with the starts and lengths that the requests have.

    Args:
        table: `[R, ROW_COLUMNS]` int32 (see `work`).
        owners: `[R, Owner]` int32.
        fields: State.
    """
    placed = torch.empty_like(table)
    _rows_kernel[(triton.cdiv(len(table), _BLOCK),)](table, owners, fields, placed, len(table), BLOCK=_BLOCK)
    return placed


def settle_rows(
    owners: Tensor, forced: Tensor, fields: Tensor, history: Tensor, chosen: Tensor, best: Tensor, most: int
) -> Tensor:
    """Accepts the leading drafts that agree with what was chosen, and commits them and one more token.

    What a draft row chose is its next draft.

    Args:
        owners: `[R, Owner]` int32.
        forced: `[R]` int32, drafts to accept, -1 where the choice decides.
        fields: State; lengths and committed tokens grow.
        history: State; gets the tokens behind the queries.
        chosen: `[T]` int64, tokens chosen behind the queries.
        best: `[T]` float32, their highest scores.
        most: Most queries of a row.

    Returns:
        What a step tells the host, `[T + R + T]` int64: tokens behind the queries as they stay, accepted drafts of the
        rows, bits of the highest scores. Nothing is said of the filler's.
    """
    tokens, rows = len(chosen), len(owners)
    outcome = torch.empty(2 * tokens + rows, dtype=torch.int64, device=chosen.device)
    _settle_kernel[(rows,)](
        owners,
        forced,
        fields,
        history,
        chosen,
        best,
        outcome,
        tokens,
        rows,
        len(fields) - 1,
        history.stride(0),
        history.shape[1],
        forced.stride(0),
        MOST=triton.next_power_of_2(most),
        num_warps=1,
    )
    return outcome


@triton.jit(do_not_specialize=["count", "pages"])
def _pack_kernel(
    tokens: tl.tensor,
    fields: tl.tensor,
    history: tl.tensor,
    page_table: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    count: tl.tensor,
    history_stride: tl.tensor,
    table_stride: tl.tensor,
    pages: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = token < count
    slot = tl.load(tokens + token * 4, mask=valid, other=0).to(tl.int64)
    ahead = tl.load(tokens + token * 4 + 1, mask=valid, other=0).to(tl.int64)
    field = fields + slot * _FIELDS
    last = tl.load(field + _GENERATED) - 1 + ahead
    column = tl.maximum(tl.load(field + _COLUMN) + last, 0)
    tl.store(ids + token, tl.load(history + slot * history_stride + column), mask=valid)
    tl.store(positions + token, tl.maximum(tl.load(field + _POSITION) + last, 0), mask=valid)
    index = tl.load(field + _LENGTH) + ahead
    place = place_of(page_table + slot * table_stride, index, pages, PAGE)
    tl.store(places + token, tl.where(index < tl.load(field + _CAPACITY), place, -1), mask=valid)


@triton.jit
def place_of(table: tl.tensor, index: tl.tensor, pages: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """Pool places of context indices; indices behind the pages get any place."""
    page = tl.load(table + tl.minimum(index // PAGE, pages - 1)).to(tl.int64)
    return page * PAGE + index % PAGE


@triton.jit(do_not_specialize=["count"])
def _rows_kernel(
    table: tl.tensor, owners: tl.tensor, fields: tl.tensor, placed: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < count
    owner = owners + row * _OWNER_COLUMNS
    field = fields + tl.load(owner, mask=valid, other=0).to(tl.int64) * _FIELDS
    start = tl.load(field + _LENGTH) + tl.load(owner + _AHEAD, mask=valid, other=0)
    queries = tl.load(table + row * ROW_COLUMNS + ROW_QUERIES, mask=valid, other=0)
    length = tl.minimum(start + queries, tl.load(field + _CAPACITY))
    listed = tl.load(table + row * ROW_COLUMNS + ROW_LISTED, mask=valid, other=0) > 0
    length = tl.where(listed, tl.load(field + _TOP) + length - tl.load(field + _TAIL), length)
    start = tl.where(listed, length - 1, start)

    column = tl.arange(0, 16)
    mask = valid[:, None] & (column < ROW_COLUMNS)[None, :]
    place = (row * ROW_COLUMNS)[:, None] + column[None, :]
    entries = tl.load(table + place, mask=mask, other=0)
    entries = tl.where((column == ROW_START)[None, :], start.to(tl.int32)[:, None], entries)
    entries = tl.where((column == ROW_LENGTH)[None, :], length.to(tl.int32)[:, None], entries)
    tl.store(placed + place, entries, mask=mask)


@triton.jit(do_not_specialize=["tokens", "rows", "filler", "columns"])
def _settle_kernel(
    owners: tl.tensor,
    forced: tl.tensor,
    fields: tl.tensor,
    history: tl.tensor,
    chosen: tl.tensor,
    best: tl.tensor,
    outcome: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    filler: tl.tensor,
    history_stride: tl.tensor,
    columns: tl.tensor,
    forced_stride: tl.tensor,
    MOST: tl.constexpr,
) -> None:
    """One row. Every request but the filler has one row at most, so nobody else reads or writes its state."""
    row = tl.program_id(0)
    owner = owners + row * _OWNER_COLUMNS
    slot = tl.load(owner).to(tl.int64)
    if slot == filler:
        return
    drafts = tl.load(owner + _DRAFTS)
    field = fields + slot * _FIELDS
    query = tl.arange(0, MOST)
    here = query <= tl.maximum(drafts, 0)
    length, generated = tl.load(field + _LENGTH), tl.load(field + _GENERATED)
    column = tl.load(field + _COLUMN) + generated + tl.load(owner + _AHEAD) + query
    place = history + slot * history_stride + tl.minimum(column, columns - 1)
    first = tl.load(owner + _FIRST) + query

    draft = tl.load(place, mask=here, other=0)
    choice = tl.load(chosen + first, mask=here, other=0)
    differs = (draft != choice) | (query >= drafts)  # the query behind the last draft decides on none
    accepted = tl.min(tl.where(differs, query, MOST))
    given = tl.load(forced + row * forced_stride)
    accepted = tl.where(given >= 0, given, accepted)
    text = tl.where(query < accepted, draft, choice)

    tl.store(place, text, mask=here)
    tl.store(outcome + first, text, mask=here)
    tl.store(outcome + tokens + row, accepted.to(tl.int64))
    bits = tl.load(best + first, mask=here, other=0.0).to(tl.int32, bitcast=True)
    tl.store(outcome + tokens + rows + first, bits.to(tl.int64), mask=here)
    if drafts >= 0:
        tl.store(field + _LENGTH, length + accepted + 1)
        tl.store(field + _GENERATED, generated + accepted + 1)
