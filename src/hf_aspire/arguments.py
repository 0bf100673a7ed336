"""What `generate` may be asked for. Anything else is refused before any work, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from .compat import (
    CACHE_NAME,
    GENERATE_SIGNATURE,
    GenerationConfig,
    GenerationMixin,
    GenerationMode,
    PreTrainedModel,
    merged_generation_config,
)
from .config import AspireConfig

# Fields of GenerationConfig that work as in plain `generate`: through the prepared inputs, the stock logits processors
# made from them, the length limit and the end tokens.
_HONOURED = frozenset({
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "num_return_sequences",
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits",
    "pad_token_id", "bos_token_id", "eos_token_id", "return_dict_in_generate", "output_scores", "output_logits",
    "stop_strings", "max_time", "watermarking_config", "assistant", "aspire_config",
})  # fmt: skip
# Fields that change nothing for greedy decoding or sampling with this package: settings of beam search, of other
# assistants, of compilation and prefill chunks (which have their own form here), and bookkeeping.
_WITHOUT_EFFECT = frozenset({
    "early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "is_assistant", "disable_compile", "compile_config", "prefill_chunk_size",
    "low_memory", "decoder_start_token_id", "transformers_version", "continuous_batching_config", "max_cache_len",
})  # fmt: skip
# Parameters of `generate` that work as in plain; its other ones are refused when they are used.
_PARAMETERS = frozenset({
    "self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "streamer", "kwargs",
})  # fmt: skip
_MODEL_KEYWORDS = frozenset({
    "input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_embeds", CACHE_NAME,
    "past_key_values",
})  # fmt: skip


def refuse(reason: str) -> ValueError:
    """The error of a call that cannot be served; nothing was done yet when it is raised."""
    return ValueError(f"assistant='aspire': {reason}")


def check_assistant(assistant: Any) -> bool:
    """Whether a call asks for this package.

    Raises:
        ValueError: An assistant that nobody knows.
    """
    if assistant is None:
        return False
    if assistant != "aspire":
        raise ValueError(f"generate(assistant=...): got {assistant!r}, expected 'aspire' or None")
    return True


def take_config(model: PreTrainedModel, args: tuple[Any, ...], keywords: dict[str, Any]) -> AspireConfig | None:
    """Takes `assistant` and `aspire_config` out of the keywords; None if the call does not ask for aspire.

    What is not passed may stand in the generation config that is passed, or in the model's own.

    Raises:
        ValueError: An unknown assistant, or settings that nobody would read.
    """
    passed = args[1] if len(args) > 1 else keywords.get("generation_config")
    sources = (passed, getattr(model, "generation_config", None))

    def take(name: str) -> tuple[Any, bool]:
        if name in keywords:
            return keywords.pop(name), True
        values = (getattr(source, name, None) for source in sources)
        return next((value for value in values if value is not None), None), False

    assistant, _ = take("assistant")
    settings, explicit = take("aspire_config")
    if check_assistant(assistant):
        return AspireConfig.of(settings)
    if explicit and settings is not None:
        raise ValueError("generate(aspire_config=...): got it without assistant='aspire'; pass both")
    return None


def check_call(model: PreTrainedModel, named: dict[str, Any]) -> None:
    """Refuses a call of `generate` before anything was done for it.

    Args:
        model: The model.
        named: Everything that was passed, by name.

    Raises:
        ValueError: Names what is not supported.
    """
    if getattr(type(model), "_sample", None) is not GenerationMixin._sample:
        raise refuse(f"{type(model).__name__} brings its own decoding loop, which is not supported")
    given = {key: value for key, value in named.items() if key not in GENERATE_SIGNATURE.parameters}
    for key in sorted(named.keys() - given.keys() - _PARAMETERS):
        if named[key] is not None and named[key] is not False:
            raise refuse(f"got {key} as well, which is not supported; leave it out")
    for key in ("tokenizer", "assistant_tokenizer", "trust_remote_code"):
        given.pop(key, None)
    merged, model_keywords = merged_generation_config(model, named.get("generation_config"), given)
    check_config(merged)
    if named.get("inputs") is not None:
        model_keywords.setdefault("input_ids", named["inputs"])
    check_keywords(model, model_keywords)
    check_processors(named.get("logits_processor"))


def check_config(config: GenerationConfig) -> None:
    """Refuses generation settings that are not supported.

    Args:
        config: What `generate` would run with: configuration and keywords merged.

    Raises:
        ValueError: Names the field, what was got and what is expected.
    """
    if (config.num_beams or 1) > 1 or (getattr(config, "num_beam_groups", None) or 1) > 1:
        raise refuse(f"got num_beams={config.num_beams}, expected 1: beam search cannot draft")
    mode = config.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise refuse(f"got settings for {mode.value}, expected greedy search or sampling")
    if not config.use_cache:
        raise refuse(f"got use_cache={config.use_cache}, expected True: drafts read the cache")
    if config.cache_implementation not in (None, "dynamic"):
        raise refuse(f"got cache_implementation={config.cache_implementation!r}, expected None: its cache is paged")
    defaults = {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
    checked = {"num_beams", "num_beam_groups", "use_cache", "cache_implementation"}
    for name, value in config.to_dict().items():
        if name.startswith("_") or name in _HONOURED or name in _WITHOUT_EFFECT or name in checked:
            continue
        if value is not None and value is not False and value != defaults.get(name):
            raise refuse(f"got {name}={value!r}, which is not supported yet; leave it out")


def check_keywords(model: PreTrainedModel, keywords: dict[str, Any]) -> None:
    """Refuses model inputs that are not supported.

    Args:
        model: The model.
        keywords: What `generate` would hand to the model.

    Raises:
        ValueError: Names the argument.
    """
    for name, value in keywords.items():
        if value is None or value is False or name in _MODEL_KEYWORDS:
            continue
        raise refuse(
            f"got {name} for {type(model).__name__}, which is not supported yet; "
            "expected input_ids, attention_mask, position_ids"
        )
    if keywords.get("use_cache") is False:
        raise refuse("got use_cache=False, expected True: drafts read the cache")
    ids = keywords.get("input_ids")
    if ids is not None and not isinstance(ids, torch.Tensor):
        raise refuse(f"got input_ids of type {type(ids).__name__}, expected a tensor of shape (batch, tokens)")
    # With a cache or embeddings the shapes are only known once Transformers has prepared the call.
    later = any(keywords.get(name) is not None for name in (CACHE_NAME, "past_key_values", "inputs_embeds"))
    if ids is not None and not later:
        check_prompt(ids, keywords.get("attention_mask"), keywords.get("position_ids"))


def check_prompt(
    ids: torch.Tensor, mask: Any, positions: Any, shape: tuple[int, int] | None = None, embedded: bool = False
) -> None:
    """Refuses prompts of the wrong shape.

    Args:
        ids: Token ids.
        mask: `attention_mask` or None.
        positions: `position_ids` or None.
        shape: (rows, columns) of the whole padded prompt where it differs from that of the ids.
        embedded: Whether embeddings stand for the prompt, so that there may be no ids.

    Raises:
        ValueError: Names the tensor, its shape and the expected one.
    """
    if ids.ndim != 2 or ids.shape[0] == 0 or (ids.shape[1] == 0 and not embedded):
        raise refuse(f"got input_ids of shape {tuple(ids.shape)}, expected (batch, tokens), neither of them 0")
    if ids.dtype not in (torch.int64, torch.int32):
        raise refuse(f"got input_ids of dtype {ids.dtype}, expected int64 or int32")
    shape = shape or (ids.shape[0], ids.shape[1])
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise refuse(f"got attention_mask {got}, expected a tensor of shape {shape}")
        if tuple(mask.shape) != shape:
            raise refuse(f"got attention_mask of shape {tuple(mask.shape)}, expected {shape}")
        empty = (mask == 0).all(1).nonzero().flatten().tolist()
        if empty:
            raise refuse(f"got an attention_mask that hides every token of row(s) {empty}, expected one visible token")
    if positions is not None:
        got = tuple(positions.shape) if isinstance(positions, torch.Tensor) else type(positions).__name__
        if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
            raise refuse(f"got position_ids {got}, expected shape {shape}")
        if bool((positions < 0).any()):
            raise refuse(f"got position_ids down to {int(positions.min())}, expected none below 0")


def check_processors(processors: Sequence[Any] | None) -> None:
    """Refuses processors that run the model themselves.

    Raises:
        ValueError: Names the class.
    """
    for processor in processors or ():
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise refuse(f"got {type(processor).__name__}: classifier-free guidance is not supported")
