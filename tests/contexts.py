"""What tests of selection share: requests in the middle of a call, scores with ties, and lists as indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_aspire import AspireConfig
from hf_aspire.request import Request, Row
from hf_aspire.selection import ContextPolicy, SparseContexts

LAYERS = 3


def request_of(length: int, row: int = 0) -> Request:
    """A request whose prompt is in the cache and whose first token is committed."""
    columns = np.arange(length)
    request = Request(row, columns, columns, kept=length, limit=1000, noise_key=0)
    request.length = request.prefilled = length
    request.generated = 1
    return request


def prompt_row(length: int) -> Row:
    request = request_of(length)
    request.prefilled = 0
    return Row.prefill(request, length, scored=True)


def scores_of(lists: int, length: int, seed: int) -> Tensor:
    """Few distinct values, exact in float32, so that ties abound."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (lists, length), generator=random) / 8


def by_unit(policy: ContextPolicy, scores: Tensor) -> Tensor:
    """Token scores as those of the policy's units, the last one incomplete, as backends make them."""
    return F.pad(scores, (0, -scores.shape[-1] % policy.unit)).unflatten(-1, (-1, policy.unit)).sum(-1)


def contexts_of(config: AspireConfig, requests: int = 1) -> SparseContexts:
    return SparseContexts(config, ContextPolicy.of(config, LAYERS), requests, 500, torch.device("cpu"))


def lists_of(contexts: SparseContexts, requests: Sequence[Request]) -> list[list[list[int]]]:
    """Context indices of the requests' next draft rows, `[request][list]`, read back through shuffled pages."""
    size = contexts.config.page_size
    random = torch.Generator().manual_seed(7)
    pages = 500 // size + 2
    table = torch.stack([torch.randperm(10 * pages, generator=random)[:pages] for _ in range(8)])
    view = contexts.view([Row.draft(request, scored=False, read=0.0) for request in requests], table)
    found = []
    for index, request in enumerate(requests):
        origin = {int(page): place for place, page in enumerate(table[request.row])}
        slots = view.slots[:, index].tolist()
        listed = int(view.lengths[index])
        assert all(slot == row[listed - 1] for row in slots for slot in row[listed:])  # the rest repeats a listed slot
        found.append([[origin[slot // size] * size + slot % size for slot in row[:listed]] for row in slots])
    return found
