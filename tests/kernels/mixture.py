"""Builds a step of ragged rows over shuffled pages, runs kernels and reference on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_aspire.kernels import reference, work
from hf_aspire.kernels.mixed_attention import PLAIN, Partials, mixed_attention
from hf_aspire.kernels.reduce_scores import reduce_scores
from hf_aspire.kernels.reference import reduce_scores as mean_scores
from hf_aspire.kernels.score_store import RawScores
from hf_aspire.kernels.tiles import Tile, tile_for

_LEAST = 2**-8 / 1.5
"""Half of the smallest code: how far a weight may be off, as a share of the largest of its block and query."""


@dataclass(frozen=True)
class RowSpec:
    """A row: its queries, its context tokens, its granule if it reads a list, its scored queries."""

    queries: int
    context: int
    granule: int = 0
    scored: tuple[int, ...] = ()
    slotless: int = 0  # last queries that keep no keys and values


def ask_scores(table, scored):
    """Has rows scored by evenly spaced queries, score slots in row order."""
    rows = [index for index, queries in enumerate(scored) if queries]
    spans = [(scored[i][0], scored[i][1] - scored[i][0] if len(scored[i]) > 1 else 1, len(scored[i])) for i in rows]
    if rows:
        work.ask_scores(table, np.array(rows), np.arange(len(rows)), np.array(spans))


class Mixture:
    """Tensors of one step. Memory that no row may read holds NaN."""

    def __init__(
        self,
        specs,
        device,
        *,
        kv_heads=2,
        group=4,
        size=64,
        value_size=None,
        page=16,
        dtype=torch.float32,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        value_size = value_size or size
        self.specs, self.page, self.group = specs, page, group
        pages = [-(-s.context // min(page, s.granule or page)) for s in specs]
        total = sum(-(-s.context // page) if not s.granule else pages[i] for i, s in enumerate(specs)) + 3
        order = torch.randperm(total - 1, generator=generator) + 1  # page 0 belongs to nobody
        keys = torch.full((total, kv_heads, page, size), torch.nan)
        values = torch.full((total, kv_heads, page, value_size), torch.nan)
        page_table = torch.zeros(len(specs), max(pages), dtype=torch.int32)
        lists = torch.zeros(len(specs), max(pages), dtype=torch.int32)
        taken = 0
        for i, spec in enumerate(specs):
            unit = spec.granule or page
            units = order[taken : taken + pages[i]]
            taken += pages[i]
            # A listed unit is one granule, somewhere in a page of its own.
            inside = torch.randint(0, page // unit, (pages[i],), generator=generator)
            entries = units * (page // unit) + inside
            (lists if spec.granule else page_table)[i, : pages[i]] = entries.int()
            token = torch.arange(spec.context)
            places = entries[token // unit] * unit + token % unit
            for pool in (keys, values):
                pool[places // page, :, places % page] = torch.randn(
                    spec.context, kv_heads, pool.shape[3], generator=generator
                )
        tokens = sum(s.queries for s in specs)
        query = torch.randn(kv_heads * group, tokens, size, generator=generator) * 2
        self.query = query.to(device, dtype).transpose(0, 1)
        self.keys, self.values = keys.to(device, dtype), values.to(device, dtype)
        self.page_table, self.lists = page_table.to(device), lists.to(device)
        self.table = work.row_table(
            [s.queries for s in specs],
            [s.context - s.queries + s.slotless for s in specs],
            [s.context for s in specs],
            list(range(len(specs))),
            [(s.granule or page).bit_length() - 1 for s in specs],
            [s.granule > 0 for s in specs],
        )
        ask_scores(self.table, [s.scored for s in specs])
        self.scaling = size**-0.5

    def expected(self, variant=PLAIN):
        """Outputs `[T, Hq, Dv]` and, per row, softmax weights of the reference."""
        outputs, weights = [], []
        for row, spec in zip(self.table.tolist(), self.specs, strict=True):
            begin = row[work.ROW_TOKEN]
            out, probability = reference.paged_attention(
                self.query[begin : begin + spec.queries],
                self.keys,
                self.values,
                reference.row_places(row, self.page_table, self.lists),
                row[work.ROW_START],
                self.scaling,
                0 if spec.granule else variant.window,
                variant.softcap,
                variant.sinks,
            )
            outputs.append(out)
            weights.append(probability)
        return torch.cat(outputs), weights

    def run(self, *, slots=8, tile=None, unit=1, variant=PLAIN, slack=0, launches=1):
        """Output and token scores `[score slots, units]` of the last of some launches on the same memory."""
        device, heads = self.query.device, self.query.shape[1]
        tokens, value_size = self.query.shape[0], self.values.shape[3]
        most = max(s.queries for s in self.specs)
        tile = tile or tile_for(most, self.group, max(self.query.shape[2], value_size), self.query.element_size())
        planned = self.table.copy()
        planned[:, [work.ROW_START, work.ROW_LENGTH]] += slack
        sizes = tile.queries(self.group), self.group, slots, tile.block_n
        plan = work.plan_work(planned, *sizes, variant.window, slack)
        self.plan, self.tile = plan, tile
        rows, items = (torch.from_numpy(t).to(device) for t in (self.table, plan.items))
        output = torch.full((tokens, heads, value_size), torch.nan, dtype=self.query.dtype, device=device)
        shape = (heads, heads // self.group)
        partials = Partials.empty(plan.partials, tokens, shape, tile.block_m, value_size, device)
        scored = [i for i, s in enumerate(self.specs) if s.scored]
        raw = scores = None
        if scored:
            longest = max(s.context for s in self.specs)
            wanted = max(len(s.scored) for s in self.specs)
            raw = RawScores.empty(len(scored), wanted, longest, shape, tile.block_n, unit, device)
            garbage = torch.tensor([-1, 0x7F7FFFFF, 0x7F800000], dtype=torch.int32)  # as floats NaN, huge, inf
            raw.pieces.view(-1)[:] = garbage[torch.arange(raw.pieces.numel()) % 3].to(device)
            scores = torch.full((len(scored), -(-longest // unit)), -1.0, device=device)
        tables = self.page_table, self.lists, rows, items
        for _ in range(launches):
            for scratch in (partials.output, partials.lse, partials.row_lse, output):
                scratch.fill_(torch.nan)
            mixed_attention(
                self.query, self.keys, self.values, *tables, output, partials, raw, self.scaling, tile, variant
            )
            assert not partials.arrived.any(), "as the next launch needs it"
        if scored:
            slots = torch.tensor(scored, dtype=torch.int32, device=device)
            reduce_scores(raw, partials.row_lse, rows, slots, scores, unit, variant.window)
        return output, scores


def coded_scores(weights: torch.Tensor, block: int, unit: int) -> torch.Tensor:
    """Scores `[units]` of softmax weights `[queries, Hq, L]` that were kept in four bits."""
    stored = min(8, block // 8) if unit % 8 == 0 else 1
    return mean_scores(reference.coded(weights.double(), block, stored), unit // stored)


def check_codes(got: torch.Tensor, codes: torch.Tensor) -> None:
    """Scores by codes are those of `coded_scores`, but where a weight lies between two codes."""
    apart = ((got - codes).abs() > 1e-3 * codes + 1e-9).sum()
    assert apart <= 1 + codes.numel() // 100, f"{apart} of {codes.numel()} scores differ"
    assert ((got - codes).abs() <= 0.5 * codes + 6e-3).all(), "by more than a code"


def check_scores(mixture: Mixture, scores: torch.Tensor, weights: list[torch.Tensor], unit: int) -> None:
    """Scores `[score slots, units]` of a run are those of the reference's weights, one `[queries, Hq, L]` per row.

    A weight, relative to the largest of its block and query, comes back within a fifth, or within _LEAST.
    """
    scored = [(spec, weight) for spec, weight in zip(mixture.specs, weights, strict=True) if spec.scored]
    for got, (spec, weight) in zip(scores, scored, strict=True):
        weight, block = weight[list(spec.scored)], mixture.tile.block_n
        expected = mean_scores(weight, unit)
        row, behind = got[: len(expected)], got[len(expected) :]
        assert ((row - expected).abs() <= 0.205 * expected + _LEAST * _largest(weight, unit, block) + 1e-9).all()
        check_codes(row, coded_scores(weight, block, unit))
        assert (behind == -1).all(), "nothing is written behind a row's units"


def _largest(weight: torch.Tensor, unit: int, block: int) -> torch.Tensor:
    """Per unit, the sum over its tokens of their block's largest weight, averaged over heads and queries."""
    tokens = weight.shape[-1]
    padded = torch.nn.functional.pad(weight, (0, -tokens % block)).unflatten(-1, (-1, block))
    peaks = padded.amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., : -(-tokens // unit) * unit]
    return mean_scores(peaks, unit)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance in the Euclidean norm; NaN anywhere gives NaN."""
    return float((got.double() - expected).norm() / expected.norm())


TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def small_tile(block_m=16, block_n=32) -> Tile:
    """A tile that gives small contexts several blocks."""
    return Tile(block_m, block_n, 4, 2)
