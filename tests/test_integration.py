"""How the package meets Transformers: one wrapped method, one switched name, and everything put back."""

from __future__ import annotations

import copy
import functools
import runpy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit import VOCABULARY, Batch, ragged, small, tiny_llama
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import hf_aspire
from hf_aspire import AspireConfig, AspireOutput, AspireStats, compat

LENGTHS = (1, 2, 9, 30)
NEW = 12
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return ragged(LENGTHS)


@pytest.fixture(scope="module")
def text(model: LlamaForCausalLM, batch: Batch) -> list[list[int]]:
    """What plain `generate` makes of the batch."""
    return model.generate(**batch, **GREEDY).tolist()


@pytest.fixture
def enabled() -> Iterator[None]:
    hf_aspire.enable()
    yield
    hf_aspire.disable()


class Recorder:
    """An `on_stats` that keeps what it got."""

    def __init__(self) -> None:
        self.stats: list[AspireStats] = []

    def __call__(self, stats: AspireStats) -> None:
        self.stats.append(stats)

    def config(self, **fields: Any) -> AspireConfig:
        return small(on_stats=self, **fields)


@contextmanager
def forwards(model: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the token ids of every forward of the model."""
    seen: list[tuple[int, ...]] = []

    def note(module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        seen.append(tuple((args[0] if args else keywords["input_ids"]).shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def state(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a call may touch, and must put back."""
    return (
        model.config._attn_implementation,
        copy.deepcopy(model.config.to_dict()),
        copy.deepcopy(model.generation_config.to_dict()),
        GenerationMixin.__dict__["generate"],
        GenerationMixin.__dict__["_sample"],
    )


# ---- enable and disable


def test_enable_and_disable_are_idempotent_and_exact() -> None:
    generate, sample = GenerationMixin.__dict__["generate"], GenerationMixin.__dict__["_sample"]
    hf_aspire.disable()
    hf_aspire.enable()
    wrapped = GenerationMixin.generate
    assert wrapped is not generate
    hf_aspire.enable()
    assert GenerationMixin.generate is wrapped
    hf_aspire.disable()
    assert GenerationMixin.__dict__["generate"] is generate
    assert GenerationMixin.__dict__["_sample"] is sample
    hf_aspire.disable()
    assert GenerationMixin.__dict__["generate"] is generate


def test_disable_leaves_the_wrapper_of_another_library_and_says_so(
    model: LlamaForCausalLM, batch: Batch, text: list[list[int]]
) -> None:
    original = GenerationMixin.generate
    hf_aspire.enable()
    ours = GenerationMixin.generate
    calls: list[str] = []

    def theirs(self: Any, *args: Any, **keywords: Any) -> Any:
        calls.append("theirs")
        return ours(self, *args, **keywords)

    GenerationMixin.generate = theirs
    try:
        with pytest.warns(RuntimeWarning, match=r"another library has wrapped GenerationMixin\.generate"):
            hf_aspire.disable()
        assert GenerationMixin.generate is theirs
        assert model.generate(**batch, **GREEDY).tolist() == text
        with pytest.raises(ValueError, match="assistant"):  # Transformers' own error: ours is off
            model.generate(**batch, **GREEDY, assistant="aspire")
        hf_aspire.enable()  # works through the wrapper that is still there
        assert model.generate(**batch, **GREEDY, assistant="aspire").tolist() == text
        assert len(calls) == 3
    finally:
        GenerationMixin.generate = ours
        hf_aspire.disable()
    assert GenerationMixin.generate is original


def test_without_enable_transformers_refuses_the_argument(model: LlamaForCausalLM, batch: Batch) -> None:
    with pytest.raises(ValueError, match="assistant"):
        model.generate(**batch, **GREEDY, assistant="aspire")


@pytest.mark.usefixtures("enabled")
def test_calls_without_the_assistant_are_plain(model: LlamaForCausalLM, batch: Batch, text: list[list[int]]) -> None:
    with forwards(model) as seen:
        assert model.generate(**batch, **GREEDY).tolist() == text
        assert model.generate(**batch, **GREEDY, assistant=None).tolist() == text
    assert [shape for shape in seen if shape[0] == 1] == []  # a packed forward has one row


# ---- entries


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("form", ["object", "dict", "default"])
def test_generate_with_the_assistant(model: LlamaForCausalLM, batch: Batch, text: list[list[int]], form: str) -> None:
    config = {"object": small(), "dict": {"page_size": 4, "min_pages": 2, "recent_pages": 1}, "default": None}[form]
    out = model.generate(**batch, **GREEDY, assistant="aspire", aspire_config=config, return_dict_in_generate=True)
    assert out.sequences.tolist() == text
    assert out.aspire_stats.config.page_size == (16 if form == "default" else 4)


@pytest.mark.usefixtures("enabled")
def test_positional_arguments(model: LlamaForCausalLM, batch: Batch, text: list[list[int]]) -> None:
    mask = batch["attention_mask"]
    config = GenerationConfig(**GREEDY)
    for call in (model.generate, lambda *a, **k: hf_aspire.generate(model, *a, **k)):
        out = call(batch["input_ids"], config, attention_mask=mask, assistant="aspire", aspire_config=small())
        assert out.tolist() == text
    with pytest.raises(TypeError, match="multiple values"):
        model.generate(batch["input_ids"], inputs=batch["input_ids"], assistant="aspire")


def test_the_second_entry(model: LlamaForCausalLM, batch: Batch, text: list[list[int]]) -> None:
    before = state(model)
    out = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small(), return_dict_in_generate=True)
    assert isinstance(out, AspireOutput)
    assert out.sequences.tolist() == text
    assert sum(out.aspire_stats.drafted) > 0
    assert (
        hf_aspire.generate(model, batch["input_ids"], attention_mask=batch["attention_mask"], **GREEDY).tolist()
        == text
    )
    assert state(model) == before


