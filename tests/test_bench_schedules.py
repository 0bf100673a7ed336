"""The simulator of schedules against a round worked out by hand."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
from kit import benchmark

from hf_aspire.config import AspireConfig
from hf_aspire.cost_model import CostModel
from hf_aspire.request import RowKind
from hf_aspire.scheduler import Candidate, Fixed


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with benchmark("bench_schedules") as module:
        monkeypatch.setattr(module, "SEEDS", 1)
        yield module


@pytest.mark.parametrize("length", [3, 8])
def test_lockstep_without_rejections_is_as_fast_as_its_round(
    bench: ModuleType, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "STEPS", 60 * (length + 1))
    for machine in bench.MACHINES.values():
        batch = machine.batch
        drafting = machine.base + batch * (machine.per_token + machine.per_kv_token * machine.listed)
        verifying = machine.base + batch * (machine.per_token * (length + 1) + machine.per_kv_token * machine.context)
        verifying += machine.scoring + machine.per_row * batch
        found = bench.mean_rate(bench.lockstep(length), machine, bench.alike(1.0, 1.0))
        assert found == pytest.approx(batch * (length + 1) / (length * drafting + verifying), rel=1e-9)


def test_rounds_end_at_the_first_rejection(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted to a depth of three, and never behind: rounds of six commit four tokens, those of two three."""
    monkeypatch.setattr(bench, "STEPS", 210)
    machine = bench.MACHINES["8B, 8 x 32k"]
    rates = {}
    for last in (1.0, 0.0):  # all drafts are accepted, or the first three
        text = lambda rng, last=last: lambda depth: 1.0 if depth < 3 else last  # noqa: E731
        rates[last] = [bench.mean_rate(bench.lockstep(length), machine, text) for length in (2, 6)]
    assert rates[0.0][0] == rates[1.0][0]
    assert rates[0.0][1] == pytest.approx(rates[1.0][1] * 4 / 7)


def test_plain_decoding_scores_nothing(bench: ModuleType) -> None:
    for machine in bench.MACHINES.values():
        step = machine.base + machine.batch * (machine.per_token + machine.per_kv_token * machine.context)
        found = bench.mean_rate(bench.lockstep(0), machine, bench.alike(0.5, 0.5))
        assert found == pytest.approx(machine.batch / step)


def test_acceptance_differs_and_falls_as_stated(bench: ModuleType) -> None:
    rng = random.Random(0)
    texts = [bench.differing(0.9, 0.06, 0.01)(rng) for _ in range(20_000)]
    firsts = [text(0) for text in texts]
    assert statistics.mean(firsts) == pytest.approx(0.9, abs=0.002)  # five standard errors
    assert statistics.stdev(firsts) == pytest.approx(0.06, rel=0.05)
    assert all(text(10) == pytest.approx(0.9 * text(0)) for text in texts[:100])


def test_outcomes_are_heard_a_step_late_and_every_step_is_fitted(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "STEPS", 30)
    events: list[str] = []

    class Listening(Fixed):
        def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
            kinds = super().decide(candidates)
            events.append("verifies" if RowKind.VERIFY in kinds else "drafts")
            return kinds

        def observe(self, request: int, drafted: int, accepted: int) -> None:
            if request == 0:
                events.append("hears")

    machine = bench.MACHINES["8B, 8 x 32k"]
    fit = CostModel(machine.prior)
    bench.rate(Listening(2), fit, machine, bench.alike(1.0, 1.0), 0)
    assert fit.steps == 30
    assert events[:8] == ["drafts", "drafts", "verifies", "drafts", "hears", "drafts", "verifies", "drafts"]


def test_company_is_worth_most_where_launches_are_most_of_a_step(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "STEPS", 300)
    machine, draw = bench.MACHINES["SmolLM2-135M, 64 x 7k"], bench.TEXTS[".95 to .85"]
    together = bench.mean_rate(AspireConfig(max_draft=15), machine, draw)
    monkeypatch.setattr("hf_aspire.scheduler.COMPANY", 1 << 30)
    assert together > 1.08 * bench.mean_rate(AspireConfig(max_draft=15), machine, draw)
