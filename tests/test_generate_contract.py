"""The rest of what plain `generate` promises: prompts with special tokens, settings from every source, two turns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kit import PAD, Batch, aspire, plain, ragged, right_drafts, small, tiny_llama, wrong_drafts
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM, StaticCache
from transformers.generation import logits_process as stock
from transformers.utils import logging

import hf_aspire
from hf_aspire import compat
from hf_aspire.testing import forced_drafts

LENGTHS = (4, 30, 11)
WIDTH, NEW = max(LENGTHS), 10


def check(model: LlamaForCausalLM, batch: Batch, **keywords: Any) -> Tensor:
    """Plain's sequences, with accepted and with rejected drafts."""
    expected = plain(model, batch, **keywords)
    for drafts in (right_drafts, wrong_drafts):
        with forced_drafts(drafts(expected, batch["input_ids"].shape[1])):
            assert torch.equal(aspire(model, batch, small(), **keywords).sequences, expected)
    return expected


# ---- prompts


def test_an_eos_that_is_the_pad_token_ends_and_pads(model: LlamaForCausalLM, batch: Batch, text: Tensor) -> None:
    end = int(text[1, WIDTH + 3])
    padded = batch | {"input_ids": batch["input_ids"].where(batch["attention_mask"].bool(), torch.tensor(end))}
    expected = check(model, padded, max_new_tokens=NEW, eos_token_id=end, pad_token_id=end)
    assert (expected[1, WIDTH + 3 :] == end).all()


def test_prompts_may_hold_eos_and_pad_tokens(model: LlamaForCausalLM) -> None:
    """Only new tokens end a text, and only the mask hides."""
    batch = ragged(LENGTHS, seed=4)
    batch["input_ids"][0, -3:] = torch.tensor([9, PAD, 5])
    batch["input_ids"][1, [2, 7, WIDTH - 1]] = torch.tensor([PAD, 9, 9])
    end = int(plain(model, batch, max_new_tokens=NEW)[2, WIDTH + 4])
    expected = check(model, batch, max_new_tokens=NEW, eos_token_id=[9, end], pad_token_id=PAD)
    assert expected.shape[1] > WIDTH + 1


def test_right_padding_gets_plains_warning(model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture) -> None:
    batch = {name: tensor.flip(1) for name, tensor in ragged(LENGTHS).items()}
    logger, verbosity = logging.get_logger("transformers"), logging.get_verbosity()
    logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    try:
        warned = []
        for call in (plain, lambda *arguments, **keywords: aspire(*arguments, small(), **keywords).sequences):
            caplog.clear()
            call(model, batch, max_new_tokens=2)
            warned.append([record.message for record in caplog.records if "right-padding" in record.message])
    finally:
        logger.removeHandler(caplog.handler)
        logging.set_verbosity(verbosity)
    assert warned[0] == warned[1] and warned[0]  # twice where Transformers hands records on to the root logger (CI)


# ---- where settings come from


def test_the_models_own_generation_config_may_ask_for_sampling(batch: Batch, text: Tensor) -> None:
    model = tiny_llama()
    settings = {"do_sample": True, "temperature": 1.4, "top_k": 12, "max_new_tokens": NEW}
    explicit = aspire(model, batch, small(seed=3), **settings).sequences
    model.generation_config = GenerationConfig(**settings, pad_token_id=PAD)
    before = copy.deepcopy(model.generation_config.to_dict())
    drawn = hf_aspire.generate(model, **batch, aspire_config=small(seed=3))
    assert torch.equal(drawn, explicit)
    assert not torch.equal(drawn, text)
    assert model.generation_config.to_dict() == before
    assert torch.equal(aspire(model, batch, small(), do_sample=False).sequences, text)  # a keyword wins


def test_a_call_leaves_nothing_to_the_next_one(batch: Batch, text: Tensor) -> None:
    model = tiny_llama()
    penalty = {"repetition_penalty": 5.0, "eos_token_id": int(text[0, WIDTH + 2]), "max_new_tokens": NEW}
    expected = plain(model, batch, **penalty)
    config = small()
    for _ in range(2):
        assert torch.equal(aspire(model, batch, config, **penalty).sequences, expected)
        assert torch.equal(aspire(model, batch, config, max_new_tokens=NEW).sequences, text)
    assert not torch.equal(expected, text[:, : expected.shape[1]])
    assert config == small()


# ---- processors and outputs


