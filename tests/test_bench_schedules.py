"""The simulator of schedules against a round worked out by hand."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hf_aspire.config import AspireConfig

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("bench_schedules")
    monkeypatch.setattr(module, "SEEDS", 1)
    yield module


@pytest.mark.parametrize("length", [3, 8])
def test_lockstep_without_rejections_is_as_fast_as_its_round(
    bench: ModuleType, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "STEPS", 60 * (length + 1))
    config = AspireConfig(schedule="fixed", draft_length=length, max_draft=15)
    for machine in bench.MACHINES.values():
        batch = machine.batch
        drafting = machine.base + batch * (machine.per_token + machine.per_kv_token * machine.listed)
        verifying = machine.base + batch * (machine.per_token * (length + 1) + machine.per_kv_token * machine.context)
        verifying += machine.scoring + machine.per_row * batch
        found = bench.mean_rate(config, machine, bench.alike(1.0, 1.0))
        assert found == pytest.approx(batch * (length + 1) / (length * drafting + verifying), rel=1e-9)


def test_company_is_worth_most_where_launches_are_most_of_a_step(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "STEPS", 300)
    machine, draw = bench.MACHINES["SmolLM2-135M, 64 x 7k"], bench.TEXTS[".95 to .85"]
    together = bench.mean_rate(AspireConfig(max_draft=15), machine, draw)
    monkeypatch.setattr("hf_aspire.scheduler.COMPANY", 1 << 30)
    assert together > 1.08 * bench.mean_rate(AspireConfig(max_draft=15), machine, draw)
