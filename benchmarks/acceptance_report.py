"""Turns acceptances into rows, a table and a picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from acceptance_variants import FULL, Measured, Variant
from matplotlib.figure import Figure
from numpy.typing import NDArray

Results = Mapping[str, Mapping[Variant, Measured]]
Row = dict[str, Any]
ALL = "all"
"""Name of the rows that average over texts; their standard errors take a text as one observation."""
_COLORS = {"verify": "tab:blue", "hybrid": "tab:green", "refresh": "tab:orange", "window": "tab:gray"}


def expected_tokens(acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expected accepted tokens per position: the sum over depths of the product of acceptances so far."""
    return acceptance.cumprod(1).sum(1)


def rows(results: Results) -> list[Row]:
    """One row per text and variant, then one per variant over all texts.

    `*_se` are standard errors, over positions in a text's row and over texts in a row of `all`. `*_gain` are paired
    differences to `verify` with single tokens and the same budget, and `texts_better` counts texts where that of the
    expected tokens is positive; `equal_gain` is the one to `verify` with the budget `equal_budget`, which reads about
    as much.
    """
    found = [_row(text, variant, measured) for text, measured in results.items() for variant in measured]
    variants = list(next(iter(results.values())))
    return found + [_pooled([row for row in found if _variant(row) == variant]) for variant in variants]


def _row(text: str, variant: Variant, measured: Mapping[Variant, Measured]) -> Row:
    acceptance = measured[variant].acceptance.numpy()
    row: Row = {
        "text": text,
        "policy": variant.policy,
        "granularity": variant.granularity,
        "budget": variant.budget,
        "positions": len(acceptance),
        "tokens_read": measured[variant].tokens_read,
    }
    figures = {"acceptance": acceptance.mean(1), "tokens": expected_tokens(acceptance)}
    for name, values in figures.items():
        row[name], row[f"{name}_se"] = _mean(values)
    if variant.policy != FULL:
        reference = measured[Variant("verify", 1, variant.budget)].acceptance.numpy()
        row["acceptance_gain"], row["acceptance_gain_se"] = _mean(figures["acceptance"] - reference.mean(1))
        row["tokens_gain"], row["tokens_gain_se"] = _mean(figures["tokens"] - expected_tokens(reference))
        row["texts_better"] = int(row["tokens_gain"] > 0)
        equal = _equal_reads(variant, measured)
        row["equal_budget"] = equal.budget
        row["equal_gain"], row["equal_gain_se"] = _mean(
            figures["tokens"] - expected_tokens(measured[equal].acceptance.numpy())
        )
    return row | {f"depth_{depth + 1}": value for depth, value in enumerate(acceptance.mean(0))}


def _equal_reads(variant: Variant, measured: Mapping[Variant, Measured]) -> Variant:
    """The `verify` variant with single tokens that reads about as much."""
    known = [other for other in measured if other.policy == "verify" and other.granularity == 1]
    wanted = measured[variant].tokens_read
    return min(known, key=lambda other: abs(measured[other].tokens_read - wanted))


def _pooled(found: Sequence[Row]) -> Row:
    row: Row = dict(found[0]) | {"text": ALL}
    for name in row.keys() - {"text", "policy", "granularity", "budget", "equal_budget"}:
        values = [entry[name] for entry in found]
        if name in ("positions", "texts_better"):
            row[name] = sum(values)
        elif not name.endswith("_se"):
            row[name], error = _mean(np.array(values))
            if f"{name}_se" in row:
                row[f"{name}_se"] = error
    return row


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and its standard error (NaN of a single value)."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def _variant(row: Row) -> Variant:
    return Variant(row["policy"], row["granularity"], row["budget"])


def write_csv(path: Path, found: Sequence[Row]) -> None:
    """Writes rows, numbers with six digits; what a row does not have stays empty."""
    names = list(next(row for row in found if row["policy"] != FULL))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        for row in found:
            writer.writerow({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in row.items()})


def read_csv(path: Path) -> list[Row]:
    """Reads what `write_csv` wrote."""
    words = ("text", "policy")
    counts = ("granularity", "budget", "positions", "texts_better", "equal_budget")
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {k: v if k in words else int(v) if k in counts else float(v) for k, v in row.items() if v != ""}
            for row in csv.DictReader(file)
        ]


