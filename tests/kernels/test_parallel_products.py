"""Products of the same states run together, and are those of the library to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from hf_aspire.attention import running
from hf_aspire.backends import Backend, BackendStep
from hf_aspire.parallel_products import ParallelProducts
from hf_aspire.side_streams import SideStreams

STEP = BackendStep(cast(Backend, SimpleNamespace(sides=SideStreams())))


def block(x: Tensor, q: Tensor, q_bias: Tensor, k: Tensor, k_bias: Tensor, v: Tensor, scaled: Tensor) -> list[Tensor]:
    """Query, key, value; a product of other states; one of a weight that is computed."""
    states = x.relu()
    query = functional.linear(states, q, q_bias)
    key = functional.linear(states, k, k_bias)
    value = functional.linear(states, v)
    return [query, key, value, functional.linear(query, q), functional.linear(states, scaled * 2)]


def inputs(device: torch.device, tokens: int = 5, size: int = 8) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    shapes = ((1, tokens, size), (size, size), (size,), (4, size), (4,), (4, size), (size, size))
    return [torch.randn(shape, generator=draw).to(device) for shape in shapes]


def traced(device: torch.device) -> fx.GraphModule:
    """The block as the compiler sees it after its own passes."""
    transposed = {torch.ops.aten.t.default: lambda weight: weight.permute([1, 0])}
    graph = make_fx(block, decomposition_table=transposed, tracing_mode="symbolic")(*inputs(device))
    return cast(fx.GraphModule, graph)


def test_products_of_the_same_states_become_one_operator(device: torch.device) -> None:
    graph = traced(device)
    expected = graph(*inputs(device))
    ParallelProducts()(graph.graph)
    graph.recompile()
    graph.graph.lint()
    together = graph.graph.find_nodes(op="call_function", target=torch.ops.hf_aspire.products.default)
    assert [len(node.args[1]) for node in together] == [3], "not the one of other states, nor of a computed weight"
    assert [bias is None for bias in together[0].args[2]] == [False, False, True]
    with running(STEP):
        for result, wanted in zip(graph(*inputs(device)), expected, strict=True):
            assert torch.equal(result, wanted)
        again = graph(*inputs(device, tokens=3))
    assert all(torch.equal(*pair) for pair in zip(again, block(*inputs(device, tokens=3)), strict=True))


def test_the_operator_is_what_its_fake_says(device: torch.device) -> None:
    states, weight = torch.randn(3, 8, device=device), torch.randn(4, 8, device=device)
    with running(STEP):
        torch.library.opcheck(torch.ops.hf_aspire.products, (states, [weight, weight], [None, weight[:, 0].clone()]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
def test_side_by_side_in_a_graph_they_wait_for_what_they_read_and_are_waited_for() -> None:
    """Large states and small products: without the waits, a replay would read what the one before it left."""
    draw = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(256, 4096, generator=draw, device="cuda") for _ in range(3)]
    source = torch.empty(2048, 4096, device="cuda")

    def forward() -> Tensor:
        states = source.sin().cos().exp()
        return sum(torch.ops.hf_aspire.products(states, weights, [None] * 3), start=source[:, :256])  # type: ignore[no-any-return]

    with running(STEP):
        source.normal_(generator=draw)
        forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = forward()
        for _ in range(5):
            source.normal_(generator=draw)
            graph.replay()
            assert torch.equal(result, forward())
