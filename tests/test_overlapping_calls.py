"""Calls in other threads and calls inside a call do not disturb each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kit import GREEDY, Batch, Recorder, ragged, small, tiny_llama
from torch import Tensor
from transformers import GenerationMixin, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import hf_aspire

# ---- other threads


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
def test_two_threads_generate_at_once(model: LlamaForCausalLM, batch: Batch, text: Tensor, same: str) -> None:
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
    assert in_threads(*calls) == [text.tolist(), text.tolist()]
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"
    assert GenerationMixin.generate.__module__ == "transformers.generation.utils"


# ---- inside a call


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
