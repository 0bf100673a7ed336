"""From what `generate` prepared to requests, and from finished requests to what `generate` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arguments import check_processors
from .attention import switch
from .call import Call
from .compat import CACHE_NAME, GenerateDecoderOnlyOutput
from .model_checks import is_training
from .noise import row_key
from .probe import check_model, probe_model
from .prompt import Prompt, read_prompt
from .request import Request
from .session import Session
from .stats import AspireStats


@dataclass
class AspireOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns: plain's fields and the call's statistics."""

    aspire_stats: AspireStats | None = None


def run(call: Call) -> Tensor | AspireOutput:
    """Decodes a prepared call.

    Raises:
        ValueError: Something about the model, the inputs or the memory cannot be served; nothing is left changed.
    """
    model = call.model
    try:
        check_processors(call.processors)
        prompt = read_prompt(call)
        requests = _requests(call, prompt)
        check_model(model, max(request.position(request.limit - 1) - 1 for request in requests))
        with switch.on(model):
            facts = probe_model(model, prompt.visible.shape[1] + call.limit)
            # Dropout makes equal prompts differ.
            same = range(len(requests)) if is_training(model) else _same_prompts(prompt, requests)
            with _current(facts.device), closing(Session(call, prompt, requests, same, facts)) as session:
                session.decode()
                return _result(call, session)
    finally:
        if call.streamer is not None:
            call.streamer.end()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: kernels, events and captures go there, whichever GPU the caller's is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _requests(call: Call, prompt: Prompt) -> list[Request]:
    """One request per row, with its fed tokens, limit and noise key."""
    seed = call.config.seed
    if seed is None:
        seed = int(torch.randint(2**62, ()).item()) if call.samples else 0
    seen: Counter[bytes] = Counter()
    requests = []
    for row, visible in enumerate(prompt.visible):
        fed = visible.copy()
        fed[-1] = True
        fed[: prompt.cached] = False
        columns = np.flatnonzero(fed) - prompt.cached
        text = prompt.bytes_of(row, columns)
        requests.append(
            Request(
                row=row,
                columns=columns,
                positions=prompt.positions[row, columns],
                kept=int(visible.sum()),
                limit=call.limit,
                noise_key=row_key(seed, text, seen[text]),
                cached_columns=np.flatnonzero(visible[: prompt.cached]),
            )
        )
        seen[text] += 1
    return requests


def _same_prompts(prompt: Prompt, requests: Sequence[Request]) -> list[int]:
    """For every request the first one with the same tokens, positions and visibility; its own with a cache."""
    if prompt.cached:
        return list(range(len(requests)))
    first: dict[tuple[bytes, bytes, int], int] = {}
    keys = ((prompt.bytes_of(r.row, r.columns), r.positions.tobytes(), r.kept) for r in requests)
    return [first.setdefault(key, index) for index, key in enumerate(keys)]


def _result(call: Call, session: Session) -> Tensor | AspireOutput:
    """What `generate` returns; a cache that was passed in is extended first, as plain does."""
    stats = session.stats
    if call.config.on_stats is not None:
        call.config.on_stats(stats)
    sequences = session.sequences()
    cache = session.extended_cache()
    if not call.generation_config.return_dict_in_generate:
        return sequences
    columns = sequences.shape[1] - call.input_ids.shape[1]
    return AspireOutput(
        sequences=sequences,
        scores=session.outputs.scores_so_far(columns),
        logits=session.outputs.logits_so_far(columns),
        aspire_stats=stats,
        **{CACHE_NAME: cache if cache is not None else session.returned_cache()},
    )
