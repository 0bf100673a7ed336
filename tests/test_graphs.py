"""Which captured shape serves which step, and what a capture that fails leaves behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_aspire.graphs import Graphs, Shape


def test_a_shape_serves_what_is_a_little_smaller_and_of_its_kind() -> None:
    shape = Shape(tokens=8, block_m=16, scored=4, settles=False, work=((128, 16), (64, 0)))
    assert shape.holds(shape)
    assert shape.holds(shape._replace(work=((64, 16), (64, 0))))
    assert shape.holds(shape._replace(work=((128, 0), (64, 0))))  # merges without an entry do nothing
    assert not shape.holds(shape._replace(work=((256, 16), (64, 0))))
    assert not shape.holds(shape._replace(work=((128, 16), (64, 16))))
    assert not shape.holds(shape._replace(scored=0))
    assert not shape.holds(shape._replace(scored=8))
    assert not shape.holds(shape._replace(tokens=4))
    assert not shape.holds(shape._replace(block_m=32))
    assert not shape.holds(shape._replace(settles=True))
    assert not Shape(8, 16, 4, False, ((4096, 16), (64, 0))).holds(shape)  # at what would be felt


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_capture_that_fails_leaves_the_callers_stream_and_the_right_result() -> None:
    graphs, shape = Graphs(True), Shape(1, 16, 0, False, ())
    numbers = torch.arange(3.0, device="cuda")

    def forward() -> torch.Tensor:
        return numbers * int(numbers.sum().item())  # waits for the GPU, which a capture does not allow

    stream = torch.cuda.current_stream()
    assert graphs.run(shape, forward).tolist() == [0.0, 3.0, 6.0]
    with pytest.warns(RuntimeWarning, match="runs without CUDA graphs"):
        assert graphs.run(shape, forward).tolist() == [0.0, 3.0, 6.0]
    assert torch.cuda.current_stream() == stream
    assert graphs.run(shape, forward).tolist() == [0.0, 3.0, 6.0] and not graphs.enabled


sizes = st.sampled_from([0, 16, 32, 64, 128, 512])
shapes = st.builds(
    Shape,
    tokens=st.sampled_from([1, 32, 64]),
    block_m=st.sampled_from([16, 64]),
    scored=st.sampled_from([0, 4, 16]),
    settles=st.booleans(),
    work=st.tuples(st.tuples(sizes, sizes)),
)


@given(captured=st.lists(shapes, max_size=6), needed=shapes)
def test_a_captured_shape_is_filled_up_to_only_if_it_holds_the_work(captured: list[Shape], needed: Shape) -> None:
    graphs = Graphs(enabled=True)
    graphs._captured = dict.fromkeys(captured)  # type: ignore[arg-type]
    found = graphs.shape_for(needed)
    assert found == needed or found in captured
    assert (found.tokens, found.block_m, found.settles) == (needed.tokens, needed.block_m, needed.settles)
    assert (found.scored > 0) == (needed.scored > 0)
    assert found.scored >= needed.scored
    for (items, merges), (most_items, most_merges) in zip(needed.work, found.work, strict=True):
        assert items <= most_items <= 4 * max(items, 16) or items == most_items
        assert merges <= most_merges <= 4 * max(merges, 16) or merges == most_merges
    if needed in captured:
        assert found == needed


def test_a_shape_without_graphs_is_known_once_it_ran() -> None:
    graphs, shape = Graphs(enabled=False), Shape(1, 16, 0, False, ((16, 0),))
    assert not graphs.knows(shape)
    assert graphs.run(shape, lambda: "logits") == "logits"  # type: ignore[arg-type,return-value,comparison-overlap]
    assert graphs.knows(shape) and len(graphs) == 0
