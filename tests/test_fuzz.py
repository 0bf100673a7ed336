"""Random combinations of arguments, batch shapes and schedules give what plain `generate` gives.

`HYPOTHESIS_PROFILE=long` draws 2,000 examples instead of CI's 60.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from kit import POLICIES, SCHEDULES, VOCABULARY, pick, ragged, small
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_aspire

EXAMPLES = 2000 if settings.get_current_profile_name() == "long" else 60
TOKENS = st.integers(1, VOCABULARY - 1)


class Favour(LogitsProcessor):
    """Looks at the whole batch, keeps state, and records what it was shown."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.clone())
        if input_ids.shape[1] == 0:  # a prompt of embeddings has no tokens
            return scores
        favourite = (input_ids[:, -1] * 3 + len(self.seen) + int(input_ids[0].sum())) % VOCABULARY
        return scores.scatter_add(1, favourite[:, None], torch.full_like(scores[:, :1], 2.0))


class Columns(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.columns: list[list[Any]] = []

    def put(self, value: torch.Tensor) -> None:
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.columns.append([])


class StopOnSum(StoppingCriteria):
    """Stops a row on a property of its text and of its neighbours'."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        return (input_ids.sum(1) + input_ids[:, -1].max()) % 13 == 0


def optional(strategy: st.SearchStrategy[Any], chance: int = 3) -> st.SearchStrategy[Any]:
    """A value one time in `chance`, else None."""
    return st.integers(1, chance).flatmap(lambda n: strategy if n == 1 else st.none())


def arguments() -> st.SearchStrategy[dict[str, Any]]:
    """Keywords of `generate` that change its text, its stop or its outputs."""
    return st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, 14),
            "min_new_tokens": optional(st.integers(1, 10)),
            "eos_token_id": optional(st.lists(TOKENS, min_size=1, max_size=8, unique=True), 2),
            "pad_token_id": st.sampled_from([0, 0, 5]),
            "repetition_penalty": optional(st.sampled_from([0.8, 1.3, 5.0])),
            "no_repeat_ngram_size": optional(st.integers(1, 3), 4),
            "bad_words_ids": optional(st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=3), 4),
            "suppress_tokens": optional(st.lists(TOKENS, min_size=1, max_size=4, unique=True), 4),
            "begin_suppress_tokens": optional(st.lists(TOKENS, min_size=1, max_size=4, unique=True), 4),
            "forced_eos_token_id": optional(TOKENS, 5),
            "forced_bos_token_id": optional(TOKENS, 5),
            "encoder_repetition_penalty": optional(st.sampled_from([0.7, 1.5]), 5),
            "exponential_decay_length_penalty": optional(st.just((2, 1.4)), 5),
            "renormalize_logits": optional(st.just(True), 5),
            "output_scores": st.booleans(),
            "output_logits": st.booleans(),
        }
    )


def configurations() -> st.SearchStrategy[Any]:
    return st.builds(
        small,
        page_size=st.sampled_from([4, 16]),
        min_pages=st.integers(1, 2),
        context=st.sampled_from(POLICIES),
        schedule=st.sampled_from(SCHEDULES),
        granularity=st.sampled_from([1, 2, 4]),
        sparsity=st.sampled_from([0.07, 0.3, 1.0]),
        max_draft=st.integers(1, 6),
        draft_length=st.integers(1, 6),
    )


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    keywords=arguments(),
    processor=st.booleans(),
    criterion=st.booleans(),
    embedded=st.booleans(),
    turns=st.integers(1, 2),
    config=configurations(),
)
def test_any_arguments_give_plains_text_stop_and_outputs(
    model, lengths, seed, keywords, processor, criterion, embedded, turns, config
):
    batch = ragged(lengths, seed)
    keywords = {name: value for name, value in keywords.items() if value is not None}
    keywords["output_scores"] |= "renormalize_logits" in keywords
    if "eos_token_id" not in keywords:
        keywords.pop("exponential_decay_length_penalty", None)
    results = []
    for settings_ in ({}, {"assistant": "aspire", "aspire_config": config}):
        favour, streamer = Favour(), Columns()
        extra: dict[str, Any] = {
            "logits_processor": LogitsProcessorList([favour] if processor else []),
            "stopping_criteria": StoppingCriteriaList([StopOnSum()] if criterion else []),
            "streamer": streamer,
        }
        try:
            outputs = conversation(model, batch, turns, embedded, {**keywords, **extra, **settings_})
        except ValueError as error:
            if not settings_:
                reject()  # plain refuses the combination (a token both forced and suppressed, say)
            # Where every token is banned and the scores are renormalised, plain returns the argmax of NaN.
            if "got nan as the highest score" not in str(error) or not any(map(has_nan, results[0][0])):
                raise
            return
        results.append((outputs, favour.seen, streamer.columns))
    compare(*results)


def conversation(model, batch, turns, embedded, keywords):
    """One call, or two of which the second continues from the first one's cache."""
    hf_aspire.enable()
    try:
        inputs: dict[str, Any] = dict(batch)
        if embedded:
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
            turns = 1
        outputs = []
        for turn in range(turns):
            output = model.generate(**inputs, do_sample=False, return_dict_in_generate=True, **keywords)
            outputs.append(output)
            cache = output.get("cache", output.get("past_key_values"))
            new = torch.full((len(output.sequences), 2), 7 + turn)
            ids = torch.cat([output.sequences, new], 1)
            mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, batch["input_ids"].shape[1] :])], 1)
            inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
        return outputs
    finally:
        hf_aspire.disable()


def has_nan(output) -> bool:
    return any(bool(scores.isnan().any()) for scores in output.scores or ())


def compare(expected, got) -> None:
    for mine, theirs in zip(got[0], expected[0], strict=True):
        assert torch.equal(mine.sequences, theirs.sequences)
        for name in ("scores", "logits"):
            ours, plains = getattr(mine, name), getattr(theirs, name)
            assert (ours is None) == (plains is None)
            for a, b in zip(ours or (), plains or (), strict=True):
                assert a.shape == b.shape
                same = (a == b) | ((a - b).abs() <= 1e-4 * b.abs().clamp(min=1))
                assert bool(same.all())
    assert len(got[1]) == len(expected[1])
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))
    assert got[2] == expected[2]


def test_rows_may_repeat(model):
    """A batch with the same prompt several times is prefilled once and still gives plain's rows."""
    batch = pick(ragged([9, 30], 3), [0, 1, 0, 1, 1])
    output = hf_aspire.generate(model, **batch, do_sample=False, max_new_tokens=9, aspire_config=small())
    assert torch.equal(output, model.generate(**batch, do_sample=False, max_new_tokens=9))
