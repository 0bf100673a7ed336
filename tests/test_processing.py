"""Stock logits processors: every position sees the prefix, drafts included, that plain `generate` would show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from kit import (
    PAD,
    POLICIES,
    VOCABULARY,
    Batch,
    aspire,
    mixed_drafts,
    plain,
    ragged,
    right_drafts,
    small,
    tiny_llama,
    wrong_drafts,
)
from packaging.version import Version
from torch import Tensor
from transformers import LlamaForCausalLM, StoppingCriteria
from transformers.generation import logits_process as stock

from hf_aspire.processing import Processing, pure_processors
from hf_aspire.testing import forced_drafts
from hf_aspire.verification import _joined

LENGTHS = (1, 2, 15, 60)
WIDTH = max(LENGTHS)
NEW = 14


class Text:
    """What each row says when nothing is processed: settings made from it have something to change."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.rows = plain(model, ragged(LENGTHS), max_new_tokens=NEW)[:, WIDTH:].tolist()
        self.first, self.middle, self.last = self.rows[0][3], self.rows[2][7], self.rows[3][10]
        self.pairs = [row[k : k + 2] for row in self.rows for k in (2, 5, 8)]
        self.ends = sorted({row[k] for row in self.rows for k in (2, 4)})


@pytest.fixture(scope="module")
def text(model: LlamaForCausalLM) -> Text:
    return Text(model)


SETTINGS: dict[str, Callable[[Text], dict[str, Any]]] = {
    "repetition penalty 1.3": lambda text: {"repetition_penalty": 1.3},
    "repetition penalty 5.0": lambda text: {"repetition_penalty": 5.0},
    "repetition reward": lambda text: {"repetition_penalty": 0.5},
    "encoder repetition penalty": lambda text: {"encoder_repetition_penalty": 3.0},
    "no repeated token": lambda text: {"no_repeat_ngram_size": 1},
    "no repeated pair": lambda text: {
        "no_repeat_ngram_size": 2,
        "sequence_bias": [[[text.first], 6.0], [[text.middle], 6.0]],
    },
    "no token of the prompt": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "no pair of the prompt": lambda text: {
        "encoder_no_repeat_ngram_size": 2,
        "sequence_bias": [[[text.first], 6.0]],
    },
    "bad words of one token": lambda text: {"bad_words_ids": [[text.first], [text.middle], [text.last]]},
    "bad words of two tokens": lambda text: {"bad_words_ids": text.pairs},
    "bias of one token": lambda text: {"sequence_bias": [[[text.first], -8.0], [[text.last], 6.0]]},
    "bias of two tokens": lambda text: {"sequence_bias": [[pair, -20.0] for pair in text.pairs]},
    "suppressed tokens": lambda text: {"suppress_tokens": [text.first, text.middle]},
    "suppressed first tokens": lambda text: {"begin_suppress_tokens": [row[0] for row in text.rows]},
    "least new tokens": lambda text: {"min_new_tokens": 6, "eos_token_id": text.ends},
    "least length": lambda text: {"min_length": WIDTH + 7, "eos_token_id": text.ends},
    "forced end": lambda text: {"forced_eos_token_id": 9},
    "decaying length": lambda text: {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 40},
    "normalised": lambda text: {"renormalize_logits": True, "repetition_penalty": 1.3},
    "everything": lambda text: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[text.first], *text.pairs],
        "min_new_tokens": 5,
        "eos_token_id": text.ends,
        "begin_suppress_tokens": [text.rows[0][0]],
        "encoder_repetition_penalty": 1.2,
        "forced_eos_token_id": 9,
        "renormalize_logits": True,
    },
}


