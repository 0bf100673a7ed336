"""Many calls of random sizes on a GPU: the right text every time, and nothing that grows."""

from __future__ import annotations

import random

import pytest
import torch
from kit import plain, ragged, tiny_llama

import hf_aspire
from hf_aspire import AspireConfig
from hf_aspire.graphs import MOST_GRAPHS
from hf_aspire.workspace import workspaces

MODEL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU's allocator and graphs")


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_graphs_and_compilations_stay_bounded(compiled: bool) -> None:
    model = tiny_llama().float().cuda()
    draw = random.Random(0)
    config = AspireConfig(
        min_pages=1, recent_pages=1, sparsity=0.1, schedule="staggered", draft_length=3, max_draft=7,
        cuda_graphs=True, compile=compiled,
    )  # fmt: skip
    torch._dynamo.utils.counters.clear()
    allocated = []
    for call in range(50):
        # The largest batch comes early, so that everything has its final size.
        lengths = [700] * 6 if call == 3 else [draw.randint(5, 700) for _ in range(draw.randint(1, 6))]
        batch = {name: tensor.cuda() for name, tensor in ragged(lengths, seed=call).items()}
        new = 40 if call == 3 else draw.randint(16, 40)
        text = hf_aspire.generate(model, **batch, max_new_tokens=new, do_sample=False, aspire_config=config)
        assert torch.equal(text, plain(model, batch, max_new_tokens=new))
        del text, batch
        allocated.append(torch.cuda.memory_allocated())
    growth = max(allocated[5:]) - allocated[4]
    graphs = workspaces._kept[model][1].graphs
    assert growth < 64 << 20, f"{growth:,} bytes more than after the fifth call"  # graphs of new shapes keep their own
    assert 0 < len(graphs) <= MOST_GRAPHS
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (4 if compiled else 0)
    hf_aspire.release(model)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < allocated[4]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_runs_on_the_gpu_that_it_is_on() -> None:
    model = tiny_llama(**MODEL).float().to("cuda:1")
    batch = {name: tensor.to("cuda:1") for name, tensor in ragged((200, 90)).items()}
    config = AspireConfig(min_pages=1, recent_pages=1, schedule="fixed", cuda_graphs=True)
    text = hf_aspire.generate(model, **batch, max_new_tokens=20, do_sample=False, aspire_config=config)
    assert torch.equal(text, plain(model, batch, max_new_tokens=20))
    assert torch.cuda.current_device() == 0
