"""Counter-based noise: random numbers as a function of where they are used, whatever the batch or the schedule."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of SplitMix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a random number is for. `coupled` uses TARGET alone, for drafts too."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def row_key(seed: int, prompt: bytes, occurrence: int) -> int:
    """Signed 64-bit key of a row: seed, the prompt's visible tokens, and which of its equal rows this is."""
    digest = hashlib.blake2b(digest_size=8, person=b"hf_aspire")
    digest.update(int(seed).to_bytes(16, "little", signed=True))
    digest.update(int(occurrence).to_bytes(8, "little"))
    digest.update(prompt)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift of signed 64-bit integers."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The output function of SplitMix64: a bijection whose outputs pass as random. int64 products wrap."""
    value = _shift_right(value, 30).bitwise_xor_(value).mul_(_MIX_1)
    value = _shift_right(value, 27).bitwise_xor_(value).mul_(_MIX_2)
    return _shift_right(value, 31).bitwise_xor_(value)


@dataclass(frozen=True)
class Draws:
    """Where K draws stand: rows' keys, positions among the generated tokens, rounds; all `[K]` int64."""

    keys: Tensor
    positions: Tensor
    rounds: Tensor

    def pick(self, index: Tensor) -> Draws:
        """Some of them."""
        return Draws(self.keys[index], self.positions[index], self.rounds[index])

    def uses(self, purpose: int | Tensor, *, by_round: bool) -> Tensor:
        """`[K]` int64: a number of its own for every purpose (one for all, or `[K]`) and, if asked for, round."""
        return 8 * (self.rounds + 1 if by_round else torch.zeros_like(self.rounds)) + purpose

    def uniform(self, purpose: int | Tensor, count: int, *, by_round: bool) -> Tensor:
        """`[K, count]` float64 in (0, 1), a function of (key, position, purpose[, round]) and the column alone."""
        state = _mix(self.keys + _GOLDEN * (self.positions + 1))
        state = _mix(state + _GOLDEN * self.uses(purpose, by_round=by_round))
        columns = torch.arange(1, count + 1, dtype=torch.int64, device=state.device)
        bits = _mix(state[:, None] + _GOLDEN * columns)
        return _shift_right(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)

    def gumbel(self, purpose: int | Tensor, count: int, *, by_round: bool) -> Tensor:
        """`[K, count]` float64 Gumbel noise."""
        return self.uniform(purpose, count, by_round=by_round).log_().neg_().log_().neg_()


class Draw(Protocol):
    """Draws tokens by the Gumbel-max trick."""

    def __call__(self, scores: Tensor, draws: Draws, purpose: int | Tensor, *, by_round: bool) -> Tensor:
        """The argmax of scores plus Gumbel noise.

        Args:
            scores: `[K, V]` float32.
            draws: K draws.
            purpose: What they are for: one purpose for all, or `[K]` int64.
            by_round: Whether the noise differs from round to round.

        Returns:
            `[K]` int64 tokens.
        """


def gumbel_argmax(scores: Tensor, draws: Draws, purpose: int | Tensor, *, by_round: bool) -> Tensor:
    """See `Draw`."""
    return (scores + draws.gumbel(purpose, scores.shape[1], by_round=by_round)).argmax(-1)
