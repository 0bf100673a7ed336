"""Sampling through `generate`: draws from plain's distribution, and what a text depends on."""

from __future__ import annotations

import random

import pytest
import torch
from distributions import SAMPLINGS, chi_square_p, count, total_variation
from kit import POLICIES, SCHEDULES, VOCABULARY, aspire, pick, ragged, small, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_aspire.testing import forced_drafts

PROMPT = 24
BATCH, CALLS = 250, 80


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=1)  # this file runs it on 50,000 texts


# ---- distribution


def marginals(model: LlamaForCausalLM, prompt: Tensor, positions: int) -> list[Tensor]:
    """Exact distributions of the first tokens of plain sampling with temperature 1.2, top-k 6 and a penalty of 1.1."""
    used = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.1), TemperatureLogitsWarper(1.2), TopKLogitsWarper(6)]
    )
    texts, weights, found = prompt, torch.ones(1, dtype=torch.float64), []
    for _ in range(positions):
        with torch.no_grad():
            logits = torch.cat([model(part, logits_to_keep=1).logits[:, -1] for part in texts.split(500)])
        joint = weights[:, None] * used(texts, logits.float()).double().softmax(-1)
        found.append(joint.sum(0))
        row, token = (joint > 0).nonzero(as_tuple=True)
        texts, weights = torch.cat([texts[row], token[:, None]], 1), joint[row, token]
    return found


def drawn(model: LlamaForCausalLM, sampling: str, calls: int, new: int, **fields: object) -> tuple[Tensor, float]:
    """New tokens `[calls, BATCH, new]` of rows with the same prompt, and the acceptance rate."""
    keywords = {"do_sample": True, "temperature": 1.2, "top_k": 6, "repetition_penalty": 1.1}
    texts, accepted, drafted = [], 0, 0
    for seed in range(calls):
        config = small(schedule="fixed", min_pages=4, sampling=sampling, seed=seed, **fields)
        output = aspire(model, ragged([PROMPT]), config, max_new_tokens=new, num_return_sequences=BATCH, **keywords)
        texts.append(output.sequences[:, PROMPT:])
        accepted += sum(output.stats.accepted)
        drafted += sum(output.stats.drafted)
    return torch.stack(texts), accepted / drafted


@pytest.fixture(scope="module", params=SAMPLINGS)
def twenty_thousand(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> tuple[Tensor, float]:
    return drawn(model, request.param, CALLS, 5)


@pytest.mark.slow
def test_generate_draws_from_plains_processed_distribution(
    model: LlamaForCausalLM, twenty_thousand: tuple[Tensor, float]
) -> None:
    texts, rate = twenty_thousand
    assert 0.15 < rate < 0.95  # rounds of every fate
    tokens = texts.flatten(0, 1)
    for position, expected in enumerate(marginals(model, ragged([PROMPT])["input_ids"], 4)):
        assert total_variation(count(tokens[:, position]), expected) < 0.03
        assert chi_square_p(count(tokens[:, position]), expected) > 0.001


@pytest.mark.slow
def test_rows_with_the_same_prompt_are_independent(
    model: LlamaForCausalLM, twenty_thousand: tuple[Tensor, float]
) -> None:
    """Two independent draws from p agree with probability sum(p^2): neighbours in a batch, and rows of two seeds."""
    texts, _ = twenty_thousand
    for position, p in enumerate(marginals(model, ragged([PROMPT])["input_ids"], 4)):
        agree = float((p**2).sum())
        tokens = texts[:, :, position]
        for one, other in ((tokens[:, :-1:2], tokens[:, 1::2]), (tokens[:-1:2], tokens[1::2])):
            share, pairs = float((one == other).double().mean()), one.numel()
            assert abs(share - agree) < 3.3 * (agree * (1 - agree) / pairs) ** 0.5  # fails one time in a thousand


def test_rejection_stays_exact_when_drafts_are_forced(model: LlamaForCausalLM) -> None:
    expected = marginals(model, ragged([PROMPT])["input_ids"], 3)
    likely = [int(p.argmax()) for p in expected]
    with forced_drafts(lambda row, position, token: likely[position] if position < 3 and row % 3 else row % 48):
        texts, rate = drawn(model, "rejection", 12, 4)
    assert 0.02 < rate < 0.4
    for position in (1, 2):
        assert chi_square_p(count(texts[:, :, position].flatten()), expected[position]) > 0.001


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_full_context_drafts_are_accepted_when_sampling(model: LlamaForCausalLM, sampling: str) -> None:
    config = small(sampling=sampling, sparsity=1.0, schedule="staggered", seed=0)
    for keywords in ({}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}):
        stats = aspire(model, ragged((1, 30, 60)), config, do_sample=True, max_new_tokens=40, **keywords).stats
        assert stats.accepted == stats.drafted and min(stats.drafted) > 20


