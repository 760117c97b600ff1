"""The order of the tiles: each computed once, the own chunk first or last, and what rotation costs in operand reads.

What is run is the text of the device functions themselves, as plain Python on integers, so that nothing here can drift
from the kernels; one kernel in Triton's interpreter says the same.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from fusedtp.kernels import gather_matmul, matmul, matmul_scatter
from fusedtp.kernels.configs import Config
from fusedtp.kernels.matmul import Tile, locate_in_chunks
from fusedtp.kernels.operands import tiles_of
from fusedtp.kernels.signal import cdiv
from fusedtp.shards import even_sizes, offsets


@dataclass(frozen=True)
class Pointer:
    """Into the table of the chunks' row offsets."""

    offsets: tuple[int, ...]
    index: int = 0

    def __add__(self, elements: int) -> Pointer:
        return Pointer(self.offsets, self.index + elements)


def plain(*functions: Any) -> dict[str, Callable[..., Any]]:
    """Device functions as Python functions of integers, by name."""
    language = SimpleNamespace(
        load=lambda pointer: pointer.offsets[pointer.index], static_range=range, num_programs=lambda axis: 1
    )
    names: dict[str, Any] = {"tl": language, "Tile": Tile}
    for function in functions:
        lines = textwrap.dedent(inspect.getsource(function.fn)).splitlines()
        text = "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :])
        # Annotations are Triton's: they are not looked at.
        exec(compile(text, function.fn.__name__, "exec", __future__.annotations.compiler_flag), names)
    return names


PLAIN = plain(
    cdiv, matmul.swizzle, gather_matmul.tile_columns, matmul.locate_in_chunks, matmul.locate_among, matmul.locate_whole,
    gather_matmul.dealt, gather_matmul.first_of, gather_matmul.places, gather_matmul._tile_at,
    gather_matmul._locate_own_chunk_first, matmul_scatter._locate_own_chunk_last,
)  # fmt: skip
ORDERS = {"gather": PLAIN["_locate_own_chunk_first"], "scatter": PLAIN["_locate_own_chunk_last"]}


