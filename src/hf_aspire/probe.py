"""Asks a model, with one forward of two tokens, whether it attends the way this package replaces.

Models are judged by what they do, not by their names: every layer must reach our attention exactly once, with the
step's context, a plain causal mask and no keyword that changes the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attention import STEP, running, scaling_of
from .cache import AspireCache, LayerSpec
from .compat import CACHE_NAME, PreTrainedModel, causal_mask_function, is_sharded, rope_parameters

# Keywords that reach an attention function without changing what it computes for a packed, causal forward.
_NEUTRAL = {"scaling", "dropout", "position_ids", "is_causal", "position_embeddings", "use_cache", CACHE_NAME}


@dataclass(frozen=True)
class ModelFacts:
    """What the engine needs to know of a model.

    Attributes:
        layers: One entry per decoder layer.
        keeps_logits: Whether the forward computes logits for chosen tokens only (`logits_to_keep`).
        vocabulary: Size of the logits' last dimension.
        device: Where the model takes its input.
    """

    layers: tuple[LayerSpec, ...]
    keeps_logits: bool
    vocabulary: int
    device: torch.device


class _Probe:
    """An attention step that only looks."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.calls: list[int] = []
        self.specs: dict[int, LayerSpec] = {}
        self.problems: list[str] = []
        self.uncommon_mask = False
        self.explained_mask = False

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            self._refuse(f"{type(module).__name__} has no layer_idx")
            index = len(self.calls)
        self.calls.append(index)
        if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            self._refuse(f"its attention got keys {tuple(key.shape)} for queries {tuple(query.shape)}")
        self._check_keywords(module, keywords)
        self.specs[index] = LayerSpec(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            dtype=key.dtype,
            device=key.device,
            scaling=scaling_of(query, keywords),
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def mask(self, mask_function: Callable[..., Any] | None) -> None:
        if mask_function is not causal_mask_function:
            self.uncommon_mask = True

    def _check_keywords(self, module: nn.Module, keywords: dict[str, Any]) -> None:
        if getattr(module, "is_causal", True) is False or keywords.get("is_causal") is False:
            self._refuse("its attention is not causal")
        for name, value in keywords.items():
            if value is None or value is False or name in _NEUTRAL:
                continue
            if name == "sliding_window" and isinstance(value, int) and value >= self.width:
                self.explained_mask = True  # a window that this call can never fill is no window
            elif name == "sliding_window":
                self._refuse(f"it attends over a window of {value} tokens and this call may reach {self.width}")
            elif name == "attention_mask":
                self._refuse("it brings an attention mask of its own")
            else:
                self._refuse(f"it gives its attention the keyword {name!r}, which is not supported yet")

    def _refuse(self, reason: str) -> None:
        if reason not in self.problems:
            self.problems.append(reason)


def check_model(model: PreTrainedModel, last_position: int) -> None:
    """Refuses what is known without a forward.

    Args:
        model: The model.
        last_position: Highest position that the call may feed to it.

    Raises:
        ValueError: Encoder-decoder, stateful or sharded models, rotary scaling that may change within the call,
            positions that the model has not learned. The class is named.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"assistant='aspire': {name} is an encoder-decoder; expected a decoder-only model")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"assistant='aspire': {name} is stateful and cannot take back drafted tokens")
    if (how := is_sharded(model)) is not None:
        raise ValueError(f"assistant='aspire': {name} runs under {how}, which is not supported yet")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"assistant='aspire': {name} takes no position_ids, so its rows cannot be packed")
    text_config = model.config.get_text_config(decoder=True)
    for rope in rope_parameters(text_config):
        _check_rope(name, rope, text_config, last_position)
    limit = _learned_positions(model)
    if limit is not None and last_position >= limit:
        raise ValueError(
            f"assistant='aspire': {name} has {limit} learned positions and this call may reach position "
            f"{last_position}; shorten the prompt or lower max_new_tokens"
        )


def _check_rope(name: str, rope: dict[str, Any], config: Any, last_position: int) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in ("dynamic", "longrope"):
        return
    # These types recompute their frequencies from the longest position of a whole forward, for all rows in it.
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    boundary = int(original or config.max_position_embeddings)
    if last_position >= boundary:
        raise ValueError(
            f"assistant='aspire': {name} scales its rotary embedding by {kind!r} beyond {boundary} tokens and this "
            f"call may reach position {last_position}; shorten the prompt or lower max_new_tokens"
        )


def _learned_positions(model: PreTrainedModel) -> int | None:
    words = model.get_input_embeddings()
    sizes = [
        module.num_embeddings - int(getattr(module, "offset", 0))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module is not words and ("pos" in name or "wpe" in name)
    ]
    return min(sizes, default=None)


def probe_model(model: PreTrainedModel, width: int) -> ModelFacts:
    """Runs two dummy tokens through the switched model.

    Args:
        model: The model, its attention already switched to ours.
        width: Tokens that the longest row may reach, padding included; windows at least as wide are accepted.

    Raises:
        ValueError: The model attends in a way that is not supported; the class and the reasons are named.
    """
    probe = _Probe(width)
    device = model.get_input_embeddings().weight.device
    device = model.device if device.type == "meta" else device  # weights offloaded by accelerate
    inputs: dict[str, Any] = {
        "input_ids": torch.zeros(1, 2, dtype=torch.long, device=device),
        "position_ids": torch.arange(2, device=device)[None],
        CACHE_NAME: AspireCache(),
        "use_cache": True,
        "return_dict": True,
        STEP: probe,
    }
    try:
        with running(probe):
            logits = model(**inputs).logits
    except (TypeError, AttributeError, NotImplementedError, IndexError, ValueError) as error:
        raise ValueError(
            f"assistant='aspire': {type(model).__name__} cannot run with this attention: {error}"
        ) from error
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    _judge(type(model).__name__, probe, expected)
    return ModelFacts(
        layers=tuple(probe.specs[index] for index in range(expected)),
        keeps_logits=model._supports_logits_to_keep(),
        vocabulary=logits.shape[-1],
        device=device,
    )


def _judge(name: str, probe: _Probe, expected: int) -> None:
    problems = list(probe.problems)
    if sorted(probe.calls) != list(range(expected)):
        times = {index: probe.calls.count(index) for index in range(expected)}
        odd = ", ".join(f"layer {index}: {count}" for index, count in times.items() if count != 1)
        problems.append(f"every layer must call the shared attention exactly once, got {odd or probe.calls}")
    if probe.uncommon_mask and not probe.explained_mask and not problems:
        problems.append("it builds a mask that is not plain causal")
    if problems:
        raise ValueError(f"assistant='aspire': {name} is not supported: {'; '.join(problems)}")
