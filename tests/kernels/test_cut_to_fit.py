"""When the work of a step is cut in another way, to fit a shape that was captured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_aspire.graphs import Graphs, Needs, Shape
from hf_aspire.kernels.tiles import Tile
from hf_aspire.kernels.work import Size, Work
from hf_aspire.step_tables import StepTables

TILE = Tile(16, 64, 2, 2)
SMALL = Shape(64, 16, 0, True, (64, 64))


def work(items: int, time: float) -> Work:
    return Work(np.zeros((items, 8), np.int32), 0, items, items, Size(1.0, 100, time))


class Cuts:
    """Tables are numbers here: how much longer the work of a view takes where it is cut to fit."""

    def cut(self, longer: float, tile: Tile, room: float) -> Work:
        return work(int(room), 100.0 * longer)


@pytest.mark.parametrize(
    ("longer", "cut"),
    [((1.0, 1.0), True), ((1.05, 1.04), True), ((1.06, 1.0), False), ((1.0, 1.06), False), ((1.0, math.inf), False)],
)
def test_all_views_must_take_hardly_longer(longer: tuple[float, float], cut: bool) -> None:
    tables = StepTables.__new__(StepTables)
    tables._backend, tables._graphs = Cuts(), Graphs(enabled=True)  # type: ignore[assignment]
    tables._graphs._captured[SMALL] = None  # type: ignore[assignment]
    best = [work(65, 100.0), work(65, 100.0)]
    needs = Needs(64, 16, 0, True, (65, 65), 4)
    shape, cuts = tables._fitted(needs, longer, best, TILE)  # type: ignore[arg-type]
    assert shape == (SMALL if cut else needs.least)
    assert [each.used_items for each in cuts] == ([64, 64] if cut else [65, 65])
