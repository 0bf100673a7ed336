"""The Triton backend against the reference backend: the same rows, lists and scores in every layer."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kernels.mixture import check_codes, coded_scores

from hf_aspire import prompt_attention
from hf_aspire.backends import TorchBackend
from hf_aspire.cache import LayerSpec
from hf_aspire.request import Request, Row, RowKind
from hf_aspire.selection import ContextPolicy, SparseView
from hf_aspire.triton_backend import TritonBackend

LAYERS, KV_HEADS, HEADS, SIZE, PAGE = 3, 2, 4, 16, 4
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
POLICIES = {
    "window": ContextPolicy(LAYERS, 1, (), (), 1),
    "refresh": ContextPolicy(LAYERS, 1, (1,), (1,), 8),
    "verify": ContextPolicy(LAYERS, LAYERS, tuple(range(LAYERS)), (), 1),
    "hybrid": ContextPolicy(LAYERS, LAYERS, tuple(range(LAYERS)), (1,), 1),
}


def request_of(index, length, pages, drafts=0):
    zeros = np.zeros(1, dtype=np.int64)
    mine = Request(index, zeros, zeros, 1, 9, 0, length=length, drafts=[1] * drafts, pages=pages)
    mine.runs = [(page * PAGE, (page + 1) * PAGE) for page in pages]
    return mine


def prompt_of(index, tokens, pages, kept=None):
    mine = request_of(index, 0, pages)
    mine.columns = mine.positions = np.arange(tokens)
    mine.kept = tokens if kept is None else kept
    return mine


def batch_of(rows, trash, device, sparse=None):
    """The rows as a packed batch; tokens past a row's context go to the slot `trash`."""
    slots = []
    for row in rows:
        context = np.concatenate([np.arange(b, e) for b, e in row.request.context(row.context)])
        slots += context[row.start :].tolist() + [trash] * (row.queries - (row.context - row.start))
    offsets = np.cumsum([0, *(row.queries for row in rows)]).tolist()
    drafts = [offset for row, offset in zip(rows, offsets, strict=False) if row.kind is RowKind.DRAFT]
    return SimpleNamespace(
        rows=rows,
        offsets=offsets[:-1],
        token_ids=torch.zeros(1, offsets[-1], dtype=torch.int64, device=device),
        tokens=offsets[-1],
        write_slots=torch.tensor(slots, device=device),
        draft_index=torch.tensor(drafts, dtype=torch.int64, device=device),
        sparse=sparse,
    )


def sparse_of(draft, lists, device):
    """Lists of every third token of a draft row's context, the last one included."""
    context = np.concatenate([np.arange(b, e) for b, e in draft.request.context(draft.context)])
    listed = torch.tensor(np.stack([context[::-3][::-1]] * lists))[:, None]
    return SparseView(listed.to(device), torch.tensor([listed.shape[2]], device=device))


def page_table_of(taken, device):
    table = torch.zeros(len(taken), max(map(len, taken)), dtype=torch.int32)
    for index, pages in enumerate(taken):
        table[index, : len(pages)] = torch.tensor(pages)
    return table.to(device)


class Pair:
    """Both backends over pools of the same random numbers."""

    def __init__(self, policy, pages, page_table, dtype, device):
        self.policy, self.dtype, self.device = policy, dtype, device
        self.generator = torch.Generator().manual_seed(1)
        paged = self.draw(LAYERS, 2, pages + 1, KV_HEADS, PAGE, SIZE)
        flat = paged.transpose(3, 4).reshape(LAYERS, 2, -1, KV_HEADS, SIZE)
        self.cache = SimpleNamespace(keys=paged[:, 0], values=paged[:, 1], page_table=page_table, page_size=PAGE)
        self.plain = SimpleNamespace(keys=flat[:, 0], values=flat[:, 1])
        spec = LayerSpec(HEADS, KV_HEADS, SIZE, SIZE, dtype, device, 0.25)
        self.backends = TritonBackend(self.cache, [spec] * LAYERS, policy), TorchBackend(self.plain, policy)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def check(self, batch):
        """Outputs, stored keys and scores of a forward on random states."""
        for backend in self.backends:
            backend.plan(batch)
        block = self.backends[0]._tables.tile.block_n
        for layer in range(LAYERS):
            states = self.draw(batch.tokens, HEADS + 2 * KV_HEADS, SIZE).split([HEADS, KV_HEADS, KV_HEADS], 1)
            got = self.backends[0].run(layer, *states, 0.25)
            with patch("hf_aspire.backends.reference.reduce_scores", lambda w, unit: coded_scores(w, block, unit)):
                expected = self.backends[1].run(layer, *states, 0.25)
            torch.testing.assert_close(got, expected, **TOLERANCE[self.dtype])
            stored = self.cache.keys[layer].transpose(1, 2).reshape(-1, KV_HEADS, SIZE)
            torch.testing.assert_close(stored[:-PAGE], self.plain.keys[layer][:-PAGE])
        for index, row in enumerate(batch.rows):
            if row.scored and self.policy.full_layers and (self.policy.draft_layers or row.kind is not RowKind.DRAFT):
                got, expected = (backend.scores(index) for backend in self.backends)
                check_codes(got, expected)


