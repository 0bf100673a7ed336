"""Greedy text is plain `generate`'s on the same batch, whatever was drafted, scheduled, masked or out of memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    MEMORY_BOUND,
    POLICIES,
    SCHEDULES,
    VOCABULARY,
    Batch,
    DraftFunction,
    Result,
    Scripted,
    aspire,
    mixed_drafts,
    pick,
    plain,
    ragged,
    right_drafts,
    small,
    tiny_llama,
    wrong_drafts,
)
from transformers import LlamaForCausalLM

from hf_aspire import AspireConfig, AspireStats
from hf_aspire.cache import AspireCache
from hf_aspire.planner import pages_for
from hf_aspire.request import RowKind
from hf_aspire.stats import RowRecord
from hf_aspire.testing import forced_drafts

TOKEN_BYTES = 3 * 2 * 2 * 16 * 8  # layers, key and value, heads, size, float64
LENGTHS = (1, 2, 15, 200)
DRAFTING = tuple(name for name in SCHEDULES if name != "autoregressive")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def new_tokens(stats: AspireStats, row: int) -> int:
    """Tokens that a row's rounds account for if no stop cut any."""
    return 1 + sum(accepted + 1 for _, accepted in stats.rounds[row])


def verified(stats: AspireStats) -> list[list[int]]:
    """Draft lengths that were verified in each step."""
    return [[row.queries - 1 for row in step.rows if row.kind is RowKind.VERIFY] for step in stats.timeline]


# ---- random batches


@dataclass(frozen=True)
class Case:
    """One random call."""

    batch: Batch
    config: AspireConfig
    new: int
    ends: list[int]
    keeps: bool  # whether the output is dict-like and keeps the cache: ended rows then stay, and are fed pads
    right: float | None  # share of drafts that are replaced by plain's token; the others are wrong. None: no forcing

    def drafts(self, expected: torch.Tensor) -> DraftFunction:
        if self.right is None:
            return lambda row, position, token: token
        return mixed_drafts(expected, self.batch["input_ids"].shape[1], self.right)


@st.composite
def configs(draw: st.DrawFn) -> AspireConfig:
    page_size = draw(st.sampled_from([4, 16]))
    min_pages = draw(st.integers(1, 2))
    return AspireConfig(
        page_size=page_size,
        min_pages=min_pages,
        recent_pages=draw(st.integers(1, min_pages)),
        sparsity=draw(st.sampled_from([0.01, 0.07, 0.5, 1.0])),
        context=draw(st.sampled_from(POLICIES)),
        granularity=draw(st.integers(1, page_size)),
        refresh_layer=draw(st.integers(-3, 2)),
        schedule=draw(st.sampled_from((*SCHEDULES, *DRAFTING, *DRAFTING))),
        draft_length=draw(st.integers(1, 6)),
        max_draft=draw(st.integers(1, 6)),
        initial_draft=draw(st.integers(1, 3)),
        cost=draw(st.just(MEMORY_BOUND) | st.tuples(st.floats(0, 1), st.floats(0, 0.1), st.floats(1e-6, 1))),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=8))
    batch = ragged(lengths, seed=draw(st.integers(0, 2**16)))
    if draw(st.booleans()):  # rows with the same prompt share its pages
        batch = pick(batch, [draw(st.integers(0, len(lengths) - 1)) for _ in lengths])
    config = draw(configs())
    new = 21 - draw(st.integers(1, 20))  # small draws are the likelier ones, and short texts draft nothing
    keeps = draw(st.booleans())
    if not keeps and draw(st.booleans()):  # rows wait for pages
        largest = max(pages_for(int(mask.sum()), new, config.page_size) for mask in batch["attention_mask"])
        pages = largest + draw(st.integers(0, largest))
        config = AspireConfig(**(vars(config) | {"kv_memory": pages * config.page_size * TOKEN_BYTES}))
    ends = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
    return Case(batch, config, new, ends, keeps, draw(st.sampled_from([None, 0.0, 0.6, 0.9, 1.0])))


@pytest.mark.slow
@settings(max_examples=max(300, settings.default.max_examples))
@given(case=cases())
def test_random_ragged_batches_give_plains_tokens(model: LlamaForCausalLM, case: Case) -> None:
    keywords: dict[str, Any] = {"max_new_tokens": case.new, "eos_token_id": case.ends or None, "pad_token_id": 0}
    expected = plain(model, case.batch, **keywords)
    with forced_drafts(case.drafts(expected)):
        output = aspire(model, case.batch, case.config, return_dict_in_generate=case.keeps, **keywords)
    assert torch.equal(output.sequences, expected)
    check_counts(output, case.batch["input_ids"].shape[1], case.ends)


def check_counts(output: Result, width: int, ends: Sequence[int]) -> None:
    """committed[i] == 1 + sum(accepted + 1), less the one token that a stop inside the accepted drafts cut off."""
    stats = output.stats
    for row, tokens in enumerate(output.sequences[:, width:].tolist()):
        stop = next((place for place, token in enumerate(tokens) if token in ends), None)
        assert stats.committed[row] == (len(tokens) if stop is None else stop + 1)
        cut = new_tokens(stats, row) - stats.committed[row]
        assert cut == 0 or (cut == 1 and stop is not None and stats.rounds[row][-1][1] > 0)
        assert stats.drafted[row] == sum(drafted for drafted, _ in stats.rounds[row])
        assert stats.accepted[row] == sum(accepted for _, accepted in stats.rounds[row])


