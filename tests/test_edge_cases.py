"""Thirty cases that some speculative decoder got wrong, by number: plain's tokens, stop and fields, or a refusal.

Some are tested at length elsewhere (`test_lossless`, `test_processing`, `test_sampling`, `test_models`,
`test_integration`); each has its own test here all the same, on the smallest model that shows it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from kit import MEMORY_BOUND, VOCABULARY, pick, plain, ragged, right_drafts, small, tiny_llama, wrong_drafts
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import hf_aspire
from hf_aspire.testing import forced_drafts

LENGTHS = (1, 2, 15, 120)
NEW = 13


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def batch():
    return ragged(LENGTHS)


@pytest.fixture(scope="module")
def text(model, batch):
    return plain(model, batch, max_new_tokens=NEW)


@pytest.fixture(autouse=True)
def enabled():
    hf_aspire.enable()
    yield
    hf_aspire.disable()


def both_ways(text: Tensor, width: int):
    """Full acceptance and full rejection."""
    return (right_drafts(text, width), wrong_drafts(text, width))


def aspire(model, batch, config=None, **keywords: Any) -> hf_aspire.AspireOutput:
    keywords = {"do_sample": False, "return_dict_in_generate": True} | keywords
    return hf_aspire.generate(model, **batch, aspire_config=config, **keywords)


def check(model, batch, config=None, **keywords: Any) -> hf_aspire.AspireOutput:
    """Same sequences as plain, whatever is accepted."""
    expected = plain(model, batch, **keywords)
    for drafts in both_ways(expected, batch["input_ids"].shape[1]):
        with forced_drafts(drafts):
            output = aspire(model, batch, config or small(schedule="staggered"), **keywords)
        assert torch.equal(output.sequences, expected)
    return output


def test_case_01_eos_inside_a_draft(model, batch, text):
    for token in sorted(set(text[:, LENGTHS[-1] :].flatten().tolist()))[::2]:  # test_lossless sweeps them all
        check(model, batch, max_new_tokens=NEW, eos_token_id=token)


@pytest.mark.parametrize("new", range(1, 9))
def test_case_02_length_limits(model, batch, new):
    config = small(schedule="fixed", draft_length=3)
    assert check(model, batch, config, max_new_tokens=new).sequences.shape[1] == LENGTHS[-1] + new
    check(model, batch, config, max_length=LENGTHS[-1] + new)


def test_case_03_no_eos_and_no_pad_token(batch):
    model = tiny_llama(pad_token_id=None, eos_token_id=None)
    assert check(model, batch, max_new_tokens=NEW).sequences.shape[1] == LENGTHS[-1] + NEW


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one letter per token."""
    words = Tokenizer(models.WordLevel({letter(token): token for token in range(VOCABULARY)}, unk_token=letter(0)))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=letter(0))


def letter(token: int) -> str:
    return chr(ord("a") + token)


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
            output = aspire(model, batch, small(), max_new_tokens=NEW, logits_processor=processors, eos_token_id=eos)
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


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_case_09_sampled_text_is_a_draw_from_plains_distribution(model, sampling):
    """2,000 rows, second token: total variation 0.09 is 4 standard deviations of this sample (see test_sampling)."""
    row = ragged([9])
    keywords = {"do_sample": True, "temperature": 1.2, "top_k": 20, "max_new_tokens": 2}
    config = small(sampling=sampling, seed=3, schedule="staggered")
    many = pick(row, [0] * 2000)
    drawn = aspire(model, many, config, **keywords).sequences[:, 9:]
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
    output = aspire(model, batch, config, do_sample=True, max_new_tokens=NEW)
    assert output.aspire_stats.acceptance_rate == 1.0


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_case_11_batches_of_equal_length(model, rows):
    check(model, ragged([30] * rows), max_new_tokens=NEW)


def test_case_12_ragged_rows_as_in_plain_and_as_alone(model, batch, text):
    output = check(model, batch, max_new_tokens=NEW)
    for row, length in enumerate(LENGTHS):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in batch.items()}
        single = aspire(model, alone, small(), max_new_tokens=NEW).sequences[0, length:]
        assert torch.equal(single, output.sequences[row, LENGTHS[-1] :])


