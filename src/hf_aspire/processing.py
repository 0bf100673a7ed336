"""Logits processors on packed positions: every row's scores as plain `generate` would have processed them.

Plain processes one column of the padded batch at a time. Here a step holds several columns, and rows at different
ones. Warpers look at the scores alone and run once for all positions; processors that look at the text run once per
column, on the rows that stand there, each with its own padded prefix (drafts included).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

# Functions of the scores alone that wait for nothing on a GPU, so that they can be captured.
_CAPTURED = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
)
# All functions of the scores alone.
_WARPERS = (
    *_CAPTURED,
    stock.EtaLogitsWarper,
    stock.SuppressTokensLogitsProcessor,
    *([stock.TopHLogitsWarper] if hasattr(stock, "TopHLogitsWarper") else []),
)
# Pure functions of a row's own text and scores.
_READERS = (
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.ForcedBOSTokenLogitsProcessor,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.ExponentialDecayLengthPenalty,
    stock.SuppressTokensAtBeginLogitsProcessor,
)
# Pure functions of the row's index too: they keep every row's prompt.
_BATCH_READERS = (stock.EncoderRepetitionPenaltyLogitsProcessor, stock.EncoderNoRepeatNGramLogitsProcessor)


def pure_processors(processors: Sequence[Any]) -> list[Any]:
    """The stock processors without state among them; a subclass counts as user code."""
    return [p for p in processors if type(p) in _WARPERS + _READERS + _BATCH_READERS]


class Processing:
    """The processors of a call.

    Args:
        processors: Stock, pure ones, in plain's order.
        history: `[B, columns]` int64: padded prompts, committed tokens, drafts.
        prompt_width: Columns of the padded prompt.
    """

    def __init__(self, processors: Sequence[Any], history: Tensor, prompt_width: int) -> None:
        self._processors = list(processors)
        self._history = history
        self._width = prompt_width

    def __call__(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Processes K positions at once.

        Args:
            logits: `[K, V]`, any float type.
            rows: Request slots, K of them.
            positions: Index of the token to choose among its row's generated tokens, K of them.

        Returns:
            `[K, V]` float32, as plain's.
        """
        scores = logits.to(torch.float32)
        for processor in self._processors:
            if type(processor) in _WARPERS:
                scores = processor(self._history[:1, : self._width], scores)
            else:
                scores = self._by_column(processor, scores, rows, positions)
        return scores

    def __len__(self) -> int:
        return len(self._processors)

    @property
    def warps_only(self) -> bool:
        """Whether all processors are functions of the scores alone."""
        return all(type(processor) in _WARPERS for processor in self._processors)

    @property
    def key(self) -> tuple[Hashable, ...] | None:
        """What they do, if it can be captured: the same for processors that do the same. None: it cannot."""
        settings = [tuple(sorted(vars(processor).items())) for processor in self._processors]
        plain = all(isinstance(value, int | float | None) for pairs in settings for _, value in pairs)
        if not plain or not all(type(processor) in _CAPTURED for processor in self._processors):
            return None
        return tuple(zip(map(type, self._processors), settings, strict=True))

    def warp(self, logits: Tensor) -> Tensor:
        """The scores `[K, V]` float32 of logits, whoever's they are; for processors that are `warps_only`."""
        return self(logits, [], [])

    def _by_column(self, processor: Any, scores: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        members: dict[int, list[int]] = {}
        for k, position in enumerate(positions):
            members.setdefault(position, []).append(k)
        apply = self._on_batch if _knows_rows(processor) else self._on_rows
        if len(members) == 1:
            return apply(processor, scores, rows, positions[0])
        result = torch.empty_like(scores)
        for position, chosen in members.items():
            first, last = chosen[0], chosen[-1] + 1
            place = slice(first, last) if last - first == len(chosen) else chosen  # a view where it can be one
            result[place] = apply(processor, scores[place], [rows[k] for k in chosen], position)
        return result

    def _on_rows(self, processor: Any, scores: Tensor, rows: Sequence[int], position: int) -> Tensor:
        """Scores `[n, V]` of rows at one column, by a processor to which a row is its text and its scores."""
        return processor(self._history[list(rows), : self._width + position], scores)

    def _on_batch(self, processor: Any, scores: Tensor, rows: Sequence[int], position: int) -> Tensor:
        """The same by a processor that tells rows apart by their index in the batch.

        Rows that are not at this column take part with zeros: the processor is pure, so they change nothing.
        """
        batch = scores.new_zeros(self._history.shape[0], scores.shape[1])
        batch[list(rows)] = scores
        return processor(self._history[:, : self._width + position], batch)[list(rows)]


def _knows_rows(processor: Any) -> bool:
    """Whether a reader keeps something for every row of the batch."""
    return type(processor) in _BATCH_READERS or isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
