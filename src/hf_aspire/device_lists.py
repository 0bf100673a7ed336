"""Sparse lists that are made, kept and read on the device, without the host knowing what is in them."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import AspireConfig
from .device_state import DeviceState
from .kernels.list_places import list_sizes, place_lists
from .kernels.select import select
from .kernels.step_state import Field
from .selection import ContextPolicy, resolved_granularity


class DeviceLists:
    """The lists of all request slots as token slots of the pools: top, then tail.

    The tail is written ahead of the tokens that will fill it (pages are known in advance), so that a list grows by a
    longer length alone.

    Args:
        config: Budget, recent tokens, granularity.
        policy: Number of lists, tokens per score.
        state: The requests.
        longest: Most context tokens that a request may reach.
    """

    def __init__(self, config: AspireConfig, policy: ContextPolicy, state: DeviceState, longest: int) -> None:
        self._state = state
        self._unit = resolved_granularity(config)
        self._scores_per_unit = self._unit // policy.unit
        self._recent = config.recent_pages * config.page_size
        device = state.fields.device
        pages = range(-(-longest // config.page_size) + 1)
        self._budgets = torch.tensor([config.budget(page * config.page_size) for page in pages], device=device)
        capacity = max(config.budget(longest), self._recent) + 2 * (config.max_draft + 1) + 2 * self._unit
        self.slots = torch.zeros(
            policy.lists, state.filler + 1, capacity, dtype=torch.int32, device=device
        )  # [lists, request slots, capacity]
        self._index = torch.arange(capacity, device=device)

    def load(self, slot: int, top: Tensor, tail: int) -> None:
        """Takes over a list that was made elsewhere: `top` `[lists, n]` context indices, ascending."""
        tokens = torch.cat([top, (self._index[: -top.shape[1] or None] + tail).expand(len(top), -1)], 1)
        self.slots[:, slot] = self._state.places(torch.full_like(tokens, slot), tokens).int()
        self._state.fields[slot, Field.TOP] = top.shape[1]
        self._state.fields[slot, Field.TAIL] = tail

    def renew(self, scores: Tensor, scored_rows: Tensor, owners: Tensor) -> None:
        """Makes lists from scores.

        Args:
            scores: `[lists, S, scores]` float32, each of the policy's unit of tokens.
            scored_rows: `[S]` int32 rows, -1: none.
            owners: `[R, Owner]` int32 (see `step_state`).
        """
        state, unit, size = self._state, self._unit, self._state.page_size
        slots, units, counts = list_sizes(scored_rows, owners, state.fields, self._budgets, size, self._recent, unit)
        parts = self._scores_per_unit
        if parts > 1:
            scores = scores[..., : scores.shape[-1] // parts * parts].unflatten(-1, (-1, parts)).sum(-1)
        capacity = -(-self.slots.shape[2] // unit)
        chosen = torch.empty(*scores.shape[:2], capacity, dtype=torch.int32, device=scores.device)
        select(scores, units, counts, chosen)
        place_lists(chosen, slots, state.fields, state.page_table, size, unit, self.slots)
