"""Compiled layers: the same logits, few compilations, and a model that nothing was assigned to."""

from __future__ import annotations

import warnings

import pytest
import torch
from kit import ragged, tiny_llama
from torch import fx, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hf_aspire
from hf_aspire import AspireConfig
from hf_aspire.backends import BackendChoice
from hf_aspire.compiled import CompiledSteps, compile_obstacle, compiled_twin, replay_obstacle, varying_numbers

ONCE = 3
"""Graphs of a model that compiles once: a layer, position embeddings, the last norm."""


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Compiles with a backend that needs no compiler for the host, and counts graphs."""
    found = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compile_module = nn.Module.compile

    def compile_here(self: nn.Module, dynamic: bool | None = None, options: object = None) -> None:
        compile_module(self, backend=found, dynamic=dynamic)

    monkeypatch.setattr(nn.Module, "compile", compile_here)
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels, on a CPU too."""
    monkeypatch.setattr("hf_aspire.session.choose_backend", lambda config, layers: BackendChoice("triton", ""))


@pytest.mark.usefixtures("kernels")
def test_layers_compile_together_and_the_text_stays_plains(
    counter: CompileCounterWithBackend, device: torch.device
) -> None:
    model = tiny_llama(num_hidden_layers=4).float().to(device)
    batch = {name: tensor.to(device) for name, tensor in ragged((40, 33)).items()}
    config = AspireConfig(
        compile=True, cuda_graphs=False, schedule="fixed", draft_length=2, min_pages=1, recent_pages=1
    )
    text = hf_aspire.generate(model, **batch, max_new_tokens=6, do_sample=False, aspire_config=config)
    assert torch.equal(text, model.generate(**batch, max_new_tokens=6, do_sample=False))
    assert ONCE <= counter.frame_count <= ONCE + 1  # not one per layer; torch may start over once, and counts that
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.usefixtures("kernels")
def test_steps_that_the_host_leads_are_compiled_too(counter: CompileCounterWithBackend, device: torch.device) -> None:
    """Those of policies and processors that no graph serves; prompts are not."""
    model = tiny_llama(num_hidden_layers=4).float().to(device)
    batch = {name: tensor.to(device) for name, tensor in ragged((40, 24)).items()}
    config = AspireConfig(
        compile=True,
        cuda_graphs=False,
        context="hybrid",
        schedule="fixed",
        draft_length=2,
        min_pages=1,
        recent_pages=1,
    )
    hf_aspire.generate(model, **batch, max_new_tokens=1, do_sample=False, aspire_config=config)
    assert counter.frame_count == 0
    text = hf_aspire.generate(model, **batch, max_new_tokens=8, do_sample=False, aspire_config=config)
    assert torch.equal(text, model.generate(**batch, max_new_tokens=8, do_sample=False))
    assert ONCE <= counter.frame_count <= ONCE + 1


def test_sizes_that_happen_to_be_equal_are_not_taken_for_the_same(counter: CompileCounterWithBackend) -> None:
    """A first step of as many tokens as a layer is wide."""
    model = tiny_llama(num_hidden_layers=4)
    steps = CompiledSteps(model)
    for tokens in (model.config.hidden_size, 7, 16, 33):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        steps.run(lambda twin, ids=ids: twin(ids, use_cache=False).logits)  # type: ignore[misc]
    assert ONCE <= counter.frame_count <= ONCE + 1


