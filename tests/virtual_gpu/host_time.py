"""Print the host's time for launches with this Triton, by part, as rows of a table.

    TRITON_INTERPRET=0 python -P tests/virtual_gpu/host_time.py

Triton's own driver and launcher run over the stub of libcuda, which does nothing with a launch.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from virtual_gpu.stub import cuda_driver, ptx_is_the_image

from fusedtp.kernels import loading, prepared
from fusedtp.kernels.configs import SHAPES, compiled_config
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.gather_matmul import GatherMatmul
from fusedtp.kernels.launch import Channel
from fusedtp.kernels.matmul import matmul

TIMES, WORLD_SIZE = 2000, 8


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of many calls."""
    took = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(took)


def of(rows: int, cols: int, width: int = 1) -> torch.Tensor:
    """Return a matrix whose adjacent elements are `width` apart."""
    return torch.zeros(rows, width * cols, dtype=torch.bfloat16)[:, ::width]


CONFIG = replace(compiled_config("sm_90", 2, next(iter(SHAPES))), programs=132)
PLAIN = epilogue_of(())
# A launcher and its arguments.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def of_matmul(width: int) -> Call:
    """Return a call of the plain matmul."""
    return matmul, (of(256, 256, width), of(512, 256, width).t(), of(256, 512, width), PLAIN), {"config": CONFIG}


def of_gather() -> Call:
    """Return a call of the matmul that gathers rows."""
    peers, data = torch.zeros(WORLD_SIZE + 2, dtype=torch.int64), torch.zeros(1 << 22, dtype=torch.uint8)
    channel, table = Channel(peers, data, 0, WORLD_SIZE, 1 << 21, 4096), torch.zeros(9, dtype=torch.int32)
    gather = GatherMatmul(0, (256,) * WORLD_SIZE, on_rows=True, pitch=256, piece_rows=128, config=CONFIG)
    a, b, c = of(256, 256), of(512, 256).t(), of(256 * WORLD_SIZE, 512)
    return GatherMatmul.__call__, (gather, channel, a, [b], [c], PLAIN, table), {"pushed": False}


def row(name: str, by: str, launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a row for calls of `launcher`."""
    looked_up = launcher.__wrapped__
    given: dict[str, Any] = {}

    def launched(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: given.update(kernel=kernel, grid=grid, args=args, options=options)

    with mock.patch.object(loading, "_starter", launched):
        looked_up(*args, **kwargs)
    launcher(*args, **kwargs)
    key, operands, fingerprint = prepared._described(looked_up, args, kwargs)
    known = prepared._known[key]
    flat = known.params(operands, fingerprint)
    times = (
        microseconds(lambda: looked_up(*args, **kwargs)),
        microseconds(lambda: given["kernel"].warmup(*given["args"], grid=given["grid"], **given["options"])),
        microseconds(lambda: launcher(*args, **kwargs)),
        microseconds(lambda: prepared._described(looked_up, args, kwargs)),
        microseconds(lambda: known._run(*flat)),
    )
    return f"| {triton.__version__} | {name} | {by} | " + " | ".join(f"{each:.0f}" for each in times) + " |"


if __name__ == "__main__":
    triton.runtime.driver.set_active(cuda_driver(90, lambda device: 0))
    triton.knobs.runtime.add_stages_inspection_hook = ptx_is_the_image
    print(row("matmul", "descriptors", *of_matmul(1)))
    print(row("matmul", "pointers", *of_matmul(2)))
    print(row("gather", "descriptors", *of_gather()))
