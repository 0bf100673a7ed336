"""What the captured and compiled code of a model was made of: where it changes, that code no longer serves."""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .compat import PreTrainedConfig
from .model_checks import forward_code

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def fingerprint(model: nn.Module) -> Hashable:
    """Parameters, modules with plain attributes and functions, configurations, code, and torch's switches."""
    tensors = [part for tensor in (*model.parameters(), *model.buffers()) for part in _parts(tensor)]
    found = (vars(module).get("config") for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    return (
        tuple((t.data_ptr(), t.dtype, t.device, tuple(t.shape), t.stride()) for t in tensors),
        tuple((id(module), type(module).__qualname__, _attributes(module)) for module in model.modules()),
        tuple(_attributes(config) for config in configs.values()),
        forward_code(model),
        _switches(),
    )


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's data: itself, or those that it wraps, as quantised weights do."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _attributes(thing: nn.Module | PreTrainedConfig) -> str:
    found: list[Any] = []
    for name, value in vars(thing).items():
        if _is_plain(value):
            found.append((name, repr(value)))
        elif isinstance(value, _FUNCTIONS):
            found.append((name, id(value)))
        elif isinstance(value, PreTrainedConfig):
            found.append((name, _attributes(value) if isinstance(thing, PreTrainedConfig) else id(value)))
    return repr(found)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, _PLAIN)


def _switches() -> Hashable:
    """Settings of torch by which it chooses kernels."""
    matmul = torch.backends.cuda.matmul
    # torch refuses to read `allow_tf32` once its successor was set.
    tf32 = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return (
        tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )
