"""Scores as the attention pass leaves them: softmax weights of four bits, relative to each block's largest one.

What a weight is relative to the whole context is known when all pieces are merged; until then it is kept relative to
the largest of its block and query. Few bits, since scores cost what reaches memory: among reads that fill its
bandwidth a written byte takes as long as seven read ones (H200, 2026-11-30: 21 MB written beside 2.1 GB read, 32 us;
the same stores to memory that stays in the cache, nothing). What was read for the last time is therefore discarded.

A code is a small float, of three bits of exponent and one of mantissa: among float32's own smallest numbers, so that a
shift decodes it, and 0 is 0. A weight w comes back within w / 5 or, if that is more, 0.0026 of the block's largest; so
does the mean weight of a unit of several tokens. Of the true score, the best 7 % by codes hold 0.9998 of what the best
7 % hold (`benchmarks/bench_scores.py`).

Of a row and a block of tokens one piece is kept: lines, one per scored query and head, of `block_n // unit // 8` words
with eight codes each, then each line's largest logit. Programs work their way through their rows at the same pace, so
pieces of all rows lie side by side, block by block. A thread of the matrix unit holds weights of tokens 2i, 2i + 1,
h + 2i, h + 2i + 1 of a block, or of units i and h + i where a unit is more tokens (h is half of them); these lie side
by side. `in_order` puts them back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .table_entry import ROW_SCORE_COUNT, ROW_SCORE_STEP, entry

_SUMMED = 8
"""Tokens whose weights the pass adds up where scores are of that many or more: they are in one warp's registers."""
_FRONT = 8
"""Rows of a tile that lie side by side in the matrix unit's layout."""
_CACHE_LINE = 32
"""Words of a line of the L2 cache; a piece is whole ones."""
_LINE = tl.constexpr(_CACHE_LINE)
_BITS = tl.constexpr(22)
"""Bits of a float32 mantissa that a code leaves out."""
_HALF = tl.constexpr(1 << 21)
_CODE = tl.constexpr(15 << 22)
_TOP = tl.constexpr(1.5 * 2.0**-120)
"""The float32 of code 15, for the weight 1."""


