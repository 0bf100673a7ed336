"""Times the kernels of one layer against the device's copy bandwidth.

    python benchmarks/bench_attention.py --output results/      # checks, then the table
    python benchmarks/bench_attention.py --sweep                # block shapes, to choose `kernels/tiles.py` by

Every figure is the median of CUDA-graph replays; attention with scores and without take turns. Bytes are those of the
keys and values that the rows read.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import triton

from hf_aspire.kernels import reference, work
from hf_aspire.kernels.mixed_attention import Partials, mixed_attention
from hf_aspire.kernels.reduce_scores import reduce_scores
from hf_aspire.kernels.score_store import RawScores
from hf_aspire.kernels.select import select
from hf_aspire.kernels.store_kv import store_kv
from hf_aspire.kernels.tiles import Tile, tile_for

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BYTES_PER_TOKEN = 2 * KV_HEADS * SIZE * DTYPE.itemsize


def seconds(function: Callable[[], None], inner: int = 10, repeats: int = 15) -> float:
    """Median seconds of one call, from replays of a graph of `inner` calls."""
    return medians([function], inner, repeats)[0]


def medians(functions: Sequence[Callable[[], None]], inner: int = 10, repeats: int = 15) -> list[float]:
    """`seconds` of functions that take turns: what they differ by is not the device's drift."""
    graphs = []
    for function in functions:
        for _ in range(2):
            function()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(inner):
                function()
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats + 2):
        for graph, mine in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            mine.append(begin.elapsed_time(end) / 1e3 / inner)
    return [statistics.median(mine[2:]) for mine in times]


def copy_bandwidth() -> float:
    """Bytes per second that a device copy of 4 GiB reads and writes; outside a graph, whose copies are slower."""
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


@dataclass(frozen=True)
class Row:
    """A row of a case: its queries, its context, and the tokens of its list, if it reads one."""

    queries: int
    context: int
    listed: int = 0
    scored: tuple[int, ...] = ()

    @property
    def read(self) -> int:
        return self.listed or self.context


