"""Cases, by number, whose text some speculative decoder got wrong; others are in `test_edge_cases_in_calls`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import (
    VOCABULARY,
    aspire_output,
    letter,
    letters,
    pick,
    plain,
    ragged,
    right_drafts,
    small,
    tiny_llama,
    wrong_drafts,
)
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import hf_aspire
from hf_aspire.testing import forced_drafts

LENGTHS = (1, 2, 15, 120)
NEW = 13
pytestmark = pytest.mark.usefixtures("enabled")


def both_ways(text: Tensor, width: int):
    """Full acceptance and full rejection."""
    return (right_drafts(text, width), wrong_drafts(text, width))


def check(model, batch, config=None, **keywords: Any) -> hf_aspire.AspireOutput:
    """Same sequences as plain, whatever is accepted."""
    expected = plain(model, batch, **keywords)
    for drafts in both_ways(expected, batch["input_ids"].shape[1]):
        with forced_drafts(drafts):
            output = aspire_output(model, batch, config or small(schedule="staggered"), **keywords)
        assert torch.equal(output.sequences, expected)
    return output


# ---- stops and processors


def test_case_01_eos_inside_a_draft(model, batch, text):
    for token in sorted(set(text[:, LENGTHS[-1] :].flatten().tolist()))[::2]:  # test_stops sweeps them all
        check(model, batch, max_new_tokens=NEW, eos_token_id=token)


@pytest.mark.parametrize("new", range(1, 9))
def test_case_02_length_limits(model, batch, new):
    config = small(schedule="fixed", draft_length=3)
    assert check(model, batch, config, max_new_tokens=new).sequences.shape[1] == LENGTHS[-1] + new
    check(model, batch, config, max_length=LENGTHS[-1] + new)


def test_case_03_no_eos_and_no_pad_token(batch):
    model = tiny_llama(pad_token_id=None, eos_token_id=None)
    assert check(model, batch, max_new_tokens=NEW).sequences.shape[1] == LENGTHS[-1] + NEW


@pytest.mark.parametrize("eos", [None, 9])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_case_04_stop_strings_completed_inside_a_draft(model, batch, text, place, eos):
    stop = "".join(letter(token) for token in text[2, LENGTHS[-1] + place : LENGTHS[-1] + place + 2])
    output = check(model, batch, max_new_tokens=NEW, stop_strings=[stop], tokenizer=letters(), eos_token_id=eos)
    if eos is None:  # without an EOS a stopped row goes on until all stop
        assert output.sequences.shape[1] == LENGTHS[-1] + NEW


def test_case_05_min_new_tokens(model, batch, text):
    ends = sorted(set(text[:, LENGTHS[-1] :].flatten().tolist()))[:8]
    for least in (1, 4, NEW):
        check(model, batch, max_new_tokens=NEW, eos_token_id=ends, min_new_tokens=least)


@pytest.mark.parametrize("penalty", [1.3, 5.0])
def test_case_06_repetition_penalty(model, batch, penalty):
    check(model, batch, max_new_tokens=NEW, repetition_penalty=penalty)


class Record(LogitsProcessor):
    def __init__(self) -> None:
        self.prefixes: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids.clone())
        return scores


@pytest.mark.parametrize("eos", [None, [5, 9, 30]])
def test_case_07_a_processor_sees_plains_prefixes(model, batch, eos):
    expected = Record()
    sequences = plain(model, batch, max_new_tokens=NEW, logits_processor=[expected], eos_token_id=eos)
    for drafts in both_ways(sequences, LENGTHS[-1]):
        record = Record()
        with forced_drafts(drafts):
            processors = LogitsProcessorList([record])
            output = aspire_output(
                model, batch, small(), max_new_tokens=NEW, logits_processor=processors, eos_token_id=eos
            )
        assert torch.equal(output.sequences, sequences)
        assert len(record.prefixes) == len(expected.prefixes)
        assert all(torch.equal(a, b) for a, b in zip(record.prefixes, expected.prefixes, strict=True))


@pytest.mark.parametrize(
    "keywords",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [5, 6], [20, 21]]},
        {"sequence_bias": {(10, 20): 5.0, (3,): -4.0}},
    ],
)
def test_case_08_bans_that_a_draft_completes(model, batch, keywords):
    check(model, batch, max_new_tokens=NEW, **keywords)


# ---- sampling


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_case_09_sampled_text_is_a_draw_from_plains_distribution(model, sampling):
    """2,000 rows, second token: total variation 0.09 is 4 standard deviations here (see test_sampled_text)."""
    row = ragged([9])
    keywords = {"do_sample": True, "temperature": 1.2, "top_k": 20, "max_new_tokens": 2}
    config = small(sampling=sampling, seed=3, schedule="staggered")
    many = pick(row, [0] * 2000)
    drawn = aspire_output(model, many, config, **keywords).sequences[:, 9:]
    first = torch.mode(drawn[:, 0]).values
    second = drawn[drawn[:, 0] == first][:, 1]
    prefix = torch.cat([row["input_ids"], first[None, None]], 1)
    scores = model(prefix).logits[0, -1].float() / 1.2
    exact = torch.softmax(scores.masked_fill(scores < scores.topk(20).values[-1], -torch.inf), -1)
    frequency = torch.bincount(second, minlength=VOCABULARY) / len(second)
    assert 0.5 * float((frequency - exact).abs().sum()) < 0.5 * (20 / len(second)) ** 0.5 + 0.05


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_case_10_drafts_from_the_target_itself_are_accepted(model, batch, sampling):
    config = small(sparsity=1.0, schedule="fixed", sampling=sampling, seed=1)
    output = aspire_output(model, batch, config, do_sample=True, max_new_tokens=NEW)
    assert output.aspire_stats.acceptance_rate == 1.0


# ---- batches


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_case_11_batches_of_equal_length(model, rows):
    check(model, ragged([30] * rows), max_new_tokens=NEW)


def test_case_12_ragged_rows_as_in_plain_and_as_alone(model, batch, text):
    output = check(model, batch, max_new_tokens=NEW)
    for row, length in enumerate(LENGTHS):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in batch.items()}
        single = aspire_output(model, alone, small(), max_new_tokens=NEW).sequences[0, length:]
        assert torch.equal(single, output.sequences[row, LENGTHS[-1] :])


def test_case_13_rows_of_different_fate(model, batch, text):
    right, wrong = both_ways(text, LENGTHS[-1])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        mine = pick(batch, order)

        def drafts(row: int, position: int, token: int, order: list[int] = order) -> int:
            return (wrong, right, wrong, right)[order[row]](order[row], position, token)

        with forced_drafts(drafts):
            output = aspire_output(model, mine, small(schedule="staggered"), max_new_tokens=NEW)
        assert torch.equal(output.sequences, text[order])


def test_case_14_a_row_that_ends_early_is_padded(model, batch, text):
    end = int(text[1, LENGTHS[-1] + 2])
    output = check(model, batch, max_new_tokens=NEW, eos_token_id=end, pad_token_id=7)
    ended = (output.sequences[1, LENGTHS[-1] :] == end).nonzero()[0, 0]
    assert (output.sequences[1, LENGTHS[-1] + int(ended) + 1 :] == 7).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_case_15_padding_and_causality_on_every_attention(model, batch, text, attention):
    previous = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        assert torch.equal(aspire_output(model, batch, small(), max_new_tokens=NEW).sequences, text)
        assert model.config._attn_implementation == attention
    finally:
        model.set_attn_implementation(previous)


# ---- precision, and drafts of length one


def test_case_24_bf16_leaves_plain_at_near_ties_only(model):
    """Where the texts part, plain's own two best logits are within bfloat16's rounding of logits of this size."""
    half = tiny_llama().to(torch.bfloat16)
    rows = ragged([20] * 8, seed=5)
    mine = aspire_output(half, rows, small(), max_new_tokens=24).sequences
    theirs = plain(half, rows, max_new_tokens=24)
    for row in range(8):
        differ = (mine[row] != theirs[row]).nonzero().flatten().tolist()
        if differ:
            logits = half(theirs[row : row + 1, : differ[0]]).logits[0, -1].float()
            best = logits.topk(2).values
            assert float(best[0] - best[1]) <= 2.0**-4 * float(best[0].abs().clamp(min=1))


def test_case_29_garbage_drafts_of_length_one(model, batch, text):
    with forced_drafts(wrong_drafts(text, LENGTHS[-1])):
        output = aspire_output(model, batch, small(schedule="fixed", draft_length=1, max_draft=1), max_new_tokens=NEW)
    assert torch.equal(output.sequences, text)


def test_case_30_rows_at_their_limit(model, batch):
    for new in (1, 2):
        for schedule in ("fixed", "staggered", "fsm", "aspire"):
            check(model, batch, small(schedule=schedule), max_new_tokens=new)
