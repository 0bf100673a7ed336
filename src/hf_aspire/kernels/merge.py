"""Merges two parts of the attention of a prompt's chunk."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Pairs of a query and a head per program."""


class Part(NamedTuple):
    """Attention of n queries over a part of their context.

    Attributes:
        output: `[n, Hq, D]`, normalised by the part's own sum; any strides with contiguous elements.
        lse: `[n, Hq]` float32, natural log-sum-exp of the part's logits; any strides.
    """

    output: Tensor
    lse: Tensor


def merge(one: Part, other: Part, output: Tensor) -> None:
    """Attention over both parts.

    Args:
        one: A part.
        other: The other one.
        output: `[n, Hq, D]`, any strides with contiguous elements; may be neither part's.
    """
    count, heads, size = output.shape
    _merge_kernel[(triton.cdiv(count * heads, _ROWS),)](
        one.output,
        one.lse,
        other.output,
        other.lse,
        output,
        *one.output.stride()[:2],
        *one.lse.stride(),
        *other.output.stride()[:2],
        *other.lse.stride(),
        *output.stride()[:2],
        count * heads,
        HEADS=heads,
        SIZE=size,
        SIZE_PAD=triton.next_power_of_2(size),
        ROWS=_ROWS,
    )


@triton.jit
def _merge_kernel(
    one: tl.tensor,
    one_lse: tl.tensor,
    other: tl.tensor,
    other_lse: tl.tensor,
    output: tl.tensor,
    one_query_stride: tl.tensor,
    one_head_stride: tl.tensor,
    one_lse_query_stride: tl.tensor,
    one_lse_head_stride: tl.tensor,
    other_query_stride: tl.tensor,
    other_head_stride: tl.tensor,
    other_lse_query_stride: tl.tensor,
    other_lse_head_stride: tl.tensor,
    output_query_stride: tl.tensor,
    output_head_stride: tl.tensor,
    pairs: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = pair < pairs
    query, head = (pair // HEADS).to(tl.int64), pair % HEADS
    d = tl.arange(0, SIZE_PAD)
    mask = there[:, None] & (d < SIZE)[None, :]
    a_lse = tl.load(one_lse + query * one_lse_query_stride + head * one_lse_head_stride, mask=there, other=0.0)
    b_lse = tl.load(other_lse + query * other_lse_query_stride + head * other_lse_head_stride, mask=there, other=0.0)
    a = tl.load(one + (query * one_query_stride + head * one_head_stride)[:, None] + d[None, :], mask=mask, other=0.0)
    b = tl.load(
        other + (query * other_query_stride + head * other_head_stride)[:, None] + d[None, :], mask=mask, other=0.0
    )
    share = 1.0 / (1.0 + tl.exp(b_lse - a_lse))
    result = b.to(tl.float32) + (a.to(tl.float32) - b.to(tl.float32)) * share[:, None]
    p_output = output + (query * output_query_stride + head * output_head_stride)[:, None] + d[None, :]
    tl.store(p_output, result.to(output.dtype.element_ty), mask=mask)
