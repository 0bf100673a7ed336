"""When a row has a list, whose it is and how long it is good; and in which layers policies score."""

from __future__ import annotations

from typing import Any

import pytest
from contexts import LAYERS, by_unit, contexts_of, lists_of, prompt_row, request_of, scores_of
from kit import POLICIES, small

from hf_aspire import AspireConfig
from hf_aspire.request import Row
from hf_aspire.selection import ContextPolicy

# ---- rows


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
        contexts.renew(
            prompt_row(request.length),
            request,
            by_unit(contexts.policy, scores_of(LAYERS, request.length, request.row)),
        )
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
        contexts.renew(row, request, by_unit(contexts.policy, scores))
        assert contexts.ready(request)
    first = lists_of(contexts, [source])[0]
    assert lists_of(contexts, [fork])[0] == first
    verify = Row.verify(fork, scored=True)
    fork.length, fork.generated = 61, 2
    contexts.renew(verify, fork, by_unit(contexts.policy, scores_of(lists, 61, 2)))
    assert lists_of(contexts, [source])[0] == first
    assert [listed[:-1] for listed in lists_of(contexts, [fork])[0]] != first


@pytest.mark.parametrize("context", ["refresh", "verify", "hybrid"])
def test_a_list_is_only_good_at_the_token_that_it_was_made_at(context: str) -> None:
    contexts = contexts_of(small(context=context))
    request = request_of(60)
    assert not contexts.ready(request)  # no list yet
    contexts.renew(prompt_row(60), request, by_unit(contexts.policy, scores_of(contexts.policy.lists, 60, 1)))
    assert contexts.ready(request)
    request.length, request.generated, request.rounds = 61, 2, 1  # decoded plainly
    assert not contexts.ready(request)


# ---- scores


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


def test_scores_are_of_as_many_tokens_of_the_granularity_as_are_a_power_of_two() -> None:
    for granularity, unit in ((1, 1), (6, 2), (7, 1), (8, 8), (12, 4), (16, 16), ("auto", 1)):
        policy = ContextPolicy.of(AspireConfig(granularity=granularity), LAYERS)
        assert (policy.unit, policy.scores_of(33)) == (unit, -(-33 // unit))
