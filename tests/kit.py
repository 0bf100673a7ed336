"""What the test files share: a tiny model, ragged batches, plain `generate`, and configurations that really draft."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_aspire
from hf_aspire import AspireConfig, AspireOutput, AspireStats
from hf_aspire.request import RowKind
from hf_aspire.scheduler import Candidate

VOCABULARY = 48
PAD = 0
MEMORY_BOUND = (1e-3, 0.0, 1e-3)
"""A cost at which reading keys and values is all that counts, so that schedule `aspire` drafts."""
POLICIES = ("refresh", "verify", "hybrid", "window")
SCHEDULES = ("aspire", "fsm", "fixed", "staggered", "autoregressive")
DRAFTING = tuple(name for name in SCHEDULES if name != "autoregressive")
TOKEN_BYTES = 3 * 2 * 2 * 16 * 8  # of the tiny model: layers, key and value, heads, size, float64
LENGTHS, NEW = (1, 2, 9, 30), 12
"""Lengths of prompts, and new tokens, of the fixtures `batch` and `text` in files that set none of their own."""
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}

Batch = dict[str, Tensor]
DraftFunction = Callable[[int, int, int], int]


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """A file of `benchmarks/` as a module, which finds the files beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
        yield importlib.import_module(name)


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


def aspire_output(
    model: PreTrainedModel, batch: Batch, config: AspireConfig | None = None, **keywords: Any
) -> AspireOutput:
    """Dict-like output of `hf_aspire.generate`, greedy unless told otherwise; without a configuration, its own."""
    keywords = {"do_sample": False, "return_dict_in_generate": True} | keywords
    return hf_aspire.generate(model, **batch, aspire_config=config, **keywords)


# ---- what a call did


class Recorder:
    """An `on_stats` that keeps what it got."""

    def __init__(self) -> None:
        self.stats: list[AspireStats] = []

    def __call__(self, stats: AspireStats) -> None:
        self.stats.append(stats)

    def config(self, **fields: Any) -> AspireConfig:
        return small(on_stats=self, **fields)


@contextmanager
def forwards(model: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the token ids of every forward of the model."""
    seen: list[tuple[int, ...]] = []

    def note(module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        seen.append(tuple((args[0] if args else keywords["input_ids"]).shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def state(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a call may touch, and must put back."""
    return (
        model.config._attn_implementation,
        copy.deepcopy(model.config.to_dict()),
        copy.deepcopy(model.generation_config.to_dict()),
        GenerationMixin.__dict__["generate"],
        GenerationMixin.__dict__["_sample"],
    )


def verified(stats: AspireStats) -> list[list[int]]:
    """Draft lengths that were verified in each step."""
    return [[row.queries - 1 for row in step.rows if row.kind is RowKind.VERIFY] for step in stats.timeline]


def new_tokens(stats: AspireStats, row: int) -> int:
    """Tokens that a row's rounds account for if no stop cut any."""
    return 1 + sum(accepted + 1 for _, accepted in stats.rounds[row])


def check_counts(output: Result, width: int, ends: Sequence[int]) -> None:
    """committed[i] == 1 + sum(accepted + 1), less the one token that a stop inside the accepted drafts cut off."""
    stats = output.stats
    for row, tokens in enumerate(output.sequences[:, width:].tolist()):
        stop = next((place for place, token in enumerate(tokens) if token in ends), None)
        assert stats.committed[row] == (len(tokens) if stop is None else stop + 1)
        cut = new_tokens(stats, row) - stats.committed[row]
        assert cut == 0 or (cut == 1 and stop is not None and stats.rounds[row][-1][1] > 0)
        assert stats.drafted[row] == sum(drafted for drafted, _ in stats.rounds[row])
        assert stats.accepted[row] == sum(accepted for _, accepted in stats.rounds[row])


# ---- what a call is made to do


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


class Failure(LogitsProcessor):
    """A processor that raises after a number of calls."""

    def __init__(self, calls: int, error: BaseException) -> None:
        self.left = calls
        self.error = error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


# ---- tokenizers


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one word per token, w0 to w47."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one letter per token."""
    words = Tokenizer(models.WordLevel({letter(token): token for token in range(VOCABULARY)}, unk_token=letter(0)))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=letter(0))


def letter(token: int) -> str:
    return chr(ord("a") + token)
