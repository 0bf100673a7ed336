"""The scheduling loop closed by simulated acceptance: no model, only counts and step times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_aspire import scheduler
from hf_aspire.config import AspireConfig
from hf_aspire.cost_model import CostModel, StepCost
from hf_aspire.request import RowKind
from hf_aspire.scheduler import Candidate, RoundCosts, Schedule, make_schedule

DRAFT, VERIFY, DECODE = RowKind.DRAFT, RowKind.VERIFY, RowKind.DECODE
# 8B parameters in bf16 at 4 TB/s, and 128 KiB of KV per token
GPU = (4e-3, 5e-6, 3e-8)


def candidate(
    request: int = 0, drafted: int = 0, limit: int = 15, rounds: int = 1, context: int = 30_000
) -> Candidate:
    return Candidate(request, drafted, limit, rounds, context, 0.07 * context)


def make(schedule: str, cost: tuple[float, float, float] = GPU, **options: object) -> Schedule:
    config = AspireConfig.of({"schedule": schedule, "cost": cost, **options})
    return make_schedule(config, CostModel(StepCost(*cost), fixed=True))


def best_draft_length(
    alpha: float, batch: int, context: float, sparse_context: float, max_draft: int, cost: CostModel
) -> int:
    return scheduler.best_draft_length(alpha, context, sparse_context, RoundCosts(cost, batch, max_draft))


def rate(length: int, alpha: float, batch: int, context: float, sparse: float, cost: CostModel) -> float:
    """Expected tokens per second and request, written out term by term."""
    tokens = sum(alpha**depth for depth in range(length + 1))
    return tokens / (
        length * cost.seconds(batch, batch * sparse) + cost.seconds(batch * (length + 1), batch * context)
    )


def at_known_acceptance(alpha: float, batch: int, context: int, cost: CostModel) -> float:
    length = best_draft_length(alpha, batch, context, 0.07 * context, 15, cost)
    return batch * rate(length, alpha, batch, context, 0.07 * context, cost)


@dataclass
class Run:
    """What a simulated batch did: rows per step, and its speed."""

    kinds: list[list[RowKind | None]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def draft_share(self, first: int, last: int) -> float:
        rows = [kind for step in self.kinds[first:last] for kind in step if kind is not None]
        return rows.count(DRAFT) / len(rows)


def simulate(
    schedule: Schedule,
    alphas: Callable[[int], Sequence[float]],
    steps: int,
    cost: CostModel,
    context: int = 30_000,
    limit: int = 15,
    fit: CostModel | None = None,
    full_rows: float = 0.0,
    speculating: float = 0.0,
) -> Run:
    """Runs a batch whose request i at step t has its drafts accepted with probability `alphas(t)[i]`.

    `cost` is what steps take, `full_rows` what those take longer that hold any full row, `speculating` what all take
    longer that are not of plain decoding; `fit`, if given, is shown every step with 5 % noise.
    """
    rng = random.Random(0)
    batch = len(alphas(0))
    drafted, rounds = [0] * batch, [0] * batch
    run = Run()
    for step in range(steps):
        kinds = schedule.decide([candidate(i, drafted[i], limit, rounds[i], context) for i in range(batch)])
        tokens, read = 0, 0.0
        for i, kind in enumerate(kinds):
            if kind is DRAFT:
                drafted[i] += 1
                tokens, read = tokens + 1, read + 0.07 * context
            elif kind is not None:
                accepted = 0
                while accepted < drafted[i] and rng.random() < alphas(step)[i]:
                    accepted += 1
                schedule.observe(i, drafted[i], accepted)
                tokens, read = tokens + drafted[i] + 1, read + context
                run.tokens += accepted + 1
                rounds[i] += drafted[i] > 0
                drafted[i] = 0
        run.kinds.append(kinds)
        plain = all(kind is DECODE for kind in kinds)
        seconds = cost.seconds(tokens, read) + full_rows * any(kind in (VERIFY, DECODE) for kind in kinds)
        seconds += 0 if plain else speculating
        run.seconds += seconds
        if fit is not None:
            fit.observe(tokens, read, seconds * math.exp(rng.gauss(0, 0.05)), plain)
    return run
