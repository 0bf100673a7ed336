"""After a call, an error or an interrupt nothing is left behind: no page is held, and the model is as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from kit import POLICIES, SCHEDULES, aspire, mixed_drafts, pick, plain, ragged, small, tiny_llama
from torch import Tensor
from transformers import GenerationMixin, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import hf_aspire
from hf_aspire.attention import switch
from hf_aspire.cache import AspireCache
from hf_aspire.runner import Runner
from hf_aspire.testing import forced_drafts

BATCH = pick(ragged((40, 6, 23)), [0, 1, 0, 2])  # two rows share their prompt's pages


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[AspireCache]:
    """Every cache with pages that a call makes."""
    made: list[AspireCache] = []

    class Seen(AspireCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("hf_aspire.memory.AspireCache", Seen)
    return made


def check_free(caches: list[AspireCache]) -> None:
    assert caches
    for cache in caches:
        cache.allocator.check_integrity(holders=[])
        assert cache.allocator.free == cache.trash_slot // cache.page_size


@contextmanager
def unchanged(model: LlamaForCausalLM) -> Iterator[None]:
    """Checks that the block leaves the model, its configurations and Transformers as they were."""

    def state() -> tuple[Any, ...]:
        return (
            model.config._attn_implementation,
            model.config.to_dict(),
            model.generation_config.to_dict(),
            dict(vars(model.generation_config)),
            GenerationMixin.generate,
            GenerationMixin._sample,
            model.training,
            len(switch._leases),
        )

    text = plain(model, BATCH, max_new_tokens=4)
    before = state()
    yield
    assert state() == before
    assert torch.equal(plain(model, BATCH, max_new_tokens=4), text)


def interrupt(error: BaseException, at: int) -> Callable[[Runner, Any], Tensor]:
    """A forward that raises in the `at`-th step."""
    forward, steps = Runner.forward, 0

    def failing(runner: Runner, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == at:
            raise error
        return forward(runner, batch)

    return failing


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("context", POLICIES)
def test_a_call_frees_its_pages(
    model: LlamaForCausalLM, caches: list[AspireCache], schedule: str, context: str
) -> None:
    text = plain(model, BATCH, max_new_tokens=10)
    end = int(text[1, 44])
    with unchanged(model), forced_drafts(mixed_drafts(text, 40, 0.6)):
        aspire(model, BATCH, small(schedule=schedule, context=context), max_new_tokens=10, eos_token_id=end)
    check_free(caches)


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_a_sampled_call_with_forks_frees_its_pages(
    model: LlamaForCausalLM, caches: list[AspireCache], sampling: str
) -> None:
    with unchanged(model):
        config = small(sampling=sampling, seed=0)
        aspire(model, ragged((7, 30)), config, do_sample=True, num_return_sequences=3, max_new_tokens=8)
    check_free(caches)


def test_rows_that_waited_for_pages_free_them(model: LlamaForCausalLM, caches: list[AspireCache]) -> None:
    token_bytes = 3 * 2 * 2 * 16 * 8
    with unchanged(model):
        aspire(model, BATCH, small(kv_memory=15 * 4 * token_bytes), max_new_tokens=10)
    check_free(caches)


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize("keywords", [{}, {"return_dict_in_generate": True}], ids=["tensor", "dict"])
def test_a_forward_that_raises_leaves_nothing_behind(
    model: LlamaForCausalLM,
    caches: list[AspireCache],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    at: int,
    keywords: dict[str, Any],
) -> None:
    monkeypatch.setattr(Runner, "forward", interrupt(error, at))
    with unchanged(model):
        with pytest.raises(type(error)) as raised:
            aspire(model, BATCH, small(schedule="staggered"), max_new_tokens=12, **keywords)
        assert raised.value is error
    check_free(caches)


def test_an_error_while_a_prompt_is_read_in_chunks_frees_the_pages_of_its_forks(
    model: LlamaForCausalLM, caches: list[AspireCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_aspire.planner.PREFILL_TOKENS", 7)
    for at in (2, 4, 8):
        with monkeypatch.context() as patch, unchanged(model), pytest.raises(KeyboardInterrupt):
            patch.setattr(Runner, "forward", interrupt(KeyboardInterrupt(), at))
            aspire(model, BATCH, small(), max_new_tokens=12)
    assert len(caches) == 3
    check_free(caches)


def test_scores_that_are_nan_leave_nothing_behind(caches: list[AspireCache]) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with unchanged(model), pytest.raises(ValueError, match="got nan as the highest score"):
        aspire(model, BATCH, small(), max_new_tokens=8)
    check_free(caches)


def test_a_hook_that_raises_leaves_nothing_behind(model: LlamaForCausalLM, caches: list[AspireCache]) -> None:
    def stop(*draft: int) -> int:
        raise KeyboardInterrupt

    with unchanged(model), forced_drafts(stop), pytest.raises(KeyboardInterrupt):
        aspire(model, BATCH, small(schedule="fixed"), max_new_tokens=8)
    check_free(caches)


def test_a_receiver_of_statistics_that_raises_leaves_nothing_behind(
    model: LlamaForCausalLM, caches: list[AspireCache]
) -> None:
    def stop(stats: Any) -> None:
        raise OSError("disk full")

    for keywords in ({}, {"return_dict_in_generate": True}):
        with unchanged(model), pytest.raises(OSError, match="disk full"):
            hf_aspire.generate(model, **BATCH, aspire_config=small(on_stats=stop), max_new_tokens=8, **keywords)
    check_free(caches)


class Streamer(BaseStreamer):
    """Raises at the third token."""

    def __init__(self) -> None:
        self.count, self.ends = 0, 0

    def put(self, value: Tensor) -> None:
        self.count += 1
        if self.count == 3:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_that_raises_is_still_ended(model: LlamaForCausalLM, caches: list[AspireCache]) -> None:
    streamer = Streamer()
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        aspire(model, ragged((30,)), small(), max_new_tokens=8, streamer=streamer)
    assert streamer.ends == 1
    check_free(caches)


def test_a_returned_cache_holds_its_pages_until_it_is_looked_at(
    model: LlamaForCausalLM, caches: list[AspireCache]
) -> None:
    with unchanged(model):
        result = aspire(model, BATCH, small(), max_new_tokens=8, return_dict_in_generate=True)
    allocator = caches[-1].allocator
    allocator.check_integrity()
    assert allocator.free < caches[-1].trash_slot // 4
    cache = result.output["cache" if "cache" in result.output else "past_key_values"]
    assert cache.get_seq_length() == 47
    check_free(caches)


def test_pages_of_a_failed_call_do_not_outlive_it(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page pools themselves are garbage after an error: nothing global keeps them."""
    import weakref

    pools: list[weakref.ref[Tensor]] = []

    class Seen(AspireCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pools.extend(weakref.ref(pool) for pool in self.keys)

    monkeypatch.setattr("hf_aspire.memory.AspireCache", Seen)
    with monkeypatch.context() as patch, suppress(RuntimeError):
        patch.setattr(Runner, "forward", interrupt(RuntimeError("out of luck"), 5))
        aspire(model, BATCH, small(), max_new_tokens=8)
    aspire(model, BATCH, small(), max_new_tokens=8)
    gc.collect()
    assert len(pools) == 6
    assert all(pool() is None for pool in pools)
