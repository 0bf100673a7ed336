"""What a call did: figures per request and per step, a summary table and a timeline picture. No torch."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from .config import AspireConfig
from .request import RowKind
from .timeline import RowRecord, StepRecord, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTION = (
    "Each lane is one request: it guesses tokens one by one, reading only a small part of the text (low blue blocks). "
    "Then one check with the whole text\n(tall bar) keeps the guesses up to the first wrong one and adds one token of "
    "its own, so the filled height of a bar is the number of tokens gained."
)
STYLES = {  # face colour, edge colour, legend
    "prefill": ("#c9c9c9", "none", "reading the prompt"),
    "draft": ("#56b4e9", "white", "draft: guessing one token"),
    "accepted": ("#009e73", "white", "verify: guess was right, kept"),
    "rejected": ("#fdf0e8", "#d55e00", "verify: guess was wrong, dropped"),
    "own": ("#e69f00", "white", "token from the whole text (alone: plain decoding)"),
}
CLOSE_UP = 50  # steps that the enlarged part shows, so that its numbers stay readable


@dataclass(slots=True)
class AspireStats:
    """What one call of `generate(..., assistant="aspire")` did. Lists have one entry per returned row.

    Tokens behind a stop count nowhere: `committed[i] == 1 + sum(accepted + 1 for the rounds of row i)`, less what a
    stop cut off from the last round.

    Args:
        config: The configuration in effect.
        prompt_tokens: Tokens of each prompt.
        drafted: Drafts that were verified.
        accepted: Drafts that were kept.
        committed: New tokens.
        rounds: (drafted, accepted) of every full-context pass after the prompt; plain decoding gives (0, 0).
        forwards: Model forwards, those that only read prompts included; less those in which all texts had ended.
        steps: Forwards that held at least one row past its prompt.
        rows_drafted: Rows that drafted a token, whether it was needed or not; none of texts that had ended.
        rows_verified: Rows that verified at least one draft.
        tokens_verified: New tokens that those rows committed.
        rows_decoded: Rows that decoded one token plainly.
        mixed_steps: Forwards in which some requests drafted while others verified.
        seconds: From the begin of the first forward to the end of the last.
        prefill_seconds: Seconds spent in forwards that held a piece of a prompt.
        decode_tokens_per_second: New tokens per second after the last such forward.
        timeline: Every forward with its rows: a sequence of `StepRecord`.
    """

    config: AspireConfig
    prompt_tokens: list[int]
    drafted: list[int]
    accepted: list[int]
    committed: list[int]
    rounds: list[list[tuple[int, int]]]
    forwards: int = 0
    steps: int = 0
    rows_drafted: int = 0
    rows_verified: int = 0
    tokens_verified: int = 0
    rows_decoded: int = 0
    mixed_steps: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_tokens_per_second: float = 0.0
    timeline: Timeline = field(default_factory=Timeline, repr=False)

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified drafts that was kept; 0.0 when nothing was drafted."""
        return _ratio(sum(self.accepted), sum(self.drafted))

    @property
    def tokens_per_verify(self) -> float:
        """Mean tokens that a verification of drafts committed; 0.0 when there was none."""
        return _ratio(self.tokens_verified, self.rows_verified)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second, prompts included in the time."""
        return _ratio(sum(self.committed), self.seconds)

    @property
    def forwards_per_token(self) -> float:
        """Model forwards per new token of all rows."""
        return _ratio(self.forwards, sum(self.committed))

    def summary(self) -> str:
        """A printable table: one line per request, then the totals."""
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("request", "prompt tokens", "new tokens", "rounds", "accepted per round", "acceptance"):
            table.add_column(name, justify="right")
        for request, rounds in enumerate(self.rounds):
            drafting = sum(drafted > 0 for drafted, _ in rounds)
            table.add_row(
                str(request),
                str(self.prompt_tokens[request]),
                str(self.committed[request]),
                str(drafting),
                f"{self.accepted[request] / drafting:.2f}" if drafting else "-",
                f"{self.accepted[request] / self.drafted[request]:.1%}" if self.drafted[request] else "-",
            )
        text = io.StringIO()
        Console(file=text, width=100, color_system=None, force_terminal=False, force_jupyter=False).print(table)
        lines = (line.rstrip() for line in text.getvalue().splitlines())
        return "\n".join([*(line for line in lines if line), self._totals()])

    def _totals(self) -> str:
        drafts = f"{self.acceptance_rate:.1%} of {sum(self.drafted)} drafts accepted"
        return (
            f"  batch of {len(self.committed)}: {sum(self.committed)} new tokens in {self.seconds:.2f} s, "
            f"{self.tokens_per_second:.1f} tokens/s ({self.decode_tokens_per_second:.1f} once the prompts were read)\n"
            f"  {self.forwards} forwards ({self.forwards_per_token:.2f} per token), {self.mixed_steps} of them mixed; "
            + (f"{drafts}, {self.tokens_per_verify:.2f} tokens per check" if any(self.drafted) else "no drafts")
        )

    def plot(self, path: str | Path) -> None:
        """Writes a timeline picture: one lane per request, seconds from left to right, an enlarged part below.

        Args:
            path: File to write; its ending (`.png`, `.svg`, `.pdf`) chooses the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("AspireStats.plot needs matplotlib: pip install 'hf-aspire[demo]'") from error
        _draw(self, Figure(layout="constrained", dpi=110)).savefig(path)


