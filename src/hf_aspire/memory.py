"""The memory that a call runs in: page pools and the tokens of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .backends import TorchBackend
from .cache import AspireCache, LayerSpec
from .compat import PreTrainedModel
from .config import AspireConfig
from .cost_model import CostModel
from .runner import Runner
from .selection import ContextPolicy

if TYPE_CHECKING:
    from .decoding import Decoding
    from .pipeline import Pipeline
    from .testing import Replay


@dataclass(frozen=True)
class Sizes:
    """How much a call needs: pages, request slots, pages per request, history columns, context tokens per request."""

    pages: int
    slots: int
    pages_per_request: int
    columns: int
    longest: int

    def hold(self, other: Sizes) -> bool:
        """Whether these suffice for others."""
        return all(have >= need for have, need in zip(astuple(self), astuple(other), strict=True))

    def joined(self, other: Sizes) -> Sizes:
        """What holds both."""
        return Sizes(*map(max, zip(astuple(self), astuple(other), strict=True)))

    def rounded(self, most_pages: int) -> Sizes:
        """Up to an eighth more, so that calls of similar sizes can share what was made for one of them."""
        pages, *others = (_rounded(size) for size in astuple(self))
        return Sizes(max(self.pages, min(pages, most_pages)), *others)


class Memory(Protocol):
    """Pools, and what works on them.

    Attributes:
        cache: Page pools.
        history: `[requests, columns]` int64: padded prompts, committed tokens, drafts.
        cost_model: What steps on it were seen to take, kept as long as it is; None until somebody asks.
    """

    cache: AspireCache
    history: Tensor
    cost_model: CostModel | None

    def runner(self, model: PreTrainedModel, keeps_logits: bool) -> Runner:
        """Runs the model on these pools."""

    def pipeline(self, decoding: Decoding, replay: Replay | None) -> Pipeline | None:
        """What can go ahead of the host here, or None."""

    def close(self) -> None:
        """Ends the call's use of it."""


class HostMemory:
    """Memory of one call, with the reference kernels.

    Args:
        layers: Shapes per layer.
        sizes: How much.
        config: Page size.
        policy: Which layers score what.
        device: Where the model takes its tokens.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        sizes: Sizes,
        config: AspireConfig,
        policy: ContextPolicy,
        device: torch.device,
    ) -> None:
        self.cache = AspireCache(layers, sizes.pages, config.page_size, sizes.slots, sizes.pages_per_request)
        self.history = torch.zeros(sizes.slots, sizes.columns, dtype=torch.int64, device=device)
        self.cost_model: CostModel | None = None
        self._policy = policy

    def runner(self, model: PreTrainedModel, keeps_logits: bool) -> Runner:
        """See `Memory`."""
        return Runner(model, self.cache, TorchBackend(self.cache, self._policy), keeps_logits)

    def pipeline(self, decoding: Decoding, replay: Replay | None) -> None:
        """See `Memory`."""

    def close(self) -> None:
        """See `Memory`."""


def _rounded(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
