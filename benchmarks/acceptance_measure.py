"""Expected acceptance of sparse drafts, measured with the package's own rows, pages, lists and attention.

At every position of a text the engine's situation is rebuilt: a verify row over the last round's tokens makes the
lists, then one draft row per depth reads them and stores keys and values that come from sparse attention, as real
drafts do. Only the tokens are forced: every variant drafts the same continuation.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from acceptance_variants import FULL, Measured, Setting, Variant
from torch import Tensor

from hf_aspire.attention import switch
from hf_aspire.backends import TorchBackend
from hf_aspire.batch import pack
from hf_aspire.cache import AspireCache
from hf_aspire.compat import PreTrainedModel
from hf_aspire.planner import PREFILL_TOKENS
from hf_aspire.probe import ModelFacts, check_model, probe_model
from hf_aspire.request import Request, Row
from hf_aspire.runner import Runner
from hf_aspire.selection import ContextPolicy, SparseContexts, SparseView


@contextmanager
def prepared(model: PreTrainedModel, tokens: int) -> Iterator[ModelFacts]:
    """Switches a model to the package's attention, for texts of `tokens` tokens."""
    check_model(model, tokens)
    with switch.on(model):
        yield probe_model(model, tokens)


@dataclass
class _Draft:
    """A request that drafts under a variant, and what was measured of its drafts so far."""

    variant: Variant
    request: Request
    acceptance: list[Tensor] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