@dataclass(frozen=True)
class Shape:
    """A product of rows cut in chunks by N columns, its tiles, and the rank that multiplies."""

    sizes: tuple[int, ...]
    N: int
    block_m: int
    block_n: int
    group_m: int
    rank: int = 0

    def context(self, M: int = 0) -> Any:
        """As much of a kernel's context as LOCATE looks at."""
        table = Pointer(tuple(offsets(self.sizes)))
        return SimpleNamespace(
            table=table, chunks=SimpleNamespace(table=table), b=SimpleNamespace(N=(self.N,), COUNT=1), M=M,
            epilogue=SimpleNamespace(GATED=False), PUSHERS=0,
            tiles=SimpleNamespace(BLOCK_M=self.block_m, BLOCK_N=self.block_n, GROUP_M=self.group_m),
            link=SimpleNamespace(rank=self.rank, group=SimpleNamespace(WORLD_SIZE=len(self.sizes))),
        )  # fmt: skip

    def num_tiles(self, rows: Sequence[int]) -> int:
        """As the launchers count them."""
        return sum(-(-each // self.block_m) for each in rows) * -(-self.N // self.block_n)

    def order(self, kind: str) -> list[Tile]:
        """The tiles of a kernel in the order of their numbers."""
        ctx = self.context()
        return [ORDERS[kind](ctx, tile) for tile in range(self.num_tiles(self.sizes))]

    def unrotated(self, rows: int) -> list[Tile]:
        """The tiles of a plain matmul of `rows` rows."""
        ctx = self.context(rows)
        return [PLAIN["locate_whole"](ctx, tile) for tile in range(self.num_tiles((rows,)))]


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


def test_inside_a_chunk_the_order_is_the_plain_one() -> None:
    for shape, kind in itertools.product(SHAPES[:: len(SHAPES) // 200], ORDERS):
        for chunk, tiles in itertools.groupby(shape.order(kind), lambda tile: tile.chunk):
            alone = [(tile.index, tile.col) for tile in shape.unrotated(shape.sizes[chunk])]
            assert [(tile.index, tile.col) for tile in tiles] == alone, shape


def deal(num_tiles: int, programs: int, late: int, head: int, *, pairs: bool) -> list[list[int]]:
    """The tiles of each multiplying program, in its order; with `pairs` twice each, first the gate's, then up's."""
    dealt = []
    for pid in range(programs):
        first, end = PLAIN["places"](pid, programs, late, head, num_tiles, pairs)
        turns = [PLAIN["first_of"](at, programs) if pairs else (at, 0) for at in range(first, end, programs)]
        assert [is_up for _, is_up in turns] == ([0, 1] * (len(turns) // 2) if pairs else [0] * len(turns))
        dealt.append([PLAIN["dealt"](at, programs, late, head) for at, _ in turns])
        if pairs:
            assert dealt[-1][::2] == dealt[-1][1::2]
    return dealt


@pytest.mark.parametrize("pairs", [False, True])
def test_late_programs_sit_out_the_first_turns(pairs: bool) -> None:
    """Every tile is dealt once, in the order of the tiles, and no other head would end earlier."""
    random = Random(7)
    for _ in range(400):
        programs = random.randint(2, 40)
        late, num_tiles = random.randint(1, programs - 1), random.choice((0, 1, programs, random.randint(2, 400)))
        share = random.choice((0.0, random.uniform(0, 2)))
        chosen = gather_matmul.head_turns(num_tiles, programs, late, share)
        ends = {}
        for head in range(num_tiles // (programs - late) + 1):
            dealt = deal(num_tiles, programs, late, head, pairs=pairs)
            made = sorted(tile for tiles in dealt for tile in (tiles[::2] if pairs else tiles))
            assert made == list(range(num_tiles)), (num_tiles, programs, late, head)
            assert all(tiles == sorted(tiles) for tiles in dealt)
            starts = [0.0] * (programs - late) + [share * -(-num_tiles // programs)] * late
            turns = [len(tiles) / (1 + pairs) for tiles in dealt]
            ends[head] = max((start + n for start, n in zip(starts, turns, strict=True) if n), default=0.0)
        assert ends[chosen] <= min(ends.values()) + 1e-9, (num_tiles, programs, late, share, chosen, ends)


@triton.jit
def _order_kernel(out, table, first, N, num_tiles, tiles, WORLD_SIZE: tl.constexpr):
    for tile in range(0, num_tiles):
        found = locate_in_chunks(tile, table, first, cdiv(N, tiles.BLOCK_N), WORLD_SIZE, tiles)
        tl.store(out + 3 * tile, found.chunk)
        tl.store(out + 3 * tile + 1, found.index)
        tl.store(out + 3 * tile + 2, found.col)


@pytest.mark.parametrize("rank", range(3))
def test_an_interpreted_kernel_says_the_same(rank: int) -> None:
    shape = Shape((70, 0, 33), 50, 16, 16, 2, rank)
    tiles = shape.order("gather")
    out = torch.empty(len(tiles), 3, dtype=torch.int32)
    table = torch.tensor(offsets(shape.sizes), dtype=torch.int32)
    blocks = tiles_of(Config(block_m=16, block_n=16, group_m=2), flatten=False)
    _order_kernel[(1,)](out, table, rank, shape.N, len(tiles), blocks, 3)
    assert out.tolist() == [[tile.chunk, tile.index, tile.col] for tile in tiles]


def reads(tiles: Sequence[Tile], shape: Shape, K: int, *, programs: int, cache_bytes: int) -> int:
    """Bytes of A and B that a cache of the last used panels does not have, bfloat16.

    `programs` tiles at a time march along K together: a panel of rows or columns that several of them need is read
    once, and found again by the next tiles unless `cache_bytes` of others came between.
    """
    cache: OrderedDict[tuple[str, int, int], int] = OrderedDict()
    missed = 0
    for begin in range(0, len(tiles), programs):
        wave: dict[tuple[str, int, int], int] = {}
        for tile in tiles[begin : begin + programs]:
            wave["a", tile.begin, tile.row] = 2 * K * shape.block_m
            wave["b", 0, tile.col] = 2 * K * shape.block_n
        missed += sum(num_bytes for panel, num_bytes in wave.items() if panel not in cache)
        for panel, num_bytes in wave.items():
            cache[panel] = num_bytes
            cache.move_to_end(panel)
        while sum(cache.values()) > cache_bytes:
            cache.popitem(last=False)
    return missed


# M, N a rank, K on 8 ranks, 128 x 128 tiles in groups of 8 rows, 132 programs and 50 MB of L2 as on an H100; and what
# the rotated order reads in times of the unrotated one's. Tiles do not straddle chunks: one with fewer tile rows than a
# group has lower groups, which matters where N is wide, as B is read again for each of them.
READS = {
    (16384, 3584, 8192): 1.00,
    (8192, 3584, 8192): 1.00,
    (4096, 3584, 8192): 0.83,
    (8192, 14336, 8192): 1.00,
    (4096, 14336, 8192): 2.11,
    (2048, 14336, 8192): 3.89,
    (1024, 14336, 8192): 5.34,
}
H100 = {"programs": 132, "cache_bytes": 50 << 20}


def ratio(sizes: tuple[int, ...], N: int, K: int, kind: str, rank: int) -> float:
    """Operand reads of a rank's order over those of the unrotated one."""
    shape = Shape(sizes, N, 128, 128, 8, rank)
    return reads(shape.order(kind), shape, K, **H100) / reads(shape.unrotated(sum(sizes)), shape, K, **H100)


@pytest.mark.parametrize(("M", "N", "K"), READS)
def test_what_rotation_costs_in_operand_reads(M: int, N: int, K: int) -> None:
    ratios = [ratio(even_sizes(M, 8), N, K, kind, rank) for kind, rank in (("gather", 0), ("scatter", 5))]
    assert max(ratios) == pytest.approx(READS[M, N, K], abs=0.01)


def test_what_rotation_of_uneven_shards_costs_in_operand_reads() -> None:
    sizes = (4096, 0, 2048, 512, 512, 512, 256, 256)
    assert max(ratio(sizes, 14336, 8192, kind, 3) for kind in ORDERS) == pytest.approx(1.39, abs=0.01)
    assert max(ratio(sizes, 3584, 8192, kind, 3) for kind in ORDERS) < 1.06


def test_the_swizzle_inside_chunks_reads_a_fifth() -> None:
    """What the model of the cache can see: groups of one tile row against groups of eight."""
    rows, groups = (Shape(even_sizes(8192, 8), 14336, 128, 128, group_m) for group_m in (1, 8))
    many, few = (reads(each.order("gather"), each, 8192, **H100) for each in (rows, groups))
    assert few < many / 5
