"""Any mixture of rows, any shape of heads, pages and tiles: outputs and scores equal the reference's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.mixture import TOLERANCE, Mixture, RowSpec, check_scores, distance, small_tile

from hf_aspire.kernels.mixed_attention import Variant

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On a GPU every example compiles kernels of its own.
EXAMPLES = 1000 if settings.get_current_profile_name() == "long" else 5 if DEVICE.type == "cuda" else 30


@st.composite
def scored_queries(draw, queries):
    """None; the first and perhaps another one; or three and more in a row, as a prompt's last."""
    kind = draw(st.sampled_from(["none", "first", "two", "many"]))
    if kind == "two" and queries > 1:
        return (0, draw(st.integers(1, queries - 1)))
    if kind == "many" and queries > 2:
        begin = draw(st.integers(0, queries - 3))
        return tuple(range(begin, draw(st.integers(begin + 3, queries))))
    return () if kind == "none" else (0,)


@st.composite
def rows(draw):
    if draw(st.booleans()):
        return RowSpec(1, draw(st.integers(1, 60)), granule=draw(st.sampled_from([1, 2, 4, 8, 16])))
    queries = draw(st.integers(1, 20))
    context = draw(st.integers(queries, 150))
    return RowSpec(queries, context, scored=draw(scored_queries(queries)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_mixture(dtype, data):
    draw = data.draw
    page, group, kv_heads = (draw(st.sampled_from(each)) for each in ([16, 32, 64], [1, 2, 3, 4, 8], [1, 2]))
    specs = draw(st.lists(rows(), min_size=1, max_size=5))
    size, value_size = (draw(st.sampled_from([16, 64, 80])) for _ in range(2))
    tile = small_tile(draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from([32, 64])))
    unit = draw(st.sampled_from([1, 4, 8, 16, page]))
    sinks = torch.linspace(-2, 3, group * kv_heads, device=DEVICE)
    variant = Variant(
        window=draw(st.sampled_from([0, 0, 1, 23, 64])),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        sinks=draw(st.sampled_from([None, None, sinks])),
    )
    mixture = Mixture(
        specs,
        DEVICE,
        kv_heads=kv_heads,
        group=group,
        size=size,
        value_size=value_size,
        page=page,
        dtype=dtype,
        seed=draw(st.integers(0, 1000)),
    )
    slots, slack = draw(st.integers(1, 16)), draw(st.sampled_from([0, 50]))
    output, scores = mixture.run(slots=slots, tile=tile, unit=unit, variant=variant, slack=slack)
    expected, weights = mixture.expected(variant)
    assert distance(output, expected) < TOLERANCE[dtype]
    if scores is not None:
        check_scores(mixture, scores, weights, unit)
