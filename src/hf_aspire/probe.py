"""Asks a model, with a forward of a few tokens, whether it attends the way this package replaces.

Models are judged by what they do, not by their names. Two short rows are packed into one forward, their tokens
interleaved. Every layer must reach our attention exactly once, with the step's context, a causal mask and no keyword
that changes the result; and the logits must be those of the model's own forward of the same two rows, whatever the
cache says that it holds. A model that ignores position ids, mixes neighbouring tokens outside attention or adds a bias
of its own gives others.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .attention import STEP, running, switch
from .cache import LayerSpec
from .compat import CACHE_NAME, PreTrainedModel, input_device
from .model_checks import check_cache, check_model, forward_code, is_training, refusal
from .probe_step import ROWS, TOKENS, ProbeCache, ProbeStep

__all__ = ["ModelFacts", "check_model", "probe_model"]

# Share of a token's logits (as a vector) that may change when it is packed. On SmolLM2-135M rounding changes 2e-6 in
# float32, 0.006 in float16 and 0.05 in bfloat16; counting tokens instead of using position ids changes 0.7, and tokens
# that meet outside attention in one layer 0.47 and more.
_TOLERANCE = 0.01
_HALF_TOLERANCE = 0.25


@dataclass(frozen=True)
class ModelFacts:
    """What the engine needs to know of a model.

    Attributes:
        layers: One entry per decoder layer.
        keeps_logits: Whether the forward computes logits for chosen tokens only (`logits_to_keep`).
        vocabulary: Size of the logits' last dimension.
        device: Where the model takes its input.
        caches_attended: Whether plain's cache holds, in every layer, the keys and values that attention reads. Not so
            where latents are cached and expanded later, or where layers share keys and values.
    """

    layers: tuple[LayerSpec, ...]
    keeps_logits: bool
    vocabulary: int
    device: torch.device
    caches_attended: bool


class _WithoutDropout(TorchFunctionMode):
    """Turns dropout off in this thread, so that a model in training mode can be compared with itself.

    The model's own mode is left alone: other threads may be running it. The call itself drops as plain does. Hidden
    states are dropped token by token, and a token keeps the keys and values of the forward that decided the next one,
    so the text stays a draw from plain's distribution.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


# What a model and its code were when its logits were compared. Whether they agree depends on these and its layers, so
# once is enough (in training mode every time: it may draw random numbers); the packed forward looks at everything else
# in every call.
_compared: WeakKeyDictionary[PreTrainedModel, tuple[ModelFacts, Hashable]] = WeakKeyDictionary()


def probe_model(model: PreTrainedModel, width: int) -> ModelFacts:
    """Runs a few dummy tokens through the model.

    Args:
        model: The model.
        width: Tokens that the longest row may reach, padding included; windows at least as wide are accepted.

    Raises:
        ValueError: The model attends in a way that is not supported; the class and the reasons are named.
    """
    check_cache(model, width)
    tokens, positions = _tokens(model)
    step, cache = ProbeStep(width, tokens.device), ProbeCache(0)
    logits = _packed_logits(model, tokens, positions, step, cache)
    _judge(model, step)
    layers = tuple(step.specs[index] for index in sorted(step.specs))
    attended = {
        index: ((1, layer.kv_heads, TOKENS, layer.key_size), (1, layer.kv_heads, TOKENS, layer.value_size))
        for index, layer in enumerate(layers)
    }
    keeps_logits = model._supports_logits_to_keep()
    facts = ModelFacts(layers, keeps_logits, logits.shape[-1], tokens.device, cache.updates == attended)
    if logits.is_meta:
        return facts
    code = forward_code(model)
    if is_training(model) or _compared.get(model) != (facts, code):
        half = any(layer.dtype.itemsize < 4 for layer in layers)
        change = _change(logits, _own_logits(model, tokens, positions))
        if not change <= (_HALF_TOLERANCE if half else _TOLERANCE):
            trains = is_training(model)
            randomly = "draws random numbers in training mode (call model.eval())" if trains else "is random"
            raise refusal(
                model,
                f"is not supported: packing two rows into one, with position_ids, changes its logits by {change:.0%}; "
                f"it ignores position_ids, computes across tokens outside the shared attention, or {randomly}",
            )
        _compared[model] = facts, code
    if cache.asked:
        other = _packed_logits(model, tokens, positions, ProbeStep(width, tokens.device), ProbeCache(width))
        if not _change(other, logits) <= _TOLERANCE:
            raise refusal(model, "is not supported: it counts the tokens in the cache instead of using position_ids")
    return facts


