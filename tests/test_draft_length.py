"""The draft length: against brute force, by hand, and how often it is asked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import GPU, best_draft_length, candidate, rate

from hf_aspire import scheduler
from hf_aspire.config import AspireConfig
from hf_aspire.cost_model import WARMUP_STEPS, CostModel, StepCost
from hf_aspire.scheduler import LEAST_GAIN, Candidate, RoundCosts, make_schedule


def brute_force(alpha: float, batch: int, context: float, sparse: float, cap: int, cost: CostModel) -> int:
    rates = [rate(length, alpha, batch, context, sparse, cost) for length in range(cap + 1)]
    best = max(range(1, cap + 1), key=rates.__getitem__)
    return best if rates[best] > LEAST_GAIN * rates[0] else 0


class Bent(CostModel):
    """A fixed cost with a staircase in T: monotone, and neither convex nor concave."""

    def __init__(self, prior: StepCost, stair: float) -> None:
        super().__init__(prior, fixed=True)
        self.stair = stair

    def seconds(self, tokens: float, kv_tokens: float) -> float:
        return super().seconds(tokens, kv_tokens) + self.stair * (tokens // 24)


@given(
    alpha=st.floats(0.01, 0.995),
    batch=st.integers(1, 64),
    context=st.integers(1, 200_000),
    sparsity=st.floats(0.0, 1.0),
    cap=st.integers(1, 24),
    base=st.floats(1e-4, 1e-1),
    token=st.floats(0, 1e-3),
    read=st.floats(0, 1e-6),
    stair=st.sampled_from([0.0, 1e-4, 1e-3, 1e-2]),
)
def test_the_draft_length_is_the_argmax(
    alpha: float, batch: int, context: int, sparsity: float, cap: int,
    base: float, token: float, read: float, stair: float,
) -> None:  # fmt: skip
    cost = Bent(StepCost(base, token, read), stair)
    got = best_draft_length(alpha, batch, context, sparsity * context, cap, cost)
    expected = brute_force(alpha, batch, context, sparsity * context, cap, cost)
    if got != expected:  # only where both are the best to the last bits
        rates = [rate(length, alpha, batch, context, sparsity * context, cost) for length in range(cap + 1)]
        at_the_margin = max(rates[1:]) == pytest.approx(LEAST_GAIN * rates[0], rel=1e-12)
        assert at_the_margin or (got and expected and rates[got] == pytest.approx(rates[expected], rel=1e-12))


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 0.99), st.integers(1, 64))
def test_the_draft_length_is_the_argmax_under_fitted_costs(seed: int, alpha: float, batch: int) -> None:
    rng = random.Random(seed)
    cost = CostModel(StepCost(*GPU))
    for _ in range(40):
        tokens, read = rng.randint(1, 600), rng.uniform(1e3, 1e6)
        cost.observe(tokens, read, 3e-3 + 2e-5 * max(0, tokens - 200) + 1e-8 * read)
    got = best_draft_length(alpha, batch, 30_000, 2_100, 15, cost)
    assert got == brute_force(alpha, batch, 30_000, 2_100, 15, cost)


def test_of_equal_lengths_the_smallest_wins() -> None:
    # T_decode = 10, T_draft = 1, T_verify(2) = 11, T_verify(3) = 12: rates 1/10, 1.5/12, 1.75/14, 1.875/16, exactly
    cost = CostModel(StepCost(0.0, 1.0, 1.0), fixed=True)
    assert rate(1, 0.5, 1, 9, 0, cost) == rate(2, 0.5, 1, 9, 0, cost) == 0.125
    assert best_draft_length(0.5, 1, 9, 0, 8, cost) == 1


def test_a_gain_below_the_margin_is_not_taken() -> None:
    def choice(alpha: float) -> int:
        return best_draft_length(alpha, 1, 1.0, 0.5, 1, CostModel(StepCost(0.0, 0.0, 1.0), fixed=True))

    # one draft yields (1 + alpha) / 1.5 times the rate of plain decoding
    assert choice(1.5 * 1.029 - 1) == 0
    assert choice(1.5 * 1.031 - 1) == 1


@pytest.mark.parametrize("alpha", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("batch", [1, 8])
def test_plain_decoding_where_kv_is_small_against_the_weights(alpha: float, batch: int) -> None:
    cost = CostModel(StepCost(*GPU), fixed=True)
    assert best_draft_length(alpha, batch, 200, 200, 15, cost) == 0
    assert best_draft_length(alpha, 1, 2_000, 512, 15, cost) == 0


def test_drafts_are_longer_for_higher_acceptance_and_longer_contexts() -> None:
    cost = CostModel(StepCost(*GPU), fixed=True)
    by_alpha = [best_draft_length(percent / 100, 16, 60_000, 4_200, 15, cost) for percent in range(1, 100)]
    by_context = [best_draft_length(0.85, 16, 2_000 * size, 140 * size, 15, cost) for size in range(1, 100)]
    for lengths in (by_alpha, by_context):
        assert lengths == sorted(lengths)
        assert lengths[0] == 0
        assert lengths[-1] >= 5


def test_a_step_asks_the_cost_model_at_most_once_per_length() -> None:
    calls = 0

    class Counting(CostModel):
        def seconds(self, tokens: float, kv_tokens: float) -> float:
            nonlocal calls
            calls += 1
            return super().seconds(tokens, kv_tokens)

    schedule = make_schedule(AspireConfig(acceptance_prior=0.99), Counting(StepCost(*GPU), fixed=True))
    schedule.decide([candidate(request) for request in range(64)])
    assert 0 < calls <= 1 + 15


def test_a_length_is_asked_anew_behind_a_round_and_where_costs_or_the_batch_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, length_of = list[int](), scheduler.best_draft_length

    def asking(alpha: float, context: float, sparse_context: float, costs: RoundCosts) -> int:
        asked.append(int(context))
        return length_of(alpha, context, sparse_context, costs)

    monkeypatch.setattr(scheduler, "best_draft_length", asking)
    cost = CostModel(StepCost(*GPU))
    schedule = make_schedule(AspireConfig(), cost)
    rows = [candidate(request, drafted=1, context=30_000 + request) for request in range(4)]

    def asked_by(rows: list[Candidate]) -> list[int]:
        asked.clear()
        schedule.decide(rows)
        return [context - 30_000 for context in asked]

    assert asked_by(rows) == [0, 1, 2, 3]
    assert asked_by(rows) == []
    schedule.observe(2, 5, 3)
    assert asked_by(rows) == [2]
    assert asked_by(rows[1:]) == [1, 2, 3]
    assert asked_by(rows) == [0, 1, 2, 3]
    for _ in range(WARMUP_STEPS):
        cost.observe(4, 100_000, 5e-3)
    assert asked_by(rows) == [0, 1, 2, 3]
    assert asked_by(rows) == []
