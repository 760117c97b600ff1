"""What is compiled: targets, the kernels with their flags, and each of them where, of what and how it reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for, and what is looked for in its code."""

    backend: tuple[str, Any, int]
    multiplies: str
    shared_bytes: int
    described: bool = False
    multicast: bool = False


# Shared memory of a program: CUDA C++ programming guide, technical specifications by compute capability; CDNA3 ISA.
TARGETS = {
    "sm_80": Target(("cuda", 80, 32), r"\bHMMA", 163 << 10),
    "sm_90": Target(("cuda", 90, 32), r"\b[HQ]GMMA", 227 << 10, described=True, multicast=True),
    "sm_100": Target(("cuda", 100, 32), r"\bUTC\w*MMA", 227 << 10, described=True, multicast=True),
    "gfx942": Target(("hip", "gfx942", 64), r"\bv_mfma", 64 << 10),
}
DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
# e4m3 where a matrix unit multiplies it; sm_80 has none.
FLOAT8 = {"sm_90": torch.float8_e4m3fn, "sm_100": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}


@dataclass(frozen=True)
class Variant:
    """A kernel with its flags: whether it multiplies, at how many places of its source it waits and raises, and whether
    the columns of its result are contiguous, not the rows. more: how many B it has beside the first. adds: whether it
    adds a residual.
    """

    name: str
    module: str
    kernel: str
    flags: dict[str, Any] = field(hash=False)
    multiplies: bool = False
    waits: int = 0
    raises: int = 0
    transposed: bool = False
    more: int = 0
    adds: bool = False


