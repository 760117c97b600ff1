"""The two cores of the kernels side by side: speed on paper, and what the compiler makes of each.

FUSEDTP_CORES=write writes the tables of docs/kernels.md.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton

from fusedtp.kernels import configs, cores

from . import paper
from .generated import as_written

DOCUMENT = Path(__file__).parent.parent / "docs/kernels.md"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
OPS = {"matmul": "matmul", "gather rows": "gather", "gather contraction": "gather", "scatter rows": "scatter"}
FLOAT8_OPS = "gather rows", "gather contraction", "scatter rows"


def test_speed_on_paper_is_what_is_written() -> None:
    as_written(DOCUMENT, "paper", paper.table(), "FUSEDTP_CORES")


def test_a_short_contraction_gains_most_on_paper() -> None:
    gains = [paper.own("loop", 8192, 8192, K) / paper.own("warp-specialised", 8192, 8192, K) for K in (512, 1024, 8192)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1


def assembled(text: str, folder: Path) -> tuple[str, str]:
    """Return what Triton's own ptxas for sm_90 says of PTX, and the machine code."""
    from triton.backends.nvidia.compiler import get_ptxas

    source, cubin = folder / "k.ptx", folder / "k.cubin"
    source.write_text(text)
    done = subprocess.run(
        [get_ptxas(90).path, "-arch=sm_90a", "-v", "-o", cubin, source], capture_output=True, text=True, check=True
    )
    # ptxas says so if it ignores setmaxnreg, or lets a product wait for the one before.
    assert not re.search(r"warning|Performance Loss", done.stderr), done.stderr
    code = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    return done.stderr, code


def compiled(text: str, folder: Path) -> str:
    """Return a row of what ptxas makes of PTX, which is to keep nothing in local memory."""
    said, code = assembled(text, folder)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said, said
    registers = re.findall(r"Used (\d+) registers", said)[0]
    if "setmaxnreg" in text:
        # The warps that multiply give some back to those that load; both begin and end with other numbers.
        given, taken = (re.findall(rf"setmaxnreg\.{how}\.sync\.aligned\.u32\s+(\d+)", text) for how in ("dec", "inc"))
        registers = f"{max(map(int, given))}, and {min(map(int, taken))} that load"
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", code, re.M))
    barriers, fences, stores = (len(re.findall(what, code)) for what in (r"BAR\.", r"MEMBAR\.\w+\.SYS", "UTMASTG"))
    return f"{registers} | {instructions} | {barriers} | {fences} | {stores}"


@pytest.mark.offline
@pytest.mark.parametrize(
    ("op", "dtype"),
    [("gather rows", torch.bfloat16), ("gather contraction", torch.float8_e4m3fn),
     ("gather rows several", torch.float8_e4m3fn), ("scatter rows", torch.float8_e4m3fn)],
)  # fmt: skip
def test_eight_ranks_keep_nothing_of_a_loop_in_memory(op: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Eight descriptors take registers: some may lie in memory, but not while tiles are multiplied."""
    if os.environ.get("TRITON_INTERPRET") != "0":
        pytest.skip("Triton's interpreter is chosen for this process; nox -s kernels")
    from .virtual_gpu.cases import run
    from .virtual_gpu.driver import device
    from .virtual_gpu.machine import Schedule
    from .virtual_gpu.shapes import Shape

    table = configs.TABLE if dtype == torch.bfloat16 else configs._FLOAT8
    rows = {shape: replace(each, core=cores.WARP_SPECIALISED) for shape, each in table["sm_90"].items()}
    with mock.patch.dict(table, {"sm_90": rows}), device(90) as gpu:
        run(gpu, [op], 8, dtype, Shape(1024, 512, 1024, "even", bias=False), Schedule(1, tick=0.001))
        (text,) = (text for text, each in gpu.programs.items() if "warp_specialised" in each.name)
    said, code = assembled(text, tmp_path)
    assert int(re.findall(r"(\d+) bytes stack frame", said)[0]) <= 160, said
    multiplied = [line.start() for line in re.finditer("[HQ]GMMA", code)]
    assert multiplied
    assert not re.findall(r"\b(?:LDL|STL)\b.*", code[multiplied[0] : multiplied[-1]])


@pytest.mark.offline
def test_what_is_compiled_is_what_is_written(tmp_path: Path) -> None:
    if os.environ.get("TRITON_INTERPRET") != "0":
        pytest.skip("Triton's interpreter is chosen for this process; nox -s kernels")
    from fusedtp.kernels.epilogue import epilogue_of
    from fusedtp.kernels.matmul import matmul

    from .virtual_gpu.cases import FLOAT8, run
    from .virtual_gpu.driver import device
    from .virtual_gpu.machine import Schedule
    from .virtual_gpu.shapes import Shape

    lines = [
        f"Triton {triton.__version__}, sm_90, bfloat16, 128 x 256 x 64, or float8, 128 x 128 x 128; lengths that are "
        "multiples of 16, no epilogue.",
        "",
        "| kernel | core | registers of a thread | instructions | barriers | system fences | TMA stores |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    bf16, e4m3 = torch.bfloat16, FLOAT8["float8_e4m3fn"]
    for dtype, op in [(bf16, op) for op in OPS] + [(e4m3, op) for op in FLOAT8_OPS]:
        kernel, table, told = OPS[op], *((configs.TABLE, "") if dtype == bf16 else (configs._FLOAT8, ", float8"))
        for core in (cores.LOOP, cores.WARP_SPECIALISED):
            rows = {shape: replace(each, core=core) for shape, each in table["sm_90"].items()}
            with mock.patch.dict(table, {"sm_90": rows}), device(90) as gpu:
                if op == "matmul":
                    a, b, c = (torch.ones(256, 512 - 256 * (i == 0), dtype=torch.bfloat16) for i in range(3))
                    matmul(a, b, c, epilogue_of(()), config=replace(rows["many"], programs=2))
                    gpu.machine.waiting.clear()
                else:
                    run(gpu, [op], 2, dtype, Shape(256, 512, 256, "even", bias=False), Schedule(1, tick=0.001))
                (text,) = (text for text, each in gpu.programs.items() if kernel in each.name)
                lines.append(f"| {op}{told} | {core} | {compiled(text, tmp_path)} |")
    found = re.findall(r"^Triton ([\d.]+), sm_90, bfloat16, 128", DOCUMENT.read_text(), re.M)
    if found != [triton.__version__] and os.environ.get("FUSEDTP_CORES") != "write":
        pytest.skip(f"written with Triton {found}")
    as_written(DOCUMENT, "cores", "\n".join(lines), "FUSEDTP_CORES")
