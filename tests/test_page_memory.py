"""Little page memory, or memory full of NaN, changes no text; too little for one row is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import POLICIES, TOKEN_BYTES, aspire, pick, plain, ragged, small
from transformers import LlamaForCausalLM

from hf_aspire.cache import AspireCache
from hf_aspire.planner import pages_for

LENGTHS = (1, 2, 15, 200)


@pytest.mark.parametrize("context", POLICIES)
def test_rows_that_do_not_fit_wait_for_pages(model: LlamaForCausalLM, context: str) -> None:
    batch, new = pick(ragged((40, 30, 12, 7)), [0, 1, 0, 2, 3, 1]), 12
    pages = pages_for(40, new, 4) + 4
    config = small(context=context, kv_memory=pages * 4 * TOKEN_BYTES)
    output = aspire(model, batch, config, max_new_tokens=new)
    assert torch.equal(output.sequences, plain(model, batch, max_new_tokens=new))
    starts = [
        min(i for i, step in enumerate(output.stats.timeline) for r in step.rows if r.request == row)
        for row in range(6)
    ]
    assert starts[0] == 0 and max(starts) > new / 5  # a second wave started when others had finished
    assert len(set(starts)) > 2


def test_a_row_that_never_fits_is_refused_with_both_sizes(model: LlamaForCausalLM) -> None:
    pages = pages_for(40, 12, 4)
    size = 4 * TOKEN_BYTES
    assert aspire(model, ragged((40,)), small(kv_memory=pages * size), max_new_tokens=12).stats.committed == [12]
    with pytest.raises(ValueError, match=rf"{pages * size:,} bytes.*{(pages - 1) * size:,} bytes.*kv_memory"):
        aspire(model, ragged((40,)), small(kv_memory=pages * size - 1), max_new_tokens=12)


@pytest.mark.parametrize("context", POLICIES)
def test_page_memory_that_holds_nan_is_never_read(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    class Poisoned(AspireCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for pool in (*self.keys, *self.values):
                pool.fill_(torch.nan)

    monkeypatch.setattr("hf_aspire.memory.AspireCache", Poisoned)
    batch = ragged(LENGTHS)
    batch["attention_mask"][2, -1] = 0
    output = aspire(model, batch, small(context=context, schedule="staggered"), max_new_tokens=12)
    assert torch.equal(output.sequences, plain(model, batch, max_new_tokens=12))
    assert output.stats.mixed_steps > 0
