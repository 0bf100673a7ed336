"""The noise of sampling: uniform, independent between places, and a function of its place alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributions import chi_square_p, keys_of
from torch import Tensor

from hf_aspire.noise import Draws, Purpose, row_key


def draws_on(keys: Tensor, positions: int | Tensor = 0, rounds: int | Tensor = 0) -> Draws:
    zeros = torch.zeros_like(keys)
    return Draws(keys, zeros + positions, zeros + rounds)


# ---- distribution


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


@pytest.mark.parametrize("by_round", [False, True])
def test_noise_is_uniform(by_round: bool) -> None:
    for keys in (torch.arange(20_000), keys_of(20_000, 0), torch.arange(20_000) * -7046029254386353131):
        numbers = draws_on(keys, torch.arange(20_000) % 7).uniform(Purpose.TARGET, 50, by_round=by_round)
        assert numbers.dtype == torch.float64
        assert float(numbers.min()) > 0 and float(numbers.max()) < 1
        bins = torch.bincount((numbers * 1000).long().flatten(), minlength=1000)
        assert chi_square_p(bins, torch.full((1000,), 1e-3)) > 0.001
        assert abs(float(numbers.mean()) - 0.5) < 4 * (1 / 12 / numbers.numel()) ** 0.5


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    noise = draws_on(torch.arange(20_000)).gumbel(Purpose.TARGET, 48, by_round=False)
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.006)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.02)


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


# ---- what it depends on


def test_noise_depends_on_its_place_alone() -> None:
    keys = torch.tensor([11, 12, 13])
    alone = draws_on(keys[1:2], 4).gumbel(Purpose.TARGET, 48, by_round=False)
    together = Draws(keys, torch.tensor([0, 4, 9]), torch.tensor([3, 1, 2]))
    assert torch.equal(together.gumbel(Purpose.TARGET, 48, by_round=False)[1:2], alone)  # no neighbour, no round
    assert torch.equal(together.pick(torch.tensor([1])).gumbel(Purpose.TARGET, 20, by_round=False), alone[:, :20])


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


def test_a_row_key_depends_on_seed_prompt_and_occurrence() -> None:
    prompts = [b"", b"345", b"34", b"543"]
    keys = [row_key(seed, prompt, k) for seed in (0, 1, -1, 2**62) for prompt in prompts for k in range(3)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)
