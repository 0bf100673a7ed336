"""A model's own code is judged by its logits, once: what users write, dropout, half precision, odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import WIDTH, aspire, build, check_equal, check_refused
from kit import VOCABULARY
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

# ---- code of users


class IgnoresPositions(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **keywords: Any) -> Any:
        return super().forward(input_ids, position_ids=None, **keywords)


class CannotPack(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **keywords: Any) -> Any:
        if position_ids is not None and bool((position_ids.diff() < 0).any()):
            raise RuntimeError("positions must rise")
        return super().forward(input_ids, position_ids=position_ids, **keywords)


def llama_as(model_class: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    model = build("llama")
    other = model_class(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    return other


def test_code_of_users_is_judged_by_its_logits() -> None:
    check_refused(llama_as(IgnoresPositions), "changes its logits by .*ignores position_ids")
    check_refused(llama_as(CannotPack), "packed forward .*positions must rise")


def test_neighbouring_tokens_may_meet_in_attention_only() -> None:
    model = build("llama")
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] + args[0].roll(1, 1),))
    check_refused(model, "computes across tokens")
    handle.remove()
    check_equal(model)


def test_logits_of_all_tokens_are_computed_where_a_model_cannot_choose() -> None:
    model = build("llama")
    forward = type(model).forward

    class EveryLogit(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **keywords: Any) -> Any:
            return forward(self, input_ids, position_ids=position_ids, **keywords)

    assert "logits_to_keep" not in EveryLogit.forward.__annotations__
    check_equal(llama_as(EveryLogit))


def test_modules_without_attention_do_not_disturb() -> None:
    model = build("llama")
    model.extra = nn.Linear(2, 2)
    check_equal(model)


# ---- training mode


def test_dropout_of_attention_weights_is_refused() -> None:
    """The kernels drop nothing. What a model in training mode drops elsewhere: tests/test_model_warnings.py."""
    for model in (build("llama", attention_dropout=0.1), build("opt", attention_dropout=0.1)):
        check_equal(model)
        with pytest.warns(RuntimeWarning, match="training mode"):
            check_refused(model.train(), r"drops attention weights \(dropout=0.1\); call model.eval\(\)")


def test_other_random_numbers_of_training_mode_are_refused() -> None:
    model = build("llama").train()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * torch.rand_like(output))
    with pytest.warns(RuntimeWarning, match="training mode"):
        check_refused(model, r"draws random numbers in training mode \(call model.eval\(\)\)")


# ---- the comparison


def test_a_model_is_compared_with_itself_once() -> None:
    model = build("llama")
    calls: list[bool] = []
    model.register_forward_pre_hook(
        lambda module, args, keywords: calls.append("attention_mask" in keywords), with_kwargs=True
    )
    for _ in range(2):
        aspire(model, new=2)
    assert sum(calls) == 1
    model.to(torch.float32)  # other layers: once more
    aspire(model, new=2)
    assert sum(calls) == 2


class OwnNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize("patched", [LlamaMLP, LlamaRMSNorm])
def test_a_class_that_is_patched_after_the_first_call_is_judged_again(
    patched: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a base class, whose forward the model's own calls."""
    model = build("llama")
    model.model.norm.__class__ = OwnNorm
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = OwnNorm
    check_equal(model)
    forward = patched.forward
    with monkeypatch.context() as patch:
        patch.setattr(patched, "forward", lambda self, states: forward(self, states + states.roll(1, 1)))
        check_refused(model, "computes across tokens")
    check_equal(model)


def test_code_that_comes_behind_the_first_call_is_judged() -> None:
    """A hook, one for all modules, or a forward of one instance, by which neighbouring tokens meet."""

    def mixed(states: Tensor) -> Tensor:
        return states + states.roll(1, 1)

    model = build("llama")
    check_equal(model)
    mlp = model.model.layers[1].mlp
    handles = [
        lambda: mlp.register_forward_pre_hook(lambda module, args: (mixed(args[0]),)),
        lambda: mlp.register_forward_hook(lambda module, args, output: mixed(output)),
        lambda: nn.modules.module.register_module_forward_hook(
            lambda module, args, output: mixed(output) if module is mlp else None
        ),
    ]
    for register in handles:
        handle = register()
        check_refused(model, "computes across tokens")
        handle.remove()
        check_equal(model)
    forward = mlp.forward
    mlp.forward = lambda states: mixed(forward(states))
    check_refused(model, "computes across tokens")
    del mlp.forward
    check_equal(model)


def test_code_at_the_address_of_code_that_is_gone_is_judged() -> None:
    model = build("llama")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def harmless() -> Callable[[Tensor], Tensor]:
        return lambda states: forward(states)

    def mixing() -> Callable[[Tensor], Tensor]:
        return lambda states: forward(states + states.roll(1, 1))

    mlp.forward = harmless()
    check_equal(model)
    for _ in range(20):
        address = id(mlp.forward)
        del mlp.forward
        mlp.forward = mixing()
        if id(mlp.forward) == address:
            break
        mlp.forward = harmless()
        check_equal(model)
    check_refused(model, "computes across tokens")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_comparison(dtype: torch.dtype) -> None:
    for model_type in ("llama", "qwen3_moe"):
        found = aspire(build(model_type, dtype))
        assert found.sequences.shape[1] == WIDTH


def test_a_model_with_one_layer_is_served() -> None:
    check_equal(build("llama", num_hidden_layers=1))


def test_text_alone_of_a_model_that_can_see() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    torch.manual_seed(0)
    text = build("llama").config
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=VOCABULARY - 1, pad_token_id=0)
    model = LlavaForConditionalGeneration(config).double().eval()
    check_equal(model)
    with pytest.raises(ValueError, match="pixel_values"):
        aspire(model, pixel_values=torch.zeros(1, 3, 16, 16))
