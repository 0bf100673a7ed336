"""Attention of long prompt chunks by flash attention.

The Triton kernel is made for few queries over long contexts, where reading keys and values is all the cost. A prompt
chunk of thousands of queries is bound by its products, so it is cut into two: its *bulk*, which flash attention reads,
and its *end*, the last queries, which stay a row of the Triton kernel: their scores make the first sparse list, and a
masked last prompt token, which keeps no keys and values, is among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from .cache import LayerSpec
from .request import BOOTSTRAP, Row, RowKind

LEAST_QUERIES = 256
"""Queries from which on a prompt chunk is cut: below it, gathering pages and more launches hardly pay."""


@dataclass(frozen=True)
class Bulk:
    """The queries of a prompt chunk but for its last ones.

    Attributes:
        tokens: The packed tokens.
        start: Context index of the first query.
        slot: The request's row of the page table.
    """

    tokens: slice
    start: int
    slot: int

    @property
    def length(self) -> int:
        """Context tokens up to the last query, which sees all of them."""
        return self.start + self.tokens.stop - self.tokens.start


def serves(layer: LayerSpec) -> bool:
    """Whether prompts of such layers are cut: 16-bit ones whose shape flash attention takes, on a device that has it.

    float32 stays with the Triton kernel: its products are exact, and flash attention has no kernel for it.
    """
    size = layer.key_size
    if layer.dtype not in (torch.bfloat16, torch.float16) or size != layer.value_size or size > 256 or size % 8:
        return False
    return layer.device.type != "cuda" or _has_flash(layer)


def cut(rows: Sequence[Row], offsets: Sequence[int]) -> tuple[list[Row], list[int], list[Bulk]]:
    """Cuts the long prompt chunks among a step's rows.

    Args:
        rows: The rows.
        offsets: First packed token of every row.

    Returns:
        The rows, every long chunk replaced by its end; the first packed token of each; the bulks.
    """
    ends, tokens, bulks = list(rows), list(offsets), []
    for index, row in enumerate(rows):
        if row.kind is RowKind.PREFILL and row.queries >= LEAST_QUERIES:
            count, token = row.queries - BOOTSTRAP, offsets[index]
            bulks.append(Bulk(slice(token, token + count), row.start, row.request.row))
            ends[index] = replace(row, queries=BOOTSTRAP, start=row.start + count)
            tokens[index] = token + count
    return ends, tokens, bulks


def attend(
    bulk: Bulk, states: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, page_table: Tensor, scaling: float
) -> Tensor:
    """Attention of a bulk, whose keys and values are stored already.

    Args:
        bulk: Which tokens.
        states: Queries `[T, Hq, D]`, new keys and new values `[T, Hkv, D]` of all packed tokens.
        keys: Pool `[pages, Hkv, page size, D]`.
        values: Likewise.
        page_table: `[requests, pages]` int32.
        scaling: Softmax scale.

    Returns:
        `[n, Hq, D]`.
    """
    query, key, value = (state[bulk.tokens] for state in states)
    if bulk.start:
        key, value = (gather(pool, page_table[bulk.slot], bulk.length) for pool in (keys, values))
    return causal_attention(query, key, value, scaling)


def gather(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens `[length, Hkv, D]` of a request.

    Args:
        pool: `[pages, Hkv, page size, D]`.
        pages: The request's row of the page table, `[n]` int32.
        length: Context tokens.
    """
    used = pages[: -(-length // pool.shape[2])].long()
    # By head, as in the pages: each copy moves whole pages of a head.
    return pool[used].transpose(0, 1).flatten(1, 2)[:, :length].transpose(0, 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of the last n of L tokens, each over the tokens up to itself.

    Args:
        query: `[n, Hq, D]`, any strides with contiguous elements.
        key: `[L, Hkv, D]`, likewise.
        value: `[L, Hkv, D]`, likewise.
        scaling: Softmax scale.

    Returns:
        `[n, Hq, D]`.
    """
    library = _flash_attn() if query.is_cuda else None
    if library is not None:
        return library(query[None], key[None], value[None], softmax_scale=scaling, causal=True)[0]
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    if query.is_cuda:
        # What SDPA calls for `causal_lower_right`. We call it ourselves, since for n = L SDPA may prefer cuDNN, which
        # makes a plan for every new length. Its causal mask is the lower-right one, and it takes grouped heads.
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scaling)[0]
    else:
        mask = causal_lower_right(len(query), len(key))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


@functools.cache
def _flash_attn() -> Callable[..., Tensor] | None:
    """The function of the package flash-attn, or None where that cannot be imported."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


def _has_flash(layer: LayerSpec) -> bool:
    """Whether torch runs its flash kernel for a layer: not on old GPUs, nor where the user turned it off."""
    query, key = (
        torch.empty(1, heads, 1, layer.key_size, dtype=layer.dtype, device=layer.device)
        for heads in (layer.query_heads, layer.kv_heads)
    )
    return torch.backends.cuda.can_use_flash_attention(
        torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, False, True)
    )
