"""Tile configurations by target, element type and shape class: a fixed table, the library never tunes while it runs.

Ranks must agree on the rows of a tile, because pieces and signals are counted in them. So `block_m` depends only on the
rows of a chunk, on which the ranks agree; `block_n` may depend on a rank's own number of columns. `nox -s kernels`
compiles kernels for the whole table without a GPU and asserts: no spill, no stack, and no more shared memory than the
target has. At lengths that are no multiples of 16, where elements are moved one by one, a few bytes of stack are
allowed.

Where the values come from. 16-bit tiles are those that persistent Triton matmuls have settled on: 128 x 256 x 64 with
three stages and eight warps where descriptors leave the registers to the accumulator (sm_90, sm_100), 128 x 128 x 64
where pointers take their share (sm_80; Triton's tutorials 3 and 9 tune over the same), two stages on gfx942, whose
64 KiB of shared memory hold no third; eight warps always, two waves a SIMD there. Few rows: half the tile's rows
rather than multiplying padding, and more stages, as the loop is then bound by loads. Few columns: no tile wider than
they are. float32 is multiplied in full precision, without tensor cores, and has twice the bytes: small tiles keep it
out of local memory. Columns of GROUP_M = 8 tile rows keep the operands that programs share in L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import triton


@dataclass(frozen=True)
class Config:
    """Tile shape and launch shape of a kernel. `programs` of 0 means: as many as the device has multiprocessors.

    `descriptors`: operands are read by tensor descriptors where they allow it. `flatten`: the loops over tiles and
    contraction are then made one, so that the next tile is loaded while one is stored. `pointer_warps`: for a
    kernel that reads by pointers, as these take registers from the accumulator. `moving_warps`: for kernels that
    move or add tiles, `strip_rows` rows at a time. `scaled_dot`: the matrix unit multiplies blocks with their
    scales. Elements that are read or stored one by one need an address each: if a result is stored like that, tiles
    have at most `loose_cols` columns, unless ranks must agree on the columns; if an operand is read like that,
    blocks have at most `loose_block_k` of the contraction, and programs eight warps or more.
    `pointer_stages`: stages of a kernel that reads by pointers, 0 for as many. `measured_pushers`: programs that push,
    where it was measured how many (`choices`); else the cost model says. `splits`: parts of the contraction of a matmul
    + all-reduce of few rows, 0 for one for every multiprocessor.
    `registers`: the most that a thread may have, by kind of kernel; the compiler decides where there is no entry, or 0.
    "" is for all kernels. A fused kernel should need no more than the plain matmul; if that takes a limit of its own,
    it has an entry, for the target's main way to read operands: "gather" and "scatter" where rows are stored 16
    elements at a time ("gather" by pointers only where every length and stride is a multiple of 16, as always for
    "gather transposed"); "scatter any" is for other rows, "activated" for a gather with an activation, "moving" for
    kernels that move or add tiles, which left alone take so few on sm_100 that one keeps 8 bytes of a thread on the
    stack.
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
    registers: Mapping[str, int] = field(default_factory=dict, hash=False)


# Few large tiles: the interpreter's cost is per operation, not per element. Two programs, so that their order matters.
INTERPRETER = Config(
    block_m=64, block_n=64, block_k=64, group_m=2, programs=2, pushers=2, copy_rows=64, copy_cols=128, strip_rows=128,
    loose_block_k=64,
)  # fmt: skip

# At most so many rows of a chunk count as few, and at most so many columns.
FEW_ROWS, FEW_COLUMNS = 64, 128
SHAPES = ("many", "few columns", "few rows")

_NARROW = Config(num_stages=4)
_LOW = Config(block_m=64, num_warps=4, num_stages=4, pointer_warps=4)
_WIDE = Config(block_n=256, flatten=True, pointer_warps=16, moving_warps=16)
# As many as a thread can have. Without a limit the compiler stops at 168 for few rows on sm_80, so that three programs
# fit on a multiprocessor, and keeps a value in local memory: a persistent kernel has no use for three.
_ALL = {"": 255}

# For 16-bit elements.
TABLE: dict[str, dict[str, Config]] = {
    "sm_80": {
        shape: replace(config, registers=_ALL | registers)
        for shape, config, registers in (
            ("many", Config(), {"gather": 184}),
            ("few columns", Config(), {"gather": 184}),
            ("few rows", _LOW, {"gather": 192}),
        )
    },
    "sm_90": {
        shape: replace(config, descriptors=True, registers=_ALL | {"scatter any": 0} | registers)
        for shape, config, registers in (
            ("many", _WIDE, {"gather transposed": 192, "scatter": 200}),
            ("few columns", _NARROW, {"gather": 132, "gather transposed": 134, "scatter": 136}),
            ("few rows", _LOW, {"gather": 130, "gather transposed": 131, "scatter": 132}),
        )
    },
    # Accumulators are in a memory of their own, which four or eight warps can reach. For the narrow tile eight warps
    # are limited to 128 registers a thread, too few for a kernel that gathers.
    "sm_100": {
        shape: replace(config, descriptors=True, pointer_warps=min(8, config.pointer_warps), registers=registers)
        for shape, config, registers in (
            ("many", _WIDE, {"": 200, "gather": 200, "gather transposed": 255, "activated": 255, "scatter": 184}),
            ("few columns", replace(_NARROW, num_warps=4), {"gather": 230, "scatter": 208, "moving": 128}),
            ("few rows", _LOW, _ALL | {"gather": 128, "gather transposed": 140}),
        )
    },
    "gfx942": {
        shape: replace(config, num_stages=2)
        for shape, config in (
            ("many", Config()),
            ("few columns", Config()),
            ("few rows", replace(_LOW, num_warps=8, pointer_warps=8)),
        )
    },
}
FLOAT32 = Config(block_m=64, block_n=64, block_k=32, registers=_ALL)

