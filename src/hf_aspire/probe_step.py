"""What the probe puts in the place of attention and cache: they look at what a model hands them, and serve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention import scaling_of
from .cache import AspireCache, LayerSpec
from .compat import CACHE_NAME

ROWS = ((2, 4, 5), (0, 1, 3, 6))
"""The probe's rows as indices into the packed tokens. Interleaved, so that counting tokens gives wrong positions; and
positions fall as well as rise, as in a step."""
TOKENS = sum(len(row) for row in ROWS)
# Keywords that reach an attention function without changing what it computes for a packed, causal forward.
_NEUTRAL = {"scaling", "position_ids", "is_causal", "position_embeddings", "use_cache", CACHE_NAME}


class ProbeCache(AspireCache):
    """The cache of a probe.

    Args:
        length: Tokens that it pretends to hold.

    Attributes:
        asked: Whether the model wanted to know, although it was given positions.
        updates: Shapes of the keys and values that it was given, by layer index.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.asked = False
        self.updates: dict[int, tuple[torch.Size, torch.Size]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """See `AspireCache`."""
        self.updates[layer_idx] = (key_states.shape, value_states.shape)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """See `AspireCache`."""
        self.asked = True
        return self._length


class ProbeStep:
    """The attention step of a probe, see `AttentionStep`: it looks, and attends a few dummy rows.

    Args:
        width: Tokens that the longest row of the call may reach; windows at least as wide are no windows.
        device: Where the model takes its tokens.

    Attributes:
        calls: Layer indices, in the order in which they called.
        specs: Shapes by layer index.
        problems: What this package would not honour.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._width = width
        self.calls: list[int] = []
        self.specs: dict[int, LayerSpec] = {}
        self.problems: list[str] = []
        self._uncommon_mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=device)
        self._hidden = ~_visible().to(device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> Tensor:
        """See `AttentionStep`."""
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            self._refuse(f"{type(module).__name__} has no layer_idx")
            index = len(self.calls)
        self.calls.append(index)
        if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2] == TOKENS:
            self._refuse(
                f"of {TOKENS} packed tokens its attention got queries {tuple(query.shape)} and keys {tuple(key.shape)}"
            )
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        if not query.dtype == key.dtype == value.dtype:
            self._refuse(f"its attention got {query.dtype} queries, {key.dtype} keys and {value.dtype} values")
        self._check_keywords(module, keywords)
        scaling = scaling_of(query, keywords)
        self.specs[index] = LayerSpec(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            dtype=key.dtype,
            device=key.device,
            scaling=scaling,
        )
        return self._attend_rows(query, key, value, scaling)

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Causal attention inside each of the rows, as `AttentionStep.attend`.

        Both rows at a time: a forward of a few tokens takes as long as the host needs to start its operations. Not by
        torch's fused attention, whose libraries a user may have turned off, and of which cuDNN plans for long.
        """
        groups = query.shape[1] // key.shape[1]
        key, value = (states.to(query.dtype).repeat_interleave(groups, 1) for states in (key, value))
        weights = query @ key.transpose(2, 3) * scaling
        weights = weights.masked_fill(self._hidden.to(query.device), float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous()

    def mask(self, mask_function: Callable[..., Any] | None) -> Tensor | None:
        """See `AttentionStep`. A mask that is not plain causal is something that no layer may turn up with."""
        if mask_function is None or _is_causal(mask_function, self._width, self._uncommon_mask.device):
            return None
        return self._uncommon_mask

    def _check_keywords(self, module: nn.Module, keywords: dict[str, Any]) -> None:
        if getattr(module, "is_causal", True) is False or keywords.get("is_causal") is False:
            self._refuse("its attention is not causal")
        for name, value in keywords.items():
            if value is None or value is False or name in _NEUTRAL:
                continue
            if name == "sliding_window" and isinstance(value, int):
                if value < self._width:
                    self._refuse(f"it attends over a window of {value} tokens and this call may reach {self._width}")
            elif name == "dropout":
                if value:
                    self._refuse(f"it drops attention weights (dropout={value}); call model.eval() first")
            elif name == "attention_mask":
                unlike = f"that is not plain causal over {self._width} tokens"
                self._refuse(f"it attends under a mask {unlike if value is self._uncommon_mask else 'of its own'}")
            else:
                self._refuse(f"it gives its attention the keyword {name!r}, which is not supported yet")

    def _refuse(self, reason: str) -> None:
        if reason not in self.problems:
            self.problems.append(reason)


def _visible() -> Tensor:
    """`[T, T]`: which packed tokens each one sees, those of its row up to itself."""
    visible = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for row in ROWS:
        for place, token in enumerate(row):
            visible[token, list(row[: place + 1])] = True
    return visible


def _is_causal(mask_function: Callable[..., Any], width: int, device: torch.device) -> bool:
    """Whether a mask shows each token of a row of `width` tokens all tokens up to itself, and no other."""
    place = "cpu" if device.type == "meta" else device  # a model without weights, asked for its shapes
    queries = torch.tensor([0, width // 2, width - 1], device=place)[:, None]
    keys = torch.arange(width, device=place)[None]
    zero = torch.zeros((), dtype=torch.long, device=place)
    try:
        visible = torch.as_tensor(mask_function(zero, zero, queries, keys))
        return torch.equal(visible.expand(len(queries), width), keys <= queries)
    except (
        IndexError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # it reads tensors of the batch, maybe without values
        return device.type == "meta"
