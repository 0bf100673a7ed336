"""From what `generate` prepared to requests, and from finished requests to what `generate` returns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .arguments import check_callables, check_keywords, check_prompt, refuse
from .attention import switch
from .backends import TorchBackend
from .cache import AspireCache, LayerSpec
from .compat import CACHE_NAME, GenerateDecoderOnlyOutput, GenerationConfig, PreTrainedModel
from .config import AspireConfig
from .cost_model import CostModel, StepCost
from .engine import Engine
from .planner import Planner, group_by_prompt, pages_for
from .probe import ModelFacts, check_model, probe_model
from .processing import Processing
from .request import Request
from .roofline import prior_cost
from .runner import Runner
from .sampling import make_sampler, row_key
from .scheduler import make_schedule
from .selection import ContextPolicy, SparseContexts
from .stats import AspireStats, StatsRecorder
from .testing import active_hooks

_MEMORY_SHARE = 0.9
"""Share of the free memory that pages may take when the call needs more than there is."""


@dataclass
class AspireOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns: plain's fields and the call's statistics."""

    aspire_stats: AspireStats | None = None


@dataclass(frozen=True)
class Call:
    """A prepared call: what Transformers hands to a decoding loop.

    Attributes:
        model: The model.
        input_ids: `[B, W]` padded prompts, already expanded by `num_return_sequences`.
        processors: Logits processors, in plain's order.
        criteria: Stopping criteria.
        generation_config: Prepared: with special tokens as tensors.
        streamer: Streamer or None.
        model_keywords: Mask, positions and so on.
        config: Ours.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: Sequence[Any]
    criteria: Sequence[Any]
    generation_config: GenerationConfig
    streamer: Any
    model_keywords: dict[str, Any]
    config: AspireConfig

    @property
    def limit(self) -> int:
        """Most new tokens per row."""
        longest = min((c.max_length for c in self.criteria if isinstance(c, MaxLengthCriteria)), default=None)
        if longest is None:
            raise refuse("got no length limit, expected max_new_tokens or max_length")
        if longest <= self.input_ids.shape[1]:
            raise refuse(f"got room for {longest - self.input_ids.shape[1]} new tokens, expected at least 1")
        return int(longest) - self.input_ids.shape[1]

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a row."""
        ids = [c.eos_token_id.flatten().tolist() for c in self.criteria if isinstance(c, EosTokenCriteria)]
        return frozenset(token for group in ids for token in group)


def run(call: Call) -> Tensor | AspireOutput:
    """Decodes a prepared call.

    Raises:
        ValueError: Something about the model, the inputs or the memory cannot be served; nothing is left changed.
    """
    model = call.model
    try:
        check_callables(call.processors, call.criteria, call.streamer, call.input_ids.shape[0])
        device = model.get_input_embeddings().weight.device
        device = model.device if device.type == "meta" else device
        mask, positions = _prepared_inputs(call)
        requests = _requests(call, mask, positions)
        check_model(model, max(request.position(request.limit - 1) - 1 for request in requests))
        with switch.on(model):
            facts = probe_model(model, call.input_ids.shape[1] + call.limit)
            with closing(_Session(call, requests, facts, device)) as session:
                session.decode()
        return session.result()
    finally:
        if call.streamer is not None:
            call.streamer.end()


def _prepared_inputs(call: Call) -> tuple[Tensor, Tensor]:
    """Asks the model for its prefill inputs, once, and refuses what it adds.

    Returns:
        Visibility `[B, W]` bool and position ids `[B, W]` int64, on the host.
    """
    keywords = dict(call.model_keywords)
    keywords.pop(CACHE_NAME, None)
    check_keywords(call.model, keywords)
    check_prompt(call.input_ids, keywords.get("attention_mask"), keywords.get("position_ids"))
    inputs = call.model.prepare_inputs_for_generation(
        call.input_ids, is_first_iteration=True, **{CACHE_NAME: AspireCache()}, **keywords
    )
    expected = {"input_ids", "attention_mask", "position_ids", CACHE_NAME, "use_cache", "logits_to_keep"}
    added = sorted(name for name, value in inputs.items() if name not in expected and value is not None)
    name = type(call.model).__name__
    if added:
        raise refuse(f"{name} adds {', '.join(added)} to its inputs, which is not supported")
    ids, cache, positions = inputs.get("input_ids"), inputs.get(CACHE_NAME), inputs.get("position_ids")
    if ids is None or not torch.equal(ids.cpu(), call.input_ids.cpu()):
        raise refuse(f"{name} replaces input_ids before its forward, which is not supported")
    if not isinstance(cache, AspireCache):
        raise refuse(f"{name} replaces the cache before its forward, which is not supported")
    if positions is None:
        raise refuse(f"{name} prepares no position_ids, so its rows cannot be packed")
    mask = keywords.get("attention_mask")
    visible = torch.ones_like(call.input_ids) if mask is None else mask
    return visible.cpu().bool(), positions.cpu().long().expand(call.input_ids.shape)


