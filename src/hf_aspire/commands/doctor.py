"""What is installed, what would run here, and how many tokens fit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import hf_aspire

from ..attention import switch
from ..backends import choose_backend
from ..cache import LayerSpec
from ..capacity import _MEMORY_SHARE, free_memory
from ..config import AspireConfig
from ..probe import check_model, probe_model
from ..roofline import device_rates
from .models import PACKAGED_MODEL, resolve_dtype

_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "triton", "flash-attn", "gguf", "matplotlib")
_POSITIONS = 2048  # of the probed call; every model that is supported at all has as many


@dataclass(frozen=True)
class Shape:
    """What a model needs of memory, and whether it can run.

    Attributes:
        name: What to call it in print.
        weight_bytes: All weights.
        kv_bytes: Keys and values of one token; 0 if the model is refused.
        layers: Shapes of its attention; empty if the model is refused.
        refusal: Why it is refused, or None.
    """

    name: str
    weight_bytes: int
    kv_bytes: int
    layers: tuple[LayerSpec, ...]
    refusal: str | None


def run_doctor(model: str | None, device: torch.device, dtype: str, console: Console) -> None:
    """Prints what is installed, what would run, and what fits.

    Args:
        model: Hub name or directory whose configuration is read, never its weights; None: the packaged SmolLM2.
        device: Where it would run.
        dtype: Of the weights; `"auto"` as `load_model` resolves it.
        console: Where to print.
    """
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in [*_software(), *_hardware(device), *_capacity(model, device, dtype)]:
        table.add_row(name, value)
    console.print(table, highlight=False)


def model_shape(model: str | None, dtype: torch.dtype | str) -> Shape:
    """Builds a model without weights and asks it, as a call would, how it attends.

    Raises:
        OSError: There is no such model.
    """
    name = model or PACKAGED_MODEL
    config = _smollm2_config() if model is None else AutoConfig.from_pretrained(model)
    chosen = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=chosen).eval()
    weights = sum(p.numel() * p.element_size() for p in empty.parameters())
    try:
        check_model(empty, _POSITIONS - 1)
        with switch.on(empty):
            layers = probe_model(empty, _POSITIONS).layers
    except ValueError as error:
        return Shape(name, weights, 0, (), str(error))
    return Shape(name, weights, sum(layer.bytes_per_token for layer in layers), layers, None)


def _smollm2_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def _software() -> list[tuple[str, str]]:
    found = [f"hf-aspire {hf_aspire.__version__}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} -")
    return [("Python", f"{platform.python_version()} on {platform.platform()}"), ("packages", ", ".join(found))]


def _hardware(device: torch.device) -> list[tuple[str, str]]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    rates = device_rates(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    return [
        ("device", f"{device.type}: {name}"),
        ("copy bandwidth", f"{rates.bytes_per_second / 1e9:.1f} GB/s read + written, best of 5 copies"),
        ("matrix products", f"{rates.flops_per_second / 1e12:.3g} TFLOP/s, best of 5 square products"),
        ("free memory", f"{free_memory(device) / 2**30:.1f} GiB"),
    ]


def _capacity(model: str | None, device: torch.device, dtype: str) -> list[tuple[str, str]]:
    shape = model_shape(model, resolve_dtype(dtype, device))
    weights = f"{shape.name}: {shape.weight_bytes / 2**20:,.0f} MiB of weights"
    if shape.refusal is not None:
        return [("model", weights), ("supported", f"no: {shape.refusal}")]
    kernels = choose_backend(AspireConfig(), [replace(layer, device=device) for layer in shape.layers])
    room = max(0, free_memory(device) - shape.weight_bytes) * _MEMORY_SHARE
    return [
        ("model", f"{weights}, {shape.kv_bytes / 2**10:,.1f} KiB of keys and values per token"),
        ("supported", "yes"),
        ("backend", f"{kernels.name}: {kernels.reason}"),
        (
            "KV that fits",
            f"{room / shape.kv_bytes:,.0f} tokens, beside the weights, in {_MEMORY_SHARE:.0%} of the rest",
        ),
    ]
