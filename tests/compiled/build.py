"""Every kernel compiled for every target without a GPU, as the launchers would have it compiled."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from . import assembly, uniform
from .arguments import Path as Place
from .arguments import mapped, named
from .blocks import with_tails_made_one
from .cases import DTYPES, TARGETS, VARIANTS, Case

PACKAGE = "fusedtp.kernels"
_SCATTERS = ("matmul_scatter", "matmul_all_reduce")
_GROUP = {"WORLD_SIZE": 8, "OP": 1}
_NOT_SPECIALIZED = {
    "rank", "fingerprint", "num_rows", "dst_row", "num_tiles", "head", "region_row", "first_slot", "second_slot",
    "result_row", "region_rows", "max_pieces", "gather_row", "gather_slot", "peer", "slot", "producers", "reducers",
    "sums_row",
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A compiled kernel. `code` is the machine's own; `ordered` is where memory order is asked for: PTX, AMD's code.
    `lanes`: AMD's compiler keeps scalars that it has no register for in lanes of vector registers, not in memory.
    `parted`: decisions that threads may not share, each with a barrier that some of them pass by.
    """

    case: Case
    code: assembly.Code
    ordered: assembly.Code
    parted: list[tuple[str, str]]
    registers: int
    spill_bytes: int
    stack_bytes: int
    lanes: int
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
        return Counter(re.sub(r"^@!?%p\d+\s+|_e(32|64)\b", "", line).split()[0] for line in loop)


def config_of(case: Case) -> Any:
    """The configuration that the table has for a case, as launchers fit it to what is aligned. What only moves rows has
    the narrow tile, and the widest.
    """
    from fusedtp.kernels.choices import Choice, applied
    from fusedtp.kernels.configs import compiled_config
    from fusedtp.kernels.launch import fitted

    config = compiled_config(case.target, case.dtype.itemsize, case.shape, blocks=case.blocks, tree=case.is_tree)
    if case.choice:
        config = applied(config, Choice(*case.choice))
    if case.aligned != () or not VARIANTS[case.variant].multiplies:
        return config
    # The tiles of a scatter are counted by their owners.
    stored = VARIANTS[case.variant].module in _SCATTERS
    return fitted(config, stored=stored, read="pointers" not in (case.a_by, case.b_by))


def launch_options(case: Case, config: Any) -> dict[str, int]:
    """Return the compiler options of the case's launcher."""
    from fusedtp.kernels.launch import FP_FUSION, moving_options, options

    if VARIANTS[case.variant].module == "steps":
        return {"num_warps": 1, **FP_FUSION}
    if case.variant.startswith("push"):
        return FP_FUSION
    if not VARIANTS[case.variant].multiplies:
        return moving_options(config)
    return options(config, case.a_by, case.b_by)


def is_flattened(case: Case) -> bool:
    """Return whether the kernel of a case has one loop of tiles and contraction."""
    from fusedtp.kernels.launch import flattened

    if VARIANTS[case.variant].module in _SCATTERS or case.all_flags.get("CONTRACTION"):
        return False
    if case.all_flags.get("ACTIVATION") or case.is_tree:
        return False
    return case.flatten and flattened(config_of(case), case.a_by, case.b_by)


