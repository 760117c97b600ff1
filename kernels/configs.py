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
from typing import Any

import triton

# Cores of the kernels that multiply (`cores`).
LOOP, WARP_SPECIALISED = "loop", "warp_specialised"


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
    - `loose_copy_rows`: most rows that a producer moves at a time if elements are moved one by one.
    - `loose_block_k`: most of the contraction in a block if elements are read one by one, by eight warps or more.
    - `measured_pushers`: programs that push, if measured (`choices`); 0 leaves the number to the cost model.
    - `splits`: parts of the contraction of a matmul + all-reduce of few rows; 0 gives every multiprocessor a part.
    - `core`: "loop", or "warp_specialised" for the core of that module, on sm_90, where it serves a launch (`cores`).
    - `registers`: most registers of a thread, in a kernel that multiplies; `moving_registers` in one that moves or adds
      tiles. 255 is all that there are; 0: the compiler decides.
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
    copy_rows: int = 32
    copy_cols: int = 512
    descriptors: bool = False
    flatten: bool = False
    pointer_warps: int = 8
    moving_warps: int = 8
    strip_rows: int = 32
    loose_cols: int = 128
    loose_block_k: int = 32
    scaled_dot: bool = False
    loose_copy_rows: int = 16
    registers: int = 255
    moving_registers: int = 255
    core: str = LOOP


# Few large tiles: the interpreter's cost is per operation, not per element. Two of the three programs start late.
INTERPRETER = Config(
    block_m=64, block_n=64, block_k=64, group_m=2, programs=3, pushers=2, copy_rows=64, copy_cols=128, strip_rows=128,
    loose_block_k=64, loose_copy_rows=64, registers=0, moving_registers=0,
)  # fmt: skip

# Most rows of a chunk, and most columns, that count as few.
FEW_ROWS, FEW_COLUMNS = 64, 128
# Rate of a narrow tile over that of a wide tile, which loads less for each product. Assumed.
NARROW_RATE = 0.9
SHAPES = ("many", "few columns", "few rows")

_NARROW = Config(num_stages=4)
_LOW = Config(block_m=64, num_warps=4, num_stages=4, pointer_warps=4, copy_rows=16)
_WIDE = Config(block_n=256, flatten=True, pointer_warps=16, moving_warps=16)
# NVIDIA's compiler spills to local memory so that more programs fit on a multiprocessor, where a persistent kernel has
# one. `registers` prevents that. In these configurations the option itself causes spills, so the compiler decides.
_UNTOLD: dict[str, Any] = {"registers": 0}
_AMD: dict[str, Any] = {"registers": 0, "moving_registers": 0}

# For 16-bit elements.
TABLE: dict[str, dict[str, Config]] = {
    "sm_80": {"many": Config(), "few columns": Config(), "few rows": _LOW},
    "sm_90": {
        shape: replace(config, descriptors=True, **told)
        for shape, config, told in (("many", _WIDE, _UNTOLD), ("few columns", _NARROW, _UNTOLD), ("few rows", _LOW, {}))
    },
    # Accumulators are in tensor memory, which four or eight warps can reach.
    "sm_100": {
        shape: replace(config, descriptors=True, pointer_warps=min(8, config.pointer_warps), **told)
        for shape, config, told in (
            ("many", _WIDE, _UNTOLD),
            ("few columns", replace(_NARROW, num_warps=4), _UNTOLD),
            ("few rows", _LOW, {}),
        )
    },
    "gfx942": {
        shape: replace(config, num_stages=2, **_AMD)
        for shape, config in (
            ("many", Config()),
            ("few columns", Config()),
            ("few rows", replace(_LOW, num_warps=8, pointer_warps=8)),
        )
    },
}
FLOAT32 = Config(block_m=64, block_n=64, block_k=32, copy_rows=16)

