"""How many pages a call needs, and how many its devices have room for."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from .cache import LayerSpec
from .config import AspireConfig
from .planner import pages_for
from .request import Request

_MEMORY_SHARE = 0.9
"""Share of the free memory that pages may take where `kv_memory` does not say."""


def page_count(
    first: Sequence[Request],
    requests: Sequence[Request],
    config: AspireConfig,
    layers: Sequence[LayerSpec],
    *,
    together: bool,
) -> int:
    """Pages to make: what the call needs, or what memory allows if that is less.

    Args:
        first: Requests that prefill.
        requests: All requests, forks included.
        config: Page size and memory.
        layers: Shapes per layer.
        together: Whether all rows must be in memory at the same time.

    Raises:
        ValueError: One row alone, or all that must be there together, do not fit.
    """
    size = config.page_size
    shared = sum(len(request.forks) * (request.kept // size) for request in first)
    wanted = sum(pages_for(request.kept, request.limit, size) for request in requests) - shared
    allowed = min(_allowed_pages(device, config, layers) for device in {layer.device for layer in layers})
    least = wanted if together else max(pages_for(request.kept, request.limit, size) for request in requests)
    if least > allowed:
        page_bytes = size * sum(layer.bytes_per_token for layer in layers)
        longest = max(request.kept + request.limit for request in requests)
        what = f"a batch of {len(requests)} rows that must run together" if together else "one row"
        raise ValueError(
            f"assistant='aspire': {what} of up to {longest} tokens needs {least} pages ({least * page_bytes:,} bytes) "
            f"of keys and values, and there is room for {allowed} ({allowed * page_bytes:,} bytes); shorten the "
            f"prompt, lower max_new_tokens, use a smaller batch, or raise kv_memory (got {config.kv_memory})"
        )
    return min(wanted, allowed)


def free_memory(device: torch.device) -> int:
    """Bytes that a new allocation on a device may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return int(psutil.virtual_memory().available)


def _allowed_pages(device: torch.device, config: AspireConfig, layers: Sequence[LayerSpec]) -> int:
    """Pages that a device has room for."""
    here = sum(layer.bytes_per_token for layer in layers if layer.device == device)
    per_page = config.page_size * here
    if isinstance(config.kv_memory, int):
        return config.kv_memory * here // sum(layer.bytes_per_token for layer in layers) // per_page
    return int(free_memory(device) * (config.kv_memory or _MEMORY_SHARE)) // per_page
