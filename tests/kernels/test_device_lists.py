"""Lists made on the device against the host's, entry by entry, and packed tokens against the host's packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contexts import by_unit
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_aspire import AspireConfig
from hf_aspire.batch import pack
from hf_aspire.device_lists import DeviceLists
from hf_aspire.device_state import DeviceState
from hf_aspire.kernels import work
from hf_aspire.kernels.step_state import Field, Owner, place_rows
from hf_aspire.request import Request, Row
from hf_aspire.sampler import Choices
from hf_aspire.selection import ContextPolicy, SparseContexts

LAYERS, SLOTS, LONGEST, WIDTH = 2, 3, 150, 200


def request_of(row: int, length: int, generated: int, page_size: int) -> Request:
    """A request in the middle of its text, some of its prompt's columns hidden, so that positions are not slots."""
    kept = length - generated + 1
    columns = np.arange(WIDTH - kept, WIDTH)
    request = Request(row, columns, np.arange(kept) + 5, kept=kept, limit=60, noise_key=row)
    request.length, request.generated, request.prefilled = length, generated, kept
    request.pages = list(range(40 * row, 40 * row - (-(length + 20) // page_size)))
    request.runs = [(page * page_size, (page + 1) * page_size) for page in request.pages]
    return request


def state_of(requests: list[Request], page_size: int, device: torch.device) -> DeviceState:
    table = torch.zeros(SLOTS + 1, 60, dtype=torch.int32)
    for request in requests:
        table[request.row, : len(request.pages)] = torch.tensor(request.pages)
    state = DeviceState(SLOTS, WIDTH + 70, table.to(device), page_size, most=4)
    state.load(requests, WIDTH)
    return state


@settings(max_examples=25)
@given(data=st.data())
def test_a_device_list_is_the_hosts(data: st.DataObject) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 8
    floor = data.draw(st.integers(1, 4))
    config = AspireConfig(
        page_size=size,
        min_pages=floor,
        recent_pages=data.draw(st.integers(1, floor)),
        sparsity=data.draw(st.sampled_from([0.01, 0.1, 0.3])),
        granularity=data.draw(st.integers(1, size)),
        context=data.draw(st.sampled_from(["verify", "refresh"])),
        max_draft=3,
    )
    policy = ContextPolicy.of(config, LAYERS)
    requests = [request_of(row, data.draw(st.integers(30, 120)), data.draw(st.integers(1, 9)), size) for row in (0, 2)]
    state = state_of(requests, size, device)
    lists = DeviceLists(config, policy, state, LONGEST)
    contexts = SparseContexts(config, policy, SLOTS, LONGEST, torch.device("cpu"))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randint(0, 5, (policy.lists, 3, LONGEST), generator=random) / 8  # ties abound
    rows = [Row.verify(request, scored=True) for request in requests]
    # Nobody uses the middle score slot. The second row is scored some tokens behind what is final, as a draft row is.
    ahead = data.draw(st.integers(0, 3))
    owners = torch.zeros(4, len(Owner), dtype=torch.int32)
    owners[:, Owner.SLOT] = torch.tensor([2, 1, 0, SLOTS])
    owners[0, Owner.AHEAD] = ahead
    state.fields[2, Field.LENGTH] -= ahead
    scored_rows = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    lists.renew(by_unit(policy, scores).to(device), scored_rows, owners.to(device))
    state.fields[2, Field.LENGTH] += ahead
    for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
        contexts.renew(row, request, by_unit(policy, scores[:, 2 * index, : row.context]))
        request.length += 1  # as after a decode row
        request.drafts = [7] * data.draw(st.integers(0, 3))
        draft = Row.draft(request, scored=False, read=0.0)
        if not contexts.wants_scores(request.length + 1):
            continue
        expected = contexts.view([draft], state.page_table.cpu())
        top, tail = state.fields[request.row, Field.TOP :].tolist()
        listed = top + draft.context - tail
        assert listed == int(expected.lengths[0])
        assert torch.equal(lists.slots[:, request.row, :listed].cpu().long(), expected.slots[:, 0])
        drafts, request.drafts = request.drafts, []
        contexts.note(row)
        request.drafts = drafts
        assert listed <= contexts.listed(request, draft.context) <= lists.slots.shape[2]
        taken = DeviceLists(config, policy, state, LONGEST)
        contexts.renew(row, request, by_unit(policy, scores[:, 2 * index, : row.context]))
        made = contexts.top_of(request)
        assert made is not None
        taken.load(request.row, made[0].to(device), made[1])
        assert torch.equal(taken.slots[:, request.row, :listed], lists.slots[:, request.row, :listed])
        assert state.fields[request.row, Field.TOP :].tolist() == [top, tail]


@pytest.mark.parametrize("size", [4, 16])
def test_tokens_are_packed_as_on_the_host(size: int, device: torch.device) -> None:
    requests = [request_of(0, 60, 4, size), request_of(1, 33, 1, size), request_of(2, 90, 9, size)]
    state = state_of(requests, size, device)
    state.history.copy_(torch.arange(state.history.numel(), device=device).view_as(state.history))
    requests[0].drafts, requests[1].drafts = [1, 2, 3], [4]
    rows = [Row.verify(requests[0], False), Row.draft(requests[1], False, 0.0), Row.verify(requests[2], False)]
    expected = pack(rows, state.history[:SLOTS], WIDTH, WIDTH, trash_slot=-1, sparse=None)
    aheads = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (2, 0)]
    tokens = torch.tensor([(*ahead, 9, 9) for ahead in (*aheads, (SLOTS, 0))], dtype=torch.int32, device=device)
    ids, positions, places = state.pack(tokens)
    assert torch.equal(ids[:, :-1], expected.token_ids) and torch.equal(positions[:, :-1], expected.position_ids)
    assert torch.equal(places[:-1], expected.write_slots)
    assert places[-1] == -1


def test_committed_tokens_follow_the_last_ones(device: torch.device) -> None:
    requests = [request_of(0, 60, 4, 4), request_of(2, 90, 9, 4)]
    state = state_of(requests, 4, device)
    # The first verifies two drafts and keeps one of them; the second makes its third draft; nobody owns the last row.
    rows = torch.tensor([[0, 0, 0, 2, -1, 0], [2, 2, 3, -1, -1, 0], [SLOTS, 0, 0, -1, -1, 0]], device=device)
    state.history[0, WIDTH + 4] = 11
    choices = Choices(torch.tensor([11, 12, 13, 21, 99], device=device), torch.arange(5.0, device=device))
    outcome = state.settle(rows.int(), choices)
    assert outcome[:4].tolist() == [11, 12, 13, 21] and outcome[5:7].tolist() == [1, 0]
    assert outcome[8:12].int().view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert state.history[0, WIDTH + 4 : WIDTH + 6].tolist() == [11, 12]
    assert state.history[2, WIDTH + 9 : WIDTH + 12].tolist() == [0, 0, 21]
    assert state.fields[0, :2].tolist() == [62, 6] and state.fields[2, :2].tolist() == [90, 9]
    assert state.fields[SLOTS].tolist() == [0] * len(Field)


@pytest.mark.parametrize("rows", [1, 66, 130])
def test_rows_start_where_their_requests_are(rows: int, device: torch.device) -> None:
    random = np.random.default_rng(rows)
    fields = random.integers(1, 500, (rows + 1, len(Field)))
    owners = random.integers(0, 9, (rows, len(Owner)))
    owners[:, Owner.SLOT] = random.permutation(rows)
    table = random.integers(-1, 99, (rows, work.ROW_COLUMNS))
    table[:, work.ROW_LISTED] = random.integers(0, 2, rows)
    expected = table.copy()
    for row, owner in enumerate(owners):
        mine = fields[owner[Owner.SLOT]]
        start = mine[Field.LENGTH] + owner[Owner.AHEAD]
        length = min(start + table[row, work.ROW_QUERIES], mine[Field.CAPACITY])
        if table[row, work.ROW_LISTED]:
            length = mine[Field.TOP] + length - mine[Field.TAIL]
            start = length - 1
        expected[row, [work.ROW_START, work.ROW_LENGTH]] = start, length
    parts = (torch.tensor(part, dtype=torch.int32, device=device) for part in (table, owners))
    placed = place_rows(*parts, torch.tensor(fields, device=device))
    assert placed.tolist() == expected.tolist()
