"""Selection equals the reference: the best units, ascending, ties to the lowest index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_aspire.kernels import reference, select

INTERPRETED = not torch.cuda.is_available()


def chosen(scores, lengths, counts, capacity=None):
    """Runs the kernel on `[layers, rows, units]`; unwritten entries stay -1."""
    device = scores.device
    output = torch.full((*scores.shape[:2], capacity or scores.shape[2]), -1, dtype=torch.int32, device=device)
    as_tensor = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    select.select(scores, as_tensor(lengths), as_tensor(counts), output)
    return output


def check(scores, lengths, counts):
    output = chosen(scores, lengths, counts)
    for layer in range(scores.shape[0]):
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            expected = reference.select(scores[layer, row, :length][None], min(count, length))[0]
            assert torch.equal(output[layer, row, : len(expected)].long(), expected)
            assert (output[layer, row, len(expected) :] == -1).all()


@pytest.mark.parametrize("units", [1, 31, 257, 1500])
def test_ragged_lists_equal_the_reference(units, device):
    scores = torch.randn(2, 3, units, generator=torch.Generator().manual_seed(units)).to(device)
    lengths = [units, max(1, units // 2), 1]
    scores[:, 1, lengths[1] :] = torch.inf  # what is behind a list's end is never chosen
    scores[:, 2, 1:] = torch.nan
    check(scores, lengths, [units // 3 + 1, 0, 1])


@settings(max_examples=15 if INTERPRETED else 100)
@given(st.data())
def test_ties_go_to_the_lowest_index(data):
    device = torch.device("cpu" if INTERPRETED else "cuda")
    length = data.draw(st.integers(1, 90))
    values = st.sampled_from([-1.0, -0.0, 0.0, 1e-40, 0.5, 1.0])
    scores = torch.tensor(data.draw(st.lists(values, min_size=length, max_size=length)), device=device)
    # A CPU may flush the subnormal number in comparisons, in torch as well: keep to what both see alike.
    scores = torch.where(scores.abs() < 1e-30, scores * 0.0, scores)
    check(scores[None, None], [length], [data.draw(st.integers(0, length))])


def test_more_than_a_row_holds_chooses_the_row(device):
    scores = torch.rand(1, 1, 40, device=device)
    assert chosen(scores, [10], [25])[0, 0].tolist() == [*range(10), *[-1] * 30]


@pytest.mark.parametrize("chunk", [64, 4096])
def test_ties_at_the_threshold_in_several_chunks(chunk, device, monkeypatch):
    """A chunk holds more ties than are chosen, and what is behind it has its place all the same."""
    monkeypatch.setattr(select, "_CHUNK", chunk)
    units = 3 * chunk + 7
    scores = torch.rand(1, 1, units, generator=torch.Generator().manual_seed(chunk)).to(device)
    scores = torch.where((scores > 0.3) & (scores < 0.9), 0.5, scores)
    above, equal = int((scores > 0.5).sum()), int((scores == 0.5).sum())
    assert equal > 2 * 256 or chunk == 64
    for ties in (1, equal // 2, equal - 1):
        check(scores, [units], [above + ties])


def test_lists_beyond_the_registers_take_the_chunked_search(device, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(select, "_HELD", 256)
        monkeypatch.setattr(select, "_READ", 128)
        monkeypatch.setattr(select, "_CHUNK", 64)
    units = 900 if INTERPRETED else 131072
    scores = torch.rand(1, 2, units, generator=torch.Generator().manual_seed(0)).to(device)
    scores = torch.where(scores > 0.9, 0.9, scores)  # ties at the top
    check(scores, [units, units - 77], [units // 14, units // 30])
