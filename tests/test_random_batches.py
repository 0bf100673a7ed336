"""Greedy text of random ragged batches is plain's, whatever was drafted, scheduled or out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    DRAFTING,
    MEMORY_BOUND,
    POLICIES,
    SCHEDULES,
    TOKEN_BYTES,
    VOCABULARY,
    Batch,
    DraftFunction,
    aspire,
    check_counts,
    mixed_drafts,
    pick,
    plain,
    ragged,
)
from transformers import LlamaForCausalLM

from hf_aspire import AspireConfig
from hf_aspire.planner import pages_for
from hf_aspire.testing import forced_drafts


@dataclass(frozen=True)
class Case:
    """One random call."""

    batch: Batch
    config: AspireConfig
    new: int
    ends: list[int]
    keeps: bool  # whether the output is dict-like and keeps the cache: ended rows then stay, and are fed pads
    right: float | None  # share of drafts that are replaced by plain's token; the others are wrong. None: no forcing

    def drafts(self, expected: torch.Tensor) -> DraftFunction:
        if self.right is None:
            return lambda row, position, token: token
        return mixed_drafts(expected, self.batch["input_ids"].shape[1], self.right)


@st.composite
def configs(draw: st.DrawFn) -> AspireConfig:
    page_size = draw(st.sampled_from([4, 16]))
    min_pages = draw(st.integers(1, 2))
    return AspireConfig(
        page_size=page_size,
        min_pages=min_pages,
        recent_pages=draw(st.integers(1, min_pages)),
        sparsity=draw(st.sampled_from([0.01, 0.07, 0.5, 1.0])),
        context=draw(st.sampled_from(POLICIES)),
        granularity=draw(st.integers(1, page_size)),
        refresh_layer=draw(st.integers(-3, 2)),
        schedule=draw(st.sampled_from((*SCHEDULES, *DRAFTING, *DRAFTING))),
        draft_length=draw(st.integers(1, 6)),
        max_draft=draw(st.integers(1, 6)),
        initial_draft=draw(st.integers(1, 3)),
        cost=draw(st.just(MEMORY_BOUND) | st.tuples(st.floats(0, 1), st.floats(0, 0.1), st.floats(1e-6, 1))),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=8))
    batch = ragged(lengths, seed=draw(st.integers(0, 2**16)))
    if draw(st.booleans()):  # rows with the same prompt share its pages
        batch = pick(batch, [draw(st.integers(0, len(lengths) - 1)) for _ in lengths])
    config = draw(configs())
    new = 21 - draw(st.integers(1, 20))  # small draws are the likelier ones, and short texts draft nothing
    keeps = draw(st.booleans())
    if not keeps and draw(st.booleans()):  # rows wait for pages
        largest = max(pages_for(int(mask.sum()), new, config.page_size) for mask in batch["attention_mask"])
        pages = largest + draw(st.integers(0, largest))
        config = AspireConfig(**(vars(config) | {"kv_memory": pages * config.page_size * TOKEN_BYTES}))
    ends = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
    return Case(batch, config, new, ends, keeps, draw(st.sampled_from([None, 0.0, 0.6, 0.9, 1.0])))


@pytest.mark.slow
@settings(max_examples=max(300, settings.default.max_examples))
@given(case=cases())
def test_random_ragged_batches_give_plains_tokens(model: LlamaForCausalLM, case: Case) -> None:
    keywords: dict[str, Any] = {"max_new_tokens": case.new, "eos_token_id": case.ends or None, "pad_token_id": 0}
    expected = plain(model, case.batch, **keywords)
    with forced_drafts(case.drafts(expected)):
        output = aspire(model, case.batch, case.config, return_dict_in_generate=case.keeps, **keywords)
    assert torch.equal(output.sequences, expected)
    check_counts(output, case.batch["input_ids"].shape[1], case.ends)
