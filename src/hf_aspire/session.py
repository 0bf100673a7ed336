"""Puts the parts of one call together and runs them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .arguments import refuse
from .backends import BackendChoice, choose_backend
from .call import Call
from .capacity import page_count, wanted_pages
from .compat import PreTrainedModel
from .config import AspireConfig
from .conversation import Pages, ReturnedCache
from .cost_model import CostModel, StepCost
from .decoding import Decoding
from .engine import Engine
from .memory import HostMemory, Memory, Sizes
from .outputs import Outputs
from .planner import AfterEnd, Planner, group_by_prompt, pages_for
from .probe import ModelFacts
from .processing import Processing, pure_processors
from .prompt import Prompt
from .request import Request
from .roofline import prior_cost
from .sampling import make_sampler
from .scheduler import make_schedule
from .selection import ContextPolicy, SparseContexts
from .stats import AspireStats, StatsRecorder
from .streaming import ColumnStream
from .testing import Replay, active_hooks
from .verification import ColumnByColumn, OwnPace, Verifier


class Session:
    """One call's engine and what it has committed so far.

    Args:
        call: The call.
        prompt: Its prompts.
        requests: One per row.
        same_prompt: For each row the first one with the same prompt.
        facts: What the probe found.

    Raises:
        ValueError: The backend is not there, or the rows do not fit into memory.
    """

    def __init__(
        self, call: Call, prompt: Prompt, requests: list[Request], same_prompt: Sequence[int], facts: ModelFacts
    ) -> None:
        config, (rows, width) = call.config, call.input_ids.shape
        kernels = choose_backend(config, facts.layers)
        device = facts.device
        self._call = call
        self._prompt = prompt
        self._requests = requests
        self._hooks = active_hooks()
        self._recorder = StatsRecorder(config, [request.fed for request in requests])
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.outputs = Outputs(rows, call.wants("output_scores"), call.wants("output_logits"))
        self._together = call.column_by_column
        policy = ContextPolicy.of(config, len(facts.layers))
        first = group_by_prompt(requests, same_prompt)
        memory = self._memory = self._take_memory(kernels, facts, policy, first)
        self._cache = cache = memory.cache
        self._history = memory.history
        self._history.zero_()  # where nothing is written some token is read: prompts given as embeddings have none
        self._history[:, :width] = call.input_ids.to(device)
        longest = max(request.kept + request.limit for request in requests)
        contexts = SparseContexts(config, policy, rows, longest, device)
        cost_model = _cost_model(config, call.model, facts, memory)
        schedule = make_schedule(config, cost_model)
        sampler = make_sampler(
            call.samples, config.sampling, rows, config.max_draft, facts.vocabulary, device, kernels.draw
        )
        processing = Processing(pure_processors(call.processors), self._history, width)
        ahead = config.max_draft + 1 if self._together else 0
        after_end = AfterEnd(self._whole, call.pad_token if self._stays else None, ahead)
        planner = Planner(config, schedule, contexts, cache.allocator, bool(policy.draft_layers), after_end)
        decoding = Decoding(
            runner=memory.runner(call.model, facts.keeps_logits),
            contexts=contexts,
            planner=planner,
            schedule=schedule,
            cost_model=cost_model,
            processing=processing,
            sampler=sampler,
            end_tokens=call.end_tokens,
            recorder=self._recorder,
            prompt_width=width,
        )
        self.engine = Engine(
            decoding,
            cache=cache,
            verifier=self._verifier(processing, sampler),
            history=self._history,
            replace_draft=self._hooks.draft,
            prefix=prompt.prefix,
            fed_columns=prompt.positions.shape[1],
            embeds=prompt.embeds,
            pipeline=memory.pipeline(decoding, self._replay) if self._goes_ahead(processing, policy) else None,
        )
        if self._hooks.random_context:
            self._fill_context(first)
        self.engine.submit(first)

    def _fill_context(self, first: list[Request]) -> None:
        for pool in (*self._cache.keys, *self._cache.values):
            pool.normal_()
        for request in first:
            request.prefilled = max(0, request.fed - 8)

    @property
    def _stays(self) -> bool:
        """Whether rows are fed pads behind their end: plain's scores, and its processors, see those columns."""
        return bool(self._call.end_tokens) and self._whole

    @property
    def _kept(self) -> bool:
        """Whether the keys and values outlive the call."""
        return bool(self._call.generation_config.return_dict_in_generate or self._prompt.prefix)

    @property
    def _whole(self) -> bool:
        """Whether all rows stay in the batch until the last one ends."""
        return self._together or self._kept or (bool(self._call.end_tokens) and self.outputs.wanted)

    def _take_memory(
        self, kernels: BackendChoice, facts: ModelFacts, policy: ContextPolicy, first: list[Request]
    ) -> Memory:
        """Memory for all rows at a time, or for as many as fit."""
        call, config, requests = self._call, self._call.config, self._requests
        pages = [pages_for(request.kept, request.limit, config.page_size) for request in requests]
        width = call.input_ids.shape[1]
        longest = max(request.kept + request.limit for request in requests)
        needed = Sizes(
            pages=wanted_pages(first, requests, config.page_size),
            slots=len(requests),
            pages_per_request=max(pages),
            columns=max(width + call.limit + config.max_draft + 1, self._prompt.positions.shape[1]),
            longest=longest,
        )
        least = needed.pages if self._whole else max(pages)
        if kernels.name == "triton":
            from .workspace import LeasedMemory  # imports triton, which a CPU need not have

            return LeasedMemory(call.model, facts.layers, needed, least, config, policy, call.limit)
        for name in ("compile", "cuda_graphs"):
            if getattr(config, name) is True:
                warnings.warn(f"hf_aspire ignores {name}=True: {kernels.reason}", RuntimeWarning, stacklevel=2)
        needed = dataclasses.replace(needed, pages=page_count(needed.pages, least, longest, config, facts.layers))
        return HostMemory(facts.layers, needed, config, policy, facts.device)

    def _goes_ahead(self, processing: Processing, policy: ContextPolicy) -> bool:
        """Whether steps may start before the outcome of the last is known, where the memory allows it."""
        asks = self.outputs.wanted or self._together or self._stays or self._hooks.draft is not None
        window_or_hybrid = not policy.full_layers or (policy.lists > 1 and bool(policy.draft_layers))
        return not asks and processing.warps_only and not window_or_hybrid

    @property
    def _replay(self) -> Replay | None:
        return Replay(self._hooks.acceptance, self._hooks.seed) if self._hooks.acceptance else None

    def _verifier(self, processing: Processing, sampler: Any) -> Verifier:
        call = self._call
        if not self._together:
            return OwnPace(processing, sampler, call.end_tokens, call.pad_token or 0, self.outputs, self._replay)
        if self._hooks.acceptance:
            raise refuse("replay_acceptance does not work with user-given processors or stopping criteria")
        pad = call.pad_token if call.end_tokens else None
        width = call.input_ids.shape[1]
        return ColumnByColumn(call.processors, call.criteria, sampler, self._history, width, pad, self.outputs)

    def decode(self) -> None:
        """Runs the engine until every row is finished."""
        call, stats = self._call, self._recorder.stats
        stream = None
        if call.streamer is not None:
            stream = ColumnStream(call.streamer, len(self.tokens), call.pad_token or 0)
        with tqdm(total=call.limit * len(self.tokens), unit="token", disable=not call.config.progress) as bar:
            while self.engine.active:
                for entry in self.engine.step():
                    self.tokens[entry.request.row] += entry.tokens
                    bar.update(len(entry.tokens))
                    if stream is not None:  # without an EOS, rows that a criterion stopped go on to the last column
                        stream.put(entry.request.row, entry.tokens, entry.stopped and bool(call.end_tokens))
                if call.config.progress:
                    bar.set_postfix(acceptance=f"{stats.acceptance_rate:.0%}", refresh=False)

    def close(self) -> None:
        """Frees every page."""
        self.engine.close()
        self._memory.close()

    def extended_cache(self) -> Any:
        """The cache that was passed in, extended in place; None if there was none."""
        if self._prompt.prefix is None:
            return None
        self._pages().append_to(self._prompt.prefix.cache)
        return self._prompt.prefix.cache

    def returned_cache(self) -> ReturnedCache:
        """The batch's pages, kept alive until somebody looks at them."""
        for request in self._requests:
            self._cache.allocator.share(request.pages)
        kept = [dataclasses.replace(request) for request in self._requests]
        pages = dataclasses.replace(self._pages(), requests=kept)
        return ReturnedCache(pages, self._call.model.config.get_text_config(decoder=True))

    def _pages(self) -> Pages:
        columns = self._prompt.visible.shape[1] + max(len(tokens) for tokens in self.tokens) - 1
        return Pages(self._cache, self._requests, self._prompt.visible, columns)

    @property
    def stats(self) -> AspireStats:
        """The call's figures."""
        return self._recorder.finish()

    def sequences(self) -> Tensor:
        """`[B, W + longest]`: prompts, new tokens, pads; on the prompts' device."""
        width = max(len(tokens) for tokens in self.tokens)
        pad = self._call.pad_token or 0
        new = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens in self.tokens])
        return torch.cat([self._call.input_ids, new.to(self._call.input_ids.device)], 1)


def _cost_model(config: AspireConfig, model: PreTrainedModel, facts: ModelFacts, memory: Memory) -> CostModel:
    if config.cost is not None:
        return CostModel(StepCost(*config.cost), fixed=True)
    if config.schedule != "aspire":  # nobody asks; a unit cost spares the measurement
        return CostModel(StepCost(1.0, 0.0, 0.0), fixed=True)
    if memory.cost_model is None:
        memory.cost_model = CostModel(prior_cost(model, facts.layers))
    memory.cost_model.begin_call()
    return memory.cost_model