class Case:
    """One layer's tensors for a list of rows, over shuffled pages."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        pages = [-(-row.context // PAGE) for row in rows]
        order = torch.randperm(sum(pages), device=DEVICE).int()
        shape = (sum(pages), KV_HEADS, PAGE, SIZE)
        self.keys = torch.randn(shape, device=DEVICE, dtype=DTYPE)
        self.values = torch.randn(shape, device=DEVICE, dtype=DTYPE)
        self.page_table = torch.zeros(len(rows), max(pages), dtype=torch.int32, device=DEVICE)
        self.lists = torch.zeros(len(rows), max(row.listed for row in rows) or 1, dtype=torch.int32, device=DEVICE)
        for i, mine in enumerate(order.split(pages)):
            self.page_table[i, : pages[i]] = mine
            if rows[i].listed:
                token = torch.randperm(rows[i].context, device=DEVICE)[: rows[i].listed].sort().values
                self.lists[i, : rows[i].listed] = mine[token // PAGE] * PAGE + token % PAGE
        self.tokens = sum(row.queries for row in rows)
        self.query = torch.randn(self.tokens, HEADS, SIZE, device=DEVICE, dtype=DTYPE)
        self.output = torch.full_like(self.query, torch.nan)
        self.table = work.row_table(
            [row.queries for row in rows],
            [row.read - row.queries for row in rows],
            [row.read for row in rows],
            range(len(rows)),
            [0 if row.listed else PAGE.bit_length() - 1 for row in rows],
            [row.listed > 0 for row in rows],
        )
        scored = [index for index, row in enumerate(rows) if row.scored]
        if scored:
            spans = [(0, max(rows[index].queries - 1, 1), len(rows[index].scored)) for index in scored]
            work.ask_scores(self.table, np.array(scored), np.arange(len(scored)), np.array(spans))
        self.bytes = sum(row.read for row in rows) * BYTES_PER_TOKEN

    def without_scores(self) -> np.ndarray:
        table = self.table.copy()
        table[:, work.ROW_SCORE] = -1
        table[:, work.ROW_SCORE_COUNT] = 0
        return table

    def call(self, tile: Tile, unit: int = 0, reduce: bool = True) -> Callable[[], None]:
        """The launches of a layer as one function."""
        group = HEADS // KV_HEADS
        table = self.table if unit else self.without_scores()
        multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        slots = tile.slots(multiprocessors, KV_HEADS)
        plan = work.plan_work(table, tile.queries(group), group, slots, tile.block_n)
        rows, items = (torch.from_numpy(t).to(DEVICE) for t in (table, plan.items))
        partials = Partials.empty(plan.partials, self.tokens, (HEADS, KV_HEADS), tile.block_m, SIZE, DEVICE)
        scored = [i for i, row in enumerate(self.rows) if row.scored] if unit else []
        raw = None
        if scored:
            longest = max(row.context for row in self.rows)
            wanted = max(len(row.scored) for row in self.rows)
            raw = RawScores.empty(len(scored), wanted, longest, (HEADS, KV_HEADS), tile.block_n, unit, DEVICE)
            scores = self.scores = torch.empty(len(scored), -(-longest // unit), device=DEVICE)
            scored_rows = torch.tensor(scored, dtype=torch.int32, device=DEVICE)
        scaling = SIZE**-0.5

        def layer() -> None:
            mixed_attention(
                self.query,
                self.keys,
                self.values,
                self.page_table,
                self.lists,
                rows,
                items,
                self.output,
                partials,
                raw,
                scaling,
                tile,
            )
            if raw is not None and reduce:
                reduce_scores(raw, partials.row_lse, rows, scored_rows, scores, unit)

        return layer

    def check(self, tile: Tile, unit: int = 0) -> float:
        """Largest relative distance of a sampled row's output from the float64 reference."""
        self.output.fill_(torch.nan)
        self.call(tile, unit)()
        worst = 0.0
        for index in {0, len(self.rows) // 2, len(self.rows) - 1}:
            row = self.table[index].tolist()
            begin, count = row[work.ROW_TOKEN], row[work.ROW_QUERIES]
            places = reference.row_places(row, self.page_table, self.lists)
            expected, weights = reference.paged_attention(
                self.query[begin : begin + count],
                self.keys,
                self.values,
                places,
                row[work.ROW_START],
                SIZE**-0.5,
            )
            worst = max(worst, _distance(self.output[begin : begin + count], expected))
            if unit and self.rows[index].scored:
                chosen = reference.reduce_scores(weights[list(self.rows[index].scored)], unit)
                worst = max(worst, _distance(self.scores[row[work.ROW_SCORE], : len(chosen)], chosen))
        return worst


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    value = float((got.double() - expected).norm() / expected.norm())
    return value if value == value else float("inf")


def verify(batch: int, context: int, queries: int) -> list[Row]:
    scored = (0,) if queries == 1 else (0, queries - 1)
    return [Row(queries, context, scored=scored) for _ in range(batch)]


def mixed(drafts: int, verifies: int, queries: int, context: int, share: float = 0.07) -> list[Row]:
    listed = -(-int(share * context) // PAGE) * PAGE
    return [Row(1, context, listed)] * drafts + verify(verifies, context, queries)


CASES: dict[str, tuple[list[Row], float]] = {
    "verify B32x16k, 1 query": (verify(32, 16384, 1), 0.95),
    "verify B32x16k, 8 queries": (verify(32, 16384, 8), 0.95),
    "verify B4x32k, 8 queries": (verify(4, 32768, 8), 0.90),
    "mixed 32k: 28 drafts 7 % + 4 verifies x 8": (mixed(28, 4, 8, 32768), 0.85),
    "mixed 16k: 30 drafts 7 % + 2 verifies x 16": (mixed(30, 2, 16, 16384), 0.85),
    "refresh 16k: the same rows, all of their contexts": (verify(30, 16384, 1) + verify(2, 16384, 16), 0.85),
    "drafts only, B64, 1024 tokens": ([Row(1, 16384, 1024)] * 64, 0.85),
}


def chosen_tile(rows: list[Row]) -> Tile:
    return tile_for(max(row.queries for row in rows), HEADS // KV_HEADS, SIZE, DTYPE.itemsize)


SHAPES = {
    16: ((64, 2, 4), (64, 3, 4), (64, 2, 2), (64, 3, 2)),
    64: ((64, 3, 4), (32, 3, 4), (32, 4, 4), (64, 2, 4)),
}
"""(block_n, stages, warps) per block_m."""


def sweep(bandwidth: float, names: list[str]) -> list[dict[str, object]]:
    """Times block shapes and residencies of the cases, and what scores add to them."""
    found: list[dict[str, object]] = []
    for name in names:
        rows = CASES[name][0]
        case, base = Case(rows), chosen_tile(rows)
        print(f"{name}: block_m {base.block_m}")
        for block_n, stages, warps in SHAPES[base.block_m]:
            results = []
            for resident in (1, 2, 3, 4):
                tile = replace(base, block_n=block_n, warps=warps, stages=stages, resident=resident)
                try:
                    results.append((seconds(case.call(tile), inner=5, repeats=7), resident))
                except triton.runtime.errors.OutOfResources:
                    break
            if not results:
                continue
            time, resident = min(results)
            line = f"  n {block_n:3d} stages {stages} warps {warps}:"
            line += "".join(f" {r}: {case.bytes / t / bandwidth:6.1%}" for t, r in results)
            if name.startswith("verify"):
                tile = replace(tile, resident=resident)
                for reduce in (False, True):
                    scored = seconds(case.call(tile, 1, reduce=reduce), inner=5, repeats=7)
                    line += f" | scores {scored / time - 1:+.1%}"
            print(line, flush=True)
            found += [{"case": name, "seconds": t, **asdict(replace(tile, resident=r))} for t, r in results]
        del case
        torch.cuda.empty_cache()
    return found


def attention_bars(bandwidth: float) -> list[dict[str, object]]:
    """The attention cases with their chosen tiles, and what scores add."""
    results: list[dict[str, object]] = []
    for name, (rows, bar) in CASES.items():
        case, tile = Case(rows), chosen_tile(rows)
        units = () if name.startswith("drafts") else (1, 16)
        errors = [case.check(tile, unit) for unit in (0, *units)]
        ways = [(0, True), *((unit, reduce) for unit in units for reduce in (True, False))]
        time, *scored = medians([case.call(tile, unit, reduce) for unit, reduce in ways])
        share = case.bytes / time / bandwidth
        results.append(_entry(name, time, share=share, bar=bar, error=errors[0], rate=case.bytes / time))
        for i, unit in enumerate(units):
            added, in_pass = (each / time - 1 for each in scored[2 * i : 2 * i + 2])
            kind, bar = ("token", 0.08) if unit == 1 else ("page", 0.05)
            label = f"  + {kind} scores, in the pass {in_pass:+.1%}"
            results.append(_entry(label, scored[2 * i], added=added, bar=bar, error=errors[1 + i]))
        del case
        torch.cuda.empty_cache()
    return results


def selection_bars() -> list[dict[str, object]]:
    """Selection of all lists in one launch, and the store."""
    results: list[dict[str, object]] = []
    for name, layers, rows, units, bar in (
        ("select 64 requests x 8192 pages", 1, 64, 8192, 50e-6),
        ("select 4 requests x 32 layers x 32k tokens", 32, 4, 32768, 300e-6),
        ("select 4 requests x 32 layers x 128k tokens", 32, 4, 131072, None),
    ):
        scores = torch.softmax(4 * torch.randn(layers, rows, units, device=DEVICE), -1)
        count = int(0.07 * units)
        lengths = torch.full((rows,), units, dtype=torch.int32, device=DEVICE)
        counts = torch.full((rows,), count, dtype=torch.int32, device=DEVICE)
        output = torch.empty(layers, rows, count, dtype=torch.int32, device=DEVICE)
        select(scores, lengths, counts, output)
        equal = torch.equal(output.flatten(0, 1).long(), reference.select(scores.flatten(0, 1), count))
        time = seconds(lambda o=output, s=scores, n=lengths, c=counts: select(s, n, c, o))
        results.append(_entry(name, time, limit=bar, error=0.0 if equal else float("inf")))
    keys = torch.empty(4096, KV_HEADS, PAGE, SIZE, device=DEVICE, dtype=DTYPE)
    values = torch.empty_like(keys)
    for tokens in (64, 512):
        slots = torch.randperm(4096 * PAGE, device=DEVICE)[:tokens]
        new = torch.randn(tokens, KV_HEADS, SIZE, device=DEVICE, dtype=DTYPE)
        time = seconds(lambda s=slots, n=new: store_kv(keys, values, s, n, n))
        results.append(_entry(f"store_kv {tokens} tokens", time))
    return results


def _entry(name: str, time: float, **figures: float | None) -> dict[str, object]:
    line = f"{name:48s} {time * 1e6:9.1f} us"
    if (share := figures.get("share")) is not None:
        line += f"  {share:6.1%} of copy (bar {figures['bar']:.0%}), {figures['rate'] / 1e12:.2f} TB/s"
    if (added := figures.get("added")) is not None:
        line += f"  {added:+6.1%} (bar {figures['bar']:.0%})"
    if (limit := figures.get("limit")) is not None:
        line += f"  (bar {limit * 1e6:.0f} us)"
    if (error := figures.get("error")) is not None:
        line += f"  error {error:.1e}"
    print(line, flush=True)
    return {"name": name.strip(), "seconds": time, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    parser.add_argument("--sweep", nargs="*", help="sweep block shapes of the cases whose names hold these words")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(DTYPE),
        "heads": [HEADS, KV_HEADS, SIZE],
        "page": PAGE,
        "copy_bytes_per_second": bandwidth,
    }
    print(f"{about['gpu']}, copy {bandwidth / 1e12:.2f} TB/s")
    if options.sweep is None:
        name, results = "attention", attention_bars(bandwidth) + selection_bars()
    else:
        wanted = [n for n in CASES if not options.sweep or any(word in n for word in options.sweep)]
        name, results = "attention_sweep", sweep(bandwidth, wanted)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**about, "results": results}, indent=1)
        (options.output / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
