"""Every kernel compiled for every target without a GPU: no spill, tensor cores where they belong, an acquire in what
waits.

Runs in a process of its own, without the interpreter (`nox -s kernels`): the interpreter is chosen when kernels are
imported.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.offline

# (backend, arch, warp size) -> the instruction that a bf16 matmul must contain, in what the compiler emits.
TARGETS = {
    "sm_80": (("cuda", 80, 32), "mma.sync"),
    "sm_90": (("cuda", 90, 32), "wgmma"),
    "sm_100": (("cuda", 100, 32), "tcgen05.mma"),
    "gfx942": (("hip", "gfx942", 64), "v_mfma"),
}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LINK = {"WORLD_SIZE": 8, "OP": 1, "COUNT": False}


def _variants() -> list[tuple[str, str, dict[str, Any], bool, bool]]:
    # (module, kernel, constants, multiplies, waits)
    push = {"SCATTER": False, "WITH_OWN": False, **LINK}
    gather = {
        "BIAS": "columns",
        "LAST": True,
        "OWN_IN_PLACE": True,
        "ALIGNED": True,
        "PUSHERS": 16,
        "CONTRACTION": False,
        **LINK,
    }
    scatter = {"TO_ALL": False, **LINK}
    reduce = {"BIAS": "columns", "PER_TILE": True, "OWN_IN_PLACE": False, "BROADCAST": False, "LAST": True, **LINK}
    ring = {"REDUCE": True, "GATHER": True, **LINK}
    steps = [
        ("steps", "_step_kernel", {"STEP": name, **LINK}, False, name in ("wait", "leave"))
        for name in ("enter", "signal", "wait", "leave")
    ]
    return [
        ("matmul", "_matmul_kernel", {"BIAS": "columns"}, True, False),
        ("push", "_push_kernel", push, False, False),
        ("push", "_push_kernel", push | {"SCATTER": True, "WITH_OWN": True}, False, False),
        ("push", "_collect_kernel", {"PER_TILE": False, **LINK}, False, True),
        ("push", "_collect_kernel", {"PER_TILE": True, **LINK}, False, True),
        ("gather_matmul", "_gather_matmul_kernel", gather, True, True),
        ("gather_matmul", "_gather_matmul_kernel", gather | {"OWN_IN_PLACE": False}, True, True),
        ("gather_matmul", "_gather_matmul_kernel", gather | {"PUSHERS": 0, "BIAS": "rows", "LAST": False}, True, True),
        ("gather_matmul", "_gather_matmul_kernel", gather | {"CONTRACTION": True}, True, True),
        ("gather_matmul", "_gather_matmul_kernel", gather | {"CONTRACTION": True, "PIECE": 16}, True, True),
        ("matmul_scatter", "_matmul_scatter_kernel", scatter, True, False),
        ("matmul_scatter", "_matmul_scatter_kernel", scatter | {"TO_ALL": True}, True, False),
        ("reduce", "_reduce_kernel", reduce, False, True),
        ("reduce", "_reduce_kernel", reduce | {"OWN_IN_PLACE": True, "PER_TILE": False, "BROADCAST": True,
        "BIAS": "none", "LAST": False}, False, True),
        ("reduce", "_reduce_kernel", reduce | {"BIAS": "rows"}, False, True),
        ("ring", "_ring_kernel", ring, False, True),
        ("ring", "_ring_kernel", ring | {"REDUCE": False}, False, True),
        ("ring", "_ring_kernel", ring | {"GATHER": False}, False, True),
        *steps,
    ]  # fmt: skip


def compile_kernel(
    module: str, kernel: str, constants: dict[str, Any], dtype: torch.dtype, target: tuple[str, Any, int]
) -> Any:
    """The compiled kernel for bf16-like operands with unit inner strides and 16-byte aligned everything else."""
    import importlib

    import triton
    from fusedtp.kernels.launch import compiled_config
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = getattr(importlib.import_module(f"fusedtp.kernels.{module}"), kernel)
    config = compiled_config(dtype)
    known = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "BLOCK_R": config.copy_rows, "BLOCK_C": config.copy_cols, "PIECE": config.block_m, "UPCAST": False,
        "stride_ak": 1, "stride_bk": 1, "stride_cn": 1, "stride_xn": 1, "stride_on": 1,
    } | constants  # fmt: skip
    pointers = {"table": "*i32", "peers": "*i64"}
    signature = {}
    for name in fn.arg_names:
        if name in known:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = f"*{DTYPES[dtype]}"
        else:
            assert name in ("M", "N", "K") or not name.isupper(), f"{kernel}: no value for the constant {name}"
            signature[name] = pointers.get(name, "i64" if name == "half_bytes" else "i32")
    constants = {name: value for name, value in known.items() if name in signature}
    unspecialized = {"rank", "num_rows", "dst_row", "num_tiles", "region_row", "first_slot", "second_slot",
    "result_row",
                     "region_rows", "max_pieces", "gather_row", "gather_slot", "peer", "slot"}  # fmt: skip
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(fn.arg_names)
        if signature[name] != "constexpr" and name not in unspecialized
    }
    options = (
        {"num_warps": 1} if module == "steps" else {"num_warps": config.num_warps, "num_stages": config.num_stages}
    )
    return triton.compile(ASTSource(fn, signature, constants, attrs), target=GPUTarget(*target), options=options)


def resources(compiled: Any, tmp_path: Path) -> dict[str, int]:
    """Registers, stack and spill bytes: from cuobjdump for CUDA, from the assembly's metadata for HIP."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        found = {name: int(re.search(rf"\.{name}:\s+(\d+)", text).group(1)) for name in ("vgpr_count",
        "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")}  # fmt: skip
        return {
            "registers": found["vgpr_count"],
            "spills": found["vgpr_spill_count"] + found["sgpr_spill_count"],
            "stack": found["private_segment_fixed_size"],
        }
    import triton

    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": numbers["REG"], "spills": numbers["LOCAL"], "stack": numbers["STACK"]}


