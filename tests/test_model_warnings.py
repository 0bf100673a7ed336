"""Models that work, but not as their owner may think, are warned about."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from kit import plain, ragged, small, tiny_llama

import hf_aspire


def generate(model):
    return hf_aspire.generate(model, **ragged([9]), do_sample=False, max_new_tokens=3, aspire_config=small())


def test_a_model_in_training_mode_is_warned_about_and_works_without_dropout():
    model = tiny_llama().train()
    with pytest.warns(UserWarning, match="LlamaForCausalLM is in training mode"):
        output = generate(model)
    assert torch.equal(output, plain(model.eval(), ragged([9]), max_new_tokens=3))


def test_int8_weights_are_warned_about(monkeypatch):
    model = tiny_llama()
    monkeypatch.setattr(model.config, "quantization_config", SimpleNamespace(load_in_8bit=True), raising=False)
    with pytest.warns(UserWarning, match="LLM.int8"):
        generate(model)


def test_an_ordinary_model_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generate(tiny_llama())
