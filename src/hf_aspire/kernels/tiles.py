"""Block shapes of the attention kernel, chosen by hand from one sweep; nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache


@dataclass(frozen=True)
class Tile:
    """Block shapes of one launch.

    Attributes:
        block_m: Rows of a tile: queries times heads of a group, padded to a power of two of at least 16.
        block_n: Context tokens per iteration.
        warps: Warps per program.
        stages: Depth of the software pipeline.
        resident: Programs that a multiprocessor holds at a time; the work is cut so that one wave of them does it.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int = 2

    def queries(self, group: int) -> int:
        """Queries that share a tile."""
        return self.block_m // group

    def slots(self, multiprocessors: int, kv_heads: int) -> int:
        """Items that run at a time on a device (every item is one program per KV head)."""
        return max(1, self.resident * multiprocessors // kv_heads)


# H200, torch 2.11, triton 3.6, bf16, heads 32 / 8 of 128: `benchmarks/bench_attention.py --sweep`, and 2026-12-01 by
# turns. 32 rows take a tile of 64: of that many, warps share no rows, and meet twice per block instead of six times.
# Eight queries of 32 x 16k took 490 us in place of 489 to 508, with scores of every token 522 to 526 in place of 526
# to 553.
_TILES = (
    Tile(16, 64, 2, 2, resident=4),  # three stages: 80 % on short lists, whose pipeline fills slower
    Tile(64, 64, 4, 3),
)
# The same for heads of up to 64, whose blocks hold half the bytes (32 / 8 and 9 / 3 heads of 64, 2026-11-30, scores
# included where rows verify). Share of copy bandwidth with the tiles above and these: 64 rows x 7k, 1 query, 102 to
# 101 % and 77 to 93 %; 9 queries 74 to 79 % and 70 to 71 %; 48 drafts beside 16 rows x 5 queries 62 to 78 %.
_NARROW_TILES = (
    Tile(16, 64, 2, 3, resident=6),
    Tile(32, 128, 4, 3),
    Tile(64, 128, 4, 3),
)
_NARROW, _WIDE = 128, 256
"""Bytes of a head up to which the narrow tiles serve, and beyond which blocks hold half as many tokens, so that two
programs fit a multiprocessor."""


@cache
def tile_for(queries: int, group: int, size: int, itemsize: int) -> Tile:
    """The tile for rows of up to `queries` queries.

    Args:
        queries: Most queries of a row; more than a tile holds are cut into several tiles.
        group: Query heads per KV head.
        size: Head size in elements, the larger of key and value.
        itemsize: Bytes per element.
    """
    block_m = 16
    while block_m < min(queries * group, 64) or block_m < group:
        block_m *= 2
    if size * itemsize > _WIDE:
        return Tile(block_m, 32, 4, 2)
    tiles = _NARROW_TILES if size * itemsize <= _NARROW else _TILES
    tile = next(tile for tile in tiles if tile.block_m >= min(block_m, 64))
    return replace(tile, block_m=max(block_m, tile.block_m))
