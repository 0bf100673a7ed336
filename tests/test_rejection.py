"""The rule of `rejection`: what a round keeps and replaces, against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distributions import chi_square_p, count, keys_of, total_variation
from torch import Tensor

from hf_aspire.noise import Draws, Purpose
from hf_aspire.sampling import RejectionSampler


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
