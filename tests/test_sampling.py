"""Sampling is exact: marginals and pairs against enumeration, for `coupled` and `rejection`; and the noise for it.

Seeds are fixed, so a result does not change from run to run. With correct code a chi-square check fails for one seed
in a thousand; the bounds on total variation are at least 1.5 times what 48 equally likely tokens would show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit import POLICIES, SCHEDULES, VOCABULARY, aspire, pick, ragged, small, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_aspire.sampling import ArgmaxSampler, Draws, Purpose, RejectionSampler, Sampler, make_sampler, row_key
from hf_aspire.testing import forced_drafts

SAMPLINGS = ("coupled", "rejection")
DRAWS = 200_000
CHUNK = 10_000
PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top k": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(8)],
    "top p": [TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.8)],
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=1)  # this file runs it on 50,000 texts


# ---- statistics


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Probability of a deviation at least this large; cells that expect fewer than five draws count as one."""
    observed, expected = counts.flatten().double(), probabilities.flatten().double() * counts.sum()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def total_variation(counts: Tensor, probabilities: Tensor) -> float:
    return float((counts.flatten() / counts.sum() - probabilities.flatten()).abs().sum() / 2)


def count(tokens: Tensor, *more: Tensor, size: int = VOCABULARY) -> Tensor:
    """How often each token, or each tuple of tokens, occurs."""
    place = tokens
    for other in more:
        place = place * size + other
    return torch.bincount(place, minlength=size ** (1 + len(more)))


def test_the_chi_square_probability_is_that_of_the_tables() -> None:
    # 10.83 is the 0.1 % point at one degree of freedom, 27.88 at nine.
    shift = (10.828 / 4) ** 0.5 * 100  # of both of two cells that expect 10,000
    counts = torch.tensor([10_000 + shift / 2**0.5, 10_000 - shift / 2**0.5])
    statistic = float((counts - 10_000).square().sum() / 10_000)
    assert chi_square_p(counts, torch.tensor([0.5, 0.5])) == pytest.approx(
        2 * (1 - torch.distributions.Normal(0, 1).cdf(torch.tensor(statistic**0.5))).item(), rel=1e-3
    )
    ten = torch.full((10,), 1000.0)
    ten[0] += (27.877 * 1000 / 2) ** 0.5
    ten[1] -= (27.877 * 1000 / 2) ** 0.5
    assert chi_square_p(ten, torch.full((10,), 0.1)) == pytest.approx(0.001, rel=1e-2)


# ---- the batched sampler


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


def keys_of(rows: int, seed: int) -> Tensor:
    prompt = np.arange(5).tobytes()
    return torch.tensor([row_key(seed, prompt, occurrence) for occurrence in range(rows)])


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


@pytest.mark.parametrize("loop", [speculate, speculate_by_column])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_from_the_target_itself_are_always_accepted(sampling: str, loop: Loop) -> None:
    target, _ = scores_by_token(5, PROCESSORS["top k"])  # with -inf in it
    _, rate = loop(sampler_of(sampling, 5000), target, target.clone(), keys_of(5000, 0), 8)
    assert rate == 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_deciding_column_by_column_gives_the_same_text(sampling: str) -> None:
    target, draft = scores_by_token(5, PROCESSORS["top p"])
    one, _ = speculate(sampler_of(sampling, 3000), target, draft, keys_of(3000, 0), 9)
    other, _ = speculate_by_column(sampler_of(sampling, 3000), target, draft, keys_of(3000, 0), 9)
    assert torch.equal(one, other)


# ---- the rule of `rejection`


def outcomes(p: Tensor, q: Tensor) -> Tensor:
    """Probability of (draft, final token, accepted) `[V, V, 2]` of a one-draft round, by the rule's definition."""
    size = len(p)
    table = torch.zeros(size, size, 2, dtype=torch.float64)
    residual = (p - q).clamp(min=0)
    for x in range(size):
        if q[x] > 0:
            keep = min(1.0, float(p[x] / q[x]))
            table[x, x, 1] = q[x] * keep
            if keep < 1:
                table[x, :, 0] = q[x] * (1 - keep) * residual / residual.sum()
    return table


