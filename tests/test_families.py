"""Every family either gives plain's tokens and logits, or is refused by what it does before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import LENGTHS, NEW, WIDTH, build, check_equal, check_refused
from kit import ragged
from transformers import PreTrainedModel

from hf_aspire.compat import CACHE_NAME
from hf_aspire.probe import probe_model

WIDE = {"sliding_window": WIDTH}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **settings}}


def longrope(boundary: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return rope("longrope", original_max_position_embeddings=boundary, **factors)


# ---- served


EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", rope("linear")),
    "llama, llama3": (
        "llama",
        rope("llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama, yarn": ("llama", rope("yarn", original_max_position_embeddings=16)),
    "llama 4, chunks that are never left": (
        "llama4_text",
        {"attention_chunk_size": WIDTH, "no_rope_layers": [1, 0, 1]},
    ),
    "qwen 2": ("qwen2", {}),
    "qwen 2, windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WIDTH, "max_window_layers": 1},
    ),
    "qwen 2 moe": ("qwen2_moe", {}),
    "qwen 3": ("qwen3", {}),
    "qwen 3 moe": ("qwen3_moe", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, window as wide as the call": ("mistral", WIDE),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "ministral 3": ("ministral3", WIDE),
    "phi": ("phi", {}),
    "phi 3": ("phi3", {}),
    "phi moe": ("phimoe", WIDE),
    "olmo": ("olmo", {"clip_qkv": 1.0}),
    "olmo 2": ("olmo2", {}),
    "olmo 3": ("olmo3", WIDE),
    "olmoe": ("olmoe", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    "granite moe": ("granitemoe", {}),
    "smollm 3, layers without positions": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "deepseek 2": ("deepseek_v2", LATENT),
    "deepseek 3": ("deepseek_v3", LATENT),
    "minicpm 3": ("minicpm3", LATENT),
    "gemma": ("gemma", {}),
    "gemma 3": ("gemma3_text", WIDE),
    "gemma 3n, shared keys and values": (
        "gemma3n_text",
        {
            **WIDE,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
        },
    ),
    "cohere": ("cohere", {}),
    "cohere 2": ("cohere2", WIDE),
    "glm": ("glm", {}),
    "glm 4": ("glm4", {}),
    "glm 4 moe": ("glm4_moe", {}),
    "ernie 4.5": ("ernie4_5", {}),
    "exaone 4": ("exaone4", WIDE),
    "helium": ("helium", {}),
    "seed-oss": ("seed_oss", {}),
    "starcoder 2": ("starcoder2", {"sliding_window": None}),
    "arcee": ("arcee", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "lfm 2, attention only": ("lfm2", {"layer_types": ["full_attention"] * 3}),
    "gpt 2, learned positions": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("gpt_neox", {}),
    "opt": ("opt", {}),
    "biogpt": ("biogpt", {}),
    "bert as a decoder": ("bert", {"is_decoder": True}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_tokens_and_logits_are_plains(name: str) -> None:
    model_type, overrides = EQUAL[name]
    check_equal(build(model_type, **overrides))


def test_final_soft_capping_is_the_models_own_business() -> None:
    """Float32: plain's eager attention, Gemma 2's default, gives NaN for padded rows in float64."""
    capped = {"attn_logit_softcapping": None, "final_logit_softcapping": 1.0}
    check_equal(build("gemma2", torch.float32, **WIDE, **capped))


# ---- refused


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window that binds": ("mistral", {"sliding_window": 8}, "window of 8 tokens and this call may reach 33"),
    "a window one token short": ("mistral", {"sliding_window": WIDTH - 1}, "window of 32 tokens"),
    "a window in one layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "window of 8 tokens",
    ),
    "a window that only the cache knows": ("moshi", {"sliding_window": 8}, "window of 8 tokens"),
    "chunks": ("llama4_text", {"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1]}, "window of 8 tokens"),
    "soft-capping": ("gemma2", {**WIDE, "attn_logit_softcapping": 1.0}, "'softcap'"),
    "sinks": ("gpt_oss", WIDE, "'s_aux'"),
    "a temperature by place in the cache": (
        "llama4_text",
        {
            "attention_chunk_size": WIDTH,
            "no_rope_layers": [1, 0, 1],
            "attn_temperature_tuning": True,
            "floor_scale": 12,
            "attn_scale": 2.0,
        },
        "counts the tokens in the cache",
    ),
    "a mask of its own": ("doge", {}, "mask of its own"),
    "attention to later tokens": (
        "gemma3_text",
        {"sliding_window": 2 * WIDTH, "use_bidirectional_attention": True},
        "not causal",
    ),
    "an encoder": ("bert", {}, "not causal"),
    "a lost keyword": ("stablelm", {}, "exactly once and hand its keywords on, got calls of layer 0: 0"),
    "a lost keyword too": ("nemotron", {}, "exactly once and hand its keywords on, got calls of layer 0: 0"),
    "two calls per layer": ("diffllama", {}, "exactly once .* layer 0: 2, layer 1: 2, layer 2: 2"),
    "attention outside the interface": ("falcon", {}, "did not reach"),
    "no position ids": ("bloom", {}, "position_ids"),
    "a mask added to its own scores": ("xglm", {}, "layer 0: 0"),
    "a state": ("mamba", {}, "stateful"),
    "a state in some layers": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "stateful"),
    "a state beside attention": ("falcon_h1", {}, "stateful"),
    "a state beside a window": ("recurrent_gemma", {}, "stateful"),
    "a cache of its own": ("minimax", {}, "cache"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_refused_by_what_they_do(name: str) -> None:
    model_type, overrides, reason = REFUSED[name]
    check_refused(build(model_type, torch.float32, **overrides), reason)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_is_refused_only_where_the_call_may_cross_its_boundary(kind: str) -> None:
    last = max(LENGTHS) + NEW - 2  # the last new token is never fed

    def scaled(boundary: int) -> PreTrainedModel:
        if kind == "longrope":
            return build("llama", **longrope(boundary))
        return build("llama", **rope("dynamic"), max_position_embeddings=boundary)

    check_refused(scaled(last), f"{kind!r} beyond {last} tokens and this call may reach position {last}")
    model = scaled(last + 1)
    check_equal(model)
    model.generate(**ragged(LENGTHS), max_new_tokens=NEW + 20, do_sample=False)  # leaves other frequencies behind
    check_equal(model)


@pytest.mark.parametrize(
    "model_type",
    [
        "gpt2",
        "opt",
        "biogpt",
        pytest.param("codegen", marks=pytest.mark.skipif(CACHE_NAME != "cache", reason="not on the interface yet")),
    ],
)
def test_positions_end_where_the_models_table_ends(model_type: str) -> None:
    last = max(LENGTHS) + NEW - 2
    check_equal(build(model_type, max_position_embeddings=last + 1))
    check_refused(build(model_type, max_position_embeddings=last), f"{last} learned positions .* position {last}")


# ---- what the probe finds in them


def test_a_model_without_weights_tells_its_shapes() -> None:
    for name in ("llama", "mistral, window as wide as the call", "llama 4, chunks that are never left"):
        model_type, overrides = EQUAL[name]
        model = build(model_type, **overrides)
        layers = probe_model(model, WIDTH).layers
        found = probe_model(model.to("meta"), WIDTH).layers
        assert [layer.bytes_per_token for layer in found] == [layer.bytes_per_token for layer in layers]
    model_type, overrides, reason = REFUSED["soft-capping"]
    with pytest.raises(ValueError, match=reason):
        probe_model(build(model_type, **overrides).to("meta"), WIDTH)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", True), ("gemma 3", True), ("deepseek 3", False), ("gemma 3n, shared keys and values", False)],
)
def test_caches_that_hold_something_else_than_attention_reads_are_known(name: str, expected: bool) -> None:
    model_type, overrides = EQUAL[name]
    assert probe_model(build(model_type, **overrides), WIDTH).caches_attended is expected
