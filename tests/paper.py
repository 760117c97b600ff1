"""Speed on paper: cycles of a matmul on H100 by counting, for both cores of the kernels and for cuBLAS.

Nothing here was timed. A multiprocessor multiplies 2,048 pairs of 16 bits in a cycle and the tile's blocks of K follow
one another, so a block takes BLOCK_M * BLOCK_N * BLOCK_K / 2,048 cycles, whatever the core. The cores differ in what
stands between the last block of a tile and the first of the next one, while the matrix unit has nothing to do:

- loop: the tile goes through shared memory to another layout and back to registers, 128 bytes a cycle each way, then to
  L2 at 64 bytes a cycle by stores that the warps issue themselves.
- warp-specialised: the first half is written to shared memory, TMA takes it to L2 at 64 bytes a cycle, and the second
  half waits for that buffer. TMA stores the second half beside the next tile.
- cuBLAS: both halves have a buffer, so the tile is written to shared memory and the rest is beside the next tile.

Each tile also has a fixed number of cycles for barriers and fences, and each kernel for its first loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusedtp.kernels.configs import NARROW_RATE, TABLE, shape_class

# H100 SXM: multiprocessors; pairs of 16 bits a cycle and multiprocessor (dense, NVIDIA's data sheet: 989 TFLOP/s at
# 1,830 MHz); bytes a cycle of shared memory, and of stores to L2 by one multiprocessor. The last is assumed.
SMS, RATE, SHARED, L2 = 132, 2048, 128, 64
# Cycles for a barrier with a fence, and of a kernel before its first block has arrived. Assumed.
BARRIER, FIRST = 60, 1500
# Tiles of cuBLAS on Hopper that may win by fewer waves.
OTHERS = ((128, 256), (256, 128), (128, 192), (192, 128), (128, 128), (64, 256))

# M, N, K: square; shards of linear layers of Llama 3 8B and 70B on 8 ranks; short and long contractions.
SHAPES = (
    (8192, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 1024), (8192, 8192, 2048), (8192, 8192, 512),
    (8192, 1792, 4096), (8192, 3584, 4096), (8192, 4096, 1792), (8192, 3584, 8192), (8192, 8192, 3584),
    (16384, 7168, 8192), (65536, 1024, 1024), (4096, 8192, 1024),
)  # fmt: skip


@dataclass(frozen=True)
class Core:
    """Cycles between two tiles of block_m x block_n elements of 2 bytes."""

    name: str

    def between(self, block_m: int, block_n: int) -> float:
        size = 2 * block_m * block_n
        return {
            "loop": 2 * size / SHARED + size / L2 + 2 * BARRIER,
            "warp-specialised": size / SHARED + size / 2 / L2 + 4 * BARRIER,
            "cuBLAS": size / SHARED + 2 * BARRIER,
        }[self.name]


def cycles(core: Core, block_m: int, block_n: int, M: int, N: int, K: int) -> float:
    """Return the cycles of the program with most tiles."""
    rounds = -(-(-(-M // block_m) * -(-N // block_n)) // SMS)
    # A narrow tile loads more for each product.
    rate = RATE * (1 if block_m * block_n >= 128 * 192 else NARROW_RATE)
    return FIRST + rounds * (block_m * block_n * K / rate + core.between(block_m, block_n))


def own(name: str, M: int, N: int, K: int) -> float:
    """Return the cycles of the plain matmul with the tile that the table chooses."""
    tile = TABLE["sm_90"][shape_class(M, N, programs=SMS)]
    return cycles(Core(name), tile.block_m, tile.block_n, M, N, K)


def cublas(M: int, N: int, K: int) -> float:
    """Return the cycles of cuBLAS with its best tile."""
    return min(cycles(Core("cuBLAS"), *tile, M, N, K) for tile in OTHERS)


def table() -> str:
    """Return markdown of own speed over cuBLAS's, for both cores."""
    lines = [
        "| M x N x K | loop / cuBLAS | warp-specialised / cuBLAS | warp-specialised / loop |",
        "|---|---:|---:|---:|",
    ]
    rows = []
    for shape in SHAPES:
        loop, roles, library = own("loop", *shape), own("warp-specialised", *shape), cublas(*shape)
        rows.append((library / loop, library / roles, loop / roles))
        lines.append(f"| {' x '.join(map(str, shape))} | {' | '.join(f'{each:.2f}' for each in rows[-1])} |")
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return "\n".join([*lines, f"| mean of {len(rows)} | {' | '.join(f'{each:.2f}' for each in means)} |"])
