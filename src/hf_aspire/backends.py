"""Attention of a step: planned once, run in every layer."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from . import noise
from .attention import scaling_of, split_heads
from .batch import MixedBatch
from .cache import AspireCache, LayerSpec
from .columns import RowColumns
from .config import AspireConfig
from .kernels import reference
from .noise import Draw
from .request import Row, RowKind
from .selection import ContextPolicy
from .side_streams import SideStreams


class Backend(Protocol):
    """What the runner needs of a set of kernels.

    Attributes:
        sides: Where kernels of a captured forward run that need not wait for each other.
    """

    sides: SideStreams

    def plan(self, batch: MixedBatch) -> None:
        """Prepares what all layers of the next forward share."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Stores the new keys and values `[T, Hkv, D or Dv]`, attends `[T, Hq, D]` -> `[T, Hq, Dv]`."""

    def scores(self, row: int) -> Tensor:
        """Scores `[lists or 1, scores]` of a scored row of the last forward, each of the policy's unit of tokens."""


@dataclass(frozen=True)
class BackendChoice:
    """Which kernels a call uses, and why."""

    name: str
    reason: str

    @property
    def draw(self) -> Draw:
        """How they draw tokens."""
        if self.name != "triton":
            return noise.gumbel_argmax
        from .kernels.gumbel import gumbel_argmax  # imports triton, which a CPU need not have

        return gumbel_argmax


def choose_backend(config: AspireConfig, layers: Sequence[LayerSpec]) -> BackendChoice:
    """The kernels for a model's layers; a GPU that has to go without its kernels is warned about.

    Raises:
        ValueError: `backend="triton"`, where it cannot run.
    """
    obstacle = _triton_obstacle(config, layers)
    if config.backend == "torch":
        return BackendChoice("torch", "backend='torch' asks for it")
    if obstacle is None:
        return BackendChoice("triton", "fused kernels for this GPU")
    if config.backend == "triton":
        raise ValueError(f"assistant='aspire': got backend='triton', but {obstacle}; expected 'auto' or 'torch'")
    if layers[0].device.type == "cuda":
        warnings.warn(f"hf_aspire runs its slower torch reference: {obstacle}", RuntimeWarning, stacklevel=2)
    return BackendChoice("torch", obstacle)


def _triton_obstacle(config: AspireConfig, layers: Sequence[LayerSpec]) -> str | None:
    """Why the Triton kernels cannot run, or None."""
    first = layers[0]
    sizes = {size for layer in layers for size in (layer.key_size, layer.value_size)}
    if first.device.type != "cuda":
        return f"the Triton kernels need a GPU, and the model is on {first.device.type!r}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA GPUs"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(first.device) < (8, 0):
        has = ".".join(map(str, torch.cuda.get_device_capability(first.device)))
        return f"the Triton kernels need a GPU of compute capability 8.0 or more, and this one's is {has}"
    if len({dataclasses.replace(layer, scaling=0.0) for layer in layers}) > 1:
        return "the model's layers differ in their heads, sizes, dtypes or devices"
    if first.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton kernels serve float32, bfloat16 and float16, not {first.dtype}"
    if config.page_size not in (16, 32, 64):
        return f"the Triton kernels serve pages of 16, 32 or 64 tokens, not {config.page_size}"
    if min(sizes) < 16 or max(sizes) > 256:
        return f"the Triton kernels serve head sizes from 16 to 256, not {sorted(sizes)}"
    if first.query_heads // first.kv_heads > 16:
        return f"the Triton kernels serve up to 16 query heads per KV head, not {first.query_heads // first.kv_heads}"
    return None


