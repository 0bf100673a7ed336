"""Whatever may change what captured or compiled code computes changes a model's fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit import tiny_llama
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from hf_aspire.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def activation(model: LlamaForCausalLM) -> None:
    model.model.layers[0].mlp.act_fn.inplace = True


def function(model: LlamaForCausalLM) -> None:
    model.model.layers[1].mlp.scaled = torch.sin


CHANGES: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "an attribute": activation,
    "a function": function,
    "the configuration": lambda model: setattr(model.config, "final_logit_softcapping", 3.0),
    "nested values of it": lambda model: model.config.rope_parameters.update(other={"rope_theta": 5.0}),
    "a module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "a parameter": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.clone())),
    "a buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq.clone()),
    "a parameter's strides": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.t()),
    "its dtype": lambda model: model.float(),
    "a hook": lambda model: model.model.norm.register_forward_hook(lambda module, inputs, output: None),
    "training mode": lambda model: model.train(),
    "the precision of matrix products": lambda model: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Callable[[LlamaForCausalLM], Any]) -> None:
    torch.set_float32_matmul_precision("highest")
    model = tiny_llama()
    before = fingerprint(model)
    assert fingerprint(model) == before and hash(before) is not None
    change(model)
    assert fingerprint(model) != before


def test_a_patched_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = fingerprint(model)
    forward = type(model.model.norm).forward
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, states: forward(self, states))
    assert fingerprint(model) != before


class Wrapper(Tensor):
    """A tensor without memory of its own, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_what_a_wrapped_tensor_holds_is_seen() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("packed", Wrapper(torch.zeros(3)))
    before = fingerprint(module)
    module.packed = Wrapper(torch.zeros(3))
    assert fingerprint(module) != before


def test_new_and_old_switches_of_precision_may_be_mixed() -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has only the old ones")
    torch.set_float32_matmul_precision("high")
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "ieee"
        assert fingerprint(nn.Linear(2, 2)) is not None
    finally:
        torch.backends.fp32_precision = before
