"""Rows as columns: which of their queries are scored."""

import numpy as np

from hf_aspire.columns import RowColumns
from hf_aspire.request import Request, Row


def row_of(slot, queries, scored, prompt=0):
    """A draft (0 queries), a round of that many, or the last `queries` tokens of a prompt."""
    tokens = np.arange(prompt)
    request = Request(slot, tokens, tokens, prompt, limit=30, noise_key=0, length=40, prefilled=prompt - queries)
    if prompt:
        return Row.prefill(request, queries, scored)
    if not queries:
        return Row.draft(request, scored, read=5.0)
    request.drafts = [7] * (queries - 1)
    return Row.verify(request, scored)


def queries_of(rows):
    scored = RowColumns(rows).scored
    queries = [[*range(first, first + step * count, step)] for first, step, count in scored.spans.tolist()]
    return dict(zip(scored.rows.tolist(), queries, strict=True))


def test_a_round_is_scored_by_its_first_and_last_query_and_a_prompt_by_its_last_eight():
    rounds = [row_of(0, 0, True), row_of(1, 1, True), row_of(2, 2, True), row_of(3, 9, True)]
    prompts = [row_of(4, 1, True, 30), row_of(5, 2, True, 30), row_of(6, 8, True, 30), row_of(7, 30, True, 30)]
    expected = [[0], [0], [0, 1], [0, 8], [0], [0, 1], [*range(8)], [*range(22, 30)]]
    assert queries_of(rounds + prompts) == dict(enumerate(expected))


def test_rows_that_ask_for_no_scores_have_no_scored_queries():
    rows = [row_of(0, 9, False), row_of(1, 0, True), row_of(2, 20, False, 20), row_of(3, 0, False)]
    assert queries_of(rows) == {1: [0]}
    assert RowColumns(rows[::2]).scored is None


def test_columns_say_what_the_rows_do():
    rows = [row_of(4, 0, False), row_of(2, 3, False)]
    columns = RowColumns(rows)
    assert columns.slots.tolist() == [4, 2] and columns.drafts.tolist() == [True, False]
    assert columns.queries.tolist() == [1, 3] and columns.starts.tolist() == [40, 40]
    assert columns.contexts.tolist() == [41, 43] and columns.requests == (rows[0].request, rows[1].request)
