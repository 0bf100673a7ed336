"""The prior of the cost model: a roofline and launches."""

from __future__ import annotations

import pytest
import torch
from kit import tiny_llama

from hf_aspire.cache import LayerSpec
from hf_aspire.roofline import LAUNCHING_PER_LAYER, DeviceRates, prior_cost


def test_the_prior_reads_all_once_and_launches_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_aspire.roofline.device_rates", lambda device, dtype: DeviceRates(1e9, 1e12))
    model = tiny_llama()
    layers = (LayerSpec(4, 2, 16, 16, torch.float32, torch.device("cpu"), 0.25),) * 3
    cost = prior_cost(model, layers)
    count = sum(parameter.numel() for parameter in model.parameters())
    size = model.dtype.itemsize
    assert cost.launching == pytest.approx(3 * LAUNCHING_PER_LAYER)
    assert cost.base - cost.launching == pytest.approx(size * count / 1e9)
    assert cost.per_token == pytest.approx(2 * count / 1e12)
    assert cost.per_kv_token == pytest.approx(3 * 2 * 2 * 16 * 4 / 1e9)
    assert 1e-5 < LAUNCHING_PER_LAYER < 1e-4
