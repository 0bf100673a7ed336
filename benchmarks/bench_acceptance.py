"""Paired comparison of what drafts read: context policies, granularities and budgets on a real model and real texts.

    python benchmarks/bench_acceptance.py

Expected acceptance is sum(min(p, q)): p under full attention, q under the sparse context, for the same continuation
whatever the variant. The result decides `context="auto"` and the default granularity; see docs/acceptance.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from acceptance_measure import Bench, prepared
from acceptance_report import draw, read_csv, rows, table, text_table, write_csv
from acceptance_texts import texts
from acceptance_variants import FULL, POLICIES, Measured, Setting, Variant, grid

import hf_aspire
from hf_aspire.commands.models import LoadedModel, load_model

RESULTS = Path(__file__).resolve().parent / "results"
CONTROL = 1 - 1e-4
"""Least acceptance under full context: what rounding may take from 1."""


_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)}
"""For glibc in the processes: keep freed memory. Else every gathered list is paged in anew, half of the time spent."""


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


class Continuation(StrEnum):
    """Where the forced tokens come from."""

    model = "model"
    text = "text"


@dataclass(frozen=True)
class Job:
    """One text to measure, for a process of its own."""

    name: str
    text: str
    model: str | None
    gguf: str | None
    threads: int
    tokens: int
    first: int
    positions: int
    variants: tuple[Variant, ...]
    setting: Setting


@dataclass(frozen=True)
class Outcome:
    """What a job found; `digest` is that of the text's tokens."""

    name: str
    model: str
    digest: str
    seconds: float
    measured: dict[Variant, Measured]


@functools.lru_cache(maxsize=1)
def _loaded(model: str | None, gguf: str | None) -> LoadedModel:
    return load_model(model, gguf, device="cpu", dtype="float32")


def measure_text(job: Job) -> Outcome:
    """Runs a job.

    Raises:
        ValueError: The text is too short.
        AssertionError: Drafting with the full context is not what the target does.
    """
    torch.set_num_threads(job.threads)
    started = time.perf_counter()
    loaded = _loaded(job.model, job.gguf)
    ids = loaded.tokenizer(job.text, verbose=False)["input_ids"][: job.tokens]
    if len(ids) < job.tokens:
        raise ValueError(f"text {job.name}: got {len(ids)} tokens, expected {job.tokens}; lower --tokens")
    text = torch.tensor(ids)
    positions = np.linspace(job.first, job.tokens - job.setting.span, job.positions).astype(int).tolist()
    with prepared(loaded.model, job.tokens) as facts:
        measured = Bench(loaded.model, facts, job.variants, job.tokens, job.setting).measure(text, positions)
    for variant, found in measured.items():
        least = float(found.acceptance.min())
        if variant.policy == FULL and least < CONTROL:
            raise AssertionError(f"text {job.name}: full context gives {least:.6f}, expected at least {CONTROL}")
    digest = hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()
    return Outcome(job.name, loaded.name, digest, time.perf_counter() - started, measured)


def run(jobs: Iterable[Job], processes: int) -> Iterator[Outcome]:
    """Runs jobs, in order; with one process in this one."""
    if processes == 1:
        yield from map(measure_text, jobs)
        return
    os.environ.update({name: value for name, value in _ALLOCATOR.items() if name not in os.environ})
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(measure_text, jobs)


