"""Scores as the attention pass leaves them: softmax weights of one byte, relative to each block's running maximum.

A weight is known only relative to the maximum met so far; the final log-sum-exp comes when all pieces are merged. A
byte holds five bits of exponent and three of mantissa: within 1/16 of a weight, down to 2^-32 of the largest one. That
is what rounding a logit of 32 or more to bfloat16 does to its weight, and it is bytes that scores cost: few writes
among many reads take several times their share of the memory's time.

Layout: `[score slots, blocks, Hkv, scored queries * group, block_n // unit]`. What a program writes per block, and
what the reduction reads of one, is one piece. Where the unit is one token, tokens 2i, 2i + 1, h + 2i, h + 2i + 1 of a
block (h is block_n / 2) lie side by side: a thread of the matrix unit holds these four. `in_order` puts them back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import work
from .table_entry import entry

_ROW_SCORE_STEP = tl.constexpr(work.ROW_SCORE_STEP)
_ROW_SCORE_COUNT = tl.constexpr(work.ROW_SCORE_COUNT)

_SUMMED = 8
"""Tokens whose weights the pass adds up where scores are of that many or more: they are in one warp's registers."""
_FRONT = 8
"""Rows of a tile that lie side by side in the matrix unit's layout."""
_BITS = tl.constexpr(20)
"""Bits of a float32 mantissa that a byte leaves out."""
_HALF = tl.constexpr(1 << 19)
# Leading bits of the float32 that byte 0 stands for. Byte 255 then stands for 1, the largest weight, or for _SUMMED.
_FIRST = tl.constexpr((127 << 3) - 255)
_FIRST_OF_SUMS = tl.constexpr((130 << 3) - 255)


