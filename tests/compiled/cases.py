"""Cases that are compiled: kernels with their flags, by target, dtype, shape and way of reading."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A target of the compiler, and the instructions that the checks look for."""

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


def _of(module: str, kernel: str = "", **usual: Any) -> Callable[..., Variant]:
    """Make variants of one kernel, which are as usual but for what is given."""

    def variant(name: str, flags: dict[str, Any], **own: Any) -> Variant:
        return Variant(name, module, kernel or f"_{module}_kernel", flags, **usual | own)

    return variant


def _variants() -> list[Variant]:
    # Raised: the entry, and pieces, tiles or the end of a kernel. Waited for: they.
    multiplied = _of("matmul", multiplies=True)
    gathered = _of("gather_matmul", multiplies=True, waits=2, raises=2)
    scattered = _of("matmul_scatter", multiplies=True, raises=2)
    reduced_in_one = _of("matmul_all_reduce", multiplies=True, waits=3, raises=3)
    pushed, collected = _of("push", raises=2), _of("push", "_collect_kernel", waits=2)
    reduced, ringed = _of("reduce", waits=2), _of("ring")
    gather = {"PER_ROW": False, "LAST": True, "IN_PLACE": True, "PUSHERS": 16, "CONTRACTION": False, "JOINED": False}
    contraction = gather | {"CONTRACTION": True}
    push, scatter = {"SCATTER": False, "WITH_OWN": False}, {"TO_ALL": False}
    push_own = push | {"SCATTER": True, "WITH_OWN": True}
    reduce = {"PER_ROW": False, "PER_PIECE": False, "OWN_IN_PLACE": False, "BROADCAST": False, "LAST": True,
        "TREE": False}  # fmt: skip
    ring = {"REDUCE": True, "GATHER": True}
    # What is `split` pushes in a kernel before, the own shard too: every tile waits.
    split, sent_before = {"IN_PLACE": False, "PUSHERS": 0}, {"waits": 1, "raises": 0}
    broadcast, not_last = {"BROADCAST": True, "LAST": False}, {"LAST": False}
    gated = {"ACTIVATION": "silu", "GATED": True}
    # As many leaves as a rank has at most by default; with eight of them four sums are in registers.
    leaves, subtrees = {"LEAVES": 8}, {"TREE": True}
    # On targets with multicast.
    switch = {"SWITCH": True}
    in_one = {"TO_ALL": False, "PER_ROW": False, "LAST": True, "SPLITS": 1}
    # A quarter of a tile's rows, the least that a piece has.
    in_pieces = {"PIECE": 32}
    own_alone = {"OWN_IN_PLACE": True, "PER_PIECE": True, "BIAS": False}
    return [
        multiplied("matmul", {"PER_ROW": False}),
        multiplied("matmul transposed", {"PER_ROW": True}, transposed=True),
        gathered("gather rows", gather),
        gathered("gather rows, split", gather | split | not_last, **sent_before),
        gathered("gather rows, split, in pieces", gather | split | in_pieces | not_last, **sent_before),
        gathered("gather rows, pushed before", gather | {"PUSHERS": 0, "LAST": False}, **sent_before),
        gathered("gather rows, own pushed", gather | {"IN_PLACE": False}),
        gathered("gather rows, joined", gather | {"IN_PLACE": False, "JOINED": True}),
        gathered("gather rows, split, joined", gather | split | {"JOINED": True, "LAST": False}, **sent_before),
        gathered("gather rows transposed", gather | {"PER_ROW": True}, transposed=True),
        gathered("gather rows, gelu", gather | {"ACTIVATION": "gelu"}),
        gathered("gather rows, gelu, kept", gather | {"ACTIVATION": "gelu", "KEEPS": True}),
        gathered("gather rows, swiglu", gather | gated, more=1),
        gathered("gather rows, swiglu, kept", gather | gated | {"KEEPS": True}, more=1),
        gathered("gather rows, three weights", gather, more=2),
        gathered("gather contraction, three weights", contraction, more=2),
        scattered("scatter, three weights", scatter, more=2),
        gathered("gather rows, five weights", gather, more=4),
        gathered("gather rows, gelu, kept, five weights", gather | {"ACTIVATION": "gelu", "KEEPS": True}, more=4),
        gathered("gather contraction, five weights", contraction, more=4),
        scattered("scatter, five terms", scatter, more=4),
        gathered("gather contraction", contraction),
        gathered("gather contraction, split", contraction | split, raises=0),
        gathered("gather contraction, split, in pieces", contraction | split | in_pieces, raises=0),
        scattered("scatter", scatter),
        scattered("scatter, joined", scatter | {"JOINED": True}),
        scattered("scatter to all", {"TO_ALL": True}),
        reduced_in_one("all-reduce in one", in_one),
        reduced_in_one("all-reduce in one, to all", in_one | {"TO_ALL": True}, waits=2, raises=2, adds=True),
        reduced_in_one("all-reduce in one, in parts", in_one | {"SPLITS": 2}),
        reduced_in_one(
            "all-reduce in one, in parts to all", in_one | {"SPLITS": 2, "TO_ALL": True}, waits=2, raises=2, adds=True
        ),
        multiplied("matmul, tree", leaves | {"PER_ROW": False}),
        gathered("gather rows, tree", gather | leaves),
        gathered("gather rows, tree, two weights", gather | leaves, more=1),
        scattered("scatter, tree", scatter | leaves),
        scattered("scatter, tree, two terms", scatter | leaves, more=1),
        scattered("scatter, tree, five terms", scatter | leaves, more=4),
        scattered("scatter, tree, to all", leaves | {"TO_ALL": True}),
        reduced_in_one("all-reduce in one, in the switch", in_one | switch, adds=True),
        scattered("scatter, to the switch", scatter | switch),
        scattered("scatter of two terms, to the switch", scatter | switch, more=1),
        pushed("push", push),
        pushed("push a scatter, to the switch", push_own | switch),
        pushed("push a scatter", push_own),
        pushed("push, to all at once", push | switch),
        gathered("gather rows, to all at once", gather | switch),
        gathered("gather contraction, to all at once", contraction | switch),
        pushed("push in pieces", push | in_pieces),
        collected("collect pieces", {}),
        collected("collect pieces of a quarter", in_pieces),
        collected("collect sums", {"PIECE": 0}),
        reduced("reduce", reduce),
        reduced("reduce pieces and broadcast", reduce | own_alone | broadcast, waits=1, raises=1),
        reduced("reduce transposed", reduce | {"PER_ROW": True}, transposed=True),
        reduced("reduce, residual", reduce, adds=True),
        reduced("reduce in the switch, and broadcast", reduce | switch | broadcast, waits=1, raises=1, adds=True),
        reduced("reduce, tree", reduce | subtrees),
        reduced("reduce, tree, and broadcast", reduce | subtrees | broadcast, waits=1, raises=1),
        reduced("reduce, tree, own in place", reduce | subtrees | own_alone, waits=1),
        *(Variant(f"write {count} words", "blocks", "_write_blocks_kernel", {"COUNT": count}) for count in (64, 256)),
        ringed("ring all-reduce", ring, waits=3, raises=4),
        ringed("ring all-gather", ring | {"REDUCE": False}, waits=2, raises=3),
        ringed("ring reduce-scatter", ring | {"GATHER": False}, waits=2, raises=2),
        *(
            Variant(
                f"step {name}",
                "steps",
                "_step_kernel",
                {"STEP": name},
                False,
                name in ("wait", "leave"),
                name in ("enter", "signal"),
            )
            for name in ("enter", "signal", "wait", "leave")
        ),
    ]


