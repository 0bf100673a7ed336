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


def page_count(wanted: int, least: int, longest: int, config: AspireConfig, layers: Sequence[LayerSpec]) -> int:
    """Pages to make: what the call needs, or what memory allows if that is less.

    Args:
        wanted: Pages that hold all rows at a time.
        least: Pages without which the call cannot run: those of its largest row, or of all rows that run together.
        longest: Tokens of the longest row, for the message.
        config: Page size and memory.
        layers: Shapes per layer.

    Raises:
        ValueError: The least pages do not fit.
    """
    allowed = allowed_pages(config, layers)
    if least > allowed:
        page_bytes = config.page_size * sum(layer.bytes_per_token for layer in layers)
        raise ValueError(
            f"assistant='aspire': this call, whose longest row may reach {longest} tokens, needs {least} pages "
            f"({least * page_bytes:,} bytes) of keys and values at a time, and there is room for {allowed} "
            f"({allowed * page_bytes:,} bytes); shorten the prompt, lower max_new_tokens, use a smaller batch, or "
            f"raise kv_memory (got {config.kv_memory})"
        )
    return min(wanted, allowed)


def wanted_pages(first: Sequence[Request], requests: Sequence[Request], page_size: int) -> int:
    """Pages that hold all requests at a time; `first` are those that prefill, the others their forks."""
    shared = sum(len(request.forks) * (request.kept // page_size) for request in first)
    return sum(pages_for(request.kept, request.limit, page_size) for request in requests) - shared


def allowed_pages(config: AspireConfig, layers: Sequence[LayerSpec]) -> int:
    """Pages that every device has room for."""
    return min(_allowed_pages(device, config, layers) for device in {layer.device for layer in layers})


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
