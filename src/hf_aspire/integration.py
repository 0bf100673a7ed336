"""Routes `generate(..., assistant="aspire")` to this package, and leaves everything else as it was."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .arguments import check_assistant, check_config, check_keywords, check_processors, refuse
from .call import Call
from .compat import GenerationConfig, GenerationMixin, PreTrainedModel, merged_generation_config
from .config import AspireConfig
from .generation import run

# The configuration of the `generate` call that this thread is about to enter, with its model: read by the decoding
# loop that `generate` arrives at, and gone by then, so that calls made from inside it (a processor that asks another
# model, say) run plainly.
_pending: ContextVar[tuple[Any, AspireConfig] | None] = ContextVar("aspire_pending", default=None)


class _Patch:
    """One method of `GenerationMixin`, wrapped while somebody needs it: counted, so that users may overlap."""

    def __init__(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._name = name
        self._wrap = wrap
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., Any] | None = None
        self._wrapped: Callable[..., Any] | None = None

    def install(self) -> None:
        """Wraps the method unless it is wrapped already."""
        with self._lock:
            if self._users == 0:
                self._original = getattr(GenerationMixin, self._name)
                self._wrapped = self._wrap(self._original)
                setattr(GenerationMixin, self._name, self._wrapped)
            self._users += 1

    def remove(self) -> bool:
        """Puts the original back after the last user; False if another library has wrapped it since."""
        with self._lock:
            self._users -= 1
            if self._users:
                return True
            if getattr(GenerationMixin, self._name) is not self._wrapped:
                self._users = 1  # ours is still underneath: it stays, and stays counted
                return False
            setattr(GenerationMixin, self._name, self._original)
            return True

    @property
    def original(self) -> Callable[..., Any]:
        """The method without this wrapper."""
        with self._lock:
            return self._original if self._users and self._original else getattr(GenerationMixin, self._name)


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: PreTrainedModel, *args: Any, **keywords: Any) -> Any:
        assistant, settings = _take_settings(self, args, keywords)
        if not check_assistant(assistant):
            if settings is not None:
                raise ValueError("generate(aspire_config=...): got it without assistant='aspire'; pass both")
            return original(self, *args, **keywords)
        return _enter(original, self, args, keywords, AspireConfig.of(settings))

    return generate


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _sample(self: PreTrainedModel, *args: Any, **keywords: Any) -> Any:
        pending = _pending.get()
        if pending is None or pending[0] is not self:
            return original(self, *args, **keywords)
        token = _pending.set(None)
        try:
            return _decode(self, pending[1], *args, **keywords)
        finally:
            _pending.reset(token)

    return _sample


_generate_patch = _Patch("generate", _wrap_generate)
_sample_patch = _Patch("_sample", _wrap_sample)
_enabled = threading.Event()
_enabling = threading.Lock()


def enable() -> None:
    """Makes `generate(..., assistant="aspire")` work on every model and in pipelines; once is enough."""
    with _enabling:
        if not _enabled.is_set():
            _sample_patch.install()
            _generate_patch.install()
            _enabled.set()


def disable() -> None:
    """Leaves Transformers as it was.

    If another library has wrapped `generate` since `enable()`, its wrapper calls ours, so both stay in place, and a
    warning says so. Calling it without `enable()` does nothing.
    """
    with _enabling:
        if not _enabled.is_set():
            return
        if not _generate_patch.remove():
            import warnings

            warnings.warn(
                "hf_aspire.disable(): another library has wrapped GenerationMixin.generate since enable(); "
                "the wrapper of hf_aspire stays underneath it",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        _sample_patch.remove()
        _enabled.clear()


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *args: Any,
    aspire_config: AspireConfig | Mapping[str, Any] | None = None,
    assistant: str | None = "aspire",
    **keywords: Any,
) -> Any:
    """Generates with aspire, without `enable()`: the same arguments and results as `model.generate`.

    Also works as `model.generate(custom_generate=hf_aspire.generate)`; Transformers then keeps the streamer to
    itself, so pass streamers to this function directly.

    Args:
        model: A decoder-only causal language model.
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
    if hasattr(keywords.get("generation_config"), "_pad_token_tensor"):  # called back by generate(custom_generate=...)
        config = _configured(model, keywords["generation_config"], aspire_config)
        return _decode(model, config, keywords.pop("input_ids", inputs), *args, **keywords)
    _, settings = _take_settings(model, args, keywords)
    config = AspireConfig.of(aspire_config if aspire_config is not None else settings)
    with _sampling_patched():
        positional = args if inputs is None else (inputs, *args)
        return _enter(_generate_patch.original, model, positional, keywords, config)


