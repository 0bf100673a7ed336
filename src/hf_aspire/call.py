"""One prepared call of `generate`: what Transformers hands to a decoding loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .arguments import refuse
from .compat import GenerationConfig, PreTrainedModel
from .config import AspireConfig
from .processing import pure_processors


@dataclass(frozen=True)
class Call:
    """A prepared call.

    Attributes:
        model: The model.
        input_ids: `[B, W]` padded prompts, already expanded by `num_return_sequences`.
        processors: Logits processors, in plain's order.
        criteria: Stopping criteria.
        generation_config: Prepared: with special tokens as tensors.
        streamer: Streamer or None.
        model_keywords: Mask, positions and so on.
        config: Ours.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: Any
    criteria: Any
    generation_config: GenerationConfig
    streamer: Any
    model_keywords: dict[str, Any]
    config: AspireConfig

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self.generation_config.do_sample)

    @property
    def limit(self) -> int:
        """Most new tokens per row.

        Raises:
            ValueError: There is no limit, or no room.
        """
        longest = min((c.max_length for c in self.criteria if isinstance(c, MaxLengthCriteria)), default=None)
        if longest is None:
            raise refuse("got no length limit, expected max_new_tokens or max_length")
        if longest <= self.input_ids.shape[1]:
            raise refuse(f"got room for {longest - self.input_ids.shape[1]} new tokens, expected at least 1")
        return int(longest) - self.input_ids.shape[1]

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a row."""
        ids = [c.eos_token_id.flatten().tolist() for c in self.criteria if isinstance(c, EosTokenCriteria)]
        return frozenset(token for group in ids for token in group)

    @property
    def pad_token(self) -> int | None:
        """Token behind the end of a row, or None."""
        pad = self.generation_config._pad_token_tensor
        return None if pad is None else int(pad)

    @property
    def column_by_column(self) -> bool:
        """Whether user code, or a stop that is not a token or a length, looks at the batch after every column."""
        own_pace = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in self.criteria)
        return not own_pace or len(pure_processors(self.processors)) < len(self.processors)

    def wants(self, name: str) -> bool:
        """Whether an optional output is asked for; plain returns them in its dict-like output only."""
        return bool(self.generation_config.return_dict_in_generate and getattr(self.generation_config, name))