def check_against_plain(model: LlamaForCausalLM, batch: Batch, **keywords: Any) -> Tensor:
    """Compares fully accepted, fully rejected and mixed drafts with plain `generate`; returns plain's sequences."""
    width = batch["input_ids"].shape[1]
    keywords = {"max_new_tokens": NEW, "pad_token_id": PAD} | keywords
    expected = plain(model, batch, **keywords)
    output = aspire(model, batch, small(schedule="staggered", sparsity=1.0), **keywords)
    assert torch.equal(output.sequences, expected)
    assert output.stats.acceptance_rate == 1  # so drafts were processed as the target is
    with forced_drafts(wrong_drafts(expected, width)):
        output = aspire(model, batch, small(schedule="staggered"), **keywords)
    assert torch.equal(output.sequences, expected)
    assert output.stats.acceptance_rate == 0 < sum(output.stats.drafted)
    with forced_drafts(mixed_drafts(expected, width, 0.8)):
        output = aspire(model, batch, small(schedule="fsm"), **keywords)
    assert torch.equal(output.sequences, expected)
    assert 0 < output.stats.acceptance_rate < 1
    return expected


@pytest.mark.parametrize("name", SETTINGS)
def test_stock_processors_give_plains_tokens(model: LlamaForCausalLM, text: Text, name: str) -> None:
    keywords = SETTINGS[name](text)
    expected = check_against_plain(model, ragged(LENGTHS), **keywords)
    unprocessed = plain(
        model, ragged(LENGTHS), max_new_tokens=NEW, eos_token_id=keywords.get("eos_token_id"), pad_token_id=PAD
    )
    assert expected.shape != unprocessed.shape or not torch.equal(expected, unprocessed)


def test_a_forced_first_token_gives_plains_tokens(model: LlamaForCausalLM) -> None:
    expected = check_against_plain(model, ragged((1, 1, 1)), forced_bos_token_id=13)
    assert expected[:, 1].tolist() == [13, 13, 13]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_removed_invalid_values_give_plains_tokens(value: float) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[7] = value
    check_against_plain(model, ragged(LENGTHS), remove_invalid_values=True, sequence_bias=[[[7], 3.0]])


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("schedule", ["fixed", "autoregressive"])
def test_scores_that_are_nan_are_an_error_that_names_row_and_token(schedule: str, context: str) -> None:
    model = tiny_llama(vocab_size=480)  # so that new tokens are not in the prompts
    text = plain(model, ragged((12, 30)), max_new_tokens=8)
    bad = int(text[1, 31])  # all scores behind it will be NaN
    assert bad not in text[0] and bad not in text[1, :31]
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = torch.nan
    config = small(schedule=schedule, context=context)
    with (
        forced_drafts(right_drafts(text, 30)),
        pytest.raises(ValueError, match=r"row 1, new token \d: got nan as the highest score"),
    ):
        aspire(model, ragged((12, 30)), config, max_new_tokens=8)


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_scores_that_are_nan_are_an_error_when_sampling(sampling: str) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(ValueError, match="row 0, new token 0: got nan as the highest score"):
        aspire(model, ragged((12, 30)), small(sampling=sampling), max_new_tokens=8, do_sample=True)


def test_scores_that_are_all_minus_infinity_are_an_error_when_sampling(model: LlamaForCausalLM) -> None:
    keywords = {"max_new_tokens": 5, "suppress_tokens": list(range(VOCABULARY))}
    batch = ragged((12, 30))
    for sampling in ("coupled", "rejection"):
        with pytest.raises(ValueError, match="row 0, new token 0: got -inf"):
            aspire(model, batch, small(sampling=sampling), do_sample=True, **keywords)
    output = aspire(model, batch, small(), **keywords)
    assert torch.equal(output.sequences, plain(model, batch, **keywords))


# ---- Processing alone


