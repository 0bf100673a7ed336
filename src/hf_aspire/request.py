"""A request, a row of the returned batch, and what the host knows of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BOOTSTRAP = 8
"""Prompt tokens whose attention makes the first sparse context; the last chunk of a prompt is never shorter."""


class RowKind(IntEnum):
    """What a request does in one step."""

    PREFILL = 0
    DECODE = 1
    DRAFT = 2
    VERIFY = 3


@dataclass(slots=True)
class Request:
    """One row of the batch.

    A prompt token is fed if it is visible, or if it is the last one (its logits start the text). Position is not slot:
    holes in a mask and right padding give positions that differ from the place in the cache, and a masked last token
    is a query that keeps no keys and values.

    Attributes:
        row: Index in the returned batch, and the request's slot.
        columns: Columns of the fed tokens among the fed columns of the padded prompt.
        positions: Their position ids.
        kept: Prompt tokens that keep keys and values: the cached ones, and of the fed ones all, or all but the last.
        limit: Most tokens to generate.
        noise_key: 64-bit key of the row's random numbers.
        cached_columns: Visible columns whose keys and values come from a cache that was passed in; they count as
            kept, and are not fed.
        length: Tokens whose keys and values are final. The last committed token is not among them: it has no final
            ones until it was verified.
        prefilled: Fed tokens done.
        generated: Committed tokens.
        drafts: Tokens drafted since the last verification.
        drafted_end: Whether the last draft ends the text, so that nothing may be drafted behind it.
        rounds: Verify and decode rows done.
        draft_rounds: Those that held a draft.
        pages: Its pages, in order.
        shared: Leading pages it shares with the request it was forked from.
        runs: The pages as contiguous (begin, end) stretches of token slots.
        forks: Requests with the same prompt that start from this one's prefill.
        waiting: Whether verified logits of it wait for other rows, so that it can do nothing.
        stopped: Whether its text has ended.
        padding: Whether it is fed pad tokens behind its end, as plain feeds them, while others go on.
    """

    row: int
    columns: NDArray[np.int64]
    positions: NDArray[np.int64]
    kept: int
    limit: int
    noise_key: int
    cached_columns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    length: int = 0
    prefilled: int = 0
    generated: int = 0
    drafts: list[int] = field(default_factory=list)
    drafted_end: bool = False
    rounds: int = 0
    draft_rounds: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    forks: list[Request] = field(default_factory=list)
    waiting: bool = False
    stopped: bool = False
    padding: bool = False

    @property
    def fed(self) -> int:
        """Prompt tokens to feed."""
        return len(self.columns)

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - self.generated

    def position(self, token: int) -> int:
        """Position id of the `token`-th generated token."""
        return int(self.positions[-1]) + 1 + token

    def context(self, length: int) -> list[tuple[int, int]]:
        """The first `length` tokens as stretches of the pools."""
        clipped: list[tuple[int, int]] = []
        for begin, end in self.runs:
            if length <= 0:
                break
            clipped.append((begin, min(end, begin + length)))
            length -= end - begin
        return clipped


class Row(NamedTuple):
    """n query tokens of one request over one context: everything that a step does is a list of these.

    Attributes:
        request: Whose tokens.
        kind: What they are for.
        queries: How many.
        start: Context index of the first query.
        context: Context tokens once the row's own are stored.
        scored: Whether the attention scores of this row are wanted for the next sparse context.
        read: KV tokens that its attention reads, averaged over layers.
    """

    request: Request
    kind: RowKind
    queries: int
    start: int
    context: int
    scored: bool
    read: float

    @classmethod
    def prefill(cls, request: Request, queries: int, scored: bool) -> Row:
        """The next chunk of a prompt; scores are wanted of the last one only."""
        start = request.prefilled + len(request.cached_columns)
        last = request.prefilled + queries == request.fed
        context = min(start + queries, request.kept)
        return cls(request, RowKind.PREFILL, queries, start, context, scored and last, context)

    @classmethod
    def draft(cls, request: Request, scored: bool, read: float) -> Row:
        """One more draft."""
        start = request.length + len(request.drafts)
        return cls(request, RowKind.DRAFT, 1, start, start + 1, scored, read)

    @classmethod
    def verify(cls, request: Request, scored: bool) -> Row:
        """The last committed token and all drafts; without drafts, a plain decode row."""
        queries = len(request.drafts) + 1
        kind = RowKind.VERIFY if request.drafts else RowKind.DECODE
        context = request.length + queries
        return cls(request, kind, queries, request.length, context, scored, context)

    @property
    def plain(self) -> bool:
        """Whether this is a row of plain decoding."""
        return self.kind is RowKind.DECODE and not self.scored

    @property
    def finishes_prompt(self) -> bool:
        """Whether this is the last chunk of a prompt."""
        request = self.request
        end = self.start - len(request.cached_columns) + self.queries
        return self.kind is RowKind.PREFILL and end == request.fed

    @property
    def logits(self) -> int:
        """How many of the queries, counted from the last, need logits."""
        return int(self.finishes_prompt) if self.kind is RowKind.PREFILL else self.queries

    @property
    def certain(self) -> int:
        """Context tokens that stay whatever of the row is accepted: what its scores are used for."""
        return self.context if self.kind is RowKind.PREFILL else self.start + 1


@dataclass(frozen=True)
class Committed:
    """Tokens that a step added to a request's text, in order, and whether they end it."""

    request: Request
    tokens: list[int]
    stopped: bool
