"""Steps that follow each other on the device without waiting for the host.

While the device runs a step, the host plans the next one with upper bounds of what the first will commit, and reads
the outcome one step late, or two, where the device was done before the next step could start. Everything that depends
on an outcome (which tokens, where they go, what a draft reads) is computed on the device. Only steps without prompts
run here, of calls that decide every row at its own pace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .choice import Choice
from .decoding import Decoding
from .device_lists import DeviceLists
from .device_state import DeviceState
from .request import Committed, Row, RowKind
from .sampling import RejectionSampler
from .staging import UNDER_WAY
from .step_tables import StepTables
from .testing import Replay
from .timeline import RowRecord
from .verification import check_choice

_UNKNOWN = -1
"""A draft that the host has not heard of yet."""
_MOST_AHEAD = UNDER_WAY - 1
"""Steps that wait behind the one that the device works on, at most: a draft step of a small model can take less time
than to plan, launch and read it (SmolLM2-135M, 64 rows, H200: 1.6 ms, and up to 2.7 of the host, profiled, when
planning took nearly twice as long as now), and while a verification runs (5 ms), two can be planned. Ended texts, and
rows near their limit, lose a step for each."""


@dataclass(frozen=True)
class _Flight:
    """A step that the device works on, or soon will.

    Attributes:
        rows: Its rows, as planned.
        drafts: The list that a draft row's draft goes into, by request slot.
        bounds: Queries of the full rows, by request slot: what they may commit.
        padded: Query tokens, T, those that fill the batch up included.
        outcome: What `Choice.settle` returns, on the host once `done`.
        done: When the outcome is there.
        steady: Whether its time is that of such a step, without compiling or capturing.
    """

    rows: Sequence[Row]
    drafts: dict[int, list[int]]
    bounds: dict[int, int]
    padded: int
    outcome: Tensor
    done: _Moment
    steady: bool


class _Moment:
    """A point in the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    @property
    def reached(self) -> bool:
        """Whether the device has got there."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Blocks until the device gets there."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: _Moment) -> float:
        """Seconds of the device between two moments that it has reached."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Pipeline:
    """Plans a step ahead, or two where one is too few to keep the device busy.

    Args:
        decoding: The call's parts.
        tables: Builds a step's tables.
        state: The requests on the device.
        lists: Their sparse lists.
        choice: Chooses the tokens of a step.
        replay: Acceptance drawn from a profile, for benchmarks, or None.
    """

    def __init__(
        self,
        decoding: Decoding,
        tables: StepTables,
        state: DeviceState,
        lists: DeviceLists,
        choice: Choice,
        replay: Replay | None,
    ) -> None:
        self._parts = decoding
        self._tables = tables
        self._state = state
        self._lists = lists
        self._choice = choice
        self._replay = replay
        self._flights: deque[_Flight] = deque()
        self._ahead = 1
        # What rejection draws depends on where rounds end, and that on how much the host has heard of by then.
        # Whether the device was found waiting is up to the clock, and must not choose a text.
        self._most_ahead = 1 if isinstance(decoding.sampler, RejectionSampler) else _MOST_AHEAD
        self._last: _Moment | None = None

    @property
    def entered(self) -> bool:
        """Whether the device may know more than the host."""
        return self._last is not None

    def step(self) -> list[Committed]:
        """Starts the next steps, then reads the outcome of the oldest one."""
        if self._last is None:
            self._last = self._enter()
        while len(self._flights) <= self._ahead and (rows := self._parts.planner.rows()):
            self._flights.append(self._launch(rows))
        return self._collect(self._flights.popleft()) if self._flights else []

    def drain(self) -> list[Committed]:
        """Reads the outcomes that are left; the host then knows everything again."""
        committed: list[Committed] = []
        while self._flights:
            committed += self._collect(self._flights.popleft())
        self._last = None
        self._parts.contexts.forget()
        return committed

    def _enter(self) -> _Moment:
        """Brings what the host knows to the device."""
        self._state.load(self._parts.planner.decoding, self._parts.prompt_width)
        for request in self._parts.planner.decoding:
            made = self._parts.contexts.top_of(request)
            if made is not None:
                self._lists.load(request.row, *made)
        entered = _Moment(self._state.fields.device)
        entered.wait()  # for tables of a call that was interrupted, whose memory is written to again
        return entered

    def _launch(self, rows: list[Row]) -> _Flight:
        """Plans a step's tables, starts its work, and moves the requests on by upper bounds."""
        draft_kind = RowKind.DRAFT  # members of an enum are slow to look up
        pairs = [(row, row.kind is draft_kind) for row in rows]
        listed = np.array(
            [self._parts.contexts.listed(row.request, row.context) if draft else 0 for row, draft in pairs]
        )
        plan = self._tables.plan(rows, listed, self._forced(pairs), self._choice.in_forward)
        if self._flights and self._flights[-1].steady and self._flights[-1].done.reached:
            self._ahead = self._most_ahead  # the device waits, and not because something was compiled or captured
        result, steady = self._parts.runner.forward_planned(plan, self._tables, self._choice)
        outcome = result.to("cpu", non_blocking=True)
        done = _Moment(result.device)
        drafts: dict[int, list[int]] = {}
        bounds: dict[int, int] = {}
        for row, draft in pairs:
            request = row.request
            if draft:
                drafts[request.row] = request.drafts
                request.drafts.append(_UNKNOWN)
            else:
                bounds[request.row] = row.queries
                request.length += row.queries
                request.generated += row.queries
                request.rounds += 1
                request.draft_rounds += row.queries > 1
                request.drafts = []
                request.drafted_end = False
            if row.scored:
                self._parts.contexts.note(row)
        return _Flight(rows, drafts, bounds, plan.shape.tokens, outcome, done, steady)

    def _forced(self, pairs: Sequence[tuple[Row, bool]]) -> NDArray[np.int64]:
        """Accepted drafts of every full row, where a benchmark replays them; else -1. Of rows, and which draft."""
        if self._replay is None:
            return np.full(len(pairs), -1)
        return np.array([-1 if draft else self._replay.accepted(row.queries - 1) for row, draft in pairs])

    def _collect(self, flight: _Flight) -> list[Committed]:
        """Reads a step's outcome: corrects the bounds, ends texts, and teaches the schedule and the cost model."""
        flight.done.wait()
        assert self._last is not None
        seconds, self._last = flight.done.since(self._last), flight.done
        going = [row for row in flight.rows if not row.request.stopped]  # an ended text's last rows are dropped
        records = {row.request.row: RowRecord(row.request.row, row.kind, row.queries) for row in going}
        values, count = flight.outcome.numpy(), flight.padded
        tokens, accepted = values[:count].tolist(), values[count:-count].tolist()
        scores = values[-count:].astype(np.int32).view(np.float32)
        committed = []
        first = 0
        for row, kept in zip(flight.rows, accepted, strict=False):
            if row.kind is RowKind.DRAFT:
                self._note_draft(row, flight.drafts[row.request.row], tokens[first])
            elif row.request.row in records:
                line = tokens[first : first + kept + 1]
                committed.append(self._end_round(row, records[row.request.row], line, scores[first:]))
            first += row.queries
        if flight.steady:
            queries, read = sum(row.queries for row in flight.rows), sum(row.read for row in flight.rows)
            self._parts.cost_model.observe(queries, read, seconds, all(row.plain for row in flight.rows))
        if records:
            ended = time.perf_counter()
            decided = [records[slot] for slot in flight.bounds if slot in records]
            self._parts.recorder.step(ended - seconds, ended, list(records.values()), decided)
        return committed

    def _note_draft(self, row: Row, drafts: list[int], token: int) -> None:
        """Writes a draft down in its round, and ends the round behind an end token, if it goes on still."""
        drafts[drafts.index(_UNKNOWN)] = token
        if token in self._parts.end_tokens and row.request.drafts is drafts:
            row.request.drafted_end = True

    def _end_round(self, row: Row, record: RowRecord, tokens: list[int], scores: NDArray[np.float32]) -> Committed:
        """Commits a full row's tokens on the host."""
        request, drafted, accepted = row.request, row.queries - 1, len(tokens) - 1
        request.length -= row.queries - len(tokens)
        request.generated -= row.queries - len(tokens)
        generated = request.generated - sum(flight.bounds.get(request.row, 0) for flight in self._flights)
        for place, token in enumerate(tokens):
            check_choice(self._parts.sampler, float(scores[place]), request.row, generated - len(tokens) + place)
            if token in self._parts.end_tokens:
                tokens = tokens[: place + 1]
                drafted, accepted = min(drafted, len(tokens)), min(accepted, len(tokens))
                break
        stopped = tokens[-1] in self._parts.end_tokens or generated >= request.limit
        record.drafted, record.accepted, record.committed = drafted, accepted, len(tokens)
        self._parts.schedule.observe(request.row, drafted, accepted)
        if stopped:
            request.stopped = True
            if not self._parts.planner.after_end.stay:
                self._parts.planner.finish(request)
        return Committed(request, tokens, stopped)
