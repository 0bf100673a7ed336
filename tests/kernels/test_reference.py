"""The torch kernels against loops over queries, heads and tokens in float64; pools hold NaN where nothing may read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_aspire.kernels import reference

BLOCK = 64
KEY, VALUE = 8, 5  # sizes of a head's key and value
SLOTS = 400
RUNS = {
    "one run": [(40, 180)],
    "three runs": [(300, 331), (20, 95), (150, 184)],
    "single tokens": [(9, 10), (3, 4), (200, 338)],
}
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def loops(
    query: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], start: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output `[n, Hq, Dv]` and weights `[n, Hq, L]`; query i sees the listed slots 0 ... start + i."""
    count, heads, _ = query.shape
    output = torch.zeros(count, heads, values.shape[2], dtype=torch.float64)
    weights = torch.zeros(count, heads, len(slots), dtype=torch.float64)
    for h in range(heads):
        kv_head = h // (heads // keys.shape[1])
        k, v = keys[list(slots), kv_head].double(), values[list(slots), kv_head].double()
        for i in range(count):
            seen = min(start + i + 1, len(slots))
            mass = torch.exp(scaling * (k[:seen] @ query[i, h].double()))
            weights[i, h, :seen] = mass / mass.sum()
            output[i, h] = weights[i, h, :seen] @ v[:seen]
    return output, weights


