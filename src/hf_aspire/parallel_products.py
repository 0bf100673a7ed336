"""Matrix products of the same states, side by side in compiled layers.

Few tokens leave a product of a small weight, such as that of the keys, too short to use the memory's bandwidth; three
at a time do better. Every product stays the library's own, to the bit: one larger product would need a copy of the
weights. H200, 2026-11-29, a layer of an 8B shape, 64 tokens: query, key and value 22 us (30 in turn), gate and up 65
(70).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional

from .attention import current_step
from .backends import BackendStep
from .side_streams import Side

_SIDES = Side.FIRST, Side.SECOND
"""Attention's products need two, and each keeps memory."""
_ATEN = torch.ops.aten
_VIEWS = _ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default


@torch.library.custom_op("hf_aspire::products", mutates_args=())
def _products(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Products of states `[T, K]` and weights `[N, K]`, each with its bias `[N]`, if any."""
    step = current_step()
    assert isinstance(step, BackendStep)
    sides = step.backend.sides
    products = []
    for index, (weight, bias) in enumerate(zip(weights[1:], biases[1:], strict=True)):
        with sides.fork(_SIDES[index % len(_SIDES)]):
            products.append(functional.linear(states, weight, bias))
    first = functional.linear(states, weights[0], biases[0])
    sides.join()
    return [first, *products]


@_products.register_fake
def _(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [states.new_empty(states.shape[0], weight.shape[0]) for weight in weights]


class ParallelProducts(CustomGraphPass):
    """Replaces the products of the same states by one operator, in the compiler's graph, where nothing mutates."""

    def __call__(self, graph: fx.Graph) -> None:
        """See `CustomGraphPass`."""
        groups: dict[tuple[fx.Node, str], list[_Product]] = {}
        for node in graph.nodes:
            product = _product(node)
            if product is not None:
                groups.setdefault(product.factor, []).append(product)
        for products in groups.values():
            if len(products) > 1:
                _replace(graph, products)

    def uuid(self) -> str:
        """What tells apart the compiler's cached code of different versions of this pass."""
        return "hf_aspire.parallel_products 1"


@dataclass(frozen=True)
class _Product:
    """A product in the compiler's graph.

    Attributes:
        node: It.
        states: Left factor.
        weight: Right factor, before it is transposed.
        bias: What is added, or None.
    """

    node: fx.Node
    states: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def factor(self) -> tuple[fx.Node, str]:
        """What tells left factors apart: every product has a view of its own of the same states."""
        viewed = self.states.args[0] if self.states.target in _VIEWS else self.states
        return cast(fx.Node, viewed), str(self.states.meta["val"].shape)


def _product(node: fx.Node) -> _Product | None:
    """A node as the product of states and a parameter, if it is one; a bias is a parameter, too."""
    if node.target not in (_ATEN.mm.default, _ATEN.addmm.default) or node.kwargs:
        return None
    *bias, states, transposed = cast(tuple[fx.Node, ...], node.args)
    if (transposed.target, *transposed.args[1:]) != (_ATEN.permute.default, [1, 0]):
        return None
    parameters = cast(list[fx.Node], [transposed.args[0], *bias])  # there from the start of the graph
    if any(part.op != "placeholder" for part in parameters) or any(part.meta["val"].ndim > 1 for part in bias):
        return None
    return _Product(node, states, parameters[0], bias[0] if bias else None)


def _replace(graph: fx.Graph, products: Sequence[_Product]) -> None:
    weights, biases = [product.weight for product in products], [product.bias for product in products]
    with graph.inserting_before(products[0].node):
        arguments = (products[0].states, weights, biases)
        together = graph.call_function(torch.ops.hf_aspire.products.default, arguments)
        together.meta["val"] = [product.node.meta["val"] for product in products]
        parts = [graph.call_function(operator.getitem, (together, index)) for index in range(len(products))]
    for product, part in zip(products, parts, strict=True):
        part.meta.update(product.node.meta)
        product.node.replace_all_uses_with(part)
        graph.erase_node(product.node)