def test_case_13_rows_of_different_fate(model, batch, text):
    right, wrong = both_ways(text, LENGTHS[-1])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        mine = pick(batch, order)

        def drafts(row: int, position: int, token: int, order: list[int] = order) -> int:
            return (wrong, right, wrong, right)[order[row]](order[row], position, token)

        with forced_drafts(drafts):
            output = aspire(model, mine, small(schedule="staggered"), max_new_tokens=NEW)
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
        assert torch.equal(aspire(model, batch, small(), max_new_tokens=NEW).sequences, text)
        assert model.config._attn_implementation == attention
    finally:
        model.set_attn_implementation(previous)


def test_case_16_windows_are_refused_where_the_call_can_fill_them():
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MistralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, sliding_window=24, pad_token_id=0)
    model = MistralForCausalLM(config).double().eval()
    short = ragged([3, 10])
    assert torch.equal(
        aspire(model, short, small(), max_new_tokens=8).sequences, plain(model, short, max_new_tokens=8)
    )
    with pytest.raises(ValueError, match=r"MistralForCausalLM.*window of 2"):
        aspire(model, ragged([3, 20]), small(), max_new_tokens=8)


@pytest.mark.parametrize("name", ["static", "offloaded", "quantized"])
def test_case_17_other_caches_are_refused(model, batch, name):
    with pytest.raises(ValueError, match=f"cache_implementation='{name}'"):
        aspire(model, batch, small(), max_new_tokens=NEW, cache_implementation=name)


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
        aspire(model, batch, small(), max_new_tokens=NEW, **keywords)


def test_case_21_encoder_decoders_and_images_are_refused(model, batch):
    from transformers import T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=48, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        hf_aspire.generate(t5, batch["input_ids"], max_new_tokens=3)
    with pytest.raises(ValueError, match="pixel_values"):
        aspire(model, batch, small(), max_new_tokens=NEW, pixel_values=torch.zeros(1, 3, 4, 4))


# 22 and 23, pipelines, need a tokenizer: tests/test_integration.py.


def test_case_24_bf16_leaves_plain_at_near_ties_only(model):
    """Where the texts part, plain's own two best logits are within bfloat16's rounding of logits of this size."""
    half = tiny_llama().to(torch.bfloat16)
    rows = ragged([20] * 8, seed=5)
    mine = aspire(half, rows, small(), max_new_tokens=24).sequences
    theirs = plain(half, rows, max_new_tokens=24)
    for row in range(8):
        differ = (mine[row] != theirs[row]).nonzero().flatten().tolist()
        if differ:
            logits = half(theirs[row : row + 1, : differ[0]]).logits[0, -1].float()
            best = logits.topk(2).values
            assert float(best[0] - best[1]) <= 2.0**-4 * float(best[0].abs().clamp(min=1))


