"""A stated cost profile for the demo, and what it predicts for a run. A prediction is not a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import AspireConfig
from ..request import RowKind
from ..stats import AspireStats


@dataclass(frozen=True)
class Reads:
    """What one step after the prompts put through the model: query tokens, and KV tokens that its rows read."""

    queries: int
    kv_tokens: float


@dataclass(frozen=True)
class CostProfile:
    """A roofline: weights are read once per step, keys and values once per row, products run at peak speed.

    Attributes:
        model: What the figures describe.
        device: Likewise.
        bytes_per_second: Memory bandwidth.
        flops_per_second: Of matrix products.
        parameters: Weights, two bytes each.
        kv_bytes: Keys and values of one token, over all layers.
        requests: Requests that each request of the batch stands for.
        stretch: Tokens of context that each token of context stands for.
    """

    model: str
    device: str
    bytes_per_second: float
    flops_per_second: float
    parameters: float
    kv_bytes: float
    requests: int
    stretch: int

    @property
    def cost(self) -> tuple[float, float, float]:
        """Seconds per step, per query token and per KV token: `AspireConfig.cost`."""
        return (
            2 * self.parameters / self.bytes_per_second,
            self.requests * 2 * self.parameters / self.flops_per_second,
            self.requests * self.stretch * self.kv_bytes / self.bytes_per_second,
        )

    def seconds(self, step: Reads) -> float:
        """What a step would take."""
        base, per_token, per_kv_token = self.cost
        return base + per_token * step.queries + per_kv_token * step.kv_tokens

    def describe(self) -> str:
        """One line for people."""
        base, per_token, per_kv_token = self.cost
        return (
            f"{self.model} on {self.device}, each request standing for {self.requests} with {self.stretch} times the "
            f"context: {base * 1e3:.1f} ms per step for the weights, {per_token * 1e3:.2f} ms per query token, "
            f"{per_kv_token * 1e6:.1f} us per KV token"
        )


# Data-sheet figures of the device; layers x (keys + values) x KV heads x head size x 2 bytes of the model.
LARGE_MODEL = CostProfile(
    model="an 8B model in bf16",
    device="an H200 (4.8 TB/s, 989 TFLOP/s)",
    bytes_per_second=4.8e12,
    flops_per_second=989e12,
    parameters=8e9,
    kv_bytes=32 * 2 * 8 * 128 * 2,
    requests=6,
    stretch=16,
)


def reads(stats: AspireStats) -> Iterator[Reads]:
    """The reads of every step that held no prompt, worked out from the timeline.

    Only for context policies without a refresh layer (`"verify"`, `"window"`): a draft row reads the budget of the
    length that its list was made at, and everything that came after.
    """
    config = stats.config
    length = list(stats.prompt_tokens)  # in the cache for good
    scored = list(stats.prompt_tokens)  # when the request's list was made
    drafts = [0] * len(length)
    for step in stats.timeline:
        kv_tokens = 0.0
        for row in step.rows:
            i = row.request
            if row.kind is RowKind.PREFILL:
                continue
            if row.kind is RowKind.DRAFT:
                drafts[i] += 1
                kv_tokens += _listed(config, scored[i], length[i] + drafts[i])
                continue
            kv_tokens += length[i] + row.queries
            scored[i], drafts[i] = length[i] + 1, 0
            length[i] += row.committed
        if not any(row.kind is RowKind.PREFILL for row in step.rows):
            yield Reads(sum(row.queries for row in step.rows), kv_tokens)


def _listed(config: AspireConfig, scored: int, context: int) -> int:
    return min(context, config.budget(scored) + context - scored)
