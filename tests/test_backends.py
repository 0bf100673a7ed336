"""Which kernels a call uses, and that a GPU which has to go without them is told so."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from hf_aspire import AspireConfig
from hf_aspire.backends import choose_backend
from hf_aspire.cache import LayerSpec

GPU = LayerSpec(8, 2, 64, 64, torch.bfloat16, torch.device("cuda"), 0.125)


def test_a_cpu_runs_the_reference_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = choose_backend(AspireConfig(), [dataclasses.replace(GPU, device=torch.device("cpu"))])
    assert choice.name == "torch"
    assert "cpu" in choice.reason


def test_backend_torch_is_torch_anywhere():
    assert choose_backend(AspireConfig(backend="torch"), [GPU]).name == "torch"


@pytest.mark.parametrize(
    ("layers", "config", "obstacle"),
    [
        ([GPU, dataclasses.replace(GPU, kv_heads=4)], {}, "differ"),
        ([dataclasses.replace(GPU, dtype=torch.float64)], {}, "float64"),
        ([GPU], {"page_size": 8}, "pages of 16, 32 or 64"),
        ([dataclasses.replace(GPU, key_size=512)], {}, "head sizes"),
        ([dataclasses.replace(GPU, query_heads=64)], {}, "query heads"),
    ],
)
def test_a_gpu_without_its_kernels_is_warned_about_or_refused(layers, config, obstacle, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.warns(RuntimeWarning, match=obstacle):
        assert choose_backend(AspireConfig(**config), layers).name == "torch"
    with pytest.raises(ValueError, match=f"backend='triton'.*{obstacle}"):
        choose_backend(AspireConfig(backend="triton", **config), layers)


def test_layers_that_differ_in_their_scale_alone_share_the_kernels(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert choose_backend(AspireConfig(), [GPU, dataclasses.replace(GPU, scaling=1.0)]).name == "triton"


def test_a_gpu_that_the_kernels_are_not_made_for_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.warns(RuntimeWarning, match=r"8\.0 or more, and this one's is 7\.5"):
        assert choose_backend(AspireConfig(), [GPU]).name == "torch"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ValueError, match="NVIDIA"):
        choose_backend(AspireConfig(backend="triton"), [GPU])


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        choose_backend(AspireConfig(backend="triton"), [GPU])


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails from now on
sys.path.append(sys.argv[1])
import torch
from kit import plain, ragged, tiny_llama
import hf_aspire
model, batch = tiny_llama(), ragged((40, 20))
text = hf_aspire.generate(model, **batch, do_sample=False, max_new_tokens=6)
assert torch.equal(text, plain(model, batch, max_new_tokens=6))
for sampling in ("coupled", "rejection"):
    config = hf_aspire.AspireConfig(sampling=sampling, schedule="fixed", min_pages=1, recent_pages=1, sparsity=0.1)
    hf_aspire.generate(model, **batch, do_sample=True, max_new_tokens=6, aspire_config=config)
"""


def test_a_cpu_needs_no_triton():
    command = [sys.executable, "-c", WITHOUT_TRITON, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