def _variants() -> dict[str, Variant]:
    gather = {"PER_ROW": False, "LAST": True, "IN_PLACE": True, "ALIGNED": True, "ROWS_ALIGNED": True,
        "PUSHERS": 16, "CONTRACTION": False, "JOINED": False}  # fmt: skip
    push, scatter = {"SCATTER": False, "WITH_OWN": False}, {"TO_ALL": False}
    reduce = {"PER_ROW": False, "PER_TILE": True, "OWN_IN_PLACE": False, "BROADCAST": False, "LAST": True,
        "ALIGNED": False}  # fmt: skip
    ring, split = {"REDUCE": True, "GATHER": True}, {"IN_PLACE": False, "PUSHERS": 0}
    # As many leaves as a rank has at most by default; with eight of them four sums are in registers.
    leaves, subtrees = {"LEAVES": 8, "LEAVES_ALIGNED": True}, {"TREE": True}
    # On targets with multicast.
    switch = {"SWITCH": True}
    in_one = {"TO_ALL": False, "PER_ROW": False, "LAST": True, "SPLITS": 1}
    # A quarter of a tile's rows, the least that a piece has.
    in_pieces = {"PIECE": 32}
    # Raised: the entry, and pieces or tiles. Waited for: they. What is `split` pushes in a kernel before, the own shard
    # too: every tile waits.
    all_of = [
        Variant("matmul", "matmul", "_matmul_kernel", {"PER_ROW": False}, True),
        Variant("matmul transposed", "matmul", "_matmul_kernel", {"PER_ROW": True}, True,
            transposed=True),
        Variant("gather rows", "gather_matmul", "_gather_matmul_kernel", gather, True, 2, 2),
        Variant("gather rows, split", "gather_matmul", "_gather_matmul_kernel",
            gather | split | {"LAST": False}, True, 1, 0),
        Variant("gather rows, split, in pieces", "gather_matmul", "_gather_matmul_kernel",
            gather | split | in_pieces | {"LAST": False}, True, 1, 0),
        Variant("gather rows, pushed before", "gather_matmul", "_gather_matmul_kernel",
            gather | {"PUSHERS": 0, "LAST": False}, True, 1, 0),
        Variant("gather rows, own pushed", "gather_matmul", "_gather_matmul_kernel",
            gather | {"IN_PLACE": False}, True, 2, 2),
        Variant("gather rows, joined", "gather_matmul", "_gather_matmul_kernel",
            gather | {"IN_PLACE": False, "JOINED": True}, True, 2, 2),
        Variant("gather rows, split, joined", "gather_matmul", "_gather_matmul_kernel",
            gather | split | {"JOINED": True, "LAST": False}, True, 1, 0),
        Variant("gather rows transposed", "gather_matmul", "_gather_matmul_kernel",
            gather | {"PER_ROW": True}, True, 2, 2, transposed=True),
        Variant("gather rows, gelu", "gather_matmul", "_gather_matmul_kernel", gather | {"ACTIVATION": "gelu"}, True,
            2, 2),
        Variant("gather rows, gelu, kept", "gather_matmul", "_gather_matmul_kernel",
            gather | {"ACTIVATION": "gelu", "KEEPS": True}, True, 2, 2),
        Variant("gather rows, swiglu", "gather_matmul", "_gather_matmul_kernel",
            gather | {"ACTIVATION": "silu", "GATED": True}, True, 2, 2, more=1),
        Variant("gather rows, swiglu, kept", "gather_matmul", "_gather_matmul_kernel",
            gather | {"ACTIVATION": "silu", "GATED": True, "KEEPS": True}, True, 2, 2, more=1),
        Variant("gather rows, three weights", "gather_matmul", "_gather_matmul_kernel", gather, True, 2, 2, more=2),
        Variant("gather contraction, three weights", "gather_matmul", "_gather_matmul_kernel",
            gather | {"CONTRACTION": True}, True, 2, 2, more=2),
        Variant("scatter, three weights", "matmul_scatter", "_matmul_scatter_kernel", scatter, True, 0, 2, more=2),
        Variant("gather contraction", "gather_matmul", "_gather_matmul_kernel", gather | {"CONTRACTION": True}, True,
            2, 2),
        Variant("gather contraction, split", "gather_matmul", "_gather_matmul_kernel",
            gather | split | {"CONTRACTION": True}, True, 2, 0),
        Variant("gather contraction, split, in pieces", "gather_matmul", "_gather_matmul_kernel",
            gather | split | in_pieces | {"CONTRACTION": True}, True, 2, 0),
        Variant("scatter", "matmul_scatter", "_matmul_scatter_kernel", scatter, True, 0, 2),
        Variant("scatter to all", "matmul_scatter", "_matmul_scatter_kernel", scatter | {"TO_ALL": True}, True, 0, 2),
        Variant("all-reduce in one", "matmul_all_reduce", "_matmul_all_reduce_kernel", in_one, True, 3, 3),
        Variant("all-reduce in one, to all", "matmul_all_reduce", "_matmul_all_reduce_kernel",
            in_one | {"TO_ALL": True}, True, 2, 3, adds=True),
        Variant("all-reduce in one, in parts", "matmul_all_reduce", "_matmul_all_reduce_kernel",
            in_one | {"SPLITS": 2}, True, 3, 3),
        Variant("all-reduce in one, in parts to all", "matmul_all_reduce", "_matmul_all_reduce_kernel",
            in_one | {"SPLITS": 2, "TO_ALL": True}, True, 2, 3, adds=True),
        Variant("matmul, tree", "matmul", "_matmul_kernel", leaves | {"PER_ROW": False}, True),
        Variant("gather rows, tree", "gather_matmul", "_gather_matmul_kernel", gather | leaves, True, 2, 2),
        Variant("gather rows, tree, two weights", "gather_matmul", "_gather_matmul_kernel", gather | leaves, True, 2, 2,
            more=1),
        Variant("scatter, tree", "matmul_scatter", "_matmul_scatter_kernel", scatter | leaves, True, 0, 2),
        Variant("scatter, tree, two terms", "matmul_scatter", "_matmul_scatter_kernel", scatter | leaves, True, 0, 2,
            more=1),
        Variant("scatter, tree, to all", "matmul_scatter", "_matmul_scatter_kernel",
            scatter | leaves | {"TO_ALL": True}, True, 0, 2),
        Variant("all-reduce in one, in the switch", "matmul_all_reduce", "_matmul_all_reduce_kernel",
            in_one | switch, True, 3, 3, adds=True),
        Variant("scatter, to the switch", "matmul_scatter", "_matmul_scatter_kernel", scatter | switch, True, 0, 2),
        Variant("scatter of two terms, to the switch", "matmul_scatter", "_matmul_scatter_kernel", scatter | switch,
            True, 0, 2, more=1),
        Variant("push", "push", "_push_kernel", push, False, 0, 2),
        Variant("push a scatter, to the switch", "push", "_push_kernel",
            push | switch | {"SCATTER": True, "WITH_OWN": True}, False, 0, 2),
        Variant("push a scatter", "push", "_push_kernel", push | {"SCATTER": True, "WITH_OWN": True}, False, 0, 2),
        Variant("push, to all at once", "push", "_push_kernel", push | switch, False, 0, 2),
        Variant("gather rows, to all at once", "gather_matmul", "_gather_matmul_kernel", gather | switch, True, 2, 2),
        Variant("gather contraction, to all at once", "gather_matmul", "_gather_matmul_kernel",
            gather | switch | {"CONTRACTION": True}, True, 2, 2),
        Variant("push in pieces", "push", "_push_kernel", push | in_pieces, False, 0, 2),
        Variant("collect pieces", "push", "_collect_kernel", {"PER_TILE": False}, False, 2),
        Variant("collect pieces of a quarter", "push", "_collect_kernel", in_pieces | {"PER_TILE": False}, False, 2),
        Variant("collect tiles", "push", "_collect_kernel", {"PER_TILE": True}, False, 2),
        Variant("reduce", "reduce", "_reduce_kernel", reduce, False, 2),
        Variant("reduce pieces and broadcast", "reduce", "_reduce_kernel", reduce | {"OWN_IN_PLACE": True,
            "PER_TILE": False, "BROADCAST": True, "bias_ptr": None, "LAST": False}, False, 1, 1),
        Variant("reduce transposed", "reduce", "_reduce_kernel", reduce | {"PER_ROW": True, "ALIGNED": True}, False, 2,
            transposed=True),
        Variant("reduce, residual", "reduce", "_reduce_kernel", reduce, False, 2, adds=True),
        Variant("reduce in the switch, and broadcast", "reduce", "_reduce_kernel",
            reduce | switch | {"BROADCAST": True, "LAST": False}, False, 1, 1, adds=True),
        Variant("reduce, tree", "reduce", "_reduce_kernel", reduce | subtrees, False, 2),
        Variant("reduce, tree, and broadcast", "reduce", "_reduce_kernel",
            reduce | subtrees | {"BROADCAST": True, "LAST": False}, False, 1, 1),
        Variant("reduce, tree, own in place", "reduce", "_reduce_kernel",
            reduce | subtrees | {"OWN_IN_PLACE": True, "PER_TILE": False, "bias_ptr": None}, False, 1),
        Variant("ring all-reduce", "ring", "_ring_kernel", ring, False, 3, 4),
        Variant("ring all-gather", "ring", "_ring_kernel", ring | {"REDUCE": False}, False, 2, 3),
        Variant("ring reduce-scatter", "ring", "_ring_kernel", ring | {"GATHER": False}, False, 2, 2),
        *(
            Variant(f"step {name}", "steps", "_step_kernel", {"STEP": name}, False, name in ("wait", "leave"),
                name in ("enter", "signal"))
            for name in ("enter", "signal", "wait", "leave")
        ),
    ]  # fmt: skip
    return {each.name: each for each in all_of}