def table(found: Sequence[Row]) -> str:
    """The rows of all texts as a Markdown table."""
    lines = [
        "| policy | granularity | budget | read | acceptance | expected tokens | minus `verify` 1 | better on "
        "| at equal reads, minus `verify` 1 | with |",
        "|" + " --- |" * 10,
    ]
    texts = len({row["text"] for row in found}) - 1
    for row in (row for row in found if row["text"] == ALL):
        cells = [row["policy"], row["granularity"] or "-", row["budget"] or "-", f"{row['tokens_read']:.0f}"]
        cells += [_error(row, "acceptance", ".3f"), _error(row, "tokens", ".2f")]
        if "tokens_gain" in row and _variant(row) != Variant("verify", 1, row["budget"]):
            cells += [_error(row, "tokens_gain", "+.2f"), f"{row['texts_better']} of {texts}"]
            cells += [_error(row, "equal_gain", "+.2f"), row["equal_budget"]]
        else:
            cells += [""] * 4
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _error(row: Row, name: str, style: str) -> str:
    return f"{row[name]:{style}} ± {row[f'{name}_se']:{style.lstrip('+')}}"


def text_table(found: Sequence[Row], budget: int) -> str:
    """Expected tokens per text of every policy with single tokens, as a Markdown table."""
    policies = ("verify", "hybrid", "refresh", "window")
    lines = [f"| text | {' | '.join(policies)} |", "| --- |" + " --- |" * len(policies)]
    for text in dict.fromkeys(row["text"] for row in found):
        of_text = {
            row["policy"]: row
            for row in found
            if row["text"] == text and row["budget"] == budget and row["granularity"] in (0, 1)
        }
        cells = [f"{of_text[policy]['acceptance']:.3f} ({of_text[policy]['tokens']:.2f})" for policy in policies]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path, found: Sequence[Row], title: str, budget: int) -> None:
    """Draws acceptance by depth, expected tokens by budget, and what granularity changes.

    Args:
        path: PNG to write.
        found: Rows.
        title: Of the picture.
        budget: Of the first and the last panel.
    """
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    by_depth, by_reads, by_unit = figure.subplots(1, 3)
    pooled = [row for row in found if row["text"] == ALL and row["policy"] != FULL]
    depths = [name for name in pooled[0] if name.startswith("depth_")]
    units = sorted({row["granularity"] for row in pooled if row["granularity"]})
    for place, (policy, color) in enumerate(_COLORS.items()):
        mine = [row for row in pooled if row["policy"] == policy]
        single = [row for row in mine if row["granularity"] in (0, 1)]
        style = {"color": color, "label": policy, "capsize": 3, "marker": "o", "markersize": 4}
        curve = next(row for row in single if row["budget"] == budget)
        by_depth.plot(range(1, len(depths) + 1), [curve[d] for d in depths], color=color, marker=".", label=policy)
        single.sort(key=lambda row: row["tokens_read"])
        read, tokens, errors = ([row[name] for row in single] for name in ("tokens_read", "tokens", "tokens_se"))
        by_reads.errorbar([x * 1.01 ** (place - 1.5) for x in read], tokens, errors, **style)
        of_budget = [row for row in mine if row["budget"] == budget]
        at = [units.index(r["granularity"]) if r["granularity"] else (len(units) - 1) / 2 for r in of_budget]
        gains, errors = [r["tokens_gain"] for r in of_budget], [r["tokens_gain_se"] for r in of_budget]
        by_unit.errorbar([x + 0.1 * (place - 1.5) for x in at], gains, errors, linestyle="", **style)
    by_depth.set(xlabel="draft depth", ylabel="acceptance", title=f"acceptance, granularity 1, budget {budget}")
    by_reads.set(xlabel="KV tokens read per draft, mean over layers", ylabel="expected accepted tokens")
    by_reads.set(title=f"expected accepted tokens of {len(depths)}, granularity 1", xscale="log")
    by_reads.set_xticks([256, 512, 1024], ["256", "512", "1024"])
    by_reads.minorticks_off()
    by_unit.axhline(0, color="black", linewidth=0.8)
    by_unit.set(xlabel="granularity in tokens (window has none)", ylabel="difference in expected accepted tokens")
    by_unit.set(title=f"paired difference to verify 1, budget {budget}")
    by_unit.set_xticks(range(len(units)), [str(unit) for unit in units])
    for axes in (by_depth, by_reads, by_unit):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.suptitle(f"{title}; bars: standard error over texts", fontsize=11)
    figure.savefig(path, dpi=110)
