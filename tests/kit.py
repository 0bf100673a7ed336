"""What the test files share: a tiny model, ragged batches, plain `generate`, and configurations that really draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_aspire
from hf_aspire import AspireConfig, AspireStats
from hf_aspire.request import RowKind
from hf_aspire.scheduler import Candidate

VOCABULARY = 48
PAD = 0
MEMORY_BOUND = (1e-3, 0.0, 1e-3)
"""A cost at which reading keys and values is all that counts, so that schedule `aspire` drafts."""
POLICIES = ("refresh", "verify", "hybrid", "window")
SCHEDULES = ("aspire", "fsm", "fixed", "staggered", "autoregressive")

Batch = dict[str, Tensor]
DraftFunction = Callable[[int, int, int], int]


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """A random model with varied, tie-free greedy text, in float64: rounding then flips no token."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "bos_token_id": 1,
    }
    generator = torch.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).double().eval()
    torch.set_rng_state(generator)
    return model


def ragged(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Left-padded random prompts of these lengths."""
    width = max(lengths)
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (len(lengths), width), generator=random)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.where(mask.bool(), torch.tensor(PAD)), "attention_mask": mask}


def pick(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a batch, in this order; a row may come several times."""
    return {name: tensor[list(rows)] for name, tensor in batch.items()}


def small(**fields: Any) -> AspireConfig:
    """A configuration with a budget far below the tests' contexts, and whose schedule does not read the clock."""
    settings: dict[str, Any] = {
        "page_size": 4,
        "min_pages": 2,
        "recent_pages": 1,
        "max_draft": 4,
        "draft_length": 3,
        "cost": MEMORY_BOUND,
    }
    return AspireConfig(**(settings | fields))


def plain(model: PreTrainedModel, batch: Batch, **keywords: Any) -> Tensor:
    """Sequences of plain `generate`, greedy unless told otherwise."""
    return model.generate(**batch, **({"do_sample": False} | keywords))


@dataclass(frozen=True)
class Result:
    """What a call returned, and its statistics."""

    sequences: Tensor
    stats: AspireStats
    output: Any


def aspire(model: PreTrainedModel, batch: Batch, config: AspireConfig, **keywords: Any) -> Result:
    """Result of `hf_aspire.generate`, greedy unless told otherwise."""
    seen: list[AspireStats] = []
    config = replace(config, on_stats=seen.append)
    output = hf_aspire.generate(model, **batch, aspire_config=config, **({"do_sample": False} | keywords))
    return Result(output if isinstance(output, Tensor) else output.sequences, seen[0], output)


def right_drafts(sequences: Tensor, width: int) -> DraftFunction:
    """Drafts that are `sequences`' own tokens behind a prompt of `width` columns: all of them are accepted."""
    new = sequences[:, width:].tolist()
    return lambda row, position, token: new[row][position] if position < len(new[row]) else token


def wrong_drafts(sequences: Tensor, width: int) -> DraftFunction:
    """Drafts that are never `sequences`' own tokens: none of them is accepted."""
    right = right_drafts(sequences, width)
    return lambda row, position, token: (right(row, position, token) + 1) % VOCABULARY


def mixed_drafts(sequences: Tensor, width: int, share: float) -> DraftFunction:
    """Drafts that are right with this probability, from a fixed seed, and wrong otherwise."""
    chance = random.Random(0)
    right, wrong = right_drafts(sequences, width), wrong_drafts(sequences, width)
    return lambda *draft: (right if chance.random() < share else wrong)(*draft)


class Scripted:
    """A schedule with a draft length per row.

    Args:
        lengths: Drafts per round of each row; 0 decodes plainly.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def decide(self, candidates: Sequence[Candidate]) -> list[RowKind | None]:
        kinds: list[RowKind | None] = []
        for row in candidates:
            drafts = row.drafted < min(self.lengths[row.request], row.limit)
            kinds.append(RowKind.DRAFT if drafts else RowKind.VERIFY if row.drafted else RowKind.DECODE)
        return kinds

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        pass