# For 8-bit elements: twice as much of the contraction in as many bytes. Tiles are no wider if a product is in registers
# beside the sum: always on sm_90; on sm_100 if chunks of the contraction have their own scales, or when the columns'
# scales are loaded. On sm_100 eight warps give a thread one row of half the tile.
_BESIDE = {
    shape: replace(config, descriptors=True) for shape, config in zip(SHAPES, (_NARROW, _NARROW, _LOW), strict=True)
}
_FLOAT8: dict[str, dict[str, Config]] = {
    target: {shape: replace(config, block_k=128, **told) for shape, config in shapes.items()}
    for target, shapes, told in (
        ("sm_80", TABLE["sm_80"], {}),
        ("sm_90", _BESIDE, _UNTOLD),
        ("sm_100", _BESIDE, {}),
        ("gfx942", TABLE["gfx942"], {}),
    )
}

# For blocks with their own scales. sm_100 multiplies 128 rows of blocks with their scales. With four warps a thread
# loads four scales at a time, while others are multiplied. Other targets first widen both operands to 16 bits in
# registers, which leaves room for a tile of half the rows.
_SCALED = replace(_NARROW, block_k=128, num_warps=4, pointer_warps=4, descriptors=True, scaled_dot=True)
_WIDENED = Config(block_m=64, block_k=128)
_BLOCKS: dict[str, dict[str, Config]] = {
    "sm_80": dict.fromkeys(SHAPES, _WIDENED),
    "sm_90": dict.fromkeys(SHAPES, replace(_WIDENED, descriptors=True)),
    "sm_100": dict.fromkeys(SHAPES, _SCALED),
    "gfx942": dict.fromkeys(SHAPES, replace(_WIDENED, block_k=64, num_stages=2, **_AMD)),
}

# For a contraction in leaves. All shapes have one tile and one way to multiply it, so that the reduction order does not
# depend on the shape. A thread has a sum for each level of the tree, so there is no room for a wider tile.
_LEAVES = Config(block_m=64, block_n=64)
_TREE: dict[str, Config] = {
    "sm_80": _LEAVES,
    "sm_90": replace(_LEAVES, descriptors=True, num_stages=4),
    "sm_100": replace(_LEAVES, descriptors=True, num_stages=4),
    "gfx942": replace(_LEAVES, num_stages=2, **_AMD),
}

# Triton before 3.7 emits no fence between cp.async's stores to shared memory and the matrix unit's loads, which are in
# another proxy (PTX ISA, Async proxy). With one stage, data goes through registers and has the fence.
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    for _table in (TABLE, _FLOAT8, _BLOCKS):
        _table["sm_90"] = {shape: replace(config, pointer_stages=1) for shape, config in _table["sm_90"].items()}
    _TREE["sm_90"] = replace(_TREE["sm_90"], pointer_stages=1)


def shape_class(rows: int, cols: int, *, chunks: int = 1, programs: int = 0) -> str:
    """Return the class of a matmul with chunks of up to `rows` rows and `cols` columns of C on this rank.

    Narrow tiles, those of few columns, also take a wide C that ends earlier so: `programs` tiles are a wave.
    """
    if rows <= FEW_ROWS:
        return "few rows"
    if cols > FEW_COLUMNS and programs:
        down = chunks * -(-rows // _WIDE.block_m)
        wide, narrow = (-(-down * -(-cols // each.block_n) // programs) * each.block_n for each in (_WIDE, _NARROW))
        return "few columns" if narrow < wide * NARROW_RATE else "many"
    return "few columns" if cols <= FEW_COLUMNS else "many"


def compiled_config(target: str, itemsize: int, shape: str, *, blocks: bool = False, tree: bool = False) -> Config:
    """Return the configuration of a kernel, for float8 with block scales (`blocks`), or for leaves (`tree`)."""
    if blocks:
        return _BLOCKS[target][shape]
    if tree and itemsize == 2:
        return _TREE[target]
    if itemsize > 2:
        return FLOAT32 if target != "gfx942" else replace(FLOAT32, num_stages=2, **_AMD)
    return (_FLOAT8 if itemsize == 1 else TABLE)[target][shape]


def nearest_target(cuda_major: int | None) -> str:
    """Return the table's target for CUDA capability `cuda_major`; None stands for any AMD GPU."""
    # 11 and 12 run kernels for 8. 12 has neither the tensor memory nor the shared memory of 10.
    if cuda_major is None:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(cuda_major, "sm_80")
