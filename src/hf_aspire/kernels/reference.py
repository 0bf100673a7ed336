"""Torch reference of every kernel, and the path that runs on a CPU.

Shapes: T packed tokens, n queries of one row, Hq query heads, Hkv key/value heads, L context tokens, D and Dv sizes.
Pools are `[token slot, Hkv, size]`; a *run* is a contiguous (begin, end) stretch of token slots, and a row's context
is its runs one after the other. Full rows attend on views of the pools; only sparse lists are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import work

Run = tuple[int, int]

_FOLDED_QUERIES = 64
"""Up to this many queries, heads of a group are folded into the query dimension (nothing is expanded); above it, in
prefills, keys and values are expanded once so that `is_causal` can skip half of the work."""


def store_kv(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Writes the new tokens' keys and values, `[T, Hkv, size]`, to their token slots `[T]`."""
    keys.index_copy_(0, slots, new_keys)
    values.index_copy_(0, slots, new_values)


def spoiled(new_keys: Tensor, new_values: Tensor, first: Tensor) -> Tensor:
    """Which packed tokens stand at or behind a draft whose keys or values are not finite (it overflowed, say).

    A masked weight of 0 times NaN is NaN: such a draft would reach the queries before it, which plain decoding never
    shows it. It must be stored as something finite, and what it and the tokens behind it attend to must be NaN, as in
    plain decoding, which comes there only by feeding it.

    Args:
        new_keys: `[T, Hkv, D]`.
        new_values: `[T, Hkv, Dv]`.
        first: `[T]` int64, for a draft in a verify row the row's first token, for all others the token itself.

    Returns:
        `[T]` bool.
    """
    finite = (new_keys.abs().amax((1, 2)) < torch.inf) & (new_values.abs().amax((1, 2)) < torch.inf)  # NaN is not
    count = (~finite).cumsum(0)
    return count > count[first]


def full_attention(
    query: Tensor, keys: Tensor, values: Tensor, runs: Sequence[Run], start: int, scaling: float
) -> Tensor:
    """Causal attention of one row over its whole context.

    Args:
        query: `[n, Hq, D]`; query i sees the context tokens 0 ... start + i.
        keys: Pool `[slots, Hkv, D]`.
        values: Pool `[slots, Hkv, Dv]`.
        runs: The context, L tokens in all.
        start: Context index of the first query.
        scaling: Softmax scale.

    Returns:
        `[n, Hq, Dv]`.
    """
    k, v = _context(keys, runs), _context(values, runs)
    count, heads = query.shape[0], query.shape[1]
    group, length = heads // k.shape[0], k.shape[1]
    if count > _FOLDED_QUERIES:
        plain = start == 0 and length == count
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            k.repeat_interleave(group, 0)[None],
            v.repeat_interleave(group, 0)[None],
            attn_mask=None if plain else _visible(count, length, start, query.device),
            is_causal=plain,
            scale=scaling,
        )
        return out[0].transpose(0, 1)
    mask = None if count == 1 else _visible(count, length, start, query.device).repeat(group, 1)
    out = F.scaled_dot_product_attention(_fold(query, group)[None], k[None], v[None], attn_mask=mask, scale=scaling)
    return _unfold(out[0], count)