@pytest.mark.parametrize("on", [False, True])
def test_as_custom_generate(model: LlamaForCausalLM, batch: Batch, text: list[list[int]], on: bool) -> None:
    recorder = Recorder()
    if on:
        hf_aspire.enable()
    try:
        out = model.generate(
            **batch, **GREEDY, custom_generate=hf_aspire.generate, aspire_config=recorder.config(page_size=8)
        )
    finally:
        hf_aspire.disable()
    assert out.tolist() == text
    assert recorder.stats[0].config.page_size == 8


@pytest.mark.usefixtures("enabled")
def test_custom_generate_sees_a_streamer_once_enabled(model: LlamaForCausalLM) -> None:
    streamer = Calls()
    model.generate(**ragged([9]), **GREEDY, custom_generate=hf_aspire.generate, streamer=streamer)
    assert streamer.ended == 1


# ---- where options may stand


@pytest.mark.usefixtures("enabled")
def test_generation_configs_may_ask_for_it(model: LlamaForCausalLM, batch: Batch, text: list[list[int]]) -> None:
    recorder = Recorder()
    config = GenerationConfig(**GREEDY, assistant="aspire", aspire_config={"on_stats": recorder, "page_size": 8})
    before = dict(vars(config))
    assert model.generate(**batch, generation_config=config).tolist() == text
    assert vars(config) == before
    assert [stats.config.page_size for stats in recorder.stats] == [8]
    passed = recorder.config(page_size=4)
    assert model.generate(**batch, generation_config=config, aspire_config=passed).tolist() == text
    assert [stats.config.page_size for stats in recorder.stats] == [8, 4]  # an argument wins
    assert model.generate(**batch, generation_config=config, assistant=None).tolist() == text
    assert len(recorder.stats) == 2  # and None means plain


@pytest.mark.usefixtures("enabled")
def test_the_models_own_generation_config_may_ask_for_it(batch: Batch, text: list[list[int]], tmp_path: Any) -> None:
    model = tiny_llama()
    recorder = Recorder()
    model.generation_config.assistant = "aspire"
    assert model.generate(**batch, **GREEDY, aspire_config=recorder.config()).tolist() == text
    assert len(recorder.stats) == 1
    model.generation_config = GenerationConfig(assistant="aspire", aspire_config={"page_size": 8}, pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    out = loaded.generate(**batch, **GREEDY, return_dict_in_generate=True)
    assert out.sequences.tolist() == text
    assert out.aspire_stats.config.page_size == 8


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


# ---- outputs


def test_statistics_arrive_in_the_output_and_by_callback(model: LlamaForCausalLM, batch: Batch) -> None:
    recorder = Recorder()
    out = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=recorder.config(), return_dict_in_generate=True)
    assert out["aspire_stats"] is out.aspire_stats
    assert len(recorder.stats) == 1
    assert recorder.stats[0].committed == out.aspire_stats.committed == [NEW] * len(LENGTHS)
    tensor = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=recorder.config())
    assert isinstance(tensor, Tensor)
    assert len(recorder.stats) == 2


