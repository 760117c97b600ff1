"""Tile configurations by target, element type and shape class: a fixed table, never tuned while the library runs.

Ranks must agree on the rows of a tile, as pieces and signals are counted in them. So `block_m` depends only on the rows
of a chunk, on which the ranks agree. `block_n` may depend on a rank's own number of columns.

`nox -s kernels` compiles kernels for the whole table without a GPU. It asserts no spill, no stack, and no more shared
memory than the target has. Lengths that are no multiples of 16 may have a few bytes of stack, as their elements are
moved one by one.

Sources of the values:
- 16 bits: the tiles that persistent Triton matmuls have settled on. Descriptors leave the registers to the accumulator:
  128 x 256 x 64, three stages, eight warps (sm_90, sm_100). Pointers take registers: 128 x 128 x 64 (sm_80; Triton's
  tutorials 3 and 9 tune over the same tiles).
- gfx942: two stages, as 64 KiB of shared memory hold no third. Always eight warps, two waves a SIMD.
- Few rows: half the tile's rows, to multiply less padding, and more stages, as loads bound the loop. Few columns: no
  tile wider than 128 columns.
- float32: full precision without tensor cores, twice the bytes. Small tiles keep it out of local memory.
- GROUP_M = 8: a column of 8 tile rows keeps the operands that its programs share in L2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton


@dataclass(frozen=True)
class Config:
    """Tile shape and launch shape of a kernel.

    - `programs`: 0 takes one for each multiprocessor.
    - `descriptors`: operands are read by tensor descriptors if they allow it.
    - `flatten`: with descriptors, tiles and contraction are one loop: the next tile loads while one is stored.
    - `pointer_warps`: for kernels that read by pointers, which take registers from the accumulator.
    - `pointer_stages`: for the same kernels; 0 takes `num_stages`.
    - `moving_warps`: for kernels that move or add tiles, `strip_rows` rows at a time.
    - `scaled_dot`: the matrix unit multiplies blocks with their scales.
    - `loose_cols`: most columns of a tile if elements are stored one by one, as each needs an address. It does not
      apply if ranks must agree on the columns.
    - `loose_block_k`: most of the contraction in a block if elements are read one by one, by eight warps or more.
    - `measured_pushers`: programs that push, if measured (`choices`); 0 leaves the number to the cost model.
    - `splits`: parts of the contraction of a matmul + all-reduce of few rows; 0 gives every multiprocessor a part.
    - `registers`, `moving_registers`: most registers of a thread that multiplies, or moves tiles; 0: the compiler
      decides. A multiprocessor runs one program, so a thread may have as many as there are.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    pointer_stages: int = 0
    programs: int = 0
    pushers: int = 16
    measured_pushers: int = 0
    splits: int = 0
    copy_rows: int = 8
    copy_cols: int = 512
    descriptors: bool = False
    flatten: bool = False
    pointer_warps: int = 8
    moving_warps: int = 8
    strip_rows: int = 32
    loose_cols: int = 128
    loose_block_k: int = 32
    scaled_dot: bool = False
    registers: int = 255
    moving_registers: int = 255


# Few large tiles: the interpreter's cost is per operation, not per element. With two programs their order matters.
INTERPRETER = Config(
    block_m=64, block_n=64, block_k=64, group_m=2, programs=2, pushers=2, copy_rows=64, copy_cols=128, strip_rows=128,
    loose_block_k=64, registers=0, moving_registers=0,
)  # fmt: skip

# Most rows of a chunk, and most columns, that count as few.
FEW_ROWS, FEW_COLUMNS = 64, 128
SHAPES = ("many", "few columns", "few rows")

_WIDE = Config(block_n=256, descriptors=True, flatten=True, pointer_warps=16, moving_warps=16, registers=0)
_NARROW = Config(descriptors=True, num_stages=4, registers=0)
_LOW = Config(block_m=64, num_warps=4, num_stages=4, pointer_warps=4)
_LOW_DESCRIBED = replace(_LOW, descriptors=True)
_AMD = Config(num_stages=2, registers=0, moving_registers=0)

