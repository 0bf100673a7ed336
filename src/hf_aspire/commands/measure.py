"""Runs a batch by plain `generate` and by this package, with the same clock."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from ..compat import PreTrainedModel
from ..config import AspireConfig
from ..integration import generate
from ..stats import AspireStats

NEAR_TIE = 2e-4
"""Two float32 logits this close may swap places between two orders of summation."""


@dataclass(frozen=True)
class Run:
    """What one way of generating did.

    Attributes:
        tokens: New tokens of every row, its end token included.
        forwards: Model forwards.
        seconds: Of the whole call.
        prefill_seconds: Until every prompt was read.
        decode_tokens_per_second: New tokens of all rows per second after that.
        logits: Plain only: of every step `[B, vocabulary]`, before any processor.
        stats: Ours only.
    """

    tokens: list[list[int]]
    forwards: int
    seconds: float
    prefill_seconds: float
    decode_tokens_per_second: float
    logits: tuple[Tensor, ...] = ()
    stats: AspireStats | None = None

    @property
    def new_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of the whole call."""
        return self.new_tokens / self.seconds

    @property
    def forwards_per_token(self) -> float:
        """Model forwards per new token of all rows."""
        return self.forwards / self.new_tokens


@dataclass(frozen=True)
class Difference:
    """The first token of a row that is not plain's.

    Attributes:
        request: The row.
        position: Which of its new tokens.
        plain: Plain's token; None where plain had ended.
        ours: Our token; None where ours had ended.
        gap: How far plain's own two best logits were apart there.
    """

    request: int
    position: int
    plain: int | None
    ours: int | None
    gap: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap < NEAR_TIE


class _Clock(BaseStreamer):  # type: ignore[misc, unused-ignore]
    """Notes when plain `generate` hands out tokens, which it does once per forward, and moves a progress bar."""

    def __init__(self, rows: int, limit: int, progress: bool) -> None:
        self.times: list[float] = []
        self._rows = rows
        self._bar = tqdm(total=rows * limit, unit="token", disable=not progress, desc="plain, reading the prompts")

    def put(self, value: Tensor) -> None:
        """Called with the prompts, then with one token per row."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self._bar.set_description("plain", refresh=False)
            self._bar.update(self._rows)

    def end(self) -> None:
        """Called once after the last token."""
        self._bar.close()


def run_plain(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    max_new_tokens: int,
    *,
    keep_logits: bool = False,
    progress: bool = False,
    **keywords: Any,
) -> Run:
    """Plain `model.generate`.

    Args:
        model: The model.
        inputs: A left-padded batch, and a cache if there is one already.
        max_new_tokens: Limit per row.
        keep_logits: Keep every step's logits, `[B, vocabulary]` each.
        progress: Show a bar.
        **keywords: Further arguments of `generate`.
    """
    rows, width = inputs["input_ids"].shape
    clock = _Clock(rows, max_new_tokens, progress)
    started = time.perf_counter()
    output = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        streamer=clock,
        output_logits=keep_logits,
        return_dict_in_generate=True,
        **keywords,
    )
    ended = time.perf_counter()
    tokens = _new_tokens(output.sequences, width, model)
    first = clock.times[1]
    decoded = sum(map(len, tokens)) - rows
    return Run(
        tokens=tokens,
        forwards=len(clock.times) - 1,
        seconds=ended - started,
        prefill_seconds=first - started,
        decode_tokens_per_second=decoded / (ended - first),
        logits=output.logits or (),
    )


def run_aspire(
    model: PreTrainedModel, inputs: dict[str, Any], max_new_tokens: int, config: AspireConfig, **keywords: Any
) -> Run:
    """`hf_aspire.generate`; the arguments are those of `run_plain`, and a configuration."""
    collected: list[AspireStats] = []
    config = replace(config, on_stats=collected.append)  # a dict-like output would have to return the cache, too
    started = time.perf_counter()
    sequences = generate(model, **inputs, max_new_tokens=max_new_tokens, aspire_config=config, **keywords)
    ended = time.perf_counter()
    (stats,) = collected
    return Run(
        tokens=_new_tokens(sequences, inputs["input_ids"].shape[1], model),
        forwards=stats.forwards,
        seconds=ended - started,
        prefill_seconds=stats.prefill_seconds,
        decode_tokens_per_second=stats.decode_tokens_per_second,
        stats=stats,
    )


def differences(plain: Run, ours: Run) -> list[Difference]:
    """Where rows first leave plain's text; empty if all tokens are identical."""
    found = []
    for request, (expected, got) in enumerate(zip(plain.tokens, ours.tokens, strict=True)):
        if expected == got:
            continue
        shared = zip(expected, got, strict=False)
        position = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(expected), len(got)))
        theirs, mine = (row[position] if position < len(row) else None for row in (expected, got))
        gap = math.inf
        if theirs is not None and mine is not None:  # else one text just stops, which no rounding explains
            best = torch.topk(plain.logits[position][request].double(), 2).values
            gap = float(best[0] - best[1])
        found.append(Difference(request, position, theirs, mine, gap))
    return found


def machine_load() -> str:
    """Threads and load, without which times on a shared machine mean nothing."""
    load = psutil.getloadavg()[0]
    return f"{torch.get_num_threads()} threads on {os.cpu_count()} cores, load {load:.1f}"


def _new_tokens(sequences: Tensor, width: int, model: PreTrainedModel) -> list[list[int]]:
    """Each row's new tokens up to and with the first that ends it."""
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    rows = []
    for row in sequences[:, width:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:stop])
    return rows
