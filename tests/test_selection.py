"""Sparse contexts: every policy's lists against brute force, and that a draft reads the listed slots alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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

LAYERS = 3
RENEWED = 0.25  # share of a hybrid list's top that draft steps renew


# ---- brute force


def budget_of(config: AspireConfig, length: int) -> int:
    pages = math.ceil(length / config.page_size)
    return max(config.min_pages, math.ceil(round(config.sparsity * pages, 6))) * config.page_size


def best(scores: Sequence[float], unit: int, tail: int, count: int, taken: Sequence[int] = ()) -> list[int]:
    """The `count` best units below the tail that are not taken; ties go to the lowest index."""
    mass = [sum(scores[u * unit : (u + 1) * unit]) for u in range(tail // unit)]
    free = [u for u in range(tail // unit) if u not in taken]
    return sorted(free, key=lambda u: (-mass[u], u))[:count]


def tokens_of(units: Sequence[int], unit: int) -> list[int]:
    return [u * unit + k for u in sorted(units) for k in range(unit)]


def cut(config: AspireConfig, unit: int, scored: int) -> tuple[int, int]:
    """Where the tail begins, and how many units fit above it."""
    tail = max(0, scored - config.recent_pages * config.page_size)
    tail -= tail % unit
    return tail, min(max(0, budget_of(config, scored) - (scored - tail)) // unit, tail // unit)


# ---- a request's life


def request_of(length: int, row: int = 0) -> Request:
    """A request whose prompt is in the cache and whose first token is committed."""
    columns = np.arange(length)
    request = Request(row, columns, columns, kept=length, limit=1000, noise_key=0)
    request.length = request.prefilled = length
    request.generated = 1
    return request


def prompt_row(length: int) -> Row:
    request = request_of(length)
    request.prefilled = 0
    return Row.prefill(request, length, scored=True)


def scores_of(lists: int, length: int, seed: int) -> Tensor:
    """Few distinct values, exact in float32, so that ties abound."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (lists, length), generator=random) / 8


def contexts_of(config: AspireConfig, requests: int = 1) -> SparseContexts:
    return SparseContexts(config, ContextPolicy.of(config, LAYERS), requests, 500, torch.device("cpu"))