def scored_attention(
    query: Tensor, keys: Tensor, values: Tensor, runs: Sequence[Run], start: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As `full_attention`, and returns the softmax weights: `([n, Hq, Dv], [n, Hq, L] in float32 or better)`.

    Walks the runs without copying keys or values, so it also serves rows whose pages are not contiguous.
    """
    count, heads = query.shape[0], query.shape[1]
    group = heads // keys.shape[1]
    exact = torch.promote_types(query.dtype, torch.float32)
    folded = _fold(query, group).to(exact)
    logits = torch.cat([folded @ keys[b:e].permute(1, 2, 0).to(exact) for b, e in runs], -1) * scaling
    length = logits.shape[-1]
    if count > 1:
        logits = logits.masked_fill(~_visible(count, length, start, query.device).repeat(group, 1), -torch.inf)
    weights = torch.softmax(logits, -1)
    out = torch.zeros((), dtype=exact, device=query.device)
    first = 0
    for begin, end in runs:
        out = out + weights[..., first : first + end - begin] @ values[begin:end].transpose(0, 1).to(exact)
        first += end - begin
    kv_heads = weights.shape[0]
    by_head = weights.view(kv_heads, group, count, length).permute(2, 0, 1, 3).reshape(count, heads, length)
    return _unfold(out.to(query.dtype), count), by_head


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scaling: float
) -> Tensor:
    """Attention of R one-query rows over lists of token slots; exactly the listed slots are read.

    Args:
        query: `[R, Hq, D]`.
        keys: Pool `[slots, Hkv, D]`.
        values: Pool `[slots, Hkv, Dv]`.
        slots: `[R, S]`; entries from a row's length on must repeat a listed slot and count for nothing.
        lengths: `[R]`, listed slots per row.
        scaling: Softmax scale.

    Returns:
        `[R, Hq, Dv]`.
    """
    rows, listed = slots.shape
    group = query.shape[1] // keys.shape[1]
    flat = slots.reshape(-1)
    k = keys.index_select(0, flat).view(rows, listed, *keys.shape[1:]).transpose(1, 2)
    v = values.index_select(0, flat).view(rows, listed, *values.shape[1:]).transpose(1, 2)
    q = query.view(rows, keys.shape[1], group, query.shape[2])
    mask = (torch.arange(listed, device=slots.device) < lengths[:, None])[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(rows, query.shape[1], values.shape[2])


def select(scores: Tensor, count: int) -> Tensor:
    """The `count` best units of every list, ascending; ties go to the lowest index.

    Args:
        scores: `[lists, units]`.
        count: Units to choose, at most `units`.

    Returns:
        `[lists, count]` int64 unit indices.
    """
    if count == 0:
        return torch.zeros(scores.shape[0], 0, dtype=torch.int64, device=scores.device)
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # NaN is chosen last
    threshold = torch.topk(scores, count, dim=-1).values[:, -1:]
    better, equal = scores > threshold, scores == threshold
    room = count - better.sum(-1, keepdim=True)
    chosen = better | (equal & (equal.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(scores.shape[0], count)


def store_pages(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """As the kernel's `store_kv`, on pools `[pages, Hkv, page size, D or Dv]`; negative slots are not written."""
    kept = slots >= 0
    places = slots[kept].long()
    lost = ~new_values.isfinite().all(-1, keepdim=True)
    new_keys, new_values = new_keys.masked_fill(lost, torch.nan), new_values.masked_fill(lost, 0)
    page, place = places // keys.shape[2], places % keys.shape[2]
    keys[page, :, place] = new_keys[kept]
    values[page, :, place] = new_values[kept]


def row_places(row: Sequence[int], page_table: Tensor, lists: Tensor) -> Tensor:
    """Token slots `[L]` of a row's context; `row` is an entry of the row table (see `work`)."""
    table = (lists if row[work.ROW_LISTED] else page_table)[row[work.ROW_TABLE]].long()
    token = torch.arange(row[work.ROW_LENGTH], device=table.device)
    unit = 1 << row[work.ROW_SHIFT]
    return table[token // unit] * unit + token % unit


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    start: int,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one row, paged or listed, in float64.

    Args:
        query: `[n, Hq, D]`; query i sees the context tokens 0 ... start + i.
        keys: Pool `[pages, Hkv, page size, D]`.
        values: Pool `[pages, Hkv, page size, Dv]`.
        places: Token slots of the context, `[L]`.
        start: Context index of the first query.
        scaling: Softmax scale.
        window: Tokens that a query sees, itself included; 0: all.
        softcap: Logits are capped to `softcap * tanh(logit / softcap)`; 0: not.
        sinks: `[Hq]` logits that take part in the softmax without a value.

    Returns:
        Output `[n, Hq, Dv]` and softmax weights `[n, Hq, L]`, float64.
    """
    count, heads = query.shape[:2]
    group, size = heads // keys.shape[1], keys.shape[2]
    k = keys[places // size, :, places % size].double().repeat_interleave(group, 1)
    v = values[places // size, :, places % size].double().repeat_interleave(group, 1)
    logits = torch.einsum("nhd,lhd->nhl", query.double(), k) * scaling
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    visible = _visible(count, len(places), start, query.device)
    if window:
        visible &= ~_visible(count, len(places), start - window, query.device)
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[None, :, None].expand(count, -1, 1)], -1)
    weights = torch.softmax(logits, -1)[..., : len(places)]
    return torch.einsum("nhl,lhd->nhd", weights, v), weights


def reduce_scores(weights: Tensor, unit: int) -> Tensor:
    """Softmax weights `[queries, Hq, L]` -> scores `[units]`: averaged over queries and heads, summed per unit."""
    score = weights.mean((0, 1))
    return F.pad(score, (0, -len(score) % unit)).unflatten(0, (-1, unit)).sum(-1)


def coded(weights: Tensor, block: int, unit: int) -> Tensor:
    """Softmax weights as the attention pass keeps them, in four bits relative to the largest of their block.

    Args:
        weights: `[..., L]` float64.
        block: Tokens per block.
        unit: Tokens per code.

    Returns:
        `[..., units]` float64: sums of `unit` weights each.
    """
    units = -(-weights.shape[-1] // unit)
    blocks = F.pad(weights, (0, -weights.shape[-1] % block)).unflatten(-1, (-1, block))
    largest = blocks.amax(-1, keepdim=True)
    means = blocks.unflatten(-1, (-1, unit)).mean(-1) / largest.clamp_min(torch.finfo(blocks.dtype).tiny)
    # Codes are the leading bits of float32's smallest numbers, rounded to one bit of mantissa: 15 is 1.5 * 2^-120.
    top = 1.5 * 2.0**-120
    codes = ((means * top).float().view(torch.int32) + (1 << 21)) >> 22
    means = (codes << 22).view(torch.float32).double() / top
    return (means * largest * unit).flatten(-2)[..., :units]


def _context(pool: Tensor, runs: Sequence[Run]) -> Tensor:
    """A row's context as `[heads, L, size]`: a view where it is one run."""
    parts = [pool[begin:end] for begin, end in runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)


def _visible(count: int, length: int, start: int, device: torch.device) -> Tensor:
    """Causal mask `[n, L]`: query i sees tokens 0 ... start + i."""
    last = torch.arange(start, start + count, device=device)[:, None]
    return torch.arange(length, device=device)[None, :] <= last


def _fold(query: Tensor, group: int) -> Tensor:
    """[n, Hkv * group, D] -> [Hkv, group * n, D]."""
    count, heads, size = query.shape
    folded = query.view(count, heads // group, group, size).permute(1, 2, 0, 3)
    return folded.reshape(heads // group, group * count, size)


def _unfold(output: Tensor, count: int) -> Tensor:
    """[Hkv, group * n, Dv] -> [n, Hkv * group, Dv]."""
    kv_heads, folded, size = output.shape
    by_group = output.view(kv_heads, folded // count, count, size)
    return by_group.permute(2, 0, 1, 3).reshape(count, kv_heads * (folded // count), size)