class StatsRecorder:
    """Counts while the engine runs; `stats` is up to date after every step.

    Args:
        config: The configuration in effect.
        prompt_tokens: Tokens of each prompt; its length is the number of requests.
    """

    def __init__(self, config: AspireConfig, prompt_tokens: list[int]) -> None:
        zeros = [0] * len(prompt_tokens)
        rounds: list[list[tuple[int, int]]] = [[] for _ in prompt_tokens]
        self.stats = AspireStats(config, list(prompt_tokens), zeros, zeros.copy(), zeros.copy(), rounds)
        self._origin: float | None = None  # when the first forward began
        self._prefill_end = 0.0  # when the last forward with a PREFILL row ended
        self._decoded = 0  # tokens committed since then

    def step(
        self, start: float, end: float, rows: Sequence[RowRecord], decided: Sequence[RowRecord] | None = None
    ) -> None:
        """Records one model forward.

        Args:
            start: When it began, in seconds of any monotonic clock.
            end: When it ended.
            rows: Its rows.
            decided: Rows of this or an earlier forward whose tokens are all decided now; None: those of this one.
        """
        stats = self.stats
        self._origin = start if self._origin is None else self._origin
        start, end = start - self._origin, end - self._origin
        stats.timeline.add(start, end, rows)
        stats.forwards += 1
        stats.seconds = end
        for row in rows if decided is None else decided:
            stats.timeline.update(row)
            self._count_tokens(row)
        kinds = [row.kind for row in rows]
        stats.rows_drafted += kinds.count(RowKind.DRAFT)
        stats.rows_verified += sum(row.kind == RowKind.VERIFY and row.queries > 1 for row in rows)
        stats.rows_decoded += sum(
            row.kind == RowKind.DECODE or (row.kind == RowKind.VERIFY and row.queries <= 1) for row in rows
        )
        stats.steps += set(kinds) != {RowKind.PREFILL}
        stats.mixed_steps += {RowKind.DRAFT, RowKind.VERIFY} <= set(kinds)
        if RowKind.PREFILL in kinds:
            stats.prefill_seconds += end - start
            self._prefill_end, self._decoded = end, 0
        stats.decode_tokens_per_second = _ratio(self._decoded, end - self._prefill_end)

    def _count_tokens(self, row: RowRecord) -> None:
        stats, request = self.stats, row.request
        stats.drafted[request] += row.drafted
        stats.accepted[request] += row.accepted
        stats.committed[request] += row.committed
        self._decoded += row.committed
        if row.kind in (RowKind.DECODE, RowKind.VERIFY):
            stats.rounds[request].append((row.drafted, row.accepted))
        if row.kind == RowKind.VERIFY and row.queries > 1:
            stats.tokens_verified += row.committed

    def finish(self) -> AspireStats:
        """The figures of the whole call."""
        return self.stats


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _cells(row: RowRecord, unit: float) -> Iterator[tuple[str, float, float]]:
    """Style, bottom and height of what a row shows in its lane; `unit` is the height of one token."""
    if row.kind in (RowKind.PREFILL, RowKind.DRAFT):
        yield ("prefill", 0.0, 0.8) if row.kind == RowKind.PREFILL else ("draft", 0.0, max(unit, 0.12))
        return
    own = row.committed - row.accepted
    styles = ["accepted"] * row.accepted + ["own"] * own + ["rejected"] * (row.drafted - row.accepted)
    for level, style in enumerate(styles):
        yield style, level * unit, unit


