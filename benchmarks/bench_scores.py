"""What lists lose to scores of four bits: chosen by codes or by exact weights, on a real model and real texts.

    python benchmarks/bench_scores.py --output results/scores.json

At positions of a text stand two queries eight tokens apart, as the first and the last one of a verify row. Their
softmax weights, averaged over heads and queries, are the scores of a layer's tokens or pages; `reference.coded` makes
of the same weights what the kernels keep. The best 7 % by either are compared: how many are the same, how much of the
true score they hold, and how much of what the next eight queries attend to. Figures are means over positions, layers
and texts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from acceptance_texts import texts
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AttentionInterface

from hf_aspire.commands.models import load_model
from hf_aspire.kernels import reference

SHARE, APART, NEXT, FIRST, EVERY = 0.07, 8, 8, 1500, 450
UNITS = {"tokens, blocks of 64": (1, 1, 64), "tokens, blocks of 128": (1, 1, 128), "pages of 16": (16, 8, 64)}
"""Tokens per unit, per code and per block: kernels use blocks of 128 for heads of up to 64, of 64 for others."""


class Recorder:
    """Attention that keeps what it is given.

    Attributes:
        layers: (queries, keys) `[heads, T, size]` and the scale, by layer.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor, float]] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """As Transformers calls attention."""
        group = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(group, 1) for states in (key, value))
        self.layers[int(module.layer_idx)] = query[0], key[0], scaling
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.transpose(1, 2), None


def weights(query: Tensor, key: Tensor, scaling: float, positions: list[int]) -> Tensor:
    """Softmax weights `[positions, heads, T]` of the queries at some positions, float64."""
    logits = torch.einsum("hqd,hkd->qhk", query[:, positions].double(), key.double()) * scaling
    hidden = torch.arange(key.shape[1])[None] > torch.tensor(positions)[:, None]
    return logits.masked_fill(hidden[:, None], -math.inf).softmax(-1)


def compare(recorded: Recorder, tokens: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Figures of every layer, position and kind of unit."""
    for query, key, scaling in recorded.layers.values():
        for position in range(FIRST, tokens - APART - NEXT, EVERY):
            end = position + APART + 1
            pair = weights(query, key, scaling, [position, end - 1])[..., :end]
            following = weights(query, key, scaling, list(range(end, end + NEXT)))[..., :end]
            for name, (unit, stored, block) in UNITS.items():
                exact = reference.reduce_scores(pair, unit)
                codes = reference.reduce_scores(reference.coded(pair, block, stored), unit // stored)
                later = reference.reduce_scores(following, unit)
                best, chosen = (scores.topk(int(SHARE * len(exact))).indices for scores in (exact, codes))
                yield (
                    name,
                    {
                        "same": float(torch.isin(chosen, best).double().mean()),
                        "of the best score": float(exact[chosen].sum() / exact[best].sum()),
                        "of the next queries, exact": float(later[best].sum()),
                        "of the next queries, codes": float(later[chosen].sum()),
                    },
                )


def main(
    model: Annotated[str | None, typer.Option(help="Hub name or directory; the packaged SmolLM2 without.")] = None,
    tokens: Annotated[int, typer.Option(min=2 * FIRST, help="Of every text.")] = 4096,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Compares lists on every text."""
    torch.set_num_threads(1)
    loaded, recorder = load_model(model, None, device="cpu", dtype="float32"), Recorder()
    AttentionInterface.register("recording", recorder)
    loaded.model.set_attn_implementation("recording")
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for text in texts().values():
        ids = torch.tensor(loaded.tokenizer(text, verbose=False)["input_ids"][:tokens])[None]
        with torch.no_grad():
            loaded.model(ids, use_cache=False, logits_to_keep=1)
        for name, figures in compare(recorder, tokens):
            for figure, value in figures.items():
                found[name][figure].append(value)
    means = {
        name: {figure: statistics.mean(each) for figure, each in figures.items()} for name, figures in found.items()
    }
    table = Table("units", *next(iter(means.values())))
    for name, figures in means.items():
        table.add_row(name, *(f"{value:.5f}" for value in figures.values()))
    Console(width=130).print(table)
    if output is not None:
        versions = {module.__name__: module.__version__ for module in (torch, transformers)}
        about = {"model": loaded.name, "versions": versions, "texts": len(texts()), "tokens": tokens, "share": SHARE}
        output.write_text(json.dumps({**about, "means": means}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
