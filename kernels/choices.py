"""What `fusedtp tune --kernels` may choose of a configuration for a size, and what is worth a try.

The table of `configs` is for all sizes of a class, and was made without a GPU. For one size, on the GPU at hand,
another tile may be faster. Its rows are what signals are counted in, so all ranks must make the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from .configs import Config

# 32-bit registers of a thread that the accumulator may take: half of what there are, beside addresses and operands.
# float32 is multiplied from registers too.
_MOST_SUMS, _MOST_SUMS_OF_FLOAT32, _LEAST_SUMS = 128, 64, 16
MOST_SPLITS = 8
_BARRIER_BYTES = 1024


class Choice(NamedTuple):
    """Part of a `Config`. pushers: of a gather, 0 for as many as the cost model says fill the link. splits: parts of
    the contraction of a matmul + all-reduce of few rows, 0 for one for every multiprocessor.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    flatten: bool = False
    pushers: int = 0
    splits: int = 0

    def __str__(self) -> str:
        told = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"{self.num_warps} warps", f"{self.num_stages} stages"]
        told += ["one loop"] * self.flatten
        told += [f"{self.pushers} pushers"] * (self.pushers > 0) + [f"{self.splits} parts"] * (self.splits > 0)
        return ", ".join(told)


def of_config(config: Config) -> Choice:
    """The table's."""
    return Choice(config.block_m, config.block_n, config.block_k, config.num_warps, config.num_stages, config.flatten)


def of_fields(fields: Mapping[str, Any]) -> Choice:
    """From numbers by name, as files have them."""
    return Choice(**fields)


def applied(config: Config, choice: Choice | None) -> Config:
    """The configuration with what was chosen; the rest follows from it as in the table."""
    if choice is None or choice == of_config(config):
        return config
    of_tile = ("block_m", "block_n", "block_k", "num_warps")
    is_same = all(getattr(choice, name) == getattr(config, name) for name in of_tile)
    chosen = choice._asdict() | {"pushers": choice.pushers or config.pushers, "measured_pushers": choice.pushers}
    return replace(
        config, **chosen,
        # Where descriptors are the main way to read, pointers take more registers; else they are the main way.
        pointer_warps=max(choice.num_warps, config.pointer_warps) if config.descriptors else choice.num_warps,
        # A thread moves as many elements of a tile as in the table.
        moving_warps=16 if choice.block_n > 128 else 8,
        # A limit is one tile's.
        registers=config.registers if is_same or not config.registers else {"": 255},
    )  # fmt: skip


def _shared_bytes(choice: Choice, itemsize: int) -> int:
    # Blocks of A and B under way, and the tile on its way out; what the compiler asks for is as much or less, but for
    # its barriers (tests/test_kernels_offline.py).
    under_way = choice.num_stages * (choice.block_m + choice.block_n) * choice.block_k
    return (under_way + choice.block_m * choice.block_n) * itemsize + _BARRIER_BYTES


def fits(choice: Choice, itemsize: int, *, shared_bytes: int, lanes: int) -> bool:
    """Whether a multiprocessor has room for it: shared memory, and registers of threads, of which a warp has `lanes`.
    The tile is neither so large that sums go to local memory, nor so small that threads have nothing to do.
    """
    sums = choice.block_m * choice.block_n // (choice.num_warps * lanes)
    most = _MOST_SUMS if itemsize <= 2 else _MOST_SUMS_OF_FLOAT32
    return _LEAST_SUMS <= sums <= most and _shared_bytes(choice, itemsize) <= shared_bytes


def tiles(
    config: Config, rows: int, cols: int, itemsize: int, *, shared_bytes: int, lanes: int = 32, least_rows: int = 64
) -> list[Choice]:  # fmt: skip
    """Other tiles for a C of which a chunk has `rows` rows and `cols` columns, with as many stages as there is room for
    up to the table's and one more. The nearest to the table's come first. least_rows: of the matrix unit.
    """
    first = of_config(config)
    found = []
    depths = (first.block_k,) if itemsize == 1 else (first.block_k // 2, first.block_k, first.block_k * 2)
    for block_m, block_n, block_k, warps in product((32, 64, 128, 256), (64, 128, 256), depths, (4, 8)):
        # No tile is twice as long as what it is of, but for the least.
        if block_m < least_rows or (block_m >= 2 * rows and block_m > least_rows) or (block_n >= 2 * cols > 64):
            continue
        for stages in range(first.num_stages + 1, 1, -1):
            choice = Choice(block_m, block_n, block_k, warps, stages, first.flatten)
            if fits(choice, itemsize, shared_bytes=shared_bytes, lanes=lanes):
                found.append(choice)
                break
    return sorted((each for each in found if each != first), key=lambda each: _far(each, first))


def _far(choice: Choice, other: Choice) -> int:
    # In how many respects they differ, and by how many doublings: a stage less in a larger tile is no difference.
    names = ("block_m", "block_n", "block_k", "num_warps")
    return sum(abs(getattr(choice, name).bit_length() - getattr(other, name).bit_length()) for name in names)
