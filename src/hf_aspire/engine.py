"""The engine: requests in, committed tokens out, one mixed forward per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import MixedBatch, pack
from .cache import AspireCache
from .cost_model import CostModel
from .planner import Planner
from .processing import Processing
from .request import Request, Row, RowKind
from .runner import Runner
from .sampling import Draws, RejectionSampler, Sampler
from .scheduler import Schedule
from .selection import SparseContexts
from .stats import RowRecord, StatsRecorder
from .testing import Hooks, Replay


@dataclass(frozen=True)
class Committed:
    """Tokens that a step added to a request's text, in order, and whether they end it."""

    request: Request
    tokens: list[int]
    finished: bool


@dataclass(frozen=True)
class _Decided:
    """Rows that chose their final tokens in a step: `source` is the packed row, `request` its own or a fork."""

    source: int
    request: Request
    drafted: int
    accepted: int
    tokens: list[int]


class Engine:
    """Decodes requests, each at its own pace.

    Args:
        runner: Runs packed batches.
        cache: Pages.
        contexts: Sparse contexts.
        planner: Decides the rows of a step.
        schedule: Learns how rounds went.
        cost_model: Learns how long steps take.
        processing: Logits processors.
        sampler: Chooses tokens.
        history: `[requests, columns]` int64: padded prompts, then committed tokens and drafts.
        prompt_width: Columns of the padded prompt.
        end_tokens: Tokens that end a text.
        recorder: Statistics.
        hooks: Test hooks.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        cache: AspireCache,
        contexts: SparseContexts,
        planner: Planner,
        schedule: Schedule,
        cost_model: CostModel,
        processing: Processing,
        sampler: Sampler,
        history: Tensor,
        prompt_width: int,
        end_tokens: frozenset[int],
        recorder: StatsRecorder,
        hooks: Hooks,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._contexts = contexts
        self._planner = planner
        self._schedule = schedule
        self._cost_model = cost_model
        self._processing = processing
        self._sampler = sampler
        self._history = history
        self._width = prompt_width
        self._end_tokens = end_tokens
        self._recorder = recorder
        self._hooks = hooks
        self._replay = Replay(hooks.acceptance, hooks.seed) if hooks.acceptance else None

    @property
    def active(self) -> bool:
        """Whether any request is unfinished."""
        return self._planner.active

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; they start as pages allow."""
        self._planner.waiting.extend(requests)

    def step(self) -> list[Committed]:
        """Plan, pack, forward, verify, commit, refresh."""
        started = time.perf_counter()
        rows = self._plan()
        batch = self._pack(rows)
        logits = self._runner.forward(batch)
        decided = self._verify(batch, logits)
        committed = self._commit(batch, decided)
        self._refresh(batch, committed)
        self._record(batch, decided, started)
        return committed

    def close(self) -> None:
        """Frees every page."""
        self._planner.close()

    def _plan(self) -> list[Row]:
        for request in self._planner.admit():
            request.runs = self._cache.runs(request.pages)
            self._cache.assign(request.row, request.pages)
        return self._planner.rows()

    def _pack(self, rows: list[Row]) -> MixedBatch:
        drafts = [row for row in rows if row.kind is RowKind.DRAFT]
        sparse = self._contexts.view(drafts, self._cache.page_table) if drafts else None
        read = sum(self._contexts.tokens_read(row.request) if row in drafts else row.context for row in rows)
        return pack(rows, self._history, self._width, self._cache.trash_slot, sparse, read)

    def _verify(self, batch: MixedBatch, logits: Tensor) -> list[_Decided]:
        """Chooses tokens: final ones for prompt ends, decode and verify rows, proposals for draft rows."""
        choices = _choices(batch.rows)
        index = [k for choice in choices for k in choice.logits]
        slots = [choice.request.row for choice in choices for _ in choice.logits]
        positions = [p for choice in choices for p in choice.positions]
        scores = self._processing(logits[index] if len(index) != logits.shape[0] else logits, slots, positions)
        draws = self._draws(choices, positions)
        first = 0
        final: list[_Choice] = []
        final_index: list[int] = []
        draft: list[_Choice] = []
        draft_index: list[int] = []
        for choice in choices:
            span = range(first, first + len(choice.logits))
            first = span.stop
            if choice.kind is RowKind.DRAFT:
                draft.append(choice)
                draft_index += span
            else:
                final.append(choice)
                final_index += span
        if draft:
            self._propose(draft, scores[draft_index], draws.pick(self._tensor(draft_index)))
        if not final:
            return []
        return self._decide(final, scores[final_index], draws.pick(self._tensor(final_index)))

    def _propose(self, choices: list[_Choice], scores: Tensor, draws: Draws) -> None:
        """Drafts one token per draft row."""
        slots = [choice.request.row for choice in choices]
        depths = [len(choice.request.drafts) for choice in choices]
        tokens = self._sampler.draft(scores, draws, self._tensor(slots), self._tensor(depths)).tolist()
        for i, choice in enumerate(choices):
            request = choice.request
            if self._hooks.draft is not None:
                tokens[i] = int(self._hooks.draft(request.row, choice.positions[0], tokens[i]))
                if isinstance(self._sampler, RejectionSampler):
                    self._sampler.replace(request.row, depths[i], tokens[i])
            request.drafts.append(tokens[i])
            request.drafted_end = tokens[i] in self._end_tokens
        columns = [self._width + choice.positions[0] for choice in choices]
        self._history[slots, columns] = self._tensor(tokens)

    def _decide(self, choices: list[_Choice], scores: Tensor, draws: Draws) -> list[_Decided]:
        """Final tokens of every row that gets some."""
        slots = self._tensor([choice.request.row for choice in choices])
        counts = [len(choice.logits) for choice in choices]
        most = max(counts) - 1
        padded = [choice.drafts + [-1] * (most - len(choice.drafts)) for choice in choices]
        drafts = self._tensor(padded).view(len(choices), most)
        outcome = self._sampler.verify(scores, draws, drafts, self._tensor(counts), slots)
        accepted, tokens = outcome.accepted.tolist(), outcome.tokens.tolist()
        if self._replay is not None:
            for i, choice in enumerate(choices):
                accepted[i] = self._replay.accepted(len(choice.drafts))
                tokens[i][: accepted[i]] = choice.drafts[: accepted[i]]
        self._check(choices, scores, accepted)
        return [
            self._cut(choice, kept, row_tokens[: kept + 1])
            for choice, kept, row_tokens in zip(choices, accepted, tokens, strict=True)
        ]

    def _cut(self, choice: _Choice, accepted: int, tokens: list[int]) -> _Decided:
        """Ends a row's tokens at its stop; what stands behind it was neither drafted nor accepted."""
        for place, token in enumerate(tokens):
            if token in self._end_tokens:
                tokens = tokens[: place + 1]
                break
        count = len(tokens)
        return _Decided(choice.source, choice.request, min(len(choice.drafts), count), min(accepted, count), tokens)

    def _check(self, choices: list[_Choice], scores: Tensor, accepted: list[int]) -> None:
        """Refuses scores that no token can be chosen from."""
        best = scores.amax(-1).tolist()  # NaN if any score of the row is NaN
        first = 0
        for choice, kept in zip(choices, accepted, strict=True):
            for value, position in zip(best[first : first + kept + 1], choice.positions, strict=False):
                if not self._sampler.can_choose(value):
                    raise ValueError(
                        f"row {choice.request.row}, new token {position}: got {value} as the highest score after the "
                        "logits processors, expected a finite number; check the model's dtype and the processors"
                    )
            first += len(choice.logits)

    def _commit(self, batch: MixedBatch, decided: list[_Decided]) -> list[Committed]:
        """Makes decided tokens part of their requests. Rollback is a length that does not grow."""
        for row in batch.rows:
            if row.kind is RowKind.PREFILL:
                self._end_chunk(row)
        committed = []
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for choice in decided:
            request, count = choice.request, len(choice.tokens)
            rows += [request.row] * count
            columns += range(self._width + request.generated, self._width + request.generated + count)
            values += choice.tokens
            finished = choice.tokens[-1] in self._end_tokens or request.generated + count == request.limit
            if batch.rows[choice.source].kind is not RowKind.PREFILL:
                self._end_round(choice)
            request.generated += count
            committed.append(Committed(request, choice.tokens, finished))
        if rows:
            self._history[rows, columns] = self._tensor(values)
        return committed

    def _end_chunk(self, row: Row) -> None:
        request = row.request
        request.prefilled += row.queries
        if row.finishes_prompt:
            for member in self._planner.prefilled(request):
                member.length, member.prefilled = member.kept, member.fed
                if member is not request and member.kept % self._cache.page_size:
                    self._cache.copy_page(request.pages[member.shared], member.pages[member.shared])

    def _end_round(self, choice: _Decided) -> None:
        request = choice.request
        request.length += len(choice.tokens)
        request.rounds += 1
        request.draft_rounds += bool(choice.drafted)
        request.drafts = []
        request.drafted_end = False
        self._schedule.observe(request.row, choice.drafted, choice.accepted)

    def _refresh(self, batch: MixedBatch, committed: list[Committed]) -> None:
        """Attention scores become the sparse contexts of the next drafts; finished rows give their pages back."""
        for index, row in enumerate(batch.rows):
            if row.scored:
                self._contexts.renew(row, self._runner.backend.scores(index))
            if row.finishes_prompt:
                for fork in row.request.forks:
                    self._contexts.fork(row.request, fork)
        for entry in committed:
            if entry.finished:
                self._planner.finish(entry.request)

    def _record(self, batch: MixedBatch, decided: list[_Decided], started: float) -> None:
        ended = time.perf_counter()
        if not any(row.kind is RowKind.PREFILL for row in batch.rows):
            self._cost_model.observe(batch.tokens, batch.tokens_read, ended - started)
        records = [RowRecord(row.request.row, row.kind, row.queries, 0, 0, 0) for row in batch.rows]
        for choice in decided:
            record = records[choice.source]
            if choice.request.row != record.request:  # a fork's first token comes from its source's prompt
                record = RowRecord(choice.request.row, RowKind.PREFILL, 0, 0, 0, 0)
                records.append(record)
            record.drafted, record.accepted, record.committed = choice.drafted, choice.accepted, len(choice.tokens)
        self._recorder.step(started, ended, records)

    def _draws(self, choices: list[_Choice], positions: list[int]) -> Draws:
        keys = [choice.request.noise_key for choice in choices for _ in choice.logits]
        rounds = [choice.request.rounds for choice in choices for _ in choice.logits]
        return Draws(self._tensor(keys), self._tensor(positions), self._tensor(rounds))

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._history.device)


@dataclass(frozen=True)
class _Choice:
    """A row's positions that choose tokens: where their logits are, and which generated tokens they are."""

    source: int
    request: Request
    kind: RowKind
    drafts: list[int]
    logits: range
    positions: range


def _choices(rows: Sequence[Row]) -> list[_Choice]:
    """What chooses tokens in a step; a prompt end chooses for its forks too."""
    choices: list[_Choice] = []
    first = 0
    for source, row in enumerate(rows):
        count = row.logits
        logits = range(first, first + count)
        first += count
        if not count:
            continue
        request = row.request
        begin = request.generated + (len(request.drafts) if row.kind is RowKind.DRAFT else 0)
        drafts = list(request.drafts) if row.kind is RowKind.VERIFY else []
        members = [request, *request.forks] if row.kind is RowKind.PREFILL else [request]
        choices += [_Choice(source, m, row.kind, drafts, logits, range(begin, begin + count)) for m in members]
    return choices
