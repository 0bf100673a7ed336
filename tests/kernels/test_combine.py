"""Token scores of the attention pass equal the reference's softmax weights, whatever the splits."""

import pytest
import torch
from kernels.mixture import Mixture, RowSpec, ask_scores, check_scores, distance, small_tile

from hf_aspire.kernels import work
from hf_aspire.kernels.mixed_attention import PLAIN, Variant

STEP = [
    RowSpec(1, 45, granule=1),
    RowSpec(5, 130, scored=(0, 4)),
    RowSpec(1, 77, scored=(0,)),
    RowSpec(3, 90),
    RowSpec(20, 37, scored=tuple(range(12, 20))),
]


def check(mixture, variant=PLAIN, unit=1, **options):
    output, scores = mixture.run(unit=unit, variant=variant, **options)
    expected_output, weights = mixture.expected(variant)
    assert distance(output, expected_output) < 1e-2
    check_scores(mixture, scores, weights, unit)


@pytest.mark.parametrize("unit", [1, 4, 8, 16])
@pytest.mark.parametrize("slots", [1, 16])
def test_scores_equal_the_softmax_weights(unit, slots, device):
    mixture = Mixture(STEP, device)
    check(mixture, unit=unit, slots=slots, tile=small_tile(64))
    assert (mixture.plan.partials > 0) == (slots > 1)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("unit", [1, 8])
def test_scores_of_the_first_query_and_one_other(unit, block_m, group, device):
    """Rows in which the two stand in one tile, in two, at a tile's start and in its middle."""
    step = [
        RowSpec(1, 77, scored=(0,)),
        RowSpec(2, 45, scored=(0, 1)),
        RowSpec(4, 200),
        *(RowSpec(queries, 90, scored=(0, queries - 1)) for queries in (4, 5, 7, 17, 20)),
        RowSpec(9, 60, scored=(0, 5)),
        RowSpec(20, 70, scored=(0, 19)),  # a block behind the first tile's last
    ]
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    check(Mixture(step, device, group=group, dtype=dtype), unit=unit, slots=12, tile=small_tile(block_m))


def test_rows_may_not_hide_a_scored_query_behind_others():
    with pytest.raises(ValueError, match="begin with the first"):
        ask_scores(work.row_table([5, 5], [40, 40], [45, 45], [0, 1], [4, 4], [False, False]), [(0, 4), (2, 4)])


@pytest.mark.parametrize(
    "dtype", [torch.float16] if not torch.cuda.is_available() else [torch.float16, torch.bfloat16]
)
def test_scores_of_short_number_formats(dtype, device):
    check(Mixture(STEP, device, dtype=dtype))


def test_scores_of_tiled_rows_and_odd_groups(device):
    check(Mixture(STEP, device, group=3, kv_heads=2), tile=small_tile(16))


def test_scores_of_units_that_end_behind_a_row_whose_last_query_keeps_nothing(device):
    """The unit reaches into a block that nobody wrote, and the query stands behind the row's last token."""
    step = [RowSpec(9, 32, scored=tuple(range(1, 9)), slotless=1), RowSpec(2, 90, scored=(0, 1))]
    check(Mixture(step, device, page=64), unit=64, tile=small_tile(64))


def test_scores_see_sinks_window_and_softcap(device):
    variant = Variant(window=30, softcap=4.0, sinks=torch.linspace(-1, 4, 8, device=device))
    check(Mixture(STEP, device), variant=variant)


def test_scores_see_a_token_at_the_start_of_a_window_and_the_end_of_a_block(device):
    mixture = Mixture([RowSpec(1, 77, scored=(0,)), RowSpec(2, 78, scored=(0, 1))], device)
    check(mixture, variant=Variant(window=46), tile=small_tile())  # token 31 of blocks of 32


@pytest.mark.parametrize("factor", [10, 60])
def test_scores_of_blocks_far_below_the_largest_logit(factor, device):
    mixture = Mixture(STEP, device)
    mixture.query *= factor
    check(mixture, tile=small_tile(64))


def test_scores_under_upper_bounds(device):
    check(Mixture(STEP, device), slack=50)
