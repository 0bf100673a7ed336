"""What is forked off a captured forward is waited for before what it reads or writes is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit import plain, ragged, tiny_llama

import hf_aspire
from hf_aspire import AspireConfig, side_streams, triton_backend
from hf_aspire.backends import BackendChoice
from hf_aspire.device_lists import DeviceLists
from hf_aspire.side_streams import Side, SideStreams


@pytest.mark.parametrize("context", ["verify", "refresh"])
def test_scores_are_reduced_before_others_take_their_place_and_before_lists_are_made(
    context: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A GPU runs the reduction whenever it likes until the join: here, every fork counts as running until then."""
    running, seen = [False], {"scored": 0, "renewed": 0}
    attention, renew = triton_backend.mixed_attention, DeviceLists.renew

    @contextmanager
    def fork(self: SideStreams, side: Side) -> Iterator[None]:
        yield
        running[0] = True

    def attend(*arguments: Any) -> None:
        raw_scores = arguments[9]
        if raw_scores is not None:
            assert not running[0], "the raw scores of the layer before are still being read"
            seen["scored"] += 1
        attention(*arguments)

    def make(self: DeviceLists, *arguments: Any) -> None:
        assert not running[0], "the scores are still being written"
        seen["renewed"] += 1
        renew(self, *arguments)

    monkeypatch.setattr("hf_aspire.session.choose_backend", lambda config, layers: BackendChoice("triton", ""))
    monkeypatch.setattr(SideStreams, "fork", fork)
    monkeypatch.setattr(SideStreams, "join", lambda self: running.__setitem__(0, False))
    monkeypatch.setattr(triton_backend, "mixed_attention", attend)
    monkeypatch.setattr(DeviceLists, "renew", make)
    model = tiny_llama(num_hidden_layers=2).float().to(device)
    batch = {name: tensor.to(device) for name, tensor in ragged((40, 33)).items()}
    config = AspireConfig(
        min_pages=1,
        recent_pages=1,
        context=context,
        schedule="fixed",
        draft_length=2,
        compile=False,
        cuda_graphs=False,
    )
    text = hf_aspire.generate(model, **batch, max_new_tokens=8, do_sample=False, aspire_config=config)
    assert torch.equal(text, plain(model, batch, max_new_tokens=8))
    assert seen["scored"] > 2 and seen["renewed"] > 1


def test_forks_outside_a_capture_run_in_place() -> None:
    sides = SideStreams()
    order = []
    with sides.fork(Side.FIRST):
        order.append("forked")
    order.append("behind")
    sides.join()
    assert order == ["forked", "behind"]


def test_forks_of_a_capture_that_failed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later capture must not wait for a stream that is no part of it: CUDA would end it."""
    capturing: set[object] = set()
    current, waited = ["main"], []

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            waited.append((str(self), str(other)))
            if other in capturing:  # a stream that waits for a captured one is captured, too
                capturing.add(self)

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr("hf_aspire.side_streams._stream", lambda device, side: Stream(f"side {side:d}"))
    monkeypatch.setattr("hf_aspire.side_streams._capturing", lambda: current[-1] in capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(current[-1]))
    monkeypatch.setattr(torch.cuda, "stream", on)
    sides = SideStreams()
    capturing.add("main")
    with sides.fork(Side.SECOND):
        pass
    capturing.clear()  # the capture failed before the join
    waited.clear()
    capturing.add("main")
    with sides.fork(Side.FIRST):
        pass
    sides.join()
    assert waited == [("side 0", "main"), ("main", "side 0")]


def test_every_side_is_a_stream_of_its_own_and_reductions_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append((device, priority)) or len(made))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    side_streams._stream.cache_clear()
    try:
        streams = [side_streams.capture_stream(), *(side_streams._stream(5, side) for side in Side)]
        assert side_streams.capture_stream() == streams[0]  # cuBLAS keeps memory for each
    finally:
        side_streams._stream.cache_clear()
    assert len(set(streams)) == 4
    urgent, idle = (5, -1), (5, 0)
    assert made == [urgent, urgent, urgent, idle]
