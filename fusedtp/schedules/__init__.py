"""Three ways to run one op; the same functions, arguments and results in each module.

`unfused`     the collective, then the matmul, through the process group's backend: the baseline and the fallback
`decomposed`  library matmuls by chunk, the next chunk on its way while one is multiplied
`fused`       one persistent Triton kernel

    all_gather_matmul(a, b, bias, *, gather_dim, sizes, group, transposed)   a [sizes[rank], K] or [M, sizes[rank]]
                                                                      -> [M, N], bias [N]; transposed: [N, M], bias [M]
    all_gather_two_matmuls(a, b, right, *, sizes, group)              a [sizes[rank], K] -> gather(a) @ b [M, N],
                                                                      gather(a).T @ right [K, R]; gathered once
    matmul_reduce_scatter(a, b, bias, *, scatter_dim, sizes, group)   -> [sizes[rank], N] or [M, sizes[rank]]
    matmul_scatter_and_gather(a, b, left, x, *, sizes, group)         x [sizes[rank], C] -> reduce_scatter(a @ b)
                                                                      [sizes[rank], N], left @ gather(x) [L, C]; the
                                                                      gather starts before a @ b
    matmul_all_reduce(a, b, bias, *, group, algorithm)                -> [M, N]
    all_gather(x, *, sizes, group, algorithm)                         x [sizes[rank], C] -> [sum(sizes), C]
    reduce_scatter(x, *, sizes, group, algorithm)                     x [sum(sizes), C] -> [sizes[rank], C]
    all_reduce(x, *, group, algorithm)                                x [R, C] -> [R, C]

Operands are 2-D with any strides, any size may be 0, `sizes` is the same tuple on every rank, results are fresh and
contiguous.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

NAMES = ("fused", "decomposed", "unfused")


@cache
def load(name: str) -> ModuleType:
    """The schedule's module, or `producer`, imported on first use: `fused` brings Triton in."""
    assert name in (*NAMES, "producer"), name
    return importlib.import_module(f"{__name__}.{name}")
