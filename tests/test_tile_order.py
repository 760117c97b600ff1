"""The order of tiles: each is computed once, this rank's chunk first or last, and inside a chunk in groups of rows.

The device functions' own text runs as plain Python on integers, so that nothing here can drift from the kernels.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from fusedtp.kernels import gather_matmul, matmul, matmul_scatter
from fusedtp.kernels.blocks import MOST_UNROLLED
from fusedtp.kernels.matmul import Tile
from fusedtp.kernels.signal import cdiv
from fusedtp.shards import even_sizes, offsets


@dataclass(frozen=True)
class Pointer:
    """A pointer into the table of the chunks' row offsets."""

    offsets: tuple[int, ...]
    index: int = 0

    def __add__(self, elements: int) -> Pointer:
        return Pointer(self.offsets, self.index + elements)


def plain(*functions: Any) -> dict[str, Callable[..., Any]]:
    """Return device functions as Python functions of integers, by name."""
    language = SimpleNamespace(
        load=lambda pointer: pointer.offsets[pointer.index], static_range=range, num_programs=lambda axis: 1
    )
    names: dict[str, Any] = {"tl": language, "Tile": Tile, "MOST_UNROLLED": MOST_UNROLLED.value}
    for function in functions:
        lines = textwrap.dedent(inspect.getsource(function.fn)).splitlines()
        text = "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :])
        # Annotations are Triton's and are not evaluated.
        exec(compile(text, function.fn.__name__, "exec", __future__.annotations.compiler_flag), names)
    return names


PLAIN = plain(
    cdiv, matmul.swizzle, gather_matmul.tile_columns, matmul.locate_in_chunks, matmul.locate_among,
    gather_matmul.tile_index, gather_matmul.pair_index, gather_matmul.work_indices, gather_matmul._tile_at,
    gather_matmul.locate_own_chunk_first, matmul_scatter.locate_own_chunk_last,
)  # fmt: skip
ORDERS = {"gather": PLAIN["locate_own_chunk_first"], "scatter": PLAIN["locate_own_chunk_last"]}


