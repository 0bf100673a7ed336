"""Caches that outlive a call: the one `generate` returns, and one that is passed in to continue from.

Plain's caches are rectangles `[B, heads, columns, size]` over the padded batch. Ours are pages that hold visible
tokens only, so hidden columns come out as zeros: no mask that made a column hidden ever lets it be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from .arguments import refuse
from .cache import AspireCache
from .compat import update_layer
from .request import Request


@dataclass(frozen=True)
class Prefix:
    """What a cache holds that was passed in.

    Attributes:
        cache: A `DynamicCache`; extended in place after the call.
        columns: Columns of the padded batch that it holds.
    """

    cache: Any
    columns: int

    @classmethod
    def of(cls, cache: Any, rows: int) -> Prefix | None:
        """The prefix in a `generate` call's cache; None where Transformers made an empty one for the call.

        Raises:
            ValueError: Not a dynamic cache, or one for another batch size.
        """
        if cache is None or not getattr(cache, "_is_user_defined", False):
            return None
        layers = getattr(cache, "layers", [])
        name = type(cache).__name__
        if not isinstance(cache, DynamicCache) or type(cache).update is not DynamicCache.update or cache.offloading:
            raise refuse(f"got a {name} to continue from, expected a DynamicCache or one that generate returned")
        columns = int(cache.get_seq_length())
        for layer in layers if columns else ():
            shape = tuple(layer.keys.shape)
            if shape[0] != rows or shape[2] != columns:
                raise refuse(
                    f"got a {name} of shape {shape}, expected {rows} rows and {columns} columns in each layer"
                )
        return cls(cache, columns)

    def load(self, request: Request, pools: AspireCache) -> None:
        """Copies a row's visible columns into its pages."""
        count = len(request.cached_columns)
        if not count:
            return
        slots = _slots(request, count)
        for index, (keys, values) in enumerate(zip(pools.keys, pools.values, strict=True)):
            layer = self.cache.layers[index]
            columns = torch.from_numpy(request.cached_columns).to(layer.keys.device)
            places = slots.to(keys.device)
            pools.write(keys, places, layer.keys[request.row].transpose(0, 1)[columns].to(keys.device))
            pools.write(values, places, layer.values[request.row].transpose(0, 1)[columns].to(values.device))


@dataclass(frozen=True)
class Pages:
    """The pages of a finished batch, as plain's columns.

    Attributes:
        pools: Keys and values.
        requests: One per row, still holding their pages.
        visible: `[B, M]` visible columns of the padded prompts, those of a passed-in cache included.
        columns: Columns in all: the last generated token of a batch has no keys and values.
    """

    pools: AspireCache
    requests: Sequence[Request]
    visible: NDArray[np.bool_]
    columns: int

    def dense(self, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the columns from `first` on: `[B, heads, columns - first, size]`."""
        results = []
        for pool in (self.pools.keys[layer], self.pools.values[layer]):
            some = self.pools.read(pool, torch.zeros(1, dtype=torch.int64, device=pool.device))
            result = pool.new_zeros(len(self.requests), self.columns - first, *some.shape[1:])
            for request in self.requests:
                shown = np.ones(self.columns, dtype=bool)
                shown[: self.visible.shape[1]] = self.visible[request.row]
                order = np.cumsum(shown) - 1
                kept = np.flatnonzero(shown[first:]) + first
                slots = _slots(request, int(order[-1]) + 1).to(pool.device)
                places = slots[torch.from_numpy(order[kept]).to(pool.device)]
                result[request.row, kept - first] = self.pools.read(pool, places)
            results.append(result.transpose(1, 2))
        return results[0], results[1]

    def append_to(self, cache: Any) -> None:
        """Extends a plain cache by the columns that it lacks."""
        first = int(cache.get_seq_length())
        for layer in range(len(self.pools.keys)):
            update_layer(cache, *self.dense(layer, first), layer)


class ReturnedCache(DynamicCache):
    """The cache of a finished call: pages until somebody looks, a `DynamicCache` from then on.

    A dense copy of a large batch may be tens of gigabytes, and most callers never look.

    Args:
        pages: The finished batch.
        config: The model's configuration, for the kinds of its layers.
    """

    def __init__(self, pages: Pages, config: Any) -> None:
        self._pages: Pages | None = None
        super().__init__(config=config)
        self._pages = pages

    @property
    def layers(self) -> list[Any]:
        """Plain's layers, built at the first look."""
        pages, self._pages = self._pages, None
        if pages is not None:
            pages.append_to(self)
            for request in pages.requests:
                pages.pools.allocator.release(request.pages)
                request.pages = []
        return self._layers

    @layers.setter
    def layers(self, value: list[Any]) -> None:
        self._layers = value

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, is a plain cache's."""
        _ = self.layers
        return self.__dict__


def _slots(request: Request, count: int) -> Tensor:
    """Pool places of a request's first `count` tokens."""
    parts = [torch.arange(begin, end) for begin, end in request.context(count)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