def pools(kv_heads: int, readable: Sequence[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Keys and values `[slots, Hkv, size]`, NaN but for the readable slots."""
    random = torch.Generator().manual_seed(kv_heads)
    made = []
    for size in (KEY, VALUE):
        pool = torch.full((SLOTS, kv_heads, size), torch.nan, dtype=dtype)
        pool[list(readable)] = torch.randn(len(readable), kv_heads, size, generator=random).to(dtype)
        made.append(pool)
    return made[0], made[1]


def queries(count: int, heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, heads, KEY, generator=torch.Generator().manual_seed(count)).to(dtype)


def slots_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [slot for begin, end in runs for slot in range(begin, end)]


@pytest.mark.parametrize("count", [1, 2, 9, 64, 65, 80])  # up to 64 queries, heads are folded; above, expanded
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 2), (1, 3), (2, 4)])
def test_a_row_attends_causally_over_its_whole_context(
    count: int, runs: list[tuple[int, int]], kv_heads: int, group: int
) -> None:
    slots = slots_of(runs)
    keys, values = pools(kv_heads, slots)
    query = queries(count, kv_heads * group)
    start = len(slots) - count
    expected, weights = loops(query, keys, values, slots, start, 0.3)
    output = reference.full_attention(query, keys, values, runs, start, 0.3)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    output, found = reference.scored_attention(query, keys, values, runs, start, 0.3)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    torch.testing.assert_close(found, weights, **TOLERANCE)


@pytest.mark.parametrize("count", [1, 5, 64, 65, 80])
def test_a_prompt_attends_causally_to_itself(count: int) -> None:
    """A context that begins with the row's first query: the only case without earlier tokens."""
    runs = [(30, 30 + count)]
    keys, values = pools(2, slots_of(runs))
    query = queries(count, 4)
    expected, weights = loops(query, keys, values, slots_of(runs), 0, 0.5)
    torch.testing.assert_close(reference.full_attention(query, keys, values, runs, 0, 0.5), expected, **TOLERANCE)
    output, found = reference.scored_attention(query, keys, values, runs, 0, 0.5)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    torch.testing.assert_close(found, weights, **TOLERANCE)


@pytest.mark.parametrize("count", [1, 4, 80])
def test_a_last_query_without_a_slot_sees_all_tokens_before_it(count: int) -> None:
    runs = [(30, 60), (100, 160)]
    keys, values = pools(2, slots_of(runs))
    query = queries(count, 4)
    start = 90 - count + 1
    expected, weights = loops(query, keys, values, slots_of(runs), start, 0.5)
    torch.testing.assert_close(reference.full_attention(query, keys, values, runs, start, 0.5), expected, **TOLERANCE)
    output, found = reference.scored_attention(query, keys, values, runs, start, 0.5)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    torch.testing.assert_close(found, weights, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_in_float32_or_better_and_outputs_in_the_models_type(dtype: torch.dtype) -> None:
    runs = [(0, 50), (60, 90)]
    keys, values = pools(2, slots_of(runs), dtype)
    query = queries(3, 4, dtype)
    expected, weights = loops(query, keys, values, slots_of(runs), 77, 0.3)
    output, found = reference.scored_attention(query, keys, values, runs, 77, 0.3)
    assert output.dtype == dtype and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), weights, rtol=1e-5, atol=1e-6)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(output.double(), expected, **close)
    plain = reference.full_attention(query, keys, values, runs, 77, 0.3)
    assert plain.dtype == dtype
    torch.testing.assert_close(plain.double(), expected, **close)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("lengths", [[7], [30], [30, 1, 12], [5, 5], [9, 30, 2, 1, 17]])
def test_listed_slots_alone_are_read(lengths: list[int], kv_heads: int, group: int) -> None:
    random = torch.Generator().manual_seed(len(lengths))
    lists = [torch.randperm(SLOTS, generator=random)[:length].tolist() for length in lengths]
    query = queries(len(lengths), kv_heads * group)
    keys, values = pools(kv_heads, sorted({slot for entries in lists for slot in entries}))
    padded = torch.tensor([entries + [entries[-1]] * (max(lengths) - len(entries)) for entries in lists])
    output = reference.sparse_attention(query, keys, values, padded, torch.tensor(lengths), 0.4)
    for row, entries in enumerate(lists):
        expected, _ = loops(query[row : row + 1], keys, values, entries, len(entries), 0.4)
        torch.testing.assert_close(output[row : row + 1], expected, **TOLERANCE)


def test_entries_behind_the_length_of_a_single_list_count_for_nothing() -> None:
    keys, values = pools(2, [3, 5, 8])
    query = queries(1, 4)
    expected, _ = loops(query, keys, values, [3, 5, 8], 3, 0.4)
    slots = torch.tensor([[3, 5, 8, 8, 8]])
    output = reference.sparse_attention(query, keys, values, slots, torch.tensor([3]), 0.4)
    torch.testing.assert_close(output, expected, **TOLERANCE)


@given(data=st.data())
def test_the_best_units_are_selected_ascending_and_ties_go_to_the_lowest_index(data: st.DataObject) -> None:
    values = st.sampled_from([0.0, 0.25, 0.25 + 1e-7, 1.0, -1.0, math.inf, -math.inf]) | st.floats(-2, 2, width=32)
    units = data.draw(st.integers(1, 40))
    lists = data.draw(st.lists(st.lists(values, min_size=units, max_size=units), min_size=1, max_size=3))
    count = data.draw(st.integers(0, units))
    scores = torch.tensor(lists)
    chosen = reference.select(scores, count)
    assert chosen.dtype == torch.int64 and chosen.shape == (len(lists), count)
    for entries, row in zip(scores.tolist(), chosen.tolist(), strict=True):
        assert row == sorted(sorted(range(units), key=lambda u: (-entries[u], u))[:count])


def test_new_keys_and_values_are_written_to_their_slots_and_nowhere_else() -> None:
    keys, values = pools(2, range(SLOTS))
    before = keys.clone(), values.clone()
    slots = torch.tensor([17, 3, 399, 18])
    new_keys, new_values = torch.randn(4, 2, KEY).double(), torch.randn(4, 2, VALUE).double()
    reference.store_kv(keys, values, slots, new_keys, new_values)
    for pool, old, new in ((keys, before[0], new_keys), (values, before[1], new_values)):
        assert torch.equal(pool[slots], new)
        untouched = torch.ones(SLOTS, dtype=torch.bool)
        untouched[slots] = False
        assert torch.equal(pool[untouched], old[untouched])


def test_strided_keys_as_models_pass_them_are_stored() -> None:
    """Models give `[1, H, T, D]`; the kernels see `[T, H, D]` views of it."""
    keys, values = pools(2, range(SLOTS))
    states = torch.randn(1, 2, 3, KEY).double()
    reference.store_kv(keys, values, torch.tensor([4, 1, 7]), states[0].transpose(0, 1), values[:3].clone())
    assert torch.equal(keys[[4, 1, 7]], states[0].transpose(0, 1))


@given(st.integers(0, 2**32), st.sampled_from([1, 8]), st.sampled_from([0.1, 2.0, 30.0]))
def test_codes_keep_weights_to_a_fifth_or_a_small_share_of_the_largest(seed: int, unit: int, spread: float) -> None:
    logits = spread * torch.randn(2, 3, 5 * BLOCK - 13, generator=torch.Generator().manual_seed(seed))
    weights = logits.double().masked_fill(logits > 2 * spread, -math.inf).softmax(-1)
    blocks = torch.nn.functional.pad(weights, (0, 13)).unflatten(-1, (-1, BLOCK))
    largest = blocks.amax(-1, keepdim=True)
    exact = blocks.unflatten(-1, (-1, unit)).sum(-1)
    kept = reference.coded(weights, BLOCK, unit)
    padded = torch.nn.functional.pad(kept, (0, exact.flatten(-2).shape[-1] - kept.shape[-1])).view_as(exact)
    least = unit * largest * 2**-8 / 1.5
    assert ((padded - exact).abs() <= torch.maximum(0.2001 * exact, 1.0001 * least)).all()
    assert (padded[exact == 0] == 0).all()
    if unit == 1:
        assert torch.equal(padded.amax(-1, keepdim=True), largest)
        torch.testing.assert_close(reference.coded(kept, BLOCK, 1), kept)


def test_codes_keep_the_mass_of_a_row() -> None:
    """They are 0.9 % below it here: more weights are rounded to a smaller neighbour than to a larger one."""
    weights = torch.randn(4, 8, 256 * BLOCK, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    assert abs(float(reference.coded(weights, BLOCK, 1).sum() / weights.sum()) - 1) < 0.01
