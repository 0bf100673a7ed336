"""The acceptance estimator against known acceptance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import GPU, at_known_acceptance, simulate

from hf_aspire.acceptance import HIGHEST, LOWEST, PRIOR_TRIALS, AcceptanceEstimator
from hf_aspire.cost_model import CostModel, StepCost
from hf_aspire.scheduler import Aspire


def draw(rng: random.Random, alpha: float, drafted: int) -> int:
    """Accepted drafts of a round whose drafts are accepted with probability `alpha`, up to the first rejection."""
    accepted = 0
    while accepted < drafted and rng.random() < alpha:
        accepted += 1
    return accepted


def test_everybody_starts_at_the_prior() -> None:
    assert AcceptanceEstimator(0.7, 0.8).estimate(3) == pytest.approx(0.7)


def test_what_lies_behind_a_rejection_is_not_judged() -> None:
    short, long = AcceptanceEstimator(0.9, 0.8), AcceptanceEstimator(0.9, 0.8)
    short.observe(0, drafted=3, accepted=2)
    long.observe(0, drafted=15, accepted=2)
    assert short.estimate(0) == long.estimate(0)
    full = AcceptanceEstimator(0.9, 0.8)
    full.observe(0, drafted=2, accepted=2)
    assert full.estimate(0) > 0.9 > short.estimate(0)


def test_one_round_by_hand() -> None:
    estimator = AcceptanceEstimator(0.9, 0.8)
    estimator.observe(0, drafted=4, accepted=1)
    pooled = (1 + PRIOR_TRIALS * 0.9) / (2 + PRIOR_TRIALS)
    assert estimator.estimate(1) == pytest.approx(pooled)
    assert estimator.estimate(0) == pytest.approx((1 + PRIOR_TRIALS * pooled) / (2 + PRIOR_TRIALS))


def test_smoothing_is_the_weight_of_the_past() -> None:
    def after(smoothing: float) -> float:
        estimator = AcceptanceEstimator(0.9, smoothing)
        for accepted in (0, 0, 0, 0, 8):
            estimator.observe(0, drafted=8, accepted=accepted)
        return estimator.estimate(0)

    assert after(0.0) > after(0.5) > after(0.8) > after(0.95)


@pytest.mark.parametrize("drafted", [1, 3, 15])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8, 0.95])
def test_the_estimate_is_right_at_every_draft_length(alpha: float, drafted: int) -> None:
    rng = random.Random(0)
    estimator = AcceptanceEstimator(0.9, 0.8)
    estimates = []
    for step in range(4000):
        estimator.observe(0, drafted, draw(rng, alpha, drafted))
        if step >= 200:
            estimates.append(estimator.estimate(0))
    # what is left is the pull of the prior, strongest for single drafts
    assert sum(estimates) / len(estimates) == pytest.approx(alpha, abs=0.05 if drafted == 1 else 0.03)


def test_requests_that_differ_are_told_apart() -> None:
    rng = random.Random(1)
    estimator = AcceptanceEstimator(0.9, 0.8)
    alphas = [0.4, 0.95] * 4
    means = [0.0] * len(alphas)
    for step in range(600):
        for request, alpha in enumerate(alphas):
            estimator.observe(request, 5, draw(rng, alpha, 5))
            means[request] += estimator.estimate(request) / 500 if step >= 100 else 0
    assert all(mean < 0.62 for mean in means[::2])
    assert all(mean > 0.84 for mean in means[1::2])


def test_a_new_request_starts_at_what_the_others_showed() -> None:
    rng = random.Random(2)
    estimator = AcceptanceEstimator(0.9, 0.8)
    for _ in range(100):
        for request in range(4):
            estimator.observe(request, 3, draw(rng, 0.5, 3))
    assert estimator.estimate(99) == pytest.approx(0.5, abs=0.12)
    estimator.forget(0)
    assert estimator.estimate(0) == estimator.estimate(99)


def test_a_row_without_drafts_shows_nothing() -> None:
    estimator = AcceptanceEstimator(0.9, 0.8)
    estimator.observe(0, 5, 1)
    before = estimator.estimate(0), estimator.estimate(1)
    estimator.observe(0, 0, 0)
    assert (estimator.estimate(0), estimator.estimate(1)) == before


@pytest.mark.parametrize(("drafted", "accepted"), [(3, 4), (3, -1), (0, 1), (-1, -1)])
def test_impossible_rounds_are_refused(drafted: int, accepted: int) -> None:
    estimator = AcceptanceEstimator(0.9, 0.8)
    with pytest.raises(ValueError, match=str(accepted)):
        estimator.observe(0, drafted, accepted)
    assert estimator.estimate(0) == pytest.approx(0.9)


def test_relaxing_moves_slowly_to_the_pool_and_with_it_to_the_prior() -> None:
    estimator = AcceptanceEstimator(0.9, 0.8)
    for _ in range(50):
        estimator.observe(0, 3, 0)
        estimator.observe(1, 3, 3)
    low, pooled = estimator.estimate(0), estimator.estimate(99)
    assert low < pooled < 0.9
    for step in range(3000):
        before, pool_before = estimator.estimate(0), estimator.estimate(99)
        estimator.relax(0)
        assert before <= estimator.estimate(0) <= estimator.estimate(99)
        assert pool_before <= estimator.estimate(99) <= 0.9 + 1e-12
        if step == 0:
            assert 0 < estimator.estimate(0) - low < 0.01
    assert estimator.estimate(0) == pytest.approx(0.9, abs=0.01)


def test_the_pool_stays_with_the_data_while_somebody_drafts() -> None:
    estimator, alone = AcceptanceEstimator(0.9, 0.8), AcceptanceEstimator(0.9, 0.8)
    for _ in range(500):
        for each in (estimator, alone):
            each.observe(0, 2, 1)
        for request in range(1, 8):
            estimator.relax(request)
    assert estimator.estimate(99) == alone.estimate(99) == pytest.approx(0.5, abs=0.05)


def test_the_pool_relaxes_per_step_whatever_the_batch() -> None:
    def pooled_after(batch: int) -> float:
        estimator = AcceptanceEstimator(0.9, 0.8)
        for _ in range(100):
            estimator.observe(0, 1, 0)
        for _ in range(300):
            for request in range(batch):
                estimator.relax(request)
        return estimator.estimate(999)

    assert pooled_after(1) > 0.15
    assert pooled_after(32) == pytest.approx(pooled_after(1))


EVENT = st.tuples(
    st.integers(0, 3), st.integers(0, 15), st.integers(0, 15), st.sampled_from(["see", "relax", "forget"])
)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0, 1, exclude_max=True), st.lists(EVENT, max_size=60))
def test_estimates_stay_in_bounds(prior: float, smoothing: float, events: list[tuple[int, int, int, str]]) -> None:
    estimator = AcceptanceEstimator(prior, smoothing)
    for request, drafted, accepted, event in events:
        if event == "see":
            estimator.observe(request, drafted, min(accepted, drafted))
        elif event == "relax":
            estimator.relax(request)
        else:
            estimator.forget(request)
        assert all(LOWEST <= estimator.estimate(each) <= HIGHEST for each in range(5))
    for _ in range(400):
        estimator.observe(0, 15, 15)
        estimator.observe(1, 15, 0)
    assert LOWEST <= estimator.estimate(1) < estimator.estimate(0) <= HIGHEST


class PlainAverage(AcceptanceEstimator):
    """The estimator of the paper: a smoothed average of accepted / min(accepted + 1, drafted), each request alone."""

    def __init__(self) -> None:
        super().__init__(0.9, 0.8)
        self.average: dict[int, float] = {}

    def estimate(self, request: int) -> float:
        return self.average.get(request, 0.9)

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        self.average[request] = 0.8 * self.estimate(request) + 0.2 * accepted / min(accepted + 1, drafted)

    def relax(self, request: int) -> None:
        self.average[request] = self.estimate(request) + (0.9 - self.estimate(request)) / 200


def test_the_estimator_is_worth_several_per_cent_of_throughput() -> None:
    """The figures in the docstring of `AcceptanceEstimator`."""
    cost = CostModel(StepCost(*GPU), fixed=True)
    shares: dict[type, list[float]] = {AcceptanceEstimator: [], PlainAverage: []}
    for alpha in (0.5, 0.7, 0.85, 0.95):
        for context in (30_000, 100_000):
            best = at_known_acceptance(alpha, 8, context, cost)
            for estimator in (AcceptanceEstimator(0.9, 0.8), PlainAverage()):
                schedule = Aspire(cost, estimator, max_draft=15, initial_draft=3)
                run = simulate(schedule, lambda step, alpha=alpha: [alpha] * 8, 1000, cost, context)
                shares[type(estimator)].append(run.tokens / run.seconds / best)
    means = {kind: sum(values) / len(values) for kind, values in shares.items()}
    print({kind.__name__: (round(means[kind], 3), round(min(values), 3)) for kind, values in shares.items()})
    assert means[AcceptanceEstimator] > 0.97
    assert means[AcceptanceEstimator] > means[PlainAverage] + 0.02
