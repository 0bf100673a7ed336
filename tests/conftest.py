"""Settings that every test needs (one thread per worker, no hub, reproducible property tests) and shared fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for programs that tests start

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from kit import Batch
    from torch import Tensor
    from transformers import LlamaForCausalLM

torch.set_num_threads(1)

# Wall-clock checks of hypothesis fail on a loaded machine, not on wrong code.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("ci"), derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# The fixtures import what they need when they run: kernels/conftest.py must come before anything that imports Triton.


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    from kit import tiny_llama

    return tiny_llama()


@pytest.fixture(scope="module")
def batch(request: pytest.FixtureRequest) -> Batch:
    """Ragged prompts of the file's `LENGTHS`."""
    import kit

    return kit.ragged(getattr(request.module, "LENGTHS", kit.LENGTHS))


@pytest.fixture(scope="module")
def text(request: pytest.FixtureRequest, model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """What plain `generate` makes of the batch in the file's number of `NEW` tokens."""
    import kit

    return kit.plain(model, batch, max_new_tokens=getattr(request.module, "NEW", kit.NEW))


@pytest.fixture
def enabled() -> Iterator[None]:
    import hf_aspire

    hf_aspire.enable()
    yield
    hf_aspire.disable()
