"""New keys and values land on their token slots and nowhere else."""

import pytest
import torch

from hf_aspire.kernels import reference
from hf_aspire.kernels.store_kv import store_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "value_size", "page"), [(1, 64, 64, 16), (3, 80, 96, 32), (2, 256, 64, 64)])
def test_tokens_reach_their_slots(dtype, heads, size, value_size, page, device):
    generator = torch.Generator().manual_seed(heads)
    tokens, pages = 21, 6
    keys = torch.randn(pages, heads, page, size, generator=generator).to(dtype).to(device)
    values = torch.randn(pages, heads, page, value_size, generator=generator).to(dtype).to(device)
    slots = torch.randperm(pages * page, generator=generator)[:tokens].to(device)
    slots[4] = -1  # a token that keeps nothing
    # Transformers hands over [1, heads, T, size] views.
    new_keys = torch.randn(heads, tokens, size, generator=generator).to(dtype).to(device).transpose(0, 1)
    new_values = torch.randn(tokens, heads, value_size, generator=generator).to(dtype).to(device)
    expected = keys.clone(), values.clone()
    reference.store_pages(*expected, slots, new_keys, new_values)
    store_kv(keys, values, slots, new_keys, new_values)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    assert torch.equal(keys[slots[0] // page, :, slots[0] % page], new_keys[0])


def test_no_token_is_no_launch(device):
    keys = torch.zeros(2, 1, 16, 64, device=device)
    nothing = torch.zeros(0, 1, 64, device=device)
    store_kv(keys, keys.clone(), torch.zeros(0, dtype=torch.int64, device=device), nothing, nothing)
    assert not keys.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_hurts_only_who_sees_its_token(bad, device):
    """A masked weight of 0 times it would be NaN: it becomes zeros, and its head's key NaN."""
    keys, values = (torch.zeros(1, 2, 16, 32, device=device) for _ in range(2))
    new_keys, new_values = torch.rand(3, 2, 32, device=device), torch.rand(3, 2, 32, device=device)
    new_values[1, 0, 7] = bad
    store_kv(keys, values, torch.tensor([0, 1, 2], device=device), new_keys, new_values)
    assert not values[0, 0, 1].any() and keys[0, 0, 1].isnan().all()
    for head, token in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2)):
        assert torch.equal(keys[0, head, token], new_keys[token, head])
        assert torch.equal(values[0, head, token], new_values[token, head])
