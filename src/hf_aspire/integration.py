"""Routes `generate(..., assistant="aspire")` to this package, and leaves everything else as it was."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from .arguments import check_assistant, check_call, check_config, refuse, take_config
from .attention import running
from .call import Call
from .compat import GENERATE_SIGNATURE, PreTrainedModel
from .config import AspireConfig
from .generation import run
from .model_checks import check_kind
from .patch import Patch


@dataclass(slots=True)
class _Entry:
    """A call of `generate`, and whether it has arrived at its decoding loop."""

    model: PreTrainedModel
    config: AspireConfig = field(default_factory=AspireConfig)
    arrived: bool = False


# The call that this thread is about to make. The decoding loop takes it, so that calls made from inside the loop (a
# processor that asks another model, say) run plainly.
_entry: ContextVar[_Entry | None] = ContextVar("aspire_entry", default=None)


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: PreTrainedModel, *args: Any, **keywords: Any) -> Any:
        if not _generate_patch.active:
            return original(self, *args, **keywords)
        if keywords.get("custom_generate") is generate:  # the same request, and here the streamer is in sight
            keywords.pop("custom_generate")
            keywords.setdefault("assistant", "aspire")
        entry = _Entry(self)
        try:
            config = take_config(self, args, keywords)
            if config is not None:
                entry.config = config
                return _enter(original, entry, args, keywords)
        except BaseException:
            if not entry.arrived:  # else the decoding loop has ended the streamer
                _end_streamer(args, keywords)
            raise
        with running(None):
            return original(self, *args, **keywords)

    return wrapper


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: PreTrainedModel, *args: Any, **keywords: Any) -> Any:
        entry = _entry.get()
        if entry is None or entry.model is not self:
            return original(self, *args, **keywords)
        token = _entry.set(None)
        try:
            return _decode(entry, *args, **keywords)
        finally:
            _entry.reset(token)

    return wrapper


_generate_patch = Patch("generate", _wrap_generate)
_sample_patch = Patch("_sample", _wrap_sample)
_enabled = threading.Event()
_enabling = threading.Lock()


def enable() -> None:
    """Makes `generate(..., assistant="aspire")` work on every model and in pipelines; once is enough."""
    with _enabling:
        if not _enabled.is_set():
            _install()
            _enabled.set()


def disable() -> None:
    """Leaves Transformers as it was; does nothing without `enable()`.

    If another library has wrapped `generate` since `enable()`, its wrapper holds ours, which stays in place without a
    function of its own; a warning says so.
    """
    with _enabling:
        if _enabled.is_set():
            _enabled.clear()
            _remove()


def _install() -> None:
    _sample_patch.install()
    _generate_patch.install()


def _remove() -> None:
    for patch, name in ((_generate_patch, "generate"), (_sample_patch, "_sample")):
        if not patch.remove():
            warnings.warn(
                f"hf_aspire: another library has wrapped GenerationMixin.{name} since; its wrapper is left in place, "
                "and ours underneath it, which only hands calls on now",
                RuntimeWarning,
                stacklevel=3,
            )


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *args: Any,
    aspire_config: AspireConfig | Mapping[str, Any] | None = None,
    assistant: str | None = "aspire",
    **keywords: Any,
) -> Any:
    """Generates with aspire, without `enable()`: the same arguments and results as `model.generate`.

    Also works as `model.generate(custom_generate=hf_aspire.generate)`; without `enable()` Transformers then keeps the
    streamer to itself and never ends it, so pass streamers to this function directly.

    Args:
        model: A decoder-only causal language model, or a wrapper with its `generate` (PEFT).
        inputs: Prompt token ids `[batch, tokens]`, as the first argument of `model.generate`.
        *args: Further positional arguments of `model.generate`.
        aspire_config: Configuration, or a dict of its fields.
        assistant: `"aspire"`.
        **keywords: Further arguments of `model.generate`.

    Returns:
        What `model.generate` returns: token ids `[batch, tokens]`, or with `return_dict_in_generate=True` an output
        whose `aspire_stats` holds the call's figures.

    Raises:
        ValueError: Something that is not supported, before any work.
    """
    if not check_assistant(assistant):
        raise ValueError("hf_aspire.generate: got assistant=None, expected 'aspire'")
    prepared = keywords.get("generation_config")
    if hasattr(prepared, "_pad_token_tensor"):  # called back by generate(custom_generate=hf_aspire.generate)
        settings = getattr(prepared, "aspire_config", None) if aspire_config is None else aspire_config
        entry = _Entry(model, AspireConfig.of(settings))
        return _decode(entry, keywords.pop("input_ids", inputs), *args, **keywords)
    if aspire_config is not None:
        keywords["aspire_config"] = aspire_config
    positional = args if inputs is None and not args else (inputs, *args)
    with _patched():
        return model.generate(*positional, assistant=assistant, **keywords)


@contextmanager
def _patched() -> Iterator[None]:
    _install()
    try:
        yield
    finally:
        _remove()


def _enter(original: Callable[..., Any], entry: _Entry, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Checks the whole call, then lets Transformers prepare it; `_sample` takes over from there."""
    named = dict(GENERATE_SIGNATURE.bind(entry.model, *args, **keywords).arguments)
    named = {name: value for name, value in named.items() if name not in ("self", "kwargs")} | named.get("kwargs", {})
    check_kind(entry.model)
    check_call(entry.model, named)
    token = _entry.set(entry)
    try:
        return original(entry.model, **named)
    finally:
        _entry.reset(token)


def _end_streamer(args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Ends the streamer of a call that failed, so that nobody waits for it."""
    place = list(GENERATE_SIGNATURE.parameters).index("streamer") - 1  # without self
    streamer = args[place] if len(args) > place else keywords.get("streamer")
    if streamer is not None:
        streamer.end()


def _decode(
    entry: _Entry,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,  # has served its purpose, the stop strings, by now
    **model_keywords: Any,
) -> Any:
    """The decoding loop in the place of `_sample`, with its signature."""
    if synced_gpus:
        raise refuse("got synced_gpus=True, which is not supported")
    if not model_keywords.get("mm_encoder_outputs"):  # of a model that may see, but was shown nothing
        model_keywords.pop("mm_encoder_outputs", None)
    check_config(generation_config)
    entry.arrived = True
    return run(
        Call(
            model=entry.model,
            input_ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            model_keywords=model_keywords,
            config=entry.config,
        )
    )


def release(model: torch.nn.Module) -> None:
    """Frees what is kept for a model between calls: on a GPU its page pools, CUDA graphs and compiled layers.

    They are kept so that the next call need not make them again, and freed with the model at the latest.

    Args:
        model: The model, or a wrapper of it.
    """
    if find_spec("triton") is not None:
        from .workspace import workspaces  # imports triton, which a CPU need not have

        workspaces.drop(model)