@dataclass(frozen=True)
class RawScores:
    """Room for what the attention pass writes of scored queries.

    Attributes:
        pieces: `[blocks, slots, size]` int32: `[lines, words]` of codes, `[lines]` float32 maxima, padding.
        lines: Scored queries times query heads: heads of a group side by side, query by query, group by group.
        group: Query heads per KV head.
        words: Words of codes per line.
        unit: Tokens per code.
        few: Whether a tile's scored rows are among its first `_FRONT`, see `tile_query`.
    """

    pieces: Tensor
    lines: int
    group: int
    words: int
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
        stored = min(_SUMMED, block_n // 8) if unit % _SUMMED == 0 else 1
        lines, words = queries * heads[0], block_n // stored // 8
        size = -(-lines * (words + 1) // _CACHE_LINE) * _CACHE_LINE
        pieces = torch.empty(-(-tokens // block_n), slots, size, dtype=torch.int32, device=device)
        few = queries <= 2 and lines // heads[1] <= _FRONT
        return cls(pieces, lines, heads[0] // heads[1], words, stored, few)


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
        other = entry(row + ROW_SCORE_STEP) - first  # 1 where a row has one scored query, or none
        front = tl.where(first == 0, 1, 0)
        there = (other >= front) & (other < BLOCK_M // GROUP) & (entry(row + ROW_SCORE_COUNT) == 2)
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
def _kept_numbers(numbers: tl.tensor, BLOCK_M: tl.constexpr, FEW: tl.constexpr) -> tl.tensor:
    """Of `[BLOCK_M]` those of the kept rows; as a tile of one column, each would be stored up to 16 times."""
    if FEW:
        numbers, _ = tl.split(tl.permute(tl.reshape(numbers, (BLOCK_M // 16, 2, 8)), (0, 2, 1)))
        if BLOCK_M == 32:
            numbers, _ = tl.split(tl.permute(numbers, (1, 0)))
        else:
            numbers = tl.reshape(numbers, (BLOCK_M // 2,))
    return numbers


@triton.jit
def _encode(weights: tl.tensor) -> tl.tensor:
    """Weights of 0 to _TOP as numbers from 0 to 15 (NaN: any, which spoils codes of the same row beside it)."""
    return (weights.to(tl.int32, bitcast=True) + _HALF) >> _BITS


@triton.jit
def _decode(words: tl.tensor, factor: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    shift: tl.constexpr = _BITS - 4 * PLACE
    bits = words << shift if shift > 0 else words >> -shift
    return tl.sum((bits & _CODE).to(tl.float32, bitcast=True) * factor, 0)


@triton.jit
def decode(words: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Sums over lines of factors times weights.

    Args:
        words: `[lines, words]` int32, eight codes each.
        factor: `[lines, words]` float32.

    Returns:
        `[words, 2, 2, 2]` float32: by code.
    """
    factor *= 1.0 / _TOP
    a = tl.join(_decode(words, factor, 0), _decode(words, factor, 4))
    b = tl.join(_decode(words, factor, 1), _decode(words, factor, 5))
    c = tl.join(_decode(words, factor, 2), _decode(words, factor, 6))
    d = tl.join(_decode(words, factor, 3), _decode(words, factor, 7))
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _store(pointer: tl.tensor, bits: tl.tensor, mask: tl.tensor, WIDTH: tl.constexpr) -> None:
    """Stores the last 8, 16 or 32 bits from the registers that hold them.

    `tl.store` would move the tile to a layout of its own through shared memory, with barriers in every block. The
    interpreter knows no PTX. The constant is the cache policy evict-last: the reduction reads the bits soon. Of what
    it marks, 0.5 GB of reads drive next to nothing out of the L2 cache, 2 GB about half: codes of 4 x 32k tokens and
    two scored queries cost 0.5 % of a pass, 5 to 6 without it, those of 32 x 16k the same with and without.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b64 last; setp.ne.b32 p, $3, 0; mov.b64 last, 0x14F0000000000000;"
        " @p st.global.L2::cache_hint.b" + WIDTH + " [$1], $2, last; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [pointer.to(tl.int64, bitcast=True), bits, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_scores(
    piece: tl.tensor,
    line: tl.tensor,
    wanted: tl.tensor,
    weights: tl.tensor,
    base: tl.tensor,
    peak: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    LINES: tl.constexpr,
    FEW: tl.constexpr,
    IN_PLACE: tl.constexpr,
) -> None:
    """Stores a block's weights of the wanted rows, 0 for units that a query does not see.

    Args:
        piece: Pointer to the piece of the row and block.
        line: `[kept]`, each kept row's line.
        wanted: `[kept]`.
        weights: `[BLOCK_M, BLOCK_N]` float32, 0 to 1.
        base: `[BLOCK_M]` float32, log2 of what the weights are relative to.
        peak: `[BLOCK_M]` float32, the block's largest logit in units of log(2); -inf where a query sees nothing of it.
        BLOCK_M: Rows.
        BLOCK_N: Tokens.
        UNIT: Tokens per code.
        LINES: Lines of the piece.
        FEW: Whether only kept rows may be wanted.
        IN_PLACE: Whether to store from the registers of the matrix unit's layout.
    """
    # Indices are relative to the block: reusing the loop's token numbers would move them between layouts every time.
    ROWS: tl.constexpr = BLOCK_M if not FEW else 8 if BLOCK_M <= 32 else BLOCK_M // 2
    STORES: tl.constexpr = BLOCK_N // 4 if UNIT == 1 else BLOCK_N // UNIT // 2
    weights = _kept(weights, BLOCK_M, BLOCK_N, FEW)
    base = _kept_numbers(base, BLOCK_M, FEW)
    peak = _kept_numbers(peak, BLOCK_M, FEW)
    scale = tl.exp2(tl.minimum(base - peak, 126.0)) * (_TOP / UNIT)  # bounded, for weights that are all 0
    if UNIT > 1:
        sums = tl.sum(tl.reshape(weights, (ROWS, BLOCK_N // UNIT, UNIT)), 2) * scale[:, None]
        a, b = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, STORES)), (0, 2, 1)))
        codes = _encode(a) + _encode(b) * 16
        pointer = piece.to(tl.pointer_type(tl.uint8), bitcast=True)
    else:
        even, odd = tl.split(tl.reshape(weights * scale[:, None], (ROWS, 2, STORES, 2)))
        a, c = tl.split(tl.permute(even, (0, 2, 1)))
        b, d = tl.split(tl.permute(odd, (0, 2, 1)))
        codes = _encode(a) + _encode(b) * 16 + _encode(c) * 256 + _encode(d) * 4096
        pointer = piece.to(tl.pointer_type(tl.uint16), bitcast=True)
    index = tl.arange(0, STORES)[None, :]
    pointer += line[:, None] * STORES + index
    mask = wanted[:, None] & (index >= 0)
    p_peak = piece + LINES * (BLOCK_N // UNIT // 8) + line
    peak = peak.to(tl.int32, bitcast=True)
    if IN_PLACE:
        _store(pointer, codes, mask, "8" if UNIT > 1 else "16")
        _store(p_peak, peak, wanted, "32")
    else:
        tl.store(pointer, codes.to(pointer.dtype.element_ty), mask=mask)
        tl.store(p_peak, peak, mask=wanted)


@triton.jit
def discard(
    pieces: tl.tensor,
    block_stride: tl.tensor,
    count: tl.tensor,
    outcome: tl.tensor,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Tells the L2 cache that pieces were read for the last time: it need not write them to memory.

    Two scored queries of 32 x 16k tokens (19 MB) made the cache write 21 MB in every pass, and 13 MB since. Scores of
    one code per token cost 9.5 % of the pass before and 6.5 % after, reduction included (H200, 2026-11-30).

    Args:
        pieces: Pointer to the first block's piece.
        block_stride: Words between pieces.
        count: Pieces that there are; the first BLOCKS of them are discarded.
        outcome: A float below infinity, or NaN, made of all that was read: so that it is discarded only then.
        BLOCKS: A power of two up to 32.
        WORDS: Words of a piece; its last line is discarded whole.
    """
    LINES: tl.constexpr = (WORDS + _LINE - 1) // _LINE
    SIDE: tl.constexpr = 32 // BLOCKS
    block = tl.arange(0, BLOCKS)
    read = (block < count) & ~(outcome == float("inf"))
    for first in tl.static_range(0, LINES, SIDE):
        line = first + tl.arange(0, SIDE)
        pointer = pieces + block[:, None] * block_stride + line[None, :] * _LINE
        mask = read[:, None] & (line < LINES)[None, :]
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p discard.global.L2 [$1], 128; mov.b32 $0, 0; }",
            "=r,l,r",
            [pointer.to(tl.int64, bitcast=True), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def in_order(scores: tl.tensor, PLACES: tl.constexpr, PER_BLOCK: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Scores `[PLACES]` as their codes lie in memory -> by unit."""
    if UNIT == 1:
        parts = tl.permute(tl.reshape(scores, (PLACES // PER_BLOCK, PER_BLOCK // 4, 2, 2)), (0, 2, 1, 3))
    else:
        parts = tl.permute(tl.reshape(scores, (PLACES // PER_BLOCK, PER_BLOCK // 2, 2)), (0, 2, 1))
    return tl.reshape(parts, (PLACES,))
