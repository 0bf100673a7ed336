"""A text stops where plain's stops, and no draft goes further: end tokens and length limits."""

from __future__ import annotations

import pytest
import torch
from kit import (
    DRAFTING,
    SCHEDULES,
    aspire,
    check_counts,
    mixed_drafts,
    new_tokens,
    plain,
    ragged,
    right_drafts,
    small,
    verified,
    wrong_drafts,
)
from transformers import LlamaForCausalLM

from hf_aspire import AspireStats
from hf_aspire.request import RowKind
from hf_aspire.testing import forced_drafts
from hf_aspire.timeline import RowRecord

LENGTHS = (1, 2, 15, 200)


# ---- end tokens


@pytest.mark.parametrize("accepting", [True, False])
def test_eos_at_every_generated_position_stops_where_plain_stops(model: LlamaForCausalLM, accepting: bool) -> None:
    batch, width, new = ragged(LENGTHS), max(LENGTHS), 11
    text = plain(model, batch, max_new_tokens=new)
    config = small(schedule="staggered", draft_length=4, sparsity=1.0)
    cut = 0
    for end in sorted(set(text[:, width:].flatten().tolist())):
        keywords = {"max_new_tokens": new, "eos_token_id": [end], "pad_token_id": 47}
        expected = plain(model, batch, **keywords)
        with forced_drafts(wrong_drafts(text, width) if not accepting else lambda row, position, token: token):
            output = aspire(model, batch, config, **keywords)
        assert torch.equal(output.sequences, expected), f"EOS {end}"
        check_counts(output, width, [end])
        stats = output.stats
        assert stats.accepted == (stats.drafted if accepting else [0] * len(LENGTHS))
        cut += sum(new_tokens(stats, row) > stats.committed[row] for row in range(len(LENGTHS)))
    assert cut > 10 if accepting else cut == 0


def test_nothing_is_drafted_behind_a_drafted_eos(model: LlamaForCausalLM) -> None:
    batch = ragged([30])
    text = plain(model, batch, max_new_tokens=12)[0, 30:].tolist()
    for place in range(1, 12):
        end = text[place]
        first = text.index(end)
        config = small(schedule="fixed", draft_length=12, max_draft=12, sparsity=1.0)
        stats = aspire(model, batch, config, max_new_tokens=20, eos_token_id=end).stats
        assert stats.rows_drafted == first
        assert verified(stats) == [[]] + [[]] * first + ([[first]] if first else [])


def last_row(stats: AspireStats, request: int) -> RowRecord:
    """The record of a request's last row."""
    return [row for step in stats.timeline for row in step.rows if row.request == request][-1]


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_every_verified_draft_counts_as_drafted_unless_it_stands_behind_a_stop(
    model: LlamaForCausalLM, share: float
) -> None:
    """A round of five drafts that keeps two is (5, 2): what was drafted behind the rejection was drafted in vain."""
    batch, width, new = ragged(LENGTHS), max(LENGTHS), 14
    text = plain(model, batch, max_new_tokens=new)
    end = int(text[3, width + 9])
    for ends in (None, [end]):
        with forced_drafts(mixed_drafts(text, width, share)):
            stats = aspire(model, batch, small(schedule="fixed"), max_new_tokens=new, eos_token_id=ends).stats
        for step in stats.timeline:
            for row in step.rows:
                if row.kind is not RowKind.VERIFY:
                    continue
                stopped = stats.committed[row.request] < new and row.place == last_row(stats, row.request).place
                behind = max(0, row.queries - 1 - row.committed) if stopped else 0
                assert row.drafted == row.queries - 1 - behind
        assert sum(stats.drafted) <= stats.rows_drafted


# ---- limits


@pytest.mark.parametrize("schedule", DRAFTING)
@pytest.mark.parametrize("accepting", [True, False])
def test_every_length_limit_is_met_exactly(model: LlamaForCausalLM, schedule: str, accepting: bool) -> None:
    batch, width, most = ragged(LENGTHS), max(LENGTHS), 4
    text = plain(model, batch, max_new_tokens=2 * most + 1)
    config = small(schedule=schedule, draft_length=most, initial_draft=most, max_draft=most)
    for new in range(1, 2 * most + 2):
        with forced_drafts((right_drafts if accepting else wrong_drafts)(text, width)):
            output = aspire(model, batch, config, max_new_tokens=new)
            same = aspire(model, batch, config, max_length=width + new)
        assert torch.equal(output.sequences, text[:, : width + new])
        assert torch.equal(same.sequences, output.sequences)
        assert output.stats.committed == [new] * len(LENGTHS)


@pytest.mark.parametrize("schedule", DRAFTING)
def test_no_draft_goes_beyond_max_draft_or_the_last_token_but_one(model: LlamaForCausalLM, schedule: str) -> None:
    batch, new = ragged(LENGTHS), 14
    text = plain(model, batch, max_new_tokens=new)
    config = small(schedule=schedule, draft_length=9, initial_draft=9, max_draft=5)
    with forced_drafts(right_drafts(text, max(LENGTHS))):
        stats = aspire(model, batch, config, max_new_tokens=new).stats
    committed = [0] * len(LENGTHS)
    longest = 0
    for step in stats.timeline:
        for row in step.rows:
            if row.kind is RowKind.VERIFY:
                assert row.queries - 1 <= min(5, new - committed[row.request] - 1)
                longest = max(longest, row.queries - 1)
            committed[row.request] += row.committed
    assert longest == 5


@pytest.mark.parametrize("new", [1, 2])
def test_rows_within_one_token_of_their_limit_decode_plainly(model: LlamaForCausalLM, new: int) -> None:
    batch = ragged(LENGTHS)
    for schedule in SCHEDULES:
        output = aspire(model, batch, small(schedule=schedule), max_new_tokens=new)
        assert torch.equal(output.sequences, plain(model, batch, max_new_tokens=new))
        assert output.stats.rows_drafted == 0
        assert output.stats.forwards == new