def processors(history: Tensor) -> dict[str, stock.LogitsProcessor]:
    """One of every stock processor that is applied to drafts."""
    prompt = history[:, :6]
    known = {
        "temperature": stock.TemperatureLogitsWarper(0.7),
        "top k": stock.TopKLogitsWarper(3),
        "top p": stock.TopPLogitsWarper(0.8),
        "min p": stock.MinPLogitsWarper(0.1),
        "top h": stock.TopHLogitsWarper(0.5),
        "typical": stock.TypicalLogitsWarper(0.7),
        "epsilon": stock.EpsilonLogitsWarper(0.02),
        "eta": stock.EtaLogitsWarper(0.02),
        "remove invalid": stock.InfNanRemoveLogitsProcessor(),
        "normalise": stock.LogitNormalization(),
        "suppress": stock.SuppressTokensLogitsProcessor([3, 4]),
        "min length": stock.MinLengthLogitsProcessor(9, [2, 5]),
        "min new tokens": stock.MinNewTokensLengthLogitsProcessor(6, 4, [2, 5]),
        "repetition": stock.RepetitionPenaltyLogitsProcessor(1.7),
        "encoder repetition": stock.EncoderRepetitionPenaltyLogitsProcessor(1.7, prompt),
        "no repeat": stock.NoRepeatNGramLogitsProcessor(2),
        "encoder no repeat": stock.EncoderNoRepeatNGramLogitsProcessor(2, prompt),
        "bias": stock.SequenceBiasLogitsProcessor({(3,): 2.0, (4, 5): -3.0, (2, 4, 1): 9.0}),
        "bad words": stock.NoBadWordsLogitsProcessor([[3], [4, 5]], [2]),
        "forced first": stock.ForcedBOSTokenLogitsProcessor(3),
        "forced end": stock.ForcedEOSTokenLogitsProcessor(10, [2]),
        "decay": stock.ExponentialDecayLengthPenalty((2, 1.4), [2], 6),
        "suppress at begin": stock.SuppressTokensAtBeginLogitsProcessor([1, 2], 6),
        "repetition behind the prompt": stock.RepetitionPenaltyLogitsProcessor(1.7, 5),
    }
    if Version(transformers.__version__) >= Version("5.24"):  # a length per row of the batch
        ignored = torch.tensor([6, 2, 5, 0])[: len(history)]
        known["repetition behind each prompt"] = stock.RepetitionPenaltyLogitsProcessor(1.7, ignored)
    return known


def as_plain(used: list[Any], history: Tensor, width: int, logits: Tensor, row: int, position: int) -> Tensor:
    """Scores of one row where the whole batch stands at its column, its neighbours with scores of their own."""
    scores = torch.randn(history.shape[0], logits.shape[0], generator=torch.Generator().manual_seed(position))
    scores[row] = logits.float()
    for processor in used:
        scores = processor(history[:, : width + position], scores)
    return scores[row]


@pytest.mark.parametrize("name", [*processors(torch.zeros(4, 20, dtype=torch.int64)), "several"])
def test_packed_positions_are_processed_as_plain_would_one_by_one(name: str) -> None:
    random_numbers = torch.Generator().manual_seed(3)
    width, size = 6, 8  # few tokens, so that repetitions abound
    history = torch.randint(0, size, (4, 20), generator=random_numbers)
    known = processors(history)
    several = ["repetition", "bias", "bad words", "decay", "min new tokens", "no repeat", "temperature", "top p"]
    used = [known[n] for n in (several if name == "several" else [name])]
    places = [(2, 0), (2, 1), (2, 2), (0, 4), (3, 1), (3, 2), (3, 3), (1, 2), (1, 7)]
    logits = 3 * torch.randn(len(places), size, generator=random_numbers, dtype=torch.float64)
    if name == "remove invalid":
        logits[2, 3], logits[5, 1] = torch.nan, torch.inf
    rows, positions = [row for row, _ in places], [position for _, position in places]
    scores = Processing(used, history, width)(logits, rows, positions)
    expected = torch.stack(
        [as_plain(used, history, width, logits[k], row, position) for k, (row, position) in enumerate(places)]
    )
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)  # a batch may round the last bit otherwise
    if name != "forced first":  # acts on a text of one token only
        assert not torch.equal(scores, logits.float())


def test_a_forced_first_token_is_forced_in_the_first_column_only() -> None:
    history = torch.tensor([[1, 3, 4]])
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]] * 2)
    scores = Processing([stock.ForcedBOSTokenLogitsProcessor(2)], history, 1)(logits, [0, 0], [0, 1])
    assert scores[0].argmax() == 2 and scores[0].exp().sum() == 1
    assert torch.equal(scores[1], logits[1])


