"""Times whole decoding steps of a model shape with random weights against the bytes that they must move.

    python benchmarks/bench_step.py --shape llama-3.1-8b --batch 32 --context 16384 --output results/step.json

Contexts are random keys and values, so that nobody waits for prompts; acceptance is replayed as 1, so that schedule
"staggered" with 15 drafts makes every step the same mixture: 15 of 16 rows draft, one of 16 verifies 16 queries. A
step's time is that between the ends of two steps on the device: kernels, sampling, list updates and all gaps; the
host's is what planning and packing one takes, meanwhile. Every call runs twice, and steps are those of the second one;
three more tell what the host takes, whose speed varies from call to call.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import triton
import typer
from host_clock import host_clock, host_times
from rich.console import Console
from rich.table import Table
from shapes import kv_bytes, prompts, random_model, weight_bytes
from transformers import PreTrainedModel

import hf_aspire
from hf_aspire import AspireConfig
from hf_aspire.request import RowKind
from hf_aspire.roofline import device_rates
from hf_aspire.testing import random_context, replay_acceptance

DRAFTS = 15
SWITCHES = {
    "eager": {"compile": False, "cuda_graphs": False},
    "graphs": {"compile": False, "cuda_graphs": True},
    "graphs, compiled": {"compile": True, "cuda_graphs": True},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "autoregressive": {"schedule": "autoregressive"},
    "mixed, verify": {"schedule": "staggered", "context": "verify"},
    "mixed, refresh": {"schedule": "staggered", "context": "refresh", "granularity": 16},
}


def measure(
    model: PreTrainedModel, batch: int, context: int, new: int, settings: dict[str, Any], more: int = 0
) -> dict[str, Any]:
    """Median milliseconds of the second call's most frequent kind of step, and what it must read.

    What the host takes is of the second call and `more` calls: the median of all of their steps, and of each call's.
    """
    ids = prompts(batch, context, model.config.vocab_size)
    collected: list[Any] = []
    config = AspireConfig(draft_length=DRAFTS, max_draft=DRAFTS, seed=0, on_stats=collected.append, **settings)
    calls, host = [], list[list[float]]()
    for _ in range(2 + more):
        started = time.perf_counter()
        with random_context(), replay_acceptance([1.0]), host_clock() as planning:
            hf_aspire.generate(model, ids, max_new_tokens=new, do_sample=False, aspire_config=config)
        torch.cuda.synchronize()
        calls.append(time.perf_counter() - started)
        host.append(planning)
    second = collected[1].timeline
    kinds: dict[tuple[int, int], list[float]] = {}
    for step in second:
        count = Counter(row.kind for row in step.rows)
        if not count[RowKind.PREFILL]:
            key = count[RowKind.DRAFT], sum(row.queries for row in step.rows if row.kind is not RowKind.DRAFT)
            kinds.setdefault(key, []).append(step.end - step.start)
    (drafts, queries), times = max(kinds.items(), key=lambda item: len(item[1]))
    length = context + new // 2
    full_layers = 1 / model.config.num_hidden_layers if settings.get("context") == "refresh" else 0.0
    read = (batch - drafts) * length + drafts * (full_layers * length + (1 - full_layers) * config.budget(length))
    return {
        "drafts": drafts,
        "queries": queries,
        "steps": len(times),
        "milliseconds": 1e3 * statistics.median(times),
        **host_times([seconds for call in host[1:] for seconds in call]),
        "host_milliseconds_of_calls": [1e3 * statistics.median(call) for call in host[1:] if call],
        "bytes": weight_bytes(model) + read * kv_bytes(model),
        "first_call_seconds": calls[0],
        "second_call_beyond_its_steps": calls[1] - sum(step.end - step.start for step in second),
    }


def idle_shares(model: PreTrainedModel, batch: int, context: int, settings: dict[str, Any]) -> dict[str, float]:
    """Shares of the time in which no kernel runs, over the third quarter of a call, from a device trace.

    All gaps, most of them between kernels of a graph, where tracing itself widens them; and those of 5 us or more, in
    which the device waits for the host or for a copy.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        measure(model, batch, context, 96, settings)
    kernels = sorted((e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type.name == "CUDA")
    kernels = kernels[len(kernels) * 6 // 8 : len(kernels) * 7 // 8]  # of two calls; behind their start and end
    gaps, end = [], kernels[0][0]
    for begin, stop in kernels:
        gaps.append(max(0.0, begin - end))
        end = max(end, stop)
    span = end - kernels[0][0]
    return {"idle": sum(gaps) / span, "waiting": sum(gap for gap in gaps if gap >= 5) / span}


def main(
    shape: str = "llama-3.1-8b",
    batch: int = 32,
    context: int = 16384,
    new: int = 128,
    cases: Annotated[str, typer.Option(help="Switches or schedules, separated by semicolons; all without.")] = "",
    idle: Annotated[bool, typer.Option(help="Trace the device for gaps, too.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measures every schedule with every switch."""
    torch.manual_seed(0)
    model = random_model(shape)
    bandwidth = device_rates(torch.device("cuda"), torch.bfloat16).bytes_per_second
    table = Table(
        "step",
        "how",
        "drafts + queries",
        "ms",
        "floor ms",
        "times floor",
        "host ms (90 %)",
        "idle (waiting)",
        "1st call s",
        "2nd beyond steps s",
    )
    rows = []
    for name, fields in SCHEDULES.items():
        for how, switches in SWITCHES.items():
            if cases and not any(part in (name, how) for part in cases.split(";")):
                continue
            found = measure(model, batch, context, new, {**fields, **switches}, more=3)
            floor = 1e3 * found["bytes"] / bandwidth
            found |= {"step": name, "how": how, "floor_milliseconds": floor}
            if idle and switches["compile"]:
                found |= idle_shares(model, batch, context, {**fields, **switches})
            rows.append(found)
            table.add_row(
                name,
                how,
                f"{found['drafts']} + {found['queries']}",
                f"{found['milliseconds']:.2f}",
                f"{floor:.2f}",
                f"{found['milliseconds'] / floor:.2f}",
                f"{found['host_milliseconds']:.2f} ({found['host_milliseconds_90_percent']:.2f})"
                if "host_milliseconds" in found
                else "",
                f"{found['idle']:.1%} ({found['waiting']:.1%})" if "idle" in found else "",
                f"{found['first_call_seconds']:.1f}",
                f"{found['second_call_beyond_its_steps']:.2f}",
            )
    Console(width=150).print(table)
    if output is not None:
        device = torch.cuda.get_device_name()
        versions = {m.__name__: m.__version__ for m in (torch, triton, transformers)}
        record = {"device": device, "copy_bytes_per_second": bandwidth, "versions": versions}
        what = {"shape": shape, "batch": batch, "context": context, "new_tokens": new}
        output.write_text(json.dumps({**record, **what, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
