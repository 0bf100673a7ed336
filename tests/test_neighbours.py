"""Who else is in the batch changes no row's greedy text, and what rows share: prompts and steps."""

from __future__ import annotations

import random

import pytest
import torch
from kit import DRAFTING, POLICIES, VOCABULARY, aspire, mixed_drafts, pick, plain, ragged, small, verified
from transformers import LlamaForCausalLM

from hf_aspire.request import RowKind
from hf_aspire.testing import forced_drafts

LENGTHS = (1, 2, 15, 200)


# ---- who else is in the batch


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("schedule", DRAFTING)
def test_permuting_the_batch_permutes_the_output(model: LlamaForCausalLM, context: str, schedule: str) -> None:
    batch, order = ragged((1, 2, 15, 80, 40)), [3, 0, 4, 2, 1]
    config = small(schedule=schedule, context=context)
    output = aspire(model, batch, config, max_new_tokens=12)
    permuted = aspire(model, pick(batch, order), config, max_new_tokens=12)
    assert torch.equal(permuted.sequences, output.sequences[order])


@pytest.mark.parametrize("context", POLICIES)
def test_a_garbage_row_changes_nothing_for_its_neighbours(model: LlamaForCausalLM, context: str) -> None:
    batch, width, new = ragged((40, 70, 25)), 70, 14
    expected = plain(model, batch, max_new_tokens=new)
    other = {name: tensor.clone() for name, tensor in batch.items()}
    other["input_ids"][1] = ragged((70,), seed=9)["input_ids"][0]
    garbage = random.Random(0)
    with forced_drafts(lambda row, position, token: garbage.randrange(VOCABULARY) if row == 1 else token):
        output = aspire(model, other, small(context=context), max_new_tokens=new)
    assert torch.equal(output.sequences[[0, 2]], expected[[0, 2]])
    assert torch.equal(output.sequences, plain(model, other, max_new_tokens=new))
    assert not torch.equal(output.sequences[1, width:], expected[1, width:])


@pytest.mark.parametrize("context", POLICIES)
def test_a_row_of_a_batch_says_what_it_says_alone(model: LlamaForCausalLM, context: str) -> None:
    batch, width = ragged(LENGTHS), max(LENGTHS)
    together = aspire(model, batch, small(context=context), max_new_tokens=12).sequences
    for row, length in enumerate(LENGTHS):
        alone = {"input_ids": batch["input_ids"][row : row + 1, width - length :]}
        output = aspire(model, alone, small(context=context), max_new_tokens=12)
        assert torch.equal(output.sequences[0, length:], together[row, width:])


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("length", [40, 41, 43])  # the first fills its last page, the others do not
def test_rows_with_the_same_prompt_share_its_prefill(model: LlamaForCausalLM, context: str, length: int) -> None:
    batch = pick(ragged((length, 30)), [0, 1, 0, 0])
    text = plain(model, batch, max_new_tokens=12)
    with forced_drafts(mixed_drafts(text, length, 0.8)):  # so that rows of one prompt go apart
        output = aspire(model, batch, small(context=context), max_new_tokens=12)
    assert torch.equal(output.sequences, text)
    prompts = [row for step in output.stats.timeline for row in step.rows if row.kind is RowKind.PREFILL]
    assert sum(row.queries for row in prompts) == length + 30


# ---- what shares a step


def test_a_step_holds_drafts_and_verifications_at_once(model: LlamaForCausalLM) -> None:
    stats = aspire(model, ragged(LENGTHS), small(schedule="staggered"), max_new_tokens=16).stats
    kinds = [{row.kind for row in step.rows} for step in stats.timeline]
    assert stats.mixed_steps == sum({RowKind.DRAFT, RowKind.VERIFY} <= step for step in kinds) > 0


@pytest.mark.parametrize("schedule", ["aspire", "fsm"])
def test_a_step_verifies_drafts_of_different_lengths(model: LlamaForCausalLM, schedule: str) -> None:
    batch, new = ragged((30, 50, 70, 90, 110, 130)), 40
    text = plain(model, batch, max_new_tokens=new)
    with forced_drafts(mixed_drafts(text, 130, 0.7)):
        output = aspire(model, batch, small(schedule=schedule, max_draft=8), max_new_tokens=new)
    assert torch.equal(output.sequences, text)
    assert any(len(set(lengths)) > 1 for lengths in verified(output.stats))
    assert output.stats.mixed_steps > 0