VARIANTS = _variants()
# Flags that say what is a multiple of 16.
_ALIGNED = "ALIGNED", "ROWS_ALIGNED", "LEAVES_ALIGNED"


@dataclass(frozen=True)
class Case:
    """A variant, where and of what it is compiled, its shape class, and how it reads A and B. flags: those that are not
    the variant's. aligned: which lengths, strides and pointers are multiples of 16, None for all. blocks: whether
    scales of float8 are those of blocks. b_dtype: B's where it is not A's. choice: the fields of a `choices.Choice`
    that takes the place of the table's tile.
    """

    variant: str
    target: str
    dtype: torch.dtype = torch.bfloat16
    shape: str = "many"
    a_by: str = "pointers"
    b_by: str = "pointers"
    flatten: bool = True
    flags: tuple[tuple[str, Any], ...] = ()
    aligned: tuple[str, ...] | None = None
    blocks: bool = False
    b_dtype: torch.dtype | None = None
    choice: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [self.target, self.variant, self.dtype_name, self.shape]
        if VARIANTS[self.variant].multiplies:
            parts += [f"{self.a_by} {self.b_by}"]
        parts += [] if self.flatten else ["two loops"]
        parts += ["x".join(map(str, self.choice))] if self.choice else []
        parts += [] if self.aligned is None else [" ".join(("any lengths", *(f"but {name}" for name in self.aligned)))]
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.flags)])

    @property
    def dtype_name(self) -> str:
        """That of operands, and whether they have scales of blocks."""
        name = DTYPES[self.dtype] + " in blocks" * self.blocks
        return name if self.b_dtype is None else f"{name} by {DTYPES[self.b_dtype]}"

    @property
    def is_tree(self) -> bool:
        """Whether its contraction is in leaves."""
        return "LEAVES" in VARIANTS[self.variant].flags

    @property
    def is_float8(self) -> bool:
        """Whether operands have scales, and results another dtype."""
        return self.dtype.itemsize == 1

    @property
    def all_flags(self) -> dict[str, Any]:
        """The variant's and the case's own; where nothing is aligned, none that says so."""
        flags = VARIANTS[self.variant].flags
        known = {} if self.aligned != () else {name: False for name in _ALIGNED if name in flags}
        return flags | known | dict(self.flags)


