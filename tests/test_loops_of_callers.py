"""Programs that call `generate` in a loop: evaluation, rollouts, chats, web handlers and streams of batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from kit import aspire_output, letter, letters, plain, ragged, small
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from hf_aspire.testing import forced_drafts

LENGTHS = (1, 2, 15, 120)
NEW = 13
pytestmark = pytest.mark.usefixtures("enabled")


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
            lambda **k: aspire_output(model, batch, small(), max_new_tokens=40, **k).sequences,
        )
    ]
    assert torch.equal(*results)


def test_loop_of_a_reinforcement_rollout(model, batch):
    """Groups of sampled answers with the scores of their tokens; log-probabilities match a forward of the text."""
    output = aspire_output(
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
                aspire_output(model, ragged([30]), small(schedule="fixed"), **keywords)
    else:

        def work() -> None:
            aspire_output(model, ragged([30]), small(), **keywords)

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
    aspire_output(model, batch, small(sparsity=1.0, schedule="staggered"), streamer=streamer, **keywords)
    assert streamer.columns == expected.columns
    assert streamer.ends == expected.ends == 1
