"""The engine: requests in, committed tokens out, one mixed forward per step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batch import MixedBatch, pack
from .cache import AspireCache
from .conversation import Prefix
from .decoding import Decoding
from .request import Committed, Request, Row, RowKind
from .sampling import RejectionSampler
from .testing import DraftFunction
from .timeline import RowRecord
from .verification import Decision, Verified, Verifier, draws_for

if TYPE_CHECKING:
    from .pipeline import Pipeline  # it imports triton, which a CPU need not have


class Engine:
    """Decodes requests, each at its own pace.

    Args:
        decoding: The call's parts.
        cache: Pages.
        verifier: Decides verified rows.
        history: `[requests, columns]` int64: padded prompts, then committed tokens and drafts.
        replace_draft: Test hook.
        prefix: Keys and values that a passed-in cache holds already, or None.
        fed_columns: Columns of the padded prompt that are fed; the others are in the cache already.
        embeds: `[requests, fed columns, hidden]` prompts given as embeddings, or None.
        pipeline: Takes over between prompts where the device can go ahead of the host, or None.
    """

    def __init__(
        self,
        decoding: Decoding,
        *,
        cache: AspireCache,
        verifier: Verifier,
        history: Tensor,
        replace_draft: DraftFunction | None,
        prefix: Prefix | None,
        fed_columns: int,
        embeds: Tensor | None,
        pipeline: Pipeline | None,
    ) -> None:
        self._runner = decoding.runner
        self._contexts = decoding.contexts
        self._planner = decoding.planner
        self._schedule = decoding.schedule
        self._cost_model = decoding.cost_model
        self._processing = decoding.processing
        self._sampler = decoding.sampler
        self._end_tokens = decoding.end_tokens
        self._recorder = decoding.recorder
        self._width = decoding.prompt_width
        self._cache = cache
        self._verifier = verifier
        self._history = history
        self._replace_draft = replace_draft
        self._prefix = prefix
        # Prompts given as embeddings have no tokens in the history: any address serves for them.
        self._fed_columns = fed_columns if embeds is None else self._width
        self._embeds = embeds
        self._pipeline = pipeline
        self._records: list[RowRecord] = []

    @property
    def active(self) -> bool:
        """Whether any request is unfinished, or behind the others in what it is fed."""
        return self._planner.active

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; they start as pages allow."""
        self._planner.waiting.extend(requests)

    def step(self) -> list[Committed]:
        """Plan, pack, forward, verify, commit, refresh."""
        if self._pipeline is not None:
            if self._planner.steady:
                return self._pipeline.step()
            if self._pipeline.entered:
                return self._pipeline.drain()
        started = time.perf_counter()
        rows = self._plan()
        batch = self._pack(rows)
        logits = self._runner.forward(batch)
        decisions = self._verify(batch, logits)
        committed = self._commit(decisions)
        self._refresh(batch, decisions)
        self._record(batch, decisions, started)
        return committed

    def close(self) -> None:
        """Frees every page."""
        self._planner.close()

    def _plan(self) -> list[Row]:
        for request in self._planner.admit():
            request.runs = self._cache.runs(request.pages)
            self._cache.assign(request.row, request.pages)
            if self._prefix is not None:
                self._prefix.load(request, self._cache)
        rows = self._planner.rows()
        for row in rows:
            if row.request.padding:
                first = self._width + row.request.generated
                self._history[row.request.row, first : first + row.queries - 1] = self._tensor(row.request.drafts)
        return rows

    def _pack(self, rows: list[Row]) -> MixedBatch:
        drafts = [row for row in rows if row.kind is RowKind.DRAFT]
        sparse = self._contexts.view(drafts, self._cache.page_table) if drafts else None
        batch = pack(rows, self._history, self._width, self._fed_columns, self._cache.trash_slot, sparse)
        if self._embeds is not None and any(row.kind is RowKind.PREFILL for row in rows):
            batch = dataclasses.replace(batch, embeds=self._embedded(batch, self._embeds))
        return batch

    def _embedded(self, batch: MixedBatch, prompts: Tensor) -> Tensor:
        """The batch as embeddings: those given for the prompts, the model's own for all other tokens."""
        packed = self._runner.embed(batch.token_ids)
        for row, offset in zip(batch.rows, batch.offsets, strict=True):
            if row.kind is RowKind.PREFILL:
                request = row.request
                columns = request.columns[request.prefilled : request.prefilled + row.queries]
                picked = prompts[request.row, torch.from_numpy(columns).to(prompts.device)]
                packed[0, offset : offset + row.queries] = picked.to(packed)
        return packed

    def _verify(self, batch: MixedBatch, logits: Tensor) -> list[Decision]:
        """Proposes a token for every draft row, and decides rows with full attention."""
        self._records = []
        verified: list[Verified] = []
        drafts: list[Row] = []
        draft_logits: list[Tensor] = []
        first = 0
        for index, row in enumerate(batch.rows):
            part = logits[first : first + row.logits]
            first += row.logits
            record = None if row.request.padding else RowRecord(row.request.row, row.kind, row.queries)
            self._records += [record] if record else []
            if row.kind is RowKind.DRAFT:
                drafts.append(row)
                draft_logits.append(part)
            elif row.logits:
                scores = self._runner.backend.scores(index) if row.scored else None
                verified += self._verified(row, part, scores, record)
            if row.kind is RowKind.PREFILL:
                self._end_chunk(row)
        if drafts:
            self._propose(drafts, torch.cat(draft_logits))
        return self._verifier.decide(verified)

    def _verified(self, row: Row, logits: Tensor, scores: Tensor | None, record: RowRecord | None) -> list[Verified]:
        """A row and, behind a prompt, its forks: they start from the same logits."""
        request = row.request
        rows = [Verified(request, row, logits, list(request.drafts), record, scores)]
        if row.kind is RowKind.PREFILL:
            for fork in request.forks:
                self._records.append(RowRecord(fork.row, RowKind.PREFILL, 0))
                rows.append(Verified(fork, row, logits, [], self._records[-1], scores))
        return rows

    def _propose(self, rows: list[Row], logits: Tensor) -> None:
        """Drafts one token per draft row."""
        requests = [row.request for row in rows]
        depths = [len(request.drafts) for request in requests]
        positions = [request.generated + depth for request, depth in zip(requests, depths, strict=True)]
        slots = [request.row for request in requests]
        scores = self._processing(logits, slots, positions)
        draws = draws_for(requests, positions, scores.device)
        tokens = self._sampler.draft(scores, draws, self._tensor(slots), self._tensor(depths)).tolist()
        for i, request in enumerate(requests):
            if self._replace_draft is not None:
                tokens[i] = int(self._replace_draft(request.row, positions[i], tokens[i]))
                if isinstance(self._sampler, RejectionSampler):
                    self._sampler.replace(request.row, depths[i], tokens[i])
            request.drafts.append(tokens[i])
            request.drafted_end = tokens[i] in self._end_tokens
        self._history[slots, [self._width + position for position in positions]] = self._tensor(tokens)

    def _end_chunk(self, row: Row) -> None:
        request = row.request
        request.prefilled += row.queries
        if row.finishes_prompt:
            for member in self._planner.prefilled(request):
                member.length, member.prefilled = member.kept, member.fed
                if member is not request and member.kept % self._cache.page_size:
                    self._cache.copy_page(request.pages[member.shared], member.pages[member.shared])

    def _commit(self, decisions: list[Decision]) -> list[Committed]:
        """Makes decided tokens part of their requests. Rollback is a length that does not grow."""
        committed = []
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for decision in decisions:
            request, count = decision.verified.request, len(decision.tokens)
            rows += [request.row] * count
            columns += range(self._width + request.generated, self._width + request.generated + count)
            values += decision.tokens
            request.generated += count
            if not request.padding:
                committed.append(Committed(request, decision.tokens, decision.stopped))
        self._history[rows, columns] = self._tensor(values)
        return committed

    def _refresh(self, batch: MixedBatch, decisions: list[Decision]) -> None:
        """Attention scores become sparse contexts, rounds end, and finished rows give their pages back."""
        for index, row in enumerate(batch.rows):
            if row.kind is RowKind.DRAFT and row.scored:
                self._contexts.renew(row, row.request, self._runner.backend.scores(index))
        for decision in decisions:
            verified, request = decision.verified, decision.verified.request
            if decision.over:
                if verified.row.kind is not RowKind.PREFILL:
                    self._end_round(verified)
                if verified.scores is not None:
                    self._contexts.renew(verified.row, request, verified.scores)
            if decision.stopped and not request.stopped:
                request.stopped = True
                request.padding = self._planner.after_end.token is not None
                if not self._planner.after_end.stay:
                    self._planner.finish(request)

    def _end_round(self, verified: Verified) -> None:
        request = verified.request
        request.length += len(verified.tokens)
        request.rounds += 1
        request.draft_rounds += bool(verified.drafts)
        request.drafts = []
        request.drafted_end = False
        if not request.padding:
            self._schedule.observe(request.row, verified.drafted, verified.accepted)

    def _record(self, batch: MixedBatch, decisions: list[Decision], started: float) -> None:
        ended = time.perf_counter()
        if not any(row.kind is RowKind.PREFILL for row in batch.rows):
            read, plain = sum(row.read for row in batch.rows), all(row.plain for row in batch.rows)
            self._cost_model.observe(batch.tokens, read, ended - started, plain)
        decided = []
        for decision in decisions:
            verified, record = decision.verified, decision.verified.record
            if decision.over and record is not None:
                record.drafted, record.accepted = verified.drafted, verified.accepted
                record.committed = len(verified.tokens)
                decided.append(record)
        self._recorder.step(started, ended, self._records, decided)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._history.device)
