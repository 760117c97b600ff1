"""Every kernel compiled for every target without a GPU, as the launchers would have it compiled."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import assembly


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for, and what is looked for in its code."""

    backend: tuple[str, Any, int]
    multiplies: str
    shared_bytes: int
    described: bool = False


# Shared memory of a program: CUDA C++ programming guide, technical specifications by compute capability; CDNA3 ISA.
TARGETS = {
    "sm_80": Target(("cuda", 80, 32), r"\bHMMA", 163 << 10),
    "sm_90": Target(("cuda", 90, 32), r"\bHGMMA", 227 << 10, described=True),
    "sm_100": Target(("cuda", 100, 32), r"\bUTC\w*MMA", 227 << 10, described=True),
    "gfx942": Target(("hip", "gfx942", 64), r"\bv_mfma", 64 << 10),
}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PACKAGE = "fusedtp.kernels"
_LINK = {"WORLD_SIZE": 8, "OP": 1, "COUNT": False}
_NOT_SPECIALIZED = {
    "rank", "num_rows", "dst_row", "num_tiles", "region_row", "first_slot", "second_slot", "result_row", "region_rows",
    "max_pieces", "gather_row", "gather_slot", "peer", "slot",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel with its flags: whether it multiplies, at how many places of its source it waits and raises, and whether
    the columns of its result are contiguous, not the rows.
    """

    name: str
    module: str
    kernel: str
    flags: dict[str, Any] = field(hash=False)
    multiplies: bool = False
    waits: int = 0
    raises: int = 0
    transposed: bool = False


def _variants() -> dict[str, Variant]:
    gather = {"BIAS": "columns", "LAST": True, "OWN_IN_PLACE": True, "ALIGNED": True, "ROWS_ALIGNED": True,
        "PUSHERS": 16, "CONTRACTION": False}  # fmt: skip
    push, scatter = {"SCATTER": False, "WITH_OWN": False}, {"TO_ALL": False}
    reduce = {"BIAS": "columns", "PER_TILE": True, "OWN_IN_PLACE": False, "BROADCAST": False, "LAST": True,
        "ALIGNED": False}  # fmt: skip
    ring, split = {"REDUCE": True, "GATHER": True}, {"OWN_IN_PLACE": False, "PUSHERS": 0}
    # A quarter of a tile's rows, the least that a piece has.
    in_pieces = {"PIECE": 32}
    # Raised: the entry, and pieces or tiles. Waited for: they. What is `split` pushes in a kernel before, the own shard
    # too: every tile waits.
    all_of = [
        Variant("matmul", "matmul", "_matmul_kernel", {"BIAS": "columns"}, True),
        Variant("matmul transposed", "matmul", "_matmul_kernel", {"BIAS": "rows"}, True,
            transposed=True),
        Variant("gather rows", "gather_matmul", "_gather_matmul_kernel", gather, True, 2, 2),
        Variant("gather rows, split", "gather_matmul", "_gather_matmul_kernel",
            gather | split | {"LAST": False}, True, 1, 0),
        Variant("gather rows, split, in pieces", "gather_matmul", "_gather_matmul_kernel",
            gather | split | in_pieces | {"LAST": False}, True, 1, 0),
        Variant("gather rows, pushed before", "gather_matmul", "_gather_matmul_kernel",
            gather | {"PUSHERS": 0, "LAST": False}, True, 1, 0),
        Variant("gather rows, own pushed", "gather_matmul", "_gather_matmul_kernel",
            gather | {"OWN_IN_PLACE": False}, True, 2, 2),
        Variant("gather rows transposed", "gather_matmul", "_gather_matmul_kernel",
            gather | {"BIAS": "rows"}, True, 2, 2, transposed=True),
        Variant("gather contraction", "gather_matmul", "_gather_matmul_kernel", gather | {"CONTRACTION": True}, True,
            2, 2),
        Variant("gather contraction, split", "gather_matmul", "_gather_matmul_kernel",
            gather | split | {"CONTRACTION": True}, True, 2, 0),
        Variant("gather contraction, split, in pieces", "gather_matmul", "_gather_matmul_kernel",
            gather | split | in_pieces | {"CONTRACTION": True}, True, 2, 0),
        Variant("scatter", "matmul_scatter", "_matmul_scatter_kernel", scatter, True, 0, 2),
        Variant("scatter to all", "matmul_scatter", "_matmul_scatter_kernel", scatter | {"TO_ALL": True}, True, 0, 2),
        Variant("push", "push", "_push_kernel", push, False, 0, 2),
        Variant("push a scatter", "push", "_push_kernel", push | {"SCATTER": True, "WITH_OWN": True}, False, 0, 2),
        Variant("push in pieces", "push", "_push_kernel", push | in_pieces, False, 0, 2),
        Variant("collect pieces", "push", "_collect_kernel", {"PER_TILE": False}, False, 2),
        Variant("collect pieces of a quarter", "push", "_collect_kernel", in_pieces | {"PER_TILE": False}, False, 2),
        Variant("collect tiles", "push", "_collect_kernel", {"PER_TILE": True}, False, 2),
        Variant("reduce", "reduce", "_reduce_kernel", reduce, False, 2),
        Variant("reduce pieces and broadcast", "reduce", "_reduce_kernel", reduce | {"OWN_IN_PLACE": True,
            "PER_TILE": False, "BROADCAST": True, "BIAS": "none", "LAST": False}, False, 1, 1),
        Variant("reduce transposed", "reduce", "_reduce_kernel", reduce | {"BIAS": "rows", "ALIGNED": True}, False, 2,
            transposed=True),
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


@dataclass(frozen=True)
class Case:
    """A variant, where and of what it is compiled, its shape class, and how it reads A and B."""

    variant: str
    target: str
    dtype: torch.dtype = torch.bfloat16
    shape: str = "many"
    a_by: str = "pointers"
    b_by: str = "pointers"
    flatten: bool = True

    def __str__(self) -> str:
        parts = [self.target, self.variant, DTYPES[self.dtype], self.shape]
        if VARIANTS[self.variant].multiplies:
            parts += [f"{self.a_by} {self.b_by}"]
        return "-".join(parts) + ("" if self.flatten else "-two loops")


@dataclass(frozen=True)
class Built:
    """A compiled kernel. `code` is the machine's own; `ordered` is where memory order is asked for: PTX, AMD's code;
    `decided` is that with the ways that a wave takes where no lane of it has anything to do.
    """

    case: Case
    code: assembly.Code
    ordered: assembly.Code
    decided: assembly.Code
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int
    block: str

    flattened: bool

    @property
    def inner_loop(self) -> list[str]:
        """The machine's inner loop around the multiplication."""
        return self.code.inner_loop(TARGETS[self.case.target].multiplies)

    def loop_as_asked(self) -> Counter[str]:
        """Instructions by name of the inner loop in PTX, before registers are given out; on AMD the machine's own."""
        pattern = r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)" if self.ordered is not self.code else "mfma"
        loop = self.ordered.inner_loop(pattern)
        return Counter(re.sub(r"^@!?%p\d+\s+", "", line).split()[0] for line in loop)


