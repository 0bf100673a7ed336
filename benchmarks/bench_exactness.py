"""How far greedy text stays plain `generate`'s on a real model, in float32 and in half precision.

    python benchmarks/bench_exactness.py --device cuda --output exactness.json

Float32: a ragged batch of 8 (0.3k to 3k tokens, 64 new ones) under every context policy, and once with compiled layers
(on a GPU); TF32 is off. Half precision: 50 prompts of 100 to 500 tokens, 64 new ones each. At every first difference
of a row, how far plain's own two best logits are apart; and how far rounding moves that gap in plain itself, which
float32 tells on the same text.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm

from hf_aspire import AspireConfig
from hf_aspire.commands.documents import long_text
from hf_aspire.commands.measure import Difference, Run, differences, run_aspire, run_plain
from hf_aspire.commands.models import LoadedModel, load_model
from hf_aspire.compat import PreTrainedModel

NEW = 64
POLICIES = ("verify", "refresh", "hybrid", "window")


def prompts(loaded: LoadedModel, lengths: list[int], seed: int) -> dict[str, Tensor]:
    """Stretches of one real text, left-padded."""
    ids = loaded.tokenizer(long_text(), verbose=False)["input_ids"]
    starts = random.Random(seed)
    width, pad = max(lengths), loaded.tokenizer.pad_token_id
    rows, masks = [], []
    for length in lengths:
        first = starts.randrange(len(ids) - length)
        rows.append([pad] * (width - length) + ids[first : first + length])
        masks.append([0] * (width - length) + [1] * length)
    device = loaded.model.device
    return {"input_ids": torch.tensor(rows, device=device), "attention_mask": torch.tensor(masks, device=device)}


def compare(
    model: PreTrainedModel, inputs: dict[str, Tensor], plain: Run, schedules: list[AspireConfig]
) -> list[dict[str, Any]]:
    """Every configuration on the batch that plain ran on."""
    return [
        describe(plain, run_aspire(model, inputs, NEW, config, do_sample=False), config)
        for config in tqdm(schedules, desc=str(model.dtype))
    ]


@torch.no_grad()
def moved_gaps(full: PreTrainedModel, inputs: dict[str, Tensor], plain: Run) -> Tensor:
    """How far rounding moved the gap between plain's two best logits, at every new token of a run in half precision.

    Args:
        full: The same model in float32, which reads plain's text.
        inputs: The batch of the run, left-padded.
        plain: The run, with logits.

    Returns:
        `[tokens]`, of all rows: the distance between the gap in half precision and that of the same two in float32.
    """
    moved = []
    for row, text in enumerate(plain.tokens):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        ids = torch.cat([prompt, torch.tensor(text[:-1], device=prompt.device, dtype=prompt.dtype)])
        expected = full(input_ids=ids[None], logits_to_keep=len(text)).logits[0]
        got = torch.stack([plain.logits[position][row] for position in range(len(text))])
        best, which = got.topk(2)
        change = best - expected.gather(1, which)
        moved.append((change[:, 0] - change[:, 1]).abs())
    return torch.cat(moved)


def describe(plain: Run, run: Run, config: AspireConfig) -> dict[str, Any]:
    """What one configuration did on one batch."""
    found: list[Difference] = differences(plain, run)
    return {
        "context": config.context,
        "schedule": config.schedule,
        "compiled": config.compile is True,
        "rows": len(plain.tokens),
        "new_tokens": run.new_tokens,
        "rows_identical": len(plain.tokens) - len(found),
        "gaps_at_first_differences": sorted(d.gap for d in found),
        "positions_of_first_differences": [d.position for d in found],
    }


def main(
    model: Annotated[str | None, typer.Option(help="Hub name or directory; default: the packaged SmolLM2.")] = None,
    gguf: Annotated[str | None, typer.Option(help="GGUF file within --model.")] = None,
    device: Annotated[str, typer.Option(help="Torch device.")] = "auto",
    half: Annotated[str, typer.Option(help="Half precision to compare in.")] = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Runs both comparisons and prints what differs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    sparse = {"min_pages": 16, "recent_pages": 8, "sparsity": 0.1}
    exact = [AspireConfig(schedule="autoregressive")]
    exact += [AspireConfig(schedule="staggered", context=context, **sparse) for context in POLICIES]
    full = load_model(model, gguf, device, "float32")
    if full.model.device.type == "cuda":
        exact.append(AspireConfig(schedule="staggered", context="verify", compile=True, **sparse))
    rounded = load_model(model, gguf, device, half)
    inputs = prompts(rounded, [100 + 8 * row for row in range(50)], seed=50)
    plain = run_plain(rounded.model, inputs, NEW, keep_logits=True, do_sample=False)
    moved = moved_gaps(full.model, inputs, plain)
    short = [exact[0], AspireConfig(schedule="staggered", min_pages=8, recent_pages=4)]
    found = {half: compare(rounded.model, inputs, plain, short)}
    inputs = prompts(full, [300, 600, 900, 1200, 1600, 2000, 2500, 3000], seed=8)
    plain = run_plain(full.model, inputs, NEW, keep_logits=True, do_sample=False)
    found["float32"] = compare(full.model, inputs, plain, exact)

    table = Table("dtype", "schedule", "context", "compiled", "rows identical", "largest gap where a row leaves plain")
    for dtype, rows in found.items():
        for row in rows:
            gaps = row["gaps_at_first_differences"]
            largest = f"{max(gaps):.2e}" if gaps else "-"
            same = f"{row['rows_identical']} of {row['rows']}"
            table.add_row(dtype, row["schedule"], row["context"], str(row["compiled"]), same, largest)
    console = Console(width=120)
    console.print(table)
    most = f"by up to {moved.max():.2f}, 99 % of them by up to {_high(moved):.2f}"
    console.print(f"Rounding to {half} moves the gaps between plain's two best logits {most}.")
    if output is not None:
        name = torch.cuda.get_device_name() if full.model.device.type == "cuda" else "cpu"
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        rounding = {"positions": len(moved), "largest": float(moved.max()), "99 %": _high(moved)}
        record = {"device": name, "versions": versions, "rounding_of_plains_gaps": rounding, "results": found}
        output.write_text(json.dumps(record, indent=1) + "\n")


def _high(moved: Tensor) -> float:
    return float(moved.quantile(0.99))


if __name__ == "__main__":
    typer.run(main)