def plain(case: Case) -> Case:
    """The matmul that a fused one is compared with: the same tile, read alike, with as many loops."""
    variant = "matmul transposed" if VARIANTS[case.variant].transposed else "matmul"
    variant = "matmul, tree" if case.is_tree else variant
    flatten = (
        case.flatten and not case.variant.startswith(("scatter", "all-reduce")) and not case.all_flags.get("ACTIVATION")
    )
    return replace(case, variant=variant, flags=(), flatten=flatten)


def cases() -> list[Case]:
    """All that is compiled where everything is aligned."""
    from fusedtp.kernels.configs import SHAPES

    found = []
    for target, its in TARGETS.items():
        of = functools.partial(Case, target=target)
        main = functools.partial(of, a_by="rows", b_by="columns") if its.described else of
        for variant in VARIANTS.values():
            name = variant.name
            if variant.flags.get("SWITCH") and not its.multicast:
                continue
            if variant.module == "steps":
                # No operand: one element type says all.
                found.append(of(name, dtype=torch.float32))
            elif name == "reduce, tree, own in place":
                # Of what is given as float32.
                found.append(of(name, dtype=torch.float32, shape="few columns"))
            elif not variant.multiplies:
                # A collective's tile, and the widest.
                found.append(of(name, shape="few columns"))
                if variant.flags.get("BROADCAST") and variant.flags.get("SWITCH"):
                    found.append(of(name, dtype=torch.float16, shape="few columns"))
                if name in ("collect pieces", "reduce", "reduce, residual", "reduce transposed",
                    "reduce pieces and broadcast", "reduce, tree"):  # fmt: skip
                    found += [of(name), of(name, shape="few rows")]
            elif name.endswith("in pieces"):
                found.append(main(name))
            elif "LEAVES" in variant.flags:
                # One tile for all shapes; by pointers where a leaf is no whole number of blocks.
                found += [main(name), *([of(name)] if its.described else [])]
            else:
                # A tile that goes to all ranks is narrow.
                narrow = name == "scatter to all" or variant.module == "matmul_all_reduce"
                narrow = narrow and not variant.flags.get("SWITCH")
                found += [main(name, shape=shape) for shape in SHAPES if not narrow or shape != "many"]
            if name in ("matmul", "gather rows", "scatter"):
                found.append(main(name, dtype=torch.float16))
            if its.described and name in ("matmul", "gather rows", "gather rows transposed", "scatter"):
                # Weights as they lie, and rows that no descriptor can read.
                found += [of(name, a_by="rows" if name.startswith("gather") else "columns", b_by="rows"), of(name)]
            if name in ("matmul", "gather rows", "gather rows transposed", "gather contraction", "scatter", "reduce",
                "all-reduce in one", "all-reduce in one, in parts to all", "ring all-reduce", "matmul, tree",
                "gather rows, tree", "scatter, tree", "reduce, tree", "all-reduce in one, in the switch",
                "reduce in the switch, and broadcast"):  # fmt: skip
                found.append(of(name, dtype=torch.float32))
    return found + _float8_cases() + _block_cases()