def test_a_prompt_that_is_returned_several_times_is_read_once(model: LlamaForCausalLM, batch: Batch) -> None:
    with forwards(model) as seen:
        out = hf_aspire.generate(
            model,
            **batch,
            do_sample=True,
            num_return_sequences=3,
            max_new_tokens=NEW,
            aspire_config=small(seed=1, schedule="staggered"),
            return_dict_in_generate=True,
        )
    assert out.sequences.shape == (3 * len(LENGTHS), max(LENGTHS) + NEW)
    prompt_tokens = sum(LENGTHS)
    assert max(tokens for _, tokens in seen) == prompt_tokens
    assert len({tuple(row) for row in out.sequences.tolist()}) == 3 * len(LENGTHS)
    assert len(out.aspire_stats.committed) == 3 * len(LENGTHS)


# ---- pipelines


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


PROMPTS = ["w3", "w5 w6 w7 w8", "w9 w10", "w11 w12 w13"]


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("where", ["call", "construction"])
@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_pipelines(model: LlamaForCausalLM, where: str, limit: str) -> None:
    from transformers import pipeline

    recorder = Recorder()
    ours = {"assistant": "aspire", "aspire_config": recorder.config()}
    options: dict[str, Any] = {"batch_size": 2, "do_sample": False, "max_new_tokens": NEW}
    if limit == "max_length":
        options |= {"max_new_tokens": None, "max_length": NEW + 4}
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer())(PROMPTS, **options)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer(), **(ours if where == "construction" else {}))
    assert made(PROMPTS, **options, **(ours if where == "call" else {})) == expected
    assert [len(stats.committed) for stats in recorder.stats] == [2, 2]


# ---- streamers


