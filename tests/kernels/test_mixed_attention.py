"""The mixed attention kernel against the float64 reference: row kinds, splits, shapes, variants."""

import pytest
import torch
from kernels.mixture import TOLERANCE, Mixture, RowSpec, distance, small_tile

from hf_aspire.kernels import work
from hf_aspire.kernels.mixed_attention import Variant

INTERPRETED = not torch.cuda.is_available()
# The interpreter multiplies the bits of bfloat16 as integers.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
STEP = [
    RowSpec(1, 45, granule=1),
    RowSpec(5, 100),
    RowSpec(1, 1),
    RowSpec(1, 66),
    RowSpec(1, 33, granule=4),
    RowSpec(17, 17),
]


def check(mixture, *, factor=1.0, **options):
    variant = options.get("variant", Variant())
    output, _ = mixture.run(**options)
    expected, _ = mixture.expected(variant)
    assert distance(output, expected) < TOLERANCE[output.dtype] * factor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 16])
def test_ragged_rows_in_one_launch(dtype, slots, device):
    mixture = Mixture(STEP, device, dtype=dtype)
    check(mixture, slots=slots)
    check(mixture, slots=slots, tile=small_tile(32))
    assert (mixture.plan.partials > 0) == (slots > 1)


@pytest.mark.parametrize(
    ("size", "value_size", "group", "kv_heads"),
    [(64, 64, 1, 2), (80, 80, 5, 1), (96, 64, 3, 2), (128, 128, 16, 1), (256, 256, 8, 1)],
)
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES)
def test_head_shapes(size, value_size, group, kv_heads, dtype, device):
    specs = [RowSpec(1, 40, granule=2), RowSpec(6, 70), RowSpec(1, 70)]
    check(Mixture(specs, device, size=size, value_size=value_size, group=group, kv_heads=kv_heads, dtype=dtype))


@pytest.mark.parametrize("page", [16, 32, 64])
def test_page_and_granule_sizes(page, device):
    specs = [RowSpec(1, 50, granule=granule) for granule in (1, 2, 4, 8, 16)] + [RowSpec(3, 2 * page + 5)]
    check(Mixture(specs, device, page=page, kv_heads=1))


def test_long_rows_are_tiled_and_causal(device):
    specs = [RowSpec(40, 40), RowSpec(23, 90), RowSpec(1, 20, granule=1)]
    check(Mixture(specs, device, kv_heads=1), tile=small_tile(32))


def test_a_query_without_a_slot_sees_the_whole_context(device):
    check(Mixture([RowSpec(4, 30, slotless=1), RowSpec(1, 50, slotless=1)], device))


def test_lengths_come_from_the_device(device):
    """The host plans with upper bounds; pieces behind the true length are empty."""
    for variant in (Variant(), Variant(window=20)):
        check(Mixture([RowSpec(3, 70), RowSpec(1, 9), RowSpec(2, 64)], device), slack=70, slots=12, variant=variant)


@pytest.mark.parametrize(
    "variant",
    [
        Variant(window=24),
        Variant(softcap=2.0),
        Variant(sinks=torch.linspace(-1, 6, 8)),
        Variant(window=40, softcap=5.0, sinks=torch.linspace(-1, 2, 8)),
    ],
    ids=["window", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize("slots", [1, 12])
def test_variants(variant, slots, device):
    if variant.sinks is not None:
        variant = Variant(variant.window, variant.softcap, variant.sinks.to(device))
    mixture = Mixture(STEP, device)
    check(mixture, slots=slots, variant=variant)
    plain, _ = mixture.expected()
    assert distance(mixture.run(slots=slots, variant=variant)[0], plain) > 1e-3, "the variant changes nothing"


def test_short_rows_take_a_small_tile_beside_long_ones(device):
    """16 queries of a group of 4 fill 64 rows of a tile; one-query rows run in the same launch with 16."""
    check(Mixture(STEP, device, dtype=torch.float16), tile=small_tile(64), slots=12)


@pytest.mark.parametrize("token", [0, 699])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 6, 4)], ids=["plain", "sinks"])
def test_a_row_of_more_pieces_than_are_read_at_a_time(token, sinks, device):
    """In the first of them, or the last, is a logit beside which all others' exponentials overflow."""
    variant = Variant(sinks=None if sinks is None else sinks.to(device))
    mixture = Mixture([RowSpec(1, 700, scored=(0,))], device, kv_heads=1)
    page = int(mixture.page_table[0, token // 16])
    mixture.keys[page, :, token % 16] = mixture.query[0].mean(0) * 100
    check(mixture, slots=60, tile=small_tile(), variant=variant)
    assert mixture.plan.pieces > 16


def test_mergers_wait_for_more_pieces_than_run_at_a_time(device):
    """Whoever waits takes a place on the GPU. Launches follow each other on the same counters."""
    rows, context, heads = (2, 150, 1) if INTERPRETED else (24, 4000, 8)
    mixture = Mixture([RowSpec(16, context)] * rows, device, size=64, group=4, kv_heads=heads, dtype=torch.float16)
    check(mixture, slots=rows * context // 16, launches=2 if INTERPRETED else 20)
    assert mixture.plan.pieces >= (4 if INTERPRETED else 700)
    assert mixture.plan.used_items - mixture.plan.pieces == rows * 64 // work.MERGED_ROWS


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU's memory and speed")
@pytest.mark.parametrize("queries", [1, 8, 17])
def test_long_contexts(queries, device):
    specs = [RowSpec(queries, 20000), RowSpec(1, 1400, granule=1), RowSpec(1, 31), RowSpec(queries, 9001)]
    check(Mixture(specs, device, size=128, kv_heads=8, dtype=torch.bfloat16), slots=33)
