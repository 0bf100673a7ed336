"""Every kind of prompt gives plain's tokens: masks, positions, dtypes, and prompts read in chunks."""

from __future__ import annotations

import pytest
import torch
from kit import POLICIES, Batch, aspire, plain, ragged, small, wrong_drafts
from transformers import LlamaForCausalLM

from hf_aspire.request import BOOTSTRAP, RowKind
from hf_aspire.testing import forced_drafts


def prompts() -> dict[str, Batch]:
    """Batches that differ from left-padded int64 ids with an int64 mask."""
    batch = ragged((50, 20, 35))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    holes = mask.clone()
    holes[0, [0, 7, 8, 9, 30, 48]] = 0
    holes[1, [33, 41]] = 0
    hidden = holes.clone()
    hidden[[0, 2], -1] = 0
    right = ragged((50, 20, 35), seed=1)["attention_mask"].flip(1)
    full = ragged((50, 50, 50))["input_ids"]
    gaps = torch.arange(50) * torch.tensor([1, 2, 3])[:, None]
    return {
        "holes in the mask": {"input_ids": full, "attention_mask": holes},
        "a hidden last token": {"input_ids": full, "attention_mask": hidden},
        "right padding": {"input_ids": full, "attention_mask": right},
        "position ids with gaps": {"input_ids": full, "attention_mask": torch.ones_like(full), "position_ids": gaps},
        "position ids and padding": batch | {"position_ids": (mask.cumsum(1) - 1).clamp(min=0) + 5},
        "one row of position ids": {"input_ids": full, "position_ids": torch.arange(50)[None] + 3},
        "one-token prompts": ragged((1, 1, 1)),
        "a one-token prompt": ragged((1, 60)),
        "no mask": {"input_ids": full},
        "no mask, pad tokens in the ids": {"input_ids": ids},
        "int32 ids": {"input_ids": ids.int(), "attention_mask": mask},
        "bool mask": {"input_ids": ids, "attention_mask": mask.bool()},
        "float mask": {"input_ids": ids, "attention_mask": mask.float()},
        "int32 mask": {"input_ids": ids, "attention_mask": mask.int()},
    }


@pytest.mark.parametrize("name", prompts())
def test_every_kind_of_prompt_gives_plains_tokens(model: LlamaForCausalLM, name: str) -> None:
    batch = prompts()[name]
    width = batch["input_ids"].shape[1]
    expected = plain(model, batch, max_new_tokens=14)
    for context in POLICIES:
        output = aspire(model, batch, small(context=context), max_new_tokens=14)
        assert output.sequences.dtype == expected.dtype
        assert torch.equal(output.sequences, expected), context
        output = aspire(model, batch, small(context=context, sparsity=1.0, schedule="staggered"), max_new_tokens=14)
        assert torch.equal(output.sequences, expected), context
        assert output.stats.acceptance_rate == 1
    with forced_drafts(wrong_drafts(expected, width)):
        output = aspire(model, batch, small(schedule="fixed"), max_new_tokens=14)
    assert torch.equal(output.sequences, expected)
    assert output.stats.acceptance_rate == 0


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("chunk", [3, 16, 37])
def test_prompts_read_in_chunks_give_plains_tokens(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, context: str, chunk: int
) -> None:
    monkeypatch.setattr("hf_aspire.planner.PREFILL_TOKENS", chunk)
    batch = ragged((90, 5, 40, 66))
    batch["attention_mask"][0, [3, 40, -1]] = 0
    output = aspire(model, batch, small(context=context), max_new_tokens=12)
    assert torch.equal(output.sequences, plain(model, batch, max_new_tokens=12))
    kinds = [[row.kind for row in step.rows] for step in output.stats.timeline]
    queries = [sum(row.queries for row in step.rows if row.kind is RowKind.PREFILL) for step in output.stats.timeline]
    assert max(queries) <= chunk and sum(queries) == 199
    for request in range(4):
        rows = [row for step in output.stats.timeline for row in step.rows if row.request == request]
        *full, before, _ = [0, chunk, *(row.queries for row in rows if row.kind is RowKind.PREFILL)]
        assert set(full) <= {0, chunk} and before in (chunk, chunk - BOOTSTRAP)
    assert any({RowKind.PREFILL, RowKind.DRAFT} <= set(step) for step in kinds)
    assert any({RowKind.PREFILL, RowKind.VERIFY} <= set(step) for step in kinds) or chunk == 37