def test_processing_reads_the_history_at_the_time_of_the_call() -> None:
    history = torch.zeros(1, 6, dtype=torch.int64)
    processing = Processing([stock.RepetitionPenaltyLogitsProcessor(2.0)], history, 2)
    history[0, 2] = 3  # a draft
    scores = processing(torch.ones(2, 5), [0, 0], [0, 1])
    assert scores.tolist() == [[0.5, 1, 1, 1, 1], [0.5, 1, 1, 0.5, 1]]


def test_no_processors_leave_the_logits_as_they_are() -> None:
    logits = torch.randn(3, 5, dtype=torch.bfloat16)
    scores = Processing([], torch.zeros(1, 4, dtype=torch.int64), 2)(logits, [0, 0, 0], [0, 1, 2])
    assert scores.dtype == torch.float32 and torch.equal(scores, logits.float())


def test_subclasses_and_processors_with_state_are_not_applied_to_drafts() -> None:
    class Mine(stock.TopKLogitsWarper):
        pass

    known = list(processors(torch.zeros(1, 8, dtype=torch.int64)).values())
    assert pure_processors([Mine(3), *known, stock.WhisperNoSpeechDetection(1, 0, True)]) == known


def test_logits_of_neighbouring_rows_are_joined_without_a_copy() -> None:
    logits = torch.randn(7, 5)
    for places in ([(0, 7)], [(0, 2), (2, 3), (3, 7)], [(1, 4), (4, 6)]):
        joined = _joined([logits[a:b] for a, b in places])
        assert torch.equal(joined, torch.cat([logits[a:b] for a, b in places]))
        assert joined.data_ptr() == logits[places[0][0]].data_ptr()
    gap, back, twice = [(0, 2), (3, 7)], [(2, 4), (0, 2)], [(0, 1), (0, 1)]  # drafts between; forks of one prompt
    for places in (gap, back, twice):
        parts = [logits[a:b] for a, b in places]
        assert torch.equal(_joined(parts), torch.cat(parts))
    other = [logits[:2], logits.clone()[2:]]
    assert torch.equal(_joined(other), logits)
    columns = torch.randn(5, 7).T
    assert torch.equal(_joined([columns[:2], columns[2:]]), columns)


# ---- user code: once per committed token, in order, on plain's padded batch


class Recorder(stock.LogitsProcessor):
    """Notes what it was shown, and decides by how often it was called: what stateful processors do."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.tolist(), scores.clone()))
        return scores.roll(len(self.seen) % 3, -1)


class Sum(StoppingCriteria):
    """Ends a row whose tokens' sum is a multiple of nine, and notes what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **keywords: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return input_ids[:, WIDTH:].sum(-1) % 9 == 0


@pytest.mark.parametrize("ends", [None, [7, 11, 26]])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_user_processors_and_criteria_see_what_plain_shows_them(
    model: LlamaForCausalLM, ends: list[int] | None, right: float
) -> None:
    batch = ragged((1, 2, 15, 60, 33))
    keywords = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": PAD, "no_repeat_ngram_size": 2}
    processor, criterion = Recorder(), Sum()
    expected = plain(model, batch, logits_processor=[processor], stopping_criteria=[criterion], **keywords)
    for schedule in ("staggered", "fsm", "aspire"):
        ours, stops = Recorder(), Sum()
        with forced_drafts(mixed_drafts(expected, WIDTH, right)):
            result = aspire(
                model,
                batch,
                small(schedule=schedule),
                logits_processor=[ours],
                stopping_criteria=[stops],
                **keywords,
            )
        assert torch.equal(result.sequences, expected)
        assert [ids for ids, _ in ours.seen] == [ids for ids, _ in processor.seen]
        for (_, scores), (_, wanted) in zip(ours.seen, processor.seen, strict=True):
            assert torch.allclose(scores, wanted, atol=1e-5)
        assert stops.seen == criterion.seen
        assert sum(result.stats.drafted) > 0
