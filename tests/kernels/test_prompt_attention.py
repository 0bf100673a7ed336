"""Attention of a chunk's bulk against the float64 reference, over shuffled pages."""

import pytest
import torch
from kernels.mixture import TOLERANCE

from hf_aspire import prompt_attention
from hf_aspire.kernels import reference
from hf_aspire.prompt_attention import Bulk

PAGE, KV_HEADS, HEADS, SIZE = 16, 2, 8, 32
# On a GPU only 16-bit models come here.
DTYPES = [torch.float16, torch.bfloat16] + ([] if torch.cuda.is_available() else [torch.float32])


@pytest.mark.parametrize("cudnn", [True, False] if torch.cuda.is_available() else [False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "count"), [(0, 300), (64, 256), (301, 123)])
def test_bulk_equals_the_reference(start, count, dtype, cudnn, device, monkeypatch):
    if not cudnn:
        monkeypatch.setattr(prompt_attention, "_has_cudnn", lambda query, key: False)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    length, before, behind = start + count, 5, 9
    pools = [torch.full((40, KV_HEADS, PAGE, SIZE), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    page_table = torch.randperm(40, generator=generator)[None].int().to(device)
    tokens = torch.arange(length, device=device)
    places = page_table[0].long()[tokens // PAGE] * PAGE + tokens % PAGE
    contexts = [draw(length, KV_HEADS, SIZE) for _ in range(2)]
    for pool, context in zip(pools, contexts, strict=True):
        pool[places // PAGE, :, places % PAGE] = context
    # Other rows' tokens lie around the bulk's.
    key, value = (
        torch.cat([draw(before, KV_HEADS, SIZE), context[start:], draw(behind, KV_HEADS, SIZE)])
        for context in contexts
    )
    query = draw(HEADS, before + count + behind, SIZE).transpose(0, 1)
    bulk = Bulk(slice(before, before + count), start, 0)
    output = torch.full((before + count + behind, HEADS, SIZE), torch.nan, dtype=dtype, device=device)
    prompt_attention.attend(bulk, (query, key, value), *pools, page_table, 0.3, output)
    expected, _ = reference.paged_attention(query[bulk.tokens], *pools, places, start, 0.3)
    assert (output[bulk.tokens].double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    assert output[:before].isnan().all() and output[before + count :].isnan().all()
