"""Print the host's time for a launch of the plain matmul, with this Triton, and where it goes, as a row of a table.

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

from fusedtp.kernels import loading
from fusedtp.kernels.configs import SHAPES, compiled_config
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.matmul import matmul

TIMES = 2000


def microseconds(call: Callable[[], object]) -> float:
    """The median of many calls."""
    took = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(took)


def row(by: str, width: int) -> str:
    """A row for operands whose adjacent elements are `width` apart."""

    def of(rows: int, cols: int) -> torch.Tensor:
        return torch.zeros(rows, width * cols, dtype=torch.bfloat16)[:, ::width]

    a, b, c = of(256, 256), of(512, 256).t(), of(256, 512)
    config = replace(compiled_config("sm_90", 2, next(iter(SHAPES))), programs=132)
    given: dict[str, Any] = {}

    def launched(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: given.update(kernel=kernel, grid=grid, args=args, options=options)

    def call() -> None:
        matmul(a, b, c, epilogue_of(None, per_row=False), config=config)

    call()
    with mock.patch.object(loading, "_starter", launched):
        call()
    kernel, grid, args, options = (given[name] for name in ("kernel", "grid", "args", "options"))
    compiled = kernel.warmup(*args, grid=grid, **options)
    flat, whole_grid = loading.load(compiled, grid)(args), (*grid, 1, 1)
    times = (
        microseconds(call), microseconds(lambda: loading.launch(kernel, grid)(*args, **options)),
        microseconds(lambda: kernel.warmup(*args, grid=grid, **options)),
        microseconds(lambda: compiled[whole_grid](*flat)),
    )  # fmt: skip
    return f"| {triton.__version__} | {by} | " + " | ".join(f"{each:.0f}" for each in times) + " |"


if __name__ == "__main__":
    triton.runtime.driver.set_active(cuda_driver(90, lambda device: 0))
    triton.knobs.runtime.add_stages_inspection_hook = ptx_is_the_image
    print(row("descriptors", 1))
    print(row("pointers", 2))
