"""Which captured shape serves which step, and what a capture that fails leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_aspire.graphs import Graphs, Needs, Shape
from hf_aspire.side_streams import one_capture


def test_a_shape_serves_what_is_smaller_and_of_its_kind() -> None:
    shape = Shape(tokens=8, block_m=16, scored=4, settles=False, work=(128, 64))
    needs = Needs(tokens=8, block_m=16, scored=4, settles=False, work=(128, 64), queries_per_tile=4)
    assert needs.fit(shape)
    assert needs._replace(work=(64, 1)).fit(shape)
    assert not needs._replace(work=(129, 64)).fit(shape)
    assert not needs._replace(work=(128, 65)).fit(shape)
    assert not needs._replace(scored=0).fit(shape)
    assert not needs._replace(scored=5).fit(shape)
    assert not needs._replace(tokens=9).fit(shape)
    assert not needs._replace(block_m=32).fit(shape)
    assert not needs._replace(settles=True).fit(shape)
    assert needs._replace(work=(129, 65)).fit_but_for_work(shape)
    assert not needs._replace(scored=5).fit_but_for_work(shape)
    # The tokens that fill the batch up take items, too: five of them two tiles.
    assert needs._replace(tokens=3).room_in(shape) == (126, 62)
    assert needs._replace(tokens=3, work=(126, 62)).fit(shape)
    assert not needs._replace(tokens=3, work=(127, 62)).fit(shape)


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


def test_captures_take_turns_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels keep its priority, and all captures of a process share the streams beside it."""
    seen: list[tuple[object, bool]] = []

    @contextmanager
    def capturing(*arguments: object, stream: object, **keywords: object) -> Iterator[None]:
        seen.append((stream, one_capture.locked()))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr("hf_aspire.graphs.capture_stream", lambda: "urgent")
    graphs, shape = Graphs(True), Shape(2, 16, 0, False, ())
    graphs.run(shape, lambda: torch.ones(1))
    graphs._capture(shape, lambda: torch.ones(1))
    assert seen == [("urgent", True)] and not one_capture.locked()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ValueError("the cause")])
def test_what_ends_a_capture_is_not_hidden_by_what_ending_it_raises(
    stop: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def capturing(*arguments: object, **keywords: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("unjoined work")  # as CUDA does where a side stream was left in the capture

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr("hf_aspire.graphs.capture_stream", lambda: None)
    graphs, shape, failing = Graphs(True), Shape(2, 16, 0, False, ()), [False]

    def forward() -> torch.Tensor:
        if failing[0]:
            failing[0] = False
            raise stop
        return torch.ones(1)

    graphs.run(shape, forward)
    failing[0] = True
    if isinstance(stop, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            graphs.run(shape, forward)
    else:
        with pytest.warns(RuntimeWarning, match="ValueError: the cause"):
            assert graphs.run(shape, forward).tolist() == [1.0]
    assert not one_capture.locked()


def never(shape: Shape) -> bool:
    """The work cannot be cut in another way."""
    return False


mixtures = st.builds(
    Needs,
    tokens=st.integers(1, 300),
    block_m=st.sampled_from([16, 64]),
    scored=st.integers(0, 20),
    settles=st.booleans(),
    work=st.tuples(st.integers(1, 900)),
    queries_per_tile=st.just(4),
)


@given(steps=st.lists(mixtures, max_size=30))
def test_every_step_gets_a_shape_that_its_work_fits_into(steps: list[Needs]) -> None:
    """Whatever was captured before; and a shape that is needed often gets a graph of about its size."""
    graphs = Graphs(enabled=True)
    filling: Counter[Shape] = Counter()

    def ask(needs: Needs) -> bool:
        shape, least = graphs.shape_for(needs, never), needs.least
        assert needs.fit(least) and needs.fit(shape)
        assert shape == least or shape in graphs._captured
        assert shape == least or least not in graphs._captured
        near = shape.tokens == least.tokens and shape.size[1] <= 4 * max(least.size[1], 32)
        filling[least] += 0 if near else max(shape.tokens - least.tokens, 1)
        if shape not in graphs._captured:
            graphs._captured[shape] = None  # type: ignore[assignment]
        return near

    for needs in steps:
        ask(needs)
        ask(needs)
    for needs in steps[:3]:
        assert any(ask(needs) for _ in range(520))
    most = max((shape.tokens for shape in graphs._captured), default=0)
    assert all(cost < 8192 + most for cost in filling.values())


def test_what_was_not_seen_before_makes_do_with_a_larger_shape_while_that_costs_less_than_a_capture() -> None:
    graphs = Graphs(enabled=True)
    large = Needs(250, 16, 4, True, (500,), 4)
    assert graphs.shape_for(large, never) == large.least
    graphs._captured[large.least] = None  # type: ignore[assignment]
    small = large._replace(tokens=40, work=(50,))
    assert large.least.tokens - small.least.tokens == 256 - 64
    assert [graphs.shape_for(small, never) for _ in range(44)] == [large.least] * 43 + [small.least]  # 43 * 192 > 8192
    much = large._replace(tokens=249, work=(50,))  # as many tokens, far fewer items
    assert [graphs.shape_for(much, never) for _ in range(513)] == [large.least] * 512 + [much.least]
    more = large._replace(tokens=249, work=(600,))  # more items than it has room for
    assert [graphs.shape_for(more, lambda shape: True) for _ in range(513)] == [large.least] * 512 + [more.least]


sizes = st.builds(
    lambda tokens, items: Needs(tokens, 16, 0, True, (items,), 4),
    st.integers(1, 300),
    st.integers(1, 900),
)


@given(captured=st.lists(sizes, min_size=2, max_size=20), needs=sizes, most=st.integers(1, 1200), full=st.booleans())
def test_the_smallest_shape_that_does_is_taken_with_the_work_cut_if_need_be(
    captured: list[Needs], needs: Needs, most: int, full: bool
) -> None:
    """Even where a larger one would do without, and where no more can be captured."""
    graphs = Graphs(enabled=True)
    graphs._captured.update((each.least, None) for each in captured)  # type: ignore[misc]

    def serves(shape: Shape) -> bool:
        return needs.fit(shape) or (needs.fit_but_for_work(shape) and shape.work[0] >= most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_aspire.graphs._is_near", lambda least, shape: False)
        patch.setattr("hf_aspire.graphs._PATIENCE", 0 if full else 8192)
        patch.setattr("hf_aspire.graphs.MOST_GRAPHS", len(graphs) if full else 96)
        shape = graphs.shape_for(needs, lambda shape: shape.work[0] >= most)
    serving = [each for each in graphs._captured if serves(each)]
    if needs.least in graphs._captured or not serving:
        assert shape == needs.least
    else:
        assert shape == min(serving, key=lambda each: (each.tokens, sum(each.work)))


def test_where_no_more_can_be_captured_what_was_captured_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_aspire.graphs.MOST_GRAPHS", 1)
    graphs, large = Graphs(enabled=True), Needs(250, 16, 4, True, (500,), 4)
    graphs._captured[large.least] = None  # type: ignore[assignment]
    small = large._replace(tokens=40, work=(50,))
    assert {graphs.shape_for(small, never) for _ in range(100)} == {large.least}


def test_a_shape_without_graphs_is_known_once_it_ran() -> None:
    graphs, shape = Graphs(enabled=False), Shape(1, 16, 0, False, (16,))
    assert not graphs.knows(shape)
    assert graphs.run(shape, lambda: "logits") == "logits"  # type: ignore[arg-type,return-value,comparison-overlap]
    assert graphs.knows(shape) and len(graphs) == 0
