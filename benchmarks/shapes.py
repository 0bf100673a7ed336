"""Model shapes with random weights, for benchmarks of speed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

SHAPES: dict[str, Any] = {
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        eos_token_id=None,
        pad_token_id=0,
    ),
    "qwen3-1.7b": Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        eos_token_id=None,
        pad_token_id=0,
    ),
}


def random_model(name: str) -> PreTrainedModel:
    """The shape `name` with random bfloat16 weights on the GPU."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16).eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but the embedding table, unless the head shares it."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return size if table is head else size - table.numel() * table.element_size()


def kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values per token, all layers."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * size


def prompts(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    """`[batch, length]` random token ids on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(1, vocabulary, (batch, length), generator=generator, device="cuda")
