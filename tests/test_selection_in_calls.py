"""Selection inside a call: which weights are its scores, and that a draft reads the listed slots alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contexts import LAYERS
from kit import POLICIES, Scripted, aspire, plain, ragged, right_drafts, small, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from hf_aspire import AspireConfig
from hf_aspire.batch import MixedBatch
from hf_aspire.cache import AspireCache
from hf_aspire.request import Request, Row, RowKind
from hf_aspire.runner import Runner
from hf_aspire.selection import ContextPolicy, SparseContexts
from hf_aspire.testing import forced_drafts


@pytest.mark.parametrize("context", ["refresh", "verify", "hybrid"])
def test_a_row_back_from_plain_decoding_drafts_one_step_later(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    class Late(Scripted):
        """Decodes plainly four times, then drafts."""

        steps = 0

        def decide(self, candidates: Any) -> list[RowKind | None]:
            self.steps += 1
            self.lengths = [0 if self.steps <= 4 else 2]
            return super().decide(candidates)

    monkeypatch.setattr("hf_aspire.session.make_schedule", lambda config, cost: Late([0]))
    result = aspire(model, ragged((60,)), small(context=context), max_new_tokens=12)
    assert torch.equal(result.sequences, plain(model, ragged((60,)), max_new_tokens=12))
    kinds = [row.kind.name for step in result.stats.timeline for row in step.rows]
    assert kinds[:8] == ["PREFILL", *["DECODE"] * 5, "DRAFT", "DRAFT"]


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("context", ["refresh", "verify", "hybrid"])
def test_scores_are_the_attention_weights_of_the_last_prompt_queries_and_of_a_rounds_first_and_last(
    monkeypatch: pytest.MonkeyPatch, context: str, unit: int
) -> None:
    model = tiny_llama(attn_implementation="eager")
    config = small(context=context, granularity=unit, schedule="fsm", refresh_layer=1, sparsity=0.05)
    seen: list[tuple[Row, Tensor]] = []
    renew = SparseContexts.renew

    def note(contexts: SparseContexts, row: Row, request: Request, scores: Tensor) -> None:
        if row.kind is not RowKind.DRAFT:
            seen.append((row, scores.double()))
        renew(contexts, row, request, scores)

    monkeypatch.setattr(SparseContexts, "renew", note)
    for length in (20, 90):
        seen.clear()
        text = plain(model, ragged((length,)), max_new_tokens=14)
        with forced_drafts(right_drafts(text, length)):
            aspire(model, ragged((length,)), config, max_new_tokens=14)
        with torch.no_grad():
            attention = torch.cat(model(text, output_attentions=True).attentions)  # [layers, heads, query, token]
        assert {row.kind for row, _ in seen} == {RowKind.PREFILL, RowKind.VERIFY}
        assert max(row.queries for row, _ in seen[1:]) > 3
        for row, scores in seen:
            queries = [*range(length - 8, length)] if row is seen[0][0] else [row.start, row.context - 1]
            weights = attention[:, :, queries, : row.context]
            expected = (weights[1:2] if context == "refresh" else weights).mean((1, 2))
            expected = F.pad(expected, (0, -row.context % unit)).unflatten(1, (-1, unit)).sum(-1)
            torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)


def drafted(model: LlamaForCausalLM, config: AspireConfig) -> tuple[dict[tuple[int, int, int], int], Tensor]:
    """Every draft of a call by (row, position, how often that position was drafted before), and the text."""
    found: dict[tuple[int, int, int], int] = {}
    times: dict[tuple[int, int], int] = {}

    def note(row: int, position: int, token: int) -> int:
        again = times[row, position] = times.get((row, position), 0) + 1
        found[row, position, again] = token
        return token

    with forced_drafts(note):
        text = aspire(model, ragged((60, 15, 90)), config, max_new_tokens=14).sequences
    return found, text


def kept_slots(batch: MixedBatch, layer: int, reads_all: bool, slots: int) -> Tensor:
    """Which pool slots the rows of a batch of drafts may read in a layer."""
    kept = torch.zeros(slots, dtype=torch.bool)
    assert batch.sparse is not None
    for index, row in enumerate(batch.rows):
        if reads_all:
            for begin, end in row.request.context(row.context):
                kept[begin:end] = True
        else:
            listed = batch.sparse.slots[layer % len(batch.sparse.slots), index, : int(batch.sparse.lengths[index])]
            assert len(listed) < row.context or row.context <= 9
            kept[listed] = True
    return kept


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("context", POLICIES)
def test_a_draft_reads_the_listed_slots_and_no_others(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, context: str, listed: bool
) -> None:
    """NaN in all slots that are not listed changes no draft; other values in the first listed one do."""
    config = small(context=context, schedule="fixed")
    expected, text = drafted(model, config)
    caches: list[AspireCache] = []

    class Seen(AspireCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            caches.append(self)

    forward, layers = Runner.forward, ContextPolicy.of(config, LAYERS).draft_layers
    poisoned = 0

    def poison(runner: Runner, batch: MixedBatch) -> Tensor:
        nonlocal poisoned
        if {row.kind for row in batch.rows} != {RowKind.DRAFT}:
            return forward(runner, batch)
        saved = []
        for layer, pools in enumerate(zip(caches[-1].keys, caches[-1].values, strict=True)):
            kept = kept_slots(batch, layer, layer in layers, len(pools[0]))
            bad = kept.nonzero()[:1, 0] if listed else (~kept).nonzero()[:, 0]
            saved += [(pool, bad, pool[bad]) for pool in pools]
            poisoned += len(bad)
        for pool, bad, _ in saved:
            pool[bad] = 50.0 if listed else torch.nan
        logits = forward(runner, batch)
        for pool, bad, values in saved:
            pool[bad] = values
        return logits

    monkeypatch.setattr("hf_aspire.memory.AspireCache", Seen)
    monkeypatch.setattr(Runner, "forward", poison)
    found, same = drafted(model, config)
    assert poisoned > 20
    assert torch.equal(same, text)
    assert (found != expected) == listed
