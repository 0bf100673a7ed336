"""Every argument of `generate` is classified in docs/generate-arguments.md, and does what the page says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import plain, small
from transformers import GenerationConfig, GenerationMixin, SynthIDTextWatermarkingConfig, WatermarkingConfig

import hf_aspire

LENGTHS = (1, 9, 40)
ROOT = Path(__file__).parent
PAGE = (ROOT.parent / "docs" / "generate-arguments.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (supported|no effect|refused) \| .* \| `([\w.]+)::(\w+)` \|$", re.M)


def section(title: str) -> dict[str, str]:
    """Status by argument in one table of the page."""
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return {name: status for name, status, _, _ in ROW.findall(text)}


FIELDS = section("Fields of `GenerationConfig`")
PARAMETERS = section("Parameters of `generate`")


def aspire(model, batch, **keywords: Any) -> torch.Tensor:
    return hf_aspire.generate(model, **batch, aspire_config=small(), **({"do_sample": False} | keywords))


def test_every_field_of_the_installed_transformers_is_classified():
    known = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert known - FIELDS.keys() == set(), "classify these in docs/generate-arguments.md and hf_aspire/arguments.py"
    assert FIELDS.keys() - known == set(), "no longer in Transformers"


def test_every_parameter_of_the_installed_transformers_is_classified():
    assert set(inspect.signature(GenerationMixin.generate).parameters) - {"self"} == set(PARAMETERS)


def test_the_page_names_tests_that_exist():
    for name, _, file, test in ROW.findall(PAGE):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{name}: {file}::{test}"


def other_value(name: str) -> Any:
    """A value of a field that is not its default."""
    values = {
        "constraints": [object()],
        "force_words_ids": [[3]],
        "cache_config": {"backend": "quanto"},
        "speculation_type": "dflash",
        "dola_layers": "low",
        "num_assistant_tokens_schedule": "heuristic",
        "transformers_version": "5.0",
        "early_stopping": True,
        "is_assistant": False,
        "compile_config": None,
        "continuous_batching_config": None,
        "assistant_confidence_threshold": 0.7,
        "assistant_ensemble_weight": 0.5,
        "length_penalty": 1.5,
        "guidance_scale": 1.5,
        "penalty_alpha": 0.6,
        "diversity_penalty": 0.5,
        "use_cache": False,
    }
    flags = ("token_healing", "output_attentions", "output_hidden_states", "use_mtp", "disable_compile", "low_memory")
    return values.get(name, True if name in flags else 3)


@pytest.mark.parametrize("name", [n for n, status in FIELDS.items() if status == "refused"] + ["use_cache"])
def test_refused_fields_are_named(model, batch, name):
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=r"aspire|group|constrain|beam"):
            aspire(model, batch, max_new_tokens=3, **{name: other_value(name)})
    finally:
        handle.remove()
    assert not forwards


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "do_sample"])  # the noise is not plain's
def test_any_value_of_any_field_gives_plains_text_or_an_error(model, batch, name):
    for value in (None, 0, 1):
        keywords = {"max_new_tokens": 6, "eos_token_id": [5, 9], "pad_token_id": 0} | {name: value}
        try:
            expected = plain(model, batch, **keywords)
        except Exception:
            continue  # not a value of this field
        try:
            output = aspire(model, batch, **keywords)
        except ValueError:
            continue
        expected, output = (getattr(result, "sequences", result) for result in (expected, output))
        assert torch.equal(output, expected), value


@pytest.mark.parametrize("name", [n for n, status in FIELDS.items() if status == "no effect"])
def test_fields_without_effect_change_nothing(model, batch, name):
    text = plain(model, batch, max_new_tokens=6)
    assert torch.equal(aspire(model, batch, max_new_tokens=6, **{name: other_value(name)}), text)


@pytest.mark.parametrize("name", [n for n, status in PARAMETERS.items() if status == "refused"])
def test_refused_parameters_are_named(model, batch, name):
    value: Any = {"assistant_model": model, "custom_generate": lambda *a, **k: None, "synced_gpus": True}.get(
        name, batch["input_ids"]
    )
    with pytest.raises(ValueError, match=name):
        aspire(model, batch, max_new_tokens=3, **{name: value})


@pytest.mark.parametrize(
    "keywords",
    [{"min_p": 0.1}, {"typical_p": 0.5}, {"epsilon_cutoff": 0.03}, {"eta_cutoff": 0.05}, {"top_h": 0.6}],
    ids=lambda keywords: next(iter(keywords)),
)
def test_every_warper_gives_plains_scores(model, batch, keywords):
    """Warpers act when sampling: the scores of the first column, and of the second behind one token, are plain's."""
    settings = {"do_sample": True, "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    mine = aspire(model, batch, **settings, **keywords)
    theirs = model.generate(**batch, **settings, **keywords)
    assert torch.equal(mine.scores[0].isinf(), theirs.scores[0].isinf())
    finite = ~theirs.scores[0].isinf()
    assert torch.allclose(mine.scores[0][finite], theirs.scores[0][finite], atol=1e-4)


@pytest.mark.parametrize("eos", [None, [5, 9]])
@pytest.mark.parametrize(
    "keywords",
    [
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, context_history_size=16)},
        {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 2 + row + k) % 48 for k in range(5)]},
    ],
    ids=["watermark", "watermark with state", "prefix"],
)
def test_column_by_column_arguments_give_plains_text(model, batch, keywords, eos):
    expected = plain(model, batch, max_new_tokens=9, eos_token_id=eos, **keywords)
    assert torch.equal(aspire(model, batch, max_new_tokens=9, eos_token_id=eos, **keywords), expected)


def test_a_call_without_a_prompt_starts_from_bos(model):
    expected = model.generate(do_sample=False, max_new_tokens=7)
    assert torch.equal(hf_aspire.generate(model, do_sample=False, max_new_tokens=7, aspire_config=small()), expected)


def test_max_time_stops_all_rows_at_one_column(model, batch):
    text = plain(model, batch, max_new_tokens=30)
    stopped = aspire(model, batch, max_new_tokens=30, max_time=0.0)
    assert stopped.shape[1] == batch["input_ids"].shape[1] + 1
    assert torch.equal(stopped, text[:, : stopped.shape[1]])
