"""Tokens per second of whole calls: plain generate, our autoregressive schedule, fixed drafts and aspire.

    python benchmarks/bench_generate.py --shape llama-3.1-8b --context 32768 --batch fit --output results/generate.json

The weights are random, so a draft's acceptance means nothing: it is *replayed* from the profiles named in the table.
Contexts are random keys and values (prompts are not read). Every call runs twice, and the second one counts: the first
compiles and captures. Tokens per second are those behind the prompts until the first row ends: short benchmarks would
otherwise measure how unevenly rows of a batch end.

The ideal is what the best draft length would give if every step cost what a least-squares fit of all measured steps
says: seconds = a + b query tokens + c KV tokens read. With g drafts per round, one of g + 1 rows verifies in a step.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import triton
import typer
from rich.console import Console
from rich.table import Table
from shapes import kv_bytes, prompts, random_model
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import hf_aspire
from hf_aspire import AspireConfig
from hf_aspire.capacity import free_memory
from hf_aspire.request import RowKind
from hf_aspire.testing import random_context, replay_acceptance

MOST = 15
PROFILES = {
    ".975": [0.975] * MOST,
    ".95 to .85": np.linspace(0.95, 0.85, MOST + 1).tolist(),
}
COMMON: dict[str, Any] = {"compile": True, "cuda_graphs": True, "max_draft": MOST, "seed": 0}


@dataclass(frozen=True)
class Measured:
    """A call.

    Attributes:
        rate: Tokens per second until the first row ends.
        call_rate: Tokens per second behind the prompts.
        drafts: Mean drafts of a round that holds any.
        steps: (query tokens, KV tokens read, seconds) of its steps without prompts.
    """

    rate: float
    call_rate: float
    drafts: float
    steps: list[tuple[int, float, float]]

    def entry(self, what: str) -> dict[str, Any]:
        """What is written down of it."""
        return {
            "what": what,
            "tokens_per_second": self.rate,
            "tokens_per_second_of_the_call": self.call_rate,
            "mean_drafts": self.drafts,
        }


def ours(
    model: PreTrainedModel, ids: torch.Tensor, new: int, profile: list[float], fields: dict[str, Any]
) -> Measured:
    """The second of two equal calls."""
    for _ in range(2):
        collected: list[Any] = []
        config = AspireConfig(on_stats=collected.append, **COMMON, **fields)
        with random_context(), replay_acceptance(profile):
            hf_aspire.generate(model, ids, max_new_tokens=new, do_sample=False, aspire_config=config)
    (stats,) = collected
    length, steps = ids.shape[1], []
    committed, seconds, left = 0, 0.0, dict.fromkeys(range(len(ids)), new - 1)
    for step in stats.timeline:
        full = [row.queries for row in step.rows if row.kind in (RowKind.DECODE, RowKind.VERIFY)]
        drafts = sum(row.kind is RowKind.DRAFT for row in step.rows)
        if full or drafts:
            read = len(full) * length + drafts * config.budget(length)
            steps.append((sum(full) + drafts, float(read), step.end - step.start))
            if min(left.values()) > 0:
                seconds += step.end - step.start
                committed += sum(row.committed for row in step.rows)
                for row in step.rows:
                    left[row.request] -= row.committed
    rounds = [drafted for row in stats.rounds for drafted, _ in row if drafted]
    return Measured(
        committed / seconds, stats.decode_tokens_per_second, statistics.mean(rounds) if rounds else 0.0, steps
    )


class Clock(StoppingCriteria):
    """Never stops; notes when each step has ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        """See `StoppingCriteria`."""
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def plain(model: PreTrainedModel, ids: torch.Tensor, new: int) -> float:
    """Tokens per second of plain generate, from its median step over a cache of random keys and values."""
    config, clock, cache = model.config, Clock(), DynamicCache(config=model.config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (len(ids), config.num_key_value_heads, ids.shape[1] - 1, size)
    for layer in range(config.num_hidden_layers):
        states = (torch.randn(shape, dtype=model.dtype, device="cuda") for _ in range(2))
        cache.update(*states, layer)
    criteria = StoppingCriteriaList([clock])
    mask = torch.ones_like(ids)
    model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        stopping_criteria=criteria,
    )
    return len(ids) / statistics.median(np.diff(clock.times))


