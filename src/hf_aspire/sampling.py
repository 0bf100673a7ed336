"""The rules that turn scores into drafted and committed tokens.

Greedy decoding and `coupled` sampling share one rule: draft and target both take the argmax of their scores plus the
same noise (none when greedy); the target's choice is committed, and a draft counts as accepted where both agree. The
committed token is a draw from the processed target whatever the draft did (Gumbel-max trick).

`rejection` is speculative sampling: a draft x from q is kept with probability min(1, p(x) / q(x)); the first one that
is not is replaced by a draw from max(p - q, 0), and behind a fully accepted draft comes a draw from p.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import Draw, Draws, Purpose, gumbel_argmax
from .sampler import Choices, Outcome, Sampler, by_row, leading

if TYPE_CHECKING:
    from .queries import Queries  # it imports triton, which a CPU need not have


class ArgmaxSampler:
    """Greedy decoding, or `coupled` sampling when `sample`.

    Args:
        sample: Whether to add noise.
        draw: Adds it.
    """

    def __init__(self, sample: bool, draw: Draw = gumbel_argmax) -> None:
        self._sample = sample
        self._draw = draw

    def draft(self, scores: Tensor, draws: Draws, slots: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        return self._choose(scores, draws)[0]

    def verify(self, scores: Tensor, draws: Draws, drafts: Tensor, counts: Tensor, slots: Tensor) -> Outcome:
        """See `Sampler`."""
        chosen, best = self._choose(scores, draws)
        tokens = by_row(chosen, counts, drafts.shape[1] + 1)
        return Outcome(leading(tokens[:, :-1] == drafts, counts - 1), tokens, best)

    def choose(self, scores: Tensor, draws: Draws, queries: Queries) -> Choices:
        """See `Sampler`."""
        return Choices(*self._choose(scores, draws))

    def step(self, scores: Tensor, draws: Draws, drafts: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        return self._choose(scores, draws)[0]

    @property
    def takes_highest(self) -> bool:
        """See `Sampler`."""
        return not self._sample

    @property
    def key(self) -> Hashable:
        """See `Sampler`."""
        return "coupled" if self._sample else "greedy"

    def can_choose(self, best: float) -> bool:
        """See `Sampler`. Plain greedy decoding takes the first token where all are -inf, and so do we."""
        return math.isfinite(best) if self._sample else not math.isnan(best)

    def _choose(self, scores: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Tokens `[K]`, and the highest scores `[K]`."""
        if not self._sample:
            best = scores.max(-1)  # the first of equals, as `argmax`, and on a CPU in a third of its time
            return best.indices, best.values
        return self._draw(scores, draws, Purpose.TARGET, by_round=False), scores.amax(-1)