def _acquires(compiled: Any) -> int:
    # The poll, an addition of 0, at system scope (LLVM's default): a load in PTX, some atomic in LLVM's IR for HIP.
    if "ptx" in compiled.asm:
        return len(re.findall(r"\bld\.global\.sys\.acquire", compiled.asm["ptx"]))
    return len(re.findall(r"atomicrmw \w+ ptr [^,]+, i32 0 acquire,", compiled.asm["llir"]))


def _narrow_atomics(compiled: Any) -> list[str]:
    # Atomics of less than system scope: only words that other ranks never touch may have them.
    if "ptx" in compiled.asm:
        found: list[str] = re.findall(r"\b(?:atom|red|ld)\.global\.\S*\bgpu\b\S*", compiled.asm["ptx"])
    else:
        found = re.findall(r'atomicrmw \w+ .*syncscope\("agent"\) \w+', compiled.asm["llir"])
    return found


def _id(variant: tuple[str, str, dict[str, Any], bool, bool]) -> str:
    flags = [f"{name.lower()}={value}" for name, value in variant[2].items() if name not in LINK]
    return "-".join([variant[1].strip("_"), *flags])


def test_kernels_are_compiled_not_interpreted() -> None:
    from fusedtp.kernels import INTERPRETED

    assert os.environ.get("TRITON_INTERPRET") == "0"
    assert not INTERPRETED


# The steps have no operand: one dtype says all.
CASES = [
    (variant, dtype) for variant in _variants() for dtype in DTYPES if variant[0] != "steps" or dtype == torch.float32
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("variant", "dtype"), CASES, ids=lambda value: _id(value) if isinstance(value, tuple) else str(value)
)
def test_compiles(
    variant: tuple[str, str, dict[str, Any], bool, bool], dtype: torch.dtype, target: str, tmp_path: Path
) -> None:
    module, kernel, constants, multiplies, waits = variant
    where, tensor_core = TARGETS[target]
    compiled = compile_kernel(module, kernel, constants, dtype, where)
    used = resources(compiled, tmp_path)
    assert (used["spills"], used["stack"]) == (0, 0), used
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    if multiplies and dtype in (torch.bfloat16, torch.float16):
        assert tensor_core in text
    assert (_acquires(compiled) > 0) == waits
    # Raising a signal is a release at system scope; what has device scope is the arrival counter and the report.
    raises = "release.exch" in text if "ptx" in compiled.asm else "xchg" in compiled.asm["llir"]
    assert raises == (module != "matmul")
    assert all("acquire" not in each or "acq_rel" in each for each in _narrow_atomics(compiled))
