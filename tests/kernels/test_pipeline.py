"""Steps that run ahead of the host: plain's text, the reference's drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.planned_calls import made, run, settings, text_of
from kit import benchmark, pick, ragged
from transformers import LlamaForCausalLM

import hf_aspire
from hf_aspire import prompt_attention
from hf_aspire.cost_model import CostModel
from hf_aspire.graphs import Graphs, Needs, Shape
from hf_aspire.kernels import work
from hf_aspire.pipeline import Pipeline, _Moment
from hf_aspire.planner import Planner
from hf_aspire.request import Row
from hf_aspire.staging import UNDER_WAY, Staging
from hf_aspire.step_tables import Plan, StepTables
from hf_aspire.testing import random_context, replay_acceptance
from hf_aspire.workspace import workspaces

pytestmark = pytest.mark.usefixtures("planned")


@pytest.mark.parametrize(
    ("context", "schedule"), [("verify", "staggered"), ("verify", "fixed"), ("refresh", "fsm"), ("refresh", "aspire")]
)
def test_greedy_text_is_plains(llama: LlamaForCausalLM, context: str, schedule: str) -> None:
    batch = pick(ragged((50, 7, 70)), [0, 1, 2, 2])  # two rows share a prompt, so one is forked
    config = settings(context=context, schedule=schedule, cost=(1e-3, 0.0, 1e-3))
    expected = text_of(llama, batch, max_new_tokens=12)
    end = int(expected[0, -6])  # ends the first row, and others perhaps, in the middle of a round
    for keywords in ({}, {"eos_token_id": end, "pad_token_id": 0}):
        expected = text_of(llama, batch, max_new_tokens=12, **keywords)
        text, stats = run(llama, batch, config, max_new_tokens=12, **keywords)
        assert torch.equal(text, expected)
        ends = [(row == end).nonzero()[:1, 0].tolist() if keywords else [] for row in expected[:, 70:]]
        assert stats.committed == [place[0] + 1 if place else 12 for place in ends]
        assert stats.rows_drafted


@pytest.mark.parametrize("waits", ["never", "always", "once"])
def test_a_second_step_is_planned_ahead_once_the_device_waits(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    launch, ahead, asked, steady = Pipeline._launch, list[int](), list[_Moment](), list[bool]()

    def note(self: Pipeline, rows: list[Row]) -> Any:
        ahead.append(len(self._flights))
        steady.append(bool(self._flights) and self._flights[-1].steady)
        return launch(self, rows)

    def reached(moment: _Moment) -> bool:
        asked.append(moment)
        return waits == "always" or (waits == "once" and len(asked) == 3)

    monkeypatch.setattr(Pipeline, "_launch", note)
    monkeypatch.setattr(_Moment, "reached", property(reached))
    batch = ragged((30, 7))
    keywords = {"eos_token_id": int(text_of(llama, batch, max_new_tokens=9)[1, -1]), "pad_token_id": 0}
    expected = text_of(llama, batch, max_new_tokens=18, **keywords)
    text, _ = run(llama, batch, settings(schedule="staggered"), max_new_tokens=18, **keywords)
    assert torch.equal(text, expected)
    assert len(asked) == sum(steady), "nobody asks behind a step that was compiled or captured"
    first = len(ahead) if waits == "never" else ahead.index(2)
    assert ahead[:first] == [0, *[1] * (first - 1)]
    assert set(ahead[first:-1]) <= {2}, "from then on, but for a row at its limit"


def test_memory_that_tables_are_sent_from_is_free_when_it_is_written_to_again(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps ahead, and behind a call that was interrupted: the device has done the step that was sent from it."""
    moments, done, sent = list[_Moment](), 0, dict[int, _Moment]()
    init, wait, send, launch, collect = (
        _Moment.__init__, _Moment.wait, Staging.send, Pipeline._launch, Pipeline._collect
    )  # fmt: skip
    turn = collected = 0

    def note(self: _Moment, device: torch.device) -> None:
        init(self, device)
        moments.append(self)

    def waited(self: _Moment) -> None:
        nonlocal done
        wait(self)
        done = max(done, moments.index(self))

    def written(self: Staging, *arguments: Any) -> Any:
        nonlocal turn
        views, turn = send(self, *arguments), self._turn
        assert turn not in sent or moments.index(sent[turn]) <= done
        return views

    def launched(self: Pipeline, rows: list[Row]) -> Any:
        flight = launch(self, rows)
        sent[turn] = flight.done
        return flight

    def interrupted(self: Pipeline, flight: Any) -> Any:
        nonlocal collected
        collected += 1
        if collected == 6:
            raise KeyboardInterrupt
        return collect(self, flight)

    monkeypatch.setattr(_Moment, "reached", True)
    for owner, name, function in (
        (_Moment, "__init__", note), (_Moment, "wait", waited), (Staging, "send", written),
        (Pipeline, "_launch", launched), (Pipeline, "_collect", interrupted),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, function)
    config, batch = settings(schedule="staggered"), ragged((30, 7))
    with pytest.raises(KeyboardInterrupt):
        run(llama, batch, config, max_new_tokens=18)
    run(llama, batch, config, max_new_tokens=18)
    assert collected > 12 and len(sent) == UNDER_WAY