def sidecar(outcomes: list[Outcome], job: Job, processes: int, seconds: float) -> dict[str, Any]:
    """What is needed to judge and repeat a run."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "model": outcomes[0].model,
        "dtype": "float32",
        "continuation": Continuation.model if job.setting.model_text else Continuation.text,
        "setting": dataclasses.asdict(job.setting),
        "tokens_per_text": job.tokens,
        "first_position": job.first,
        "positions_per_text": job.positions,
        "texts": {outcome.name: {"sha256_of_tokens": outcome.digest} for outcome in outcomes},
        "least_control_acceptance": min(
            float(m.acceptance.min()) for o in outcomes for v, m in o.measured.items() if v.policy == FULL
        ),
        "processes": processes,
        "threads_per_process": job.threads,
        "seconds": round(seconds),
        "machine": {
            "class": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            "hf_aspire": hf_aspire.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    }


@app.command()
def main(
    model: Annotated[str | None, typer.Option(help="Hub name or directory; default: the packaged SmolLM2.")] = None,
    gguf: Annotated[str | None, typer.Option(help="GGUF file: a path, or a file name within --model.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Name of a text; repeat it. Default: all.")] = None,
    continuation: Annotated[Continuation, typer.Option(help="Drawn from the model, or the text's own.")] = (
        Continuation.model
    ),
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of every text.")] = 6144,
    first: Annotated[int | None, typer.Option(help="First position; default: after two thirds.")] = None,
    positions: Annotated[int, typer.Option(min=2, help="Positions per text.")] = 40,
    budget: Annotated[list[int], typer.Option(help="In tokens; repeat it.")] = [256, 512, 1024],  # noqa: B006
    granularity: Annotated[list[int], typer.Option(help="In tokens; repeat it; 1 is always there.")] = [1, 4, 16],  # noqa: B006
    verify_budget: Annotated[
        list[int], typer.Option(help="Further budgets of `verify` 1: what the others read with their refresh layer.")
    ] = [416, 672, 1152],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="Policies beside `verify` 1; repeat it.")] = [*POLICIES],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of the drawn continuations.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Texts measured at once.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Of each process.")] = 1,
    output: Annotated[Path, typer.Option(help="CSV; .json and .png go beside it.")] = RESULTS / "acceptance.csv",
    report_only: Annotated[bool, typer.Option("--report-only", help="Draw and print what --output holds.")] = False,
) -> None:
    """Measures every context policy, granularity and budget on real texts; writes CSV, JSON and PNG."""
    if not report_only:
        known = texts()
        if unknown := sorted(set(text or ()) - known.keys()):
            raise typer.BadParameter(f"got {', '.join(unknown)}, expected {', '.join(known)}", param_hint="--text")
        if strange := sorted(set(policy) - set(POLICIES)):
            raise typer.BadParameter(
                f"got {', '.join(strange)}, expected {', '.join(POLICIES)}", param_hint="--policy"
            )
        setting = Setting(model_text=continuation is Continuation.model, seed=seed)
        variants = tuple(grid(sorted(set(budget)), sorted({1, *granularity}), sorted(set(verify_budget)), policy))
        start = first if first is not None else tokens * 2 // 3
        jobs = [
            Job(name, words, model, gguf, threads, tokens, start, positions, variants, setting)
            for name, words in known.items()
            if not text or name in text
        ]
        started = time.perf_counter()
        outcomes = []
        for outcome in run(jobs, processes):
            print(f"{outcome.name}: {outcome.seconds:.0f} s", flush=True)
            outcomes.append(outcome)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_csv(output, rows({outcome.name: outcome.measured for outcome in outcomes}))
        facts = sidecar(outcomes, jobs[0], processes, time.perf_counter() - started)
        output.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    report(output)


def report(output: Path) -> None:
    """Prints the tables of a CSV file and draws its picture."""
    found = read_csv(output)
    facts = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))
    budgets = sorted({row["budget"] for row in found if row["policy"] not in ("verify", FULL)})
    middle = budgets[len(budgets) // 2]
    title = (
        f"{facts['model']}, {facts['dtype']}, {len(facts['texts'])} texts x {facts['positions_per_text']} positions, "
        f"temperature {facts['setting']['temperature']}, continuation of the {facts['continuation']}"
    )
    print(f"\n{table(found)}\n\nacceptance (expected tokens), budget {middle}:\n\n{text_table(found, middle)}")
    draw(output.with_suffix(".png"), found, title, middle)


if __name__ == "__main__":
    app()