# ---- where a text stops


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
                stopped = stats.committed[row.request] < new and row is last_row(stats, row.request)
                behind = max(0, row.queries - 1 - row.committed) if stopped else 0
                assert row.drafted == row.queries - 1 - behind
        assert sum(stats.drafted) <= stats.rows_drafted


def last_row(stats: AspireStats, request: int) -> RowRecord:
    """The record of a request's last row."""
    return [row for step in stats.timeline for row in step.rows if row.request == request][-1]


@pytest.mark.parametrize("new", [1, 2])
def test_rows_within_one_token_of_their_limit_decode_plainly(model: LlamaForCausalLM, new: int) -> None:
    batch = ragged(LENGTHS)
    for schedule in SCHEDULES:
        output = aspire(model, batch, small(schedule=schedule), max_new_tokens=new)
        assert torch.equal(output.sequences, plain(model, batch, max_new_tokens=new))
        assert output.stats.rows_drafted == 0
        assert output.stats.forwards == new


# ---- what was drafted


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


# ---- who else is in the batch


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("schedule", DRAFTING)
def test_permuting_the_batch_permutes_the_output(model: LlamaForCausalLM, context: str, schedule: str) -> None:
    batch, order = ragged((1, 2, 15, 80, 40)), [3, 0, 4, 2, 1]
    config = small(schedule=schedule, context=context)
    output = aspire(model, batch, config, max_new_tokens=12)
    permuted = aspire(model, pick(batch, order), config, max_new_tokens=12)
    assert torch.equal(permuted.sequences, output.sequences[order])


@pytest.mark.parametrize("context", POLICIES)
def test_a_garbage_row_changes_nothing_for_its_neighbours(model: LlamaForCausalLM, context: str) -> None:
    batch, width, new = ragged((40, 70, 25)), 70, 14
    expected = plain(model, batch, max_new_tokens=new)
    other = {name: tensor.clone() for name, tensor in batch.items()}
    other["input_ids"][1] = ragged((70,), seed=9)["input_ids"][0]
    garbage = random.Random(0)
    with forced_drafts(lambda row, position, token: garbage.randrange(VOCABULARY) if row == 1 else token):
        output = aspire(model, other, small(context=context), max_new_tokens=new)
    assert torch.equal(output.sequences[[0, 2]], expected[[0, 2]])
    assert torch.equal(output.sequences, plain(model, other, max_new_tokens=new))
    assert not torch.equal(output.sequences[1, width:], expected[1, width:])


@pytest.mark.parametrize("context", POLICIES)
def test_a_row_of_a_batch_says_what_it_says_alone(model: LlamaForCausalLM, context: str) -> None:
    batch, width = ragged(LENGTHS), max(LENGTHS)
    together = aspire(model, batch, small(context=context), max_new_tokens=12).sequences
    for row, length in enumerate(LENGTHS):
        alone = {"input_ids": batch["input_ids"][row : row + 1, width - length :]}
        output = aspire(model, alone, small(context=context), max_new_tokens=12)
        assert torch.equal(output.sequences[0, length:], together[row, width:])


@pytest.mark.parametrize("context", POLICIES)
@pytest.mark.parametrize("length", [40, 41, 43])  # the first fills its last page, the others do not
def test_rows_with_the_same_prompt_share_its_prefill(model: LlamaForCausalLM, context: str, length: int) -> None:
    batch = pick(ragged((length, 30)), [0, 1, 0, 0])
    text = plain(model, batch, max_new_tokens=12)
    with forced_drafts(mixed_drafts(text, length, 0.8)):  # so that rows of one prompt go apart
        output = aspire(model, batch, small(context=context), max_new_tokens=12)
    assert torch.equal(output.sequences, text)
    prompts = [row for step in output.stats.timeline for row in step.rows if row.kind is RowKind.PREFILL]
    assert sum(row.queries for row in prompts) == length + 30


# ---- prompts


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
    assert any({RowKind.PREFILL, RowKind.DRAFT} <= set(step) for step in kinds)
    assert any({RowKind.PREFILL, RowKind.VERIFY} <= set(step) for step in kinds) or chunk == 37


# ---- memory


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


# ---- what shares a step


def test_a_step_holds_drafts_and_verifications_at_once(model: LlamaForCausalLM) -> None:
    stats = aspire(model, ragged(LENGTHS), small(schedule="staggered"), max_new_tokens=16).stats
    kinds = [{row.kind for row in step.rows} for step in stats.timeline]
    assert stats.mixed_steps == sum({RowKind.DRAFT, RowKind.VERIFY} <= step for step in kinds) > 0


@pytest.mark.parametrize("schedule", ["aspire", "fsm"])
def test_a_step_verifies_drafts_of_different_lengths(model: LlamaForCausalLM, schedule: str) -> None:
    batch, new = ragged((30, 50, 70, 90, 110, 130)), 40
    text = plain(model, batch, max_new_tokens=new)
    with forced_drafts(mixed_drafts(text, 130, 0.7)):
        output = aspire(model, batch, small(schedule=schedule, max_draft=8), max_new_tokens=new)
    assert torch.equal(output.sequences, text)
    assert any(len(set(lengths)) > 1 for lengths in verified(output.stats))
    assert output.stats.mixed_steps > 0
