"""The batched sampler, alone: its texts are draws from the processed target, in every way of deciding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from distributions import SAMPLINGS, chi_square_p, count, keys_of, total_variation
from kit import VOCABULARY
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_aspire.noise import Draws
from hf_aspire.sampler import Sampler
from hf_aspire.sampling import ArgmaxSampler, RejectionSampler, make_sampler

DRAWS = 200_000
CHUNK = 10_000
PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top k": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(8)],
    "top p": [TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.8)],
}


# ---- which sampler, and greedy


def test_the_sampler_follows_the_call() -> None:
    device = torch.device("cpu")
    assert isinstance(make_sampler(False, "rejection", 1, 1, 4, device), ArgmaxSampler)
    assert isinstance(make_sampler(True, "coupled", 1, 1, 4, device), ArgmaxSampler)
    assert isinstance(make_sampler(True, "rejection", 1, 1, 4, device), RejectionSampler)


def test_greedy_takes_plains_argmax_where_scores_are_equal_or_strange() -> None:
    """The first of equals, also of equally low ones; a NaN counts as the highest, and is told."""
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[1.0, 3, 3, 2], [-inf] * 4, [0, nan, inf, nan], [0, inf, 2, inf], [-0.0, 0.0, 0, -1]])
    scores = torch.cat([scores, torch.randint(0, 9, (95, 4), generator=torch.Generator().manual_seed(0)).float()])
    draws = Draws(*torch.zeros(3, 100, dtype=torch.int64))
    outcome = ArgmaxSampler(sample=False).verify(
        scores, draws, torch.zeros(100, 0, dtype=torch.int64), torch.ones(100, dtype=torch.int64), torch.arange(100)
    )
    assert torch.equal(outcome.tokens[:, 0], scores.argmax(-1))
    torch.testing.assert_close(outcome.best, scores.amax(-1), equal_nan=True)
    assert outcome.best[2].isnan()


# ---- sampled texts


def scores_by_token(seed: int, processors: list[Callable[[Tensor, Tensor], Tensor]]) -> tuple[Tensor, Tensor]:
    """Processed scores of a target and of a draft that resembles it, `[last token, V]` each."""
    generator = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    draft = target + 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    used, ids = LogitsProcessorList(processors), torch.zeros(VOCABULARY, 1, dtype=torch.int64)
    return used(ids, target), used(ids, draft)


def speculate(
    sampler: Sampler, target: Tensor, draft: Tensor, keys: Tensor, length: int, forced: Tensor | None = None
) -> tuple[Tensor, float]:
    """Rows whose next scores depend on their last token, in rounds of one to three drafts, until all are long enough.

    Returns:
        The texts `[rows, 1 + length]`, all starting with token 0, and the share of drafts that was accepted.
    """
    rows = len(keys)
    depths = torch.tensor([3, 3, 2, 1])[torch.arange(rows) % 4]
    text = torch.zeros(rows, 1 + length + 4, dtype=torch.int64)
    done, rounds = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    drafted = accepted = 0
    while bool((done < length).any()):
        slots = (done < length).nonzero()[:, 0]
        here = Draws(keys[slots], done[slots], rounds[slots])
        depth, block = depths[slots], text[slots, done[slots]][:, None]
        for d in range(int(depth.max())):
            drafting = depth > d
            draws = replace(here, positions=here.positions + d).pick(drafting)
            at_depth = torch.full((len(draws.keys),), d)
            token = torch.full((len(slots),), -1)
            token[drafting] = sampler.draft(draft[block[drafting, -1]], draws, slots[drafting], at_depth)
            if forced is not None:
                assert isinstance(sampler, RejectionSampler)
                token[drafting] = forced[slots[drafting]]
                for slot, kept in zip(slots[drafting].tolist(), token[drafting].tolist(), strict=True):
                    sampler.replace(slot, d, kept)
            block = torch.cat([block, token[:, None]], 1)
        packed = (torch.arange(4) <= depth[:, None]).nonzero()
        row, place = packed[:, 0], packed[:, 1]
        draws = Draws(here.keys[row], here.positions[row] + place, here.rounds[row])
        outcome = sampler.verify(target[block[row, place]], draws, block[:, 1:], depth + 1, slots)
        for p in range(block.shape[1]):
            kept = outcome.accepted >= p
            text[slots[kept], done[slots[kept]] + 1 + p] = outcome.tokens[kept, p]
        drafted, accepted = drafted + int(depth.sum()), accepted + int(outcome.accepted.sum())
        done[slots] += outcome.accepted + 1
        rounds[slots] += 1
    return text[:, : 1 + length], accepted / drafted


def speculate_by_column(
    sampler: Sampler, target: Tensor, draft: Tensor, keys: Tensor, length: int
) -> tuple[Tensor, float]:
    """As `speculate`, deciding one position of all rows at a time with `step`."""
    rows = len(keys)
    slots = torch.arange(rows)
    depth = torch.tensor([3, 3, 2, 1])[slots % 4]
    text = torch.zeros(rows, 1 + length, dtype=torch.int64)
    rounds = torch.full((rows,), -1)
    block = torch.full((rows, 4), -1)
    taken = depth + 1
    drafted = accepted = 0
    for column in range(length):
        fresh = taken > depth
        taken = taken.where(~fresh, torch.tensor(0))
        rounds += fresh
        block[fresh, 0] = text[fresh, column]
        for d in range(3):
            drafting = slots[fresh & (depth > d)]
            draws = Draws(keys[drafting], torch.full_like(drafting, column + d), rounds[drafting])
            token = sampler.draft(draft[block[drafting, d]], draws, drafting, torch.full_like(drafting, d))
            block[drafting, d + 1] = token
        open_drafts = taken < depth
        judged = torch.where(open_drafts, block[slots, (taken + 1).clamp(max=3)], -1)
        draws = Draws(keys, torch.full((rows,), column), rounds)
        token = sampler.step(target[text[:, column]], draws, judged, taken)
        text[:, column + 1] = token
        kept = token == judged
        drafted, accepted = drafted + int(open_drafts.sum()), accepted + int(kept.sum())
        taken = torch.where(kept, taken + 1, depth + 1)
    return text, accepted / drafted


def sampler_of(sampling: str, rows: int, size: int = VOCABULARY) -> Sampler:
    return make_sampler(True, sampling, rows, 3, size, torch.device("cpu"))


Loop = Callable[[Sampler, Tensor, Tensor, Tensor, int], tuple[Tensor, float]]


def check_draws(sampling: str, processors: str, loop: Loop) -> None:
    """Marginals of positions 1 to 3, and each with the token before it, over 200,000 texts."""
    target, draft = scores_by_token(5, PROCESSORS[processors])
    results = [
        loop(sampler_of(sampling, CHUNK), target, draft, keys_of(CHUNK, chunk), 3) for chunk in range(DRAWS // CHUNK)
    ]
    text = torch.cat([part for part, _ in results])
    assert all(0.3 < rate < 0.8 for _, rate in results)  # both outcomes of a draft count
    step = target.double().softmax(-1)
    marginal = torch.zeros(VOCABULARY, dtype=torch.float64)
    marginal[0] = 1
    for position in (1, 2, 3):
        pairs = marginal[:, None] * step
        marginal = pairs.sum(0)
        assert total_variation(count(text[:, position]), marginal) < 0.01
        assert chi_square_p(count(text[:, position]), marginal) > 0.001
        assert chi_square_p(count(text[:, position - 1], text[:, position]), pairs) > 0.001


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("processors", PROCESSORS)
def test_the_batched_sampler_draws_from_the_processed_target(sampling: str, processors: str) -> None:
    check_draws(sampling, processors, speculate)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_deciding_column_by_column_draws_from_the_processed_target(sampling: str) -> None:
    check_draws(sampling, "temperature", speculate_by_column)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_deciding_column_by_column_gives_the_same_text(sampling: str) -> None:
    target, draft = scores_by_token(5, PROCESSORS["top p"])
    one, _ = speculate(sampler_of(sampling, 3000), target, draft, keys_of(3000, 0), 9)
    other, _ = speculate_by_column(sampler_of(sampling, 3000), target, draft, keys_of(3000, 0), 9)
    assert torch.equal(one, other)


@pytest.mark.parametrize("loop", [speculate, speculate_by_column])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_from_the_target_itself_are_always_accepted(sampling: str, loop: Loop) -> None:
    target, _ = scores_by_token(5, PROCESSORS["top k"])  # with -inf in it
    _, rate = loop(sampler_of(sampling, 5000), target, target.clone(), keys_of(5000, 0), 8)
    assert rate == 1


def test_forced_drafts_leave_the_distribution_of_rejection_as_it_is() -> None:
    target, draft = scores_by_token(5, PROCESSORS["none"])
    rows = 20_000
    forced = torch.arange(rows) % VOCABULARY
    text, rate = speculate(sampler_of("rejection", rows), target, draft, keys_of(rows, 3), 3, forced)
    assert 0 < rate < 0.1
    step = target.double().softmax(-1)
    marginal = step[0]
    for position in (1, 2, 3):
        assert total_variation(count(text[:, position]), marginal) < 0.03
        assert chi_square_p(count(text[:, position]), marginal) > 0.001
        marginal = marginal @ step