def _requests(call: Call, mask: Tensor, positions: Tensor) -> list[Request]:
    """One request per row, with its fed tokens, limit and noise key."""
    ids, visible, place = call.input_ids.cpu().numpy(), mask.numpy(), positions.numpy()
    seed = call.config.seed
    if seed is None:
        seed = int(torch.randint(2**62, ()).item()) if call.generation_config.do_sample else 0
    seen: Counter[bytes] = Counter()
    requests = []
    for row in range(ids.shape[0]):
        fed = visible[row].copy()
        fed[-1] = True
        columns = np.flatnonzero(fed)
        prompt = ids[row, columns].astype(np.int64)
        key = row_key(seed, prompt, seen[prompt.tobytes()])
        seen[prompt.tobytes()] += 1
        kept = int(visible[row].sum())
        requests.append(Request(row, columns, place[row, columns].astype(np.int64), kept, call.limit, key))
    return requests


class _Session:
    """One call's engine, and the tokens that it has committed so far."""

    def __init__(self, call: Call, requests: list[Request], facts: ModelFacts, device: torch.device) -> None:
        config = call.config
        rows, width = call.input_ids.shape
        self._call = call
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._recorder = StatsRecorder(config, [request.fed for request in requests])
        self._check_backend(config, device)
        policy = ContextPolicy.of(config, len(facts.layers))
        first = group_by_prompt(requests, _same_prompts(call.input_ids.cpu().numpy(), requests))
        pages = _page_count(first, requests, config, facts.layers)
        most = max(pages_for(request.kept, request.limit, config.page_size) for request in requests)
        cache = AspireCache(facts.layers, pages, config.page_size, rows, most)
        history = torch.zeros(rows, width + call.limit + config.max_draft + 1, dtype=torch.int64, device=device)
        history[:, :width] = call.input_ids.to(device)
        longest = max(request.kept + request.limit for request in requests)
        contexts = SparseContexts(config, policy, rows, longest, device)
        cost_model = _cost_model(config, call.model, facts)
        schedule = make_schedule(config, cost_model)
        sample = bool(call.generation_config.do_sample)
        self.engine = Engine(
            runner=Runner(call.model, cache, TorchBackend(cache, policy), facts.keeps_logits),
            cache=cache,
            contexts=contexts,
            planner=Planner(config, schedule, contexts, cache.allocator, bool(policy.draft_layers)),
            schedule=schedule,
            cost_model=cost_model,
            processing=Processing(call.processors, history, width),
            sampler=make_sampler(sample, config.sampling, rows, config.max_draft, facts.vocabulary, device),
            history=history,
            prompt_width=width,
            end_tokens=call.end_tokens,
            recorder=self._recorder,
            hooks=active_hooks(),
        )
        self.engine.submit(first)

    @staticmethod
    def _check_backend(config: AspireConfig, device: torch.device) -> None:
        if config.backend == "triton":
            raise refuse("got backend='triton', expected 'auto' or 'torch': the Triton kernels are not there yet")
        for name in ("compile", "cuda_graphs"):
            if getattr(config, name) is True:
                raise refuse(f"got {name}=True, expected 'auto' or False: it is not supported yet")

    def decode(self) -> None:
        """Runs the engine until every row is finished."""
        call, stats = self._call, self._recorder.stats
        total = call.limit * len(self._tokens)
        with tqdm(total=total, unit="token", disable=not call.config.progress, desc="aspire") as bar:
            while self.engine.active:
                for entry in self.engine.step():
                    self._tokens[entry.request.row] += entry.tokens
                    bar.update(len(entry.tokens))
                    if entry.finished:
                        bar.total -= entry.request.remaining
                    for token in entry.tokens if call.streamer is not None else ():
                        call.streamer.put(torch.tensor([token]))
                if call.config.progress:
                    bar.set_postfix(acceptance=f"{stats.acceptance_rate:.0%}", refresh=False)

    def close(self) -> None:
        """Frees every page."""
        self.engine.close()

    def result(self) -> Tensor | AspireOutput:
        """Padded sequences, or a dict-like output with them."""
        call = self._call
        stats = self._recorder.finish()
        if call.config.on_stats is not None:
            call.config.on_stats(stats)
        width = max(len(tokens) for tokens in self._tokens)
        pad = call.generation_config._pad_token_tensor
        fill = 0 if pad is None else int(pad)
        new = torch.tensor([tokens + [fill] * (width - len(tokens)) for tokens in self._tokens])
        sequences = torch.cat([call.input_ids, new.to(call.input_ids.device)], 1)
        if call.generation_config.return_dict_in_generate:
            return AspireOutput(sequences=sequences, aspire_stats=stats)
        return sequences