def config_of(case: Case) -> Any:
    """The configuration that the table has for a case. What only moves rows has the narrow tile, and the widest."""
    from fusedtp.kernels.configs import compiled_config

    return compiled_config(case.target, case.dtype.itemsize, case.shape)


def limit_of(case: Case) -> str:
    """Which limit of registers holds for a case, as the launchers choose it: of aligned lengths and strides."""
    if case.variant.startswith("gather rows"):
        return "gather transposed" if VARIANTS[case.variant].transposed else "gather"
    return "scatter" if case.variant == "scatter" else ""


def launch_options(case: Case, config: Any) -> dict[str, int]:
    """What the launcher of a case gives to the compiler."""
    from fusedtp.kernels.launch import moving_options, options, ring_options

    if VARIANTS[case.variant].module == "steps":
        return {"num_warps": 1}
    if case.variant.startswith("push"):
        return {}
    if not VARIANTS[case.variant].multiplies:
        return (ring_options if case.variant.startswith("ring") else moving_options)(config)
    return options(config, case.a_by, case.b_by, limit=limit_of(case))


def is_flattened(case: Case) -> bool:
    """Whether the kernel of a case has one loop of tiles and contraction."""
    from fusedtp.kernels.launch import flattened

    if VARIANTS[case.variant].module == "matmul_scatter" or VARIANTS[case.variant].flags.get("CONTRACTION"):
        return False
    return case.flatten and flattened(config_of(case), case.a_by, case.b_by)