def test_a_moment_is_reached_when_its_work_is_done(device: torch.device) -> None:
    moment = _Moment(device)
    moment.wait()
    assert moment.reached


@pytest.mark.parametrize("schedule", ["fixed", "fsm"])
def test_the_clock_does_not_choose_texts_that_go_by_rounds(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    config, texts = settings(schedule=schedule, sampling="rejection", seed=3), []
    for waits in (False, True):
        monkeypatch.setattr(_Moment, "reached", waits)
        texts.append(run(llama, ragged((50, 30)), config, max_new_tokens=14, do_sample=True, temperature=0.7)[0])
    assert torch.equal(*texts)


def test_the_cost_model_hears_what_steps_read(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of the host as step by step, as long as nothing is rejected; steps of new shapes are left out."""
    found = list[tuple[int, float]]()
    monkeypatch.setattr(CostModel, "observe", lambda self, tokens, read, seconds, plain: found.append((tokens, read)))
    seen = {}
    for backend in ("torch", "triton"):
        config = settings(schedule="fixed", backend=backend, sparsity=0.3)
        for _ in range(3):
            found.clear()
            with replay_acceptance([1.0]):
                run(llama, ragged((60, 50)), config, max_new_tokens=18)
        seen[backend] = set(found)
    assert len(seen["torch"]) > 8 and len(seen["torch"] & seen["triton"]) > 0.7 * len(seen["torch"])


def test_prompts_read_in_bulk_give_plains_text(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    half, bulks, attend = copy.deepcopy(llama).half(), [], prompt_attention.attend
    monkeypatch.setattr(prompt_attention, "LEAST_QUERIES", 12)
    monkeypatch.setattr(prompt_attention, "attend", lambda bulk, *rest: bulks.append(bulk) or attend(bulk, *rest))
    monkeypatch.setattr("hf_aspire.planner.PREFILL_TOKENS", 40)
    batch = ragged([50, 33, 70, 9])
    text, _ = run(half, batch, settings(context="refresh"), max_new_tokens=16)
    assert text.equal(text_of(half, batch, max_new_tokens=16))
    assert any(bulk.start for bulk in bulks) and not all(bulk.start for bulk in bulks)
    hf_aspire.release(half)


@pytest.mark.parametrize("context", ["verify", "refresh"])
def test_drafts_and_rounds_are_those_of_the_reference(llama: LlamaForCausalLM, context: str) -> None:
    """But for the end of a text, where a step that does not know what the last one committed drafts less."""
    batch = ragged((60, 40))
    stats = {}
    for backend in ("torch", "triton"):
        config = settings(context=context, schedule="fixed", backend=backend)
        _, stats[backend] = run(llama, batch, config, max_new_tokens=16)
    for found, expected in zip(stats["triton"].rounds, stats["torch"].rounds, strict=True):
        same = [pair for pair, other in zip(found, expected, strict=False) if pair == other]
        assert sum(accepted + 1 for _, accepted in same) >= 10
    everything = settings(context=context, schedule="fixed", sparsity=1.0)
    assert run(llama, batch, everything, max_new_tokens=16)[1].acceptance_rate == 1.0


def test_no_row_reads_less_than_its_context(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is cut by upper bounds, which a corrected length must not undercut: the newest tokens would be lost."""
    fill = StepTables.fill
    listed = 0

    def check(self: StepTables, plan: Plan) -> Any:
        nonlocal listed
        found = fill(self, plan)
        for view in self._backend._tables.views.values():
            rows, items = view.rows.cpu(), view.items.cpu()
            used = items[:, work.ITEM_ROW].unique()[1:]  # without -1
            for index in used.tolist():
                planned = items[items[:, work.ITEM_ROW] == index, work.ITEM_END].max()
                assert planned >= rows[index, work.ROW_LENGTH]
            assert rows[used, work.ROW_QUERIES].sum() == plan.shape.tokens
            listed += int(rows[used, work.ROW_LISTED].sum())
        return found

    monkeypatch.setattr(StepTables, "fill", check)
    config = settings(context="refresh", schedule="fixed", cuda_graphs=False)  # replays make no tables
    with replay_acceptance([0.0]):
        run(llama, ragged((60, 50)), config, max_new_tokens=7)
    assert listed


def test_work_that_is_cut_to_fit_a_graph_gives_plains_text(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight: list[Shape] = []

    def squeeze(self: Graphs, needs: Needs, cuttable: Callable[[Shape], bool]) -> Shape:
        """A shape with room for an item less than needed, if that can be."""
        tokens = needs.least.tokens
        less = tuple(items - 1 for items in needs.in_batch_of(tokens))
        shape = needs.least._replace(work=less)
        if not cuttable(shape):
            return needs.least
        tight.append(shape)
        return shape

    monkeypatch.setattr(Graphs, "shape_for", squeeze)
    monkeypatch.setattr("hf_aspire.step_tables._HARDLY_LONGER", 10.0)
    monkeypatch.setattr("hf_aspire.triton_backend._multiprocessors", lambda device: 1)  # so that rows are cut
    batch = ragged((400, 250, 300))
    text, _ = run(llama, batch, settings(schedule="fixed"), max_new_tokens=12)
    assert text.equal(text_of(llama, batch, max_new_tokens=12))
    assert tight


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_sampled_text_is_that_of_the_reference(llama: LlamaForCausalLM, sampling: str) -> None:
    batch = ragged((50, 30))
    texts = [
        run(llama, batch, settings(schedule="fixed", sampling=sampling, seed=3, backend=backend), max_new_tokens=14,
            do_sample=True, temperature=0.7, top_k=20)[0][:, : 50 + 8]
        for backend in ("torch", "triton")
    ]  # fmt: skip
    assert torch.equal(*texts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_captured_choices_are_those_of_the_call_at_hand(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, sampling: str
) -> None:
    """Whatever an earlier call drew by: graphs of choices go on where the next call chooses alike."""
    found, batch = made(monkeypatch), ragged((50, 30))

    def text(seed: int, words: dict[str, Any], **fields: Any) -> torch.Tensor:
        config = settings(schedule="fixed", sampling=sampling, seed=seed, **fields)
        return run(llama, batch, config, max_new_tokens=40, top_k=20, remove_invalid_values=True, **words)[0]

    cold, warm = ({"do_sample": True, "temperature": value, "top_p": 0.9} for value in (0.7, 1.3))
    calls = [(1, cold), (1, cold), (2, cold), (2, warm), (2, {"do_sample": False}), (1, cold)]
    expected = [text(*call, cuda_graphs=False) for call in calls]
    captured = []
    for call, plain_text in zip(calls, expected, strict=True):
        assert torch.equal(text(*call), plain_text)
        captured.append(found[-1]._choices[1])
    assert len(found) == 2 and all(len(graphs) for graphs in captured)
    if sampling == "coupled":  # the drafts' distributions of `rejection` may lie elsewhere in the next call
        assert captured[0] is captured[2] is not captured[3]


def test_the_next_call_knows_what_steps_take(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found, batch, config = made(monkeypatch), ragged((40, 20)), settings(schedule="aspire", context="refresh")
    begun, begin = [], CostModel.begin_call
    monkeypatch.setattr(CostModel, "begin_call", lambda self: begun.append(self) or begin(self))
    run(llama, batch, settings(schedule="fixed", context="refresh"), max_new_tokens=6)
    assert found[0].cost_model is None  # nobody asked
    run(llama, batch, config, max_new_tokens=6)
    known = found[0].cost_model
    assert known is not None and known.steps > 0
    steps = known.steps
    run(llama, batch, config, max_new_tokens=6)
    assert len(found) == 1 and found[0].cost_model is known and known.steps > steps
    assert begun == [known, known]


def test_rows_that_wait_for_pages_start_when_others_end(llama: LlamaForCausalLM) -> None:
    batch = ragged((40, 33, 20))
    memory = 4 * 16 * sum(2 * 1 * 16 * 4 for _ in range(2))  # four pages: one row at a time, or the last with another
    text, stats = run(llama, batch, settings(schedule="staggered", kv_memory=memory), max_new_tokens=8)
    assert torch.equal(text, text_of(llama, batch, max_new_tokens=8))
    prefills = [i for i, step in enumerate(stats.timeline) if any(row.kind.name == "PREFILL" for row in step.rows)]
    assert prefills[-1] > 3


@pytest.mark.parametrize("place", [2, 3])
def test_a_row_that_starts_where_another_ended_leaves_those_under_way_alone(
    llama: LlamaForCausalLM, place: int
) -> None:
    """Whatever the host has not heard of them yet: a draft at one place, a verification at the other."""
    batch = ragged((40, 33, 20), seed=1)
    memory = 7 * 16 * sum(2 * 1 * 16 * 4 for _ in range(2))  # seven pages: four and three for the first two rows
    keywords = {"eos_token_id": int(text_of(llama, batch, max_new_tokens=place)[0, -1]), "pad_token_id": 0}
    expected = text_of(llama, batch, max_new_tokens=12, **keywords)
    config = settings(schedule="staggered", draft_length=1, kv_memory=memory)
    text, stats = run(llama, batch, config, max_new_tokens=12, **keywords)
    assert torch.equal(text, expected)
    late = next(step for step in reversed(stats.timeline) if any(row.kind.name == "PREFILL" for row in step.rows))
    assert {row.request for row in late.rows} == {1, 2}


def test_processors_of_the_text_and_scores_take_the_other_way(llama: LlamaForCausalLM) -> None:
    batch = ragged((40, 20))
    text, _ = run(llama, batch, settings(schedule="fixed"), max_new_tokens=8, repetition_penalty=1.3)
    assert torch.equal(text, text_of(llama, batch, max_new_tokens=8, repetition_penalty=1.3))


def test_scores_that_are_nan_end_a_call_with_a_clear_error(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = llama.lm_head.weight.data.clone()
    monkeypatch.setattr(llama.lm_head.weight, "data", torch.full_like(weight, torch.nan))
    with pytest.raises(ValueError, match="got nan as the highest score"):
        run(llama, ragged((40,)), settings(schedule="autoregressive"), max_new_tokens=4)
    assert llama not in workspaces._kept or workspaces._kept[llama][1].cache.allocator.all_free


def test_the_benchmarks_clock_times_every_planned_step(llama: LlamaForCausalLM) -> None:
    with benchmark("host_clock") as clock, clock.host_clock() as seconds:
        _, stats = run(llama, ragged([40, 55]), settings(schedule="fixed"), max_new_tokens=12)
    assert len(seconds) == stats.steps and min(seconds) > 0
    found = clock.host_times(seconds)
    assert 0 < found["host_milliseconds"] <= found["host_milliseconds_90_percent"] <= 1e3 * max(seconds)
    assert Planner.rows.__name__ == "rows" and not clock.host_times([])


def test_replayed_acceptance_is_what_rounds_keep(llama: LlamaForCausalLM) -> None:
    with random_context(), replay_acceptance([1.0, 1.0, 0.0]):
        _, stats = run(llama, ragged((60, 50)), settings(schedule="fixed", draft_length=4), max_new_tokens=12)
    assert {pair for rounds in stats.rounds for pair in rounds if pair[0] == 4} == {(4, 2)}
