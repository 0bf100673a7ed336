"""Admits requests and turns the scheduler's decisions into the rows of a step. Host data only, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .config import AspireConfig
from .pages import PageAllocator
from .request import BOOTSTRAP, Request, Row, RowKind
from .scheduler import Candidate, Schedule

PREFILL_TOKENS = 8192
"""Prompt tokens per step: enough to fill any device's matrix units, few enough to bound activation memory."""


class Contexts(Protocol):
    """What planning asks of the sparse contexts."""

    def ready(self, request: Request) -> bool:
        """Whether the request's list allows a draft now."""

    def wants_scores(self, length: int) -> bool:
        """Whether a list at this length needs scores."""

    def tokens_read(self, request: Request) -> float:
        """KV tokens of the next draft row, averaged over layers."""


@dataclass(frozen=True)
class AfterEnd:
    """What rows do whose text has ended, while others go on.

    Attributes:
        stay: They keep their pages and stay in the batch; otherwise they leave at once.
        token: They are fed this token, as plain `generate` does where an EOS is set; None: they go on with their own.
        ahead: How far they may be fed past the others' last committed token.
    """

    stay: bool = False
    token: int | None = None
    ahead: int = 0


class Planner:
    """The requests of a call by state: waiting for pages, in prefill, decoding.

    Args:
        config: Caps and schedule.
        schedule: Decides who drafts.
        contexts: The sparse contexts.
        allocator: Pages.
        draft_scores: Whether draft rows are scored (the policy has a refresh layer).
        after_end: What rows do whose text has ended.
    """

    def __init__(
        self,
        config: AspireConfig,
        schedule: Schedule,
        contexts: Contexts,
        allocator: PageAllocator,
        draft_scores: bool,
        after_end: AfterEnd,
    ) -> None:
        self._config = config
        self._schedule = schedule
        self._contexts = contexts
        self._allocator = allocator
        self._draft_scores = draft_scores
        self.after_end = after_end
        self._drafts = config.schedule != "autoregressive"
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []

    @property
    def active(self) -> bool:
        """Whether any request is unfinished, or behind the others in what it is fed."""
        if self.waiting or self.prefilling or not all(request.stopped for request in self.decoding):
            return True
        return any(request.padding and request.generated < self._furthest for request in self.decoding)

    @property
    def steady(self) -> bool:
        """Whether no prompt is read, and none can start."""
        if self.prefilling:
            return False
        return not (self.waiting and self._allocator.can_allocate(self.pages_for(self.waiting[0])))

    @property
    def _furthest(self) -> int:
        return max((request.generated for request in self.decoding), default=0)

    def pages_for(self, request: Request) -> int:
        """Pages that a request may need: its prompt, and all it may generate but the last token."""
        return pages_for(request.kept, request.limit, self._config.page_size)

    def admit(self) -> list[Request]:
        """Gives pages to waiting requests, in order, as far as they go; forks share their source's prompt pages.

        Returns:
            The requests that got pages.
        """
        admitted: list[Request] = []
        while self.waiting and self._allocator.can_allocate(self.pages_for(self.waiting[0])):
            request = self.waiting.popleft()
            request.pages = self._allocator.allocate(self.pages_for(request))
            admitted += [request, *self._admit_forks(request)]
            self.prefilling.append(request)
        return admitted

    def _admit_forks(self, source: Request) -> list[Request]:
        shared = source.kept // self._config.page_size
        fitting: list[Request] = []
        for fork in source.forks:
            own = self.pages_for(fork) - shared
            if not self._allocator.can_allocate(own):
                break
            self._allocator.share(source.pages[:shared])
            fork.pages = source.pages[:shared] + self._allocator.allocate(own)
            fork.shared = shared
            fitting.append(fork)
        left = source.forks[len(fitting) :]
        source.forks = fitting
        if left:  # the rest waits, and will prefill once more for itself
            left[0].forks = left[1:]
            self.waiting.appendleft(left[0])
        return fitting

    def rows(self) -> list[Row]:
        """The rows of the next step."""
        rows = self._prefill_rows()
        ready = [r for r in self.decoding if r.generated < r.limit and not r.waiting and not r.padding]
        candidates = [self._candidate(request) for request in ready]
        kinds = self._schedule.decide(candidates) if candidates else []
        draft = RowKind.DRAFT  # members of an enum are slow to look up
        for request, candidate, kind in zip(ready, candidates, kinds, strict=True):
            if kind is draft and self._contexts.ready(request):
                wanted = self._draft_scores and self._contexts.wants_scores(request.length + 1)
                rows.append(Row.draft(request, wanted, candidate.sparse_context))
            elif kind is not None:
                # A request that wants to draft and has no fresh list asks this decode row for the scores of one.
                renews = self._drafts and (bool(request.drafts) or kind is draft)
                longest = request.length + len(request.drafts) + 2
                rows.append(Row.verify(request, renews and self._contexts.wants_scores(longest)))
        return rows + self._padding_rows()

    def _padding_rows(self) -> list[Row]:
        """Rows of ended texts: the pads to come are known, so they are drafts that need no draft step."""
        rows: list[Row] = []
        token = self.after_end.token
        if token is None:
            return []
        target = self._furthest + self.after_end.ahead
        for request in self.decoding:
            count = min(target - request.generated, self._config.max_draft + 1, request.remaining)
            if request.padding and not request.waiting and count > 0:
                request.drafts = [token] * (count - 1)
                rows.append(Row.verify(request, scored=False))
        return rows

    def prefilled(self, request: Request) -> list[Request]:
        """Moves a request whose prompt is done, and its forks, to the decoding ones; returns them."""
        self.prefilling.remove(request)
        group = [request, *request.forks]
        self.decoding += group
        return group

    def finish(self, request: Request) -> None:
        """Takes a finished request out and frees its pages."""
        self.decoding.remove(request)
        self._release(request)

    def close(self) -> None:
        """Frees every page, whatever state its request is in."""
        for request in self.prefilling:
            for fork in request.forks:
                self._release(fork)
        for request in (*self.prefilling, *self.decoding):
            self._release(request)
        self.waiting.clear()
        self.prefilling.clear()
        self.decoding.clear()

    def _release(self, request: Request) -> None:
        self._allocator.release(request.pages)
        request.pages = []

    def _prefill_rows(self) -> list[Row]:
        """Chunks of prompts, none cut to fill a step: those of all long prompts have the same few shapes."""
        rows: list[Row] = []
        room = PREFILL_TOKENS
        for request in self.prefilling:
            left = request.fed - request.prefilled
            queries = min(left, PREFILL_TOKENS)
            if queries > room:
                break
            if 0 < left - queries < BOOTSTRAP < queries:
                queries -= BOOTSTRAP
            wanted = self._drafts and request.limit > 1 and self._contexts.wants_scores(request.kept + 1)
            rows.append(Row.prefill(request, queries, wanted))
            room -= queries
        return rows

    def _candidate(self, request: Request) -> Candidate:
        drafted = len(request.drafts)
        most = min(self._config.max_draft, request.limit - request.generated - 1)
        if request.drafted_end or most < drafted:
            most = drafted
        context, sparse_context = request.length + drafted + 1, self._contexts.tokens_read(request)
        return Candidate(request.row, drafted, most, request.draft_rounds, context, sparse_context)


def pages_for(kept: int, limit: int, page_size: int) -> int:
    """Pages of a request with `kept` prompt tokens and `limit` new ones; the last new token is never fed."""
    return max(1, -(-(kept + limit - 1) // page_size))


def group_by_prompt(requests: Sequence[Request], same_prompt: Sequence[int]) -> list[Request]:
    """Hangs every request with a prompt seen before onto the first that had it.

    Args:
        requests: All requests, in row order.
        same_prompt: For each, the index of the first request with the same prompt (its own where it is the first).

    Returns:
        The requests to submit; the others are their forks.
    """
    first = [request for index, request in enumerate(requests) if same_prompt[index] == index]
    for index, request in enumerate(requests):
        if same_prompt[index] != index:
            requests[same_prompt[index]].forks.append(request)
    return first
