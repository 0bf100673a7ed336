"""Attention of every row kind in one launch: sparse draft rows, decode and verify rows, prompt chunks.

A program does one item of the work list (see `work`) for one KV head. It walks its piece of the row's context: a table
entry names a unit of tokens, a page or a granule of a sparse list, and the unit's shift is data, so that one program
serves both. Starts and lengths are read from the device: a CUDA graph serves every mixture of its bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .attention_kernel import attention_kernel
from .score_store import RawScores
from .tiles import Tile


@dataclass(frozen=True)
class Variant:
    """What a layer's attention does beyond the plain softmax; each is compiled in.

    Attributes:
        window: Tokens that a query sees, itself included; 0: all. Sparse lists have no window.
        softcap: Logits are capped to `softcap * tanh(logit / softcap)`; 0: not.
        sinks: `[Hq]` float32 logits that take part in the softmax without a value, or None.
    """

    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


PLAIN = Variant()


@dataclass(frozen=True)
class Partials:
    """Results of the pieces of split tiles, and what the scores need.

    Attributes:
        output: `[partials, Hkv, block_m, Dv]` float32, each normalised by its own sum.
        lse: `[partials, Hkv, block_m]` float32, log2-sum-exp2 of each piece.
        arrived: `[partials, Hkv]` int32, of every tile at its first piece: pieces that are there. 0 between launches.
        row_lse: `[T, Hq]` float32, final log2-sum-exp2 of scored rows.
    """

    output: Tensor
    lse: Tensor
    arrived: Tensor
    row_lse: Tensor

    @classmethod
    def empty(
        cls, partials: int, tokens: int, heads: tuple[int, int], block_m: int, value_size: int, device: torch.device
    ) -> Partials:
        """Room for `partials` pieces and `tokens` packed tokens; heads are (query heads, KV heads)."""
        query_heads, kv_heads = heads
        return cls(
            torch.empty(partials, kv_heads, block_m, value_size, dtype=torch.float32, device=device),
            torch.empty(partials, kv_heads, block_m, dtype=torch.float32, device=device),
            torch.zeros(partials, kv_heads, dtype=torch.int32, device=device),
            torch.empty(tokens, query_heads, dtype=torch.float32, device=device),
        )


def mixed_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lists: Tensor,
    rows: Tensor,
    items: Tensor,
    output: Tensor,
    partials: Partials,
    raw_scores: RawScores | None,
    scaling: float,
    tile: Tile,
    variant: Variant = PLAIN,
) -> None:
    """Attends all rows.

    Args:
        query: `[T, Hq, D]`, any strides with contiguous elements.
        keys: Pool `[pages, Hkv, page size, D]`, contiguous; memory past a row's length is never used.
        values: Pool `[pages, Hkv, page size, Dv]`, contiguous.
        page_table: `[requests, pages]` int32.
        lists: `[lists, capacity]` int32, units of each listed row: unit u holds token slots u * g ... u * g + g - 1.
        rows: `[R, ROW_COLUMNS]` int32.
        items: `[bucket, ITEM_COLUMNS]` int32.
        output: `[T, Hq, Dv]`, written for every row.
        partials: Scratch.
        raw_scores: What `reduce_scores` makes scores of, made for this tile; None where no row wants any.
        scaling: Softmax scale.
        tile: Shapes of the kernel's blocks.
        variant: Window, softcap, sinks.

    Raises:
        ValueError: The pool holds more tokens than the kernel's 32-bit places reach.
    """
    kv_heads, page_size, size = keys.shape[1:]
    if keys.shape[0] * kv_heads * page_size >= 2**31:
        raise ValueError(
            f"mixed_attention: got {keys.shape[0]} pages, expected under 2^31 (token, head) pairs per pool"
        )
    value_size = values.shape[3]
    heads = query.shape[1]
    scored = raw_scores is not None
    kernel = attention_kernel[(kv_heads, items.shape[0])]
    kernel(
        query,
        keys,
        values,
        page_table,
        lists,
        rows,
        items,
        output,
        partials.output,
        partials.lse,
        partials.arrived,
        partials.row_lse,
        partials.lse if raw_scores is None else raw_scores.pieces,  # not used without scores
        variant.sinks if variant.sinks is not None else partials.lse,
        scaling,
        variant.softcap,
        variant.window,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        output.stride(1),
        page_table.stride(0),
        lists.stride(0),
        0 if raw_scores is None else raw_scores.pieces.stride(0),
        0 if raw_scores is None else raw_scores.pieces.stride(1),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        PAGE=page_size,
        D=size,
        DV=value_size,
        D_PAD=triton.next_power_of_2(size),
        DV_PAD=triton.next_power_of_2(value_size),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SCORED=scored,
        SCORED_QUERIES=1 if raw_scores is None else raw_scores.lines // heads,
        UNIT=1 if raw_scores is None else raw_scores.unit,
        FEW=raw_scores is not None and raw_scores.few,
        IN_PLACE=keys.dtype != torch.float32 and keys.is_cuda,
        WINDOW=variant.window > 0,
        SOFTCAP=variant.softcap > 0,
        SINKS=variant.sinks is not None,
        SMALL_M=16 if tile.block_m > 16 >= heads // kv_heads else 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
