"""A step that only the device knows decides what the same rows decide one kind at a time."""

from __future__ import annotations

import pytest
import torch
from distributions import keys_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as stock

from hf_aspire.choice import Choice
from hf_aspire.device_state import DeviceState
from hf_aspire.graphs import Captures, Shape
from hf_aspire.kernels.step_state import Field
from hf_aspire.kernels.tiles import Tile
from hf_aspire.noise import Draws
from hf_aspire.processing import Processing
from hf_aspire.sampling import make_sampler
from hf_aspire.step_tables import Plan

SLOTS, MOST, WORDS, WIDTH = 4, 3, 12, 5
NOTHING = torch.zeros(0, dtype=torch.int64)
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Text:
    """A request as the host knows it."""

    def __init__(self, slot: int) -> None:
        self.slot, self.tokens, self.drafts, self.rounds = slot, [slot], list[int](), 0


def settled(state: DeviceState, choice: Choice, rows: list[tuple[Text, bool]], scores: Tensor, forced: list[int]):
    """The outcome of a step: texts behind the queries, accepted drafts, highest scores. It is filled up."""
    queries = [1 if drafts else len(text.drafts) + 1 for text, drafts in rows]
    table, tokens = [], []
    for index, ((text, drafts), count) in enumerate(zip(rows, queries, strict=True)):
        held = len(text.drafts) if drafts else 0
        table.append([text.slot, held, len(tokens), -1 if drafts else count - 1, forced[index], text.rounds])
        tokens += [[text.slot, held + k, index, k] for k in range(count)]
    filler, used = [state.filler, 0, SLOTS + 1, 0], len(tokens)
    tokens += [filler] * 3
    table += [[state.filler, 0, 0, -1, -1, 0]] * (SLOTS + 2 - len(table))
    parts = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (tokens, table)]
    shape, tile = Shape(used + 3, 16, 0, False, ()), Tile(16, 64, 2, 2)
    padded = torch.cat([scores, torch.randn(3, WORDS)]).to(DEVICE)
    outcome = choice.settle(Plan(shape, tile, (), parts), padded).cpu()
    text, accepted, best = outcome.split([used + 3, SLOTS + 2, used + 3])
    return text[:used].split(queries), accepted[: len(rows)].tolist(), best[:used].int().view(torch.float32)