@dataclass(frozen=True)
class Shape:
    """A product of rows cut in chunks by N columns, its tiles, and the rank that multiplies."""

    sizes: tuple[int, ...]
    N: int
    block_m: int
    block_n: int
    group_m: int
    rank: int = 0

    def order(self, kind: str) -> list[Tile]:
        """Return the tiles of a kernel in the order of their numbers; the launchers count as many."""
        table = Pointer(tuple(offsets(self.sizes)))
        # The fields of a kernel's context that these functions read.
        ctx = SimpleNamespace(
            table=table, chunks=SimpleNamespace(table=table), b=SimpleNamespace(N=(self.N,), COUNT=1),
            epilogue=SimpleNamespace(GATED=False), PUSHERS=0,
            tiles=SimpleNamespace(BLOCK_M=self.block_m, BLOCK_N=self.block_n, GROUP_M=self.group_m),
            link=SimpleNamespace(rank=self.rank, group=SimpleNamespace(WORLD_SIZE=len(self.sizes))),
        )  # fmt: skip
        num_tiles = sum(-(-rows // self.block_m) for rows in self.sizes) * -(-self.N // self.block_n)
        return [ORDERS[kind](ctx, tile) for tile in range(num_tiles)]


SIZES = (
    (64,), (1, 1), (128, 128), (300, 0), (0, 300), (65, 1, 0), (40, 40, 40), (0, 0, 7, 0), (129, 64, 63, 2),
    even_sizes(1000, 8), (500, 0, 1, 70, 0, 64, 129, 33), (0, 0, 0, 0, 0, 0, 0, 0),
)  # fmt: skip
SHAPES = [
    Shape(sizes, N, *blocks, group_m, rank)
    for sizes in SIZES
    for N in (1, 64, 100, 577)
    for blocks in ((64, 64), (16, 128))
    for group_m in (1, 3, 8)
    for rank in range(len(sizes))
]


@pytest.mark.parametrize("kind", ORDERS)
def test_each_tile_once_and_the_own_chunk_where_it_belongs(kind: str) -> None:
    for shape in SHAPES:
        tiles = shape.order(kind)
        begins, columns = offsets(shape.sizes), range(0, shape.N, shape.block_n)
        wanted = {
            (chunk, row // shape.block_m, col)
            for chunk, rows in enumerate(shape.sizes)
            for row in range(0, rows, shape.block_m)
            for col in columns
        }
        assert sorted((tile.chunk, tile.index, tile.col) for tile in tiles) == sorted(wanted), shape
        for tile in tiles:
            place = begins[tile.chunk], tile.index * shape.block_m, shape.sizes[tile.chunk]
            assert (tile.begin, tile.row, tile.rows) == place, shape
        visited = [chunk for chunk, _ in itertools.groupby(tile.chunk for tile in tiles)]
        n, first = len(shape.sizes), shape.rank + (kind == "scatter")
        around = [(first + i) % n for i in range(n)]
        assert visited == [chunk for chunk in around if shape.sizes[chunk]], shape
        if shape.sizes[shape.rank]:
            assert visited[0 if kind == "gather" else -1] == shape.rank


def test_inside_a_chunk_columns_of_grouped_rows_follow_each_other() -> None:
    """Tiles of one column and one group of rows share operands, so they are neighbours."""
    for shape, kind in itertools.product(SHAPES[:: len(SHAPES) // 200], ORDERS):
        for _, tiles in itertools.groupby(shape.order(kind), lambda tile: tile.chunk):
            found = [(tile.index // shape.group_m, tile.col, tile.index) for tile in tiles]
            assert found == sorted(found), shape


def deal(num_tiles: int, programs: int, late: int, skipped: int, *, pairs: bool) -> list[list[int]]:
    """Return the tiles of each multiplying program, in order. With `pairs` each comes twice: for gate, then for up."""
    dealt = []
    for pid in range(programs):
        first, end = PLAIN["work_indices"](pid, programs, late, skipped, num_tiles, pairs)
        rounds = [PLAIN["pair_index"](at, programs) if pairs else (at, 0) for at in range(first, end, programs)]
        assert [is_up for _, is_up in rounds] == ([0, 1] * (len(rounds) // 2) if pairs else [0] * len(rounds))
        dealt.append([PLAIN["tile_index"](at, programs, late, skipped) for at, _ in rounds])
        if pairs:
            assert dealt[-1][::2] == dealt[-1][1::2]
    return dealt


@pytest.mark.parametrize("pairs", [False, True])
def test_late_programs_skip_the_first_rounds(pairs: bool) -> None:
    """Every tile is dealt once, in order, and no other number of skipped rounds would end earlier."""
    random = Random(7)
    for _ in range(400):
        programs = random.randint(2, 40)
        late, num_tiles = random.randint(1, programs - 1), random.choice((0, 1, programs, random.randint(2, 400)))
        share = random.choice((0.0, random.uniform(0, 2)))
        chosen = gather_matmul.rounds_to_skip(num_tiles, programs, late, share)
        ends = {}
        for skipped in range(num_tiles // (programs - late) + 1):
            dealt = deal(num_tiles, programs, late, skipped, pairs=pairs)
            made = sorted(tile for tiles in dealt for tile in (tiles[::2] if pairs else tiles))
            assert made == list(range(num_tiles)), (num_tiles, programs, late, skipped)
            assert all(tiles == sorted(tiles) for tiles in dealt)
            starts = [0.0] * (programs - late) + [share * -(-num_tiles // programs)] * late
            rounds = [len(tiles) / (1 + pairs) for tiles in dealt]
            ends[skipped] = max((start + n for start, n in zip(starts, rounds, strict=True) if n), default=0.0)
        assert ends[chosen] <= min(ends.values()) + 1e-9, (num_tiles, programs, late, share, chosen, ends)
