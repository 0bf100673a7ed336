"""Modes of torch and libraries around a model: autocast, PEFT, `torch.compile`, offloaded layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import GREEDY, LENGTHS, Batch, Recorder, small, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM

import hf_aspire


@pytest.mark.usefixtures("enabled")
def test_inference_mode_and_gradients(model: LlamaForCausalLM, batch: Batch, text: Tensor) -> None:
    with torch.inference_mode():
        inside = model.generate(**batch, **GREEDY, assistant="aspire", aspire_config=small())
    assert inside.tolist() == text.tolist()
    with torch.enable_grad():
        outside = model.generate(**batch, **GREEDY, assistant="aspire", aspire_config=small())
    assert outside.tolist() == text.tolist()
    assert not outside.requires_grad


def test_autocast(batch: Batch) -> None:
    """bfloat16 by autocast: plain's text, but for near-ties, which a random model has few of."""
    model = tiny_llama().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(**batch, **GREEDY)
        found = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small())
    same = (found == expected)[:, max(LENGTHS) :].float().mean()
    assert same > 0.7


def test_peft(model: LlamaForCausalLM, batch: Batch, text: Tensor) -> None:
    import peft

    base = tiny_llama()
    tuned = peft.get_peft_model(
        base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.1)
    )
    tuned.eval()
    expected = tuned.generate(**batch, **GREEDY).tolist()
    assert expected != text.tolist()
    recorder = Recorder()
    assert hf_aspire.generate(tuned, **batch, **GREEDY, aspire_config=recorder.config()).tolist() == expected
    assert len(recorder.stats) == 1
    with tuned.disable_adapter():
        assert hf_aspire.generate(tuned, **batch, **GREEDY, aspire_config=small()).tolist() == text.tolist()


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_that_peft_adds_are_refused(batch: Batch, method: str) -> None:
    import peft

    tuned = peft.get_peft_model(
        tiny_llama(), getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    with pytest.raises(ValueError, match="assistant='aspire'"):
        hf_aspire.generate(tuned, **batch, **GREEDY)
    assert tuned.base_model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("enabled")
def test_a_compiled_model(batch: Batch, text: Tensor) -> None:
    compiled = torch.compile(tiny_llama(), backend="eager")  # its generate is the original's
    assert compiled.generate(**batch, **GREEDY, assistant="aspire", aspire_config=small()).tolist() == text.tolist()


def test_offloaded_layers(batch: Batch, text: Tensor, tmp_path: Any) -> None:
    from accelerate import cpu_offload, disk_offload, dispatch_model

    model = cpu_offload(tiny_llama(), torch.device("cpu"))
    assert hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small()).tolist() == text.tolist()
    model = disk_offload(tiny_llama(), str(tmp_path / "all"), torch.device("cpu"))
    assert hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small()).tolist() == text.tolist()
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    model = dispatch_model(
        tiny_llama(), places, main_device="cpu", offload_dir=str(tmp_path / "some"), force_hooks=True
    )
    assert hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small()).tolist() == text.tolist()
