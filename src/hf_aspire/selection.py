"""Context policies: which part of its cache a draft step reads.

A list is *top + tail*. The tail is every token from some index on: the newest ones, and all that came after the length
that was scored; it grows by itself while the request drafts. The top are the best-scored units below the tail. Where
the budget reaches the length the list is everything, and no scores are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import AspireConfig
from .kernels.reference import select
from .request import Request, Row, RowKind

_RENEWED_SHARE = 0.25
"""Hybrid: share of the top that the refresh layer renews at every draft step. Not tuned."""


@dataclass(frozen=True)
class ContextPolicy:
    """Where scores come from and how many lists they make.

    Attributes:
        layers: Layers of the model.
        lists: 1 (shared by all layers) or one per layer.
        full_layers: Layers whose scores count in rows with full attention (prompt ends, decode and verify rows).
        draft_layers: Layers that run full attention, and score, in draft rows.
        unit: Context tokens per score: as many of the selected unit as are a power of two.
    """

    layers: int
    lists: int
    full_layers: tuple[int, ...]
    draft_layers: tuple[int, ...]
    unit: int

    @classmethod
    def of(cls, config: AspireConfig, layers: int) -> ContextPolicy:
        """The policy that a configuration names, for a model of `layers` layers.

        Raises:
            ValueError: `refresh_layer` is not a layer of the model.
        """
        refresh = config.refresh_layer % layers if -layers <= config.refresh_layer < layers else None
        name = resolved_context(config)
        granularity = resolved_granularity(config)
        unit = granularity & -granularity
        if name == "window":
            return cls(layers, 1, (), (), unit)
        if name == "verify":
            return cls(layers, layers, tuple(range(layers)), (), unit)
        if refresh is None:
            # The default, N-2, does not exist in a model of one layer; its only layer is the late one then.
            if config.refresh_layer != -2:
                raise ValueError(
                    f"AspireConfig.refresh_layer: got {config.refresh_layer}, expected a layer of this model, "
                    f"{-layers} to {layers - 1}"
                )
            refresh = layers - 1
        if name == "hybrid":
            return cls(layers, layers, tuple(range(layers)), (refresh,), unit)
        return cls(layers, 1, (refresh,), (refresh,), unit)

    def scores_of(self, context: int) -> int:
        """Scores of a context of that many tokens."""
        return -(-context // self.unit)


def resolved_context(config: AspireConfig) -> str:
    """The policy behind `context="auto"`: none keeps more tokens for as many reads (docs/acceptance.md)."""
    return "verify" if config.context == "auto" else config.context


def resolved_granularity(config: AspireConfig) -> int:
    """The unit behind `granularity="auto"`: single tokens; no other is ahead beyond noise (docs/acceptance.md)."""
    return 1 if config.granularity == "auto" else int(config.granularity)


@dataclass(slots=True)
class _Shape:
    """The host's half of a list: how much of it is top, where its tail begins, and in which round it was made.

    `ahead` is None of a list that was made here. Of one that only the device knows it is what must be added to the
    drafts of the round for an upper bound of the tokens that came since it was scored.
    """

    tail: int
    count: int
    made_at: int = -1
    base: Tensor | None = None
    ahead: int | None = None


@dataclass(frozen=True)
class SparseView:
    """The lists of a step's draft rows: `slots` are pool places `[lists, R, S]`, `lengths` `[R]` how many count."""

    slots: Tensor
    lengths: Tensor


