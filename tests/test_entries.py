"""Every way to start a call gives plain's text: the argument, our `generate`, recipes and pipelines."""

from __future__ import annotations

from typing import Any

import pytest
from kit import GREEDY, LENGTHS, NEW, Batch, Recorder, forwards, small, state, tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

import hf_aspire
from hf_aspire import AspireOutput

# ---- entries


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("form", ["object", "dict", "default"])
def test_generate_with_the_assistant(model: LlamaForCausalLM, batch: Batch, text: Tensor, form: str) -> None:
    config = {"object": small(), "dict": {"page_size": 4, "min_pages": 2, "recent_pages": 1}, "default": None}[form]
    out = model.generate(**batch, **GREEDY, assistant="aspire", aspire_config=config, return_dict_in_generate=True)
    assert out.sequences.tolist() == text.tolist()
    assert out.aspire_stats.config.page_size == (16 if form == "default" else 4)


@pytest.mark.usefixtures("enabled")
def test_positional_arguments(model: LlamaForCausalLM, batch: Batch, text: Tensor) -> None:
    mask = batch["attention_mask"]
    config = GenerationConfig(**GREEDY)
    for call in (model.generate, lambda *a, **k: hf_aspire.generate(model, *a, **k)):
        out = call(batch["input_ids"], config, attention_mask=mask, assistant="aspire", aspire_config=small())
        assert out.tolist() == text.tolist()
    with pytest.raises(TypeError, match="multiple values"):
        model.generate(batch["input_ids"], inputs=batch["input_ids"], assistant="aspire")


def test_the_second_entry(model: LlamaForCausalLM, batch: Batch, text: Tensor) -> None:
    before = state(model)
    out = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small(), return_dict_in_generate=True)
    assert isinstance(out, AspireOutput)
    assert out.sequences.tolist() == text.tolist()
    assert sum(out.aspire_stats.drafted) > 0
    assert (
        hf_aspire.generate(model, batch["input_ids"], attention_mask=batch["attention_mask"], **GREEDY).tolist()
        == text.tolist()
    )
    assert state(model) == before


@pytest.mark.parametrize("on", [False, True])
def test_as_custom_generate(model: LlamaForCausalLM, batch: Batch, text: Tensor, on: bool) -> None:
    recorder = Recorder()
    if on:
        hf_aspire.enable()
    try:
        out = model.generate(
            **batch, **GREEDY, custom_generate=hf_aspire.generate, aspire_config=recorder.config(page_size=8)
        )
    finally:
        hf_aspire.disable()
    assert out.tolist() == text.tolist()
    assert recorder.stats[0].config.page_size == 8


# ---- pipelines


PROMPTS = ["w3", "w5 w6 w7 w8", "w9 w10", "w11 w12 w13"]


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("where", ["call", "construction"])
@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_pipelines(model: LlamaForCausalLM, where: str, limit: str) -> None:
    from transformers import pipeline

    recorder = Recorder()
    ours = {"assistant": "aspire", "aspire_config": recorder.config()}
    options: dict[str, Any] = {"batch_size": 2, "do_sample": False, "max_new_tokens": NEW}
    if limit == "max_length":
        options |= {"max_new_tokens": None, "max_length": NEW + 4}
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer())(PROMPTS, **options)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer(), **(ours if where == "construction" else {}))
    assert made(PROMPTS, **options, **(ours if where == "call" else {})) == expected
    assert [len(stats.committed) for stats in recorder.stats] == [2, 2]


# ---- outputs


def test_statistics_arrive_in_the_output_and_by_callback(model: LlamaForCausalLM, batch: Batch) -> None:
    recorder = Recorder()
    out = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=recorder.config(), return_dict_in_generate=True)
    assert out["aspire_stats"] is out.aspire_stats
    assert len(recorder.stats) == 1
    assert recorder.stats[0].committed == out.aspire_stats.committed == [NEW] * len(LENGTHS)
    tensor = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=recorder.config())
    assert isinstance(tensor, Tensor)
    assert len(recorder.stats) == 2


def test_a_prompt_that_is_returned_several_times_is_read_once(model: LlamaForCausalLM, batch: Batch) -> None:
    with forwards(model) as seen:
        out = hf_aspire.generate(
            model,
            **batch,
            do_sample=True,
            num_return_sequences=3,
            max_new_tokens=NEW,
            aspire_config=small(seed=1, schedule="staggered"),
            return_dict_in_generate=True,
        )
    assert out.sequences.shape == (3 * len(LENGTHS), max(LENGTHS) + NEW)
    prompt_tokens = sum(LENGTHS)
    assert max(tokens for _, tokens in seen) == prompt_tokens
    assert len({tuple(row) for row in out.sequences.tolist()}) == 3 * len(LENGTHS)
    assert len(out.aspire_stats.committed) == 3 * len(LENGTHS)