VARIANTS = {each.name: each for each in _variants()}


@dataclass(frozen=True)
class Case:
    """A variant, where and of what it is compiled, its shape class, and how it reads A and B. loose: whether
    nothing is known of lengths, strides and pointers, which else are multiples of 16. blocks: whether scales of float8
    are those of blocks. b_dtype: B's where it is not A's. choice: the fields of a `choices.Choice` that takes the place
    of the table's tile.
    """

    variant: str
    target: str
    dtype: torch.dtype = torch.bfloat16
    shape: str = "many"
    a_by: str = "pointers"
    b_by: str = "pointers"
    flatten: bool = True
    loose: bool = False
    blocks: bool = False
    b_dtype: torch.dtype | None = None
    choice: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [self.target, self.variant, self.dtype_name, self.shape]
        if VARIANTS[self.variant].multiplies:
            parts += [f"{self.a_by} {self.b_by}"]
        parts += [] if self.flatten else ["two loops"]
        parts += ["x".join(map(str, self.choice))] if self.choice else []
        parts += ["any lengths"] if self.loose else []
        return "-".join(parts)

    @property
    def dtype_name(self) -> str:
        """Return the dtype of operands, and whether blocks have scales."""
        name = DTYPES[self.dtype] + " in blocks" * self.blocks
        return name if self.b_dtype is None else f"{name} by {DTYPES[self.b_dtype]}"

    @property
    def is_tree(self) -> bool:
        """Return whether the contraction is in leaves."""
        return "LEAVES" in self.flags

    @property
    def is_float8(self) -> bool:
        """Return whether operands have scales, and results another dtype."""
        return self.dtype.itemsize == 1

    @property
    def flags(self) -> dict[str, Any]:
        """Return the variant's."""
        return VARIANTS[self.variant].flags


def plain(case: Case) -> Case:
    """The matmul that a fused one is compared with: the same tile, read alike, with as many loops."""
    variant = "matmul transposed" if VARIANTS[case.variant].transposed else "matmul"
    variant = "matmul, tree" if case.is_tree else variant
    flatten = (
        case.flatten and not case.variant.startswith(("scatter", "all-reduce")) and not case.flags.get("ACTIVATION")
    )
    return replace(case, variant=variant, flatten=flatten)


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
            if variant.module in ("steps", "blocks"):
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
            elif variant.more > 2:
                # B's table is in memory, and A's of a sum.
                by = "rows" if its.described and name.startswith("gather") else "pointers"
                found += [
                    of(name, a_by=by, shape=shape) for shape in (["many"] if "LEAVES" in variant.flags else SHAPES)
                ]
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
        replace(case, loose=True)
        for case in cases()
        if case.target in ("sm_80", "sm_90")
        and VARIANTS[case.variant].module not in ("steps", "blocks")
        # Such a tile is narrow then (`FusedScatter`).
        and (case.variant, case.shape) != ("scatter, joined", "many")
    ]
