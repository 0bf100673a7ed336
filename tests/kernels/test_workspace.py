"""What outlives a call: a workspace per model, and what makes a new one."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from kernels.planned_calls import made, run, settings, text_of
from kit import ragged, tiny_llama
from transformers import LlamaForCausalLM

import hf_aspire
from hf_aspire.generation import _current
from hf_aspire.graphs import Graphs
from hf_aspire.triton_backend import TritonBackend
from hf_aspire.workspace import workspaces

pytestmark = pytest.mark.usefixtures("planned")


def test_a_workspace_serves_the_next_calls_of_the_same_model(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, config = made(monkeypatch), settings(schedule="fixed")
    first, smaller, longer = ragged((40, 20)), ragged((33, 20), seed=1), ragged((70,))
    for texts in (first, smaller, first, longer, first, longer):
        assert torch.equal(run(llama, texts, config, max_new_tokens=4)[0], text_of(llama, texts, max_new_tokens=4))
    assert len(found) == 2  # the longer one needs another, which serves all of them
    hf_aspire.release(llama)
    run(llama, first, config, max_new_tokens=4)
    assert len(found) == 3


def test_prompts_of_embeddings_read_no_tokens_of_an_earlier_call(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a text lies what was drafted last, -1 for nothing: no token that could be looked up."""
    found, config = made(monkeypatch), settings(schedule="staggered", sampling="rejection", seed=1, context="verify")
    run(llama, ragged((9, 9)), config, max_new_tokens=12, do_sample=True)
    found[0].state.history[:2, 9:] = -1
    batch = ragged((16, 12))
    embeds = llama.get_input_embeddings()(batch["input_ids"].to(llama.device)).detach()
    prompts = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
    text, _ = run(llama, prompts, config, max_new_tokens=3)
    assert torch.equal(text, text_of(llama, prompts, max_new_tokens=3))
    assert len(found) == 1


def test_a_workspace_made_in_inference_mode_serves_calls_outside_it(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, batch = made(monkeypatch), ragged((20,))
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            text, _ = run(llama, batch, settings(schedule="fixed"), max_new_tokens=3)
        assert torch.equal(text, text_of(llama, batch, max_new_tokens=3))
    assert len(found) == 1


def test_scores_are_float32_whatever_torchs_default(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection reads their bits."""
    found = []
    use = TritonBackend.use

    def note(self: TritonBackend, tables: Any) -> None:
        found.append(tables.scores)
        use(self, tables)

    monkeypatch.setattr(TritonBackend, "use", note)
    batch = ragged((40,))
    torch.set_default_dtype(torch.float16)
    try:
        run(llama, batch, settings(schedule="fixed"), max_new_tokens=6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {scores.dtype for scores in found if scores is not None} == {torch.float32}


def test_whatever_a_forward_depends_on_makes_a_new_workspace(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, config, batch = made(monkeypatch), settings(schedule="autoregressive"), ragged((20,))

    def call() -> int:
        text, _ = run(llama, batch, config, max_new_tokens=3)
        assert torch.equal(text, text_of(llama, batch, max_new_tokens=3))
        return len(found)

    assert (call(), call()) == (1, 1)
    layer = llama.model.layers[0]
    monkeypatch.setattr(layer.self_attn, "scaling", 0.5)
    assert call() == 2
    weight = layer.mlp.up_proj.weight
    layer.mlp.up_proj.weight = torch.nn.Parameter(weight * 2)
    hook = None
    try:
        assert call() == 3
        hook = layer.mlp.register_forward_hook(lambda module, inputs, output: output * 0.5)
        assert call() == 4
    finally:
        layer.mlp.up_proj.weight = weight
        if hook is not None:
            hook.remove()


def test_a_short_call_goes_on_with_the_graphs_of_a_long_one(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(schedule="fixed", cuda_graphs="auto")
    assert workspaces.captures(llama, config, steps=100) and not workspaces.captures(llama, config, steps=3)
    run(llama, ragged((20,)), config, max_new_tokens=3)
    assert not workspaces.captures(llama, config, steps=3)
    monkeypatch.setattr(Graphs, "__len__", lambda self: 1)
    assert workspaces.captures(llama, config, steps=3)


@pytest.mark.parametrize("switch", ["auto", True])
def test_what_cannot_be_captured_or_compiled_is_warned_about(llama: LlamaForCausalLM, switch: bool | str) -> None:
    config = settings(compile=switch, cuda_graphs=switch)
    hook = llama.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    try:
        with pytest.warns(RuntimeWarning, match="runs without CUDA graphs: model.layers.0 has a forward hook"):
            assert not workspaces.captures(llama, config, steps=3000)
        with pytest.warns(RuntimeWarning, match="does not compile layers: model.layers.0 has a forward hook"):
            assert not workspaces.compiles(llama, config, steps=3000)
    finally:
        hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert workspaces.captures(llama, config, steps=3000) and workspaces.compiles(llama, config, steps=3000)


def test_a_call_runs_with_its_models_gpu_as_the_current_one() -> None:
    place = _current(torch.device("cuda", 1))
    assert isinstance(place, torch.cuda.device) and place.idx == 1
    with _current(torch.device("cpu")) as nothing:
        assert nothing is None


def test_a_call_that_fails_leaves_no_page_taken(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found, batch, config = made(monkeypatch), ragged((40, 20)), settings(schedule="fixed")

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_aspire.pipeline.Pipeline._collect", stop)
        with pytest.raises(KeyboardInterrupt):
            run(llama, batch, config, max_new_tokens=6)
    assert found[0].cache.allocator.all_free
    assert torch.equal(run(llama, batch, config, max_new_tokens=6)[0], text_of(llama, batch, max_new_tokens=6))


def test_what_is_kept_for_a_model_goes_with_it() -> None:
    mine = tiny_llama(num_hidden_layers=1).float()
    mine.to("cuda" if torch.cuda.is_available() else "cpu")
    run(mine, ragged((10,)), settings(schedule="autoregressive"), max_new_tokens=2)
    kept = len(workspaces._kept)
    del mine
    gc.collect()
    assert len(workspaces._kept) == kept - 1