def _tokens(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Dummy tokens, spread over the vocabulary, and their positions: `[T]` each."""
    device = input_device(model)
    size = model.config.get_text_config(decoder=True).vocab_size
    positions = torch.zeros(TOKENS, dtype=torch.long)
    for row in ROWS:
        positions[list(row)] = torch.arange(len(row))
    return ((2 * torch.arange(TOKENS) + 1) * size // (2 * TOKENS)).to(device), positions.to(device)


def _packed_logits(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, step: ProbeStep, cache: ProbeCache
) -> Tensor:
    """Logits `[T, V]` of the rows, one after the other, from one packed forward."""
    order = [index for row in ROWS for index in row]
    inputs: dict[str, Any] = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        CACHE_NAME: cache,
        "use_cache": True,
        STEP: step,
    }
    keeps_logits = model._supports_logits_to_keep()
    if keeps_logits:
        inputs["logits_to_keep"] = torch.tensor(order, device=tokens.device)
    with switch.on(model), running(step):
        logits = _logits(model, inputs, step)[0]
    return logits if keeps_logits else logits[order]


def _own_logits(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits of the rows, one after the other, from a left-padded forward with the model's own attention."""
    longest = max(len(row) for row in ROWS)
    padded = tokens.new_zeros(3, len(ROWS), longest)
    for index, row in enumerate(map(list, ROWS)):
        padded[:, index, longest - len(row) :] = torch.stack(
            [tokens[row], torch.ones_like(tokens[row]), positions[row]]
        )
    ids, mask, places = padded
    logits = _logits(model, {"input_ids": ids, "attention_mask": mask, "position_ids": places, "use_cache": False})
    return logits[mask.bool().to(logits.device)]


def _logits(model: PreTrainedModel, inputs: dict[str, Any], step: ProbeStep | None = None) -> Tensor:
    try:
        with torch.no_grad(), _WithoutDropout() if is_training(model) else nullcontext():
            logits: Tensor = model(**inputs, return_dict=True).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises here it would raise in the middle of the call
        how = "in a forward of two rows" if step is None else "in a packed forward with this package's attention"
        missed = ", which its layers did not reach" if step is not None and not step.calls else ""
        raise refusal(model, f"fails {how}{missed}: {type(error).__name__}: {error}") from error
    return logits


def _change(packed: Tensor, own: Tensor) -> float:
    """Share of a token's logits `[T, V]` (as a vector) that differs, but for two tokens: routers may flip at ties."""
    packed, own = packed.float().to(own.device), own.float()
    usable = own.isfinite().all(-1)  # half precision may overflow on dummy tokens
    packed, own = packed[usable], own[usable]
    if not len(own):
        return 0.0
    spread = (own - own.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(torch.finfo(own.dtype).tiny)
    shares = (packed - own).norm(dim=-1) / spread
    return float(shares.sort(descending=True).values[min(2, len(shares) - 1)])  # NaN sorts as the largest


def _judge(model: PreTrainedModel, step: ProbeStep) -> None:
    problems = list(step.problems)
    expected = range(model.config.get_text_config(decoder=True).num_hidden_layers)
    odd = [f"layer {index}: {step.calls.count(index)}" for index in expected if step.calls.count(index) != 1]
    if odd or len(step.calls) != len(expected):
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        problems.append(
            "every layer must call the shared attention exactly once and hand its keywords on, got calls of "
            + (", ".join(odd[:3]) + more if odd else f"layers {sorted(set(step.calls) - set(expected))} too")
        )
    if problems:
        raise refusal(model, f"is not supported: {'; '.join(problems)}")
