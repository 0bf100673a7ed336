"""Compiles kernels for a GPU that need not be there: launches of the wrappers are compiled in place of run.

    python tests/kernels/compile_kernels.py attention 64

The interpreter checks what a kernel computes; it does not see what a compiler refuses.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from mixture import Mixture, RowSpec
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from hf_aspire.kernels import gumbel, highest, list_places, merge, select, step_state, store_kv
from hf_aspire.noise import Draws

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ON_A_GPU = {"IN_PLACE": True, "DISCARD": True}
"""Constants that choose instructions of a GPU, which the wrappers leave out without one."""
compiled: set[str] = set()


def compile_launch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In place of `JITFunction.run`."""
    names = [parameter.name for parameter in self.params]
    values = dict(zip(names, arguments, strict=False)) | {name: options[name] for name in names if name in options}
    values |= {name: value for name, value in ON_A_GPU.items() if name in values}
    signature, constants = {}, {}
    for index, parameter in enumerate(self.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    rest = {name: value for name, value in options.items() if name not in names}
    key = hashlib.sha256(repr((self.__name__, signature, constants, rest)).encode()).hexdigest()
    if key not in compiled:
        triton.compile(ASTSource(self, signature, constants, {}), target=TARGET, options=rest)
        compiled.add(key)


def attention(size: int) -> None:
    """Every tile of a head size, with no scores, scores of tokens and of pages."""
    for queries in (1, 5, 16):
        scored = (0,) if queries == 1 else (0, queries - 1)
        for wanted, unit in (((), 1), (scored, 1), (scored, 16)):
            specs = [RowSpec(1, 30, granule=1), RowSpec(queries, 300, scored=wanted)]
            mixture = Mixture(specs, torch.device("cpu"), size=size, value_size=size, dtype=torch.bfloat16)
            mixture.run(unit=unit, slots=4)


def others() -> None:
    """All other kernels."""
    long = torch.zeros(4, dtype=torch.int64)
    fields, history, table = torch.zeros(4, 7).long(), torch.zeros(4, 9).long(), torch.zeros(4, 9).int()
    owners, rows, tokens = torch.zeros(4, 6).int(), torch.zeros(4, 12).int(), torch.zeros(4, 4).int()
    step_state.pack_tokens(tokens, fields, history, table, 16)
    step_state.place_rows(rows, owners, fields)
    for forced in (owners[:, 4], long.int()):
        step_state.settle_rows(owners, forced, fields, history, long, torch.zeros(4), 16)
    for unit in (1, 3, 16):
        slots, units, counts = list_places.list_sizes(table[:, 0].contiguous(), owners, fields, long, 16, 256, unit)
        list_places.place_lists(table[None], slots, fields, table, 16, unit, table[None])
    for count in (100, 30_000, 100_000):
        select.select(torch.zeros(1, 4, count), units, counts, torch.zeros(1, 4, 50).int())
    draws = Draws(long, long, long)
    gumbel.gumbel_argmax(torch.zeros(4, 5000), draws, 1, by_round=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        highest.highest(torch.zeros(4, 9000, dtype=dtype))
    pool, new = torch.zeros(3, 2, 16, 64).bfloat16(), torch.zeros(4, 2, 64).bfloat16()
    store_kv.store_kv(pool, pool, long, new, new)
    part = merge.Part(new, torch.zeros(4, 2))
    merge.merge(part, part, torch.zeros_like(new))


if __name__ == "__main__":
    JITFunction.run = compile_launch  # type: ignore[assignment]
    what, *sizes = sys.argv[1:]
    kinds: dict[str, Callable[..., None]] = {"attention": attention, "others": others}
    kinds[what](*map(int, sizes))
    print(len(compiled), "kernels")
