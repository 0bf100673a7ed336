"""Schedules in a closed loop of counts and step times: no model and no device, so in two minutes on any CPU.

    python benchmarks/bench_schedules.py --output results/schedules.json

A step takes what a fit of steps traced on one H200 says (bf16, compiled, CUDA graphs, 2026-11-29), T its query tokens
and KV the tokens that its rows read: base + per_token T + per_kv_token KV, and where rows are scored, which verify,
`scoring` and `per_row` for each. `aspire` does not know these: its cost model starts from the roofline and is fitted
to the steps as they come, with 5 % noise, and it hears of acceptance one step late, as in `pipeline.py` where planning
takes less time than a step. No text ends, and no step is slow because its shape is new. Rates are those of the last
two thirds of a run.

Against `aspire` stand the best of a few lengths in lockstep, plain decoding among them, which nobody knows beforehand,
`aspire` with every row for itself, and `aspire` without its guard, where that is a tenth faster than plain decoding.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table

from hf_aspire import scheduler
from hf_aspire.config import AspireConfig
from hf_aspire.cost_model import CostModel, StepCost
from hf_aspire.guard import Guard
from hf_aspire.request import RowKind
from hf_aspire.roofline import LAUNCHING_PER_LAYER
from hf_aspire.scheduler import Candidate, Schedule, make_schedule

STEPS, SEEDS, MOST = 700, 3, 15
LENGTHS = (0, 2, 3, 4, 6, 8, 12, MOST)
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.18e12, 6.3e14  # copies and large products, as measured on an H200


@dataclass(frozen=True)
class Machine:
    """A batch on a device, and what its steps take."""

    batch: int
    context: int
    listed: int
    parameters: float
    kv_bytes: int
    layers: int
    base: float
    per_token: float
    per_kv_token: float
    scoring: float
    per_row: float

    def seconds(self, tokens: int, read: float, scored: int) -> float:
        extra = self.scoring + self.per_row * scored if scored else 0.0
        return self.base + self.per_token * tokens + self.per_kv_token * read + extra

    @property
    def prior(self) -> StepCost:
        """As `roofline.prior_cost` makes it."""
        launching = self.layers * LAUNCHING_PER_LAYER
        return StepCost(
            base=launching + 2 * self.parameters / BYTES_PER_SECOND,
            per_token=2 * self.parameters / FLOPS_PER_SECOND,
            per_kv_token=self.kv_bytes / BYTES_PER_SECOND,
            launching=launching,
        )


SMALL = (135e6, 23_040, 30, 1.31e-3, 3.8e-6, 5.44e-9, 5.5e-4, 0.0)
LARGE = (8e9, 131_072, 32, 5.23e-3, 1.17e-5, 2.88e-8, 1.67e-4, 2.65e-4)
MIDDLE = (1.7e9, 114_688, 28, 2.61e-3, 4.24e-6, 2.5e-8, 3.76e-4, 1.11e-4)
MACHINES = {
    "SmolLM2-135M, 64 x 7k": Machine(64, 7168, 512, *SMALL),
    "SmolLM2-135M, 16 x 7k": Machine(16, 7168, 512, *SMALL),
    "8B, 27 x 32k": Machine(27, 32768, 2304, *LARGE),
    "8B, 8 x 32k": Machine(8, 32768, 2304, *LARGE),
    "1.7B, 33 x 32k": Machine(33, 32768, 2304, *MIDDLE),
}

Text = Callable[[int], float]
"""Probability that a draft is accepted, by its depth."""


def differing(mean: float, deviation: float, fall: float = 0.0) -> Callable[[random.Random], Text]:
    """Rows whose acceptance is a draw from a beta distribution, falling by a share of itself per depth."""
    size = mean * (1 - mean) / deviation**2 - 1

    def draw(rng: random.Random) -> Text:
        first = rng.betavariate(mean * size, (1 - mean) * size)
        return lambda depth: first * (1 - fall * depth)

    return draw


def alike(first: float, last: float) -> Callable[[random.Random], Text]:
    return lambda rng: lambda depth: first + (last - first) * depth / MOST


TEXTS = {
    ".975": alike(0.975, 0.975),
    ".95 to .85": alike(0.95, 0.85),
    ".945 +- .04": differing(0.945, 0.04),
    ".9 +- .06": differing(0.9, 0.06),
    ".8 +- .1": differing(0.8, 0.1),
    ".96 +- .03, falling 1 %": differing(0.96, 0.03, 0.01),
    ".9 +- .06, falling 1 %": differing(0.9, 0.06, 0.01),
    ".95 +- .05, falling 2 %": differing(0.95, 0.05, 0.02),
    ".8 +- .1, falling 2 %": differing(0.8, 0.1, 0.02),
}


def rate(
    schedule: Schedule, fit: CostModel, machine: Machine, draw: Callable[[random.Random], Text], seed: int
) -> float:
    """Tokens per second of one run."""
    rng = random.Random(seed)
    rows = range(machine.batch)
    texts = [draw(rng) for _ in rows]
    drafted, rounds = [0 for _ in rows], [0 for _ in rows]
    tokens, seconds, late = 0, 0.0, list[tuple[int, int, int]]()
    for step in range(STEPS):
        if step == STEPS // 3:
            tokens, seconds = 0, 0.0
        known = [Candidate(i, drafted[i], MOST, rounds[i], machine.context, machine.listed) for i in rows]
        kinds = schedule.decide(known)
        outcomes: list[tuple[int, int, int]] = []
        queries = read = 0
        for i, kind in enumerate(kinds):
            if kind is RowKind.DRAFT:
                drafted[i], queries, read = drafted[i] + 1, queries + 1, read + machine.listed
            elif kind is not None:
                accepted = next((k for k in range(drafted[i]) if rng.random() >= texts[i](k)), drafted[i])
                outcomes.append((i, drafted[i], accepted))
                queries, read, tokens = queries + drafted[i] + 1, read + machine.context, tokens + accepted + 1
                rounds[i] += drafted[i] > 0
                drafted[i] = 0
        plain = all(kind is RowKind.DECODE for kind in kinds)
        taken = machine.seconds(queries, read, 0 if plain else len(outcomes))
        seconds += taken
        for outcome in late:
            schedule.observe(*outcome)
        fit.observe(queries, read, taken * math.exp(rng.gauss(0, 0.05)), plain)
        late = outcomes
    return tokens / seconds


def lockstep(length: int) -> AspireConfig:
    """Every row drafts as often, and then all verify; 0: plain decoding."""
    if length == 0:
        return AspireConfig(schedule="autoregressive")
    return AspireConfig(schedule="fixed", draft_length=length, max_draft=MOST)


def mean_rate(config: AspireConfig, machine: Machine, draw: Callable[[random.Random], Text]) -> float:
    """Of several runs, each with a cost model of its own."""
    fits = [CostModel(machine.prior) for _ in range(SEEDS)]
    return statistics.mean(rate(make_schedule(config, fit), fit, machine, draw, i) for i, fit in enumerate(fits))


def main(output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None) -> None:
    """Runs every machine on every kind of text."""
    table = Table("machine", "acceptance", "aspire tokens/s", "of the best length", "length", "of each row for itself")
    results = []
    for name, machine in MACHINES.items():
        for text, draw in TEXTS.items():
            fixed = {length: mean_rate(lockstep(length), machine, draw) for length in LENGTHS}
            best = max(fixed, key=fixed.__getitem__)
            aspire = mean_rate(AspireConfig(max_draft=MOST), machine, draw)
            with patch.object(scheduler, "COMPANY", 1 << 30):
                alone = mean_rate(AspireConfig(max_draft=MOST), machine, draw)
            with patch.object(Guard, "holds", lambda self, batch, context: False):
                unguarded = mean_rate(AspireConfig(max_draft=MOST), machine, draw)
            found = {"aspire": aspire, "alone": alone, "unguarded": unguarded, "fixed": fixed, "best_length": best}
            results.append({"machine": name, "acceptance": text, "tokens_per_second": found})
            table.add_row(
                name, text, f"{aspire:,.0f}", f"{aspire / fixed[best]:.1%}", str(best), f"{aspire / alone:.1%}"
            )
    Console(width=130).print(table)
    rates = [result["tokens_per_second"] for result in results]
    for what, shares in (
        ("the best length", [each["aspire"] / each["fixed"][each["best_length"]] for each in rates]),
        ("each row for itself", [each["aspire"] / each["alone"] for each in rates]),
        (
            "no guard",
            [each["aspire"] / each["unguarded"] for each in rates if each["unguarded"] > 1.1 * each["fixed"][0]],
        ),
    ):
        spread = f"mean {statistics.mean(shares):.1%}, {min(shares):.1%} to {max(shares):.1%}"
        print(f"of {what}, {len(shares)} mixtures: {spread}")
    if output is not None:
        output.write_text(json.dumps({"steps": STEPS, "seeds": SEEDS, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
