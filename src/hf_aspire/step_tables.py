"""The tables of a step that is planned before the lengths it meets are known.

The host knows which rows there are, how many queries each has and upper bounds of their lengths: enough to cut the
work. Starts and lengths are filled in on the device. All tables go there in one copy, to addresses that the shape of
the step determines, so that a CUDA graph can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .columns import RowColumns
from .cuts import Cuts
from .device_lists import DeviceLists
from .device_state import DeviceState
from .graphs import Graphs, Needs, Shape
from .kernels import work
from .kernels.mixed_attention import Partials
from .kernels.score_store import RawScores
from .kernels.step_state import place_rows
from .kernels.tiles import Tile
from .request import Row
from .staging import Part, Staging
from .triton_backend import Tables, TritonBackend, View

_ENTRIES, _ENTRIES_PER_SLOT = 1 << 18, 1 << 10
"""Room for a step's tables: pieces are bounded by the device, tokens, tiles and rows by the request slots."""
_HARDLY_LONGER = 1.05
"""Of the attention's time: a step without a graph takes several times as long."""


class StepTables:
    """Builds tables on the host and hands them to the kernels.

    Args:
        backend: Kernels.
        state: The requests on the device.
        lists: Their sparse lists.
        graphs: Knows which shapes were captured.
        longest: Most context tokens of a request.
    """

    def __init__(
        self, backend: TritonBackend, state: DeviceState, lists: DeviceLists, graphs: Graphs, longest: int
    ) -> None:
        self._backend = backend
        self._state = state
        self._lists = lists
        self._graphs = graphs
        self._longest = longest
        device = state.fields.device
        entries = _ENTRIES + _ENTRIES_PER_SLOT * state.most * (state.filler + 1) // 16
        self._staging = Staging(entries, device)
        self._partials_of: dict[tuple[int, int, int], Partials] = {}
        self._scores_of: dict[tuple[int, int], tuple[RawScores, Tensor]] = {}
        self._cuts = Cuts()

    def plan(self, rows: Sequence[Row], listed: NDArray[np.int64], forced: NDArray[np.int64], settles: bool) -> Plan:
        """The tables of rows, cut on the host and on their way to the device.

        Args:
            rows: The rows; starts and lengths are upper bounds.
            listed: Upper bounds of the listed tokens of every row, 0 where it reads its whole context.
            forced: Drafts that are accepted of every row whatever the logits say, -1 where they decide.
            settles: Whether the forward chooses and commits the tokens, too.
        """
        backend, columns = self._backend, RowColumns(rows)
        count = int(columns.queries.sum())
        tile = backend.tile(int(columns.queries.max()))
        per_tile = backend.queries_per_tile(tile)
        tables = backend.row_tables(columns, listed, columns.slots)
        in_tiles = partial(backend.cut, tile=tile)
        cuts = [self._cuts.of(view, table, in_tiles) for view, (table, _) in enumerate(tables)]
        score_slots = max(0 if scored is None else len(scored) for _, scored in tables)
        items = tuple(cut.used_items for cut in cuts)
        needs = Needs(count, tile.block_m, score_slots, settles, items, per_tile)
        shape, cuts = self._fitted(needs, [table for table, _ in tables], cuts, tile)

        filling = shape.tokens - count
        parts = self._who(columns, filling, forced)
        unused, zeroing = self._filled_up(len(rows), count, filling, per_tile)
        for (table, scored), cut, room in zip(tables, cuts, shape.work, strict=True):
            used = cut.items[: cut.used_items]
            parts += [
                Part(table, self._state.filler + 2, unused),
                Part(np.concatenate([used, zeroing]) if filling else used, room, -1),
                Part(np.zeros(0, dtype=np.int32) if scored is None else scored, shape.scored, -1),
            ]
        scored_views = tuple(scored is not None for _, scored in tables)
        return Plan(shape, tile, scored_views, self._staging.send(shape, parts))

    def _fitted(
        self, needs: Needs, tables: Sequence[work.Table], cuts: list[work.Work], tile: Tile
    ) -> tuple[Shape, list[work.Work]]:
        """The step's shape, and its work, cut in another way where the shape has too little room for it."""
        tried: dict[Shape, list[work.Work]] = {}

        def cut_for(shape: Shape) -> list[work.Work]:
            if shape not in tried:
                pairs = zip(tables, needs.room_in(shape), strict=True)
                tried[shape] = [self._backend.cut(table, tile, room) for table, room in pairs]
            return tried[shape]

        def cuttable(shape: Shape) -> bool:
            pairs = zip(cut_for(shape), cuts, strict=True)
            return all(cut.size.time <= _HARDLY_LONGER * best.size.time for cut, best in pairs)

        shape = self._graphs.shape_for(needs, cuttable)
        return shape, cuts if needs.fit(shape) else cut_for(shape)

    def _who(self, rows: RowColumns, filling: int, forced: NDArray[np.int64]) -> list[Part]:
        """Whose the tokens are.

        Returns:
            `Plan.tokens` and `Plan.owners`. Rows that are not used are the filling slot's, and so is the last entry,
            to which the filling tokens belong.
        """
        queries, slots, rounds = rows.queries, rows.slots, [request.rounds for request in rows.requests]
        aheads = np.where(rows.drafts, rows.starts - [request.length for request in rows.requests], 0)
        first = queries.cumsum() - queries
        index = np.arange(len(queries)).repeat(queries)
        steps = np.arange(len(index)) - first[index]
        tokens = np.array([slots[index], aheads[index] + steps, index, steps]).T
        table = np.array([slots, aheads, first, np.where(rows.drafts, -1, queries - 1), forced, rounds]).T
        last = self._state.filler + 1
        return [
            Part(tokens, len(tokens) + filling, [self._state.filler, 0, last, 0]),
            Part(table, last + 1, [self._state.filler, 0, 0, -1, -1, 0]),
        ]

    def _filled_up(self, rows: int, count: int, filling: int, per_tile: int) -> tuple[list[int], work.Table]:
        """Every unused row, and the first one's items: filling tokens attend nothing and become zeros, not garbage."""
        row = [0] * work.ROW_COLUMNS
        row[work.ROW_TOKEN], row[work.ROW_QUERIES], row[work.ROW_TABLE] = count, filling, self._state.filler
        row[work.ROW_SCORE], row[work.ROW_SCORE_STEP] = -1, 1
        first = np.arange(0, filling, per_tile)
        items = np.zeros((len(first), work.ITEM_COLUMNS), dtype=np.int32)
        items[:, work.ITEM_ROW], items[:, work.ITEM_QUERY] = rows, first
        items[:, work.ITEM_PIECES], items[:, work.ITEM_SLOT] = 1, -1
        return row, items

    def fill(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Completes a plan's tables on the device and gives them to the kernels; token and position ids `[1, T]`."""
        tokens, owners, *parts = plan.parts
        ids, positions, places = self._state.pack(tokens)
        views = {}
        raw = scores = None
        if plan.shape.scored:
            raw, scores = self._scores(plan.shape.scored, plan.tile)
        for index, key in enumerate(self._backend.view_keys):
            table, items, scored = parts[3 * index : 3 * index + 3]
            is_scored = plan.scored_views[index]
            views[key] = View(
                place_rows(table, owners, self._state.fields),
                items,
                self._partials(plan.shape.work[index], plan.shape.tokens if is_scored else 0, plan.tile),
                scored if is_scored else None,
            )
        self._backend.use(Tables(places, views, self._lists.slots, raw, scores, plan.tile))
        return ids, positions

    def renew(self, plan: Plan) -> None:
        """Makes the lists of the rows that the last forward scored."""
        if not plan.shape.scored:
            return
        self._backend.finish()
        scores = self._scores(plan.shape.scored, plan.tile)[1]
        self._lists.renew(scores, plan.parts[4 + 3 * plan.scored_views.index(True)], plan.owners)

    def _partials(self, pieces: int, tokens: int, tile: Tile) -> Partials:
        key = (pieces, tokens, tile.block_m)
        if key not in self._partials_of:
            self._partials_of[key] = self._backend.partials(pieces, tokens, tile)
        return self._partials_of[key]

    def _scores(self, slots: int, tile: Tile) -> tuple[RawScores, Tensor]:
        key = (slots, tile.block_n)
        if key not in self._scores_of:
            raw = self._backend.raw_scores(slots, 2, self._longest, tile)
            self._scores_of[key] = raw, self._backend.no_scores(slots, self._longest)
        return self._scores_of[key]


@dataclass(frozen=True)
class Plan:
    """One step's tables.

    Attributes:
        shape: Sizes of the tables.
        tile: Shapes of the kernel's blocks.
        scored_views: For each view, whether rows are scored in it.
        parts: All tables, on the device.
    """

    shape: Shape
    tile: Tile
    scored_views: tuple[bool, ...]
    parts: list[Tensor]

    @property
    def tokens(self) -> Tensor:
        """`[T, 4]` int32: request slot, tokens ahead of its last committed one, row, query of the row."""
        return self.parts[0]

    @property
    def owners(self) -> Tensor:
        """`[R, Owner]` int32, whose the rows are."""
        return self.parts[1]
