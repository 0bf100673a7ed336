"""The step-time fit against synthetic devices with known costs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import best_draft_length

from hf_aspire.cost_model import DRIFT_STEPS, SOLVED_EVERY, WARMUP_STEPS, CostModel, StepCost, _nonnegative_solution

PRIOR = StepCost(base=4e-3, per_token=5e-6, per_kv_token=1e-8)
Device = Callable[[float, float], float]
Step = tuple[int, float]


def device(level: float = 1, base: float = 5e-3, token: float = 1e-5, bend: float = 2e-5, kv: float = 2e-8) -> Device:
    """Seconds of a step on a device whose products bend at 256 tokens."""
    return lambda tokens, read: level * (base + token * tokens + bend * max(0, tokens - 256) + kv * read)


def mixed_step(rng: random.Random, batch: int = 32, context: int = 30_000) -> Step:
    """A step in which some of the batch draft (7 % of the context) and the others verify 1 to 15 drafts."""
    verify = rng.randint(0, batch)
    draft = batch - verify
    return draft + verify * rng.randint(2, 16), draft * 0.07 * context + verify * context


def teach(model: CostModel, truth: Device, steps: Iterable[Step], rng: random.Random, noise: float = 0.05) -> None:
    for tokens, read in steps:
        model.observe(tokens, read, truth(tokens, read) * math.exp(rng.gauss(0, noise)))


def worst_error(model: CostModel, truth: Device, steps: Iterable[Step]) -> float:
    return max(abs(model.seconds(*step) / truth(*step) - 1) for step in steps)


@pytest.mark.parametrize("level", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_recovers_known_costs_from_noisy_steps(level: float, seed: int) -> None:
    rng = random.Random(seed)
    truth = device(level)
    model = CostModel(PRIOR)
    grid = [(tokens, read) for tokens in (8, 32, 100, 300, 500) for read in (2e4, 2e5, 1e6)]
    teach(model, truth, (rng.choice(grid) for _ in range(300)), rng)
    assert worst_error(model, truth, grid) < 0.05
    assert worst_error(CostModel(PRIOR), truth, grid) > 0.2


def test_what_launching_takes_does_not_widen_the_slopes() -> None:
    """A small model's steps of 64 to 250 tokens, with 10 % noise, tell what verifying 576 takes, or nearly so."""

    def truth(tokens: float, read: float) -> float:
        return 1.31e-3 + 3.8e-6 * tokens + 5.44e-9 * read + (5.5e-4 if tokens > 64 else 0.0)

    far, dearest = (576, 64 * 7168), {}
    for launching in (1.35e-3, 0.0):
        models = [CostModel(StepCost(1.42e-3, 4.5e-7, 5.6e-9, launching)) for _ in range(20)]
        for seed, model in enumerate(models):
            rng = random.Random(seed)
            steps = []
            for _ in range(200):
                verify = rng.choice([0, 0, rng.randint(5, 64)])
                tokens = 64 - verify + sum(rng.randint(2, 5) for _ in range(verify))
                steps.append((tokens, (64 - verify) * 512 + verify * 7168))
            teach(model, truth, steps, rng, noise=0.1)
        dearest[launching] = max(model.seconds(*far) / truth(*far) for model in models)
    assert 0.9 < dearest[1.35e-3] < 1.1
    assert dearest[0.0] > 1.3


def test_a_bend_is_found_where_it_is() -> None:
    rng = random.Random(0)
    model = CostModel(PRIOR)
    steps = [(rng.choice((8, 64, 160, 256, 384, 512)), 1e5) for _ in range(400)]
    teach(model, device(token=0.0, bend=6e-5), steps, rng, noise=0.02)
    assert model.seconds(256, 1e5) - model.seconds(8, 1e5) < 1e-3
    assert model.seconds(512, 1e5) - model.seconds(256, 1e5) == pytest.approx(256 * 6e-5, rel=0.1)


def test_the_prior_decides_until_ten_steps_were_seen() -> None:
    model = CostModel(PRIOR)
    for step in range(WARMUP_STEPS):
        assert model.steps == step
        assert model.seconds(10, 1e5) == PRIOR.base + PRIOR.per_token * 10 + PRIOR.per_kv_token * 1e5
        model.observe(10, 1e5, 1.0)
    assert model.seconds(10, 1e5) == pytest.approx(1.0, rel=0.01)


def test_fixed_costs_never_move() -> None:
    cost = StepCost(base=0.1, per_token=0.2, per_kv_token=0.3)
    model = CostModel(cost, fixed=True)
    for _ in range(50):
        model.observe(7, 11.5, 1000.0)
    assert model.steps == 0
    assert model.seconds(7, 11.5) == 0.1 + 0.2 * 7 + 0.3 * 11.5
    assert CostModel(StepCost(0.0, 0.0, 1e-6), fixed=True).seconds(5, 3) == 1e-6 * 3


