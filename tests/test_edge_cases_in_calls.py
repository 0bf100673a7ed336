"""Cases 16 to 28, by number: calls that some speculative decoder took without doing them, or lost fields of."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from kit import MEMORY_BOUND, VOCABULARY, aspire_output, plain, ragged, small
from transformers import GenerationConfig

import hf_aspire

LENGTHS = (1, 2, 15, 120)
NEW = 13
pytestmark = pytest.mark.usefixtures("enabled")


# ---- refusals


def test_case_16_windows_are_refused_where_the_call_can_fill_them():
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MistralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, sliding_window=24, pad_token_id=0)
    model = MistralForCausalLM(config).double().eval()
    short = ragged([3, 10])
    assert torch.equal(
        aspire_output(model, short, small(), max_new_tokens=8).sequences, plain(model, short, max_new_tokens=8)
    )
    with pytest.raises(ValueError, match=r"MistralForCausalLM.*window of 2"):
        aspire_output(model, ragged([3, 20]), small(), max_new_tokens=8)


@pytest.mark.parametrize("name", ["static", "offloaded", "quantized"])
def test_case_17_other_caches_are_refused(model, batch, name):
    with pytest.raises(ValueError, match=f"cache_implementation='{name}'"):
        aspire_output(model, batch, small(), max_new_tokens=NEW, cache_implementation=name)


def test_case_18_an_unsupported_transformers_is_one_clear_error():
    code = "import transformers; transformers.__version__ = '5.16.0'; import hf_aspire"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError: hf_aspire: got transformers 5.16.0, expected" in done.stderr


def test_case_19_stateful_models_are_refused_by_class():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        hf_aspire.generate(model, ragged([5])["input_ids"], max_new_tokens=3)


@pytest.mark.parametrize(
    "keywords",
    [
        {"num_beams": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"prompt_lookup_num_tokens": 3},
        {"guidance_scale": 1.5},
    ],
)
def test_case_20_other_modes_are_refused(model, batch, keywords):
    with pytest.raises(ValueError, match="assistant='aspire'"):
        aspire_output(model, batch, small(), max_new_tokens=NEW, **keywords)


def test_case_21_encoder_decoders_and_images_are_refused(model, batch):
    from transformers import T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=48, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        hf_aspire.generate(t5, batch["input_ids"], max_new_tokens=3)
    with pytest.raises(ValueError, match="pixel_values"):
        aspire_output(model, batch, small(), max_new_tokens=NEW, pixel_values=torch.zeros(1, 3, 4, 4))


# ---- fields and options

# 22 and 23 are pipelines: tests/test_entries.py.


@pytest.mark.parametrize("eos", [None, [5, 9, 30]])
def test_case_25_scores_and_logits(model, batch, eos):
    keywords = {"max_new_tokens": NEW, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    expected = plain(model, batch, return_dict_in_generate=True, eos_token_id=eos, **keywords)
    output = aspire_output(model, batch, small(), eos_token_id=eos, **keywords)
    new = output.sequences.shape[1] - LENGTHS[-1]
    for mine, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert len(mine) == len(theirs) == new
        assert all(a.shape == (len(LENGTHS), VOCABULARY) for a in mine)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, theirs, strict=True))


def test_case_26_logits_only_where_they_are_needed(model):
    """A prompt of n tokens computes one row of logits, not n."""
    shapes = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[1]))
    try:
        aspire_output(model, ragged([100, 300]), small(schedule="fixed"), max_new_tokens=5)
    finally:
        handle.remove()
    assert max(shapes) <= 16


def test_case_27_options_take_effect_however_they_are_given(model, batch):
    as_object = aspire_output(model, batch, small(sparsity=0.5), max_new_tokens=NEW)
    as_dict = model.generate(
        **batch,
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        assistant="aspire",
        aspire_config={"page_size": 4, "min_pages": 2, "recent_pages": 1, "max_draft": 4, "draft_length": 3}
        | {"cost": MEMORY_BOUND, "sparsity": 0.5},
    )
    assert as_object.aspire_stats.config == as_dict.aspire_stats.config == small(sparsity=0.5)
    assert aspire_output(model, batch, None, max_new_tokens=2).aspire_stats.config == hf_aspire.AspireConfig()


def test_case_28_generation_config_names_the_assistant(model, batch, text):
    config = GenerationConfig(assistant="aspire", max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    output = model.generate(**batch, generation_config=config)
    assert torch.equal(output.sequences, text)
    assert output.aspire_stats.forwards > 0
