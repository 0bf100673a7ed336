"""Refuses models by what is known of them without running them."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Hashable
from typing import Any

from torch import nn

from .compat import PreTrainedModel, is_sharded, plain_cache, rope_parameters


def refusal(model: PreTrainedModel, reason: str) -> ValueError:
    """The error of a model that cannot be served: names its class and what it does."""
    return ValueError(f"assistant='aspire': {type(model).__name__} {reason}")


def check_kind(model: PreTrainedModel) -> None:
    """Refuses what no prompt could change.

    Raises:
        ValueError: Encoder-decoder, stateful or sharded models, and those without position ids. The class is named.
    """
    if model.config.is_encoder_decoder:
        raise refusal(model, "is an encoder-decoder; expected a decoder-only model")
    if getattr(model, "_is_stateful", False):
        raise refusal(model, "is stateful and cannot take back drafted tokens")
    if (how := is_sharded(model)) is not None:
        raise refusal(model, f"runs under {how}, which is not supported yet")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise refusal(model, "takes no position_ids, so its rows cannot be packed")


def check_model(model: PreTrainedModel, last_position: int) -> None:
    """Refuses what is known without a forward.

    Args:
        model: The model.
        last_position: Highest position that the call may feed to it.

    Raises:
        ValueError: As `check_kind`; rotary scaling that may change within the call, positions that the model has not
            learned. The class is named.
    """
    check_kind(model)
    _warn(model)
    config = model.config.get_text_config(decoder=True)
    for rope in rope_parameters(config):
        boundary = _rope_boundary(rope, config)
        if boundary is not None and last_position >= boundary:
            raise refusal(
                model,
                f"scales its rotary embedding by {rope['rope_type']!r} beyond {boundary} tokens and this call may "
                f"reach position {last_position}; shorten the prompt or lower max_new_tokens",
            )
    limit = _learned_positions(model)
    if limit is not None and last_position >= limit:
        raise refusal(
            model,
            f"has {limit} learned positions and this call may reach position {last_position}; "
            "shorten the prompt or lower max_new_tokens",
        )


def is_training(model: PreTrainedModel) -> bool:
    """Whether a model, or dropout that was added to it, is in training mode."""
    return model.training or any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in model.modules())


def forward_code(model: nn.Module) -> Hashable:
    """What code a model's forward runs: that of its classes and their bases, of instances, and hooks.

    Somebody may replace any of them between two calls. Not seen: other functions, and what code does by itself.
    """
    modules = list(model.modules())
    classes = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    hooks = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
    return (
        tuple(_reference(vars(base)["forward"]) for base in classes if "forward" in vars(base)),
        tuple((_reference(module), _reference(vars(module).get("forward"))) for module in modules),
        tuple(tuple(own) for module in modules for own in (module._forward_pre_hooks, module._forward_hooks)),
        tuple(tuple(every) for every in hooks),
    )


def _reference(thing: object) -> Hashable:
    """What equals that of the same object alone, and keeps nothing alive: others may get the address of a dead one."""
    try:
        return weakref.ref(thing)
    except TypeError:  # None, and objects of compiled extensions
        return id(thing)


def _warn(model: PreTrainedModel) -> None:
    """Warns of what works, but not as its owner may think."""
    name = type(model).__name__
    if is_training(model):
        warnings.warn(
            f"{name} is in training mode: with dropout its text is random, as plain generate's is; "
            "call model.eval() before generating",
            RuntimeWarning,
            stacklevel=2,
        )
    if getattr(getattr(model.config, "quantization_config", None), "load_in_8bit", False):
        warnings.warn(
            f"{name} is quantised with LLM.int8, whose result for a token depends on the other tokens of its forward: "
            "verified text may differ from one-by-one decoding beyond rounding",
            UserWarning,
            stacklevel=2,
        )


def check_cache(model: PreTrainedModel, width: int) -> None:
    """Refuses models by the cache that plain `generate` makes for them: ours keeps all keys and values, nothing else.

    Args:
        model: The model.
        width: Tokens that the longest row may reach, padding included.

    Raises:
        ValueError: A state that cannot be taken back, or a window that the call may leave. The class is named.
    """
    cache = plain_cache(model)
    if cache is None:
        raise refusal(model, "keeps its state in a cache of its own, which is not supported")
    for index, layer in enumerate(cache.layers):
        if not layer.is_croppable:
            kind = type(layer).__name__
            raise refusal(model, f"is stateful: the {kind} of layer {index} cannot take back drafted tokens")
        window = getattr(layer, "sliding_window", None) or width
        if window < width:
            raise refusal(model, f"attends over a window of {window} tokens and this call may reach {width}")


def _rope_boundary(rope: dict[str, Any], config: Any) -> int | None:
    """Tokens up to which a rotary embedding keeps its frequencies; None if it always does.

    Beyond the boundary these types recompute them from the longest position of a whole forward, for all rows in it.
    """
    kind = rope.get("rope_type") or "default"
    if "dynamic" in kind:
        return int(config.max_position_embeddings)
    if kind == "longrope":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        return int(original)
    return None


def _learned_positions(model: PreTrainedModel) -> int | None:
    """Positions of the smallest table of a model that looks them up; None if it computes them."""
    words, decoder = model.get_input_embeddings(), model.get_decoder()  # a vision tower has tables of its own
    sizes = [
        module.num_embeddings - int(getattr(module, "offset", 0))
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Embedding) and module is not words and ("pos" in name or "wpe" in name)
    ]
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    sizes += [len(b) for name, b in decoder.named_buffers() if "pos" in name and b.ndim == 2 and len(b) == limit]
    return min(sizes, default=None)