class Calls(BaseStreamer):
    """A streamer that writes down how it was called."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_is_called_as_by_plain(model: LlamaForCausalLM) -> None:
    expected, found = Calls(), Calls()
    model.generate(**ragged([9]), **GREEDY, streamer=expected)
    hf_aspire.generate(model, **ragged([9]), **GREEDY, streamer=found, aspire_config=small())
    assert found.tokens == expected.tokens
    assert found.ended == expected.ended == 1


class Failure(LogitsProcessor):
    """A processor that raises after a number of calls."""

    def __init__(self, calls: int, error: BaseException) -> None:
        self.left = calls
        self.error = error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    "keywords",
    [
        {"num_beams": 2},
        {"aspire_config": {"pagesize": 4}},
        {"assistant": "medusa"},
        {"aspire_config": small(kv_memory=10)},
        {"max_new_tokens": 0},
        {"logits_processor": LogitsProcessorList([Failure(3, RuntimeError("processor"))])},
    ],
    ids=["refused", "unknown key", "unknown assistant", "does not fit", "no room", "fails in the loop"],
)
def test_a_streamer_is_ended_once_whatever_goes_wrong(model: LlamaForCausalLM, keywords: dict[str, Any]) -> None:
    streamer = Calls()
    with pytest.raises((ValueError, RuntimeError)):
        model.generate(**ragged([9]), **({"assistant": "aspire"} | GREEDY | keywords), streamer=streamer)
    assert streamer.ended == 1


@pytest.mark.parametrize("beams", [1, 2])
def test_a_thread_that_feeds_a_streamer_never_leaves_its_reader_waiting(model: LlamaForCausalLM, beams: int) -> None:
    streamer = TextIteratorStreamer(tokenizer(), timeout=60)
    errors: list[ValueError] = []

    def work() -> None:
        try:
            hf_aspire.generate(model, **ragged([9]), **GREEDY, num_beams=beams, streamer=streamer)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    words = "".join(streamer).split()
    thread.join()
    assert len(words) == (9 + NEW if beams == 1 else 0)
    assert len(errors) == beams - 1


# ---- everything is put back


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    "error", [None, RuntimeError("stop"), KeyboardInterrupt()], ids=["success", "error", "Ctrl-C"]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_everything_is_put_back(batch: Batch, error: BaseException | None, attention: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(attention)
    before = state(model)
    processors = [] if error is None else [Failure(4, error)]
    call = lambda: model.generate(  # noqa: E731
        **batch, **GREEDY, assistant="aspire", aspire_config=small(), logits_processor=LogitsProcessorList(processors)
    )
    if error is None:
        call()
    else:
        with pytest.raises(type(error)):
            call()
    assert state(model) == before
    assert model.generate(**batch, **GREEDY).shape[1] == max(LENGTHS) + NEW


def test_an_implementation_chosen_during_a_call_stays(batch: Batch) -> None:
    model = tiny_llama()

    class Chooses(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] == max(LENGTHS) + NEW - 1:
                model.set_attn_implementation("eager")
            return scores

    hf_aspire.generate(model, **batch, **GREEDY, logits_processor=LogitsProcessorList([Chooses()]))
    assert model.config._attn_implementation == "eager"


# ---- other calls at the same time, and inside


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that start together, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def work(index: int) -> None:
        barrier.wait()
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Meeting:
    """A place inside both calls where each waits for the other, so that they really overlap."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.met = threading.local()

    def processor(self) -> LogitsProcessorList:
        meeting = self

        class Waits(LogitsProcessor):
            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                count = meeting.met.count = getattr(meeting.met, "count", 0) + 1
                if count in (2, 5):
                    meeting.barrier.wait()
                return scores

        return LogitsProcessorList([Waits()])


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plain_call_in_another_thread_is_not_disturbed(batch: Batch, attention: str) -> None:
    model = tiny_llama().float()
    model.set_attn_implementation(attention)
    other = ragged([4, 25, 13], seed=5)
    expected = model.generate(**other, **GREEDY).tolist()
    own = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small()).tolist()
    meeting = Meeting()
    ours, plains = in_threads(
        lambda: model.generate(
            **batch, **GREEDY, assistant="aspire", aspire_config=small(), logits_processor=meeting.processor()
        ),
        lambda: model.generate(**other, **GREEDY, logits_processor=meeting.processor()),
    )
    assert ours.tolist() == own
    assert plains.tolist() == expected
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("same", ["model", "config", "nothing"])
def test_two_threads_generate_at_once(model: LlamaForCausalLM, batch: Batch, text: list[list[int]], same: str) -> None:
    other = model
    if same != "model":
        other = tiny_llama()
        if same == "config":
            other = LlamaForCausalLM(model.config).double().eval()
            other.load_state_dict(model.state_dict())
    meeting = Meeting()
    calls = [
        lambda m=m: hf_aspire.generate(
            m, **batch, **GREEDY, aspire_config=small(), logits_processor=meeting.processor()
        ).tolist()
        for m in (model, other)
    ]
    assert in_threads(*calls) == [text, text]
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"
    assert GenerationMixin.generate.__module__ == "transformers.generation.utils"


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("same", [True, False])
def test_a_processor_may_ask_a_model_itself(batch: Batch, attention: str, same: bool) -> None:
    model = tiny_llama().float()
    model.set_attn_implementation(attention)
    asked = model if same else LlamaForCausalLM(model.config).eval()
    question = ragged([2, 11], seed=3)
    expected = asked.generate(**question, **GREEDY).tolist()
    own = model.generate(**batch, **GREEDY).tolist()
    answers: list[list[list[int]]] = []
    inner, outer = Recorder(), Recorder()

    class Asks(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if len(answers) == 6:
                return scores
            answers.append(asked.generate(**question, **GREEDY).tolist())
            nested = asked.generate(**question, **GREEDY, assistant="aspire", aspire_config=inner.config())
            answers.append(nested.tolist())
            return scores

    found = model.generate(
        **batch,
        **GREEDY,
        assistant="aspire",
        aspire_config=outer.config(),
        logits_processor=LogitsProcessorList([Asks()]),
    )
    assert found.tolist() == own
    assert len(outer.stats) == 1  # plain calls inside are plain
    assert len(inner.stats) == len(answers) // 2 == 3
    assert all(answer == expected for answer in answers)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hook_may_ask_a_model_in_the_middle_of_a_forward(batch: Batch, attention: str) -> None:
    model = tiny_llama().float()
    model.set_attn_implementation(attention)
    asked = LlamaForCausalLM(model.config).eval()  # shares the config, so that its attention is switched too
    question = ragged([2, 11], seed=3)
    expected = asked.generate(**question, **GREEDY).tolist()
    own = model.generate(**batch, **GREEDY).tolist()
    answers: list[list[list[int]]] = []
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda *_: answers.append(asked.generate(**question, **GREEDY).tolist())
    )
    assert model.generate(**batch, **GREEDY, assistant="aspire", aspire_config=small()).tolist() == own
    handle.remove()
    assert len(answers) > 2
    assert all(answer == expected for answer in answers)


