"""Tokens per second of whole calls: plain generate, our autoregressive schedule, fixed drafts and aspire.

    python benchmarks/bench_generate.py --shape llama-3.1-8b --context 32768 --batch fit --output results/generate.json
    python benchmarks/bench_generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --context 7168 --batch 64

A shape has random weights, so a draft's acceptance means nothing: it is *replayed* from the profiles named in the
table, and contexts are random keys and values (prompts are not read). A model reads stretches of a real text, which
overlap where it is short, and samples at temperature 0.8; its acceptance is its own. Of several equal calls the last
one counts: the first compiles, and mixtures of rows are captured as graphs when they come again.
The host's milliseconds are what planning and packing a step takes, in the median of that call.
Tokens per second are those behind the prompts until the first row ends: short benchmarks would otherwise measure how
unevenly rows of a batch end.

The ideal is what the best draft length would give if every step cost what a least-squares fit of all measured steps
says: seconds = a + b query tokens + c KV tokens read. With g drafts per round, one of g + 1 rows verifies in a step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import triton
import typer
from host_clock import host_clock, host_times
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, kv_bytes, prompts, random_model
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import hf_aspire
from hf_aspire import AspireConfig, AspireStats
from hf_aspire.capacity import free_memory
from hf_aspire.commands.documents import long_text
from hf_aspire.commands.models import LoadedModel, load_model
from hf_aspire.request import RowKind
from hf_aspire.testing import random_context, replay_acceptance

MOST = 15
OWN = "its own"
"""What a real model's acceptance is called."""
PROFILES = {
    ".975": [0.975] * MOST,
    ".95 to .85": np.linspace(0.95, 0.85, MOST + 1).tolist(),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "fixed 8": {"schedule": "fixed", "draft_length": 8},
    "aspire": {"schedule": "aspire"},
}
COMMON: dict[str, Any] = {"compile": True, "cuda_graphs": True, "max_draft": MOST, "seed": 0}


@dataclass(frozen=True)
class Measured:
    """A call.

    Attributes:
        rate: Tokens per second until the first row ends.
        call_rate: Tokens per second behind the prompts.
        drafts: Mean drafts of a round that holds any.
        kept: Share of them that was accepted.
        steps: (query tokens, KV tokens read, seconds) of its steps without prompts.
        calls: `call_rate` of this call and those before it, the first one first.
        slow: Likewise, how many steps took more than three times the median, and their seconds beyond it: captures of
            graphs, and pauses of the machine.
        planning: Seconds of the host to plan and pack its steps.
    """

    rate: float
    call_rate: float
    drafts: float
    kept: float
    steps: list[tuple[int, float, float]]
    calls: list[float]
    slow: list[tuple[int, float]]
    planning: list[float]

    def entry(self, what: str) -> dict[str, Any]:
        """What is written down of it."""
        return {
            "what": what,
            "tokens_per_second": self.rate,
            "tokens_per_second_of_the_call": self.call_rate,
            "of_all_calls": self.calls,
            "slow_steps_of_all_calls": self.slow,
            "mean_drafts": self.drafts,
            "kept": self.kept,
            **host_times(self.planning),
        }


@dataclass(frozen=True)
class Case:
    """What is generated.

    Attributes:
        model: The model.
        ids: `[batch, context]`.
        sampling: How plain and ours choose tokens.
        replayed: Whether contexts are random and acceptance is replayed.
        calls: Equal calls of ours, of which the last counts.
    """

    model: PreTrainedModel
    ids: torch.Tensor
    sampling: dict[str, Any]
    replayed: bool
    calls: int = 3

    @classmethod
    def of_shape(cls, model: PreTrainedModel, batch: int, context: int) -> Case:
        """Random tokens for random weights."""
        return cls(model, prompts(batch, context, model.config.vocab_size), {"do_sample": False}, True)

    @classmethod
    def of_text(cls, loaded: LoadedModel, batch: int, context: int) -> Case:
        """Evenly spaced stretches of a real text."""
        ids = torch.tensor(loaded.tokenizer(long_text(), verbose=False)["input_ids"])
        if len(ids) < context:
            raise typer.BadParameter(f"got {context}, expected at most the text's {len(ids)}", param_hint="--context")
        starts = np.linspace(0, len(ids) - context, batch).astype(int)
        rows = torch.stack([ids[start : start + context] for start in starts]).to(loaded.model.device)
        return cls(loaded.model, rows, {"do_sample": True, "temperature": 0.8, "top_k": 0}, False)

    def generate(self, new: int, profile: list[float], fields: dict[str, Any]) -> Any:
        """The statistics of one of our calls."""
        collected: list[Any] = []
        config = AspireConfig(on_stats=collected.append, **COMMON, **fields)
        with ExitStack() as stack:
            if self.replayed:
                stack.enter_context(random_context())
                stack.enter_context(replay_acceptance(profile))
            hf_aspire.generate(self.model, self.ids, max_new_tokens=new, aspire_config=config, **self.sampling)
        return collected[0]


