"""What is not supported, does not fit or makes no sense is a clear error before any forward."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from kit import GREEDY, LENGTHS, Batch, forwards, small, state, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import hf_aspire
from hf_aspire import compat

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    "dola": ({"dola_layers": "low"}, "dola"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "paged": ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
    "same text several times": ({"num_return_sequences": 2}, "num_return_sequences"),
    "another assistant": ({"prompt_lookup_num_tokens": 3}, "assisted"),
    "an assistant model": ({"assistant_model": object()}, "assistant_model"),
    "a recipe": ({"custom_generate": "somebody/recipe"}, "custom_generate"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "pixels": ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    "audio": ({"input_features": torch.zeros(1)}, "input_features"),
    "a mask of four dimensions": ({"attention_mask": torch.ones(4, 1, 30, 30)}, r"attention_mask \(4, 1, 30, 30\)"),
    "a short mask": ({"attention_mask": torch.ones(4, 29)}, r"attention_mask of shape \(4, 29\)"),
    "an empty row": ({"attention_mask": torch.zeros(4, 30)}, r"row\(s\) \[0, 1, 2, 3\]"),
    "a list": ({"input_ids": [[1, 2]]}, "type list"),
    "no columns": ({"input_ids": torch.zeros(4, 0, dtype=torch.long)}, r"shape \(4, 0\)"),
    "no rows": ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"shape \(0, 4\)"),
    "one dimension": ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"shape \(4,\)"),
    "floats": ({"input_ids": torch.zeros(4, 30)}, "dtype torch.float32"),
    "positions below zero": ({"position_ids": torch.full((4, 30), -1)}, "position_ids down to -1"),
    "page size": ({"aspire_config": {"page_size": 0}}, "page_size: got 0"),
    "recent pages": ({"aspire_config": {"recent_pages": 9, "min_pages": 2}}, "recent_pages: got 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named_before_any_forward(model: LlamaForCausalLM, batch: Batch, name: str) -> None:
    keywords, reason = REFUSED[name]
    before = state(model)
    with forwards(model) as seen, pytest.raises(ValueError, match=reason):
        hf_aspire.generate(model, **(batch | GREEDY | keywords))
    assert seen == []
    assert state(model) == before


@pytest.mark.parametrize("limit", [{"max_new_tokens": 0}, {"max_length": max(LENGTHS)}, {"max_length": 3}])
def test_a_budget_of_nothing_is_an_error(model: LlamaForCausalLM, batch: Batch, limit: dict[str, int]) -> None:
    keywords = {"max_new_tokens": None, "do_sample": False} | limit
    with forwards(model) as seen, pytest.raises(ValueError, match=r"max_new_tokens|max_length|new tokens"):
        hf_aspire.generate(model, **batch, **keywords)
    assert seen == []


def test_rows_that_cannot_fit_name_both_sizes_and_the_setting(model: LlamaForCausalLM, batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"needs \d+ pages .* room for \d+ .*kv_memory"):
        hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small(kv_memory=1000))
    assert model.config._attn_implementation == "sdpa"


def test_scores_without_a_number_are_an_error(batch: Batch) -> None:
    class Spoils(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores * float("nan")

    with pytest.raises(ValueError, match=r"row 0, .*nan"):
        hf_aspire.generate(tiny_llama(), **batch, **GREEDY, logits_processor=LogitsProcessorList([Spoils()]))


def test_a_model_with_a_loop_of_its_own_is_refused(model: LlamaForCausalLM, batch: Batch) -> None:
    class OwnLoop(LlamaForCausalLM):
        def _sample(self, *args: Any, **keywords: Any) -> Any:
            raise AssertionError("never reached")

    own = OwnLoop(model.config).eval()
    with pytest.raises(ValueError, match="OwnLoop brings its own decoding loop"):
        hf_aspire.generate(own, **batch, **GREEDY)


@pytest.mark.parametrize(
    ("target", "value", "how"),
    [
        ("is_deepspeed_zero3_enabled", lambda: True, "DeepSpeed ZeRO-3"),
        ("is_fsdp_managed_module", lambda model: True, "FSDP"),
        (None, 2, r"tensor parallelism \(tp_size=2\)"),
    ],
)
def test_sharded_models_are_refused(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, target: str | None, value: Any, how: str
) -> None:
    model = tiny_llama()
    if target is None:
        model._tp_size = value
    else:
        monkeypatch.setattr(compat, target, value)
    with forwards(model) as seen, pytest.raises(ValueError, match=f"LlamaForCausalLM runs under {how}"):
        hf_aspire.generate(model, **batch, **GREEDY)
    assert seen == []


@pytest.mark.parametrize("version", ["4.57.0", "5.16.4", "5.25.0"])
def test_another_transformers_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=f"^hf_aspire: got transformers {version}, expected .*5.17") as caught:
        runpy.run_path(compat.__file__)  # the first module of ours that an import of the package runs into
    assert caught.value.__cause__ is None
