"""Top-k of many score lists in one launch, without a sort and without a sync."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HELD = 32768
"""Longest list whose keys stay in registers while the threshold is searched: 32 per thread of 32 warps."""
_READ = 8192
"""Entries that the search reads at a time in longer lists: three counters per entry must stay in registers."""
_CHUNK = 4096
"""Entries per step of the compaction."""


def select(scores: Tensor, lengths: Tensor, counts: Tensor, output: Tensor) -> None:
    """The best units of every list, ascending; ties go to the lowest index.

    The threshold is found by bisection on the scores' bits, mapped so that integers order as the floats do.

    Args:
        scores: `[layers, rows, units]` float32, no NaN; only a row's first `lengths` units are read.
        lengths: `[rows]` int32, units of every row's lists.
        counts: `[rows]` int32, units to choose; at most the row's length are.
        output: `[layers, rows, capacity]` int32; gets the chosen units, and nothing behind them.
    """
    layers, rows, units = scores.shape
    block = max(32, triton.next_power_of_2(units))
    held = block <= _HELD
    size = block if held else _READ
    _select_kernel[(rows, layers)](
        scores,
        lengths,
        counts,
        output,
        scores.stride(0),
        scores.stride(1),
        output.stride(0),
        output.stride(1),
        BLOCK=size,
        CHUNK=min(_CHUNK, size),
        HELD=held,
        num_warps=min(32, max(4, block // 256)),
    )


@triton.jit
def _ordered(scores: tl.tensor, valid: tl.tensor) -> tl.tensor:
    """Integers that order as the scores do; 0.0 and -0.0 are equal, invalid entries come last."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(valid, keys, -2147483648)


@triton.jit
def _count(
    scores: tl.tensor, length: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many of a long list's keys are at least each of three thresholds: reading it is what takes the time."""
    index = tl.arange(0, BLOCK)
    reached_first = tl.zeros((BLOCK,), tl.int32)
    reached_second = tl.zeros((BLOCK,), tl.int32)
    reached_third = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, length, BLOCK):
        valid = block + index < length
        keys = _ordered(tl.load(scores + block + index, mask=valid, other=0.0), valid)
        reached_first += (keys >= first).to(tl.int32)
        reached_second += (keys >= second).to(tl.int32)
        reached_third += (keys >= third).to(tl.int32)
    return tl.sum(reached_first, 0), tl.sum(reached_second, 0), tl.sum(reached_third, 0)


@triton.jit
def _select_kernel(
    scores: tl.tensor,
    lengths: tl.tensor,
    counts: tl.tensor,
    output: tl.tensor,
    score_layer_stride: tl.tensor,
    score_row_stride: tl.tensor,
    output_layer_stride: tl.tensor,
    output_row_stride: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    count = tl.minimum(tl.load(counts + row), length)
    if count <= 0:
        return
    scores += layer * score_layer_stride + row * score_row_stride
    output += layer * output_layer_stride + row * output_row_stride

    # Search of the largest key that at least `count` entries reach: the invariant of low. A threshold that exactly
    # `count` reach ends it early.
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483647, tl.int64)
    if HELD:
        index = tl.arange(0, BLOCK)
        keys = _ordered(tl.load(scores + index, mask=index < length, other=0.0), index < length)
        low = tl.min(tl.where(index < length, keys, 2147483647), 0).to(tl.int64)
        high = tl.max(keys, 0).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            reached = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
            low = tl.where(reached >= count, middle, low)
            high = tl.where(reached == count, middle, tl.where(reached > count, high, middle - 1))
        above = tl.sum((keys > low.to(tl.int32)).to(tl.int32), 0)
    else:
        while low < high:
            first = low + (high - low + 3) // 4
            second = low + (2 * (high - low) + 3) // 4
            third = low + (3 * (high - low) + 3) // 4
            most, more, some = _count(
                scores, length, first.to(tl.int32), second.to(tl.int32), third.to(tl.int32), BLOCK
            )
            next_low = tl.where(most >= count, first, low)
            next_low = tl.where(more >= count, second, next_low)
            next_low = tl.where(some >= count, third, next_low)
            high = tl.where(some < count, third - 1, high)
            high = tl.where(more < count, second - 1, high)
            high = tl.where(most < count, first - 1, high)
            exact = (most == count) | (more == count) | (some == count)
            low = next_low
            high = tl.where(exact, low, high)
        next_key = (low + 1).to(tl.int32)
        above, _, _ = _count(scores, length, next_key, next_key, next_key, BLOCK)
    threshold = low.to(tl.int32)
    room = count - above
    written = tl.full((), 0, tl.int32)
    offset = tl.arange(0, CHUNK)
    for chunk in range(0, length, CHUNK):
        valid = chunk + offset < length
        part = _ordered(tl.load(scores + chunk + offset, mask=valid, other=0.0), valid)
        greater, equal = part > threshold, (part == threshold) & valid
        both = (greater.to(tl.int32) << 16) + equal.to(tl.int32)  # counted in one scan: a chunk holds less than 2^15
        so_far = tl.cumsum(both, 0)
        equals = so_far & 0xFFFF
        place = written + (so_far >> 16) + tl.minimum(equals, room) - 1
        tl.store(output + place, chunk + offset, mask=greater | (equal & (equals <= room)))
        whole = tl.sum(both, 0)
        taken = tl.minimum(whole & 0xFFFF, room)
        written += (whole >> 16) + taken
        room -= taken