def test_warpers_run_once_for_all_positions_of_a_step(
    model: LlamaForCausalLM, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And processors that read the text once per column."""
    seen: dict[str, int] = {}
    for kind in (stock.TemperatureLogitsWarper, stock.RepetitionPenaltyLogitsProcessor):

        def counted(
            self: Any, ids: Tensor, scores: Tensor, call: Any = kind.__call__, name: str = kind.__name__
        ) -> Any:
            seen[name] = max(seen.get(name, 0), len(scores))
            return call(self, ids, scores)

        monkeypatch.setattr(kind, "__call__", counted)
    result = aspire(
        model,
        batch,
        small(schedule="fixed", draft_length=4, seed=0, sparsity=1.0),
        do_sample=True,
        temperature=0.7,
        repetition_penalty=1.1,
        max_new_tokens=NEW,
    )
    assert result.stats.acceptance_rate == 1
    assert seen == {"TemperatureLogitsWarper": 3 * 5, "RepetitionPenaltyLogitsProcessor": 3}


def test_a_decay_that_meets_a_banned_end_token_is_plains_text_or_an_error(
    model: LlamaForCausalLM, batch: Batch
) -> None:
    """Older versions of Transformers add infinity to minus infinity there, and plain takes the argmax of NaN."""
    keywords = {"max_new_tokens": NEW, "min_new_tokens": 6, "eos_token_id": [5, 9]}
    keywords |= {"exponential_decay_length_penalty": (2, 1.5), "pad_token_id": PAD}
    expected = model.generate(**batch, do_sample=False, output_scores=True, return_dict_in_generate=True, **keywords)
    if any(scores.isnan().any() for scores in expected.scores):
        with pytest.raises(ValueError, match="got nan as the highest score after the logits processors"):
            aspire(model, batch, small(), **keywords)
    else:
        check(model, batch, **keywords)


def test_scores_of_several_sequences_per_prompt_are_those_of_their_texts(
    model: LlamaForCausalLM, batch: Batch
) -> None:
    """What a policy-gradient loop reads: log-probabilities of drawn tokens, from processed scores."""
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 9, "num_return_sequences": 3}
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    output = aspire(model, batch, small(seed=1), max_new_tokens=NEW, **settings, **outputs).output
    given = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    mask = batch["attention_mask"].repeat_interleave(3, 0)
    for column in range(NEW):
        prefix = output.sequences[:, : WIDTH + column]
        whole = torch.cat([mask, mask.new_ones(len(mask), column)], 1)
        single = {"input_ids": prefix, "attention_mask": whole} | outputs
        settings["num_return_sequences"] = 1
        step = model.generate(**single, **settings, max_new_tokens=1)
        torch.testing.assert_close(output.scores[column], step.scores[0], atol=1e-4, rtol=1e-4)
        chosen = output.sequences[:, WIDTH + column, None]
        expected = step.scores[0].log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(given[:, column], expected, atol=1e-4, rtol=1e-4)


# ---- caches


def cache_of(output: Any) -> Any:
    return output["cache" if "cache" in output else "past_key_values"]


@pytest.mark.parametrize("ends", [None, [5, 9, 30]])
def test_a_returned_cache_is_plains(model: LlamaForCausalLM, batch: Batch, ends: list[int] | None) -> None:
    keywords = {"max_new_tokens": NEW, "eos_token_id": ends, "return_dict_in_generate": True}
    expected = cache_of(model.generate(**batch, do_sample=False, **keywords))
    found = cache_of(aspire(model, batch, small(), **keywords).output)
    assert isinstance(found, DynamicCache)
    assert found.get_seq_length() == expected.get_seq_length()
    shown = torch.cat([batch["attention_mask"], torch.ones(3, expected.get_seq_length() - WIDTH)], 1).bool()
    for ours, plains in zip(found.layers, expected.layers, strict=True):
        for a, b in ((ours.keys, plains.keys), (ours.values, plains.values)):
            torch.testing.assert_close(a.transpose(1, 2)[shown], b.transpose(1, 2)[shown])


@pytest.mark.parametrize("ends", [None, [5, 9, 30]])
@pytest.mark.parametrize("first", ["plain", "aspire"])
@pytest.mark.parametrize("second", ["plain", "aspire"])
def test_a_second_turn_goes_on_from_either_cache(
    model: LlamaForCausalLM, batch: Batch, first: str, second: str, ends: list[int] | None
) -> None:
    def turns(kinds: tuple[str, str]) -> Tensor:
        inputs: dict[str, Any] = dict(batch)
        for turn, kind in enumerate(kinds):
            keywords = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends, "pad_token_id": PAD}
            keywords |= {"return_dict_in_generate": True}
            if kind == "plain":
                output = model.generate(**inputs, **keywords)
            else:
                output = hf_aspire.generate(model, **inputs, **keywords, aspire_config=small())
            cache = cache_of(output)
            assert cache.get_seq_length() == output.sequences.shape[1] - 1
            ids = torch.cat([output.sequences, torch.tensor([[3, 7, turn]]).expand(3, -1)], 1)
            mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, WIDTH:])], 1)
            inputs = {"input_ids": ids, "attention_mask": mask, compat.CACHE_NAME: cache}
        return output.sequences

    assert torch.equal(turns((first, second)), turns(("plain", "plain")))


def test_caches_that_cannot_be_continued_are_refused(model: LlamaForCausalLM, batch: Batch) -> None:
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="got a StaticCache to continue from, expected a DynamicCache"):
        aspire(model, batch, small(), max_new_tokens=3, **{compat.CACHE_NAME: static})
    other = model(**ragged([8, 5]), use_cache=True)[compat.CACHE_NAME]
    with pytest.raises(ValueError, match="expected 3 rows"):
        aspire(model, batch, small(), max_new_tokens=3, **{compat.CACHE_NAME: other})


# ---- adapters


def test_adapters_may_change_between_calls(batch: Batch, text: Tensor) -> None:
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    tuned = peft.get_peft_model(tiny_llama(), lora, "first").eval()
    tuned.add_adapter("second", lora)
    tuned.eval()

    def texts(generate: Any) -> list[Tensor]:
        found = []
        for name in ("first", "second", "first"):
            tuned.set_adapter(name)
            found.append(generate(tuned))
        tuned.merge_adapter(["second"])
        found.append(generate(tuned))
        tuned.unmerge_adapter()
        return [*found, generate(tuned)]

    expected = texts(lambda model: plain(model, batch, max_new_tokens=NEW))
    found = texts(lambda model: aspire(model, batch, small(), max_new_tokens=NEW).sequences)
    assert all(torch.equal(ours, plains) for ours, plains in zip(found, expected, strict=True))
    assert len({tuple(t.flatten().tolist()) for t in [*expected, text]}) >= 3
    merged = tuned.merge_and_unload()
    assert torch.equal(
        aspire(merged, batch, small(), max_new_tokens=NEW).sequences, plain(merged, batch, max_new_tokens=NEW)
    )
