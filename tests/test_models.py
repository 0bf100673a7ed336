"""Every family either gives plain's tokens and logits, or is refused by what it does before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import VOCABULARY, ragged, small
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

import hf_aspire
from hf_aspire import AspireConfig, AspireOutput
from hf_aspire.compat import CACHE_NAME
from hf_aspire.probe import probe_model

NEW = 12
LENGTHS = (1, 2, 9, 21)
WIDTH = max(LENGTHS) + NEW
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
    settings = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": new}
    return hf_aspire.generate(model, **ragged(LENGTHS), aspire_config=config or small(), **settings, **keywords)


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


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **settings}}


def longrope(boundary: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return rope("longrope", original_max_position_embeddings=boundary, **factors)


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


class IgnoresPositions(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **keywords: Any) -> Any:
        return super().forward(input_ids, position_ids=None, **keywords)


class CannotPack(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **keywords: Any) -> Any:
        if position_ids is not None and bool((position_ids.diff() < 0).any()):
            raise RuntimeError("positions must rise")
        return super().forward(input_ids, position_ids=position_ids, **keywords)


def llama_as(model_class: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    model = build("llama")
    other = model_class(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    return other


def test_code_of_users_is_judged_by_its_logits() -> None:
    check_refused(llama_as(IgnoresPositions), "changes its logits by .*ignores position_ids")
    check_refused(llama_as(CannotPack), "packed forward .*positions must rise")


def test_neighbouring_tokens_may_meet_in_attention_only() -> None:
    model = build("llama")
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] + args[0].roll(1, 1),))
    check_refused(model, "computes across tokens")
    handle.remove()
    check_equal(model)


def test_dropout_of_attention_weights_is_refused() -> None:
    """The kernels drop nothing. What a model in training mode drops elsewhere: tests/test_model_warnings.py."""
    for model in (build("llama", attention_dropout=0.1), build("opt", attention_dropout=0.1)):
        check_equal(model)
        with pytest.warns(RuntimeWarning, match="training mode"):
            check_refused(model.train(), r"drops attention weights \(dropout=0.1\); call model.eval\(\)")


def test_other_random_numbers_of_training_mode_are_refused() -> None:
    model = build("llama").train()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * torch.rand_like(output))
    with pytest.warns(RuntimeWarning, match="training mode"):
        check_refused(model, r"draws random numbers in training mode \(call model.eval\(\)\)")


def test_a_model_is_compared_with_itself_once() -> None:
    model = build("llama")
    calls: list[bool] = []
    model.register_forward_pre_hook(
        lambda module, args, keywords: calls.append("attention_mask" in keywords), with_kwargs=True
    )
    for _ in range(2):
        aspire(model, new=2)
    assert sum(calls) == 1
    model.to(torch.float32)  # other layers: once more
    aspire(model, new=2)
    assert sum(calls) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_comparison(dtype: torch.dtype) -> None:
    for model_type in ("llama", "qwen3_moe"):
        found = aspire(build(model_type, dtype))
        assert found.sequences.shape[1] == WIDTH


def test_logits_of_all_tokens_are_computed_where_a_model_cannot_choose() -> None:
    model = build("llama")
    forward = type(model).forward

    class EveryLogit(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **keywords: Any) -> Any:
            return forward(self, input_ids, position_ids=position_ids, **keywords)

    assert "logits_to_keep" not in EveryLogit.forward.__annotations__
    check_equal(llama_as(EveryLogit))


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


def test_a_model_with_one_layer_is_served() -> None:
    check_equal(build("llama", num_hidden_layers=1))


def test_text_alone_of_a_model_that_can_see() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    torch.manual_seed(0)
    text = build("llama").config
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=VOCABULARY - 1, pad_token_id=0)
    model = LlavaForConditionalGeneration(config).double().eval()
    check_equal(model)
    with pytest.raises(ValueError, match="pixel_values"):
        aspire(model, pixel_values=torch.zeros(1, 3, 16, 16))


def test_modules_without_attention_do_not_disturb() -> None:
    model = build("llama")
    model.extra = nn.Linear(2, 2)
    check_equal(model)
