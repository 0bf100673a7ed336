"""The prompts of a call: what is fed, where it stands, and what a passed-in cache holds of it already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .arguments import check_keywords, check_prompt, refuse
from .cache import AspireCache
from .call import Call
from .compat import CACHE_NAME
from .conversation import Prefix

_EXPECTED = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE_NAME, "use_cache", "logits_to_keep"}


@dataclass(frozen=True)
class Prompt:
    """The padded prompts of a batch, M columns of which the last N are fed.

    Attributes:
        visible: `[B, M]` bool.
        positions: `[B, N]` position ids.
        ids: `[B, N]` token ids; empty columns where embeddings stand for them.
        embeds: `[B, N, H]` embeddings that are fed instead of tokens, or None.
        prefix: What a passed-in cache holds of the first columns, or None.
    """

    visible: NDArray[np.bool_]
    positions: NDArray[np.int64]
    ids: NDArray[np.int64]
    embeds: Tensor | None
    prefix: Prefix | None

    @property
    def cached(self) -> int:
        """Columns that are in a cache already."""
        return self.visible.shape[1] - self.positions.shape[1]

    def bytes_of(self, row: int, columns: NDArray[np.int64]) -> bytes:
        """A row's text at some of the fed columns, to tell texts apart."""
        if self.embeds is None:
            return np.ascontiguousarray(self.ids[row, columns], dtype="<i8").tobytes()
        picked = self.embeds[row, torch.from_numpy(columns).to(self.embeds.device)]
        return picked.to("cpu", torch.float64).numpy().tobytes()


def read_prompt(call: Call) -> Prompt:
    """Asks the model for its prefill inputs, once, and refuses what it adds to them.

    Raises:
        ValueError: Shapes that do not fit together, inputs that are not supported; what was got is named.
    """
    keywords = dict(call.model_keywords)
    prefix = Prefix.of(keywords.pop(CACHE_NAME, None), call.input_ids.shape[0])
    embeds = keywords.get("inputs_embeds")
    check_keywords(call.model, keywords)
    given = call.input_ids if embeds is None else embeds[..., 0]
    cached = prefix.columns if prefix else 0
    mask = keywords.get("attention_mask")
    columns = _columns(call, given.shape[1], mask, cached)
    check_prompt(call.input_ids, mask, keywords.get("position_ids"), (given.shape[0], columns), embeds is not None)
    fed = columns - cached
    inputs = call.model.prepare_inputs_for_generation(
        call.input_ids,
        next_sequence_length=fed if fed != given.shape[1] or embeds is not None else None,
        is_first_iteration=True,
        **{CACHE_NAME: AspireCache()},
        **keywords,
    )
    _check_prepared(type(call.model).__name__, inputs, call.input_ids[:, -fed:] if embeds is None else None)
    visible = torch.ones(given.shape[0], columns, dtype=torch.bool) if mask is None else mask.cpu() != 0
    positions = inputs["position_ids"].cpu().long().expand(given.shape[0], fed)
    return Prompt(
        visible=visible.numpy(),
        positions=positions.numpy(),
        ids=call.input_ids[:, -fed:].cpu().long().numpy(),
        embeds=None if embeds is None else inputs["inputs_embeds"],
        prefix=prefix,
    )


def _columns(call: Call, given: int, mask: Any, cached: int) -> int:
    """Columns of the whole padded prompt: with a cache, plain takes the whole text, or new tokens and a whole mask."""
    columns = int(mask.shape[1]) if mask is not None else getattr(call.generation_config, "_mask_length", given)
    if cached and columns - cached < 1:
        raise refuse(
            f"got {given} columns of tokens, an attention_mask of {columns} and a cache of {cached}: expected the "
            f"whole text, or the new tokens with a mask of the whole text; at least one column must be new"
        )
    if given not in (columns, columns - cached):
        raise refuse(f"got {given} columns of tokens for a mask of {columns} and a cache of {cached}")
    return columns


def _check_prepared(name: str, inputs: dict[str, Any], ids: Tensor | None) -> None:
    added = sorted(key for key, value in inputs.items() if key not in _EXPECTED and value is not None)
    if added:
        raise refuse(f"{name} adds {', '.join(added)} to its inputs, which is not supported")
    if ids is not None and (inputs.get("input_ids") is None or not torch.equal(inputs["input_ids"].cpu(), ids.cpu())):
        raise refuse(f"{name} replaces input_ids before its forward, which is not supported")
    if not isinstance(inputs.get(CACHE_NAME), AspireCache):
        raise refuse(f"{name} replaces the cache before its forward, which is not supported")
    if inputs.get("position_ids") is None:
        raise refuse(f"{name} prepares no position_ids, so its rows cannot be packed")
