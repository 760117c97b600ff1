"""Every kernel compiled for every target without a GPU, as its launcher has it compiled."""

from __future__ import annotations

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
from .blocks import with_tails_made_one
from .cases import TARGETS, Case
from .launched import Launch, config_of, launched


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
    tile: tuple[int, ...]
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


def examine(case: Case, launch: Launch) -> Built:
    """Compile a launch of a case and return what the compiled kernel consists of."""
    compiled = launch.compiled(case.target)
    code, (registers, spills, stack, lanes) = (_of_nvidia if "ptx" in compiled.asm else _of_amd)(compiled)
    if "ptx" in compiled.asm:
        ordered = decided = assembly.ptx(compiled.asm["ptx"])
    else:
        ordered, decided = code, with_tails_made_one(assembly.amdgcn(compiled.asm["amdgcn"], masked=True))
    ptx = uniform.PTX_OF_ONE_WARP if compiled.metadata.num_warps == 1 else uniform.PTX
    apart = uniform.barriers_apart(decided, ptx if "ptx" in compiled.asm else uniform.AMDGCN)
    parted = [(decided.lines[branch], decided.lines[barrier]) for branch, barrier in apart]
    metadata, config, constants = compiled.metadata, config_of(case), launch.constants
    tile = tuple(constants.get(name, getattr(config, name.lower())) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return Built(
        case, code, ordered, parted, registers, spills, stack, lanes, metadata.shared, metadata.num_warps,
        metadata.num_stages, tile, constants.get("FLATTEN", False),
    )  # fmt: skip


_built: dict[Case, Built] = {}


def build(case: Case) -> Built:
    """A case of the package, compiled once a run."""
    if case not in _built:
        _built[case] = examine(case, launched(case))
    return _built[case]


def build_all(cases: Iterable[Case]) -> None:
    """Compile these beforehand, by as many processes as there are cores: compiling is all but all of the time."""
    missing = [case for case in dict.fromkeys(cases) if case not in _built]
    if len(missing) < 2:
        return
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        _built.update(zip(missing, pool.map(build, missing), strict=True))
