"""The demo: real documents in one ragged batch, by plain `generate`, by our plain decoding, and by ASPIRE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..config import AspireConfig
from .documents import Document
from .measure import NEAR_TIE, Run, differences, machine_load, run_aspire, run_plain
from .models import LoadedModel
from .profile import LARGE_MODEL, CostProfile
from .report import Runs, answer_table, comparison_table, explanation

# The default floor of 512 tokens is meant for contexts from 7k tokens on. These documents are shorter: with this one a
# draft reads a tenth of a long document and an eighth of the shortest, half of that its newest tokens.
SPARSITY, MIN_PAGES, RECENT_PAGES = 0.1, 8, 4


def run_demo(
    loaded: LoadedModel,
    documents: list[Document],
    max_new_tokens: int,
    picture: Path,
    console: Console,
    profile: CostProfile = LARGE_MODEL,
) -> bool:
    """Runs the batch three times, prints what came out and what it took, and writes the timeline of the last.

    Args:
        loaded: Model and tokenizer.
        documents: What to answer.
        max_new_tokens: Per document; an answer may end earlier by itself.
        picture: File to write.
        console: Where to print.
        profile: Costs that the ASPIRE run schedules by.

    Returns:
        Whether all tokens are plain's, near-ties aside.
    """
    inputs = loaded.batch([document.prompt for document in documents])
    lengths = inputs["attention_mask"].sum(1).tolist()
    console.print(
        f"[bold]{loaded.name}[/], {str(loaded.model.dtype).removeprefix('torch.')}, greedy, {machine_load()}. "
        f"{len(documents)} documents of {', '.join(map(str, lengths))} tokens in one left-padded batch; up to "
        f"{max_new_tokens} new tokens each, fewer where the model ends its answer."
    )
    runs = _run_all(loaded, inputs, max_new_tokens, profile, console)
    stats = runs.aspire_stats
    console.print()
    console.print(answer_table(loaded, documents, runs.aspire))
    console.print("\n[bold]ASPIRE, request by request[/]")
    console.print(stats.summary(), highlight=False)
    console.print()
    console.print(comparison_table(runs))
    console.print(explanation(runs, inputs, profile), highlight=False)
    console.print(f"({machine_load()} at the end.)\n", highlight=False)
    stats.plot(picture)
    console.print(f"[bold]{picture}[/] shows every step of the ASPIRE run, one lane per request.")
    return print_verdict(loaded, runs, console)


def demo_config(profile: CostProfile) -> AspireConfig:
    """What the demo changes in the defaults."""
    return AspireConfig(
        sparsity=SPARSITY, min_pages=MIN_PAGES, recent_pages=RECENT_PAGES, cost=profile.cost, progress=True
    )


def _run_all(
    loaded: LoadedModel, inputs: dict[str, Any], max_new_tokens: int, profile: CostProfile, console: Console
) -> Runs:
    model, config = loaded.model, demo_config(profile)
    short = {name: torch.ones_like(value[:, :8]) for name, value in inputs.items()}
    run_plain(model, short, 2, do_sample=False)  # first calls set up threads and kernels
    run_aspire(model, short, 2, AspireConfig(schedule="autoregressive"), do_sample=False)

    console.print("\n[bold]1/3[/] plain [bold]generate[/]")
    plain = run_plain(model, inputs, max_new_tokens, keep_logits=True, progress=True, do_sample=False)

    console.print("\n[bold]2/3[/] our engine without speculation ([bold]schedule='autoregressive'[/])")
    packed = AspireConfig(schedule="autoregressive", progress=True)
    autoregressive = run_aspire(model, inputs, max_new_tokens, packed, do_sample=False)

    floor, usual_floor = MIN_PAGES * config.page_size, AspireConfig.min_pages * config.page_size
    console.print(
        f"\n[bold]3/3 ASPIRE[/]. A draft reads {SPARSITY:.0%} of a context, at least {floor} tokens (the default "
        f"floor of {usual_floor} is for longer texts). For a small batch on a CPU arithmetic takes the time, not the "
        "reading of keys and values, and speculation does not pay. To show it at work, the scheduler is told the "
        f"costs of a machine where it does:\n{profile.describe()}."
    )
    aspire = run_aspire(model, inputs, max_new_tokens, config, do_sample=False)
    return Runs(plain, autoregressive, aspire)


def print_verdict(loaded: LoadedModel, runs: Runs, console: Console) -> bool:
    """Says whether the tokens are plain's; a difference counts unless plain's own two best logits nearly tie there."""
    good = True
    ours: dict[str, Run] = {"autoregressive": runs.autoregressive, "aspire": runs.aspire}
    for name, run in ours.items():
        found = differences(runs.plain, run)
        for d in found:
            plain, other = (
                repr(loaded.tokenizer.decode([t])) if t is not None else "no token" for t in (d.plain, d.ours)
            )
            reason = f"a near-tie, below {NEAR_TIE:g}" if d.near_tie else "[bold red]rounding does not explain it[/]"
            console.print(
                f"{name}, request {d.request}, new token {d.position}: plain has {plain}, ours {other}; plain's two "
                f"best logits are {d.gap:.1e} apart: {reason}"
            )
        good = good and all(d.near_tie for d in found)
        if not found:
            console.print(f"[green]{name}: all {run.new_tokens} tokens are identical to plain generate's.[/]")
    return good
