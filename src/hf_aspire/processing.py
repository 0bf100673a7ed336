"""Logits processors on packed positions: every row's scores as plain `generate` would have processed them.

Plain processes one column of the padded batch at a time. Here a step holds several columns, and rows at different
ones. Warpers look at the scores alone and run once for all positions; processors that look at the text run once per
column, on the whole padded batch as plain shows it, with every row's own prefix (drafts included).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

# Functions of the scores alone.
_WARPERS = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
    stock.SuppressTokensLogitsProcessor,
    *([stock.TopHLogitsWarper] if hasattr(stock, "TopHLogitsWarper") else []),
)
# Pure functions of a row's own text and scores, and of the row's index.
_READERS = (
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.ForcedBOSTokenLogitsProcessor,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.ExponentialDecayLengthPenalty,
    stock.SuppressTokensAtBeginLogitsProcessor,
)


def pure_processors(processors: Sequence[Any]) -> list[Any]:
    """The stock processors without state among them; a subclass counts as user code."""
    return [p for p in processors if type(p) in _WARPERS + _READERS]


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

    def _by_column(self, processor: Any, scores: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        everybody = list(range(self._history.shape[0]))
        if list(rows) == everybody and len(set(positions)) == 1:  # plain decoding in step: the batch as it is
            return processor(self._history[:, : self._width + positions[0]], scores)
        result = torch.empty_like(scores)
        for position in sorted(set(positions)):
            members = [k for k, p in enumerate(positions) if p == position]
            present = [rows[k] for k in members]
            # Rows that are not at this column take part with zeros: the processor is pure, so they change nothing.
            batch = scores.new_zeros(len(everybody), scores.shape[1])
            batch[present] = scores[members]
            result[members] = processor(self._history[:, : self._width + position], batch)[present]
        return result
