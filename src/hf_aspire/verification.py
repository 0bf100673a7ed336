"""Turns the logits of verified rows into committed tokens, with plain `generate`'s processors and stops.

Two ways. `OwnPace`: every row decides all its positions at once, as soon as it is verified; for stock processors
without state, EOS tokens and length limits. `ColumnByColumn`: for user code that looks at the whole batch or keeps
state. There the inner loop is plain's own: processors, choice and stopping criteria run once per committed column, in
order, on the whole padded batch, and rows whose logits are ahead wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .noise import Draws
from .outputs import Outputs
from .processing import Processing
from .request import Request, Row
from .sampler import Sampler
from .testing import Replay
from .timeline import RowRecord


@dataclass(slots=True)
class Verified:
    """A row whose full-attention logits are there, until all its positions are decided.

    Attributes:
        request: Whose; a fork of the row's request after a prompt.
        row: The row.
        logits: `[n, V]`.
        drafts: n - 1 drafted tokens.
        record: Its entry in the statistics; None behind the end of its text.
        scores: Attention scores for the next sparse context, or None.
        tokens: Tokens decided so far.
        stopped: Whether its last one ends the text.
    """

    request: Request
    row: Row
    logits: Tensor
    drafts: list[int]
    record: RowRecord | None
    scores: Tensor | None = None
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def drafted(self) -> int:
        """Drafts that count: all of them, but for those behind the end of the text."""
        return min(len(self.drafts), len(self.tokens)) if self.stopped else len(self.drafts)

    @property
    def accepted(self) -> int:
        """Leading drafts that were kept."""
        pairs = list(zip(self.drafts, self.tokens, strict=False))
        return next((k for k, (draft, token) in enumerate(pairs) if draft != token), len(pairs))


@dataclass(slots=True)
class Decision:
    """What a step decided for a row.

    Attributes:
        verified: The row.
        tokens: Newly committed tokens, in order.
        over: Whether no position is left to decide.
        stopped: Whether the text ends here.
    """

    verified: Verified
    tokens: list[int]
    over: bool
    stopped: bool


class Verifier(Protocol):
    """Decides verified rows."""

    def decide(self, rows: Sequence[Verified]) -> list[Decision]:
        """Takes newly verified rows; returns what can be decided now, of these and of earlier ones."""


def draws_for(requests: Sequence[Request], positions: Sequence[int], device: torch.device) -> Draws:
    """The random numbers of K positions."""

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Draws(
        column([request.noise_key for request in requests]),
        column(list(positions)),
        column([request.rounds for request in requests]),
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """`[n, V]` of several rows: a view where they follow each other in one tensor, as a forward returns them."""
    first, size = parts[0], parts[0].shape[1]
    same = all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts)
    ends = [part.storage_offset() + part.numel() for part in parts]
    follow = all(part.storage_offset() == end for part, end in zip(parts[1:], ends, strict=False))
    if not (same and follow and all(part.is_contiguous() for part in parts)):
        return torch.cat(list(parts))
    return first.as_strided((sum(len(part) for part in parts), size), (size, 1))


def check_choice(sampler: Sampler, best: float, row: int, position: int) -> None:
    """Refuses scores that no token can be chosen from.

    Raises:
        ValueError: The highest score is NaN, or, when sampling, not finite.
    """
    if not sampler.can_choose(best):
        raise ValueError(
            f"row {row}, new token {position}: got {best} as the highest score after the logits processors, "
            "expected a finite number; check the model's dtype and the processors"
        )


class OwnPace:
    """Every row at its own pace.

    Args:
        processing: Stock processors.
        sampler: Chooses tokens.
        end_tokens: Tokens that end a text.
        pad_token: Token that finished rows are fed while others go on.
        outputs: Collects scores and logits.
        replay: Acceptance drawn from a profile, for benchmarks, or None.
    """

    def __init__(
        self,
        processing: Processing,
        sampler: Sampler,
        end_tokens: frozenset[int],
        pad_token: int,
        outputs: Outputs,
        replay: Replay | None = None,
    ) -> None:
        self._processing = processing
        self._sampler = sampler
        self._end_tokens = end_tokens
        self._pad = pad_token
        self._outputs = outputs
        self._replay = replay

    def decide(self, rows: Sequence[Verified]) -> list[Decision]:
        """See `Verifier`."""
        if not rows:
            return []
        counts = [len(row.drafts) + 1 for row in rows]
        owners = [row.request for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        positions = [row.request.generated + k for row, n in zip(rows, counts, strict=True) for k in range(n)]
        logits = _joined([row.logits for row in rows])
        scores = self._processing(logits, [owner.row for owner in owners], positions)
        device = logits.device
        most = max(counts) - 1
        drafts = torch.tensor([r.drafts + [-1] * (most - len(r.drafts)) for r in rows], device=device).view(
            len(rows), most
        )
        slots = torch.tensor([row.request.row for row in rows], device=device)
        draws = draws_for(owners, positions, device)
        outcome = self._sampler.verify(scores, draws, drafts.long(), torch.tensor(counts, device=device), slots)
        accepted, tokens, best = outcome.accepted.tolist(), outcome.tokens.tolist(), outcome.best.tolist()
        decisions = []
        first = 0
        for index, row in enumerate(rows):
            kept = accepted[index]
            if self._replay is not None:
                kept = self._replay.accepted(len(row.drafts))
                tokens[index][:kept] = row.drafts[:kept]
            decision = self._decision(row, tokens[index][: kept + 1])
            for k in range(len(decision.tokens)):
                check_choice(self._sampler, best[first + k], row.request.row, row.request.generated + k)
                self._outputs.put(row.request.row, row.request.generated + k, scores[first + k], logits[first + k])
            decisions.append(decision)
            first += counts[index]
        return decisions

    def _decision(self, row: Verified, tokens: list[int]) -> Decision:
        request = row.request
        stopped = request.padding or request.generated + len(tokens) == request.limit
        if request.padding:
            tokens = [self._pad] * (len(row.drafts) + 1)
        for place, token in enumerate(tokens):
            if token in self._end_tokens and not request.padding:
                tokens, stopped = tokens[: place + 1], True
                break
        row.tokens += tokens
        row.stopped = stopped
        return Decision(row, tokens, over=True, stopped=stopped)


class ColumnByColumn:
    """The whole batch in step, one committed column after the other.

    Args:
        processors: All processors, user-given ones among them, in plain's order.
        criteria: All stopping criteria.
        sampler: Chooses tokens.
        history: `[B, columns]`: padded prompts, committed tokens, drafts.
        prompt_width: Columns of the padded prompt.
        pad_token: Token of finished rows, or None where no EOS is set: stopped rows then go on as plain's do.
        outputs: Collects scores and logits.
    """

    def __init__(
        self,
        processors: Any,
        criteria: Any,
        sampler: Sampler,
        history: Tensor,
        prompt_width: int,
        pad_token: int | None,
        outputs: Outputs,
    ) -> None:
        self._processors = processors
        self._criteria = criteria
        self._sampler = sampler
        self._history = history
        self._width = prompt_width
        self._pad = pad_token
        self._outputs = outputs
        self._waiting: dict[int, Verified] = {}
        self._stopped = torch.zeros(history.shape[0], dtype=torch.bool, device=history.device)
        self._column = 0

    def decide(self, rows: Sequence[Verified]) -> list[Decision]:
        """See `Verifier`."""
        for row in rows:
            row.request.waiting = True
            self._waiting[row.request.row] = row
        decisions: dict[int, Decision] = {}
        everybody = range(self._history.shape[0])
        while len(self._waiting) == len(everybody):
            tokens = self._next_column()
            stopped = self._stopped.tolist()
            for index in everybody:
                row = self._waiting[index]
                decision = decisions.setdefault(index, Decision(row, [], over=False, stopped=False))
                decision.tokens.append(tokens[index])
                row.tokens.append(tokens[index])
                decision.over = len(row.tokens) > len(row.drafts) or row.drafts[len(row.tokens) - 1] != tokens[index]
                decision.stopped = row.stopped = stopped[index]
                if decision.over or all(stopped):
                    decision.over = True
                    row.request.waiting = False
                    del self._waiting[index]
        return list(decisions.values())

    def _next_column(self) -> list[int]:
        rows = [self._waiting[index] for index in range(self._history.shape[0])]
        end = self._width + self._column
        logits = torch.stack([row.logits[len(row.tokens)] for row in rows]).float()
        scores = self._processors(self._history[:, :end], logits)
        device = scores.device
        requests = [row.request for row in rows]
        for request, best in zip(requests, scores.amax(-1).tolist(), strict=True):
            if not request.padding:
                check_choice(self._sampler, best, request.row, self._column)
        taken = [len(row.tokens) for row in rows]
        drafts = [row.drafts[k] if k < len(row.drafts) else -1 for row, k in zip(rows, taken, strict=True)]
        tokens = self._sampler.step(
            scores,
            draws_for(requests, [self._column] * len(rows), device),
            torch.tensor(drafts, device=device),
            torch.tensor(taken, device=device),
        )
        if self._pad is not None:
            tokens = torch.where(self._stopped, self._pad, tokens)
        self._history[:, end] = tokens
        for index in range(len(rows)):
            self._outputs.put(index, self._column, scores[index], logits[index])
        self._column += 1
        self._stopped |= self._criteria(self._history[:, : end + 1], self._outputs.scores_so_far(self._column))
        return tokens.tolist()