# ---- what a text depends on


def sampled(model: LlamaForCausalLM, batch: dict[str, Tensor], **fields: object) -> Tensor:
    """New tokens of coupled sampling."""
    output = aspire(model, batch, small(**({"seed": 7} | fields)), do_sample=True, max_new_tokens=14)
    return output.sequences[:, batch["input_ids"].shape[1] :]


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_coupled_text_depends_on_neither_schedule_nor_context_policy(
    model: LlamaForCausalLM, schedule: str, context: str
) -> None:
    batch = pick(ragged((50, 20, 35)), [0, 1, 0, 2])
    reference = sampled(model, batch, schedule="autoregressive")
    assert torch.equal(sampled(model, batch, schedule=schedule, context=context), reference)
    chance = random.Random(0)
    with forced_drafts(lambda row, position, token: chance.choice([token, chance.randrange(VOCABULARY)])):
        assert torch.equal(sampled(model, batch, schedule=schedule, context=context), reference)
    assert torch.equal(sampled(model, batch, schedule=schedule, context=context, max_draft=1, page_size=16), reference)


def test_coupled_text_depends_on_neither_batch_nor_order(model: LlamaForCausalLM) -> None:
    batch = ragged((50, 20, 35))
    together = sampled(model, batch)
    order = [2, 0, 1]
    assert torch.equal(sampled(model, pick(batch, order)), together[order])
    for row, length in enumerate((50, 20, 35)):
        alone = {"input_ids": batch["input_ids"][row : row + 1, 50 - length :]}
        assert torch.equal(sampled(model, alone)[0], together[row])
    assert torch.equal(sampled(model, pick(batch, [0, 1])), together[:2])


def test_coupled_rows_of_one_prompt_are_told_apart_by_their_occurrence(model: LlamaForCausalLM) -> None:
    batch = ragged((50, 20))
    first = sampled(model, pick(batch, [0, 0, 1, 0]))
    assert len({tuple(row) for row in first[[0, 1, 3]].tolist()}) == 3
    second = sampled(model, pick(batch, [1, 0, 0, 0, 1]))
    assert torch.equal(second[[1, 2, 3, 0]], first[[0, 1, 3, 2]])


# ---- seeds


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_manual_seed_reproduces_a_call(model: LlamaForCausalLM, sampling: str) -> None:
    def call(seed: int, **fields: object) -> Tensor:
        torch.manual_seed(seed)
        config = small(sampling=sampling, **fields)
        return aspire(model, ragged((50, 20)), config, do_sample=True, max_new_tokens=14).sequences

    first = call(1)
    follow_up = aspire(model, ragged((50, 20)), small(sampling=sampling), do_sample=True, max_new_tokens=14).sequences
    assert torch.equal(call(1), first)
    assert not torch.equal(call(2), first)
    assert not torch.equal(follow_up, first)  # a call moves the generator on


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_configured_seed_is_independent_of_the_global_generator(model: LlamaForCausalLM, sampling: str) -> None:
    def call(seed: int) -> Tensor:
        config = small(sampling=sampling, seed=seed)
        return aspire(model, ragged((50, 20)), config, do_sample=True, max_new_tokens=14).sequences

    torch.manual_seed(1)
    first, state = call(5), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn from it
    torch.manual_seed(2)
    assert torch.equal(call(5), first)
    assert not torch.equal(call(6), first)


def test_greedy_calls_leave_the_global_generator_alone(model: LlamaForCausalLM) -> None:
    state = torch.get_rng_state()
    aspire(model, ragged((50, 20)), small(), max_new_tokens=6)
    assert torch.equal(torch.get_rng_state(), state)
