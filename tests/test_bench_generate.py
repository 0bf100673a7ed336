"""The benchmark of whole calls, on a CPU: what it refuses, and what it makes of a call."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import typer
from kit import VOCABULARY, benchmark, tiny_llama
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the benchmark records its version")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with benchmark("bench_generate") as module:
        yield module


@pytest.mark.parametrize("option", ["--profiles", "--schedule", "--shape"])
def test_unknown_names_are_refused_before_any_work(bench: ModuleType, option: str) -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [option, "bogus"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "got bogus; expected" in result.output


@pytest.mark.parametrize("replayed", [True, False])
def test_every_schedule_is_compared_with_plain_decoding(
    bench: ModuleType, replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "COMMON", bench.COMMON | {"compile": False, "cuda_graphs": False, "min_pages": 1})
    monkeypatch.setattr(bench, "COMMON", bench.COMMON | {"recent_pages": 1})
    ids = torch.randint(2, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
    case = bench.Case(tiny_llama(), ids, {"do_sample": False, "eos_token_id": None}, replayed)
    found = bench.compare(case, 24, [".975", ".95 to .85"], ["fixed 8", "aspire"], plain_tokens=0)
    names = [".975", ".95 to .85"] if replayed else [bench.OWN]
    assert [entry["what"] for entry in found] == [
        "autoregressive",
        *(f"{schedule}, {name}" for name in names for schedule in ("fixed 8", "aspire")),
    ]
    assert all(entry["tokens_per_second"] > 0 for entry in found)
    assert all(("ideal" in entry) == replayed for entry in found[1:])
    assert found[1]["mean_drafts"] > 4 and 0 <= found[1]["kept"] <= 1
    if replayed:
        assert found[1]["kept"] > 0.6, "of drafts of 8, .975 each"
    assert bench.table_of(found, "title").row_count == len(found)
