"""When each request drafts, verifies or waits. Pure Python: a schedule sees numbers, never tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .acceptance import AcceptanceEstimator
from .config import AspireConfig
from .cost_model import CostModel
from .guard import Guard
from .request import RowKind

# Drafting has to promise this many times the rate of plain decoding. Predicted step times are good to a few per cent
# (the fit's target is 5 % per step, less after averaging); a smaller promised gain is within that error, and plain
# decoding is the side on which being wrong costs nothing.
LEAST_GAIN = 1.03
# Rows verify in company: from half of their best draft length on they join others that do, and up to half beyond it
# they wait for some. A step that holds any full row costs more than that row's bytes (more query tokens, scores, new
# lists: 0.8 of 11.5 ms, 8B shape, 27 requests of 32k tokens on an H200; 0.5 of 4 in SmolLM2-135M), while a few drafts
# more or less than the best length cost next to nothing. Over the 45 mixtures of `benchmarks/bench_schedules.py` they
# make 4.3 % more tokens per second than every row for itself, between -2.8 and +21 %.
COMPANY = 2
_DRAFT, _VERIFY, _DECODE = RowKind.DRAFT, RowKind.VERIFY, RowKind.DECODE  # members of an enum are slow to look up


class Candidate(NamedTuple):
    """One decoding request as the scheduler sees it before a step.

    Args:
        request: Identity, stable over the call (row index).
        drafted: Drafts made since its last verification.
        limit: Most drafts it may hold in this round; equal to `drafted` where the draft has to end now.
        rounds: Rounds verified so far that held at least one draft.
        context: KV tokens that a full row of it reads now.
        sparse_context: KV tokens that a draft row of it reads now, averaged over layers.
    """

    request: int
    drafted: int
    limit: int
    rounds: int
    context: int
    sparse_context: float


class Schedule(Protocol):
    """Decides one step at a time, and hears how each verification went (possibly a step or two late)."""

    def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
        """What each candidate does in the next step.

        Returns:
            DRAFT (only below the limit), VERIFY (DECODE where nothing was drafted) or None (wait), one per candidate;
            unless there are no candidates, at least one is not None.
        """

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """Called after every verify or decode row; `drafted` is 0 after a decode row."""


class Autoregressive:
    """Plain decoding: never drafts."""

    def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
        """Everybody decodes."""
        return [_verify(candidate) for candidate in candidates]

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """Learns nothing."""


class Fixed:
    """Lockstep: everybody drafts up to the same length, those that are done wait, then everybody verifies.

    Args:
        draft_length: Drafts per round.
    """

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
        """All that can still draft do while the others wait; once nobody can, all verify."""
        drafting = [candidate.drafted < min(self._draft_length, candidate.limit) for candidate in candidates]
        if any(drafting):
            return [RowKind.DRAFT if drafts else None for drafts in drafting]
        return [_verify(candidate) for candidate in candidates]

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """Learns nothing."""


class Staggered:
    """A fixed cycle of `draft_length` drafts and one verification, with the phases of the requests spread.

    The k-th request that appears makes k mod (draft_length + 1) drafts in its first round. Requests that appear
    together thus verify in different steps from then on, and every step holds about the same mix of rows.

    Args:
        draft_length: Drafts per round.
    """

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length
        self._target: dict[int, int] = {}

    def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
        """Each request drafts up to its target and then verifies; nobody waits."""
        return [self._decide(candidate) for candidate in candidates]

    def _decide(self, candidate: Candidate) -> RowKind:
        phase = len(self._target) % (self._draft_length + 1)
        kind = _draft_up_to(self._target.setdefault(candidate.request, phase), candidate)
        if kind is not RowKind.DRAFT:  # here and not in observe(), which may come after the next decision
            self._target[candidate.request] = self._draft_length
        return kind

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """Learns nothing."""


class Fsm:
    """Draft length per request as a small state machine: one more after full acceptance, one less otherwise.

    A row without drafts says nothing about their acceptance and changes nothing.

    Args:
        draft_length: Drafts of a request's first round, at most `max_draft`.
        max_draft: Most drafts per round.
    """

    def __init__(self, draft_length: int, max_draft: int) -> None:
        self._start = min(draft_length, max_draft)
        self._max_draft = max_draft
        self._target: dict[int, int] = {}

    def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
        """Each request drafts up to its target and then verifies; nobody waits."""
        return [_draft_up_to(self._target.get(candidate.request, self._start), candidate) for candidate in candidates]

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """Moves the target of a request that verified drafts by one."""
        if drafted == 0:
            return
        target = self._target.get(request, self._start)
        self._target[request] = min(target + 1, self._max_draft) if accepted == drafted else max(target - 1, 1)


class Aspire:
    """Draft length per request and step, from its estimated acceptance and what the batch costs (after ASPIRE).

    A request verifies at about `best_draft_length` drafts, in company where it can, or at its limit. The length is
    asked anew behind each of its rounds and, since costs and the batch change while it drafts, whenever they did;
    drafts that are not worth continuing are verified at once. Unlike the paper's rule, every length is priced with its
    own verification and 0 as a plain decoding step, and rows do not verify each for itself.

    Args:
        cost: Predicts step times.
        acceptance: Estimates acceptance per request.
        max_draft: Most drafts per round.
        initial_draft: Least drafts before a request's first verification, provided that drafting pays at all: a first
            observation of a single draft would be 0 or 1 and say little.
    """

    def __init__(self, cost: CostModel, acceptance: AcceptanceEstimator, max_draft: int, initial_draft: int) -> None:
        self._cost = cost
        self._acceptance = acceptance
        self._max_draft = max_draft
        self._initial_draft = initial_draft
        self._guard = Guard(cost)
        self._costs: RoundCosts | None = None
        self._best: dict[int, int] = {}  # by request: best lengths at these costs

    def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
        """Each request drafts while another draft pays, or until others verify; then they do together."""
        if candidates and self._guard.holds(len(candidates), sum(each.context for each in candidates)):
            return [_verify(each) for each in candidates]
        lengths = self._lengths(candidates)
        pairs = list(zip(candidates, lengths, strict=True))
        if any(each.drafted == best == 0 for each, best in pairs):
            ends = lengths  # a row that decodes makes this a step with full rows anyway
        elif any(each.drafted >= best + best // COMPANY or each.drafted >= each.limit for each, best in pairs):
            ends = [self._earliest(each, best) for each, best in pairs]
        else:
            return [RowKind.DRAFT] * len(candidates)
        return [_draft_up_to(end, each) for each, end in zip(candidates, ends, strict=True)]

    def _lengths(self, candidates: Sequence[Candidate]) -> list[int]:
        """Drafts at which every request verifies if full rows cost no more than their bytes."""
        costs, best = self._costs, self._best
        if costs is None or not costs.hold(self._cost, len(candidates)):
            self._costs = costs = RoundCosts(self._cost, len(candidates), self._max_draft)
            best.clear()
        for each in candidates:
            if each.request not in best:
                best[each.request] = self._length(each, costs)
        return [best[each.request] for each in candidates]

    def _length(self, candidate: Candidate, costs: RoundCosts) -> int:
        alpha = self._acceptance.estimate(candidate.request)
        best = best_draft_length(alpha, candidate.context, candidate.sparse_context, costs)
        return max(best, self._initial_draft) if best and candidate.rounds == 0 else best

    def _earliest(self, candidate: Candidate, best: int) -> int:
        """Drafts at which it verifies if others do."""
        earliest = best - best // COMPANY
        return max(earliest, self._initial_draft) if best and candidate.rounds == 0 else earliest

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """Updates the acceptance: from the verified drafts, or by one plain step."""
        self._guard.observe(drafted, accepted)
        self._best.pop(request, None)
        if drafted > 0:
            self._acceptance.observe(request, drafted, accepted)
        else:
            self._acceptance.relax(request)


class RoundCosts:
    """What the steps of a round cost a batch, asked of the cost model once for all of its requests.

    Args:
        cost: Predicts the seconds of a step; they must not fall with more tokens.
        batch: Requests in the step.
        max_draft: Longest draft considered.
    """

    def __init__(self, cost: CostModel, batch: int, max_draft: int) -> None:
        self._of = cost.fit, batch
        self.single = cost.seconds(batch, 0)
        """Seconds of a step with one query per request, but for its KV tokens."""
        self.verify = [(length, cost.seconds(batch * (length + 1), 0)) for length in range(1, max_draft + 1)]
        """Draft lengths, and likewise the seconds of verifying them."""
        self.per_kv_token = batch * cost.per_kv_token
        """Seconds per KV token that each of the requests reads."""

    def hold(self, cost: CostModel, batch: int) -> bool:
        """Whether a batch's steps cost this still."""
        return self._of == (cost.fit, batch)