def _draw(stats: AspireStats, figure: Figure) -> Figure:
    """Lays out the prompts (on a time axis of their own, or they would squeeze the rest), the rest and a close-up."""
    steps, lanes = stats.timeline, len(stats.prompt_tokens)
    prompts = next((i for i, s in enumerate(steps) if all(r.kind != RowKind.PREFILL for r in s.rows)), len(steps))
    panels = 1 if len(steps) - prompts <= CLOSE_UP else 2
    figure.set_size_inches(17, 2.2 + panels * max(2.0, lanes * min(1.0, max(0.3, 12 / max(lanes, 1)))))
    grid = figure.add_gridspec(panels, 2, width_ratios=(1, 7))
    first, second = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    _draw_steps(first, stats, steps[:prompts], "Reading the prompts")
    _draw_steps(second, stats, steps[prompts:], "After the prompts", numbers=panels == 1)
    second.set_yticklabels([])
    if panels == 2:
        middle = (prompts + len(steps) - CLOSE_UP) // 2
        close_up, axis = steps[middle : middle + CLOSE_UP], figure.add_subplot(grid[1, :])
        _draw_steps(axis, stats, close_up, f"Close-up of {CLOSE_UP} steps", numbers=True)
    title = f"ASPIRE, batch of {lanes}: {sum(stats.committed)} new tokens in {stats.seconds:.1f} s"
    keys = second.get_legend_handles_labels()
    figure.legend(*keys, loc="outside upper center", ncols=5, frameon=False, title=title, title_fontsize=16)
    figure.supxlabel(CAPTION, fontsize=11)
    return figure


def _draw_steps(axis: Axes, stats: AspireStats, steps: list[StepRecord], title: str, numbers: bool = False) -> None:
    """Draws every row of `steps` as a bar in its request's lane."""
    from matplotlib.collections import PolyCollection

    lanes = len(stats.prompt_tokens)
    width = 0.6 if lanes <= 8 else 0.2  # of outlines, which would cover small cells
    unit = 0.8 / (1 + max((drafted for rounds in stats.rounds for drafted, _ in rounds), default=0))
    bars: dict[str, list[list[tuple[float, float]]]] = {style: [] for style in STYLES}
    for step in steps:
        for row in step.rows:
            base = row.request + 0.45  # the axis points down
            for style, bottom, height in _cells(row, unit):
                low, high = base - bottom, base - bottom - height
                bars[style].append([(step.start, low), (step.start, high), (step.end, high), (step.end, low)])
            if numbers and row.drafted:
                text, x = f"{row.accepted}/{row.drafted}", (step.start + step.end) / 2
                axis.text(x, base - unit * (row.drafted + 1), text, fontsize=8, ha="center", va="bottom")
    for style, (face, edge, label) in STYLES.items():
        axis.add_collection(PolyCollection(bars[style], facecolor=face, edgecolor=edge, linewidth=width, label=label))
    axis.set_title(f"{title} (numbers: guesses kept / checked)" if numbers else title, fontsize=11, loc="left")
    axis.margins(x=0.01)
    axis.autoscale_view(scaley=False)
    axis.set(ylim=(lanes - 0.45, -0.6), xlabel="seconds since the start", yticks=range(lanes))
    size = 9 if lanes <= 12 else 6
    axis.set_yticklabels([f"request {i}\n{p} tokens" for i, p in enumerate(stats.prompt_tokens)], fontsize=size)
    for lane in range(lanes):
        axis.axhline(lane + 0.45, color="#888888", linewidth=0.5)
