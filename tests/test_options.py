"""Where options may stand and under which names, and what a wrong one says."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from kit import GREEDY, NEW, Batch, Recorder, forwards, ragged, tiny_llama
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

import hf_aspire
from hf_aspire import AspireConfig, compat


@pytest.mark.usefixtures("enabled")
def test_generation_configs_may_ask_for_it(model: LlamaForCausalLM, batch: Batch, text: Tensor) -> None:
    recorder = Recorder()
    config = GenerationConfig(**GREEDY, assistant="aspire", aspire_config={"on_stats": recorder, "page_size": 8})
    before = dict(vars(config))
    assert model.generate(**batch, generation_config=config).tolist() == text.tolist()
    assert vars(config) == before
    assert [stats.config.page_size for stats in recorder.stats] == [8]
    passed = recorder.config(page_size=4)
    assert model.generate(**batch, generation_config=config, aspire_config=passed).tolist() == text.tolist()
    assert [stats.config.page_size for stats in recorder.stats] == [8, 4]  # an argument wins
    assert model.generate(**batch, generation_config=config, assistant=None).tolist() == text.tolist()
    assert len(recorder.stats) == 2  # and None means plain


@pytest.mark.usefixtures("enabled")
def test_the_models_own_generation_config_may_ask_for_it(batch: Batch, text: Tensor, tmp_path: Any) -> None:
    model = tiny_llama()
    recorder = Recorder()
    model.generation_config.assistant = "aspire"
    assert model.generate(**batch, **GREEDY, aspire_config=recorder.config()).tolist() == text.tolist()
    assert len(recorder.stats) == 1
    model.generation_config = GenerationConfig(assistant="aspire", aspire_config={"page_size": 8}, pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    out = loaded.generate(**batch, **GREEDY, return_dict_in_generate=True)
    assert out.sequences.tolist() == text.tolist()
    assert out.aspire_stats.config.page_size == 8


def test_a_cache_under_its_old_name(model: LlamaForCausalLM) -> None:
    """`past_key_values` is called `cache` by newer versions, which still take the old name."""
    first, second = ragged([8]), ragged([14])
    second["input_ids"][:, :8] = first["input_ids"]
    results = []
    for generate in (model.generate, functools.partial(hf_aspire.generate, model)):
        cache = model(**first, use_cache=True)[compat.CACHE_NAME]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(generate(**second, **GREEDY, past_key_values=cache).tolist())
        assert cache.get_seq_length() == 14 + NEW - 1
    assert results[0] == results[1]


def test_nothing_is_logged_that_plain_does_not_log(
    model: LlamaForCausalLM, batch: Batch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_warning()
    logging.warning_once.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hf_aspire.generate(model, **batch, generation_config=GenerationConfig(**GREEDY, assistant="aspire"))
    finally:
        logging.set_verbosity(level)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("enabled")
def test_a_wrong_assistant_or_a_lonely_config_is_an_error(model: LlamaForCausalLM, batch: Batch) -> None:
    with forwards(model) as seen:
        with pytest.raises(ValueError, match="got 'medusa', expected 'aspire' or None"):
            model.generate(**batch, **GREEDY, assistant="medusa")
        with pytest.raises(ValueError, match="got it without assistant='aspire'"):
            model.generate(**batch, **GREEDY, aspire_config=AspireConfig())
        with pytest.raises(ValueError, match=r"unknown key.*pagesize"):
            model.generate(**batch, **GREEDY, assistant="aspire", aspire_config={"pagesize": 4})
        with pytest.raises(TypeError, match="got str, expected an AspireConfig"):
            model.generate(**batch, **GREEDY, assistant="aspire", aspire_config="fast")
        with pytest.raises(ValueError, match="got assistant=None, expected 'aspire'"):
            hf_aspire.generate(model, **batch, **GREEDY, assistant=None)
        with pytest.raises(ValueError, match="got max_new_token for LlamaForCausalLM"):
            model.generate(**batch, max_new_token=3, assistant="aspire")
    assert seen == []