def one_round(p: Tensor, q: Tensor, rows: int, forced: int | None = None) -> Tensor:
    """Counts of (draft, final token, accepted) over rows of one draft each."""
    sampler = RejectionSampler(rows, 1, len(p), torch.device("cpu"))
    draws = Draws(keys_of(rows, 1), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    slots = torch.arange(rows)
    drafts = sampler.draft(q.log().float().expand(rows, -1), draws, slots, torch.zeros(rows, dtype=torch.int64))
    if forced is not None:
        drafts = torch.full_like(drafts, forced)
        for slot in range(rows):
            sampler.replace(slot, 0, forced)
    two = draws.pick(slots.repeat_interleave(2))
    two = replace(two, positions=two.positions + torch.arange(2).repeat(rows))
    scores = p.log().float().expand(2 * rows, -1)
    outcome = sampler.verify(scores, two, drafts[:, None], torch.full((rows,), 2), slots)
    place = (drafts * len(p) + outcome.tokens[:, 0]) * 2 + outcome.accepted
    return torch.bincount(place, minlength=2 * len(p) ** 2)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]),
        ([0.5, 0.5, 0.0, 0.0], [0.0, 0.3, 0.3, 0.4]),
        ([0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]),
        ([0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]),
    ],
)
def test_rejection_keeps_and_replaces_as_its_definition_says(p: list[float], q: list[float]) -> None:
    target, draft = torch.tensor(p).double(), torch.tensor(q).double()
    expected = outcomes(target, draft)
    assert torch.allclose(expected.sum((0, 2)), target)  # the rule itself: what is committed is a draw from p
    counts = one_round(target, draft, 100_000)
    assert total_variation(counts, expected) < 0.01
    assert chi_square_p(counts, expected) > 0.001


def test_a_replaced_draft_counts_as_proposed_with_probability_one() -> None:
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    one_hot = torch.tensor([0.0, 0.0, 1.0, 0.0]).double()
    assert chi_square_p(one_round(p, q, 50_000, forced=2), outcomes(p, one_hot)) > 0.001


@pytest.mark.parametrize("q", [torch.nan, 0.0])
def test_a_draft_from_scores_without_a_number_leaves_a_draw_from_the_target(q: float) -> None:
    """In half precision a sparse context may overflow where the whole one does not."""
    p, first = torch.tensor([0.4, 0.3, 0.2, 0.1]).double(), torch.tensor([1.0, 0, 0, 0]).double()
    assert chi_square_p(one_round(p, torch.full((4,), q).double(), 50_000), outcomes(p, first)) > 0.001


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


class Extreme(Draws):
    """Draws whose accept numbers are all 1: drafts are rejected unless p > q."""

    def uniform(self, purpose: Purpose, count: int, *, by_round: bool) -> Tensor:
        numbers = super().uniform(purpose, count, by_round=by_round)
        return torch.ones_like(numbers) if purpose is Purpose.ACCEPT else numbers


def test_an_empty_residual_is_replaced_by_the_target() -> None:
    rows = 20_000
    p = torch.tensor([0.0, 0.3, 0.0, 0.7])
    sampler = RejectionSampler(rows, 1, 4, torch.device("cpu"))
    slots, zeros = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    drafts = sampler.draft(p.log().expand(rows, -1), Draws(keys_of(rows, 0), zeros, zeros), slots, zeros)
    place = torch.arange(2).repeat(rows)
    draws = Extreme(keys_of(rows, 0).repeat_interleave(2), place, torch.zeros_like(place))
    outcome = sampler.verify(p.log().expand(2 * rows, -1), draws, drafts[:, None], torch.full((rows,), 2), slots)
    assert int(outcome.accepted.sum()) == 0
    assert chi_square_p(count(outcome.tokens[:, 0], size=4), p) > 0.001


# ---- noise


def draws_on(keys: Tensor, positions: int | Tensor = 0, rounds: int | Tensor = 0) -> Draws:
    zeros = torch.zeros_like(keys)
    return Draws(keys, zeros + positions, zeros + rounds)


