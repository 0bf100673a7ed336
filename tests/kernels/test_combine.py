"""Token scores of the attention pass equal the reference's softmax weights, whatever the splits."""

import pytest
import torch
from kernels.mixture import Mixture, RowSpec, distance, small_tile

from hf_aspire.kernels import reference
from hf_aspire.kernels.mixed_attention import PLAIN, Variant

STEP = [
    RowSpec(1, 45, granule=1),
    RowSpec(5, 130, scored=(0, 4)),
    RowSpec(1, 77, scored=(0,)),
    RowSpec(3, 90),
    RowSpec(20, 37, scored=tuple(range(12, 20))),
]
# Raw logits of 16-bit models are kept in half precision: 2^-11 of logits that reach about 30 here.
SCORE_TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-2, torch.bfloat16: 3e-2}


def check(mixture, variant=PLAIN, unit=1, by_maximum=False, **options):
    output, scores = mixture.run(unit=unit, by_maximum=by_maximum, variant=variant, **options)
    expected_output, weights = mixture.expected(variant)
    assert distance(output, expected_output) < 1e-2
    slot = 0
    for spec, weight in zip(mixture.specs, weights, strict=True):
        if not spec.scored:
            continue
        expected = reference.reduce_scores(weight[list(spec.scored)], unit, by_maximum)
        assert distance(scores[slot, : len(expected)], expected) < SCORE_TOLERANCE[output.dtype]
        assert (scores[slot, len(expected) :] == -1).all(), "nothing is written behind a row's units"
        slot += 1


@pytest.mark.parametrize("by_maximum", [False, True])
@pytest.mark.parametrize("unit", [1, 4, 16])
@pytest.mark.parametrize("slots", [1, 16])
def test_scores_equal_the_softmax_weights(by_maximum, unit, slots, device):
    mixture = Mixture(STEP, device)
    check(mixture, unit=unit, by_maximum=by_maximum, slots=slots, tile=small_tile(64))
    assert (mixture.plan.used_merges > 0) == (slots > 1)


@pytest.mark.parametrize(
    "dtype", [torch.float16] if not torch.cuda.is_available() else [torch.float16, torch.bfloat16]
)
def test_scores_of_short_number_formats(dtype, device):
    check(Mixture(STEP, device, dtype=dtype))


def test_scores_of_tiled_rows_and_odd_groups(device):
    check(Mixture(STEP, device, group=3, kv_heads=2), tile=small_tile(16))


def test_scores_see_sinks_window_and_softcap(device):
    variant = Variant(window=30, softcap=4.0, sinks=torch.linspace(-1, 4, 8, device=device))
    check(Mixture(STEP, device), variant=variant)


def test_scores_under_upper_bounds(device):
    check(Mixture(STEP, device), slack=50)