def rows_and_batch(lists, device):
    """A draft, a decode row, a verify row and a prompt's end over shuffled pages."""
    order = np.random.default_rng(0).permutation(40).tolist()
    taken = [order[0:8], order[8:12], order[12:20], order[20:28]]
    draft = Row.draft(request_of(0, 25, taken[0], drafts=1), scored=True, read=0.0)
    decode = Row.verify(request_of(1, 11, taken[1]), scored=True)
    verify = Row.verify(request_of(2, 26, taken[2], drafts=3), scored=True)
    prompt = prompt_of(3, 21, taken[3], kept=20)  # the last prompt token keeps nothing
    rows = [draft, decode, verify, Row.prefill(prompt, 21, scored=True)]
    return batch_of(rows, 40 * PAGE, device, sparse_of(draft, lists, device)), page_table_of(taken, device)


@pytest.mark.parametrize("name", POLICIES)
def test_equals_the_reference_backend(name, device):
    policy = POLICIES[name]
    batch, page_table = rows_and_batch(policy.lists, device)
    Pair(policy, 40, page_table, torch.float32, device).check(batch)


@pytest.mark.parametrize("name", ["refresh", "verify"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16])
def test_long_prompt_chunks_are_read_in_bulk(name, dtype, device, monkeypatch):
    """Two prompts in chunks beside a draft and a verify row; the last token of one prompt keeps nothing."""
    order = np.random.default_rng(0).permutation(200).tolist()
    taken = [order[0:8], order[8:16], order[16:91], order[91:176]]
    pair = Pair(POLICIES[name], 200, page_table_of(taken, device), dtype, device)
    draft = Row.draft(request_of(0, 25, taken[0], drafts=1), scored=True, read=0.0)
    verify = Row.verify(request_of(1, 26, taken[1], drafts=3), scored=True)
    first, second = prompt_of(2, 300, taken[2]), prompt_of(3, 340, taken[3], kept=339)
    read = []
    attend = prompt_attention.attend
    monkeypatch.setattr(prompt_attention, "LEAST_QUERIES", 128)
    monkeypatch.setattr(prompt_attention, "attend", lambda bulk, *others: read.append(bulk) or attend(bulk, *others))
    for chunks, bulks in (
        ([(first, 160), (second, 200)], [(0, 152), (0, 192)]),
        ([(first, 128), (second, 140)], [(160, 280), (200, 332)]),
        ([(first, 12)], []),
    ):
        prompts = [Row.prefill(prompt, chunk, scored=True) for prompt, chunk in chunks]
        rows = [draft, prompts[0], verify, *prompts[1:]]
        read.clear()
        pair.check(batch_of(rows, 200 * PAGE, device, sparse_of(draft, pair.policy.lists, device)))
        assert [(bulk.start, bulk.length) for bulk in read] == bulks * LAYERS
        for prompt, chunk in chunks:
            prompt.prefilled += chunk


@pytest.mark.parametrize(
    ("dtype", "key_size", "value_size", "served"),
    [
        (torch.bfloat16, 128, 128, True),
        (torch.float16, 256, 256, True),
        (torch.float32, 128, 128, False),
        (torch.bfloat16, 192, 128, False),
        (torch.bfloat16, 100, 100, False),
    ],
)
def test_which_layers_read_prompts_in_bulk(dtype, key_size, value_size, served, device):
    assert prompt_attention.serves(LayerSpec(8, 2, key_size, value_size, dtype, device, 1.0)) == served


def test_layers_of_different_shapes_are_refused(device):
    spec = LayerSpec(HEADS, KV_HEADS, SIZE, SIZE, torch.float32, device, 0.25)
    other = LayerSpec(HEADS, KV_HEADS, SIZE, 2 * SIZE, torch.float32, device, 0.25)
    with pytest.raises(ValueError, match="2 shapes"):
        TritonBackend(SimpleNamespace(page_size=PAGE), [spec, other], POLICIES["window"])
