"""Counter-based noise, and the rules that turn logits into drafted and committed tokens.

Greedy decoding and `coupled` sampling share one rule: draft and target both take the argmax of their scores plus the
same noise (none when greedy); the target's choice is committed, and a draft counts as accepted where both agree. The
committed token is a draw from the processed target whatever the draft did (Gumbel-max trick).

`rejection` is speculative sampling: a draft x from q is kept with probability min(1, p(x) / q(x)); the first one that
is not is replaced by a draw from max(p - q, 0), and behind a fully accepted draft comes a draw from p.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
import torch.nn.functional as F
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

    def uniform(self, purpose: Purpose, count: int, *, by_round: bool) -> Tensor:
        """`[K, count]` float64 in (0, 1), a function of (key, position, purpose[, round]) and the column alone."""
        state = _mix(self.keys + _GOLDEN * (self.positions + 1))
        rounds = self.rounds + 1 if by_round else torch.zeros_like(self.rounds)
        state = _mix(state + _GOLDEN * (int(purpose) + 8 * rounds))
        columns = torch.arange(1, count + 1, dtype=torch.int64, device=state.device)
        bits = _mix(state[:, None] + _GOLDEN * columns)
        return _shift_right(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)

    def gumbel(self, purpose: Purpose, count: int, *, by_round: bool) -> Tensor:
        """`[K, count]` float64 Gumbel noise."""
        return self.uniform(purpose, count, by_round=by_round).log_().neg_().log_().neg_()


@dataclass(frozen=True)
class Outcome:
    """What V verified rows decided.

    Attributes:
        accepted: `[V]` int64, drafts kept.
        tokens: `[V, most queries]` int64; the first `accepted + 1` of a row are committed.
        best: `[K]` float32, the highest score of each query; NaN if any of its scores is.
    """

    accepted: Tensor
    tokens: Tensor
    best: Tensor


class Sampler(Protocol):
    """Turns processed scores into tokens."""

    def draft(self, scores: Tensor, draws: Draws, slots: Tensor, depths: Tensor) -> Tensor:
        """Proposes one token for each of R rows.

        Args:
            scores: `[R, V]` float32, processed.
            draws: R draws.
            slots: `[R]` request slots.
            depths: `[R]` drafts the row holds already.

        Returns:
            `[R]` int64.
        """

    def verify(self, scores: Tensor, draws: Draws, drafts: Tensor, counts: Tensor, slots: Tensor) -> Outcome:
        """Decides V rows.

        Args:
            scores: `[K, V]` float32, processed; the rows' queries one after the other.
            draws: K draws.
            drafts: `[V, most drafts]` int64; entries past a row's drafts count for nothing.
            counts: `[V]` int64, queries of each row: its drafts + 1.
            slots: `[V]` request slots.
        """

    def step(self, scores: Tensor, draws: Draws, drafts: Tensor, depths: Tensor) -> Tensor:
        """Decides one position of every request slot.

        Args:
            scores: `[B, V]` float32, processed, in slot order.
            draws: B draws.
            drafts: `[B]` int64, the draft at this position, or -1.
            depths: `[B]` int64, which draft of its round it is.

        Returns:
            `[B]` int64; a draft was accepted where its token comes back.
        """

    def can_choose(self, best: float) -> bool:
        """Whether a token can be chosen from scores whose highest is `best`."""

    @property
    def takes_highest(self) -> bool:
        """Whether it always chooses the highest score."""


class ArgmaxSampler:
    """Greedy decoding, or `coupled` sampling when `sample`."""

    def __init__(self, sample: bool) -> None:
        self._sample = sample

    def draft(self, scores: Tensor, draws: Draws, slots: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        return self._choose(scores, draws)[0]

    def verify(self, scores: Tensor, draws: Draws, drafts: Tensor, counts: Tensor, slots: Tensor) -> Outcome:
        """See `Sampler`."""
        chosen, best = self._choose(scores, draws)
        tokens = _by_row(chosen, counts, drafts.shape[1] + 1)
        return Outcome(_leading(tokens[:, :-1] == drafts, counts - 1), tokens, best)

    def step(self, scores: Tensor, draws: Draws, drafts: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        return self._choose(scores, draws)[0]

    @property
    def takes_highest(self) -> bool:
        """See `Sampler`."""
        return not self._sample

    def can_choose(self, best: float) -> bool:
        """See `Sampler`. Plain greedy decoding takes the first token where all are -inf, and so do we."""
        return math.isfinite(best) if self._sample else not math.isnan(best)

    def _choose(self, scores: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Tokens `[K]`, and the highest scores `[K]`."""
        if not self._sample:
            best = scores.max(-1)  # the first of equals, as `argmax`, and on a CPU in a third of its time
            return best.indices, best.values
        noise = draws.gumbel(Purpose.TARGET, scores.shape[1], by_round=False)
        return (scores + noise).argmax(-1), scores.amax(-1)