@contextmanager
def _sampling_patched() -> Iterator[None]:
    _sample_patch.install()
    try:
        yield
    finally:
        _sample_patch.remove()


def _take_settings(model: PreTrainedModel, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Takes `assistant` and `aspire_config` out of the keywords, or reads them from the generation configs."""
    given = keywords.get("generation_config") or next((a for a in args if isinstance(a, GenerationConfig)), None)
    found = []
    for name in ("assistant", "aspire_config"):
        value = keywords.pop(name, None)
        for source in (given, getattr(model, "generation_config", None)):
            value = getattr(source, name, None) if value is None else value
        found.append(value)
    return found[0], found[1]


def _configured(model: PreTrainedModel, generation_config: Any, given: Any) -> AspireConfig:
    return AspireConfig.of(given if given is not None else getattr(generation_config, "aspire_config", None))


_PARAMETERS = (
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus",
    "assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate",
)  # fmt: skip


def _enter(
    original: Callable[..., Any],
    model: PreTrainedModel,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    config: AspireConfig,
) -> Any:
    """Checks the whole call, then lets Transformers prepare it; `_sample` takes over from there."""
    named = {**dict(zip(_PARAMETERS, args, strict=False)), **keywords}
    _check_call(model, named)
    token = _pending.set((model, config))
    try:
        return original(model, **named)
    finally:
        _pending.reset(token)


def _check_call(model: PreTrainedModel, named: dict[str, Any]) -> None:
    """Refuses a call before anything was done for it."""
    given = dict(named)
    inputs = given.pop("inputs", None)
    taken = {name: given.pop(name, None) for name in _PARAMETERS if name != "inputs"}
    for name in ("synced_gpus", "assistant_model", "custom_generate"):
        if taken[name] is not None and taken[name] is not False:
            raise refuse(f"got {name} as well, which is not supported; leave it out")
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if taken[name] is not None:
            raise refuse(f"got {name}, which is not supported")
    for name in ("tokenizer", "assistant_tokenizer", "trust_remote_code"):
        given.pop(name, None)
    if model.config.is_encoder_decoder:
        raise refuse(f"{type(model).__name__} is an encoder-decoder; expected a decoder-only model")
    if getattr(type(model), "_sample", None) is not GenerationMixin._sample:
        raise refuse(f"{type(model).__name__} brings its own decoding loop, which is not supported")
    merged, model_keywords = merged_generation_config(model, taken["generation_config"], given)
    check_config(merged)
    if inputs is not None and "input_ids" not in model_keywords:
        model_keywords["input_ids"] = inputs
    check_keywords(model, model_keywords)
    check_processors(taken["logits_processor"])


def _decode(
    model: PreTrainedModel,
    config: AspireConfig,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_keywords: Any,
) -> Any:
    """The decoding loop in the place of `_sample`, with its signature."""
    if synced_gpus:
        raise refuse("got synced_gpus=True, which is not supported")
    check_config(generation_config)
    call = Call(
        model=model,
        input_ids=input_ids,
        processors=logits_processor,
        criteria=stopping_criteria,
        generation_config=generation_config,
        streamer=streamer,
        model_keywords=model_keywords,
        config=config,
    )
    return run(call)


def release(model: PreTrainedModel) -> None:
    """Frees what is kept for a model between calls.

    Nothing is kept yet: pages live for one call. The function is here so that code written now frees page pools and
    CUDA graphs once they outlive a call.
    """