# ---- wrappers and modes of torch


@pytest.mark.usefixtures("enabled")
def test_inference_mode_and_gradients(model: LlamaForCausalLM, batch: Batch, text: list[list[int]]) -> None:
    with torch.inference_mode():
        inside = model.generate(**batch, **GREEDY, assistant="aspire", aspire_config=small())
    assert inside.tolist() == text
    with torch.enable_grad():
        outside = model.generate(**batch, **GREEDY, assistant="aspire", aspire_config=small())
    assert outside.tolist() == text
    assert not outside.requires_grad


def test_autocast(batch: Batch) -> None:
    """bfloat16 by autocast: plain's text, but for near-ties, which a random model has few of."""
    model = tiny_llama().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(**batch, **GREEDY)
        found = hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small())
    same = (found == expected)[:, max(LENGTHS) :].float().mean()
    assert same > 0.7


def test_peft(model: LlamaForCausalLM, batch: Batch, text: list[list[int]]) -> None:
    import peft

    base = tiny_llama()
    tuned = peft.get_peft_model(
        base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.1)
    )
    tuned.eval()
    expected = tuned.generate(**batch, **GREEDY).tolist()
    assert expected != text
    recorder = Recorder()
    assert hf_aspire.generate(tuned, **batch, **GREEDY, aspire_config=recorder.config()).tolist() == expected
    assert len(recorder.stats) == 1
    with tuned.disable_adapter():
        assert hf_aspire.generate(tuned, **batch, **GREEDY, aspire_config=small()).tolist() == text


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_that_peft_adds_are_refused(batch: Batch, method: str) -> None:
    import peft

    tuned = peft.get_peft_model(
        tiny_llama(), getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    with pytest.raises(ValueError, match="assistant='aspire'"):
        hf_aspire.generate(tuned, **batch, **GREEDY)
    assert tuned.base_model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("enabled")
def test_a_compiled_model(batch: Batch, text: list[list[int]]) -> None:
    compiled = torch.compile(tiny_llama(), backend="eager")  # its generate is the original's
    assert compiled.generate(**batch, **GREEDY, assistant="aspire", aspire_config=small()).tolist() == text


def test_offloaded_layers(batch: Batch, text: list[list[int]], tmp_path: Any) -> None:
    from accelerate import cpu_offload, disk_offload, dispatch_model

    model = cpu_offload(tiny_llama(), torch.device("cpu"))
    assert hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small()).tolist() == text
    model = disk_offload(tiny_llama(), str(tmp_path / "all"), torch.device("cpu"))
    assert hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small()).tolist() == text
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    model = dispatch_model(
        tiny_llama(), places, main_device="cpu", offload_dir=str(tmp_path / "some"), force_hooks=True
    )
    assert hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small()).tolist() == text


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


