"""The benchmark of four-bit scores: its weights are the model's, and exact weights lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from kit import benchmark, tiny_llama
from transformers import AttentionInterface

from hf_aspire.kernels import reference

TOKENS = 200


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with benchmark("bench_scores") as module:
        monkeypatch.setattr(module, "FIRST", 100)
        monkeypatch.setattr(module, "EVERY", 40)
        monkeypatch.setattr(module, "SHARE", 0.3)  # a few of the pages of a short text
        yield module


def test_compares_what_the_model_attends_to(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = tiny_llama(), bench.Recorder()
    ids = torch.randint(1, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    attentions = model(ids, output_attentions=True).attentions
    AttentionInterface.register("recording", recorder)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model(ids)
    for layer, attended in enumerate(attentions):
        query, key, scaling = recorder.layers[layer]
        found = bench.weights(query, key, scaling, [60, TOKENS - 1])
        torch.testing.assert_close(
            found, attended[0, :, [60, TOKENS - 1]].transpose(0, 1).double(), rtol=1e-4, atol=1e-6
        )
    coded = list(bench.compare(recorder, TOKENS))
    assert len(coded) == len(attentions) * 3 * len(bench.UNITS)
    assert all(0.9 < figures["of the best score"] <= 1 + 1e-12 for _, figures in coded)
    assert any(figures["same"] < 1 for _, figures in coded), "codes are coarser than weights"
    monkeypatch.setattr(
        reference, "coded", lambda weights, block, unit: reference.reduce_scores(weights, unit)[None, None]
    )
    assert all(
        figures["same"] == 1 and figures["of the best score"] == pytest.approx(1)
        for _, figures in bench.compare(recorder, TOKENS)
    )
