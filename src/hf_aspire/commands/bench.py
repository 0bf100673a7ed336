"""A short benchmark of decoding: plain `generate`, the autoregressive schedule, and ASPIRE with measured costs."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

from ..compat import CACHE_NAME
from ..config import AspireConfig
from ..stats import AspireStats
from .documents import long_text
from .measure import Run, machine_load, run_aspire, run_plain
from .models import LoadedModel

WAYS = ("plain", "autoregressive", "aspire")


@dataclass(frozen=True)
class Workload:
    """What is decoded: `batch` rows of the same prompt, which is read once and shared.

    Attributes:
        batch: Rows.
        context: Prompt tokens per row.
        new_tokens: New tokens per row; no row ends earlier.
        repetitions: Runs of each way, one after the other in turns.
        sample: Draw from the model's own distribution, so that the rows differ; else greedy, and all are equal.
    """

    batch: int
    context: int
    new_tokens: int
    repetitions: int
    sample: bool = False


@dataclass
class Result:
    """Runs of every way, in the order they were made."""

    runs: dict[str, list[Run]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def rate(self, way: str) -> float:
        """Median decode tokens/s, all rows together."""
        return statistics.median(run.decode_tokens_per_second for run in self.runs[way])

    def spread(self, way: str) -> tuple[float, float]:
        """Lowest and highest decode tokens/s."""
        rates = [run.decode_tokens_per_second for run in self.runs[way]]
        return min(rates), max(rates)

    @property
    def draft_share(self) -> float:
        """Rows that drafted, as a share of all rows after the prompts, over all ASPIRE runs."""
        drafted = sum(stats.rows_drafted for stats in self._stats)
        return drafted / (drafted + sum(len(rounds) for stats in self._stats for rounds in stats.rounds))

    @property
    def acceptance(self) -> float:
        """Accepted share of the verified drafts, over all ASPIRE runs; 0.0 if there were none."""
        return sum(sum(s.accepted) for s in self._stats) / max(1, sum(sum(s.drafted) for s in self._stats))

    @property
    def _stats(self) -> list[AspireStats]:
        return [run.stats for run in self.runs["aspire"] if run.stats is not None]


def run_bench(loaded: LoadedModel, workload: Workload, console: Console) -> Result:
    """Runs the workload by every way in turns, and prints decode tokens/s.

    The time of the prompts is left out: plain gets a copy of a cache that was filled once and counts from its first
    token on, ours count from the end of the last forward that held a prompt.
    """
    console.print(
        f"[bold]{loaded.name}[/], {loaded.model.dtype} on {loaded.model.device.type}; batch {workload.batch} x "
        f"{workload.context} tokens (one shared prompt), {workload.new_tokens} new tokens each, "
        f"{'sampled' if workload.sample else 'greedy'}; {machine_load()} at the start"
    )
    result = Result()
    runs = list(_runs(loaded, workload))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading the prompt for plain", total=len(runs))
        for way, run in runs:
            progress.update(task, description=way)
            result.runs[way].append(run())
            progress.advance(task)
    console.print(_table(result))
    console.print(
        f"Draft rows: {result.draft_share:.1%} of the rows of aspire, which schedules by the step costs that it "
        f"measures; {result.acceptance:.1%} of its drafts were accepted. {machine_load()} at the end."
    )
    return result


def _runs(loaded: LoadedModel, workload: Workload) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Every run to make, in turns, so that a change of the machine's speed meets all ways."""
    model, device = loaded.model, loaded.model.device
    prompt = loaded.tokenizer(long_text(), return_tensors="pt")["input_ids"]
    if prompt.shape[1] < workload.context:
        raise ValueError(f"context: got {workload.context}, expected at most {prompt.shape[1]}")
    ids = prompt[:, : workload.context].expand(workload.batch, -1).contiguous().to(device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options: dict[str, Any] = {"do_sample": workload.sample, "min_new_tokens": workload.new_tokens}
    if workload.sample:
        options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    cache = _filled_cache(model, ids)

    def plain() -> Run:
        return run_plain(model, {**inputs, CACHE_NAME: copy.deepcopy(cache)}, workload.new_tokens, **options)

    def ours(schedule: str) -> Callable[[], Run]:
        return lambda: run_aspire(model, inputs, workload.new_tokens, AspireConfig(schedule=schedule), **options)

    for _ in range(workload.repetitions):
        yield "plain", plain
        yield "autoregressive", ours("autoregressive")
        yield "aspire", ours("aspire")


def _filled_cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    """The cache of all but the last token of the prompt, computed once and repeated for every row."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[:1, :-1], use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    cache.batch_repeat_interleave(ids.shape[0])
    return cache


def _table(result: Result) -> Table:
    table = Table(title="Decode tokens/s, all rows together", title_justify="left")
    for name in ("", "median", "lowest - highest", "against plain", "forwards per token"):
        table.add_column(name, justify="right" if name else "left")
    for way in WAYS:
        low, high = result.spread(way)
        table.add_row(
            way,
            f"{result.rate(way):.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{result.rate(way) / result.rate('plain'):.2f} x",
            f"{result.runs[way][0].forwards_per_token:.3f}",
        )
    return table
