"""Stores logits from within the attention kernel, without disturbing it.

Layout of raw scores: `[score slots, blocks, Hkv, scored queries * group, block_n]`: what a program writes per block,
and what the reduction reads of a block, is one piece. Within a block, tokens 2i, 2i + 1, h + 2i, h + 2i + 1 (h is
block_n / 2) lie side by side: a thread of the matrix unit holds these four, and four threads fill a sector of 32
bytes. `in_order` puts them back.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_four(pointer: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, mask: tl.tensor) -> None:
    """Stores four half precision numbers from the registers that hold them.

    `tl.store` would move the tile to a layout of its own through shared memory, with barriers in every block, and the
    compiler would convert the numbers one by one at a quarter of the rate. The interpreter knows no PTX.

    The numbers are to stay in the L2 cache (the constant is the policy evict-last): the next layer overwrites them,
    and writes among reads cost memory several times their bytes. H200, 2026-11-29, what scores add to the pass: mixed
    steps of two verify rows 1.2 % (5.0 without), four rows of 32k tokens, whose scores do not fit, 6.5 (6.6).
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 x, y; .reg .b64 last; setp.ne.b32 p, $6, 0; mov.b64 last, 0x14F0000000000000;"
        " cvt.rn.f16x2.f32 x, $3, $2; cvt.rn.f16x2.f32 y, $5, $4;"
        " @p st.global.L2::cache_hint.v2.b32 [$1], {x, y}, last; mov.b32 $0, 0; }",
        "=r,l,f,f,f,f,r",
        [pointer.to(tl.int64, bitcast=True), a, b, c, d, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_scores(
    raw: tl.tensor,
    offset: tl.tensor,
    wanted: tl.tensor,
    logits: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IN_PLACE: tl.constexpr,
) -> None:
    """Stores a block's logits of the wanted rows; what lies past the context's end is garbage.

    Args:
        raw: Pointer to the block.
        offset: `[BLOCK_M]`, where each row lies in it.
        wanted: `[BLOCK_M]`.
        logits: `[BLOCK_M, BLOCK_N]`.
        BLOCK_M: Rows.
        BLOCK_N: Tokens.
        IN_PLACE: Whether to store half precision numbers from the registers that hold them.
    """
    # Indices are relative to the block: reusing the loop's token numbers would move them between layouts every time.
    if IN_PLACE:
        even, odd = tl.split(tl.reshape(logits, (BLOCK_M, 2, BLOCK_N // 4, 2)))
        a, c = tl.split(tl.permute(even, (0, 2, 1)))
        b, d = tl.split(tl.permute(odd, (0, 2, 1)))
        index = tl.arange(0, BLOCK_N // 4)[None, :]
        pointer = raw.to(tl.pointer_type(tl.int64), bitcast=True) + (offset[:, None] // 4 + index)
        _store_four(pointer, a, b, c, d, wanted[:, None] & (index >= 0))
    else:
        token = tl.arange(0, BLOCK_N)[None, :]
        place = token % (BLOCK_N // 2) // 2 * 4 + token // (BLOCK_N // 2) * 2 + token % 2
        tl.store(raw + (offset[:, None] + place), logits.to(raw.dtype.element_ty), mask=wanted[:, None] & (token >= 0))


@triton.jit
def token_at(place: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Token of each place in the stream of blocks."""
    inside = place % BLOCK_N
    return place // BLOCK_N * BLOCK_N + inside // 4 * 2 + inside // 2 % 2 * (BLOCK_N // 2) + inside % 2


@triton.jit
def in_order(scores: tl.tensor, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Scores `[TOKENS]` by place -> by token."""
    parts = tl.reshape(scores, (TOKENS // BLOCK_N, BLOCK_N // 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3)), (TOKENS,))
