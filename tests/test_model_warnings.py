"""Models that work, but not as their owner may think, are warned about."""

from __future__ import annotations

import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from kit import aspire, pick, plain, ragged, small, tiny_llama

import hf_aspire
from hf_aspire.probe import _WithoutDropout


def generate(model):
    return hf_aspire.generate(model, **ragged([9]), do_sample=False, max_new_tokens=3, aspire_config=small())


TRAINING = r"LlamaForCausalLM is in training mode.*call model.eval\(\)"


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_model_in_training_mode_is_warned_about_and_works_without_dropout(checkpoints):
    model = tiny_llama().train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    with pytest.warns(RuntimeWarning, match=TRAINING):
        output = generate(model)
    assert torch.equal(output, plain(model.eval(), ragged([9]), max_new_tokens=3))


@pytest.mark.parametrize("schedule", ["staggered", "autoregressive"])
def test_text_under_dropout_is_a_draw_from_plains_distribution(schedule):
    """Three tokens of 4,000 equal prompts: as far from plain's as plain's are from each other, and as varied."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.5, lora_alpha=32)
    tuned = peft.get_peft_model(tiny_llama(num_hidden_layers=2), lora).train()
    many = pick(ragged([7]), [0] * 4000)
    expected, again = (plain(tuned, many, max_new_tokens=3)[:, 7:] for _ in range(2))
    with pytest.warns(RuntimeWarning, match=TRAINING):
        output = aspire(tuned, many, small(schedule=schedule, draft_length=2), max_new_tokens=3)
    assert all(module.training for module in tuned.modules())
    for columns in ([0], [0, 1], [1, 2]):
        noise = distance(expected[:, columns], again[:, columns])
        assert noise > 0
        assert distance(expected[:, columns], output.sequences[:, 7:][:, columns]) < 1.5 * noise + 0.01
    assert (schedule == "autoregressive") == (sum(output.stats.drafted) == 0)


def distance(first, second):
    """Total variation between two samples of token tuples `[n, k]`."""
    counts = [Counter(map(tuple, sample.tolist())) for sample in (first, second)]
    return sum(abs(counts[0][key] - counts[1][key]) for key in counts[0] | counts[1]) / 2 / len(first)


def test_dropout_is_off_for_the_comparison_of_this_thread_alone():
    ones = torch.ones(1000)
    with ThreadPoolExecutor(1) as other, _WithoutDropout():
        assert torch.equal(torch.nn.Dropout(0.5)(ones), ones)
        assert not torch.equal(other.submit(torch.nn.Dropout(0.5), ones).result(), ones)


def test_int8_weights_are_warned_about(monkeypatch):
    model = tiny_llama()
    monkeypatch.setattr(model.config, "quantization_config", SimpleNamespace(load_in_8bit=True), raising=False)
    with pytest.warns(UserWarning, match="LLM.int8"):
        generate(model)


def test_an_ordinary_model_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(tiny_llama())