def ours(case: Case, new: int, profile: list[float], fields: dict[str, Any]) -> Measured:
    """The last of equal calls."""
    every = []
    for _ in range(case.calls):
        with host_clock() as planning:
            every.append(case.generate(new, profile, fields))
    stats = every[-1]
    ids, config = case.ids, AspireConfig(**COMMON)
    length, steps = ids.shape[1], []
    committed, seconds, left = 0, 0.0, dict.fromkeys(range(len(ids)), new)
    for step in stats.timeline:
        kinds = [row.kind for row in step.rows]
        if RowKind.PREFILL not in kinds:
            drafts = kinds.count(RowKind.DRAFT)
            read = (len(kinds) - drafts) * length + drafts * config.budget(length)
            steps.append((sum(row.queries for row in step.rows), float(read), step.end - step.start))
            if min(left.values()) > 0:
                seconds += step.end - step.start
                committed += sum(row.committed for row in step.rows)
        for row in step.rows:
            left[row.request] -= row.committed
    rounds = [counts for row in stats.rounds for counts in row if counts[0]]
    drafted, accepted = np.array(rounds or [(0, 0)]).T
    return Measured(
        committed / seconds,
        stats.decode_tokens_per_second,
        float(drafted.mean()),
        float(accepted.sum() / max(1, drafted.sum())),
        steps,
        [each.decode_tokens_per_second for each in every],
        [slow_steps(each) for each in every],
        planning,
    )


def slow_steps(stats: AspireStats) -> tuple[int, float]:
    """Steps without prompts that took more than three times the median, and their seconds beyond it."""
    steps = [step for step in stats.timeline if all(row.kind is not RowKind.PREFILL for row in step.rows)]
    times = np.array([step.end - step.start for step in steps])
    beyond = times[times > 3 * np.median(times)] - np.median(times)
    return len(beyond), float(beyond.sum())


class Clock(StoppingCriteria):
    """Never stops; notes when each step has ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        """See `StoppingCriteria`."""
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def plain(case: Case, new: int) -> float:
    """Tokens per second of plain generate, from its median step; over a random cache where prompts are not read."""
    model, ids, clock, context = case.model, case.ids, Clock(), dict[str, Any]()
    if case.replayed:
        config = model.config
        cache = context["past_key_values"] = DynamicCache(config=config)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (len(ids), config.num_key_value_heads, ids.shape[1] - 1, size)
        for layer in range(config.num_hidden_layers):
            states = (torch.randn(shape, dtype=model.dtype, device="cuda") for _ in range(2))
            cache.update(*states, layer)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        stopping_criteria=StoppingCriteriaList([clock]),
        **case.sampling,
        **context,
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


def compare(
    case: Case, new: int, profiles: list[str], schedules: list[str], plain_tokens: int
) -> list[dict[str, Any]]:
    """Every way to generate a case; the first of ours is plain decoding."""
    results: list[dict[str, Any]] = []
    if plain_tokens:
        results.append({"what": "plain generate", "tokens_per_second": plain(case, plain_tokens)})
        torch.cuda.empty_cache()
    base = ours(case, new // 2, [1.0], {"schedule": "autoregressive"})
    results.append(base.entry("autoregressive"))
    batch, length = case.ids.shape
    for name in profiles if case.replayed else [OWN]:
        profile = PROFILES[name] if case.replayed else []
        measured = {schedule: ours(case, new, profile, SCHEDULES[schedule]) for schedule in schedules}
        bound: dict[str, Any] = {}
        if case.replayed:
            steps = [step for run in (base, *measured.values()) for step in run.steps]
            ideal, drafts = ideal_rate(steps, batch, length, AspireConfig().budget(length), profile)
            bound = {"ideal": ideal, "ideal_drafts": drafts}
        results += [run.entry(f"{schedule}, {name}") | bound for schedule, run in measured.items()]
    return results


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses names that an option does not know, before any work."""
    if unknown := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"got {', '.join(unknown)}; expected {', '.join(known)}", param_hint=option)


