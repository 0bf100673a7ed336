"""The Triton kernels as a backend.

Every layer is a store, one attention launch and, where scores are wanted, a score launch.
Long prompt chunks are read by a library's attention, all but their last queries (see `prompt_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import prompt_attention
from .batch import MixedBatch
from .cache import AspireCache, LayerSpec
from .columns import RowColumns
from .kernels import work
from .kernels.mixed_attention import Partials, mixed_attention
from .kernels.reduce_scores import reduce_scores
from .kernels.score_store import RawScores
from .kernels.store_kv import store_kv
from .kernels.tiles import Tile, tile_for
from .prompt_attention import Bulk
from .request import RowKind
from .selection import ContextPolicy
from .side_streams import Side, SideStreams

_HOST_PROGRAMS = 16
"""Programs to cut the work for where there is no GPU (the interpreter runs them one by one)."""


class ViewKey(NamedTuple):
    """A way for layers to see the rows.

    Attributes:
        drafts_listed: Draft rows read their lists, not the whole context.
        full_scored: Rows with full attention are scored, where they ask for it.
        drafts_scored: Draft rows are.
    """

    drafts_listed: bool
    full_scored: bool
    drafts_scored: bool


@dataclass(frozen=True)
class View:
    """How a group of layers sees the rows: their tables on the device.

    Attributes:
        rows: `[rows, ROW_COLUMNS]` int32.
        items: `[items, ITEM_COLUMNS]` int32.
        partials: Scratch of split tiles.
        scored_rows: `[score slots]` int32, the row of every slot or -1, or None without scores.
    """

    rows: Tensor
    items: Tensor
    partials: Partials
    scored_rows: Tensor | None


@dataclass(frozen=True)
class Tables:
    """What all layers of a forward share.

    Attributes:
        write_slots: `[T]` places of the new keys and values; negative ones keep none.
        views: One per kind of layer.
        lists: `[lists, rows, capacity]` int32 token slots of draft rows; the page table where nothing drafts.
        raw: Scores as the attention pass leaves them, or None.
        scores: `[lists, score slots, scores]` float32, or None.
        tile: Shapes of the kernel's blocks.
        bulks: Queries of long prompt chunks, which are in none of the views.
    """

    write_slots: Tensor
    views: Mapping[ViewKey, View]
    lists: Tensor
    raw: RawScores | None
    scores: Tensor | None
    tile: Tile
    bulks: Sequence[Bulk] = ()


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
        self.sides = SideStreams()
        self._spec = layers[0]
        self._cuts_prompts = prompt_attention.serves(layers[0])
        self._group = self._spec.query_heads // self._spec.kv_heads
        self._keys = [
            ViewKey(layer not in policy.draft_layers, layer in policy.full_layers, layer in policy.draft_layers)
            for layer in range(len(layers))
        ]

    @property
    def view_keys(self) -> list[ViewKey]:
        """The views that the layers have, each once."""
        return list(dict.fromkeys(self._keys))

    def plan(self, batch: MixedBatch) -> None:
        """Makes the tables that all layers of a view share."""
        ends, tokens, bulks = batch.rows, batch.offsets, list[Bulk]()
        if self._cuts_prompts:
            ends, tokens, bulks = prompt_attention.cut(ends, tokens)
        self._rows = ends
        spec = self._spec
        columns = RowColumns(ends)
        tile = self.tile(int(columns.queries.max()))
        self._slots: dict[int, int] = {}
        listed = np.zeros(len(batch.rows), dtype=np.int64)
        if batch.sparse:
            listed[[row.kind is RowKind.DRAFT for row in batch.rows]] = batch.sparse.lengths.cpu()
        raw = scores = None
        if columns.scored:
            self._slots = {row: slot for slot, row in enumerate(columns.scored.rows.tolist())}
            longest = int(columns.contexts[columns.scored.rows].max())
            raw = self.raw_scores(len(self._slots), int(columns.scored.spans[:, 2].max()), longest, tile)
            scores = self.no_scores(len(self._slots), longest)
        views, tables = {}, self.row_tables(columns, listed, np.cumsum(listed > 0) - 1, tokens)
        for key, (rows, scored) in zip(self.view_keys, tables, strict=True):
            planned = self.cut(rows, tile)
            scratch = batch.tokens if scored is not None else 0
            views[key] = View(
                torch.from_numpy(rows).to(spec.device, non_blocking=True),
                torch.from_numpy(planned.items).to(spec.device, non_blocking=True),
                self.partials(planned.partials, scratch, tile),
                torch.from_numpy(scored).to(spec.device, non_blocking=True) if scored is not None else None,
            )
        lists = batch.sparse.slots.int() if batch.sparse else self._cache.page_table[None]
        self.use(Tables(batch.write_slots, views, lists, raw, scores, tile, bulks))

    def use(self, tables: Tables) -> None:
        """Sets the tables of the next forwards."""
        self._tables = tables

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Backend`."""
        cache, tables = self._cache, self._tables
        keys, values = cache.keys[layer], cache.values[layer]
        store_kv(keys, values, tables.write_slots, key, value)
        view = tables.views[self._keys[layer]]
        lists = tables.lists[layer if len(tables.lists) > 1 else 0]
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        raw = tables.raw if view.scored_rows is not None else None
        if raw is not None:
            self.sides.join()  # the layer before may still be reading its raw scores
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
            tables.tile,
        )
        for bulk in tables.bulks:
            states = (query, key, value)
            prompt_attention.attend(bulk, states, keys, values, cache.page_table, scaling, output)
        if raw is not None and view.scored_rows is not None and tables.scores is not None:
            scores = tables.scores[layer if self._policy.lists > 1 else 0]
            with self.sides.fork(Side.IDLE):  # beside the layer's output product
                reduce_scores(raw, view.partials.row_lse, view.rows, view.scored_rows, scores, self._policy.unit)
        return output

    def finish(self) -> None:
        """Ends a forward: what follows sees its scores."""
        self.sides.join()

    def scores(self, row: int) -> Tensor:
        """See `Backend`."""
        assert self._tables.scores is not None
        count = self._policy.scores_of(self._rows[row].context)
        scores = self._tables.scores[:, self._slots[row], :count]
        if self._rows[row].kind is RowKind.DRAFT and self._policy.lists > 1:
            refresh = self._policy.draft_layers[0]
            return scores[refresh : refresh + 1]
        return scores

    # What goes into tables

    def tile(self, queries: int) -> Tile:
        """The tile for rows of up to `queries` queries."""
        spec = self._spec
        return tile_for(queries, self._group, max(spec.key_size, spec.value_size), spec.dtype.itemsize)

    def queries_per_tile(self, tile: Tile) -> int:
        """Queries of a row that share a tile."""
        return tile.queries(self._group)

    def cut(
        self,
        rows: work.Table,
        tile: Tile,
        room: float = math.inf,
        like: work.Work | None = None,
    ) -> work.Work:
        """A view's rows cut for this device; `room` and `like` as in `plan_work`."""
        slots = tile.slots(_multiprocessors(self._spec.device), self._spec.kv_heads)
        per_tile = tile.queries(self._group)
        return work.plan_work(rows, per_tile, self._group, slots, tile.block_n, room=room, like=like)

    def partials(self, count: int, tokens: int, tile: Tile) -> Partials:
        """Scratch for `count` pieces; `tokens` 0 where no row is scored."""
        spec = self._spec
        heads = (spec.query_heads, spec.kv_heads)
        return Partials.empty(count, tokens, heads, tile.block_m, spec.value_size, spec.device)

    def raw_scores(self, slots: int, queries: int, tokens: int, tile: Tile) -> RawScores:
        """Room for what the attention pass leaves of `slots` rows' scores."""
        spec, unit = self._spec, self._policy.unit
        heads = (spec.query_heads, spec.kv_heads)
        return RawScores.empty(slots, queries, tokens, heads, tile.block_n, unit, spec.device)

    def no_scores(self, slots: int, tokens: int) -> Tensor:
        """Room for the scores of `slots` rows of up to `tokens` tokens, zeros."""
        shape = (self._policy.lists, slots, self._policy.scores_of(tokens))
        return torch.zeros(shape, dtype=torch.float32, device=self._spec.device)

    def row_tables(
        self,
        rows: RowColumns,
        listed: NDArray[np.int64],
        lists: NDArray[np.int64],
        tokens: Sequence[int] | None = None,
    ) -> list[tuple[work.Table, work.Table | None]]:
        """The row table of every view, and the row of every score slot, or None where no row is scored.

        Args:
            rows: The rows, in packed order.
            listed: Listed tokens of every row; 0 where it reads its whole context.
            lists: Which list each row reads, if any.
            tokens: First packed token of every row; None: the rows are packed one after the other.
        """
        shift = self._cache.page_size.bit_length() - 1
        where = rows.starts, rows.contexts, rows.slots, shift, 0
        whole = work.row_table(rows.queries, *where, tokens)
        by_list = np.flatnonzero(rows.drafts & (listed > 0))
        zeros = 0 * listed
        where_listed = np.array([listed - 1, listed, lists, zeros, zeros + 1]).T[by_list]
        tables = []
        for key in self.view_keys:
            table = whole.copy()
            if key.drafts_listed:
                table[by_list, work.ROW_START : work.ROW_LISTED + 1] = where_listed
            tables.append((table, _ask_scores(table, rows, key)))
        return tables


def _ask_scores(table: work.Table, rows: RowColumns, key: ViewKey) -> work.Table | None:
    """The row of every score slot, -1 where the view does not score it, or None where it scores none."""
    if not rows.scored:
        return None
    which, spans = rows.scored
    counts = np.where(rows.drafts[which], key.drafts_scored, key.full_scored)
    slots = np.flatnonzero(counts)
    if not len(slots):
        return None
    work.ask_scores(table, which[slots], slots, spans[slots])
    return np.where(counts, which, -1).astype(np.int32)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOST_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