class TorchBackend:
    """The reference kernels: a CPU's real path, and the oracle of every other backend.

    Args:
        cache: Pools.
        policy: Which layers score what.
    """

    _EXPLICIT_QUERIES = 64  # a longer row (a prefill chunk) is split: only its last, scored queries take this path

    def __init__(self, cache: AspireCache, policy: ContextPolicy) -> None:
        self.sides = SideStreams()
        self._cache = cache
        self._policy = policy

    def plan(self, batch: MixedBatch) -> None:
        """Sorts the rows by the view that layers have of them, and makes room for scores."""
        self._batch = batch
        self._placed: dict[torch.device, tuple[Tensor, ...]] = {}
        numbered = list(zip(range(len(batch.rows)), batch.rows, batch.offsets, strict=True))
        self._full = [entry for entry in numbered if entry[1].kind is not RowKind.DRAFT]
        self._drafts = [entry for entry in numbered if entry[1].kind is RowKind.DRAFT]
        self._verifies = any(row.kind is RowKind.VERIFY for row in batch.rows)
        scored, self._wanted = RowColumns(batch.rows).scored, dict[int, range]()
        if scored:
            for index, (first, step, count) in zip(scored.rows.tolist(), scored.spans.tolist(), strict=True):
                self._wanted[index] = range(first, first + step * count, step)
        self._scores: dict[int, Tensor] = {}
        for index, row, _ in numbered:
            if row.scored:
                lists = 1 if row.kind is RowKind.DRAFT else self._policy.lists
                device = batch.token_ids.device
                count = self._policy.scores_of(row.context)
                self._scores[index] = torch.zeros(lists, count, dtype=torch.float32, device=device)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Backend`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        write_slots, draft_index, slots, lengths, first = self._on(key.device)
        lost = reference.spoiled(key, value, first)[:, None, None] if self._verifies else None
        if lost is not None:
            key, value = key.masked_fill(lost, 0), value.masked_fill(lost, 0)
        reference.store_kv(keys, values, write_slots, key, value)
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        full = list(self._full)
        if self._drafts and layer in self._policy.draft_layers:
            full += self._drafts
        elif self._drafts:
            listed = slots[layer if slots.shape[0] > 1 else 0]
            output[draft_index] = reference.sparse_attention(
                query[draft_index], keys, values, listed, lengths, scaling
            )
        for index, row, offset in full:
            queries = query[offset : offset + row.queries]
            output[offset : offset + row.queries] = self._full_row(layer, index, row, queries, scaling)
        return output if lost is None else output.masked_fill_(lost, torch.nan)

    def scores(self, row: int) -> Tensor:
        """See `Backend`."""
        return self._scores[row]

    def _full_row(self, layer: int, index: int, row: Row, query: Tensor, scaling: float) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        runs = row.request.context(row.context)
        draft = row.kind is RowKind.DRAFT
        scored = row.scored and layer in (self._policy.draft_layers if draft else self._policy.full_layers)
        wanted = self._wanted[index] if scored else range(0)
        # Scored queries, and rows over scattered pages, take the path that returns weights and copies nothing.
        first = (wanted[0] if wanted else 0) if row.queries > self._EXPLICIT_QUERIES else 0
        explicit = bool(wanted) or (len(runs) > 1 and row.queries <= self._EXPLICIT_QUERIES)
        if not explicit:
            return reference.full_attention(query, keys, values, runs, row.start, scaling)
        output, weights = reference.scored_attention(query[first:], keys, values, runs, row.start + first, scaling)
        if wanted:
            place = layer if self._scores[index].shape[0] > 1 else 0
            counted = weights[[q - first for q in wanted]]
            scores = reference.reduce_scores(counted, self._policy.unit)
            self._scores[index][place] = scores.to(self._scores[index].device)
        if first:
            seen = row.request.context(row.start + first)
            head = reference.full_attention(query[:first], keys, values, seen, row.start, scaling)
            output = torch.cat([head, output])
        return output

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The plan's index tensors on a layer's device (layers may be spread by a device map)."""
        if device not in self._placed:
            sparse = self._batch.sparse
            empty = self._batch.draft_index
            self._placed[device] = (
                self._batch.write_slots.to(device),
                self._batch.draft_index.to(device),
                (sparse.slots if sparse else empty).to(device),
                (sparse.lengths if sparse else empty).to(device),
                _first_tokens(self._batch).to(device),
            )
        return self._placed[device]


def _first_tokens(batch: MixedBatch) -> Tensor:
    """`[T]` int64: for the tokens of a verify row its first one, for all others the token itself."""
    first = np.arange(batch.tokens)
    for row, offset in zip(batch.rows, batch.offsets, strict=True):
        if row.kind is RowKind.VERIFY:
            first[offset : offset + row.queries] = offset
    return torch.from_numpy(first)


class BackendStep:
    """A backend as the step that travels through the model's forward."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> Tensor:
        """See `AttentionStep`. Compiled code calls it by an operator, since its work is opaque to the compiler."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        scaling = scaling_of(query, keywords)
        if torch.compiler.is_compiling():
            attended: Tensor = torch.ops.hf_aspire.attend(query, key, value, layer, scaling)
            return attended
        return self.attend_layer(layer, query, key, value, scaling)

    def attend_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionStep`."""
        heads = (split_heads(query), split_heads(key), split_heads(value))
        return self.backend.run(layer, *heads, scaling)[None]

    def mask(self, mask_function: Any) -> None:
        """Nothing: the probe has judged the model's masks."""