def _same_prompts(ids: np.ndarray[Any, Any], requests: Sequence[Request]) -> list[int]:
    """For every request the first one with the same tokens, positions and visibility."""
    first: dict[tuple[Any, ...], int] = {}
    return [
        first.setdefault((ids[r.row, r.columns].tobytes(), r.positions.tobytes(), r.kept), index)
        for index, r in enumerate(requests)
    ]


def _page_count(
    first: Sequence[Request], requests: Sequence[Request], config: AspireConfig, layers: Sequence[LayerSpec]
) -> int:
    """Pages to make: what the call needs, or what memory allows if that is less.

    Raises:
        ValueError: One row alone does not fit.
    """
    size = config.page_size
    shared = sum(len(r.forks) * (r.kept // size) for r in first)
    wanted = sum(pages_for(r.kept, r.limit, size) for r in requests) - shared
    allowed = min(_allowed_pages(device, config, layers) for device in {layer.device for layer in layers})
    largest = max(pages_for(r.kept, r.limit, size) for r in requests)
    if largest > allowed:
        page_bytes = size * sum(layer.bytes_per_token for layer in layers)
        raise refuse(
            f"a row of {max(r.kept + r.limit for r in requests)} tokens needs {largest} pages "
            f"({largest * page_bytes:,} bytes) of keys and values, and there is room for {allowed} "
            f"({allowed * page_bytes:,} bytes); shorten it, lower max_new_tokens, or raise "
            f"kv_memory (got {config.kv_memory})"
        )
    return min(wanted, allowed)


def _allowed_pages(device: torch.device, config: AspireConfig, layers: Sequence[LayerSpec]) -> int:
    """Pages that a device has room for."""
    per_page = config.page_size * sum(layer.bytes_per_token for layer in layers if layer.device == device)
    if isinstance(config.kv_memory, int):
        share = sum(layer.bytes_per_token for layer in layers if layer.device == device) / sum(
            layer.bytes_per_token for layer in layers
        )
        return int(config.kv_memory * share) // per_page
    return int(free_memory(device) * (config.kv_memory or _MEMORY_SHARE)) // per_page


def free_memory(device: torch.device) -> int:
    """Bytes that a new allocation on a device may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return int(psutil.virtual_memory().available)


def _cost_model(config: AspireConfig, model: PreTrainedModel, facts: ModelFacts) -> CostModel:
    if config.cost is not None:
        return CostModel(StepCost(*config.cost), fixed=True)
    if config.schedule != "aspire":  # nobody asks; a unit cost spares the measurement
        return CostModel(StepCost(1.0, 0.0, 0.0), fixed=True)
    prior = prior_cost(model, facts.layers)
    if not math.isfinite(prior.base):
        raise RuntimeError(f"cost prior: got {prior}, expected finite seconds")
    return CostModel(prior)
