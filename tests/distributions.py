"""What tests of sampling share: how well draws fit a distribution, and noise keys of rows.

Seeds are fixed, so a result does not change from run to run. With correct code a chi-square check fails for one seed
in a thousand; the bounds on total variation are at least 1.5 times what 48 equally likely tokens would show.
"""

from __future__ import annotations

import numpy as np
import torch
from kit import VOCABULARY
from torch import Tensor

from hf_aspire.noise import row_key

SAMPLINGS = ("coupled", "rejection")


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


def keys_of(rows: int, seed: int) -> Tensor:
    prompt = np.arange(5).tobytes()
    return torch.tensor([row_key(seed, prompt, occurrence) for occurrence in range(rows)])