@dataclass(frozen=True)
class RawScores:
    """Room for what the attention pass writes of scored queries.

    Attributes:
        weights: `[slots, blocks, Hkv, queries * group, block_n // unit]` uint8.
        maxima: `[slots, blocks, Hkv, queries * group]` float32, log2 of what the block's weights are relative to.
        unit: Tokens per weight.
        few: Whether a tile's scored rows are among its first `_FRONT`, see `tile_query`.
    """

    weights: Tensor
    maxima: Tensor
    unit: int
    few: bool

    @classmethod
    def empty(
        cls,
        slots: int,
        queries: int,
        tokens: int,
        heads: tuple[int, int],
        block_n: int,
        unit: int,
        device: torch.device,
    ) -> RawScores:
        """Room for `slots` rows of up to `queries` scored queries and `tokens` context tokens.

        Args:
            slots: Rows that want scores.
            queries: Most scored queries of a row; up to two must be its first query, and any other.
            tokens: Longest context.
            heads: Query heads and KV heads.
            block_n: Tokens per block of the kernel.
            unit: Tokens per score that is wanted in the end, a power of two.
            device: Where.
        """
        stored = _SUMMED if unit % _SUMMED == 0 else 1
        lines = (slots, -(-tokens // block_n), heads[1], queries * heads[0] // heads[1])
        weights = torch.empty(*lines, block_n // stored, dtype=torch.uint8, device=device)
        few = queries <= 2 and lines[3] <= _FRONT
        return cls(weights, torch.empty(lines, dtype=torch.float32, device=device), stored, few)


@triton.jit
def tile_query(
    row: tl.tensor, first: tl.tensor, m: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, FEW: tl.constexpr
) -> tl.tensor:
    """The query of each row of a tile, the heads of a group side by side.

    With few scored queries, a row's first and another one, that other one changes places with the query that would
    stand behind the first (or at the start of its own tile): what is scored stands in front.

    Args:
        row: Pointer to the row's entry of the row table.
        first: First query of the tile.
        m: Rows of the tile.
        GROUP: Query heads per KV head.
        BLOCK_M: Rows of a tile, at least of one that holds all queries of its row.
        FEW: Whether few queries are scored.
    """
    place = m // GROUP
    if FEW:
        other = entry(row + _ROW_SCORE_STEP) - first  # 1 where a row has one scored query, or none
        front = tl.where(first == 0, 1, 0)
        there = (other >= front) & (other < BLOCK_M // GROUP) & (entry(row + _ROW_SCORE_COUNT) == 2)
        swapped = tl.where(place == front, other, tl.where(place == other, front, place))
        place = tl.where(there, swapped, place)
    return first + place


@triton.jit
def kept_rows(BLOCK_M: tl.constexpr, FEW: tl.constexpr) -> tl.tensor:
    """Rows of a tile that scores are stored of, see `_kept`."""
    if FEW:
        row = tl.arange(0, 8 if BLOCK_M <= 32 else BLOCK_M // 2)
        row = row // 8 * 16 + row % 8
    else:
        row = tl.arange(0, BLOCK_M)
    return row


@triton.jit
def _kept(tile: tl.tensor, BLOCK_M: tl.constexpr, N: tl.constexpr, FEW: tl.constexpr) -> tl.tensor:
    """Of a tile `[BLOCK_M, N]` the kept rows.

    A thread of the matrix unit holds numbers of row r and row r + 8 of every 16, and of a small tile all such pairs:
    what is dropped costs nothing, and three quarters of the work on a tile of 32 rows need not be done.
    """
    if FEW:
        tile, _ = tl.split(tl.permute(tl.reshape(tile, (BLOCK_M // 16, 2, 8, N)), (0, 2, 3, 1)))
        if BLOCK_M == 32:
            tile, _ = tl.split(tl.permute(tile, (1, 2, 0)))
        else:
            tile = tl.reshape(tile, (BLOCK_M // 2, N))
    return tile


@triton.jit
def encode(weights: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Sums of UNIT weights of 0 to 1 (NaN: anything) as numbers from 0 to 255."""
    first: tl.constexpr = _FIRST_OF_SUMS if UNIT > 1 else _FIRST
    bits = tl.maximum(weights.to(tl.int32, bitcast=True), first << _BITS)  # integers order as positive floats do
    return ((bits + _HALF) >> _BITS) - first


@triton.jit
def decode(codes: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """The sums of weights behind bytes, float32."""
    first: tl.constexpr = _FIRST_OF_SUMS if UNIT > 1 else _FIRST
    return ((codes.to(tl.int32) + first) << _BITS).to(tl.float32, bitcast=True)


@triton.jit
def _store_four(pointer: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, mask: tl.tensor) -> None:
    """Encodes four weights and stores them from the registers that hold them.

    `tl.store` would move the tile to a layout of its own through shared memory, with barriers in every block. The
    interpreter knows no PTX. Constants: the float that byte 0 stands for, and 16 times what makes a float's bits the
    byte's, so that the byte is the topmost; then the cache policy evict-last, since the next layer overwrites the
    bytes: they need not leave the L2 cache.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, b, c, d; .reg .b64 last; setp.ne.b32 p, $6, 0;"
        " max.f32 a, $2, 0f2F900000; max.f32 b, $3, 0f2F900000; max.f32 c, $4, 0f2F900000; max.f32 d, $5, 0f2F900000;"
        " mad.lo.u32 a, a, 16, 0x07800000; mad.lo.u32 b, b, 16, 0x07800000;"
        " mad.lo.u32 c, c, 16, 0x07800000; mad.lo.u32 d, d, 16, 0x07800000;"
        " prmt.b32 a, a, b, 0x0073; prmt.b32 c, c, d, 0x0073; prmt.b32 a, a, c, 0x5410;"
        " mov.b64 last, 0x14F0000000000000; @p st.global.L2::cache_hint.b32 [$1], a, last; mov.b32 $0, 0; }",
        "=r,l,f,f,f,f,r",
        [pointer.to(tl.int64, bitcast=True), a, b, c, d, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store_byte(pointer: tl.tensor, code: tl.tensor, mask: tl.tensor) -> None:
    """Stores bytes from the registers that hold them."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.u8 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [pointer.to(tl.int64, bitcast=True), code, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store_float(pointer: tl.tensor, number: tl.tensor, mask: tl.tensor) -> None:
    """Stores float32 numbers from the registers that hold them."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,f,r",
        [pointer.to(tl.int64, bitcast=True), number, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_scores(
    raw: tl.tensor,
    maxima: tl.tensor,
    line: tl.tensor,
    wanted: tl.tensor,
    weights: tl.tensor,
    base: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    FEW: tl.constexpr,
    IN_PLACE: tl.constexpr,
) -> None:
    """Stores a block's weights of the wanted rows; units that a query does not see get the least there is.

    Args:
        raw: Pointer to the block's weights.
        maxima: Pointer to its maxima.
        line: `[kept]`, each kept row's line in the block.
        wanted: `[kept]`.
        weights: `[BLOCK_M, BLOCK_N]` float32, 0 to 1.
        base: `[BLOCK_M]` float32, log2 of what the weights are relative to.
        BLOCK_M: Rows.
        BLOCK_N: Tokens.
        UNIT: Tokens per stored weight.
        FEW: Whether only kept rows may be wanted.
        IN_PLACE: Whether to store from the registers of the matrix unit's layout.
    """
    # Indices are relative to the block: reusing the loop's token numbers would move them between layouts every time.
    ROWS: tl.constexpr = BLOCK_M if not FEW else 8 if BLOCK_M <= 32 else BLOCK_M // 2
    weights = _kept(weights, BLOCK_M, BLOCK_N, FEW)
    base = tl.reshape(_kept(base[:, None], BLOCK_M, 1, FEW), (ROWS,))
    if UNIT > 1:
        sums = tl.sum(tl.reshape(weights, (ROWS, BLOCK_N // UNIT, UNIT)), 2)
        unit = tl.arange(0, BLOCK_N // UNIT)[None, :]
        p_sums = raw + (line[:, None] * (BLOCK_N // UNIT) + unit)
        if IN_PLACE:
            _store_byte(p_sums, encode(sums, UNIT), wanted[:, None] & (unit >= 0))
        else:
            tl.store(p_sums, encode(sums, UNIT).to(tl.uint8), mask=wanted[:, None] & (unit >= 0))
    elif IN_PLACE:
        even, odd = tl.split(tl.reshape(weights, (ROWS, 2, BLOCK_N // 4, 2)))
        a, c = tl.split(tl.permute(even, (0, 2, 1)))
        b, d = tl.split(tl.permute(odd, (0, 2, 1)))
        index = tl.arange(0, BLOCK_N // 4)[None, :]
        pointer = raw.to(tl.pointer_type(tl.int32), bitcast=True) + (line[:, None] * (BLOCK_N // 4) + index)
        _store_four(pointer, a, b, c, d, wanted[:, None] & (index >= 0))
    else:
        token = tl.arange(0, BLOCK_N)[None, :]
        place = token % (BLOCK_N // 2) // 2 * 4 + token // (BLOCK_N // 2) * 2 + token % 2
        p_weights = raw + (line[:, None] * BLOCK_N + place)
        tl.store(p_weights, encode(weights, UNIT).to(tl.uint8), mask=wanted[:, None] & (token >= 0))
    if IN_PLACE:
        _store_float(maxima + line, base, wanted)
    else:
        tl.store(maxima + line, base, mask=wanted)


@triton.jit
def first_token(place: tl.tensor, BLOCK_N: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """First token of each place in the stream of blocks."""
    if UNIT > 1:
        return place * UNIT
    inside = place % BLOCK_N
    return place // BLOCK_N * BLOCK_N + inside // 4 * 2 + inside // 2 % 2 * (BLOCK_N // 2) + inside % 2


@triton.jit
def in_order(scores: tl.tensor, PLACES: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Scores `[PLACES]` by place -> by token."""
    if UNIT == 1:  # what follows an early return would be compiled all the same
        parts = tl.reshape(scores, (PLACES // BLOCK_N, BLOCK_N // 4, 2, 2))
        scores = tl.reshape(tl.permute(parts, (0, 2, 1, 3)), (PLACES,))
    return scores