def best_draft_length(alpha: float, context: float, sparse_context: float, costs: RoundCosts) -> int:
    """The draft length with the most expected tokens per second, for a batch of copies of one request.

    A round of g drafts commits E(g) = 1 + alpha + ... + alpha^g expected tokens and takes g draft steps and one
    verification of g + 1 queries per request. The result is the exact argmax of E(g) / (g T_draft + T_verify(g + 1))
    over 0..max_draft, the smallest of equals, or 0 where that rate is not above `LEAST_GAIN` times that of g = 0
    (plain decoding).

    Args:
        alpha: Probability that a draft is accepted given that those before it were, in [0, 1].
        context: KV tokens that a full row reads; positive, so that no step is free.
        sparse_context: KV tokens that a draft row reads.
        costs: Seconds of the batch's steps.
    """
    draft_seconds = costs.single + costs.per_kv_token * sparse_context
    reading = costs.per_kv_token * context
    best, best_rate = 0, LEAST_GAIN / (costs.single + reading)
    tokens = gain = 1.0  # E(length), and alpha ** length: what the last draft added to it
    for length, seconds in costs.verify:
        gain *= alpha
        # Marginal value: at the best rate, this draft step alone costs the time of more tokens than it adds. Later
        # drafts add still less and verification never gets cheaper, so that no longer draft can win.
        if gain <= best_rate * draft_seconds:
            break
        tokens += gain
        rate = tokens / (length * draft_seconds + seconds + reading)
        if rate > best_rate:
            best, best_rate = length, rate
    return best


def make_schedule(config: AspireConfig, cost_model: CostModel) -> Schedule:
    """The schedule that `config.schedule` names, with fresh state for one call of `generate`."""
    if config.schedule == "autoregressive":
        return Autoregressive()
    if config.schedule == "fixed":
        return Fixed(config.draft_length)
    if config.schedule == "staggered":
        return Staggered(min(config.draft_length, config.max_draft))
    if config.schedule == "fsm":
        return Fsm(config.draft_length, config.max_draft)
    acceptance = AcceptanceEstimator(config.acceptance_prior, config.acceptance_smoothing)
    return Aspire(cost_model, acceptance, config.max_draft, config.initial_draft)


def _verify(candidate: Candidate) -> RowKind:
    return _VERIFY if candidate.drafted else _DECODE


def _draft_up_to(target: int, candidate: Candidate) -> RowKind:
    return _DRAFT if candidate.drafted < target and candidate.drafted < candidate.limit else _verify(candidate)