class Bench:
    """Pools, lists and runners for one text at a time.

    Args:
        model: A prepared model.
        facts: Its shapes.
        variants: What to compare; those of one policy and budget that stand side by side share their forwards.
        tokens: Tokens of every text.
        setting: What the variants share.
    """

    def __init__(
        self, model: PreTrainedModel, facts: ModelFacts, variants: Sequence[Variant], tokens: int, setting: Setting
    ) -> None:
        self._setting = setting
        grouped = itertools.groupby(variants, key=lambda variant: (variant.policy, variant.budget))
        self._groups = [list(group) for _, group in grouped]
        self._place = {variant: place for group in self._groups for place, variant in enumerate(group)}
        requests = 1 + setting.together * (1 + max(len(group) for group in self._groups))
        pages = -(-tokens // setting.page_size)
        device = facts.layers[0].device
        own = setting.own_pages
        self._cache = AspireCache(facts.layers, pages + (requests - 1) * own, setting.page_size, requests, pages + own)
        self._history = torch.zeros(requests, setting.span, dtype=torch.int64, device=device)
        self._contexts: dict[Variant, SparseContexts] = {}
        self._policies: dict[str, ContextPolicy] = {}
        for variant in variants:
            config = setting.config(variant)
            by_token = dataclasses.replace(config, granularity=1)  # scores that every granularity can use
            policy = self._policies.setdefault(variant.policy, ContextPolicy.of(by_token, len(facts.layers)))
            self._contexts[variant] = SparseContexts(config, policy, requests, tokens, device)
        self._runners = {
            name: Runner(model, self._cache, TorchBackend(self._cache, policy), facts.keeps_logits)
            for name, policy in self._policies.items()
        }

    def measure(self, text: Tensor, positions: Sequence[int]) -> dict[Variant, Measured]:
        """Measures every variant on a text.

        Args:
            text: `[tokens]` int64.
            positions: Where the token stands that was committed last before the round whose verify row makes the
                lists; that round's drafts and the forced continuation follow it.
        """
        setting = self._setting
        source = self._prefill(text[: max(positions)])
        controls = set(positions[:: setting.control_every])
        drafts: list[_Draft] = []
        for first in range(0, len(positions), setting.together):
            rounds = self._begin(source, text, positions[first : first + setting.together])
            target = dict(zip([request.kept for request in rounds], self._target(rounds), strict=True))
            scores = {policy: self._score(policy, rounds) for policy in self._policies}
            for request in rounds:
                request.length += setting.round_drafts + 1
                request.generated += setting.round_drafts + 1
            for group in self._groups:
                chosen = [r for r in rounds if group[0].policy != FULL or r.kept in controls]
                forks = [self._drafting(variant, chosen, scores[variant.policy]) for variant in group]
                drafts += self._draft(list(itertools.chain.from_iterable(forks)), target)
            self._release(rounds)
        self._release([source])
        self._cache.allocator.check_integrity([])
        return {variant: _measured([d for d in drafts if d.variant == variant]) for variant in self._contexts}

    def _prefill(self, text: Tensor) -> Request:
        """Fills pages with a text; requests that stand somewhere in it start from them."""
        tokens = np.arange(len(text), dtype=np.int64)
        pages = self._cache.allocator.allocate(-(-len(text) // self._setting.page_size))
        request = Request(0, tokens, tokens, len(text), 1, 0, pages=pages, runs=self._cache.runs(pages))
        while request.prefilled < request.fed:
            row = Row.prefill(request, min(PREFILL_TOKENS, request.fed - request.prefilled), scored=False)
            self._runners[FULL].forward(pack([row], text[None], 0, 0, self._cache.trash_slot, None))
            request.prefilled += row.queries
        return request

    def _fork(self, source: Request, slot: int, kept: int, length: int) -> Request:
        """A request of `length` final tokens, `kept` of them its prompt, that shares its source's full pages."""
        size, cache = self._setting.page_size, self._cache
        shared = length // size
        own = cache.allocator.allocate(self._setting.own_pages)
        cache.allocator.share(source.pages[:shared])
        if length % size:
            cache.copy_page(source.pages[shared], own[0])
        pages = source.pages[:shared] + own
        cache.assign(slot, pages)
        return Request(
            row=slot,
            columns=source.columns[:kept],
            positions=source.positions[:kept],
            kept=kept,
            limit=self._setting.span + 1,
            noise_key=0,
            length=length,
            prefilled=kept,
            generated=1 + length - kept,
            pages=pages,
            shared=shared,
            runs=cache.runs(pages),
        )

    def _release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._cache.allocator.release(request.pages)

    def _begin(self, source: Request, text: Tensor, positions: Sequence[int]) -> list[Request]:
        """A request per position, with the tokens of its span in its history."""
        requests = [self._fork(source, 1 + i, position, position) for i, position in enumerate(positions)]
        for request in requests:
            self._history[request.row] = text[request.kept : request.kept + self._setting.span]
        if self._setting.model_text:
            self._continue(requests)
        return requests

    def _continue(self, requests: Sequence[Request]) -> None:
        """Puts the model's own text, drawn with full context, in place of the text's from the second token on."""
        seed = self._setting.seed
        seeds = [zlib.crc32(f"{seed} {r.kept} {self._tokens(r, 0, self._setting.span)}".encode()) for r in requests]
        generators = [torch.Generator(self._history.device).manual_seed(seed) for seed in seeds]
        for _ in range(self._setting.span - 1):
            logits = self._forward(FULL, [Row.verify(request, scored=False) for request in requests])
            for request, generator, probabilities in zip(requests, generators, self._softmax(logits), strict=True):
                self._history[request.row, request.generated] = probabilities.multinomial(1, generator=generator)[0]
                request.length += 1
                request.generated += 1
        for request in requests:
            request.length, request.generated = request.kept, 1

    def _target(self, requests: Sequence[Request]) -> Tensor:
        """Distributions `[positions, depth, V]` of the forced continuation under full attention."""
        rows = [self._verify(request, self._setting.span - 1, scored=False) for request in requests]
        logits = self._forward(FULL, rows).view(len(rows), self._setting.span, -1)
        return self._softmax(logits[:, -self._setting.depth :])

    def _score(self, policy: str, requests: Sequence[Request]) -> dict[int, tuple[Row, Tensor]]:
        """The verify rows of the round before and their scores by position; none where no scores are wanted."""
        if not self._policies[policy].full_layers:
            return {}
        rows = [self._verify(request, self._setting.round_drafts, scored=True) for request in requests]
        self._forward(policy, rows)
        backend = self._runners[policy].backend
        return {row.request.kept: (row, backend.scores(index)) for index, row in enumerate(rows)}

    def _verify(self, request: Request, drafts: int, scored: bool) -> Row:
        """A verify row over the first tokens of a request's span; the request itself stays as it is."""
        return Row.verify(dataclasses.replace(request, drafts=self._tokens(request, 1, drafts)), scored)

    def _tokens(self, request: Request, first: int, count: int) -> list[int]:
        return self._history[request.row, first : first + count].tolist()

    def _drafting(
        self, variant: Variant, rounds: Sequence[Request], scores: Mapping[int, tuple[Row, Tensor]]
    ) -> list[_Draft]:
        """Forks every round for a variant, with the list that the round's verify row makes."""
        contexts = self._contexts[variant]
        first = self._setting.together * (1 + self._place[variant])
        drafts = []
        for request in rounds:
            fork = self._fork(request, first + request.row, request.kept, request.length)
            self._history[fork.row] = self._history[request.row]
            if request.kept in scores:
                row, of_tokens = scores[request.kept]
                contexts.renew(row, fork, of_tokens)
            if not contexts.ready(fork):
                raise RuntimeError(f"{variant}: no list after the verify row at position {request.kept}")
            drafts.append(_Draft(variant, fork))
        return drafts

    def _draft(self, drafts: list[_Draft], target: Mapping[int, Tensor]) -> list[_Draft]:
        """Drafts the forced continuation, all requests of a policy in the same forwards; returns them, measured.

        Args:
            drafts: Requests at their first draft.
            target: Distributions `[depth, V]` under full attention, by position.
        """
        for depth in range(self._setting.depth if drafts else 0):
            policy = drafts[0].variant.policy
            for draft in drafts:
                draft.request.drafts = self._tokens(draft.request, draft.request.generated, depth)
            rows = [self._draft_row(draft) for draft in drafts]
            probabilities = self._softmax(self._forward(policy, rows, self._lists(drafts, rows)))
            for index, (draft, row) in enumerate(zip(drafts, rows, strict=True)):
                request = draft.request
                draft.read.append(row.read)
                draft.acceptance.append(torch.minimum(probabilities[index], target[request.kept][depth]).sum())
                if row.scored:
                    self._contexts[draft.variant].renew(row, request, self._runners[policy].backend.scores(index))
        self._release([draft.request for draft in drafts])
        return drafts

    def _draft_row(self, draft: _Draft) -> Row:
        contexts, request = self._contexts[draft.variant], draft.request
        wanted = bool(contexts.policy.draft_layers) and contexts.wants_scores(request.length + 1)  # as the planner
        return Row.draft(request, wanted, contexts.tokens_read(request))

    def _lists(self, drafts: Sequence[_Draft], rows: Sequence[Row]) -> SparseView:
        """Every variant's lists, side by side in one view; short ones repeat their last entry."""
        views = [
            self._contexts[draft.variant].view([row], self._cache.page_table)
            for draft, row in zip(drafts, rows, strict=True)
        ]
        longest = max(view.slots.shape[2] for view in views)
        slots = [torch.cat([v.slots, v.slots[..., -1:].expand(-1, -1, longest - v.slots.shape[2])], 2) for v in views]
        return SparseView(torch.cat(slots, 1), torch.cat([view.lengths for view in views]))

    def _forward(self, policy: str, rows: Sequence[Row], sparse: SparseView | None = None) -> Tensor:
        return self._runners[policy].forward(pack(rows, self._history, 0, 0, self._cache.trash_slot, sparse))

    def _softmax(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self._setting.temperature, -1)


def _measured(drafts: Sequence[_Draft]) -> Measured:
    return Measured(
        [draft.request.kept for draft in drafts],
        torch.stack([torch.stack(draft.acceptance) for draft in drafts]).double().cpu(),
        float(np.mean([draft.read for draft in drafts])),
    )
