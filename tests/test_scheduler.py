"""Schedules: each one's pattern, and the loop closed with simulated acceptance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import (
    DECODE,
    DRAFT,
    GPU,
    VERIFY,
    at_known_acceptance,
    best_draft_length,
    candidate,
    make,
    simulate,
)

from hf_aspire.config import SCHEDULES, AspireConfig
from hf_aspire.cost_model import CostModel, StepCost
from hf_aspire.scheduler import Candidate, Schedule, make_schedule

# ---- what every schedule keeps to


CANDIDATES = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 15), st.integers(0, 3), st.integers(1, 100_000)), max_size=8
)


@given(st.sampled_from(SCHEDULES), st.lists(CANDIDATES, min_size=1, max_size=6), st.randoms())
def test_every_decision_is_allowed(
    name: str, steps: list[list[tuple[int, int, int, int]]], rng: random.Random
) -> None:
    schedule = make(name)
    for step in steps:
        candidates = [
            candidate(request, min(drafted, limit), limit, rounds, context)
            for request, (drafted, limit, rounds, context) in enumerate(step)
        ]
        kinds = schedule.decide(candidates)
        assert len(kinds) == len(candidates)
        assert not candidates or any(kind is not None for kind in kinds)
        for each, kind in zip(candidates, kinds, strict=True):
            assert kind is not DRAFT or each.drafted < each.limit
            assert kind is not VERIFY or each.drafted > 0
            assert kind is not DECODE or each.drafted == 0
            assert kind is not None or name == "fixed"
            if kind in (VERIFY, DECODE):
                schedule.observe(each.request, each.drafted, rng.randint(0, each.drafted))


# ---- the loop, closed by simulated acceptance


# Per-token costs that put the break-even acceptance of a batch of 8 at 0.56, 0.65, 0.74 and 0.88
BREAK_EVEN = {1e-4: 0.56, 2e-4: 0.65, 3e-4: 0.74, 5e-4: 0.88}


@pytest.mark.parametrize("per_token", BREAK_EVEN)
def test_drafting_that_does_not_pay_stays_rare_and_comes_back_when_it_pays(per_token: float) -> None:
    costs = (GPU[0], per_token, GPU[2])
    cost = CostModel(StepCost(*costs), fixed=True)
    lengths = {alpha: best_draft_length(alpha, 8, 30_000, 2_100, 15, cost) for alpha in (0.5, 0.9, 0.95)}
    assert lengths[0.5] == 0 < lengths[0.9] <= lengths[0.95]
    assert best_draft_length(BREAK_EVEN[per_token], 8, 30_000, 2_100, 15, cost) > 0
    assert best_draft_length(BREAK_EVEN[per_token] - 0.01, 8, 30_000, 2_100, 15, cost) == 0

    run = simulate(make("aspire", costs), lambda step: [0.5 if step < 2000 else 0.95] * 8, 3000, cost)
    assert run.draft_share(0, 3) == 1  # the initial draft
    assert run.draft_share(50, 2000) <= 0.05
    assert run.draft_share(2600, 3000) > 0.2


@pytest.mark.parametrize("per_token", BREAK_EVEN)
def test_never_slower_than_plain_decoding(per_token: float) -> None:
    costs = (GPU[0], per_token, GPU[2])
    cost = CostModel(StepCost(*costs), fixed=True)
    for alphas in ([0.05] * 8, [0.5] * 8, [0.95, *[0.5] * 7], [0.6, 0.7, 0.8, 0.9] * 2):
        run = simulate(make("aspire", costs), lambda step, alphas=alphas: alphas, 1500, cost)
        assert run.tokens / run.seconds > 0.99 * 8 / cost.seconds(8, 8 * 30_000)


@pytest.mark.parametrize("context", [30_000, 100_000])
@pytest.mark.parametrize("alpha", [0.7, 0.85, 0.95])
def test_learning_acceptance_costs_little(alpha: float, context: int) -> None:
    cost = CostModel(StepCost(*GPU), fixed=True)
    run = simulate(make("aspire"), lambda step: [alpha] * 8, 1500, cost, context)
    assert run.tokens / run.seconds > 0.94 * at_known_acceptance(alpha, 8, context, cost)


@pytest.mark.parametrize(
    "rival", [{"schedule": "fsm"}, *({"schedule": "staggered", "draft_length": length} for length in (1, 3, 5, 8))]
)
def test_adapting_beats_any_fixed_habit_over_different_texts(rival: dict[str, object]) -> None:
    cost = CostModel(StepCost(*GPU), fixed=True)
    gains = []
    for alpha in (0.4, 0.7, 0.85, 0.95):
        runs = [
            simulate(make(**each), lambda step, alpha=alpha: [alpha] * 8, 1000, cost)
            for each in ({"schedule": "aspire"}, rival)
        ]
        gains.append(runs[0].tokens / runs[0].seconds * runs[1].seconds / runs[1].tokens)
    assert min(gains) > 0.94
    assert sum(gains) / len(gains) > 1.05


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    "device",
    [(2e-2, 2.5e-5, 1.5e-7), (3.2e-2, 5e-6, 3e-8), (4e-3, 5e-6, 9e-8), (4e-3, 4e-4, 3e-8)],
    ids=["all five times slower", "base eight times", "KV three times", "tokens twenty times"],
)
def test_with_a_wrong_prior_never_slower_and_near_the_best(device: tuple[float, float, float], alpha: float) -> None:
    cost, fit = CostModel(StepCost(*device), fixed=True), CostModel(StepCost(4e-3, 2e-5, 3e-8))
    schedule = make_schedule(AspireConfig(), fit)
    run = simulate(schedule, lambda step: [alpha] * 8, 1200, cost, fit=fit)
    assert run.tokens / run.seconds > 0.98 * 8 / cost.seconds(8, 8 * 30_000)
    assert run.tokens / run.seconds > 0.92 * at_known_acceptance(alpha, 8, 30_000, cost)


# ---- Aspire's decisions one by one


LONG = 200_000


def best_length(context: int) -> int:
    return best_draft_length(0.9, 4, context, 0.07 * context, 15, CostModel(StepCost(*GPU), fixed=True))


def of_drafts(*drafted: int) -> list[Candidate]:
    return [candidate(i, count, context=LONG) for i, count in enumerate(drafted)]


def test_a_row_waits_for_others_to_verify_with_up_to_half_beyond_its_best_length() -> None:
    schedule, best = make("aspire"), best_length(LONG)
    latest = best + best // 2
    assert best >= 6
    assert schedule.decide(of_drafts(0, best, latest - 1, 2)) == [DRAFT] * 4
    assert schedule.decide(of_drafts(0, best, latest, 1)) == [DRAFT, VERIFY, VERIFY, DRAFT]


def test_rows_from_half_of_their_best_length_on_verify_along() -> None:
    schedule, best = make("aspire"), best_length(LONG)
    half = best - best // 2
    ends_here = candidate(3, 2, limit=2)
    assert schedule.decide([*of_drafts(half, half - 1, 0), ends_here]) == [VERIFY, DRAFT, DRAFT, VERIFY]


def test_beside_a_row_that_decodes_every_row_verifies_at_its_best_length() -> None:
    schedule, best = make("aspire"), best_length(LONG)
    decodes = candidate(3, 0, context=200)
    assert schedule.decide([*of_drafts(0, best - 1, best), decodes]) == [DRAFT, DRAFT, VERIFY, DECODE]
    assert schedule.decide([candidate(0, limit=0)] * 4) == [DECODE] * 4


def test_the_first_round_drafts_at_least_the_initial_draft() -> None:
    schedule = make("aspire", initial_draft=9)
    assert best_length(30_000) < 8
    kinds = schedule.decide(
        [candidate(0, 8, rounds=0), candidate(1, 12, rounds=0), candidate(2, 8), candidate(3, 5, 5, rounds=0)]
    )
    assert kinds == [DRAFT, VERIFY, VERIFY, VERIFY]


@pytest.mark.parametrize("alpha", [0.6, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("context", [8_000, 30_000])
@pytest.mark.parametrize("speculating", [0.3, 0.6])
def test_hardly_slower_where_steps_that_speculate_are_dearer(speculating: float, context: int, alpha: float) -> None:
    """By a share of a plain step, which no step of drafts and verifications shows: unguarded, down to 0.58."""
    cost, fit = CostModel(StepCost(2e-3, 1e-5, 3e-8), fixed=True), CostModel(StepCost(1e-4, 2e-6, 3e-8))
    plain = cost.seconds(16, 16 * context)
    run = simulate(
        make_schedule(AspireConfig(), fit),
        lambda step: [alpha] * 16,
        1500,
        cost,
        context,
        fit=fit,
        speculating=speculating * plain,
    )
    assert run.tokens / run.seconds > 0.85 * 16 / plain
    if (speculating, context, alpha) == (0.3, 30_000, 0.95):  # 1.37 unguarded
        assert run.tokens / run.seconds > 1.3 * 16 / plain


@pytest.mark.parametrize("alpha", [0.8, 0.9, 0.975])
def test_steps_without_full_rows_are_used(alpha: float) -> None:
    """What any full row costs is paid in a minority of steps, and lockstep at any one length gains nothing on it."""
    cost, fit = CostModel(StepCost(5e-3, 1e-5, 3e-8), fixed=True), CostModel(StepCost(4e-3, 5e-6, 3e-8))
    schedules = [make_schedule(AspireConfig(), fit), *(make("fixed", draft_length=n) for n in (3, 5, 8, 12))]
    runs = [
        simulate(schedule, lambda step: [alpha] * 27, 600, cost, fit=fit, full_rows=1e-3) for schedule in schedules
    ]
    full = sum(VERIFY in kinds for kinds in runs[0].kinds[100:])
    assert full < 0.5 * len(runs[0].kinds[100:])
    rates = [run.tokens / run.seconds for run in runs]
    assert rates[0] > 0.95 * max(rates[1:])


def test_launches_are_not_taken_for_the_cost_of_query_tokens() -> None:
    """As traced of SmolLM2-135M, 64 requests of 7,168 tokens, H200: all but 66 us of the base are launches."""
    cost = CostModel(StepCost(1.31e-3, 3.8e-6, 5.44e-9), fixed=True)
    prior = StepCost(1.4e-3, 4.5e-7, 5.6e-9, launching=1.35e-3)
    alphas = [0.87 + 0.002 * row for row in range(64)]

    def rate(schedule: Schedule, fit: CostModel | None = None) -> float:
        run = simulate(schedule, lambda step: alphas, 600, cost, 7168, fit=fit, full_rows=5.5e-4)
        return run.tokens / run.seconds

    best = max(rate(make("fixed", draft_length=length)) for length in (3, 4, 6, 8))
    fit, reading = CostModel(prior), CostModel(StepCost(6.6e-5, prior.per_token, prior.per_kv_token))
    assert rate(make_schedule(AspireConfig(), fit), fit) > 0.95 * best
    assert rate(make_schedule(AspireConfig(), reading), reading) < 0.88 * best  # a prior that knows no launches


def test_where_drafting_does_not_pay_a_draft_is_verified_at_once() -> None:
    schedule = make("aspire", initial_draft=9)
    fresh, midway = candidate(0, 0, rounds=0, context=200), candidate(1, 2, rounds=0, context=200)
    assert schedule.decide([fresh, midway]) == [DECODE, VERIFY]


def test_each_request_follows_its_own_acceptance() -> None:
    schedule = make("aspire")
    for _ in range(20):
        schedule.observe(0, 5, 0)
        schedule.observe(1, 5, 5)
    assert schedule.decide([candidate(0, 1), candidate(1, 1)]) == [VERIFY, DRAFT]


# ---- the others


def pattern(schedule: Schedule, batch: int, steps: int, accept: float = 1.0, limit: int = 15) -> list[str]:
    """One string per request: d draft, V verify, D decode, - wait."""
    run = simulate(schedule, lambda step: [accept] * batch, steps, CostModel(StepCost(*GPU), fixed=True), limit=limit)
    letters = {DRAFT: "d", VERIFY: "V", DECODE: "D", None: "-"}
    return ["".join(letters[kinds[i]] for kinds in run.kinds) for i in range(batch)]


def test_autoregressive_only_decodes() -> None:
    assert pattern(make("autoregressive"), 2, 5) == ["DDDDD"] * 2


def test_fixed_is_lockstep() -> None:
    assert pattern(make("fixed", draft_length=3), 2, 8, accept=0.5) == ["dddVdddV"] * 2


def test_fixed_lets_the_early_ones_wait() -> None:
    schedule = make("fixed", draft_length=3)
    assert schedule.decide([candidate(0, 1, limit=1), candidate(1, 2), candidate(2, 3)]) == [None, DRAFT, None]
    assert schedule.decide([candidate(0, 1, limit=1), candidate(1, 3), candidate(2, 0, 0)]) == [VERIFY, VERIFY, DECODE]


def test_staggered_spreads_the_phases() -> None:
    rows = pattern(make("staggered", draft_length=3), 8, 16, accept=0.3)
    assert rows[:4] == ["DdddVdddVdddVddd", "dVdddVdddVdddVdd", "ddVdddVdddVdddVd", "dddVdddVdddVdddV"]
    assert rows[4:] == rows[:4]
    for step in range(16):
        assert sum(row[step] in "VD" for row in rows) == 2


def test_staggered_respects_limits_and_late_requests() -> None:
    rows = pattern(make("staggered", draft_length=9, max_draft=2), 4, 6, limit=2)
    assert rows == ["DddVdd", "dVddVd", "ddVddV", "DddVdd"]
    schedule = make("staggered", draft_length=2)
    assert schedule.decide([candidate(7)]) == [DECODE]
    assert schedule.decide([candidate(7), candidate(3)]) == [DRAFT, DRAFT]
    assert schedule.decide([candidate(7, 1), candidate(3, 1)]) == [DRAFT, VERIFY]


def test_fsm_moves_by_one() -> None:
    schedule = make("fsm", draft_length=3, max_draft=5)

    def length() -> int:
        return next(d for d in range(16) if schedule.decide([candidate(0, d)]) != [DRAFT])

    lengths = [length()]
    for drafted, accepted in ((3, 3), (4, 4), (5, 5), (5, 4), (0, 0), (4, 0), (3, 1), (2, 0), (1, 0), (1, 1)):
        schedule.observe(0, drafted, accepted)
        lengths.append(length())
    assert lengths == [3, 4, 5, 5, 4, 4, 3, 2, 1, 1, 2]
    assert schedule.decide([candidate(1, 2), candidate(2, 3)]) == [DRAFT, VERIFY]


def test_fsm_starts_within_the_cap() -> None:
    assert make("fsm", draft_length=8, max_draft=2).decide([candidate(0, 2)]) == [VERIFY]