@pytest.mark.parametrize("kind", ["greedy", "coupled", "rejection"])
@given(st.data())
def test_settled_steps_are_those_of_the_engine(kind: str, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    keys = keys_of(SLOTS, 3)
    makers = [make_sampler(kind != "greedy", kind, SLOTS, MOST, WORDS, device) for device in (DEVICE, CPU)]
    pages = torch.zeros(SLOTS + 3, 9, dtype=torch.int32, device=DEVICE)
    state = DeviceState(SLOTS + 2, WIDTH + 60, pages, 16, MOST + 1)
    state.noise_keys[:SLOTS] = keys.to(DEVICE)
    state.fields[:SLOTS, Field.GENERATED], state.fields[:SLOTS, Field.COLUMN] = 1, WIDTH
    state.fields[:SLOTS, Field.LENGTH] = 7
    choice = Choice(
        state, Processing([stock.TemperatureLogitsWarper(0.5)], state.history, WIDTH), makers[0], Captures(False)
    )
    texts = [Text(slot) for slot in range(SLOTS)]
    for _ in range(8):
        drafting = [len(text.drafts) < MOST and data.draw(st.booleans()) for text in texts]
        rows = [pair for pair in zip(texts, drafting, strict=True) if data.draw(st.booleans())]
        if not rows:
            continue
        counts = [1 if drafts else len(text.drafts) + 1 for text, drafts in rows]
        scores = torch.randn(sum(counts), WORDS, generator=generator)
        scores[:, 3] += 1.0  # so that some drafts are accepted
        forced = [-1] * len(rows)
        if data.draw(st.booleans()):
            forced = [-1 if drafts else data.draw(st.integers(0, len(text.drafts))) for text, drafts in rows]
        found, accepted, best = settled(state, choice, rows, scores, forced)
        assert torch.equal(best, (scores * 2).amax(-1))
        for (text, drafts), part, given_text, kept, force in zip(
            rows, (scores * 2).split(counts), found, accepted, forced, strict=True
        ):
            slot, held, count = torch.tensor([text.slot]), len(text.drafts), len(part)
            positions = len(text.tokens) + (torch.arange(count) if not drafts else torch.tensor([held]))
            draws = Draws(keys[slot].expand(count), positions, torch.full((count,), text.rounds))
            if drafts:
                token = makers[1].draft(part, draws, slot, torch.tensor([held]))
                assert given_text.tolist() == token.tolist()
                text.drafts.append(int(token))
                continue
            outcome = makers[1].verify(part, draws, torch.tensor([text.drafts]).long(), torch.tensor([count]), slot)
            if force < 0:
                assert kept == int(outcome.accepted)
                assert given_text[: kept + 1].tolist() == outcome.tokens[0, : kept + 1].tolist()
            else:
                assert kept == force and given_text[:kept].tolist() == text.drafts[:kept]
            text.tokens += given_text[: kept + 1].tolist()
            text.drafts, text.rounds = [], text.rounds + 1
            assert state.fields[text.slot, Field.LENGTH] == 7 + len(text.tokens) - 1
            assert state.fields[text.slot, Field.GENERATED] == len(text.tokens)
            line = state.history[text.slot, WIDTH + 1 : WIDTH + len(text.tokens)]
            assert line.tolist() == text.tokens[1:]
    assert not state.history[SLOTS : SLOTS + 2].any()


def test_processors_that_can_be_captured_have_a_key_of_what_they_do() -> None:
    def key(*processors: stock.LogitsProcessor):
        return Processing(list(processors), NOTHING[None], 0).key

    warm = stock.TemperatureLogitsWarper
    assert key() == () and key(warm(0.7)) == key(warm(0.7)) is not None
    different = [key(warm(0.7)), key(warm(0.8)), key(stock.TopPLogitsWarper(0.7)), key(warm(0.7), warm(0.7))]
    assert len(set(different)) == len(different)
    assert hash(key(warm(0.7), stock.TopKLogitsWarper(5), stock.MinPLogitsWarper(0.1))) is not None
    assert key(stock.InfNanRemoveLogitsProcessor()) != key(stock.LogitNormalization())  # neither has settings
    waits = stock.SuppressTokensLogitsProcessor([3])  # keeps a tensor, and looks tokens up in it
    assert key(waits) is key(warm(0.7), waits) is None
    own = type("Own", (warm,), {"__call__": lambda self, ids, scores: scores})(0.7)
    assert key(own) is key(stock.TopHLogitsWarper(0.5)) is None


def test_samplers_that_do_different_things_have_different_keys() -> None:
    samplers = [make_sampler(*kind, 2, 3, 5, CPU) for kind in ((False, ""), (True, "coupled"), (True, "rejection"))]
    other = make_sampler(True, "rejection", 2, 3, 5, CPU)  # has memory of its own
    assert len({sampler.key for sampler in (*samplers, other)}) == 4
    assert make_sampler(True, "coupled", 4, 3, 5, CPU).key == samplers[1].key


def test_a_draft_from_scores_without_a_number_was_proposed_for_sure() -> None:
    """Else a verification would compare with NaN, and reject what it should weigh."""
    sampler = make_sampler(True, "rejection", SLOTS, MOST, WORDS, DEVICE)
    state = DeviceState(SLOTS, 20, torch.zeros(SLOTS + 1, 9, dtype=torch.int32, device=DEVICE), 16, MOST + 1)
    choice = Choice(state, Processing([], state.history, 0), sampler, Captures(False))
    table = [[1, 2, 0, -1, -1, 0], *[[SLOTS, 0, 0, -1, -1, 0]] * SLOTS]
    tokens = [[1, 2, 0, 0], [SLOTS, 0, 4, 0]]
    parts = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (tokens, table)]
    plan = Plan(Shape(2, 16, 0, False, ()), Tile(16, 64, 2, 2), (), parts)
    draft = int(choice.settle(plan, torch.full((2, WORDS), torch.nan, device=DEVICE))[0])
    assert sampler._proposed[1, 2].tolist() == torch.eye(WORDS)[draft].tolist()
    assert not sampler._proposed[:SLOTS].isnan().any() and sampler._proposed[:SLOTS].sum() == 1
