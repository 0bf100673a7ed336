"""Sparse lists as token slots of the pools, from the units that `select` chose: its sizes before, the places after."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .step_state import Field, Owner, place_of

_LENGTH, _TOP, _TAIL = (tl.constexpr(int(field)) for field in (Field.LENGTH, Field.TOP, Field.TAIL))
_FIELDS, _AHEAD = tl.constexpr(len(Field)), tl.constexpr(int(Owner.AHEAD))
_OWNER_COLUMNS = tl.constexpr(len(Owner))

_BLOCK = 512
"""List entries per program."""


def list_sizes(
    scored_rows: Tensor, owners: Tensor, fields: Tensor, budgets: Tensor, page_size: int, recent: int, unit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How long the new lists of scored rows are: top and tail go into the fields.

    Tokens up to a row's first query are certain to stay: that many count as scored.

    Args:
        scored_rows: `[S]` int32 rows, -1: none.
        owners: `[R, Owner]` int32 (see `step_state`); the last one is the filler's.
        fields: State.
        budgets: `[pages]` int64, tokens of a list for a context of that many pages.
        page_size: Tokens per page.
        recent: Newest tokens that are always listed.
        unit: Tokens that are chosen together.

    Returns:
        `[S]` int32 each: request slots, units to choose from, units to choose.
    """
    count = len(scored_rows)
    slots, units, counts = (torch.empty(count, dtype=torch.int32, device=fields.device) for _ in range(3))
    _sizes_kernel[(1,)](
        scored_rows,
        owners,
        fields,
        budgets,
        slots,
        units,
        counts,
        count,
        len(owners),
        recent,
        PAGE=page_size,
        UNIT=unit,
        BLOCK=triton.next_power_of_2(count),
    )
    return slots, units, counts


def place_lists(
    chosen: Tensor, slots: Tensor, fields: Tensor, page_table: Tensor, page_size: int, unit: int, lists: Tensor
) -> None:
    """Writes lists: the chosen units' tokens, then all from the tail on, ahead of the tokens that will be there.

    Args:
        chosen: `[lists, S, units]` int32, ascending.
        slots: `[S]` int32 request slots.
        fields: State, with the lists' sizes.
        page_table: `[slots, pages]` int32.
        page_size: Tokens per page.
        unit: Tokens that were chosen together.
        lists: `[lists, slots, capacity]` int32, gets the places.
    """
    count, capacity = len(slots), lists.shape[2]
    _places_kernel[(triton.cdiv(capacity, _BLOCK), count, len(lists))](
        chosen,
        slots,
        fields,
        page_table,
        lists,
        capacity,
        chosen.stride(0),
        chosen.stride(1),
        page_table.stride(0),
        page_table.shape[1],
        lists.stride(0),
        lists.stride(1),
        PAGE=page_size,
        UNIT=unit,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["count", "rows"])
def _sizes_kernel(
    scored_rows: tl.tensor,
    owners: tl.tensor,
    fields: tl.tensor,
    budgets: tl.tensor,
    slots: tl.tensor,
    units: tl.tensor,
    counts: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    recent: tl.tensor,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.arange(0, BLOCK)
    valid = entry < count
    row = tl.load(scored_rows + entry, mask=valid, other=-1)
    owner = owners + tl.where(row < 0, rows - 1, row) * _OWNER_COLUMNS
    slot = tl.load(owner)
    field = fields + slot.to(tl.int64) * _FIELDS
    scored = tl.load(field + _LENGTH) + tl.load(owner + _AHEAD) + 1
    tail = tl.maximum(scored - recent, 0) // UNIT * UNIT
    budget = tl.load(budgets + (scored + PAGE - 1) // PAGE)
    most = tl.minimum(tl.maximum(budget - (scored - tail), 0) // UNIT, tail // UNIT)
    tl.store(slots + entry, slot, mask=valid)
    tl.store(units + entry, (tail // UNIT).to(tl.int32), mask=valid)
    tl.store(counts + entry, most.to(tl.int32), mask=valid)
    tl.store(field + _TOP, most * UNIT, mask=valid)
    tl.store(field + _TAIL, tail, mask=valid)


@triton.jit(do_not_specialize=["capacity", "pages"])
def _places_kernel(
    chosen: tl.tensor,
    slots: tl.tensor,
    fields: tl.tensor,
    page_table: tl.tensor,
    lists: tl.tensor,
    capacity: tl.tensor,
    chosen_list_stride: tl.tensor,
    chosen_slot_stride: tl.tensor,
    table_stride: tl.tensor,
    pages: tl.tensor,
    list_stride: tl.tensor,
    slot_stride: tl.tensor,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + tl.program_id(1)).to(tl.int64)
    top = tl.load(fields + slot * _FIELDS + _TOP)
    tail = tl.load(fields + slot * _FIELDS + _TAIL)
    best = chosen + which * chosen_list_stride + tl.program_id(1) * chosen_slot_stride
    unit = tl.load(best + entry // UNIT, mask=entry < top, other=0).to(tl.int64)
    token = tl.where(entry < top, unit * UNIT + entry % UNIT, tail - top + entry)
    place = place_of(page_table + slot * table_stride, token, pages, PAGE)
    tl.store(lists + which * list_stride + slot * slot_stride + entry, place.to(tl.int32), mask=entry < capacity)
