"""Every context policy's lists against brute force, over random requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from contexts import LAYERS, by_unit, contexts_of, lists_of, prompt_row, request_of, scores_of
from hypothesis import given
from hypothesis import strategies as st

from hf_aspire import AspireConfig
from hf_aspire.request import Row

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
            contexts.renew(row, request, by_unit(contexts.policy, scores))
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
    contexts.renew(prompt_row(request.length), request, by_unit(contexts.policy, scores_of(1, request.length, 0)))
    for depth in range(config.max_draft - 1):
        row = Row.draft(request, scored=True, read=0.0)
        request.drafts.append(5)
        scores = scores_of(1, row.context, depth)
        contexts.renew(row, request, by_unit(contexts.policy, scores))
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
    contexts.renew(prompt_row(scored), request, by_unit(contexts.policy, own))
    tail, count = cut(config, unit, scored)
    for depth in range(config.max_draft - 1):
        row = Row.draft(request, scored=True, read=0.0)
        request.drafts.append(5)
        late = scores_of(1, row.context, depth)
        contexts.renew(row, request, by_unit(contexts.policy, late))
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
