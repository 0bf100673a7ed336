"""The attention and mask functions that Transformers calls, and the switch that turns them on.

A forward of ours carries its step as a keyword through `model(...)`. Any other forward that meets our names meanwhile
(a plain `generate` in another thread, say) is handed to the implementation that was active before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .compat import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, PreTrainedConfig, PreTrainedModel

STEP = "aspire_step"
"""Keyword under which a step travels through the model's forward."""
_PREFIX = "aspire_over_"


class AttentionStep(Protocol):
    """What one of our forwards does at every attention layer."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> Tensor:
        """Attends: query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""

    def mask(self, mask_function: Callable[..., Any] | None) -> Tensor | None:
        """Called for every mask that the model would build; packed forwards need none."""


_current_step: ContextVar[AttentionStep | None] = ContextVar("aspire_current_step", default=None)


def current_step() -> AttentionStep | None:
    """The step that runs in this thread."""
    return _current_step.get()


@contextmanager
def running(step: AttentionStep | None) -> Iterator[None]:
    """Marks this thread's forward as ours, for the mask function: it gets no keywords from the model.

    None ends that for forwards that are not ours inside one that is (a module's hook that asks another model).
    """
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


class AttentionSwitch:
    """Points a model's configs at our attention, and back: counted, so that overlapping calls nest in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[Any, str | None, int]] = {}

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[None]:
        """Switches every config of the model for the duration of the block."""
        found = (vars(module).get("config") for module in model.modules())
        configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
        taken: list[int] = []
        try:
            for key, config in configs.items():
                self._take(key, config)
                taken.append(key)
            yield
        finally:
            for key in taken:
                self._give_back(key)

    def _take(self, key: int, config: Any) -> None:
        with self._lock:
            _, previous, count = self._leases.get(key, (config, config._attn_implementation_internal, 0))
            self._leases[key] = (config, previous, count + 1)
            if count == 0:
                config._attn_implementation_internal = _register(previous)

    def _give_back(self, key: int) -> None:
        with self._lock:
            config, previous, count = self._leases.pop(key)
            if count > 1:
                self._leases[key] = (config, previous, count - 1)
            elif config._attn_implementation_internal == _name(previous):  # else somebody has chosen another since
                config._attn_implementation_internal = previous


switch = AttentionSwitch()


def _name(previous: str | None) -> str:
    return _PREFIX + (previous or "eager")


def _register(previous: str | None) -> str:
    """Registers our functions over `previous` under a name of their own, once, and returns that name."""
    name = _name(previous)
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        # The mask function goes first: an attention function without one would lose padding and causality.
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask_function(previous or "eager"))
        ALL_ATTENTION_FUNCTIONS.register(name, _attention_function(previous or "eager"))
    return name


def _attention_function(previous: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def aspire_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        step: AttentionStep | None = keywords.pop(STEP, None)
        if step is None:
            function = _original_attention(module, previous)
            return function(module, query, key, value, attention_mask, *args, **keywords)
        if args:
            raise TypeError(f"{type(module).__name__} gives its attention {len(args)} positional arguments too many")
        keywords["attention_mask"] = attention_mask
        device = query.device.type
        if torch.compiler.is_compiling() and not torch.is_autocast_enabled(device):
            return step.attend(module, query, key, value, keywords), None  # what follows, the compiler cannot trace
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return step.attend(module, query, key, value, keywords), None
        if query.dtype != torch.float64:  # which autocast leaves alone
            kind = torch.get_autocast_dtype(device)
            query, key, value = query.to(kind), key.to(kind), value.to(kind)
        with torch.autocast(device, enabled=False):  # the casts are made, as before a fused attention
            return step.attend(module, query, key, value, keywords), None

    return aspire_attention


def _original_attention(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that a module would have called under an implementation's name."""
    for source in type(module).__mro__:  # the modeling file, or that of the class it derives from
        file = vars(sys.modules.get(source.__module__, object))
        interface = file.get("ALL_ATTENTION_FUNCTIONS")  # some files replace entries in an interface of their own
        if interface is not None and name in interface.valid_keys():
            return interface[name]
        # "eager" is not in the interface: every modeling file brings its own.
        if name == "eager" and (function := file.get("eager_attention_forward")) is not None:
            return function
    if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return ALL_ATTENTION_FUNCTIONS[name]
    raise RuntimeError(
        f"{type(module).__name__}: a forward without aspire runs while generate(assistant='aspire') is active on "
        f"the same model, and its attention implementation {name!r} cannot be reached; "
        "run the two one after the other"
    )


def _mask_function(previous: str) -> Callable[..., Any]:
    def aspire_mask(*args: Any, **keywords: Any) -> Any:
        step = _current_step.get()
        if step is not None:
            return step.mask(keywords.get("mask_function"))
        if previous in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **keywords)
        # An implementation without a mask function gets the 2D mask as it is, as Transformers does.
        return keywords.get("attention_mask")

    return aspire_mask


def scaling_of(query: Tensor, keywords: dict[str, Any]) -> float:
    """The softmax scale that a model passes, or the usual one."""
    scaling = keywords.get("scaling")
    return float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5


def split_heads(states: Tensor) -> Tensor:
    """[1, H, T, D] as the model passes it -> [T, H, D], a view."""
    return states[0].transpose(0, 1)