class RejectionSampler:
    """Speculative sampling. Keeps every draft's distribution until its round is verified.

    Args:
        requests: Request slots.
        max_draft: Most drafts per round.
        vocabulary: Size of a distribution.
        device: Where scores live.
        draw: Draws tokens.
    """

    def __init__(
        self, requests: int, max_draft: int, vocabulary: int, device: torch.device, draw: Draw = gumbel_argmax
    ) -> None:
        # One more slot for the rows that fill a step up.
        self._proposed = torch.zeros(requests + 1, max_draft, vocabulary, dtype=torch.float32, device=device)
        self._draw = draw

    def draft(self, scores: Tensor, draws: Draws, slots: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        tokens = self._draw(scores, draws, Purpose.DRAFT, by_round=True)
        self._note(slots, depths, torch.softmax(scores, -1), tokens)
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
            uniform = by_row(draws.uniform(Purpose.ACCEPT, 1, by_round=True)[:, 0], counts, most)
            depth = torch.arange(most, device=counts.device)
            place = (starts[:, None] + depth).clamp(max=scores.shape[0] - 1)
            known = drafts.clamp(min=0)
            p = target[place, known]
            q = self._proposed[slots[:, None], depth, known]
            accepted = leading(uniform * q < p, counts - 1)
        last = starts + accepted
        purpose = torch.where(accepted < counts - 1, Purpose.RESIDUAL, Purpose.TARGET)
        final = self._final(scores[last], target[last], draws.pick(last), purpose, slots, accepted)
        tokens = torch.cat([drafts, drafts.new_zeros(rows, 1)], 1)
        tokens[torch.arange(rows, device=counts.device), accepted] = final
        return Outcome(accepted, tokens, scores.amax(-1))

    def choose(self, scores: Tensor, draws: Draws, queries: Queries) -> Choices:
        """See `Sampler`. Every row draws one token: its draft, or the one behind the drafts that it keeps."""
        nobody = len(self._proposed) - 1
        target = torch.softmax(scores, -1)
        known = queries.following
        p = target.gather(1, known[:, None])[:, 0]
        place = queries.slots.clamp(max=nobody), queries.depths.clamp(max=self._proposed.shape[1] - 1)
        uniform = draws.uniform(Purpose.ACCEPT, 1, by_round=True)[:, 0]
        accepted = queries.accepted(uniform * self._proposed[*place, known] < p)
        slots, held, first, drafts, *_ = queries.owners.unbind(1)
        last, drafting = first + accepted, drafts < 0
        decided = torch.where(accepted < drafts, Purpose.RESIDUAL, Purpose.TARGET)
        purpose = torch.where(drafting, Purpose.DRAFT, decided)
        slots, target = slots.clamp(max=nobody), target[last]  # rows that are not used point at any query
        final = self._final(scores[last], target, draws.pick(last), purpose, slots, accepted)
        self._note(torch.where(drafting, slots, nobody), held, target, final)
        return Choices(final[queries.rows], scores.amax(-1), accepted)

    def step(self, scores: Tensor, draws: Draws, drafts: Tensor, depths: Tensor) -> Tensor:
        """See `Sampler`."""
        slots = torch.arange(scores.shape[0], device=scores.device)
        target = torch.softmax(scores, -1)
        has_draft, known = drafts >= 0, drafts.clamp(min=0)
        depths = depths.clamp(max=self._proposed.shape[1] - 1)
        uniform = draws.uniform(Purpose.ACCEPT, 1, by_round=True)[:, 0]
        kept = has_draft & (uniform * self._proposed[slots, depths, known] < target[slots, known])
        purpose = torch.where(has_draft & ~kept, Purpose.RESIDUAL, Purpose.TARGET)
        return torch.where(kept, known, self._final(scores, target, draws, purpose, slots, depths))

    @property
    def takes_highest(self) -> bool:
        """See `Sampler`."""
        return False

    def can_choose(self, best: float) -> bool:
        """See `Sampler`."""
        return math.isfinite(best)

    @property
    def key(self) -> Hashable:
        """See `Sampler`."""
        return "rejection", self._proposed.data_ptr(), self._proposed.shape

    def _note(self, slots: Tensor, depths: Tensor, proposed: Tensor, tokens: Tensor) -> None:
        """Keeps the distributions `[K, V]` that drafts were drawn from."""
        surely = F.one_hot(tokens, proposed.shape[1]).to(proposed)  # scores without a number leave nothing to chance
        self._proposed[slots, depths] = torch.where(proposed.isnan(), surely, proposed)

    def _final(
        self, scores: Tensor, target: Tensor, draws: Draws, purpose: Tensor, slots: Tensor, depth: Tensor
    ) -> Tensor:
        """One token per row: from what q lacks for purpose RESIDUAL (a draft was rejected), else from p."""
        rejected = (purpose == Purpose.RESIDUAL)[:, None]
        if rejected.is_cuda or bool(rejected.any()):  # a GPU would have to be waited for
            proposed = self._proposed[slots, depth.clamp(max=self._proposed.shape[1] - 1)]
            residual = (target - proposed).clamp(min=0)
            empty = residual.sum(-1, keepdim=True) == 0
            scores = torch.where(rejected, torch.where(empty, target, residual).log(), scores)
        return self._draw(scores, draws, purpose, by_round=True)


def make_sampler(
    sample: bool,
    kind: str,
    requests: int,
    max_draft: int,
    vocabulary: int,
    device: torch.device,
    draw: Draw = gumbel_argmax,
) -> Sampler:
    """The sampler of a call: greedy, `"coupled"` or `"rejection"`."""
    if sample and kind == "rejection":
        return RejectionSampler(requests, max_draft, vocabulary, device, draw)
    return ArgmaxSampler(sample, draw)