class RejectionSampler:
    """Speculative sampling. Keeps every draft's distribution until its round is verified.

    Args:
        requests: Request slots.
        max_draft: Most drafts per round.
        vocabulary: Size of a distribution.
        device: Where scores live.
    """

    def __init__(self, requests: int, max_draft: int, vocabulary: int, device: torch.device) -> None:
        self._proposed = torch.zeros(requests, max_draft, vocabulary, dtype=torch.float32, device=device)

    def draft(self, scores: Tensor, draws: Draws, slots: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        proposed, tokens = torch.softmax(scores, -1), _draw(scores, draws, Purpose.DRAFT)
        surely = F.one_hot(tokens, scores.shape[1]).to(proposed)  # scores without a number leave nothing to chance
        self._proposed[slots, depths] = torch.where(proposed.isnan(), surely, proposed)
        return tokens

    def replace(self, slot: int, depth: int, token: int) -> None:
        """Records that a draft was put in place of the drawn one: it was proposed with probability one."""
        self._proposed[slot, depth] = 0
        self._proposed[slot, depth, token] = 1

    def verify(self, scores: Tensor, draws: Draws, drafts: Tensor, counts: Tensor, slots: Tensor) -> Outcome:
        """See `Sampler`."""
        rows, most = counts.shape[0], drafts.shape[1]
        starts = counts.cumsum(0) - counts
        target = torch.softmax(scores, -1)
        accepted = counts.new_zeros(rows)
        if most:
            uniform = _by_row(draws.uniform(Purpose.ACCEPT, 1, by_round=True)[:, 0], counts, most)
            depth = torch.arange(most, device=counts.device)
            place = (starts[:, None] + depth).clamp(max=scores.shape[0] - 1)
            known = drafts.clamp(min=0)
            p = target[place, known]
            q = self._proposed[slots[:, None], depth, known]
            accepted = _leading(uniform * q < p, counts - 1)
        last = starts + accepted
        final = self._final(scores[last], target[last], draws.pick(last), accepted < counts - 1, slots, accepted)
        tokens = torch.cat([drafts, drafts.new_zeros(rows, 1)], 1)
        tokens[torch.arange(rows, device=counts.device), accepted] = final
        return Outcome(accepted, tokens, scores.amax(-1))

    def step(self, scores: Tensor, draws: Draws, drafts: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        slots = torch.arange(scores.shape[0], device=scores.device)
        target = torch.softmax(scores, -1)
        has_draft, known = drafts >= 0, drafts.clamp(min=0)
        depths = depths.clamp(max=self._proposed.shape[1] - 1)
        uniform = draws.uniform(Purpose.ACCEPT, 1, by_round=True)[:, 0]
        kept = has_draft & (uniform * self._proposed[slots, depths, known] < target[slots, known])
        final = self._final(scores, target, draws, has_draft & ~kept, slots, depths)
        return torch.where(kept, known, final)

    @property
    def takes_highest(self) -> bool:
        """See `Sampler`."""
        return False

    def can_choose(self, best: float) -> bool:
        """See `Sampler`."""
        return math.isfinite(best)

    def _final(
        self, scores: Tensor, target: Tensor, draws: Draws, rejected: Tensor, slots: Tensor, depth: Tensor
    ) -> Tensor:
        """The token behind the accepted drafts: from what q lacks after a rejection, from p after full acceptance."""
        bonus = _draw(scores, draws, Purpose.TARGET)
        if not rejected.is_cuda and not bool(rejected.any()):  # a GPU would have to be waited for
            return bonus
        proposed = self._proposed[slots, depth.clamp(max=self._proposed.shape[1] - 1)]
        residual = (target - proposed).clamp(min=0)
        empty = residual.sum(-1, keepdim=True) == 0
        return torch.where(rejected, _draw(torch.where(empty, target, residual).log(), draws, Purpose.RESIDUAL), bonus)


def make_sampler(
    sample: bool, kind: str, requests: int, max_draft: int, vocabulary: int, device: torch.device
) -> Sampler:
    """The sampler of a call: greedy, `"coupled"` or `"rejection"`."""
    if sample and kind == "rejection":
        return RejectionSampler(requests, max_draft, vocabulary, device)
    return ArgmaxSampler(sample)


def _draw(scores: Tensor, draws: Draws, purpose: Purpose) -> Tensor:
    return (scores + draws.gumbel(purpose, scores.shape[1], by_round=True)).argmax(-1)


def _by_row(values: Tensor, counts: Tensor, most: int) -> Tensor:
    """`[K]` one after the other -> `[V, most]`, short rows filled with their neighbours' values."""
    starts = counts.cumsum(0) - counts
    place = starts[:, None] + torch.arange(most, device=counts.device)
    return values[place.clamp(max=values.shape[0] - 1)]


def _leading(agree: Tensor, drafts: Tensor) -> Tensor:
    """How many of a row's first `drafts` entries hold before one fails."""
    inside = torch.arange(agree.shape[1], device=agree.device) < drafts[:, None]
    return (agree & inside).to(torch.int64).cumprod(-1).sum(-1)
