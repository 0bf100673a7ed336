"""What the demo prints about its three runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..request import RowKind
from ..stats import AspireStats
from .documents import Document
from .measure import Run
from .models import LoadedModel
from .profile import CostProfile, reads

_ANSWER_CHARACTERS = 160


@dataclass(frozen=True)
class Runs:
    """The same batch, three times."""

    plain: Run
    autoregressive: Run
    aspire: Run

    @property
    def packed_stats(self) -> AspireStats:
        """Of the autoregressive run."""
        return _stats(self.autoregressive)

    @property
    def aspire_stats(self) -> AspireStats:
        """Of the ASPIRE run."""
        return _stats(self.aspire)


def answer_table(loaded: LoadedModel, documents: Sequence[Document], run: Run) -> Table:
    """The documents, the tasks and how the answers begin."""
    table = Table(title="What was asked and answered", title_justify="left", show_lines=True)
    table.add_column("request", justify="right")
    for name, ratio in (("document", 2), ("task", 2), ("answer begins", 4)):
        table.add_column(name, ratio=ratio)
    for request, (document, tokens) in enumerate(zip(documents, run.tokens, strict=True)):
        answer = " ".join(loaded.tokenizer.decode(tokens, skip_special_tokens=True).split())
        table.add_row(str(request), document.title, document.task, escape(answer[:_ANSWER_CHARACTERS]) + " ...")
    return table


def comparison_table(runs: Runs) -> Table:
    """Seconds, rates and forwards of the three runs."""
    table = Table(title="Measured on this machine, one run each", title_justify="left")
    for name in ("", "seconds", "prompts read in", "tokens/s", "tokens/s after the prompts", "forwards per token"):
        table.add_column(name, justify="right" if name else "left")
    for name, run in (("plain", runs.plain), ("autoregressive", runs.autoregressive), ("aspire", runs.aspire)):
        table.add_row(
            name,
            f"{run.seconds:.1f}",
            f"{run.prefill_seconds:.1f} s",
            f"{run.tokens_per_second:.2f}",
            f"{run.decode_tokens_per_second:.2f}",
            f"{run.forwards_per_token:.3f}",
        )
    return table


def explanation(runs: Runs, inputs: dict[str, Any], profile: CostProfile) -> str:
    """What packing and what speculation did, and what the cost profile predicts, marked as such."""
    plain, packed, aspire = runs.plain, runs.autoregressive, runs.aspire
    mask = inputs["attention_mask"]
    padding = 1 - int(mask.sum()) / mask.numel()
    before, after = list(reads(runs.packed_stats)), list(reads(runs.aspire_stats))
    kv_before, kv_after = (sum(step.kv_tokens for step in steps) for steps in (before, after))
    speculation = aspire.decode_tokens_per_second / packed.decode_tokens_per_second
    gain = (aspire.new_tokens - len(aspire.tokens)) / sum(map(profile.seconds, after))
    gain /= (packed.new_tokens - len(packed.tokens)) / sum(map(profile.seconds, before))
    return (
        f"Packing (autoregressive against plain): {packed.tokens_per_second / plain.tokens_per_second:.2f} x the "
        "tokens/s.\n"
        f"  Prompts {plain.prefill_seconds:.1f} s -> {packed.prefill_seconds:.1f} s: {padding:.0%} of what plain "
        "computes is padding, ours has none.\n"
        f"  Then {plain.decode_tokens_per_second:.2f} -> {packed.decode_tokens_per_second:.2f} tokens/s: plain copies "
        "its whole cache at every step and attends to the padding too.\n"
        f"Speculation (aspire against autoregressive): {speculation:.2f} x the tokens/s after "
        "the prompts, on this machine.\n"
        f"  Passes over a whole context {_passes(runs.packed_stats)} -> {_passes(runs.aspire_stats)}, keys and values "
        f"read {kv_before / 1e3:.0f}k -> {kv_after / 1e3:.0f}k tokens ({kv_after / kv_before - 1:+.0%});\n"
        f"  for that, forwards after the prompts {len(before)} -> {len(after)}, query tokens "
        f"{sum(step.queries for step in before)} -> {sum(step.queries for step in after)}.\n"
        f"Predicted by the cost profile, [bold]not measured[/]: on its machine these steps decode {gain:.2f} x the "
        "tokens/s of autoregressive."
    )


def _stats(run: Run) -> AspireStats:
    assert run.stats is not None
    return run.stats


def _passes(stats: AspireStats) -> int:
    """Rows after the prompts that read their whole context."""
    return sum(row.kind in (RowKind.DECODE, RowKind.VERIFY) for step in stats.timeline for row in step.rows)