@pytest.mark.parametrize("level", [0.1, 0.5, 1.4, 2.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_new_level_is_followed_within_20_steps(level: float, seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel(PRIOR)
    probes = [mixed_step(rng) for _ in range(20)]
    teach(model, device(), (mixed_step(rng) for _ in range(300)), rng)
    teach(model, device(level), (mixed_step(rng) for _ in range(20)), rng)
    assert worst_error(model, device(level), probes) < 0.12


def test_is_solved_now_and_then_and_at_once_where_the_level_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, linear, model, rng = list[Any](), list[Any](), CostModel(PRIOR), random.Random(0)
    solve, solve_linear = CostModel._solve, np.linalg.solve
    monkeypatch.setattr(CostModel, "_solve", lambda self: solved.append(self) or solve(self))
    monkeypatch.setattr(np.linalg, "solve", lambda *system: linear.append(system) or solve_linear(*system))
    for _ in range(WARMUP_STEPS + 40):
        teach(model, device(), [mixed_step(rng)], rng)
        model.seconds(64, 1e5)
    assert len(solved) == 1 + 40 // SOLVED_EVERY
    assert len(linear) < 1.5 * len(solved) + 3, "each begins with the last one's coefficients"
    before, levels = model.seconds(64, 1e5), []
    for _ in range(DRIFT_STEPS):
        teach(model, device(level=2), [mixed_step(rng)], rng, noise=0.0)
        levels.append(model.seconds(64, 1e5) / before)
    assert max(levels) > 1.5


def test_a_change_too_small_for_a_drift_is_followed_by_forgetting() -> None:
    rng = random.Random(0)
    model = CostModel(PRIOR)
    probes = [mixed_step(rng) for _ in range(20)]
    teach(model, device(), (mixed_step(rng) for _ in range(500)), rng)
    teach(model, device(1.2), (mixed_step(rng) for _ in range(200)), rng)
    assert worst_error(model, device(1.2), probes) < 0.06


def test_after_a_drift_new_steps_outweigh_the_past() -> None:
    rng = random.Random(0)
    model = CostModel(PRIOR)
    probes = [mixed_step(rng) for _ in range(20)]
    teach(model, device(), (mixed_step(rng) for _ in range(300)), rng)
    teach(model, device(kv=1e-7), (mixed_step(rng) for _ in range(30)), rng)
    assert worst_error(model, device(kv=1e-7), probes) < 0.15


@pytest.mark.parametrize("change", [{"base": 1e-2}, {"base": 2.5e-3}, {"kv": 4e-8}, {"kv": 1e-8}, {"token": 1e-4}])
def test_a_change_of_one_cost_is_followed(change: dict[str, float]) -> None:
    rng = random.Random(0)
    model = CostModel(PRIOR)
    probes = [mixed_step(rng) for _ in range(20)]
    teach(model, device(), (mixed_step(rng) for _ in range(300)), rng)
    teach(model, device(**change), (mixed_step(rng) for _ in range(300)), rng)
    assert worst_error(model, device(**change), probes) < 0.08


def test_a_pause_counts_as_at_most_three_steps() -> None:
    rng, truth, model = random.Random(0), device(), CostModel(PRIOR)
    steps = [mixed_step(rng) for _ in range(100)]
    teach(model, truth, steps, rng)
    elapsed, predicted = model.elapsed, model.seconds(*steps[0])
    assert elapsed == pytest.approx(sum(truth(*step) for step in steps), rel=0.05)
    model.observe(*steps[0], 1000 * predicted)
    assert model.elapsed - elapsed == pytest.approx(3 * predicted)


@pytest.mark.parametrize("factor", [20.0, 1000.0, 0.05])
@pytest.mark.parametrize("count", [1, 2])
def test_outliers_do_not_wreck_the_fit(factor: float, count: int) -> None:
    rng = random.Random(0)
    truth = device()
    model, calm = CostModel(PRIOR), CostModel(PRIOR)
    steps = [mixed_step(rng) for _ in range(100)]
    for each in (model, calm):
        teach(each, truth, steps, random.Random(1))
    for _ in range(count):
        tokens, read = mixed_step(rng)
        model.observe(tokens, read, factor * truth(tokens, read))
        calm.observe(tokens, read, truth(tokens, read))
    probes = [mixed_step(rng) for _ in range(20)]
    moved = max(abs(model.seconds(*step) / calm.seconds(*step) - 1) for step in probes)
    assert moved < (0.01 if factor > 1 else 0.1)  # too fast to be true is rare, and weighs more
    assert worst_error(model, truth, probes) < 0.15


def test_a_slow_first_step_is_forgiven() -> None:
    rng = random.Random(0)
    model = CostModel(PRIOR)
    model.observe(32, 1e6, 60.0)
    teach(model, device(), (mixed_step(rng) for _ in range(WARMUP_STEPS + 10)), rng)
    assert worst_error(model, device(), [mixed_step(rng) for _ in range(10)]) < 0.15


def test_a_rare_kind_of_step_is_learned_although_it_looks_like_an_outlier() -> None:
    rng = random.Random(0)
    for prior, truth in ((PRIOR, device(token=3e-4)), (StepCost(4e-3, 1e-4, 1e-8), device(token=2e-6))):
        model = CostModel(prior)
        teach(model, truth, [(8, 1e5)] * 100, rng)
        assert abs(math.log(model.seconds(128, 1e5) / truth(128, 1e5))) > math.log(2)
        teach(model, truth, ([(8, 1e5)] * 5 + [(128, 1e5)]) * 5, rng)
        assert model.seconds(128, 1e5) == pytest.approx(truth(128, 1e5), rel=0.2)
        assert model.seconds(8, 1e5) == pytest.approx(truth(8, 1e5), rel=0.05)


@pytest.mark.parametrize("level", [0.1, 1.0, 10.0])
def test_constant_steps_leave_the_shape_to_the_prior(level: float) -> None:
    """Plain decoding at one batch size: T does not vary, KV only grows slowly; only the level can be learned."""
    rng = random.Random(0)
    model, truth = CostModel(PRIOR), CostModel(StepCost(4e-3 * level, 5e-6 * level, 1e-8 * level), fixed=True)
    teach(model, truth.seconds, ((8, 8.0 * (30_000 + step)) for step in range(400)), rng)
    for tokens, read in ((8, 2.4e5), (8, 2e4), (128, 2.4e5)):
        assert model.seconds(tokens, read) == pytest.approx(truth.seconds(tokens, read), rel=0.05)
    for alpha in (0.6, 0.8, 0.9, 0.97):
        lengths = [best_draft_length(alpha, 8, 30_000, 2_100, 15, each) for each in (model, truth)]
        assert abs(lengths[0] - lengths[1]) <= 1


STEP = st.tuples(st.integers(1, 2048), st.floats(1, 1e8), st.floats(1e-6, 1e3))


@given(st.lists(STEP, min_size=1, max_size=6), st.integers(1, 12), st.booleans())
def test_any_data_leave_predictions_finite_positive_and_monotone(
    steps: list[tuple[int, float, float]], repeats: int, collinear: bool
) -> None:
    model = CostModel(PRIOR)
    for tokens, read, seconds in steps * repeats:
        model.observe(tokens, tokens * 1e4 if collinear else read, seconds)
    grid = [[model.seconds(tokens, read) for read in (0, 1e3, 1e6)] for tokens in (1, 8, 64, 65, 256, 300, 5000)]
    values = np.array(grid)
    assert np.isfinite(values).all()
    assert (values > 0).all()
    assert (np.diff(values, axis=0) >= 0).all()
    assert (np.diff(values, axis=1) >= 0).all()
    assert 0 <= best_draft_length(0.9, 8, 30_000, 2_100, 15, model) <= 15


def test_no_step_is_ever_predicted_to_be_free() -> None:
    model = CostModel(PRIOR)
    for tokens in [*range(300, 600)] * 2:
        model.observe(tokens, 1.0, 1e-4 * (tokens - 299))
    assert model.seconds(1, 0) > 0
    assert best_draft_length(0.9, 1, 1, 0, 15, model) <= 15


def test_impossible_costs_and_steps_are_refused() -> None:
    for bad in ((-1.0, 0.0, 1.0), (0.0, 0.0, 0.0), (math.inf, 0.0, 0.0), (math.nan, 1.0, 1.0)):
        with pytest.raises(ValueError, match="StepCost"):
            StepCost(*bad)
    with pytest.raises(ValueError, match="launching"):
        StepCost(1e-3, 1e-6, 1e-8, launching=2e-3)
    with pytest.raises(ValueError, match="base > 0"):
        CostModel(StepCost(0.0, 1e-6, 1e-8))
    model = CostModel(PRIOR)
    for step in ((0, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, 0.0), (1, 1.0, math.nan), (1, math.nan, 1.0)):
        with pytest.raises(ValueError, match="seconds for a step"):
            model.observe(*step)
    assert model.steps == 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_the_constrained_solution_satisfies_its_optimality_conditions(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size + 2, size))
    matrix, vector = rows.T @ rows + 1e-3 * np.eye(size), rng.normal(size=size)
    free = rng.random(size) < 0.5
    solution = _nonnegative_solution(matrix, vector, free)
    gradient = matrix @ solution - vector
    assert (solution >= 0).all()
    assert (gradient >= -1e-6).all()
    assert np.abs(gradient * solution).max() < 1e-6
    assert (solution[~free] == 0).all()
