"""Kernel tests run compiled on a GPU and, without one, under Triton's interpreter: the same files."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before anything imports triton

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
    )
    collect_ignore = [f"test_{name}.py" for name in names]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
