"""Kernel tests run compiled on a GPU and, without one, under Triton's interpreter: the same files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before anything imports triton, as Transformers does.
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    names = (
        "combine",
        "compiled",
        "compiles",
        "cut_to_fit",
        "device_lists",
        "gumbel",
        "highest",
        "many_calls",
        "mixed_attention",
        "parallel_products",
        "side_streams",
        "pipeline",
        "prompt_attention",
        "random_mixtures",
        "select",
        "settle",
        "store_kv",
        "triton_backend",
        "workspace",
    )
    collect_ignore = [f"test_{name}.py" for name in names]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    from kit import tiny_llama  # it imports kernels

    settings = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return tiny_llama(**settings).float().to(device)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, llama: LlamaForCausalLM) -> Iterator[None]:
    """Calls run the Triton kernels, on a CPU too."""
    import hf_aspire
    from hf_aspire.backends import BackendChoice

    monkeypatch.setattr("hf_aspire.session.choose_backend", lambda config, layers: BackendChoice(config.backend, ""))
    yield
    hf_aspire.release(llama)
