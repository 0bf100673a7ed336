"""The Gumbel-max trick in one pass over the scores: the noise is computed where it is added."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise import Draws

_BLOCK = 2048
"""Scores per program."""
# SplitMix64 (see `noise`).
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def gumbel_argmax(scores: Tensor, draws: Draws, purpose: int | Tensor, *, by_round: bool) -> Tensor:
    """See `noise.Draw`; rows of scores must be contiguous. Where a score is NaN, any token."""
    count, vocabulary = scores.shape
    parts = triton.cdiv(vocabulary, _BLOCK)
    best = torch.empty(count, parts, dtype=torch.float64, device=scores.device)
    tokens = torch.empty(count, parts, dtype=torch.int64, device=scores.device)
    if count:
        uses = draws.uses(purpose, by_round=by_round)
        _gumbel_kernel[(count, parts)](
            scores,
            draws.keys,
            draws.positions,
            uses,
            best,
            tokens,
            vocabulary,
            scores.stride(0),
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return tokens.gather(1, best.argmax(-1, keepdim=True))[:, 0]


@triton.jit
def _gumbel_kernel(
    scores: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    uses: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A row's noisiest score among `BLOCK` tokens. Grid: (rows, parts of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    state = _mixed(tl.load(keys + row).to(tl.uint64) + _times_golden(tl.load(positions + row) + 1))
    state = _mixed(state + _times_golden(tl.load(uses + row)))

    token = part * BLOCK + tl.arange(0, BLOCK)
    bits = _mixed(state + _times_golden(token.to(tl.int64) + 1)) >> 12
    uniform = (bits.to(tl.float64) + 0.5) * (1.0 / (1 << 52))
    score = tl.load(scores + row * row_stride + token, mask=token < vocabulary, other=-float("inf"))
    noisy = score.to(tl.float64) - tl.log(-tl.log(uniform))
    noisy = tl.where(noisy == noisy, noisy, float("inf"))  # NaN has no place in an order

    place = row * tl.num_programs(1) + part
    tl.store(best + place, tl.max(noisy))
    tl.store(tokens + place, part * BLOCK + tl.argmax(noisy, 0))


@triton.jit
def _times_golden(value: tl.tensor) -> tl.tensor:
    return value.to(tl.uint64) * tl.full([], _GOLDEN, tl.uint64)


@triton.jit
def _mixed(value: tl.tensor) -> tl.tensor:
    """The output function of SplitMix64."""
    value = (value ^ (value >> 30)) * tl.full([], _MIX_1, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], _MIX_2, tl.uint64)
    return value ^ (value >> 31)
