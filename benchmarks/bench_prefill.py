"""Times reading prompts: our calls with and without a library for their bulk, and plain generate.

    python benchmarks/bench_prefill.py --shape llama-3.1-8b --cases 4x8192,1x32768 --output results/prefill.json

Calls generate one token. The bound counts what must be multiplied: two operations per weight and token, without the
embedding table and the head (one token per prompt goes through it), and causal attention, each pair of a query and a
key it sees twice. It is divided by the rate of a large product on this device. The first of the three timed calls of a
case pays for what only it does (memory, plans for new shapes); the median leaves it out.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import transformers
import triton
import typer
from rich.console import Console
from rich.table import Table
from shapes import prompts, random_model
from transformers import PreTrainedModel

import hf_aspire
from hf_aspire import AspireConfig, prompt_attention
from hf_aspire.roofline import device_rates

REPEATS = 3
WARM_UP = 600
"""Prompt tokens of the call that compiles our kernels; too few for a bulk, so the first timed call plans those."""
Generate = Callable[[PreTrainedModel, torch.Tensor], Any]


def plain(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Plain generate."""
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)


def bulks(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Ours as it is."""
    config = AspireConfig(compile=False, cuda_graphs=False, seed=0)
    hf_aspire.generate(model, ids, max_new_tokens=1, do_sample=False, aspire_config=config)


def kernel(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Ours with the Triton kernel for all queries."""
    with patch.object(prompt_attention, "LEAST_QUERIES", 1 << 60):
        bulks(model, ids)


WAYS: dict[str, Generate] = {"plain": plain, "library bulk": bulks, "triton only": kernel}


def seconds(generate: Generate, model: PreTrainedModel, ids: torch.Tensor) -> list[float]:
    """Seconds of every timed call."""
    generate(model, ids[:, :WARM_UP])
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        generate(model, ids)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times


def operations(model: PreTrainedModel, batch: int, length: int) -> float:
    """Operations that reading `batch` prompts of `length` tokens takes at least."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    weights = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in ends)
    pairs = length * (length + 1) / 2 * config.num_attention_heads * config.num_hidden_layers
    return batch * (2.0 * weights * length + 4.0 * size * pairs)


def main(
    shape: str = "llama-3.1-8b",
    cases: Annotated[str, typer.Option(help="Comma-separated batches x prompt tokens.")] = "4x8192,1x32768",
    ways: Annotated[str, typer.Option(help="Comma-separated ways to run.")] = ",".join(WAYS),
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measures every case in every way."""
    torch.manual_seed(0)
    model = random_model(shape)
    rate = device_rates(torch.device("cuda"), torch.bfloat16).flops_per_second
    table = Table("prompts", "way", "seconds", "first call s", "tokens/s", "share of bound")
    rows = []
    for case in cases.split(","):
        batch, length = map(int, case.split("x"))
        ids = prompts(batch, length, model.config.vocab_size)
        bound = operations(model, batch, length) / rate
        for way in ways.split(","):
            times = seconds(WAYS[way], model, ids)
            median = statistics.median(times)
            found = {"seconds": median, "all_seconds": times, "tokens_per_second": batch * length / median}
            rows.append({"case": case, "way": way, **found, "share_of_bound": bound / median})
            numbers = f"{median:.3f}", f"{times[0]:.3f}", f"{batch * length / median:,.0f}", f"{bound / median:.1%}"
            table.add_row(case, way, *numbers)
    Console(width=110).print(table)
    if output is not None:
        record = {
            "device": torch.cuda.get_device_name(),
            "product_operations_per_second": rate,
            "versions": {m.__name__: m.__version__ for m in (torch, triton, transformers)},
            "flash_attn": prompt_attention._flash_attn() is not None,
            "shape": shape,
        }
        output.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
