"""The Triton kernels as a backend.

Every layer is a store, one attention launch and, where pieces or scores ask for them, a combine and a score launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch import MixedBatch
from .cache import AspireCache, LayerSpec
from .kernels import work
from .kernels.combine import combine, reduce_scores
from .kernels.mixed_attention import Partials, mixed_attention, raw_scores_for
from .kernels.store_kv import store_kv
from .kernels.tiles import tile_for
from .request import RowKind
from .selection import ContextPolicy

_HOST_PROGRAMS = 16
"""Programs to cut the work for where there is no GPU (the interpreter runs them one by one)."""


@dataclass(frozen=True)
class _View:
    """How a group of layers sees the rows: their tables on the device."""

    rows: Tensor
    items: Tensor
    merges: Tensor | None
    partials: Partials
    scored_rows: Tensor | None


class TritonBackend:
    """Attention by the kernels of `kernels/`, over pools `[page, Hkv, page size, D]`.

    Args:
        cache: Pools in that layout, with an int32 page table.
        layers: Shapes per layer; all layers must agree on heads and sizes.
        policy: Which layers score what.

    Raises:
        ValueError: The layers differ.
    """

    def __init__(self, cache: AspireCache, layers: Sequence[LayerSpec], policy: ContextPolicy) -> None:
        shapes = {(s.query_heads, s.kv_heads, s.key_size, s.value_size, s.dtype, s.device) for s in layers}
        if len(shapes) != 1:
            raise ValueError(
                f"TritonBackend: got layers of {len(shapes)} shapes, expected one; use AspireConfig(backend='torch')"
            )
        self._cache = cache
        self._policy = policy
        self._spec = layers[0]
        self._group = self._spec.query_heads // self._spec.kv_heads

    def plan(self, batch: MixedBatch) -> None:
        """Makes the tables that all layers of a view share."""
        self._batch = batch
        self._views: dict[tuple[bool, bool, bool], _View] = {}
        spec = self._spec
        widest = max(spec.key_size, spec.value_size)
        self._tile = tile_for(max(row.queries for row in batch.rows), self._group, widest, spec.dtype.itemsize)
        self._drafts = np.array([row.kind is RowKind.DRAFT for row in batch.rows])
        wanted = [row.scored_queries for row in batch.rows]
        self._slots = {index: slot for slot, index in enumerate(i for i, queries in enumerate(wanted) if queries)}
        self._wanted = wanted
        self._lists = batch.sparse.slots.int() if batch.sparse else None
        self._listed = batch.sparse.lengths.tolist() if batch.sparse else []
        if self._slots:
            longest = max(batch.rows[index].context for index in self._slots)
            most = max(len(queries) for queries in wanted)
            heads = (spec.query_heads, spec.kv_heads)
            self._raw = raw_scores_for(len(self._slots), most, longest, heads, self._tile, spec.dtype, spec.device)
            self._scores = torch.zeros(self._policy.lists, len(self._slots), longest, device=spec.device)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Backend`."""
        cache, policy = self._cache, self._policy
        keys, values = cache.keys[layer], cache.values[layer]
        store_kv(keys, values, self._batch.write_slots, key, value)
        refreshes = layer in policy.draft_layers
        view = self._view((not refreshes, layer in policy.full_layers, refreshes))
        lists = self._lists[layer if len(self._lists) > 1 else 0] if self._lists is not None else cache.page_table
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        raw = self._raw if view.scored_rows is not None else None
        mixed_attention(
            query,
            keys,
            values,
            cache.page_table,
            lists,
            view.rows,
            view.items,
            output,
            view.partials,
            raw,
            scaling,
            self._tile,
        )
        if view.merges is not None:
            combine(view.partials, view.rows, view.merges, output, self._group, self._tile, raw is not None)
        if raw is not None and view.scored_rows is not None:
            scores = self._scores[layer if policy.lists > 1 else 0]
            reduce_scores(raw, view.partials.row_lse, view.rows, view.scored_rows, scores, 1, policy.by_maximum)
        return output

    def scores(self, row: int) -> Tensor:
        """See `Backend`."""
        scores = self._scores[:, self._slots[row], : self._batch.rows[row].context]
        if self._drafts[row] and self._policy.lists > 1:
            refresh = self._policy.draft_layers[0]
            return scores[refresh : refresh + 1]
        return scores

    def _view(self, key: tuple[bool, bool, bool]) -> _View:
        """The view of layers where drafts read lists, full rows are scored, drafts are scored."""
        if key not in self._views:
            self._views[key] = self._make_view(*key)
        return self._views[key]

    def _make_view(self, drafts_listed: bool, full_scored: bool, drafts_scored: bool) -> _View:
        spec, device = self._spec, self._spec.device
        table, scored = self._rows(drafts_listed, full_scored, drafts_scored)
        slots = self._tile.slots(_multiprocessors(device), spec.kv_heads)
        planned = work.plan_work(table, self._tile.queries(self._group), slots, self._tile.block_n)
        heads = (spec.query_heads, spec.kv_heads)
        tokens = self._batch.tokens if scored is not None else 0
        return _View(
            torch.from_numpy(table).to(device, non_blocking=True),
            torch.from_numpy(planned.items).to(device, non_blocking=True),
            torch.from_numpy(planned.merges).to(device, non_blocking=True) if planned.used_merges else None,
            Partials.empty(planned.partials, tokens, heads, self._tile.block_m, spec.value_size, device),
            torch.from_numpy(scored).to(device, non_blocking=True) if scored is not None else None,
        )

    def _rows(
        self, drafts_listed: bool, full_scored: bool, drafts_scored: bool
    ) -> tuple[work.Table, work.Table | None]:
        """The row table, and the row of every score slot, or None where no row is scored."""
        rows = self._batch.rows
        page_shift = self._cache.page_size.bit_length() - 1
        listed = self._drafts & drafts_listed
        lengths = np.array([row.context for row in rows])
        starts = np.array([row.start for row in rows])
        tables = np.array([row.request.row for row in rows])
        if listed.any():
            lengths[listed] = self._listed
            starts[listed] = lengths[listed] - 1
            tables[listed] = np.arange(listed.sum())
        shifts = np.where(listed, 0, page_shift)
        table = work.row_table([row.queries for row in rows], starts, lengths, tables, shifts, listed, self._wanted)
        off = ~np.where(self._drafts, drafts_scored, full_scored)
        table[off, work.ROW_SCORE] = -1
        table[off, work.ROW_SCORE_COUNT] = 0
        slots = table[:, work.ROW_SCORE]
        if (slots < 0).all():
            return table, None
        scored = np.full(len(self._slots), -1, dtype=np.int32)
        scored[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
        return table, scored


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOST_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