def compile_case(case: Case, package: str = PACKAGE, options: dict[str, int] | None = None) -> Any:
    """Triton's compiled kernel, for unit inner strides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fusedtp.kernels.launch import strip_of

    variant, config, dtype = VARIANTS[case.variant], config_of(case), DTYPES[case.dtype]
    b_dtype = DTYPES[case.b_dtype or case.dtype]
    fn = getattr(importlib.import_module(f"{package}.{variant.module}"), variant.kernel)
    a_block, b_block = [config.block_m, config.block_k], [config.block_k, config.block_n]
    a_shape = [1, *(a_block if case.a_by == "rows" else a_block[::-1])]
    flags = case.all_flags
    # A shard that is pushed to the own rank too is one whose rows are not contiguous.
    turned = case.a_by == "columns" or (flags.get("PUSHERS", 0) > 0 and not flags["IN_PLACE"])
    described = {
        "a_desc": (case.a_by, a_shape), "own_desc": (case.a_by, a_shape), "arena_desc": (case.a_by, a_shape),
        "b_desc": (case.b_by, b_block if case.b_by == "rows" else b_block[::-1]),
    }  # fmt: skip
    copy_rows = config.copy_rows if case.aligned is None else min(config.copy_rows, config.loose_copy_rows)
    known = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "BLOCK_R": copy_rows, "BLOCK_C": config.copy_cols, "PIECE": config.block_m,
        "STRIP": strip_of(config, 2 if variant.module == "ring" else 1),
        "A_BY": case.a_by, "B_BY": case.b_by,
        "FLATTEN": is_flattened(case), "SCALED_DOT": config.scaled_dot,
        "SCALES": "" if not case.is_float8 else "blocks" if case.blocks else "rows",
        "stride_am" if turned else "stride_ak": 1,
        "stride_bn" if case.b_by == "rows" else "stride_bk": 1,
        "stride_xn": 1,
        **dict.fromkeys([f"stride_{name}{'m' if variant.transposed else 'n'}" for name in "cor"], 1),
        **{name: None for name, (by, _) in described.items() if by == "pointers"}, **_GROUP,
        "none": None, "residual": None, "z_ptr": None, "ACTIVATION": "", "GATED": False, "END": 0,
        "LEAVES": 0, "LEAVES_ALIGNED": False, "TREE": False, "result_pitch": None, "SWITCH": False,
        **_units(case), **{name: value for name, value in flags.items() if name != "KEEPS"},
    }  # fmt: skip
    if flags.get("TREE") and flags["BROADCAST"]:
        del known["result_pitch"]
    others = {"table": "*i32", "peers": "*i64", "half_bytes": "i64", "fingerprint": "i64"}
    others |= {"sums": "*fp32", "arrivals": "*i32"}
    if flags.get("KEEPS"):
        del known["z_ptr"]
    if flags.get("SPLITS", 1) == 1:
        known |= {"sums": None, "arrivals": None}
    if case.is_float8:
        # What is made of float8 is bfloat16.
        others |= dict.fromkeys(("scale", "scale_a", "scale_b"), "*u8" if case.blocks else "*fp32")
        others |= dict.fromkeys(("c_ptr", "bias_ptr", "z_ptr", "scale_out"), "*bf16")
        known |= {} if variant.module in _SCATTERS else {"scale_out": 0}
        if variant.module == "matmul_all_reduce":
            others |= dict.fromkeys(("out_ptr", "residual_ptr"), "*bf16")
    else:
        known |= {"scales": None, "scale": None}
    trees = named(fn, package, variant.more, adds=variant.adds, scaled=case.is_float8)
    epilogue = None
    if "epilogue" in trees:
        epilogue, tree = list(trees).index("epilogue"), trees["epilogue"]
        absent = {field: f"{field}_ptr" for field in ("bias", "z") if known.get(f"{field}_ptr", 0) is None}
        trees["epilogue"] = tree._replace(**absent)
    places, types = {}, {}

    def type_of(path: Place, name: str) -> str:
        places[path] = name
        if name in known:
            types[path] = "constexpr"
        elif name in described:
            types[path] = f"tensordesc<{dtype}{described[name][1]}>".replace(" ", "")
        elif name.endswith("_ptr"):
            types[path] = others.get(name, f"*{dtype if name != 'b_ptr' else b_dtype}")
        else:
            assert name in ("M", "N", "K") or not name.isupper(), f"{variant.name}: no value for the constant {name}"
            assert len(path) != 2 or path[0] != epilogue, f"`{name}`: say in `known` what it is where it is not used"
            types[path] = others.get(name, "i32")
        return types[path]

    signature = {name: mapped(tree, type_of, (i,)) for i, (name, tree) in enumerate(trees.items())}
    constants = {path: known[name] for path, name in places.items() if name in known}
    attrs = {
        path: [["tt.divisibility", 16]]
        for path, name in places.items()
        if types[path] != "constexpr"
        and name not in described
        and name not in _NOT_SPECIALIZED
        and (case.aligned is None or name in case.aligned or _is_aligned(name, case))
    }
    target = GPUTarget(*TARGETS[case.target].backend)
    options = launch_options(case, config) if options is None else options
    return triton.compile(ASTSource(fn, signature, constants, attrs), target=target, options=options)


def _units(case: Case) -> dict[str, int]:
    # How many blocks there are, and the dimensions whose elements are adjacent in all of them.
    variant = VARIANTS[case.variant]
    across = variant.more if variant.module == "gather_matmul" else 0
    of_results = dict.fromkeys(("C_UNIT", "OUT_UNIT", "RESIDUAL_UNIT"), 0 if variant.transposed else 1)
    return of_results | {
        "B_COUNT": 1 + variant.more, "C_COUNT": 1 + across, "OUT_COUNT": 1, "RESIDUAL_COUNT": 1,
        "A_UNIT": 0 if case.a_by == "columns" else 1,
        "B_UNIT": 1 if case.b_by == "rows" else 0,
    }  # fmt: skip


def _is_aligned(name: str, case: Case) -> bool:
    # Tables are the package's own.
    return name in ("table", "peers", "sums", "arrivals") or (name.endswith("_ptr") and case.aligned != ())


def _of_nvidia(compiled: Any) -> tuple[assembly.Code, tuple[int, int, int, int]]:
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
        return assembly.sass(run("nvdisasm", "-c")), (numbers["REG"], numbers["LOCAL"], numbers["STACK"], 0)


def _of_amd(compiled: Any) -> tuple[assembly.Code, tuple[int, int, int, int]]:
    text = compiled.asm["amdgcn"]
    names = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size", "sgpr_spill_count")
    found = [int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names]  # type: ignore[index]
    registers, spilled, stack, lanes = found
    # Counted in registers of 4 bytes.
    return assembly.amdgcn(text), (registers, 4 * spilled, stack, lanes)


def examine(case: Case, compiled: Any) -> Built:
    """Return what a compiled kernel consists of."""
    code, (registers, spills, stack, lanes) = (_of_nvidia if "ptx" in compiled.asm else _of_amd)(compiled)
    if "ptx" in compiled.asm:
        ordered = decided = assembly.ptx(compiled.asm["ptx"])
    else:
        ordered, decided = code, with_tails_made_one(assembly.amdgcn(compiled.asm["amdgcn"], masked=True))
    apart = uniform.barriers_apart(decided, uniform.PTX if "ptx" in compiled.asm else uniform.AMDGCN)
    parted = [(decided.lines[branch], decided.lines[barrier]) for branch, barrier in apart]
    metadata, config = compiled.metadata, config_of(case)
    return Built(
        case, code, ordered, parted, registers, spills, stack, lanes, metadata.shared, metadata.num_warps,
        metadata.num_stages, f"{config.block_m}x{config.block_n}x{config.block_k}", is_flattened(case),
    )  # fmt: skip


_built: dict[Case, Built] = {}


def build(case: Case) -> Built:
    """A case of the package, compiled once a run."""
    if case not in _built:
        _built[case] = examine(case, compile_case(case))
    return _built[case]


def build_all(cases: Iterable[Case]) -> None:
    """Compile these beforehand, by as many processes as there are cores: compiling is all but all of the time."""
    missing = [case for case in dict.fromkeys(cases) if case not in _built]
    if len(missing) < 2:
        return
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        _built.update(zip(missing, pool.map(build, missing), strict=True))
