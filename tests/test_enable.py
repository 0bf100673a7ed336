"""`enable` and `disable` switch one method, and a call puts everything else back."""

from __future__ import annotations

from typing import Any

import pytest
from kit import GREEDY, LENGTHS, NEW, Batch, Failure, forwards, small, state, tiny_llama
from torch import Tensor
from transformers import GenerationMixin, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import hf_aspire

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
    model: LlamaForCausalLM, batch: Batch, text: Tensor
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
        assert model.generate(**batch, **GREEDY).tolist() == text.tolist()
        with pytest.raises(ValueError, match="assistant"):  # Transformers' own error: ours is off
            model.generate(**batch, **GREEDY, assistant="aspire")
        hf_aspire.enable()  # works through the wrapper that is still there
        assert model.generate(**batch, **GREEDY, assistant="aspire").tolist() == text.tolist()
        assert len(calls) == 3
    finally:
        GenerationMixin.generate = ours
        hf_aspire.disable()
    assert GenerationMixin.generate is original


def test_without_enable_transformers_refuses_the_argument(model: LlamaForCausalLM, batch: Batch) -> None:
    with pytest.raises(ValueError, match="assistant"):
        model.generate(**batch, **GREEDY, assistant="aspire")


@pytest.mark.usefixtures("enabled")
def test_calls_without_the_assistant_are_plain(model: LlamaForCausalLM, batch: Batch, text: Tensor) -> None:
    with forwards(model) as seen:
        assert model.generate(**batch, **GREEDY).tolist() == text.tolist()
        assert model.generate(**batch, **GREEDY, assistant=None).tolist() == text.tolist()
    assert [shape for shape in seen if shape[0] == 1] == []  # a packed forward has one row


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
