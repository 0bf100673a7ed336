"""What a step should cost on a device, from the bytes it moves and the products it computes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cache import LayerSpec
from .compat import PreTrainedModel
from .cost_model import StepCost

# What a layer takes beyond its bytes: the starts and ends of a dozen kernels. By fits of traced steps (H200, compiled
# layers in CUDA graphs, 2026-11-29) 41 us in SmolLM2-135M, 44 in an 8B and 64 in a 1.7B shape; elsewhere a guess that
# the fit corrects. It is most of a small model's step, and a fit that does not know it takes it for the cost of query
# tokens. From 20 to 100 us it makes no difference: within 1 % in the mean of `benchmarks/bench_schedules.py`.
LAUNCHING_PER_LAYER = 45e-6


@dataclass(frozen=True)
class DeviceRates:
    """Measured ceilings of a device: copy bandwidth (bytes read + written per second), matrix products (FLOP/s)."""

    bytes_per_second: float
    flops_per_second: float


@functools.cache
def device_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measures a device once per process: the best of five copies and of five square products."""
    on_gpu = device.type == "cuda"
    source = torch.ones((1 << 30 if on_gpu else 1 << 25) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = _best_seconds(lambda: target.copy_(source), device)
    side = 4096 if on_gpu else 512
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    product = _best_seconds(lambda: matrix @ matrix, device)
    return DeviceRates(2 * source.numel() * 4 / copy, 2 * side**3 / product)


def prior_cost(model: PreTrainedModel, layers: tuple[LayerSpec, ...]) -> StepCost:
    """The roofline of a model's step, and its launches: all weights and every listed key and value are read once."""
    first = layers[0]
    rates = device_rates(first.device, first.dtype)
    weights = [p for p in model.parameters() if p.device.type != "meta"]
    size = sum(p.numel() * p.element_size() for p in weights)
    count = sum(p.numel() for p in weights)
    launching = len(layers) * LAUNCHING_PER_LAYER
    return StepCost(
        base=launching + size / rates.bytes_per_second,
        per_token=2 * count / rates.flops_per_second,
        per_kv_token=sum(layer.bytes_per_token for layer in layers) / rates.bytes_per_second,
        launching=launching,
    )


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    return min(once() for _ in range(5))