def compile_case(
    case: Case,
    package: str = PACKAGE,
    options: dict[str, int] | None = None,
    *,
    aligned: Collection[str] | None = None,
    flags: dict[str, Any] | None = None,
) -> Any:
    """Triton's compiled kernel, for unit inner strides and aligned pointers. aligned: which lengths and strides are
    multiples of 16, None for all. flags: those that are not the variant's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant, config, dtype = VARIANTS[case.variant], config_of(case), DTYPES[case.dtype]
    fn = getattr(importlib.import_module(f"{package}.{variant.module}"), variant.kernel)
    a_block, b_block = [config.block_m, config.block_k], [config.block_k, config.block_n]
    a_shape = [1, *(a_block if case.a_by == "rows" else a_block[::-1])]
    flags = variant.flags | (flags or {})
    # A shard that is pushed to the own rank too is one whose rows are not contiguous.
    turned = case.a_by == "columns" or (flags.get("PUSHERS", 0) > 0 and not flags["OWN_IN_PLACE"])
    described = {
        "a_desc": (case.a_by, a_shape), "own_desc": (case.a_by, a_shape), "arena_desc": (case.a_by, a_shape),
        "b_desc": (case.b_by, b_block if case.b_by == "rows" else b_block[::-1]),
    }  # fmt: skip
    known = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "BLOCK_R": config.copy_rows, "BLOCK_C": config.copy_cols, "PIECE": config.block_m, "UPCAST": False,
        "A_BY": case.a_by, "B_BY": case.b_by,
        "FLATTEN": is_flattened(case),
        "stride_am" if turned else "stride_ak": 1,
        "stride_bn" if case.b_by == "rows" else "stride_bk": 1,
        "stride_xn": 1,
        **dict.fromkeys(("stride_cm", "stride_om") if variant.transposed else ("stride_cn", "stride_on"), 1),
        **{name: None for name, (by, _) in described.items() if by == "pointers"}, **_LINK, **flags,
    }  # fmt: skip
    others = {"table": "*i32", "peers": "*i64", "half_bytes": "i64"}
    signature = {}
    for name in fn.arg_names:
        if name in known:
            signature[name] = "constexpr"
        elif name in described:
            signature[name] = f"tensordesc<{dtype}{described[name][1]}>".replace(" ", "")
        elif name.endswith("_ptr"):
            signature[name] = f"*{dtype}"
        else:
            assert name in ("M", "N", "K") or not name.isupper(), f"{variant.name}: no value for the constant {name}"
            signature[name] = others.get(name, "i32")
    constants = {name: value for name, value in known.items() if name in signature}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(fn.arg_names)
        if signature[name] != "constexpr"
        and name not in described
        and name not in _NOT_SPECIALIZED
        and (aligned is None or name in aligned or signature[name].startswith("*"))
    }
    target = GPUTarget(*TARGETS[case.target].backend)
    options = launch_options(case, config) if options is None else options
    return triton.compile(ASTSource(fn, signature, constants, attrs), target=target, options=options)


def _of_nvidia(compiled: Any) -> tuple[assembly.Code, tuple[int, int, int]]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()

        def run(*command: str) -> str:
            program, *rest = command
            return subprocess.run(
                [tools / program, *rest, cubin.name], capture_output=True, text=True, check=True
            ).stdout  # fmt: skip

        used = run("cuobjdump", "--dump-resource-usage")
        numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
        return assembly.sass(run("nvdisasm", "-c")), (numbers["REG"], numbers["LOCAL"], numbers["STACK"])


def _of_amd(compiled: Any) -> tuple[assembly.Code, tuple[int, int, int]]:
    text = compiled.asm["amdgcn"]
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    found = [int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names]  # type: ignore[index]
    return assembly.amdgcn(text), (found[0], found[1] + found[2], found[3])


def examine(case: Case, compiled: Any) -> Built:
    """What came out."""
    code, (registers, spills, stack) = (_of_nvidia if "ptx" in compiled.asm else _of_amd)(compiled)
    if "ptx" in compiled.asm:
        ordered = decided = assembly.ptx(compiled.asm["ptx"])
    else:
        ordered, decided = code, assembly.amdgcn(compiled.asm["amdgcn"], masked=True)
    metadata, config = compiled.metadata, config_of(case)
    return Built(
        case, code, ordered, decided, registers, spills, stack, metadata.shared, metadata.num_warps,
        metadata.num_stages, f"{config.block_m}x{config.block_n}x{config.block_k}", is_flattened(case),
    )  # fmt: skip


@functools.cache
def build(case: Case) -> Built:
    """A case of the package, compiled once a run."""
    return examine(case, compile_case(case))


def plain(case: Case) -> Case:
    """The matmul that a fused one is compared with: the same tile, read alike, with as many loops."""
    variant = "matmul transposed" if VARIANTS[case.variant].transposed else "matmul"
    return replace(case, variant=variant, flatten=case.flatten and not case.variant.startswith("scatter"))


def cases() -> list[Case]:
    """All that is compiled."""
    from fusedtp.kernels.configs import SHAPES

    found = []
    for target, its in TARGETS.items():
        of = functools.partial(Case, target=target)
        main = functools.partial(of, a_by="rows", b_by="columns") if its.described else of
        for variant in VARIANTS.values():
            name = variant.name
            if variant.module == "steps":
                # No operand: one element type says all.
                found.append(of(name, dtype=torch.float32))
            elif not variant.multiplies:
                # A collective's tile, and the widest.
                found.append(of(name, shape="few columns"))
                if name in ("collect pieces", "reduce", "reduce transposed", "reduce pieces and broadcast"):
                    found.append(of(name))
            elif name.endswith("in pieces"):
                found.append(main(name))
            else:
                # A tile that goes to all ranks is narrow.
                found += [main(name, shape=shape) for shape in SHAPES if (name, shape) != ("scatter to all", "many")]
            if name in ("matmul", "gather rows", "scatter"):
                found.append(main(name, dtype=torch.float16))
            if its.described and name in ("matmul", "gather rows", "gather rows transposed", "scatter"):
                # Weights as they lie, and rows that no descriptor can read.
                found += [of(name, a_by="rows" if name.startswith("gather") else "columns", b_by="rows"), of(name)]
            if name in ("matmul", "gather rows", "gather rows transposed", "gather contraction", "scatter", "reduce",
                "ring all-reduce"):  # fmt: skip
                found.append(of(name, dtype=torch.float32))
    return found
