"""Continues a batch of prompts and prints the texts and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from transformers import TextStreamer

from ..config import AspireConfig
from ..integration import generate
from ..stats import AspireStats
from .models import LoadedModel


def run_answer(
    loaded: LoadedModel,
    prompts: Sequence[str],
    max_new_tokens: int,
    config: AspireConfig,
    console: Console,
    *,
    chat: bool | None = None,
    sample: bool = False,
) -> AspireStats:
    """Continues prompts in one batch. A single text is printed as it grows, several when they are done.

    Args:
        loaded: Model and tokenizer.
        prompts: User messages, or texts to continue.
        max_new_tokens: Per prompt.
        config: How to draft and schedule.
        console: Where to print.
        chat: Use the chat template; None: if there is one.
        sample: Sample by the model's generation config; else greedy.

    Returns:
        The figures of the call, printed too.
    """
    inputs = loaded.batch(prompts, chat)
    streamed = len(prompts) == 1
    collected: list[AspireStats] = []
    sequences = generate(
        loaded.model,
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=sample,
        streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True) if streamed else None,
        aspire_config=replace(config, on_stats=collected.append),
    )
    if not streamed:
        new = sequences[:, inputs["input_ids"].shape[1] :]
        for request, text in enumerate(loaded.tokenizer.batch_decode(new, skip_special_tokens=True)):
            console.print(Rule(f"request {request}", align="left"))
            console.print(escape(text), highlight=False)
    console.print(Rule())
    (stats,) = collected
    console.print(stats.summary(), highlight=False)
    return stats
