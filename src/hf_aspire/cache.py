"""Paged keys and values of all requests, and the sparse contexts drawn on them.

The models' `cache.update` passes its arguments through: our attention function writes the pages. (Models with latent
attention expand keys and values after `update`, so what it returns must be what they gave.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compat import Cache
from .pages import PageAllocator


@dataclass(frozen=True)
class LayerSpec:
    """Shapes of one layer's attention, read off its first call (sizes in elements)."""

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    scaling: float

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps in this layer."""
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


class AspireCache(Cache):
    """Page pools per layer and a page table per request slot.

    The layout is the backend's choice: `[token slot, kv head, size]`, so that a contiguous stretch of pages is a view
    of a request's tokens, or, `by_head`, `[page, kv head, slot in page, size]`, so that what a program of a GPU kernel
    reads of a page is contiguous. The last page is a trash page: tokens that keep no keys and values (a masked last
    prompt token) write there. Memory past a request's length is never read and may hold anything.

    Args:
        layers: Shapes per layer; empty for the probe, which stores nothing.
        pages: Pages for requests.
        page_size: Tokens per page.
        requests: Request slots.
        pages_per_request: Most pages that a request may hold.
        by_head: The layout.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec] = (),
        pages: int = 0,
        page_size: int = 1,
        requests: int = 0,
        pages_per_request: int = 0,
        by_head: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.page_size = page_size
        self.allocator = PageAllocator(pages)
        self.trash_slot = pages * page_size
        self._by_head = by_head
        with torch.inference_mode(False):  # tensors made inside inference mode could not be written outside it
            self.keys = [self._pool(pages + 1, layer, layer.key_size) for layer in layers]
            self.values = [self._pool(pages + 1, layer, layer.value_size) for layer in layers]
            device = layers[0].device if layers else torch.device("cpu")
            self.page_table = torch.zeros(requests, max(pages_per_request, 1), dtype=torch.int32, device=device)

    # What Transformers asks of a cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Returns its arguments: the attention function stores them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: lengths belong to requests, and every forward gets its position ids."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0: a packed forward brings its own positions."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The packed tokens themselves."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit that Transformers would have to know of."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions

    # What the engine asks of it

    def assign(self, slot: int, pages: Sequence[int]) -> None:
        """Writes the page table of a request slot."""
        self.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def runs(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """Pages as contiguous (begin, end) stretches of token slots."""
        size = self.page_size
        stretches: list[tuple[int, int]] = []
        for page in pages:
            if stretches and stretches[-1][1] == page * size:
                stretches[-1] = (stretches[-1][0], (page + 1) * size)
            else:
                stretches.append((page * size, (page + 1) * size))
        return stretches

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page in every layer (a tail page that two requests would write)."""
        for pool in (*self.keys, *self.values):
            pages = pool if self._by_head else pool.unflatten(0, (-1, self.page_size))
            pages[target] = pages[source]

    def read(self, pool: Tensor, slots: Tensor) -> Tensor:
        """The tokens at `slots` `[n]` of one of the pools: `[n, kv heads, size]`."""
        if not self._by_head:
            return pool[slots]
        return pool[slots // self.page_size, :, slots % self.page_size]

    def write(self, pool: Tensor, slots: Tensor, states: Tensor) -> None:
        """Puts `[n, kv heads, size]` at `slots` `[n]` of one of the pools."""
        if self._by_head:
            pool[slots // self.page_size, :, slots % self.page_size] = states
        else:
            pool[slots] = states

    def _pool(self, pages: int, layer: LayerSpec, size: int) -> Tensor:
        shape = (pages, layer.kv_heads, self.page_size) if self._by_head else (pages * self.page_size, layer.kv_heads)
        return torch.empty(*shape, size, dtype=layer.dtype, device=layer.device)
