"""The acceptance benchmark on a tiny random model: what it must hold before its figures mean anything."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kit import VOCABULARY, benchmark, tiny_llama
from tiny_model import save_tiny_model
from typer.testing import CliRunner

TOKENS = 200


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with benchmark("bench_acceptance") as module:
        yield module


@pytest.fixture(scope="module")
def setting(bench):
    return bench.Setting(page_size=4, recent_pages=2, round_drafts=3, depth=5, together=4, control_every=2)


def measured(bench, setting, positions=(100, 117, 134, 151, 168), variants=None):
    model = tiny_llama()
    text = torch.randint(2, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    variants = variants or bench.grid([16, 32], [1, 4], [24])
    with bench.prepared(model, TOKENS) as facts:
        return bench.Bench(model, facts, variants, TOKENS, setting).measure(text, list(positions))


@pytest.mark.parametrize("model_text", [False, True])
def test_full_context_accepts_everything_and_a_sparse_one_does_not(bench, setting, model_text):
    results = measured(bench, replace(setting, model_text=model_text))
    for variant, found in results.items():
        least, most = float(found.acceptance.min()), float(found.acceptance.max())
        assert least > 0 and most <= 1 + 1e-5, variant
        assert (least >= 1 - 1e-4) == (variant.policy == bench.FULL), variant


def test_variants_are_measured_at_the_same_positions_to_the_same_depth(bench, setting):
    results = measured(bench, setting)
    for variant, found in results.items():
        expected = [100, 134, 168] if variant.policy == bench.FULL else [100, 117, 134, 151, 168]
        assert found.positions == expected
        assert found.acceptance.shape == (len(expected), setting.depth)


def test_a_figure_does_not_depend_on_what_else_is_measured_in_the_same_forward(bench, setting):
    together = measured(bench, setting)
    for policy in ("verify", "hybrid", "refresh", "window"):
        variant = bench.Variant(policy, 0 if policy == "window" else 4, 16)
        alone = measured(bench, replace(setting, together=1), [134], [variant, bench.Variant(bench.FULL, 0, 0)])
        torch.testing.assert_close(alone[variant].acceptance[0], together[variant].acceptance[2], atol=1e-5, rtol=0)


def test_drafts_read_the_budget_and_a_refresh_layer_in_addition(bench, setting):
    read = {variant: found.tokens_read for variant, found in measured(bench, setting).items()}
    grown = sum(range(1, setting.depth + 1)) / setting.depth + setting.round_drafts  # the tail grows while drafting
    assert read[bench.Variant("verify", 1, 16)] == pytest.approx(16 + grown)
    assert read[bench.Variant("window", 0, 16)] == pytest.approx(15 + grown - setting.round_drafts)
    assert read[bench.Variant("hybrid", 1, 16)] > read[bench.Variant("verify", 1, 16)] + 20  # a third of 134 + ...


def test_the_program_writes_paired_rows_a_sidecar_and_a_picture(bench, tmp_path):
    save_tiny_model(tmp_path / "model")
    output = tmp_path / "acceptance.csv"
    options = {"--model": tmp_path / "model", "--tokens": 420, "--positions": 3, "--output": output, "--processes": 1}
    options |= {"--budget": 256, "--granularity": 16, "--verify-budget": 288}
    words = [str(word) for option in options.items() for word in option]
    outcome = CliRunner().invoke(bench.app, [*words, "--text", "questions", "--text", "code_module"])
    assert outcome.exit_code == 0, outcome.output
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 9  # two texts and both together; 3 policies x 2 units, a further budget, window, control
    assert list(rows[0])[:6] == ["text", "policy", "granularity", "budget", "positions", "tokens_read"]
    assert {"acceptance", "tokens", "tokens_se", "tokens_gain", "equal_gain", "depth_1", "depth_16"} <= set(rows[0])
    key = {(row["text"], row["policy"], row["granularity"], row["budget"]): row for row in rows}
    for text in ("questions", "code_module", "all"):
        verify, refresh = key[text, "verify", "1", "256"], key[text, "refresh", "16", "256"]
        assert float(verify["tokens_gain"]) == 0
        gain = float(refresh["tokens"]) - float(verify["tokens"])
        assert float(refresh["tokens_gain"]) == pytest.approx(gain, abs=2e-6)
    assert json.loads(output.with_suffix(".json").read_text())["least_control_acceptance"] >= 1 - 1e-4
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "| refresh | 16 | 256 |" in outcome.output
    assert CliRunner().invoke(bench.app, ["--text", "none"]).exit_code == 2
