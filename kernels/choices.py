"""Choices that `fusedtp tune --kernels` may make for one size, and candidates worth a try.

The table of `configs` covers all sizes of a class and was made without a GPU. For one size, on the GPU at hand, another
tile may be faster. Signals are counted in rows of a tile, so all ranks must make the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from .configs import LOOP, WARP_SPECIALISED, Config

# Most and fewest 32-bit registers of a thread for the accumulator. Addresses and operands need the other half; float32
# operands need more, as they are multiplied from registers.
_MOST_SUMS, _MOST_SUMS_OF_FLOAT32, _LEAST_SUMS = 128, 64, 16
MOST_SPLITS = 8
_BARRIER_BYTES = 1024


class Choice(NamedTuple):
    """Fields of a `Config` that can be chosen; `pushers` of a gather: 0 leaves the number to the cost model.

    The warp-specialised core has as many stages as fit, whatever `num_stages` says.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    flatten: bool = False
    pushers: int = 0
    splits: int = 0
    core: str = LOOP

    def __str__(self) -> str:
        told = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"{self.num_warps} warps"]
        if self.core == LOOP:
            told += [f"{self.num_stages} stages"] + ["one loop"] * self.flatten
        else:
            told.append("warp-specialised")
        told += [f"{self.pushers} pushers"] * (self.pushers > 0) + [f"{self.splits} parts"] * (self.splits > 0)
        return ", ".join(told)


def of_config(config: Config) -> Choice:
    """Return the choice that a configuration makes."""
    return Choice(
        config.block_m, config.block_n, config.block_k, config.num_warps, config.num_stages, config.flatten,
        core=config.core,
    )  # fmt: skip


def of_fields(fields: Mapping[str, Any]) -> Choice:
    """Return the choice with these fields, as files store them."""
    return Choice(**fields)


def applied(config: Config, choice: Choice | None) -> Config:
    """Return the configuration with a choice applied; other fields follow as in the table."""
    if choice is None or choice == of_config(config):
        return config
    chosen = choice._asdict() | {"pushers": choice.pushers or config.pushers, "measured_pushers": choice.pushers}
    return replace(
        config, **chosen,
        # Pointers take more registers than descriptors, whose fallback they are.
        pointer_warps=max(choice.num_warps, config.pointer_warps) if config.descriptors else choice.num_warps,
        # By the tile's columns, as in the table.
        moving_warps=16 if choice.block_n > 128 else 8,
    )  # fmt: skip


def shared_memory_of(choice: Choice | Config, itemsize: int) -> int:
    """Return the most shared memory that a program takes."""
    # Blocks of A and B being loaded, and the tile being stored. The compiler asks for no more, apart from its barriers
    # (tests/test_kernels_offline.py).
    under_way = choice.num_stages * (choice.block_m + choice.block_n) * choice.block_k
    return (under_way + choice.block_m * choice.block_n) * itemsize + _BARRIER_BYTES


def fits(choice: Choice, itemsize: int, *, shared_bytes: int, lanes: int) -> bool:
    """Return whether a multiprocessor has enough shared memory and registers for a choice.

    lanes: threads of a warp. A tile must not be so large that sums go to local memory, nor so small that threads idle.
    """
    sums = choice.block_m * choice.block_n // (choice.num_warps * lanes)
    most = _MOST_SUMS if itemsize <= 2 else _MOST_SUMS_OF_FLOAT32
    return _LEAST_SUMS <= sums <= most and shared_memory_of(choice, itemsize) <= shared_bytes


def tiles(
    config: Config, rows: int, cols: int, itemsize: int, *, shared_bytes: int, lanes: int = 32, least_rows: int = 64
) -> list[Choice]:  # fmt: skip
    """List other tiles for a C whose chunks have `rows` rows and `cols` columns, nearest to the table's tile first.

    A tile has as many stages as fit, at most one more than the table's. least_rows: fewest rows of the matrix unit.
    """
    first = of_config(config)
    found = []
    depths = (first.block_k,) if itemsize == 1 else (first.block_k // 2, first.block_k, first.block_k * 2)
    for block_m, block_n, block_k, warps in product((32, 64, 128, 256), (64, 128, 256), depths, (4, 8)):
        # Skip tiles with twice the rows or columns or more, except the smallest tiles.
        if block_m < least_rows or block_m >= max(2 * rows, least_rows + 1) or block_n >= max(2 * cols, 65):
            continue
        for stages in range(first.num_stages + 1, 1, -1):
            choice = Choice(block_m, block_n, block_k, warps, stages, first.flatten)
            if fits(choice, itemsize, shared_bytes=shared_bytes, lanes=lanes):
                found.append(choice)
                break
    return sorted((each for each in found if each != first), key=lambda each: _far(each, first))


def on_other_core(tiles: Iterable[Choice]) -> list[Choice]:
    """List those tiles that the warp-specialised core has: a warpgroup, which is four warps, multiplies 64 rows."""
    return [each._replace(core=WARP_SPECIALISED) for each in tiles if each.block_m == 16 * each.num_warps]


def _far(choice: Choice, other: Choice) -> int:
    # Return the number of doublings between two tiles. Stages do not count, as a larger tile has room for fewer.
    names = ("block_m", "block_n", "block_k", "num_warps")
    return sum(abs(getattr(choice, name).bit_length() - getattr(other, name).bit_length()) for name in names)