# For 16-bit elements. Left alone, the compiler stops at 128 or 168 registers on sm_80 and keeps values in local memory,
# so that more programs fit on a multiprocessor. A persistent kernel has no use for them. The same happens with few
# rows, and in kernels that move tiles, on every target. Elsewhere on sm_90 and sm_100 the compiler is left alone and
# takes fewer than it may. On sm_100 accumulators are in tensor memory, which four or eight warps can reach.
TABLE: dict[str, dict[str, Config]] = {
    "sm_80": {"many": Config(), "few columns": Config(), "few rows": _LOW},
    "sm_90": {"many": _WIDE, "few columns": _NARROW, "few rows": _LOW_DESCRIBED},
    "sm_100": {
        "many": replace(_WIDE, pointer_warps=8), "few columns": replace(_NARROW, num_warps=4),
        "few rows": _LOW_DESCRIBED,
    },
    "gfx942": {"many": _AMD, "few columns": _AMD, "few rows": replace(_AMD, block_m=64)},
}  # fmt: skip
FLOAT32 = Config(block_m=64, block_n=64, block_k=32)

# For 8-bit elements: twice as much of the contraction in as many bytes. Tiles are no wider if a product is in registers
# beside the sum: always on sm_90; on sm_100 if chunks of the contraction have their own scales, or when the columns'
# scales are loaded. On sm_100 eight warps give a thread one row of half the tile.
_BESIDE = {"many": _NARROW, "few columns": _NARROW, "few rows": _LOW_DESCRIBED}
_FLOAT8: dict[str, dict[str, Config]] = {
    target: {shape: replace(config, block_k=128) for shape, config in shapes.items()}
    for target, shapes in (TABLE | {"sm_90": _BESIDE, "sm_100": _BESIDE}).items()
}

# For blocks with their own scales. sm_100 multiplies 128 rows of blocks with their scales. With four warps a thread
# loads four scales at a time, while others are multiplied. Other targets first widen both operands to 16 bits in
# registers, which leaves room for a tile of half the rows.
_SCALED = replace(_NARROW, block_k=128, num_warps=4, pointer_warps=4, scaled_dot=True)
_WIDENED = Config(block_m=64, block_k=128)
_BLOCKS: dict[str, dict[str, Config]] = {
    "sm_80": dict.fromkeys(SHAPES, _WIDENED),
    "sm_90": dict.fromkeys(SHAPES, replace(_WIDENED, descriptors=True)),
    "sm_100": dict.fromkeys(SHAPES, _SCALED),
    "gfx942": dict.fromkeys(SHAPES, replace(_AMD, block_m=64)),
}

# For a contraction in leaves. All shapes have one tile and one way to multiply it, so that the reduction order does not
# depend on the shape. A thread has a sum for each level of the tree, so there is no room for a wider tile.
_TREE: dict[str, Config] = {
    "sm_80": Config(block_m=64, block_n=64),
    "sm_90": replace(_NARROW, block_m=64, block_n=64),
    "sm_100": replace(_NARROW, block_m=64, block_n=64),
    "gfx942": replace(_AMD, block_m=64, block_n=64),
}

# Triton before 3.7 emits no fence between cp.async's stores to shared memory and the matrix unit's loads, which are in
# another proxy (PTX ISA, Async proxy). With one stage, data goes through registers and has the fence.
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    for _table in (TABLE, _FLOAT8, _BLOCKS):
        _table["sm_90"] = {shape: replace(config, pointer_stages=1) for shape, config in _table["sm_90"].items()}
    _TREE["sm_90"] = replace(_TREE["sm_90"], pointer_stages=1)


def shape_class(rows: int, cols: int) -> str:
    """Return the class of a matmul with chunks of up to `rows` rows and `cols` columns of C on this rank."""
    return "few rows" if rows <= FEW_ROWS else "few columns" if cols <= FEW_COLUMNS else "many"


def compiled_config(target: str, itemsize: int, shape: str, *, blocks: bool = False, tree: bool = False) -> Config:
    """Return the configuration of a kernel, for float8 with block scales (`blocks`), or for leaves (`tree`)."""
    if blocks:
        return _BLOCKS[target][shape]
    if tree and itemsize == 2:
        return _TREE[target]
    if itemsize > 2:
        return FLOAT32 if target != "gfx942" else replace(_AMD, block_m=64, block_n=64, block_k=32)
    return (_FLOAT8 if itemsize == 1 else TABLE)[target][shape]


def nearest_target(cuda_major: int | None) -> str:
    """Return the table's target for CUDA capability `cuda_major`; None stands for any AMD GPU."""
    # 11 and 12 run what 8 runs. 12 has neither the tensor memory nor the shared memory of 10.
    if cuda_major is None:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(cuda_major, "sm_80")
