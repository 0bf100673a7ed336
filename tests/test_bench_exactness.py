"""The benchmark of exactness: how far rounding moves plain's gaps is found on ragged rows, against float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kit import benchmark, ragged, tiny_llama

from hf_aspire.commands.measure import Run, run_plain


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with benchmark("bench_exactness") as module:
        yield module


def shifted(plain: Run, by: float) -> Run:
    """The run with plain's best logit of every step lowered."""
    lowered = []
    for logits in plain.logits:
        best = logits.argmax(-1, keepdim=True)
        lowered.append(logits.scatter_add(1, best, torch.full_like(best, -by, dtype=logits.dtype)))
    return replace(plain, logits=tuple(lowered))


def test_finds_how_far_rounding_moved_plains_gaps(bench: ModuleType) -> None:
    model, inputs = tiny_llama(), ragged([3, 17, 9])
    plain = run_plain(model, inputs, 12, keep_logits=True, do_sample=False)
    moved = bench.moved_gaps(model, inputs, plain)
    assert len(moved) == plain.new_tokens
    assert moved.max() < 1e-5  # nothing was rounded but plain's logits, to float32
    small = 1e-4  # below every gap, so that the same two stay the best
    torch.testing.assert_close(
        bench.moved_gaps(model, inputs, shifted(plain, small)), torch.full_like(moved, small), atol=1e-5, rtol=0
    )


def test_a_row_counts_until_it_ends(bench: ModuleType) -> None:
    model, inputs = tiny_llama(), ragged([5, 8])
    whole = run_plain(model, inputs, 10, keep_logits=True, do_sample=False)
    model.generation_config.eos_token_id = whole.tokens[0][4]
    ended = run_plain(model, inputs, 10, keep_logits=True, do_sample=False)
    assert len(ended.tokens[0]) <= 5
    moved = bench.moved_gaps(model, inputs, ended)
    assert len(moved) == ended.new_tokens
    assert moved.max() < 1e-5
