"""A streamer is called as by plain `generate`, and ended once whatever goes wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kit import GREEDY, NEW, Failure, ragged, small, tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessorList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import hf_aspire


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


@pytest.mark.usefixtures("enabled")
def test_custom_generate_sees_a_streamer_once_enabled(model: LlamaForCausalLM) -> None:
    streamer = Calls()
    model.generate(**ragged([9]), **GREEDY, custom_generate=hf_aspire.generate, streamer=streamer)
    assert streamer.ended == 1


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
