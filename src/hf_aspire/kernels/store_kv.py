"""Writes the keys and values of new tokens to their places in the page pools, both in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8
"""(token, head) pairs per program: 8 of 256 bytes keep every thread of four warps busy with one 16-byte access."""


def store_kv(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Scatters new keys and values by token slot.

    A masked weight of 0 times NaN is NaN: the value of a draft that overflowed would reach the queries before it. So a
    value that is not finite is stored as zeros, with NaN in its key, which only the queries that see it are hurt by.

    Args:
        keys: Pool `[pages, Hkv, page size, D]`, contiguous.
        values: Pool `[pages, Hkv, page size, Dv]`, contiguous.
        slots: `[T]` int32 or int64, page * page size + place in the page; negative ones are not written.
        new_keys: `[T, Hkv, D]`, any strides with contiguous elements.
        new_values: `[T, Hkv, Dv]`, likewise.
    """
    tokens, heads, key_size = new_keys.shape
    value_size = new_values.shape[2]
    if tokens == 0:
        return
    grid = (triton.cdiv(tokens * heads, _ROWS),)
    _store_kernel[grid](
        keys,
        values,
        slots,
        new_keys,
        new_values,
        tokens,
        new_keys.stride(0),
        new_keys.stride(1),
        new_values.stride(0),
        new_values.stride(1),
        HEADS=heads,
        PAGE=keys.shape[2],
        D=key_size,
        DV=value_size,
        D_PAD=triton.next_power_of_2(key_size),
        DV_PAD=triton.next_power_of_2(value_size),
        ROWS=_ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens"])
def _store_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    tokens: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    # Kept in the L2 cache for the next layers, as `table_entry` does.
    slot = tl.load(slots + token, mask=token < tokens, other=-1, eviction_policy="evict_last").to(tl.int64)
    valid = slot >= 0
    place = ((slot // PAGE) * HEADS + head) * PAGE + slot % PAGE

    column = tl.arange(0, D_PAD)
    mask = valid[:, None] & (column < D)[None, :]
    source = new_keys + (token * key_token_stride + head * key_head_stride)[:, None] + column[None, :]
    target = keys + (place * D)[:, None] + column[None, :]
    b_keys = tl.load(source, mask=mask, other=0.0)

    column_v = tl.arange(0, DV_PAD)
    mask_v = valid[:, None] & (column_v < DV)[None, :]
    source_v = new_values + (token * value_token_stride + head * value_head_stride)[:, None] + column_v[None, :]
    b_values = tl.load(source_v, mask=mask_v, other=0.0)
    # In float32, to and from which every dtype here goes unchanged: the interpreter knows no constants of bfloat16.
    wide_values = b_values.to(tl.float32)
    lost = tl.sum((~(tl.abs(wide_values) < float("inf"))).to(tl.int32), 1) > 0
    b_keys = tl.where(lost[:, None], float("nan"), b_keys.to(tl.float32)).to(b_keys.dtype)
    b_values = tl.where(lost[:, None], 0.0, wide_values).to(b_values.dtype)
    tl.store(target, b_keys, mask=mask)
    tl.store(values + (place * DV)[:, None] + column_v[None, :], b_values, mask=mask_v)
