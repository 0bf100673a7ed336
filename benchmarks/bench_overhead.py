"""Host time of a step beyond its forward: planning, packing, processors, choice, commit and refresh.

    python benchmarks/bench_overhead.py

A random two-layer model with SmolLM2's vocabulary (49,152 words), so that scores have their real size and the forward
is cheap; batch 8, contexts of 600 tokens, float32, one thread. Medians over the steps of a call, prefills left out.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import hf_aspire
from hf_aspire import AspireConfig
from hf_aspire.request import RowKind
from hf_aspire.runner import Runner

BATCH, CONTEXT, NEW = 8, 600, 48
CASES: dict[str, dict[str, Any]] = {
    "no processors": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "sampling, coupled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}


def measure(model: LlamaForCausalLM, schedule: str, keywords: dict[str, Any]) -> tuple[float, float]:
    """Median seconds of a step beyond its forward, and query tokens per step."""
    forwards: list[float] = []
    original = Runner.forward

    def timed(self: Runner, batch: Any) -> torch.Tensor:
        started = time.perf_counter()
        result = original(self, batch)
        forwards.append(time.perf_counter() - started)
        return result

    Runner.forward = timed
    try:
        collected: list[Any] = []
        config = AspireConfig(schedule=schedule, min_pages=8, recent_pages=4, on_stats=collected.append, seed=0)
        ids = torch.randint(5, model.config.vocab_size, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
        keywords = {"do_sample": False, **keywords}
        hf_aspire.generate(model, ids, max_new_tokens=NEW, aspire_config=config, **keywords)
    finally:
        Runner.forward = original
    steps = [
        (step.end - step.start - seconds, sum(row.queries for row in step.rows))
        for step, seconds in zip(collected[0].timeline, forwards, strict=True)
        if all(row.kind is not RowKind.PREFILL for row in step.rows)
    ]
    return statistics.median(s for s, _ in steps), statistics.mean(t for _, t in steps)


def main(
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Measures every case under every schedule, in turns, and prints medians over the repetitions."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, num_hidden_layers=2, eos_token_id=None, **shape)).eval()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(repetitions):
        for name, keywords in CASES.items():
            for schedule in ("autoregressive", "fixed"):
                found.setdefault((name, schedule), []).append(measure(model, schedule, keywords))
    table = Table("case", "schedule", "query tokens per step", "ms beyond the forward")
    rows = []
    for (name, schedule), values in found.items():
        milliseconds = 1e3 * statistics.median(v for v, _ in values)
        tokens = statistics.median(t for _, t in values)
        rows.append({"case": name, "schedule": schedule, "tokens": tokens, "milliseconds": milliseconds})
        table.add_row(name, schedule, f"{tokens:.1f}", f"{milliseconds:.2f}")
    Console(width=100).print(table)
    if output is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        record = {"command": "python benchmarks/bench_overhead.py", "threads": 1, "repetitions": repetitions}
        output.write_text(json.dumps({**record, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