# ---- refusals and bad input


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    "dola": ({"dola_layers": "low"}, "dola"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "paged": ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
    "same text several times": ({"num_return_sequences": 2}, "num_return_sequences"),
    "another assistant": ({"prompt_lookup_num_tokens": 3}, "assisted"),
    "an assistant model": ({"assistant_model": object()}, "assistant_model"),
    "a recipe": ({"custom_generate": "somebody/recipe"}, "custom_generate"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "pixels": ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    "audio": ({"input_features": torch.zeros(1)}, "input_features"),
    "a mask of four dimensions": ({"attention_mask": torch.ones(4, 1, 30, 30)}, r"attention_mask \(4, 1, 30, 30\)"),
    "a short mask": ({"attention_mask": torch.ones(4, 29)}, r"attention_mask of shape \(4, 29\)"),
    "an empty row": ({"attention_mask": torch.zeros(4, 30)}, r"row\(s\) \[0, 1, 2, 3\]"),
    "a list": ({"input_ids": [[1, 2]]}, "type list"),
    "no columns": ({"input_ids": torch.zeros(4, 0, dtype=torch.long)}, r"shape \(4, 0\)"),
    "no rows": ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"shape \(0, 4\)"),
    "one dimension": ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"shape \(4,\)"),
    "floats": ({"input_ids": torch.zeros(4, 30)}, "dtype torch.float32"),
    "positions below zero": ({"position_ids": torch.full((4, 30), -1)}, "position_ids down to -1"),
    "page size": ({"aspire_config": {"page_size": 0}}, "page_size: got 0"),
    "recent pages": ({"aspire_config": {"recent_pages": 9, "min_pages": 2}}, "recent_pages: got 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named_before_any_forward(model: LlamaForCausalLM, batch: Batch, name: str) -> None:
    keywords, reason = REFUSED[name]
    before = state(model)
    with forwards(model) as seen, pytest.raises(ValueError, match=reason):
        hf_aspire.generate(model, **(batch | GREEDY | keywords))
    assert seen == []
    assert state(model) == before


@pytest.mark.parametrize("limit", [{"max_new_tokens": 0}, {"max_length": max(LENGTHS)}, {"max_length": 3}])
def test_a_budget_of_nothing_is_an_error(model: LlamaForCausalLM, batch: Batch, limit: dict[str, int]) -> None:
    keywords = {"max_new_tokens": None, "do_sample": False} | limit
    with forwards(model) as seen, pytest.raises(ValueError, match=r"max_new_tokens|max_length|new tokens"):
        hf_aspire.generate(model, **batch, **keywords)
    assert seen == []


def test_rows_that_cannot_fit_name_both_sizes_and_the_setting(model: LlamaForCausalLM, batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"needs \d+ pages .* room for \d+ .*kv_memory"):
        hf_aspire.generate(model, **batch, **GREEDY, aspire_config=small(kv_memory=1000))
    assert model.config._attn_implementation == "sdpa"


def test_scores_without_a_number_are_an_error(batch: Batch) -> None:
    class Spoils(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores * float("nan")

    with pytest.raises(ValueError, match=r"row 0, .*nan"):
        hf_aspire.generate(tiny_llama(), **batch, **GREEDY, logits_processor=LogitsProcessorList([Spoils()]))


def test_a_model_with_a_loop_of_its_own_is_refused(model: LlamaForCausalLM, batch: Batch) -> None:
    class OwnLoop(LlamaForCausalLM):
        def _sample(self, *args: Any, **keywords: Any) -> Any:
            raise AssertionError("never reached")

    own = OwnLoop(model.config).eval()
    with pytest.raises(ValueError, match="OwnLoop brings its own decoding loop"):
        hf_aspire.generate(own, **batch, **GREEDY)


@pytest.mark.parametrize("version", ["4.57.0", "5.16.4", "5.25.0"])
def test_another_transformers_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=f"^hf_aspire: got transformers {version}, expected .*5.17") as caught:
        runpy.run_path(compat.__file__)  # the first module of ours that an import of the package runs into
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("target", "value", "how"),
    [
        ("is_deepspeed_zero3_enabled", lambda: True, "DeepSpeed ZeRO-3"),
        ("is_fsdp_managed_module", lambda model: True, "FSDP"),
        (None, 2, r"tensor parallelism \(tp_size=2\)"),
    ],
)
def test_sharded_models_are_refused(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, target: str | None, value: Any, how: str
) -> None:
    model = tiny_llama()
    if target is None:
        model._tp_size = value
    else:
        monkeypatch.setattr(compat, target, value)
    with forwards(model) as seen, pytest.raises(ValueError, match=f"LlamaForCausalLM runs under {how}"):
        hf_aspire.generate(model, **batch, **GREEDY)
    assert seen == []
