"""The only place that knows how Transformers versions differ."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = SpecifierSet(">=5.17,<5.25", prereleases=True)

if Version(transformers.__version__) not in SUPPORTED:
    raise ImportError(
        f"hf_aspire: got transformers {transformers.__version__}, expected {SUPPORTED}; "
        f"install a version in that range, or an hf_aspire release that supports yours"
    )

from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig  # noqa: E402  (after the range check)
from transformers.cache_utils import Cache, DynamicCache  # noqa: E402
from transformers.generation.configuration_utils import GenerationMode  # noqa: E402
from transformers.generation.utils import GenerateDecoderOnlyOutput  # noqa: E402
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled  # noqa: E402
from transformers.integrations.fsdp import is_fsdp_managed_module  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel  # noqa: E402

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "CACHE_NAME",
    "GENERATE_SIGNATURE",
    "Cache",
    "GenerateDecoderOnlyOutput",
    "GenerationConfig",
    "GenerationMixin",
    "GenerationMode",
    "PreTrainedConfig",
    "PreTrainedModel",
    "input_device",
    "is_sharded",
    "merged_generation_config",
    "plain_cache",
    "rope_parameters",
    "update_layer",
]

# The cache argument of models, and the field of what `generate` returns, was renamed in 5.2x.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
GENERATE_SIGNATURE = inspect.signature(GenerationMixin.generate)
"""Read before anybody wraps it."""


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: where its embeddings are, or where accelerate brings them to."""
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    if device.type == "meta":
        for module in (embeddings, model):
            hook = getattr(module, "_hf_hook", None)
            for part in getattr(hook, "hooks", (hook,)):
                if (place := getattr(part, "execution_device", None)) is not None:
                    return torch.device(place)
    return device


def is_sharded(model: PreTrainedModel) -> str | None:
    """Says how the model's weights are spread over processes, or None if they are not."""
    size = getattr(model, "tp_size", None) or getattr(model, "_tp_size", None) or 1
    if size > 1:
        return f"tensor parallelism (tp_size={size})"
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3"
    if is_fsdp_managed_module(model):
        return "FSDP"
    return None


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a text config: one per layer type where a model has several."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings or not settings:
        return [dict(settings)] if settings else []
    return [dict(value) for value in settings.values() if isinstance(value, dict)]


def merged_generation_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, keywords: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """What `generate` would run with: the merged configuration, and the keywords that go to the model. Copies."""
    return model._prepare_generation_config(generation_config, **keywords)


def plain_cache(model: PreTrainedModel) -> DynamicCache | None:
    """The empty cache that plain `generate` would make for a model; None if the model brings its own."""
    if not model._supports_default_dynamic_cache():
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def update_layer(cache: Cache, keys: Any, values: Any, layer: int) -> None:
    """Appends `[B, heads, columns, size]` to one layer of a plain cache."""
    cache.update(keys, values, layer)