def table_of(results: list[dict[str, Any]], title: str) -> Table:
    """The results against our plain decoding."""
    base = next(entry["tokens_per_second"] for entry in results if entry["what"] == "autoregressive")
    heads = ("schedule", "tokens/s", "x autoregressive", "drafts", "kept", "host ms", "ideal x", "at", "of ideal")
    table = Table(*heads, title=title)
    for entry in results:
        rate = entry["tokens_per_second"]
        cells = [entry["what"], f"{rate:.0f}", f"{rate / base:.2f}"]
        cells += [f"{entry['mean_drafts']:.1f}", f"{entry['kept']:.0%}"] if entry.get("mean_drafts") else ["", ""]
        cells.append(f"{entry['host_milliseconds']:.2f}" if "host_milliseconds" in entry else "")
        if "ideal" in entry:
            cells += [f"{entry['ideal'] / base:.2f}", str(entry["ideal_drafts"]), f"{rate / entry['ideal']:.0%}"]
        table.add_row(*cells)
    return table


def main(
    shape: str = "llama-3.1-8b",
    model: Annotated[
        str | None, typer.Option(help="Hub name or directory of a real model, instead of a shape.")
    ] = None,
    gguf: Annotated[str | None, typer.Option(help="GGUF file within --model.")] = None,
    context: Annotated[list[int], typer.Option(help="Prompt tokens; repeat it.")] = [32768],  # noqa: B006
    batch: Annotated[str, typer.Option(help="A number, or 'fit': as many as memory holds.")] = "fit",
    new: int = 256,
    schedule: Annotated[list[str], typer.Option(help="Of ours, beside plain decoding; repeat it.")] = [*SCHEDULES],  # noqa: B006
    profiles: Annotated[str, typer.Option(help="Profiles, separated by commas; '' for none.")] = ",".join(PROFILES),
    plain_tokens: Annotated[int, typer.Option(help="New tokens of plain generate; 0 leaves it out.")] = 0,
    calls: Annotated[int, typer.Option(min=1, help="Equal calls, of which the last counts.")] = 3,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measures one model at every context."""
    names = [name for name in profiles.split(",") if name]
    check_names("--profiles", names, PROFILES)
    check_names("--schedule", schedule, SCHEDULES)
    check_names("--shape", [shape], SHAPES)
    torch.manual_seed(0)
    loaded = load_model(model, gguf, "cuda", "bfloat16") if model or gguf else None
    network = loaded.model if loaded else random_model(shape)
    network.generation_config.eos_token_id = None
    name, cases = loaded.name if loaded else shape, []
    for length in context:
        room = 0.88 * free_memory(torch.device("cuda"))
        rows = int(room / (kv_bytes(network) * (length + new + 32))) if batch == "fit" else int(batch)
        case = Case.of_text(loaded, rows, length) if loaded else Case.of_shape(network, rows, length)
        results = compare(replace(case, calls=calls), new, names, schedule, plain_tokens)
        Console(width=110).print(table_of(results, f"{name}, {rows} x {length}"))
        cases.append({"batch": rows, "context": length, "results": results})
        hf_aspire.release(network)
    if output is not None:
        versions = {m.__name__: m.__version__ for m in (torch, triton, transformers)}
        record = {"device": torch.cuda.get_device_name(), "versions": versions, "sparsity": 0.07, "policy": "verify"}
        record |= {"model": name, "new_tokens": new, "acceptance": "the model's" if loaded else "replayed"}
        output.write_text(json.dumps({**record, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
