"""The Triton backend against the reference backend: the same rows, lists and scores in every layer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_aspire.backends import TorchBackend
from hf_aspire.cache import LayerSpec
from hf_aspire.request import Request, Row
from hf_aspire.selection import ContextPolicy, SparseView
from hf_aspire.triton_backend import TritonBackend

LAYERS, KV_HEADS, HEADS, SIZE, PAGE = 3, 2, 4, 16, 4
POLICIES = {
    "window": ContextPolicy(LAYERS, 1, (), (), False),
    "refresh": ContextPolicy(LAYERS, 1, (1,), (1,), True),
    "verify": ContextPolicy(LAYERS, LAYERS, tuple(range(LAYERS)), (), False),
    "hybrid": ContextPolicy(LAYERS, LAYERS, tuple(range(LAYERS)), (1,), False),
}


def request_of(index, length, pages, drafts=0):
    zeros = np.zeros(1, dtype=np.int64)
    mine = Request(index, zeros, zeros, 1, 9, 0, length=length, drafts=[1] * drafts, pages=pages)
    mine.runs = [(page * PAGE, (page + 1) * PAGE) for page in pages]
    return mine


def rows_and_batch(lists, device):
    """A draft, a decode row, a verify row and a prompt's end over shuffled pages."""
    order = np.random.default_rng(0).permutation(40).tolist()
    taken = [order[0:8], order[8:12], order[12:20], order[20:28]]
    draft = Row.draft(request_of(0, 25, taken[0], drafts=1), scored=True)
    decode = Row.verify(request_of(1, 11, taken[1]), scored=True)
    verify = Row.verify(request_of(2, 26, taken[2], drafts=3), scored=True)
    prompt = request_of(3, 0, taken[3])
    prompt.columns = prompt.positions = np.arange(21)
    prompt.kept = 20  # the last prompt token keeps nothing
    rows = [draft, decode, verify, Row.prefill(prompt, 21, scored=True)]
    trash = 40 * PAGE
    slots = []
    for row in rows:
        context = np.concatenate([np.arange(b, e) for b, e in row.request.context(row.context)])
        slots += context[row.start :].tolist() + [trash] * (row.queries - (row.context - row.start))
    chosen = np.concatenate([np.arange(b, e) for b, e in draft.request.context(draft.context)])[2::3]
    listed = torch.tensor(np.stack([np.roll(chosen, 0) for _ in range(lists)]))[:, None]
    page_table = torch.zeros(4, 8, dtype=torch.int32)
    for index, pages in enumerate(taken):
        page_table[index, : len(pages)] = torch.tensor(pages)
    counts = [row.queries for row in rows]
    batch = SimpleNamespace(
        rows=rows,
        offsets=[0, *np.cumsum(counts)[:-1].tolist()],
        token_ids=torch.zeros(1, sum(counts), dtype=torch.int64, device=device),
        tokens=sum(counts),
        write_slots=torch.tensor(slots, device=device),
        draft_index=torch.tensor([0], device=device),
        sparse=SparseView(listed.to(device), torch.tensor([len(chosen)], device=device)),
    )
    return batch, page_table.to(device)


@pytest.mark.parametrize("name", POLICIES)
def test_equals_the_reference_backend(name, device):
    policy = POLICIES[name]
    batch, page_table = rows_and_batch(policy.lists, device)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    paged = [draw(2, 41, KV_HEADS, PAGE, SIZE) for _ in range(LAYERS)]
    flat = [[pool.transpose(1, 2).reshape(-1, KV_HEADS, SIZE).clone() for pool in pools] for pools in paged]
    cache = SimpleNamespace(
        keys=[k for k, _ in paged], values=[v for _, v in paged], page_table=page_table, page_size=PAGE
    )
    plain = SimpleNamespace(keys=[k for k, _ in flat], values=[v for _, v in flat])
    spec = LayerSpec(HEADS, KV_HEADS, SIZE, SIZE, torch.float32, device, 0.25)
    backends = TritonBackend(cache, [spec] * LAYERS, policy), TorchBackend(plain, policy)
    for backend in backends:
        backend.plan(batch)
    for layer in range(LAYERS):
        inputs = draw(batch.tokens, HEADS, SIZE), *draw(2, batch.tokens, KV_HEADS, SIZE)
        got, expected = (backend.run(layer, *inputs, 0.25) for backend in backends)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        stored = cache.keys[layer].transpose(1, 2).reshape(-1, KV_HEADS, SIZE)
        torch.testing.assert_close(stored[: 40 * PAGE], plain.keys[layer][: 40 * PAGE])
    for index in range(len(batch.rows)):
        if policy.full_layers and (policy.draft_layers or index):
            got, expected = (backend.scores(index) for backend in backends)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_layers_of_different_shapes_are_refused(device):
    spec = LayerSpec(HEADS, KV_HEADS, SIZE, SIZE, torch.float32, device, 0.25)
    other = LayerSpec(HEADS, KV_HEADS, SIZE, 2 * SIZE, torch.float32, device, 0.25)
    with pytest.raises(ValueError, match="2 shapes"):
        TritonBackend(SimpleNamespace(page_size=PAGE), [spec, other], POLICIES["window"])
