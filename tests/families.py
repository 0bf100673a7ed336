"""Tiny random models of any family, and checks that one is served or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import VOCABULARY, aspire_output, ragged, small
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hf_aspire import AspireConfig, AspireOutput

NEW = 12
LENGTHS = (1, 2, 9, 21)
WIDTH = max(LENGTHS) + NEW
# Sizes by every name that configs have for them; a config takes those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("rotary_dim", "hidden_size_per_layer_input", "laurel_rank"), 8),
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "attn_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


def build(model_type: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A tiny model whose weights are all random: gains, biases and position tables too, so that nothing cancels."""
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    settings = {name: value for name, value in SIZES.items() if name in known} | {"eos_token_id": None} | overrides
    experts = {"experts_implementation": "eager"} if any("experts" in name for name in known) else {}  # float64
    model = AutoModelForCausalLM.from_config(config_class(**settings), **experts).to(dtype).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64).to(dtype)
            if "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            elif parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * 0.2)
    return model


def aspire(
    model: PreTrainedModel, config: AspireConfig | None = None, new: int = NEW, **keywords: Any
) -> AspireOutput:
    return aspire_output(model, ragged(LENGTHS), config or small(), max_new_tokens=new, **keywords)


def check_equal(model: PreTrainedModel, new: int = NEW) -> None:
    """Tokens and the logits that chose them are plain's; drafts were made, and some of them refused."""
    keywords: dict[str, Any] = {"max_new_tokens": new, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**ragged(LENGTHS), do_sample=False, **keywords)
    found = aspire(model, small(schedule="staggered", context="verify"), new, output_logits=True)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, plains in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, plains, atol=1e-4, rtol=1e-4)
    assert sum(found.aspire_stats.drafted) > 0


def check_refused(model: PreTrainedModel, reason: str, new: int = NEW) -> None:
    """The class and the reason are named, and the model is left as it was."""
    implementation = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason) as caught:
        aspire(model, new=new)
    assert type(model).__name__ in str(caught.value)
    assert model.config._attn_implementation == implementation