def _float8_cases() -> list[Case]:
    """Kernels of float8, which have scales: of each kind the one that does most, at every shape."""
    from fusedtp.kernels.configs import SHAPES

    found = []
    for target, dtype in FLOAT8.items():
        of = functools.partial(Case, target=target, dtype=dtype)
        main = functools.partial(of, a_by="rows", b_by="columns") if TARGETS[target].described else of
        for name in ("push", "push a scatter", "push in pieces"):
            found.append(of(name, shape="few columns"))
        for name in ("gather rows, split", "gather rows, own pushed", "gather contraction, split"):
            found.append(main(name))
        for name in ("matmul", "matmul transposed", "gather rows", "gather rows transposed", "gather rows, swiglu",
            "gather rows, three weights", "gather contraction", "gather contraction, three weights", "scatter",
            "scatter, three weights", "scatter to all", "all-reduce in one",
            "all-reduce in one, in parts to all"):  # fmt: skip
            narrow = name == "scatter to all" or name.startswith("all-reduce")
            found += [main(name, shape=shape) for shape in SHAPES if not narrow or shape != "many"]
            if TARGETS[target].described and name in ("matmul", "gather rows", "scatter"):
                found += [of(name, a_by="rows" if name.startswith("gather") else "columns", b_by="rows"), of(name)]
    return found


def _block_cases() -> list[Case]:
    """Kernels of e4m3 with a scale for each 32: multiplied with them on sm_100, made bfloat16 before elsewhere."""
    found = []
    for target, its in TARGETS.items():
        if target == "sm_80":
            # Below capability 8.9 nothing makes e4m3 wider.
            continue
        of = functools.partial(Case, target=target, dtype=torch.float8_e4m3fn, blocks=True)
        main = functools.partial(of, a_by="rows", b_by="columns") if its.described else of
        found += [of(name, shape="few columns") for name in ("push", "push a scatter", "push in pieces")]
        for name in ("matmul", "matmul transposed", "gather rows", "gather rows, split", "gather rows transposed",
            "gather rows, own pushed", "gather rows, swiglu", "gather rows, three weights", "gather contraction",
            "gather contraction, split", "gather contraction, three weights", "scatter", "scatter to all",
            "all-reduce in one", "all-reduce in one, to all"):  # fmt: skip
            found.append(main(name, shape="few columns"))
        if its.described:
            found += [main(name, shape="few rows") for name in ("matmul", "gather rows", "scatter")]
            found += [of("gather rows", shape="few columns", a_by="rows", b_by="rows"), of("matmul", shape="many")]
    return found


def loose_cases() -> list[Case]:
    """The same where nothing is known of lengths, strides and the operands' addresses, on the targets for which it is
    promised that such kernels keep what they need in registers.
    """
    return [
        replace(case, aligned=())
        for case in cases()
        if case.target in ("sm_80", "sm_90") and VARIANTS[case.variant].module != "steps"
    ]
