"""The highest scores and their tokens are torch's."""

import pytest
import torch

from hf_aspire.kernels.highest import highest

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def check(scores: torch.Tensor) -> None:
    expected = scores.cpu().max(-1)
    tokens, best = highest(scores)
    assert (tokens.dtype, best.dtype) == (torch.int64, torch.float32)
    assert torch.equal(tokens.cpu(), expected.indices)
    assert torch.equal(best.cpu().nan_to_num(nan=9e9), expected.values.float().nan_to_num(nan=9e9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(33, 50), (7, 8192), (4, 16389), (2, 8193), (1, 1)])
def test_tokens_and_scores_are_torchs(rows, vocabulary, dtype, device):
    """bfloat16 scores of a large vocabulary hold many equals: the first of them counts."""
    scores = torch.randn(rows, vocabulary + 3, generator=torch.Generator().manual_seed(vocabulary)).to(device, dtype)
    check(scores[:, :vocabulary])  # rows with a stride of their own, and what is behind them counts for nothing
    check(scores.round()[:, :vocabulary])
    check(scores.T.contiguous().T[:, :vocabulary])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
@pytest.mark.parametrize("places", [(0,), (9999, 3), (8192, 0, 10000), range(10001)])
def test_scores_that_are_no_numbers(value, places, device):
    """NaN is higher than everything, the first of several counts, and of nothing but -inf the first token."""
    scores = torch.randn(2, 10001, generator=torch.Generator().manual_seed(1)).to(device)
    scores[1, list(places)] = value
    scores[1, 7] = torch.inf
    check(scores)
    scores[0] = -scores[0].abs()
    scores[0, list(places)] = -value
    check(scores)


def test_float64_scores_closer_than_float32_are_told_apart(device):
    scores = torch.ones(1, 9, dtype=torch.float64, device=device)
    scores[0, 5] += 1e-12
    check(scores)


def test_no_rows(device):
    tokens, best = highest(torch.zeros(0, 5, device=device))
    assert len(tokens) == len(best) == 0