# For 8-bit elements: twice as many of the contraction, in as many bytes. No wider tile where a product is in registers
# beside the sum: on sm_90 always, on sm_100 where chunks of the contraction have scales of their own, or when columns'
# scales are read; eight warps there, so that a thread has a row of half the tile.
_BESIDE = replace(_NARROW, descriptors=True)
_FLOAT8: dict[str, dict[str, Config]] = {
    target: {shape: replace(config, block_k=128, registers=registers) for shape, config in shapes.items()}
    for target, shapes, registers in (
        ("sm_80", TABLE["sm_80"], _ALL),
        *(
            (target, {"many": _BESIDE, "few columns": _BESIDE, "few rows": replace(_LOW, descriptors=True)}, _ALL)
            for target in ("sm_90", "sm_100")
        ),
        ("gfx942", TABLE["gfx942"], {}),
    )
}

# Of blocks with scales of their own. sm_100 multiplies 128 rows of them with their scales; with four warps a thread
# loads four scales at a time, which are then under way while others are multiplied. Without such a unit both operands
# are made 16-bit in registers first, which leaves room for a tile of half the rows.
_SCALED = replace(_NARROW, block_k=128, num_warps=4, pointer_warps=4, descriptors=True, scaled_dot=True, registers=_ALL)
_WIDENED = Config(block_m=64, block_k=128, registers=_ALL)
_BLOCKS: dict[str, dict[str, Config]] = {
    "sm_80": dict.fromkeys(SHAPES, _WIDENED),
    "sm_90": dict.fromkeys(SHAPES, replace(_WIDENED, descriptors=True)),
    "sm_100": dict.fromkeys(SHAPES, _SCALED),
    "gfx942": dict.fromkeys(SHAPES, replace(_WIDENED, block_k=64, num_stages=2, registers={})),
}

# Of a contraction in leaves. One tile, and one way to multiply it, for all shapes: what is added to what must not
# depend on them. A thread has a sum for each level of the tree, so there is no room for a wider one.
_TREE: dict[str, Config] = {
    target: replace(Config(block_m=64, block_n=64, registers=_ALL), **changes)
    for target, changes in (
        ("sm_80", {}), ("sm_90", {"descriptors": True, "num_stages": 4}),
        ("sm_100", {"descriptors": True, "num_stages": 4}), ("gfx942", {"num_stages": 2, "registers": {}}),
    )
}  # fmt: skip

# Triton before 3.7 has no fence between what cp.async has put into shared memory and the matrix unit that reads it
# there, in another proxy of memory (PTX ISA, Async proxy). Loaded to registers and stored it has one.
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    for _table in (TABLE, _FLOAT8, _BLOCKS):
        _table["sm_90"] = {shape: replace(config, pointer_stages=1) for shape, config in _table["sm_90"].items()}
    _TREE["sm_90"] = replace(_TREE["sm_90"], pointer_stages=1)


def shape_class(rows: int, cols: int) -> str:
    """The class of a matmul whose chunks have up to `rows` rows and whose C has `cols` columns on this rank."""
    return "few rows" if rows <= FEW_ROWS else "few columns" if cols <= FEW_COLUMNS else "many"


def compiled_config(target: str, itemsize: int, shape: str, *, blocks: bool = False, tree: bool = False) -> Config:
    """The configuration of a compiled kernel; the device adds the number of programs. blocks: whether float8 operands
    have scales of blocks. tree: for a contraction in leaves.
    """
    if blocks:
        return _BLOCKS[target][shape]
    if tree and itemsize == 2:
        return _TREE[target]
    if itemsize > 2:
        return FLOAT32 if target != "gfx942" else replace(FLOAT32, num_stages=2, registers={})
    return (_FLOAT8 if itemsize == 1 else TABLE)[target][shape]


def nearest_target(cuda_major: int | None) -> str:
    """The table's target for a device of CUDA capability `cuda_major`; None stands for any GPU of AMD's.

    Capabilities 11 and 12 have neither the tensor memory nor the shared memory of 10: they run what 8 runs.
    """
    if cuda_major is None:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(cuda_major, "sm_80")