@pytest.mark.parametrize("eos", [None, [5, 9, 30]])
def test_case_25_scores_and_logits(model, batch, eos):
    keywords = {"max_new_tokens": NEW, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    expected = plain(model, batch, return_dict_in_generate=True, eos_token_id=eos, **keywords)
    output = aspire(model, batch, small(), eos_token_id=eos, **keywords)
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
        aspire(model, ragged([100, 300]), small(schedule="fixed"), max_new_tokens=5)
    finally:
        handle.remove()
    assert max(shapes) <= 16


def test_case_27_options_take_effect_however_they_are_given(model, batch):
    as_object = aspire(model, batch, small(sparsity=0.5), max_new_tokens=NEW)
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
    assert aspire(model, batch, None, max_new_tokens=2).aspire_stats.config == hf_aspire.AspireConfig()


def test_case_28_generation_config_names_the_assistant(model, batch, text):
    config = GenerationConfig(assistant="aspire", max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    output = model.generate(**batch, generation_config=config)
    assert torch.equal(output.sequences, text)
    assert output.aspire_stats.forwards > 0


def test_case_29_garbage_drafts_of_length_one(model, batch, text):
    with forced_drafts(wrong_drafts(text, LENGTHS[-1])):
        output = aspire(model, batch, small(schedule="fixed", draft_length=1, max_draft=1), max_new_tokens=NEW)
    assert torch.equal(output.sequences, text)


def test_case_30_rows_at_their_limit(model, batch):
    for new in (1, 2):
        for schedule in ("fixed", "staggered", "fsm", "aspire"):
            check(model, batch, small(schedule=schedule), max_new_tokens=new)


class StopWhenAllLong(StoppingCriteria):
    """The loop of evaluation harnesses: per-row decisions from the decoded tail of every row, on the whole batch."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.done: list[bool] = []

    def __call__(self, input_ids: Tensor, scores: Any, **keywords: Any) -> Tensor:
        tails = input_ids[:, self.start :].tolist()
        self.done = self.done or [False] * len(tails)
        for row, tail in enumerate(tails):
            self.done[row] = self.done[row] or sum(tail) % 9 == 0
        return torch.tensor(self.done)


@pytest.mark.parametrize("eos", [None, 9])
def test_loop_of_an_evaluation_harness(model, batch, eos):
    results = [
        call(stopping_criteria=StoppingCriteriaList([StopWhenAllLong(LENGTHS[-1])]), eos_token_id=eos)
        for call in (
            lambda **k: plain(model, batch, max_new_tokens=40, **k),
            lambda **k: aspire(model, batch, small(), max_new_tokens=40, **k).sequences,
        )
    ]
    assert torch.equal(*results)


def test_loop_of_a_reinforcement_rollout(model, batch):
    """Groups of sampled answers with the scores of their tokens; log-probabilities match a forward of the text."""
    output = aspire(
        model, batch, small(seed=2), do_sample=True, num_return_sequences=3, max_new_tokens=6, output_logits=True
    )
    assert output.sequences.shape == (3 * len(LENGTHS), LENGTHS[-1] + 6)
    mask = batch["attention_mask"].repeat_interleave(3, 0)
    full = torch.cat([mask, torch.ones(len(mask), 6, dtype=mask.dtype)], 1)
    places = (full.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(output.sequences, attention_mask=full, position_ids=places).logits[:, -7:-1].float()
    assert torch.allclose(torch.stack(output.logits, 1), logits, atol=1e-4)


@pytest.mark.parametrize("new_tokens_only", [False, True])
def test_loop_of_a_chat_that_reuses_its_cache(model, new_tokens_only):
    texts = []
    for assistant in ({}, {"assistant": "aspire", "aspire_config": small()}):
        from transformers import DynamicCache

        cache, text = DynamicCache(), ragged([20])["input_ids"]
        for turn in range(3):
            past = cache.get_seq_length()
            given = text[:, past:] if new_tokens_only else text
            mask = torch.ones_like(text)
            output = model.generate(
                given, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=7, **assistant
            )
            text = torch.cat([text[:, : text.shape[1] - given.shape[1]], output, torch.tensor([[3 + turn, 9]])], 1)
        texts.append(text)
    assert torch.equal(*texts)


class Words:
    """A tokenizer for streamers."""

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(i)) for i in ids) + " "


@pytest.mark.parametrize("fails", [False, True])
def test_loop_of_a_web_handler_never_hangs(model, fails):
    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=60)
    keywords: dict[str, Any] = {"max_new_tokens": 5, "streamer": streamer}
    if fails:

        def broken(row: int, position: int, token: int) -> int:
            raise RuntimeError("broken")

        def work() -> None:
            with forced_drafts(broken), pytest.raises(RuntimeError):
                aspire(model, ragged([30]), small(schedule="fixed"), **keywords)
    else:

        def work() -> None:
            aspire(model, ragged([30]), small(), **keywords)

    thread = threading.Thread(target=work)
    thread.start()
    pieces = "".join(streamer).split()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert fails or pieces == [str(t) for t in plain(model, ragged([30]), max_new_tokens=5)[0, 30:].tolist()]


class Columns:
    """A streamer for any batch that keeps what it gets."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("eos", [None, [5, 9, 30]])
@pytest.mark.parametrize("stops", [False, True])
def test_a_streamer_of_a_batch_gets_plains_calls(model, batch, text, eos, stops):
    keywords: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": eos}
    if stops:  # wherever one of these letters comes, accepted drafts behind it are not streamed
        keywords |= {"stop_strings": [letter(t) for t in text[:, -3].tolist()], "tokenizer": letters()}
    expected, streamer = Columns(), Columns()
    plain(model, batch, streamer=expected, **keywords)
    aspire(model, batch, small(sparsity=1.0, schedule="staggered"), streamer=streamer, **keywords)
    assert streamer.columns == expected.columns
    assert streamer.ends == expected.ends == 1