@pytest.mark.parametrize("by_round", [False, True])
def test_noise_is_uniform(by_round: bool) -> None:
    for keys in (torch.arange(20_000), keys_of(20_000, 0), torch.arange(20_000) * -7046029254386353131):
        numbers = draws_on(keys, torch.arange(20_000) % 7).uniform(Purpose.TARGET, 50, by_round=by_round)
        assert numbers.dtype == torch.float64
        assert float(numbers.min()) > 0 and float(numbers.max()) < 1
        bins = torch.bincount((numbers * 1000).long().flatten(), minlength=1000)
        assert chi_square_p(bins, torch.full((1000,), 1e-3)) > 0.001
        assert abs(float(numbers.mean()) - 0.5) < 4 * (1 / 12 / numbers.numel()) ** 0.5


def test_noise_of_different_places_is_independent() -> None:
    keys = torch.arange(100_000)
    here = draws_on(keys, 3, 2)

    def first(draws: Draws, purpose: Purpose = Purpose.DRAFT) -> Tensor:
        return draws.uniform(purpose, 1, by_round=True)[:, 0]

    pairs = {
        "columns": tuple(here.uniform(Purpose.DRAFT, 2, by_round=True).T),
        "positions": (first(here), first(draws_on(keys, 4, 2))),
        "rounds": (first(here), first(draws_on(keys, 3, 3))),
        "purposes": (first(here), first(here, Purpose.ACCEPT)),
        "position and round": (first(here), first(draws_on(keys, 2, 3))),
        "keys": (first(here)[:-1], first(here)[1:]),
        "key and position": (first(here)[:-1], first(draws_on(keys, 2, 2))[1:]),
    }
    for name, (one, other) in pairs.items():
        cells = torch.bincount((one * 20).long() * 20 + (other * 20).long(), minlength=400)
        assert chi_square_p(cells, torch.full((400,), 1 / 400)) > 0.001, name


def test_every_purpose_position_and_round_has_numbers_of_its_own() -> None:
    places = [(purpose, position, number) for purpose in Purpose for position in range(6) for number in range(6)]
    seen = [
        draws_on(torch.tensor([5, 6]), position, number).uniform(purpose, 3, by_round=True)
        for purpose, position, number in places
    ]
    seen += [
        draws_on(torch.tensor([5, 6]), position).uniform(Purpose.TARGET, 3, by_round=False) for position in range(6)
    ]
    numbers = torch.cat([part.flatten() for part in seen])
    assert len(numbers.unique()) == len(numbers)


@pytest.mark.parametrize("purpose", Purpose, ids=lambda purpose: purpose.name)
def test_every_purpose_has_noise_that_does_not_depend_on_rounds(purpose: Purpose) -> None:
    one, other = draws_on(torch.arange(4), 3, 0), draws_on(torch.arange(4), 3, 5)
    assert torch.equal(one.uniform(purpose, 5, by_round=False), other.uniform(purpose, 5, by_round=False))


def test_noise_depends_on_its_place_alone() -> None:
    keys = torch.tensor([11, 12, 13])
    alone = draws_on(keys[1:2], 4).gumbel(Purpose.TARGET, 48, by_round=False)
    together = Draws(keys, torch.tensor([0, 4, 9]), torch.tensor([3, 1, 2]))
    assert torch.equal(together.gumbel(Purpose.TARGET, 48, by_round=False)[1:2], alone)  # no neighbour, no round
    assert torch.equal(together.pick(torch.tensor([1])).gumbel(Purpose.TARGET, 20, by_round=False), alone[:, :20])


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    noise = draws_on(torch.arange(20_000)).gumbel(Purpose.TARGET, 48, by_round=False)
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.006)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.02)


def test_a_row_key_depends_on_seed_prompt_and_occurrence() -> None:
    prompts = [b"", b"345", b"34", b"543"]
    keys = [row_key(seed, prompt, k) for seed in (0, 1, -1, 2**62) for prompt in prompts for k in range(3)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


# ---- through `generate`

PROMPT = 24
BATCH, CALLS = 250, 80


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


def test_the_sampler_follows_the_call() -> None:
    device = torch.device("cpu")
    assert isinstance(make_sampler(False, "rejection", 1, 1, 4, device), ArgmaxSampler)
    assert isinstance(make_sampler(True, "coupled", 1, 1, 4, device), ArgmaxSampler)
    assert isinstance(make_sampler(True, "rejection", 1, 1, 4, device), RejectionSampler)