def lists_of(contexts: SparseContexts, requests: Sequence[Request]) -> list[list[list[int]]]:
    """Context indices of the requests' next draft rows, `[request][list]`, read back through shuffled pages."""
    size = contexts.config.page_size
    random = torch.Generator().manual_seed(7)
    pages = 500 // size + 2
    table = torch.stack([torch.randperm(10 * pages, generator=random)[:pages] for _ in range(8)])
    view = contexts.view([Row.draft(request, scored=False) for request in requests], table)
    found = []
    for index, request in enumerate(requests):
        origin = {int(page): place for place, page in enumerate(table[request.row])}
        slots = view.slots[:, index].tolist()
        listed = int(view.lengths[index])
        assert all(slot == row[listed - 1] for row in slots for slot in row[listed:])  # the rest repeats a listed slot
        found.append([[origin[slot // size] * size + slot % size for slot in row[:listed]] for row in slots])
    return found


@st.composite
def configs(draw: st.DrawFn, context: str) -> AspireConfig:
    page_size = draw(st.sampled_from([4, 8]))
    min_pages = draw(st.integers(1, 4))
    return AspireConfig(
        page_size=page_size,
        min_pages=min_pages,
        recent_pages=draw(st.integers(1, min_pages)),
        sparsity=draw(st.sampled_from([0.01, 0.1, 0.3])),
        granularity=draw(st.integers(1, page_size)),
        context=context,
        max_draft=draw(st.integers(1, 5)),
    )


def check_shape(config: AspireConfig, scored: int, context: int, listed: list[int]) -> None:
    """Ascending, each slot once, within the budget, and with everything from the newest pages on."""
    assert listed == sorted(set(listed))
    recent = config.recent_pages * config.page_size
    assert set(range(max(0, scored - recent), context)) <= set(listed)
    # A tail that begins on a unit's border may be up to a unit longer than the recent pages.
    most = max(budget_of(config, scored), recent + int(config.granularity) - 1)
    assert len(listed) <= most + context - scored
    assert len(listed) <= most + 2 * config.max_draft + 2


# ---- policies


@pytest.mark.parametrize("context", ["refresh", "verify", "hybrid"])
@given(data=st.data())
def test_a_list_is_the_best_scored_units_and_everything_behind_the_tail(context: str, data: st.DataObject) -> None:
    config = data.draw(configs(context))
    unit, contexts = int(config.granularity), contexts_of(config)
    lists = 1 if context == "refresh" else LAYERS
    request = request_of(data.draw(st.integers(20, 200)))
    row, scored = prompt_row(request.length), request.length
    for round_ in range(3):
        if contexts.wants_scores(row.context + 1):  # the longest context that the next draft may start from
            scores = scores_of(lists, row.context, seed=10 * scored + round_)
            contexts.renew(row, request, scores)
        assert contexts.ready(request)
        drafted = data.draw(st.integers(0, config.max_draft))
        for _ in range(drafted + 1):
            length = request.length + len(request.drafts) + 1
            found = lists_of(contexts, [request])[0]
            whole = 0 if context == "verify" else 1  # layers that read the whole context
            read = (whole * length + (LAYERS - whole) * len(found[0])) / LAYERS
            assert contexts.tokens_read(request) == pytest.approx(read)
            for index, listed in enumerate(found):
                if budget_of(config, request.length + 1) >= request.length + 1:
                    assert listed == list(range(length))
                    continue
                check_shape(config, scored, length, listed)
                tail, count = cut(config, unit, scored)
                top = best(scores[index].tolist(), unit, tail, count)
                assert listed == tokens_of(top, unit) + list(range(tail, length))
            request.drafts.append(5)
        request.drafts.pop()
        row, scored = Row.verify(request, scored=True), request.length + 1
        kept = data.draw(st.integers(0, drafted))
        request.length, request.generated, request.drafts = request.length + kept + 1, request.generated + kept + 1, []


@given(data=st.data())
def test_refresh_renews_its_list_at_every_draft(data: st.DataObject) -> None:
    config = data.draw(configs("refresh"))
    unit, contexts = int(config.granularity), contexts_of(config)
    request = request_of(data.draw(st.integers(60, 200)))
    contexts.renew(prompt_row(request.length), request, scores_of(1, request.length, 0))
    for depth in range(config.max_draft - 1):
        row = Row.draft(request, scored=True)
        request.drafts.append(5)
        scores = scores_of(1, row.context, depth)
        contexts.renew(row, request, scores)
        (listed,) = lists_of(contexts, [request])[0]
        tail, count = cut(config, unit, row.context)
        check_shape(config, row.context, row.context + 1, listed)
        assert listed == tokens_of(best(scores[0].tolist(), unit, tail, count), unit) + list(
            range(tail, row.context + 1)
        )


@given(data=st.data())
def test_hybrid_renews_a_share_of_every_layers_list_at_every_draft(data: st.DataObject) -> None:
    config = data.draw(configs("hybrid"))
    unit, contexts = int(config.granularity), contexts_of(config)
    request = request_of(data.draw(st.integers(60, 200)))
    scored = request.length
    own = scores_of(LAYERS, scored, 0)
    contexts.renew(prompt_row(scored), request, own)
    tail, count = cut(config, unit, scored)
    for depth in range(config.max_draft - 1):
        row = Row.draft(request, scored=True)
        request.drafts.append(5)
        late = scores_of(1, row.context, depth)
        contexts.renew(row, request, late)
        for index, listed in enumerate(lists_of(contexts, [request])[0]):
            check_shape(config, scored, row.context + 1, listed)
            base = best(own[index].tolist(), unit, tail, count - int(count * RENEWED))
            extra = best(late[0].tolist(), unit, tail, int(count * RENEWED), taken=base)
            assert listed == tokens_of(base + extra, unit) + list(range(tail, row.context + 1))


@given(data=st.data())
def test_a_window_is_the_first_page_and_the_newest_tokens(data: st.DataObject) -> None:
    config = data.draw(configs("window"))
    contexts = contexts_of(config)
    request = request_of(data.draw(st.integers(1, 200)))
    assert not contexts.wants_scores(request.length) and contexts.ready(request)
    budget, page = budget_of(config, request.length + 1), config.page_size
    for depth in range(config.max_draft):
        length = request.length + depth + 1
        (listed,) = lists_of(contexts, [request])[0]
        newest = request.length + 1 - (budget - page)
        whole = budget >= request.length + 1 or newest <= page
        assert listed == (list(range(length)) if whole else [*range(page), *range(newest, length)])
        assert contexts.tokens_read(request) == len(listed)
        request.drafts.append(5)


@pytest.mark.parametrize("context", POLICIES)
def test_a_context_within_the_budget_is_read_whole_and_needs_no_scores(context: str) -> None:
    config = AspireConfig(page_size=4, min_pages=3, recent_pages=1, context=context)
    contexts = contexts_of(config)
    for length in range(1, 12):
        request = request_of(length)
        assert not contexts.wants_scores(length) and contexts.ready(request)
        assert all(listed == list(range(length + 1)) for listed in lists_of(contexts, [request])[0])
    assert contexts.wants_scores(13) == (context != "window")
    assert contexts.ready(request_of(12)) == (context == "window")


def test_rows_of_a_step_have_lists_of_their_own() -> None:
    contexts = contexts_of(small(context="verify", granularity=1), requests=3)
    requests = [request_of(90, row=0), request_of(5, row=1), request_of(40, row=2)]
    for request in (requests[0], requests[2]):
        contexts.renew(prompt_row(request.length), request, scores_of(LAYERS, request.length, request.row))
    requests[2].drafts = [3, 4]
    together = lists_of(contexts, requests)
    assert [len(listed[0]) for listed in together] == [8 + 1, 6, 8 + 3]
    assert together == [lists_of(contexts, [request])[0] for request in requests]
    assert together[0][0] != together[0][1] != together[0][2]


@pytest.mark.parametrize("context", ["refresh", "verify", "hybrid"])
def test_a_fork_starts_with_its_sources_list_and_goes_its_own_way(context: str) -> None:
    contexts = contexts_of(small(context=context, granularity=2), requests=2)
    source, fork = request_of(60, row=0), request_of(60, row=1)
    lists = contexts.policy.lists
    row, scores = prompt_row(60), scores_of(lists, 60, 1)
    for request in (source, fork):
        contexts.renew(row, request, scores)
        assert contexts.ready(request)
    first = lists_of(contexts, [source])[0]
    assert lists_of(contexts, [fork])[0] == first
    verify = Row.verify(fork, scored=True)
    fork.length, fork.generated = 61, 2
    contexts.renew(verify, fork, scores_of(lists, 61, 2))
    assert lists_of(contexts, [source])[0] == first
    assert [listed[:-1] for listed in lists_of(contexts, [fork])[0]] != first


@pytest.mark.parametrize("context", ["refresh", "verify", "hybrid"])
def test_a_list_is_only_good_at_the_token_that_it_was_made_at(context: str) -> None:
    contexts = contexts_of(small(context=context))
    request = request_of(60)
    assert not contexts.ready(request)  # no list yet
    contexts.renew(prompt_row(60), request, scores_of(contexts.policy.lists, 60, 1))
    assert contexts.ready(request)
    request.length, request.generated, request.rounds = 61, 2, 1  # decoded plainly
    assert not contexts.ready(request)


def test_policies_score_in_the_layers_that_they_name() -> None:
    def policy(context: str, **fields: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        found = ContextPolicy.of(AspireConfig(context=context, **fields), 5)
        return found.lists, found.full_layers, found.draft_layers

    assert policy("refresh") == (1, (3,), (3,))
    assert policy("refresh", refresh_layer=1) == (1, (1,), (1,))
    assert policy("verify") == policy("auto") == (5, (0, 1, 2, 3, 4), ())
    assert policy("hybrid", refresh_layer=-5) == (5, (0, 1, 2, 3, 4), (0,))
    assert policy("window") == (1, (), ())
    assert ContextPolicy.of(AspireConfig(context="refresh"), 1).draft_layers == (0,)
    with pytest.raises(ValueError, match=r"refresh_layer: got 5, .* -5 to 4"):
        policy("refresh", refresh_layer=5)


def test_token_scores_are_the_paper_s_maximum_for_refresh_and_the_mean_for_the_others() -> None:
    weights = torch.rand(2, 4, 6)
    for context, by_head in (("refresh", weights.amax(1)), ("verify", weights.mean(1)), ("hybrid", weights.mean(1))):
        reduced = ContextPolicy.of(AspireConfig(context=context), LAYERS).reduce(weights)
        assert torch.allclose(reduced, (by_head[0] + by_head[1]) / 2)


# ---- in a call


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


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


@pytest.mark.parametrize("context", ["refresh", "verify", "hybrid"])
def test_scores_are_the_attention_weights_of_the_last_prompt_queries_and_of_a_rounds_first_and_last(
    monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    model = tiny_llama(attn_implementation="eager")
    config = small(context=context, schedule="fsm", refresh_layer=1, sparsity=0.05)
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
            expected = weights.amax(1)[1:2] if context == "refresh" else weights.mean(1)
            torch.testing.assert_close(scores, expected.mean(1), rtol=1e-5, atol=1e-6)


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
