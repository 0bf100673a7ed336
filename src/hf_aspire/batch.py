"""One step's rows as packed tensors: nothing is padded to a rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .request import Request, Row, RowKind
from .selection import SparseView


@dataclass(frozen=True)
class MixedBatch:
    """The rows of a step, one after the other in `[1, T]`.

    Layers see it through two views: in most of them draft rows read their sparse lists; in a layer that runs full
    attention while drafting they are full rows too.

    Attributes:
        rows: The rows, in packed order.
        offsets: First packed token of every row.
        token_ids: `[1, T]` int64.
        position_ids: `[1, T]` int64.
        write_slots: `[T]` int64, where the pools keep each token's keys and values.
        logits_index: `[K]` int64, packed tokens whose logits are wanted, in row order.
        embeds: `[1, T, hidden]` to feed instead of `token_ids`, or None.
        sparse: Lists of the draft rows, or None without draft rows.
        draft_index: `[R]` int64, packed tokens of the draft rows.
    """

    rows: Sequence[Row]
    offsets: Sequence[int]
    token_ids: Tensor
    position_ids: Tensor
    write_slots: Tensor
    logits_index: Tensor
    sparse: SparseView | None
    draft_index: Tensor
    embeds: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Query tokens, T."""
        return self.token_ids.shape[1]


def pack(
    rows: Sequence[Row],
    history: Tensor,
    prompt_width: int,
    fed_columns: int,
    trash_slot: int,
    sparse: SparseView | None,
) -> MixedBatch:
    """Packs rows: positions, places and token addresses in one host array, one copy to the device.

    Args:
        rows: The step's rows.
        history: `[requests, columns]` int64, every row's padded prompt, committed tokens and drafts.
        prompt_width: Columns of the padded prompt in the history.
        fed_columns: How many of them, counted from the last, are fed.
        trash_slot: Place for tokens that keep no keys and values.
        sparse: Lists of the draft rows.
    """
    counts = [row.queries for row in rows]
    offsets = [0, *np.cumsum(counts).tolist()]
    staging = np.empty((3, offsets[-1]), dtype=np.int64)
    wanted: list[NDArray[np.int64]] = []
    for row, begin, end in zip(rows, offsets, offsets[1:], strict=False):
        columns, staging[1, begin:end] = _tokens(row, prompt_width, fed_columns)
        staging[0, begin:end] = row.request.row * history.shape[1] + columns
        staging[2, begin:end] = _places(row, trash_slot)
        wanted.append(np.arange(end - row.logits, end, dtype=np.int64))
    device = history.device
    address, positions, slots = torch.from_numpy(staging).to(device)
    drafts = [offset for row, offset in zip(rows, offsets, strict=False) if row.kind is RowKind.DRAFT]
    return MixedBatch(
        rows=rows,
        offsets=offsets[:-1],
        token_ids=history.view(-1)[address][None],
        position_ids=positions[None],
        write_slots=slots,
        logits_index=torch.from_numpy(np.concatenate(wanted)).to(device),
        sparse=sparse,
        draft_index=torch.tensor(drafts, dtype=torch.int64, device=device),
    )


def first_column(request: Request, prompt_width: int) -> int:
    """Column of the request's last committed token in the history."""
    return prompt_width + request.generated - 1


def _tokens(row: Row, prompt_width: int, fed_columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """History columns and position ids of a row's tokens."""
    request = row.request
    if row.kind is RowKind.PREFILL:
        first = row.start - len(request.cached_columns)
        chunk = slice(first, first + row.queries)
        return request.columns[chunk] + (prompt_width - fed_columns), request.positions[chunk]
    ahead = row.start - request.length
    tokens = np.arange(ahead, ahead + row.queries, dtype=np.int64)
    last = request.generated - 1
    return first_column(request, prompt_width) + tokens, request.position(last) + tokens


def _places(row: Row, trash_slot: int) -> NDArray[np.int64]:
    """Pool places of a row's tokens."""
    places = [np.arange(b, e, dtype=np.int64) for b, e in _between(row.request, row.start, row.context)]
    slotless = row.queries - (row.context - row.start)
    return np.concatenate([*places, np.full(slotless, trash_slot, dtype=np.int64)])


def _between(request: Request, start: int, end: int) -> list[tuple[int, int]]:
    """Context tokens start ... end - 1 as stretches of the pools."""
    stretches = []
    for begin, stop in request.context(end):
        skipped = min(start, stop - begin)
        start -= skipped
        if begin + skipped < stop:
            stretches.append((begin + skipped, stop))
    return stretches
