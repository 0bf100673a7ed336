"""Right, wrong and strange drafts: greedy text stays plain's, and all, none or some are accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import (
    DRAFTING,
    POLICIES,
    VOCABULARY,
    Scripted,
    aspire,
    pick,
    plain,
    ragged,
    right_drafts,
    small,
    tiny_llama,
    wrong_drafts,
)
from transformers import LlamaForCausalLM

from hf_aspire.testing import forced_drafts

LENGTHS = (1, 2, 15, 200)


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("schedule", ["fsm", "fixed", "staggered"])  # `aspire` knows that these drafts save nothing
def test_full_context_drafts_are_all_accepted(model: LlamaForCausalLM, context: str, schedule: str) -> None:
    batch = ragged(LENGTHS)
    output = aspire(model, batch, small(schedule=schedule, context=context, sparsity=1.0), max_new_tokens=20)
    assert torch.equal(output.sequences, plain(model, batch, max_new_tokens=20))
    assert min(output.stats.drafted) > 0
    assert output.stats.accepted == output.stats.drafted


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("schedule", DRAFTING)
@pytest.mark.parametrize("max_draft", [1, 4])
def test_garbage_drafts_are_all_rejected(model: LlamaForCausalLM, context: str, schedule: str, max_draft: int) -> None:
    lengths = (60, 15, 33, 100)
    batch = ragged(lengths)
    expected = plain(model, batch, max_new_tokens=12)
    config = small(schedule=schedule, context=context, max_draft=max_draft)
    with forced_drafts(wrong_drafts(expected, max(lengths))):
        output = aspire(model, batch, config, max_new_tokens=12)
    assert torch.equal(output.sequences, expected)
    assert min(output.stats.drafted) > 0
    assert output.stats.acceptance_rate == 0


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_rows_that_accept_nothing_everything_or_never_draft_share_steps(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, context: str, order: tuple[int, int, int]
) -> None:
    batch, width, new = pick(ragged((60, 15, 33)), order), 60, 16
    expected = plain(model, batch, max_new_tokens=new)
    right, wrong = right_drafts(expected, width), wrong_drafts(expected, width)
    nothing, everything, never = order.index(0), order.index(1), order.index(2)
    lengths = [0 if row == never else 4 for row in range(3)]
    monkeypatch.setattr("hf_aspire.session.make_schedule", lambda config, cost: Scripted(lengths))
    with forced_drafts(lambda row, *draft: (wrong if row == nothing else right)(row, *draft)):
        output = aspire(model, batch, small(context=context), max_new_tokens=new)
    assert torch.equal(output.sequences, expected)
    stats = output.stats
    assert stats.accepted[nothing] == 0 < stats.drafted[nothing]
    assert stats.accepted[everything] == stats.drafted[everything] > 0
    assert stats.drafted[never] == 0
    assert stats.rounds[never] == [(0, 0)] * (new - 1)


# ---- drafts whose hidden states are not finite


def spoil(model: LlamaForCausalLM, token: int, part: str) -> None:
    """Makes a token's embedding NaN, or its keys or values in the second layer infinite."""
    if part == "embedding":
        with torch.no_grad():
            model.model.embed_tokens.weight[token] = torch.nan
        return
    fed: list[torch.Tensor] = []

    def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        fed[:] = args

    def overflow(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((fed[0] == token)[..., None], torch.inf)

    model.model.embed_tokens.register_forward_pre_hook(note)
    getattr(model.model.layers[1].self_attn, part).register_forward_hook(overflow)


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("part", ["embedding", "k_proj", "v_proj"])
def test_a_rejected_draft_whose_hidden_states_are_not_finite_changes_nothing(context: str, part: str) -> None:
    """In float16 a token that plain never feeds may overflow, from the first layer on or in a later one."""
    model, batch, new = tiny_llama(), ragged((12, 30, 5)), 9
    text = plain(model, batch, max_new_tokens=new)
    strange = next(token for token in range(2, VOCABULARY) if token not in text)
    spoil(model, strange, part)
    right = right_drafts(text, 30)
    config = small(schedule="fixed", context=context)
    with forced_drafts(lambda row, position, token: strange if position % 3 == row else right(row, position, token)):
        output = aspire(model, batch, config, max_new_tokens=new)
    assert torch.equal(output.sequences, text)
    assert 0 < sum(output.stats.accepted) < sum(output.stats.drafted)


@pytest.mark.parametrize("part", ["embedding", "k_proj", "v_proj"])
def test_an_accepted_draft_whose_hidden_states_are_not_finite_is_an_error(part: str) -> None:
    """Plain feeds it too, and all scores behind it are NaN; a draft that is not fed any more does no harm."""
    model, batch = tiny_llama(), ragged((12, 30))
    text = plain(model, batch, max_new_tokens=9)
    bad = next(token for token in text[1, 32:].tolist() if token not in text[0] and token not in text[1, :32])
    place = text[1].tolist().index(bad)
    spoil(model, bad, part)
    with forced_drafts(right_drafts(text, 30)):
        output = aspire(model, batch, small(schedule="fixed"), max_new_tokens=place - 29)
        assert torch.equal(output.sequences, text[:, : place + 1])
        with pytest.raises(ValueError, match=f"row 1, new token {place - 29}: got nan as the highest score"):
            aspire(model, batch, small(schedule="fixed"), max_new_tokens=9)
