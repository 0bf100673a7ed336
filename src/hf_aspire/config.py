"""The one configuration object. Every field is validated where it is made, before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CONTEXTS = ("auto", "refresh", "verify", "hybrid", "window")
SCHEDULES = ("aspire", "fsm", "fixed", "staggered", "autoregressive")
SAMPLINGS = ("coupled", "rejection")
BACKENDS = ("auto", "triton", "torch")
SWITCHES = ("auto", True, False)


@dataclass(frozen=True, kw_only=True)
class AspireConfig:
    """How `generate(..., assistant="aspire")` drafts, schedules and samples.

    No field changes which tokens greedy decoding returns; `sampling` and `seed` choose how random numbers are used.

    Args:
        page_size: Tokens per KV page.
        sparsity: Share of a request's pages that a draft step reads, in (0, 1]; 1.0 is the full context.
        min_pages: Floor of that budget, in pages.
        recent_pages: Newest pages, always read, inside the budget; at most `min_pages`.
        context: What a draft step reads: `"refresh"` (one late layer's scores, shared by all layers, renewed every
            draft step; ASPIRE section 3), `"verify"` (every layer's own scores from the last verification),
            `"hybrid"` (both), `"window"` (first page and the newest ones) or `"auto"` (the best we measured).
        granularity: Tokens per selected unit, 1 to `page_size`, or `"auto"`.
        refresh_layer: Layer that runs full attention while drafting; negative counts from the last.
        schedule: `"aspire"` (per request, from acceptance and costs), `"fsm"`, `"fixed"`, `"staggered"` or
            `"autoregressive"` (no drafts).
        draft_length: Drafts per round of `"fixed"` and `"staggered"`.
        max_draft: Hard cap of drafts per round.
        initial_draft: Least drafts before a request's first verification (schedule `"aspire"`).
        acceptance_prior: Acceptance assumed before anything was verified, in (0, 1).
        acceptance_smoothing: Weight of the past in the acceptance estimate, in [0, 1).
        cost: `(base, per_token, per_kv_token)` in seconds: fixed step costs instead of the online fit.
        sampling: `"coupled"` (text independent of schedule and batch) or `"rejection"` (most accepted tokens).
        seed: Seed of the noise; None draws it from torch's generator.
        backend: Attention kernels: `"auto"`, `"triton"` or `"torch"`.
        compile: Regional `torch.compile`: `"auto"`, True or False.
        cuda_graphs: CUDA graphs: `"auto"`, True or False.
        kv_memory: Bytes (int), or share of free memory (float in (0, 1]), for KV pages. None: what the call needs.
        progress: Show a progress bar with tokens/s and acceptance.
        on_stats: Called with the `AspireStats` of the call.
    """

    page_size: int = 16
    sparsity: float = 0.07
    min_pages: int = 32
    recent_pages: int = 8
    context: str = "auto"
    granularity: int | str = "auto"
    refresh_layer: int = -2
    schedule: str = "aspire"
    draft_length: int = 5
    max_draft: int = 15
    initial_draft: int = 3
    acceptance_prior: float = 0.9
    acceptance_smoothing: float = 0.8
    cost: tuple[float, float, float] | None = None
    sampling: str = "coupled"
    seed: int | None = None
    backend: str = "auto"
    compile: bool | str = "auto"
    cuda_graphs: bool | str = "auto"
    kv_memory: int | float | None = None
    progress: bool = False
    on_stats: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "min_pages", "recent_pages", "draft_length", "max_draft", "initial_draft"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer >= 1")
        _require(_is_real(self.sparsity) and 0 < self.sparsity <= 1, "sparsity", self.sparsity, "a number in (0, 1]")
        _require(
            self.recent_pages <= self.min_pages,
            "recent_pages",
            self.recent_pages,
            f"at most min_pages={self.min_pages}: the newest pages are part of the budget",
        )
        for name, choices in (("context", CONTEXTS), ("schedule", SCHEDULES), ("sampling", SAMPLINGS),
                              ("backend", BACKENDS), ("compile", SWITCHES), ("cuda_graphs", SWITCHES)):  # fmt: skip
            value = getattr(self, name)
            _require(value in choices, name, value, f"one of {', '.join(map(repr, choices))}")
        unit = self.granularity
        _require(
            unit == "auto" or (isinstance(unit, int) and _is_int(unit) and 1 <= unit <= self.page_size),
            "granularity",
            unit,
            f"'auto' or an integer from 1 to page_size={self.page_size}",
        )
        _require(_is_int(self.refresh_layer), "refresh_layer", self.refresh_layer, "an integer")
        prior, smoothing = self.acceptance_prior, self.acceptance_smoothing
        _require(_is_real(prior) and 0 < prior < 1, "acceptance_prior", prior, "a number in (0, 1)")
        _require(_is_real(smoothing) and 0 <= smoothing < 1, "acceptance_smoothing", smoothing, "a number in [0, 1)")
        if self.cost is not None:
            cost = self.cost
            _require(
                isinstance(cost, (tuple, list))
                and len(cost) == 3
                and all(_is_real(c) and 0 <= c < float("inf") for c in cost)
                and sum(cost) > 0,
                "cost",
                cost,
                "(base, per_token, per_kv_token): three finite seconds >= 0, not all zero",
            )
            object.__setattr__(self, "cost", tuple(float(c) for c in cost))
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer or None")
        memory = self.kv_memory
        _require(
            memory is None or (_is_int(memory) and memory > 0) or (isinstance(memory, float) and 0 < memory <= 1),
            "kv_memory",
            memory,
            "None, bytes as an integer > 0, or a share of free memory as a float in (0, 1]",
        )
        _require(isinstance(self.progress, bool), "progress", self.progress, "True or False")
        _require(self.on_stats is None or callable(self.on_stats), "on_stats", self.on_stats, "a callable or None")

    @classmethod
    def of(cls, value: AspireConfig | Mapping[str, Any] | None) -> AspireConfig:
        """Makes a configuration from an object, a mapping of field names, or None (the defaults).

        Raises:
            ValueError: An unknown field, or a value out of range.
            TypeError: Any other type.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"aspire_config: got {type(value).__name__}, expected an AspireConfig, a dict or None")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in value if key not in known)
        if unknown:
            raise ValueError(
                f"aspire_config: got unknown key(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**value)

    def budget(self, context: int) -> int:
        """Tokens that a draft step may read of a context of `context` tokens (a function of the length only)."""
        pages = -(-context // self.page_size)
        return max(self.min_pages, _ceil(self.sparsity * pages)) * self.page_size


def _ceil(value: float) -> int:
    """Ceiling that forgives the rounding of a product such as 0.07 * 100."""
    return int(-(-(value - 1e-9) // 1))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"AspireConfig.{name}: got {got!r}, expected {expected}")
