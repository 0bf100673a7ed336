"""A model's decoder layers compiled, without a change to the model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
import torch.fx.experimental._config
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import current_step
from .backends import BackendStep
from .compat import PreTrainedModel
from .model_checks import is_training
from .parallel_products import ParallelProducts

_RECOMPILE_LIMIT = 64
"""Compilations of all models of a process: one per model and kind of module, and torch's own limit is 8."""
_one_forward = threading.RLock()
"""Held during a forward: before 2.13, torch's settings are those of all threads."""
# One kernel for what is alike and independent, as the rotations of queries and keys. No sums: in kernels that are not
# tuned they get blocks of 1,024 rows, and layers with norms of queries and keys took 270 us longer (Qwen3-1.7B, 33
# rows, H200, torch 2.11, 2026-11-30).
_COMBINED = {
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
    "combo_kernel_allow_mixed_sizes": 2,
    "combo_kernels_autotune": 0,
}
_OPTIONS: dict[str, Any] = {"post_grad_custom_post_pass": ParallelProducts()}
"""One pass for all layers: they share compiled code only where their options are the same objects. Where torch cannot
leave sums out, nothing is combined."""
if hasattr(torch._inductor.config, "combo_kernels_pointwise_only"):
    _OPTIONS |= _COMBINED


@torch.library.custom_op("hf_aspire::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    """Attention of the step that runs in this thread: `[1, H, T, D]` each -> `[1, T, Hq, Dv]`."""
    step = current_step()
    assert isinstance(step, BackendStep)
    return step.attend_layer(layer, query, key, value, scaling)


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def compile_obstacle(model: PreTrainedModel) -> str | None:
    """Why a model's layers cannot be compiled apart from it, or None."""
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        return f"{type(model).__name__} has no decoder layers that Transformers marks as such"
    if torch.__version__ < (2, 8):  # type: ignore[operator]
        return f"torch {torch.__version__} would compile every layer for itself, which 2.8 and later do not"
    return replay_obstacle(model)


def replay_obstacle(model: PreTrainedModel) -> str | None:
    """Why the kernels of a model's forward may differ from one step to the next, or None."""
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if is_training(model):
        return f"{type(model).__name__} is in training mode"
    if nn.modules.module._has_any_global_hook():
        return "a hook is registered for all modules"
    for name, module in model.named_modules():
        what = name or type(model).__name__
        if "forward" in vars(module):
            return f"the forward of {what} is wrapped, by accelerate's hooks for example"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{what} has a forward hook, which runs in every step"
        if module._compiled_call_impl is not None:
            return f"{what} is compiled already"
    return None


def compiled_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model that shares every parameter with `model`, and whose decoder layers run compiled.

    All layers share their code, and compile once for the first of each kind. So do the modules beside them, such as
    position embeddings and the last norm: a dozen and more small kernels of a step. Nothing is assigned to the model's
    own modules: plain forwards of it, in other threads too, stay as they are.
    """
    twin = _twin(model, {})
    for module in twin.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True, options=_OPTIONS)
        elif any(_holds_layers(child) for child in module.children()):
            for child in module.children():
                if not isinstance(child, (nn.ModuleList, nn.Embedding)):
                    child.compile(dynamic=True)
    return twin


def _holds_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and any(isinstance(child, GradientCheckpointingLayer) for child in module)


def varying_numbers(model: PreTrainedModel) -> set[str]:
    """Names of integers that the decoder layers' modules hold and that differ between layers, such as their index.

    As constants of the code, they would have it compiled for every layer; one that a module holds in a dict, list or
    object of its own still does.
    """
    held: dict[tuple[str, str], int] = {}
    found = set()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for path, module in layer.named_modules():
                for name, value in vars(module).items():
                    if type(value) is int and held.setdefault((f"{type(layer)} {path}", name), value) != value:
                        found.add(name)
    return found


class CompiledSteps:
    """Forwards of a model's compiled twin, for as long as its layers compile.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._twin: PreTrainedModel | None = None
        self._varying = ",".join(rf"L\['self'\].*\.{name}$" for name in sorted(varying_numbers(model)))
        try:
            self._twin = compiled_twin(model)
        except Exception as error:  # modules that are more than their attributes
            self._give_up(error)

    def run(self, forward: Callable[[PreTrainedModel], Tensor]) -> Tensor | None:
        """What `forward` makes of the twin; None where compiling it fails, now or earlier."""
        if self._twin is None:
            return None
        settings = {
            "fail_on_recompile_limit_hit": True,
            "recompile_limit": max(_RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit),
        }
        # Sizes of heads stay constants: divisions by numbers unknown to the compiler are slow.
        varying = torch.compiler.config.patch(dynamic_sources=self._varying)  # type: ignore[attr-defined]
        # A first forward of as many tokens as a layer is wide would be taken for the only one there is.
        unequal = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        try:
            with _one_forward, torch._dynamo.config.patch(settings), varying, unequal:
                return forward(self._twin)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # what cannot be captured may well be compiled
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self._twin = None
        warnings.warn(
            f"hf_aspire runs without compiled layers: compiling them failed, {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )


def _twin(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module tree: new modules, the same parameters and buffers.

    Not by `copy.copy`: a module's state may refuse to be taken out, as that of parametrised ones does.
    """
    if id(module) not in made:
        twin = made[id(module)] = object.__new__(type(module))
        vars(twin).update(vars(module))
        vars(twin)["_modules"] = {
            name: None if child is None else _twin(child, made) for name, child in module._modules.items()
        }
    return made[id(module)]
