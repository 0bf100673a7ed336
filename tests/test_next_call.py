"""Calls that go on with the cost model of earlier ones, in closed loop."""

from __future__ import annotations

import itertools

from simulation import GPU, simulate

from hf_aspire.config import AspireConfig
from hf_aspire.cost_model import CostModel, StepCost
from hf_aspire.scheduler import make_schedule


def next_call(fit: CostModel, cost: CostModel, alphas: list[float], steps: int, **options: float) -> float:
    """Tokens per second of a call in closed loop."""
    fit.begin_call()
    schedule = make_schedule(AspireConfig(), fit)
    run = simulate(schedule, lambda step: alphas, steps, cost, fit=fit, **options)  # type: ignore[arg-type]
    return run.tokens / run.seconds


def test_the_first_steps_of_a_call_do_not_decide_about_speculation() -> None:
    """Its requests draft too much until something is known of their acceptance."""
    prior = StepCost(8e-4, 1e-6, 6e-9)
    fit, cost = CostModel(prior), CostModel(prior, fixed=True)
    first = next_call(fit, cost, [0.6] * 32, 150)
    assert all(next_call(fit, cost, [0.6] * 32, 150) > 0.95 * first for _ in range(3))


def test_plain_steps_of_another_call_do_not_hide_a_loss() -> None:
    prior = StepCost(*GPU)
    fit, cost = CostModel(prior), CostModel(prior, fixed=True)
    slow = CostModel(StepCost(3 * prior.base, prior.per_token, prior.per_kv_token), fixed=True)
    next_call(fit, slow, [0.8], 200, context=200)
    found = next_call(fit, cost, [0.8] * 16, 2000, speculating=8e-3)
    assert found > 0.95 * 16 / cost.seconds(16, 16 * 30_000)


def test_a_call_at_another_level_is_learned_within_it() -> None:
    prior = StepCost(*GPU)
    fit, cost = CostModel(prior), CostModel(prior, fixed=True)
    slow = CostModel(StepCost(5 * prior.base, prior.per_token, prior.per_kv_token), fixed=True)
    fresh = next_call(CostModel(prior), cost, [0.9] * 16, 200)
    next_call(fit, slow, [0.9] * 8, 1000, context=1000)
    assert next_call(fit, cost, [0.9] * 16, 200) > 0.9 * fresh


def relative_rates(rows: int, alpha: float, dearer: float, calls: int = 4) -> list[float]:
    """Rates of calls in a row against plain decoding's; steps that speculate take `dearer` plain steps longer."""
    cost, fit = CostModel(StepCost(2e-3, 1e-5, 3e-8), fixed=True), CostModel(StepCost(1e-4, 2e-6, 3e-8))
    plain = cost.seconds(rows, rows * 30_000)
    return [next_call(fit, cost, [alpha] * rows, 200, speculating=dearer * plain) * plain / rows for _ in range(calls)]


def test_calls_learn_from_each_other_where_steps_that_speculate_are_dearer() -> None:
    for alpha in (0.6, 0.8, 0.95):
        assert relative_rates(16, alpha, 1.0)[-1] > 0.75


def test_costs_that_hide_from_the_fit_lose_no_more_than_is_documented() -> None:
    """The docs have these figures."""
    mixtures = itertools.product((8, 16), (0.6, 0.8, 0.95), (0.3, 0.5, 0.7, 1.0))
    rates = [relative_rates(*mixture) for mixture in mixtures]
    first, later = min(each[0] for each in rates), min(min(each[1:]) for each in rates)
    print({"first": round(first, 3), "later": round(later, 3)})
    assert first > 0.58 and later > 0.66
