"""Tokens drawn by the kernel are those of the reference, noise for noise."""

import pytest
import torch

from hf_aspire import noise
from hf_aspire.kernels import gumbel
from hf_aspire.noise import Draws, Purpose


def draws_for(rows: int, device: torch.device) -> Draws:
    generator = torch.Generator().manual_seed(rows)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    places = torch.randint(0, 2**40, (2, rows), generator=generator)
    return Draws(*(part.to(device) for part in (keys, *places)))


@pytest.mark.parametrize("by_round", [True, False])
@pytest.mark.parametrize(("rows", "vocabulary"), [(300, 48), (9, 2048), (5, 5003), (1, 1)])
def test_tokens_are_the_references(rows, vocabulary, by_round, device):
    draws = draws_for(rows, device)
    scores = torch.randn(rows, vocabulary + 3, generator=torch.Generator().manual_seed(vocabulary)).to(device)
    scores = scores[:, :vocabulary]  # rows with a stride of their own, and what is behind them counts for nothing
    purposes = 1 + torch.arange(rows, device=device) % 4
    for purpose in (Purpose.DRAFT, purposes):
        found = gumbel.gumbel_argmax(scores, draws, purpose, by_round=by_round)
        assert found.dtype == torch.int64
        assert torch.equal(found, noise.gumbel_argmax(scores, draws, purpose, by_round=by_round))


def test_a_token_without_probability_is_never_drawn(device):
    scores = torch.full((40, 3000), -torch.inf, device=device)
    allowed = torch.arange(40, device=device) * 71
    scores[torch.arange(40), allowed] = -1e30
    assert torch.equal(gumbel.gumbel_argmax(scores, draws_for(40, device), Purpose.TARGET, by_round=False), allowed)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_choose_nothing_give_some_token(value, device):
    """The call ends with an error when it hears of the highest score; until then the token is looked up."""
    scores = torch.full((3, 2500), value, device=device)
    found = gumbel.gumbel_argmax(scores, draws_for(3, device), Purpose.TARGET, by_round=True)
    assert bool(((found >= 0) & (found < 2500)).all())
    assert len(gumbel.gumbel_argmax(scores[:0], draws_for(0, device), 1, by_round=True)) == 0