def ideal_rate(
    steps: list[tuple[int, float, float]], batch: int, length: int, sparse: int, profile: list[float]
) -> tuple[float, int]:
    """The best tokens per second of any draft length, 0 included, at the fitted cost, and that draft length."""
    table = np.array(steps)
    factors = np.stack([np.ones(len(table)), table[:, 0], table[:, 1]], 1)
    weights = 1 / table[:, 2]  # relative errors count
    coefficients, *_ = np.linalg.lstsq(factors * weights[:, None], np.ones(len(table)), rcond=None)
    expected, chance = 1.0, 1.0
    rates: list[float] = []
    for drafts in range(MOST + 1):
        verifies = batch / (drafts + 1)
        read = verifies * length + (batch - verifies) * sparse
        seconds = coefficients @ [1.0, batch - verifies + batch, read]
        rates.append(float(verifies * expected / seconds))
        chance *= profile[min(drafts, len(profile) - 1)]
        expected += chance
    return max(rates), rates.index(max(rates))


def main(
    shape: str = "llama-3.1-8b",
    context: int = 32768,
    batch: Annotated[str, typer.Option(help="A number, or 'fit': as many as memory holds.")] = "fit",
    new: int = 256,
    profiles: Annotated[str, typer.Option(help="Profiles, separated by commas; '' for none.")] = ",".join(PROFILES),
    plain_tokens: Annotated[int, typer.Option(help="New tokens of plain generate; 0 leaves it out.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measures one shape, context and batch."""
    torch.manual_seed(0)
    model = random_model(shape)
    room = 0.88 * free_memory(torch.device("cuda"))
    rows = int(room / (kv_bytes(model) * (context + new + 32))) if batch == "fit" else int(batch)
    ids = prompts(rows, context, model.config.vocab_size)
    results: list[dict[str, Any]] = []
    if plain_tokens:
        results.append({"what": "plain generate", "tokens_per_second": plain(model, ids, plain_tokens)})
        torch.cuda.empty_cache()
    base = ours(model, ids, new // 2, [1.0], {"schedule": "autoregressive"})
    results.append(base.entry("autoregressive"))
    sparse = AspireConfig().budget(context)
    for name in filter(None, profiles.split(",")):
        profile = PROFILES[name]
        fixed = ours(model, ids, new, profile, {"schedule": "fixed", "draft_length": 8})
        aspire = ours(model, ids, new, profile, {"schedule": "aspire"})
        ideal, drafts = ideal_rate(base.steps + fixed.steps + aspire.steps, rows, context, sparse, profile)
        bound = {"ideal": ideal, "ideal_drafts": drafts}
        results.append(fixed.entry(f"fixed 8, replayed {name}") | bound)
        results.append(aspire.entry(f"aspire, replayed {name}") | bound)
    heads = ("schedule", "tokens/s", "x autoregressive", "drafts", "ideal x", "at", "of ideal")
    table = Table(*heads, title=f"{shape}, {rows} x {context}")
    for entry in results:
        cells = [entry["what"], f"{entry['tokens_per_second']:.0f}", f"{entry['tokens_per_second'] / base.rate:.2f}"]
        if "ideal" in entry:
            cells += [f"{entry['mean_drafts']:.1f}", f"{entry['ideal'] / base.rate:.2f}", str(entry["ideal_drafts"])]
            cells.append(f"{entry['tokens_per_second'] / entry['ideal']:.0%}")
        table.add_row(*cells)
    Console(width=110).print(table)
    if output is not None:
        versions = {m.__name__: m.__version__ for m in (torch, triton, transformers)}
        record = {"device": torch.cuda.get_device_name(), "versions": versions, "sparsity": 0.07, "policy": "verify"}
        what = {"shape": shape, "batch": rows, "context": context, "new_tokens": new}
        text = json.dumps({**record, **what, "acceptance": "replayed", "results": results}, indent=1)
        output.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