class SparseContexts:
    """The sparse contexts of all request slots: `[lists, request slot, capacity]` context indices, and their shapes.

    Args:
        config: Budget, recent tokens, granularity.
        policy: Number of lists.
        requests: Request slots.
        longest: Most context tokens that a request may reach.
        device: Where the lists live.
    """

    def __init__(
        self, config: AspireConfig, policy: ContextPolicy, requests: int, longest: int, device: torch.device
    ) -> None:
        self.config = config
        self.policy = policy
        self.unit = resolved_granularity(config)
        self.recent = config.recent_pages * config.page_size
        pages = range(-(-(longest + 2 * config.max_draft + 2) // config.page_size) + 1)
        self._budgets = [config.budget(page * config.page_size) for page in pages]
        # Most tokens of a list that the device makes, by pages of context, but for those that came since.
        self._most = [max(budget, self.recent + self.unit) + self.unit for budget in self._budgets]
        whole = [page for page in pages if self._budgets[page] >= page * config.page_size]
        self._whole = whole[-1] * config.page_size  # the longest context that a budget holds, as it does all shorter
        self._unscored = self._whole if policy.full_layers else math.inf  # up to here no list needs scores
        self._share = len(policy.draft_layers) / policy.layers
        self.top = torch.zeros(policy.lists, requests, config.budget(longest), dtype=torch.int64, device=device)
        self._shapes: dict[int, _Shape] = {}

    def wants_scores(self, length: int) -> bool:
        """Whether a list at `length` context tokens needs attention scores."""
        return length > self._unscored

    def ready(self, request: Request) -> bool:
        """Whether the request may draft now: its list, if it needs one, is of this round."""
        if request.length < self._unscored:
            return True
        shape = self._shapes.get(request.row)
        return shape is not None and shape.made_at == request.rounds

    def tokens_read(self, request: Request) -> float:
        """KV tokens that the request's next draft row reads, averaged over the model's layers."""
        context = request.length + len(request.drafts) + 1
        by_score = request.length >= self._unscored
        shape = self._shapes.get(request.row) if by_score else self._static(request)
        # no list yet: what it will hold
        listed = min(context, self._budget(context)) if shape is None else shape.count + context - shape.tail
        return self._share * context + (1 - self._share) * listed

    def renew(self, row: Row, request: Request, scores: Tensor) -> None:
        """Makes a request's list from the scores of a row, after what the row decided was committed.

        Args:
            row: The row.
            request: Its request, or a fork of it.
            scores: `[lists or 1, scores]`, each of `policy.unit` tokens; those past the row's first query are not
                used, since only that query is certain to stay.
        """
        scored = row.certain
        if row.kind is RowKind.DRAFT and self.policy.lists > 1:
            self._renew_share(request, scores)
            return
        tail, count = self._split(scored)
        units = self._summed(scores, tail)
        self._write(request.row, select(units, count))
        base = None
        if self.policy.draft_layers and self.policy.lists > 1:
            base = select(units, count - int(count * _RENEWED_SHARE))
        self._shapes[request.row] = _Shape(tail, count * self.unit, request.rounds, base)

    def note(self, row: Row) -> None:
        """The host's half of a list that the device makes: lengths may be upper bounds, and so are its sizes.

        Args:
            row: The row that makes it, after its request moved on.
        """
        request = row.request
        tail, count = self._split(row.certain)
        ahead = row.context - row.certain + 1 - len(request.drafts)
        self._shapes[request.row] = _Shape(tail, count * self.unit, request.rounds, ahead=ahead)

    def forget(self) -> None:
        """Drops lists that only the device knows; their requests ask for new ones."""
        self._shapes = {slot: shape for slot, shape in self._shapes.items() if shape.ahead is None}

    def listed(self, request: Request, context: int) -> int:
        """An upper bound of the tokens that a draft row over `context` tokens lists; 0: it reads them all."""
        if request.length < self._unscored:
            return 0
        shape = self._shapes[request.row]
        if shape.tail == 0:
            return context
        # Since it was scored. The request's length may have been corrected since, a tail that the device made was not.
        grown = context - shape.tail - self.recent if shape.ahead is None else shape.ahead + len(request.drafts)
        most = self._most[-(-context // self.config.page_size)] + grown
        return context if context < most else most

    def top_of(self, request: Request) -> tuple[Tensor, int] | None:
        """Top `[lists, n]` and tail of a list that was made here and is good for drafts now."""
        shape = self._shapes.get(request.row)
        if shape is None or shape.ahead is not None or shape.made_at != request.rounds:
            return None
        return self.top[:, request.row, : shape.count], shape.tail

    def view(self, rows: Sequence[Row], page_table: Tensor) -> SparseView:
        """The lists of draft rows as places in the pools; short ones repeat their last entry."""
        lists = [self._list(row.request, row.context) for row in rows]
        lengths = torch.tensor([entries.shape[1] for entries in lists], device=self.top.device)
        longest = int(max(entries.shape[1] for entries in lists))
        padded = torch.stack(
            [torch.cat([e, e[:, -1:].expand(-1, longest - e.shape[1])], 1) for e in lists], 1
        )  # [lists, R, S]
        slots = torch.tensor([row.request.row for row in rows], device=self.top.device)
        size = self.config.page_size
        pages = page_table[slots[None, :, None], padded // size]
        return SparseView(pages * size + padded % size, lengths)

    def _budget(self, length: int) -> int:
        """`config.budget`, looked up: planning asks for it several times per request and step."""
        return self._budgets[-(-length // self.config.page_size)]

    def _split(self, scored: int) -> tuple[int, int]:
        """Where the tail begins and how many units the top holds, for a scored length."""
        budget = self._budget(scored)
        tail = max(0, scored - self.recent) // self.unit * self.unit
        return tail, min(max(0, budget - (scored - tail)) // self.unit, tail // self.unit)

    def _static(self, request: Request) -> _Shape | None:
        """Lists that follow from the length alone: everything, or the window; None where scores make the list."""
        length = request.length + 1
        if length <= self._whole:
            return _Shape(0, 0)
        if self.policy.full_layers:
            return None
        first = self.config.page_size
        tail = length - (self._budget(length) - first)
        return _Shape(tail, first) if tail > first else _Shape(0, 0)

    def _list(self, request: Request, context: int) -> Tensor:
        """Context indices `[lists, S]`, ascending."""
        static = self._static(request)
        shape = static or self._shapes[request.row]
        tail = torch.arange(shape.tail, context, device=self.top.device).expand(self.policy.lists, -1)
        if static is not None:
            top = torch.arange(shape.count, device=self.top.device).expand(self.policy.lists, -1)
        else:
            top = self.top[:, request.row, : shape.count]
        return torch.cat([top, tail], 1)

    def _summed(self, scores: Tensor, tail: int) -> Tensor:
        """Scores `[n, units]` of the selected units below the tail."""
        return scores[:, : tail // self.policy.unit].unflatten(-1, (-1, self.unit // self.policy.unit)).sum(-1)

    def _write(self, slot: int, units: Tensor) -> None:
        offsets = torch.arange(self.unit, device=units.device)
        tokens = (units[..., None] * self.unit + offsets).flatten(1)
        self.top[:, slot, : tokens.shape[1]] = tokens

    def _renew_share(self, request: Request, scores: Tensor) -> None:
        """Hybrid, in a draft step: the refresh layer's best units that a layer does not hold yet fill its share."""
        shape = self._shapes.get(request.row)
        if shape is None or shape.base is None:
            return
        units = self._summed(scores, shape.tail).expand(self.policy.lists, -1)
        rest = units.scatter(1, shape.base, -1.0)  # weights are >= 0: what is held sorts behind everything
        extra = select(rest, shape.count // self.unit - shape.base.shape[1])
        self._write(request.row, torch.cat([shape.base, extra], 1).sort(-1).values)
