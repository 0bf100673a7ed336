"""Attention of long prompt chunks by a library.

The Triton kernel is made for few queries over long contexts, where reading keys and values is all the cost. A prompt
chunk of thousands of queries is bound by its products, so it is cut into two: its *bulk*, which a library attends, and
its *end*, the last queries, which stay a row of the Triton kernel: their scores make the first sparse list, and a
masked last prompt token, which keeps no keys and values, is among them.

The library is cuDNN on Hopper and later, flash attention elsewhere. One H200, 2026-11-29, 8B shape, 4,096 queries over
16k tokens, bfloat16: cuDNN 1.6 ms (the part before the chunk alone), the Triton kernel 2.6, flash attention 2.8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import LayerSpec
from .kernels.merge import Part, merge
from .planner import PREFILL_TOKENS
from .request import BOOTSTRAP, Row, RowKind

LEAST_QUERIES = PREFILL_TOKENS
"""Queries from which on a chunk is cut: full chunks. Their shapes recur; cuDNN takes about 60 ms to plan a new one."""


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
    """Whether prompts of such layers are cut: 16-bit ones whose shape a library takes, on a device that has it.

    float32 stays with the Triton kernel: its products are exact, and the libraries have no kernel for it.
    """
    size = layer.key_size
    if layer.dtype not in (torch.bfloat16, torch.float16) or size != layer.value_size or size > 256 or size % 8:
        return False
    return layer.device.type != "cuda" or _has_library(layer)


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
            ends[index] = row._replace(queries=BOOTSTRAP, start=row.start + count)
            tokens[index] = token + count
    return ends, tokens, bulks


def attend(
    bulk: Bulk,
    states: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    scaling: float,
    output: Tensor,
) -> None:
    """Attention of a bulk, whose keys and values are stored already.

    The bulk's own tokens are one part, read from the states, and what lies before them another, of a copy of its
    pages: cuDNN as PyTorch calls it has no mask for both together.

    Args:
        bulk: Which tokens.
        states: Queries `[T, Hq, D]`, new keys and new values `[T, Hkv, D]` of all packed tokens.
        keys: Pool `[pages, Hkv, page size, D]`.
        values: Likewise.
        page_table: `[requests, pages]` int32.
        scaling: Softmax scale.
        output: `[T, Hq, D]`, written for the bulk's tokens.
    """
    query, key, value = (state[bulk.tokens] for state in states)
    own = part(query, key, value, True, scaling)
    if bulk.start == 0:
        output[bulk.tokens] = own.output
        return
    key, value = (gather(pool, page_table[bulk.slot], bulk.start) for pool in (keys, values))
    merge(own, part(query, key, value, False, scaling), output[bulk.tokens])


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


def part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float) -> Part:
    """Attention over one part of the context, by a library.

    Args:
        query: `[n, Hq, D]`, any strides with contiguous elements.
        key: `[L, Hkv, D]`, likewise.
        value: `[L, Hkv, D]`, likewise.
        causal: Whether query i sees only the tokens up to i (n = L), or all.
        scaling: Softmax scale.
    """
    library = _flash_attn() if query.is_cuda and not _has_cudnn(query, key) else None
    if library is not None:
        out, lse, _ = library(
            query[None], key[None], value[None], softmax_scale=scaling, causal=causal, return_attn_probs=True
        )
        return Part(out[0], lse[0].T)
    if not query.is_cuda:
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    aten = torch.ops.aten
    if not query.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scaling)
    elif _has_cudnn(query, key):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scaling)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, scale=scaling)
    return Part(out[0].transpose(0, 1), lse.reshape(len(q[0]), len(query)).T)


@functools.cache
def _flash_attn() -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """The function of the package flash-attn, or None where that cannot be imported."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


def _has_library(layer: LayerSpec) -> bool:
    """Whether torch runs a library's kernel for a layer: not on old GPUs, nor where the user turned it off."""
    query, key = (
        torch.empty(1, heads, layer.key_size, dtype=layer.dtype, device=layer.device)
        for heads in (layer.query_heads, layer.kv_heads)
    )
    return _has_cudnn(query, key) or torch.backends.cuda.can_use_flash_attention(_asked(query, key))


def _has_cudnn(query: Tensor, key: Tensor) -> bool:
    """Whether cuDNN attends states `[n, Hq, D]`, and faster than flash attention, which it does from Hopper on."""
    if torch.cuda.get_device_capability(query.device) < (9, 0):
        return False
    return torch.backends.cuda.can_use_cudnn_attention(_asked(query, key))


def _asked(query: Tensor, key: Tensor) -> torch.backends.cuda.SDPAParams:
    q, k = (states.transpose(0, 1)[None] for states in (query, key))
    return torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, len(query) == len(key), True)
