"""A call's records, against the objects that they were."""

import copy
import gc
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_aspire.config import AspireConfig
from hf_aspire.request import RowKind
from hf_aspire.stats import StatsRecorder
from hf_aspire.timeline import RowRecord, StepRecord, Timeline

counts = st.integers(0, 2**40)
rows = st.builds(RowRecord, counts, st.sampled_from(RowKind), counts, counts, counts, counts)
steps = st.builds(StepRecord, st.floats(0, 1e6), st.floats(0, 1e6), st.lists(rows, max_size=4).map(tuple))


def timeline_of(records: list[StepRecord]) -> Timeline:
    timeline = Timeline()
    for record in records:
        timeline.add(record.start, record.end, record.rows)
    return timeline


@given(st.lists(steps, max_size=6), st.slices(6))
def test_gives_back_what_was_added(records: list[StepRecord], part: slice) -> None:
    timeline = timeline_of(records)
    assert list(timeline) == records
    assert len(timeline) == len(records)
    assert timeline[part] == records[part]
    assert [timeline[i] for i in range(-len(records), 0)] == records
    assert pickle.loads(pickle.dumps(timeline)) == copy.deepcopy(timeline) == timeline == timeline_of(records)
    assert timeline != timeline_of([*records, StepRecord(0.0, 1.0, ())])
    assert repr(timeline) == f"Timeline({records})"
    with pytest.raises(IndexError):
        timeline[len(records)]


@given(st.lists(steps, min_size=1, max_size=4), st.data())
def test_rows_may_be_decided_later(records: list[StepRecord], data: st.DataObject) -> None:
    timeline = timeline_of(records)
    for record in records:
        for row in record.rows:
            if data.draw(st.booleans()):
                row.drafted, row.accepted, row.committed = (data.draw(counts) for _ in range(3))
                timeline.update(row)
    assert list(timeline) == records


def test_a_long_call_leaves_nothing_for_the_garbage_collector_to_look_at() -> None:
    recorder = StatsRecorder(AspireConfig(), [1] * 8)
    before = len(gc.get_objects())
    for step in range(200):
        recorder.step(step, step + 1, [RowRecord(i, RowKind.DRAFT, 1) for i in range(8)], [])
    assert len(gc.get_objects()) - before < 50, "of 1,600 rows"
    assert len(recorder.stats.timeline) == 200