@pytest.mark.usefixtures("kernels")
def test_layers_that_do_not_compile_run_as_they_are(
    counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The call was not told to compile, perhaps: it must not fail, now or the next time."""
    monkeypatch.setattr(CompileCounterWithBackend, "__call__", lambda self, *arguments: 1 / 0)
    model = tiny_llama(num_hidden_layers=1).float().to(device)
    batch = {name: tensor.to(device) for name, tensor in ragged((20,)).items()}
    config = AspireConfig(compile=True, cuda_graphs=False, schedule="autoregressive")
    expected = model.generate(**batch, max_new_tokens=3, do_sample=False)
    with pytest.warns(RuntimeWarning, match="runs without compiled layers: compiling them failed"):
        text = hf_aspire.generate(model, **batch, max_new_tokens=3, do_sample=False, aspire_config=config)
    assert torch.equal(text, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = hf_aspire.generate(model, **batch, max_new_tokens=3, do_sample=False, aspire_config=config)
    assert torch.equal(text, expected)


def test_modules_without_a_twin_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_aspire.compiled._twin", lambda module, made: 1 / 0)
    with pytest.warns(RuntimeWarning, match="compiling them failed, ZeroDivisionError"):
        steps = CompiledSteps(tiny_llama(num_hidden_layers=1))
    assert steps.run(lambda twin: torch.zeros(1)) is None


def test_models_of_many_sizes_compile_in_one_process() -> None:
    """They share the code that torch counts compilations of."""
    limit = CompiledSteps(tiny_llama()).run(lambda twin: torch.tensor(torch._dynamo.config.recompile_limit))
    assert limit is not None and limit >= 64


def test_the_compiler_knows_all_sizes_but_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in heads of unknown size would be divided by it, number by number."""
    shapes: list[list[object]] = []

    def record(graph: fx.GraphModule, inputs: list[object]) -> fx.GraphModule:
        known = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        shapes.append([size for entry in known if isinstance(entry, torch.Tensor) for size in entry.shape])
        return graph

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compile_module(self, dynamic=True, backend=record))
    torch._dynamo.reset()
    model = tiny_llama(num_hidden_layers=4)
    steps = CompiledSteps(model)
    for tokens in (7, 12):
        steps.run(lambda twin, count=tokens: twin(torch.arange(count)[None], use_cache=False).logits)  # type: ignore[misc]
    assert len(shapes) == ONCE
    for sizes in shapes:
        assert len({str(size) for size in sizes if not str(size).isdigit()}) == 1
    assert varying_numbers(model) == {"layer_idx"}


def test_a_twin_shares_every_parameter_and_no_module(counter: CompileCounterWithBackend) -> None:
    model = tiny_llama()
    twin = compiled_twin(model)
    pairs = list(zip(model.modules(), twin.modules(), strict=True))
    assert all(type(mine) is type(other) and mine is not other for mine, other in pairs)
    assert all(mine is other for mine, other in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(mine is other for mine, other in zip(model.buffers(), twin.buffers(), strict=True))
    compiled = {name for name, module in twin.named_modules() if module._compiled_call_impl is not None}
    layers = {f"model.layers.{index}" for index in range(3)}
    assert compiled == layers | {"model.norm", "model.rotary_emb"}


def test_a_twin_of_parametrised_modules() -> None:
    model = tiny_llama(num_hidden_layers=1)
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    ids = torch.tensor([[3, 4, 5]])
    twin = compiled_twin(model)
    for module in twin.modules():
        module._compiled_call_impl = None
    assert torch.equal(twin(ids).logits, model(ids).logits)


def test_what_may_differ_from_step_to_step_is_neither_compiled_nor_captured() -> None:
    model = tiny_llama()
    assert compile_obstacle(model) is None and replay_obstacle(model) is None
    hook = model.model.layers[1].register_forward_hook(lambda module, inputs, output: None)
    assert "layers.1 has a forward hook" in str(replay_obstacle(model))
    hook.remove()
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    assert "layers.0.mlp is wrapped" in str(replay_obstacle(model)) and compile_obstacle(model)
    del model.model.layers[0].mlp.forward
    model.model.layers[0].compile()
    assert "layers.0 is compiled already" in str(replay_obstacle(model))
    model.model.layers[0]._compiled_call_impl = None
    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    assert "registered for all modules" in str(replay_obstacle(model))
    hook.remove()
    model.model.layers[0].mlp.dropout = nn.Dropout(0.5)  # as an adapter brings it, in training mode
    assert "training mode" in str(replay_obstacle(model))
    del model.model.layers[0].mlp.dropout
    assert replay_obstacle(model) is None
    model.train()
    assert "training mode" in str(replay_obstacle(model))
    assert "no decoder layers" in str(compile_obstacle(nn.Linear(2, 2)))


def test_a_model_compiled_by_its_owner_is_served_under_autocast(counter: CompileCounterWithBackend) -> None:
    """What autocast would have cast before a fused attention is cast in compiled code, too."""
    model = tiny_llama().float()
    batch = ragged((40, 33))
    config = AspireConfig(schedule="fixed", draft_length=2, min_pages=1, recent_pages=1, page_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = hf_aspire.generate(model, **batch, max_new_tokens=5, do_sample=False, aspire_config=config)
        model.model.layers[0].compile()
        text = hf_aspire.generate(model, **batch, max_new_tokens=5, do_sample=False, aspire_config=config)
    assert torch.equal(text, expected)
