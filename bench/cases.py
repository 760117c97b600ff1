"""What the sweep runs: the sizes, the operands of every rank, the closures to time, and the check each must pass.

Sizes are global, y[M, N] = x[M, K] @ w[N, K].T over W ranks:

    all_gather_matmul        x_shard_m [M/W, K],  w_shard_n [N/W, K]  ->  y_shard_n [M, N/W]
    matmul_reduce_scatter    x_shard_k [M, K/W],  w_shard_k [N, K/W]  ->  y_shard_m [M/W, N]
    matmul_all_reduce        x_shard_k [M, K/W],  w_shard_k [N, K/W]  ->  y [M, N]

Every rank draws the same whole x and w, standard normal, from the case's seed and cuts its shards out of them (as even
as can be where W does not divide), so each can compare its own part of y with the unsharded product in float64. Inputs
of ones would let a chunk taken for another pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import functional, reference
from fusedtp.shards import even_sizes

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
SCHEDULES = ("unfused", "decomposed", "fused")
# the two bounds every schedule is held against: the unsplit library matmul, and the backend's collective, each alone
BOUNDS = ("matmul", "comm")
DTYPES = ("float32", "bfloat16", "float16")

Shape = tuple[int, int, int]

_GATHER: tuple[Shape, ...] = ((4096, 512, 4096), (8192, 512, 2048), (2048, 512, 8192))
_SCATTER: tuple[Shape, ...] = ((4096, 4096, 512), (2048, 8192, 512), (8192, 2048, 512))

# `comm`: little arithmetic per byte that travels. GPU sizes are the MLP of a 70B model at 4096 and 8192 tokens.
SHAPES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "small": dict.fromkeys(OPS, ((256, 512, 512),)),
    "medium": dict.fromkeys(OPS, ((1024, 1024, 1024),)),
    "square": dict.fromkeys(OPS, ((2048, 2048, 2048),)),
    "comm": {
        "all_gather_matmul": _GATHER,
        "matmul_reduce_scatter": _SCATTER,
        "matmul_all_reduce": _SCATTER[:1],
    },
    "large": {
        "all_gather_matmul": ((4096, 28672, 8192), (8192, 28672, 8192)),
        "matmul_reduce_scatter": ((4096, 8192, 28672), (8192, 8192, 28672)),
        "matmul_all_reduce": ((512, 8192, 28672), (4096, 8192, 28672)),
    },
}
# interpreted kernels cost seconds at sizes that a library does in a millisecond; nothing here divides by a tile or by 4
CHECK_SHAPES: tuple[Shape, ...] = ((96, 80, 64), (97, 83, 61))


@dataclass(frozen=True)
class Case:
    """One op at one size, dtype and world size."""

    op: str
    M: int
    N: int
    K: int
    dtype: str
    world_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {self.op!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if min(self.M, self.N, self.K, self.world_size) < 1:
            raise ValueError(f"M, N, K and world_size must be positive, got {self}")

    def __str__(self) -> str:
        return f"{self.op} {self.M}x{self.N}x{self.K} {self.dtype} on {self.world_size}"


class Problem:
    """One rank's operands of a case, what each variant computes from them, and its check. Setting up sends nothing."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        self.case, self.group = case, group
        rank, world_size = group.rank(), group.size()
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(case.seed)
        x = torch.randn(case.M, case.K, generator=generator).to(device, self._dtype)  # [M, K]
        w = torch.randn(case.N, case.K, generator=generator).to(device, self._dtype)  # [N, K]
        m_sizes, n_sizes, k_sizes = (even_sizes(length, world_size) for length in (case.M, case.N, case.K))
        self._sizes = m_sizes
        self._x = x
        # what this rank's part of y is made of, for the oracle: rows of a, columns of b, and how K is cut
        self._a, self._b, self._k_sizes = x, w.t(), k_sizes
        if case.op == "all_gather_matmul":
            self._x_shard = reference.chunk(x, 0, rank, m_sizes).clone()
            self._w_shard = reference.chunk(w, 0, rank, n_sizes).clone()
            self._b, self._k_sizes = self._w_shard.t(), (case.K,)
        else:
            self._x_shard = reference.chunk(x, 1, rank, k_sizes).contiguous()
            self._w_shard = reference.chunk(w, 1, rank, k_sizes).contiguous()
            self._partial = torch.mm(self._x_shard, self._w_shard.t())  # [M, N], this rank's term of the sum
            if case.op == "matmul_reduce_scatter":
                self._a = reference.chunk(x, 0, rank, m_sizes)
        self._expected: Tensor | None = None
        self._allowed: dict[torch.dtype, Tensor] = {}

    def runner(self, variant: str) -> Callable[[], Tensor]:
        """The closure to time: a schedule by name, or one of `BOUNDS`."""
        group, x, w, sizes = self.group, self._x_shard, self._w_shard, self._sizes
        op = self.case.op
        if variant == "matmul":
            whole, wt = (self._x if op == "all_gather_matmul" else x), w.t()
            return lambda: torch.mm(whole, wt)
        if variant == "comm":
            if op == "all_gather_matmul":
                return lambda: functional.all_gather(x, group=group, sizes=sizes, schedule="unfused")
            partial = self._partial
            return lambda: self._reduce(partial)
        if op == "all_gather_matmul":
            return lambda: functional.all_gather_linear(x, w, group=group, sizes=sizes, schedule=variant)
        if op == "matmul_reduce_scatter":
            return lambda: functional.linear_reduce_scatter(x, w, group=group, sizes=sizes, schedule=variant)
        return lambda: functional.linear_all_reduce(x, w, group=group, schedule=variant)

    def check(self, variant: str, out: Tensor) -> tuple[float, float]:
        """(largest error, largest error / allowed error) of `out` on this rank; AssertionError when it is wrong.

        Collective for `matmul` of the two reducing ops: the partial product is judged by what its sum over ranks gives.
        """
        name = f"{self.case}, {variant}, rank {self.group.rank()}"
        if self.case.op == "all_gather_matmul" and variant == "comm":
            if not torch.equal(out, self._x):
                reference.check(out, self._x.double(), torch.zeros(self._x.shape, device=out.device), name)
            return 0.0, 0.0
        if self.case.op != "all_gather_matmul" and variant == "matmul":
            out = self._reduce(out)
        # a backend may sum in the input's dtype, and so does every variant that goes through one
        expected, allowed = self._oracle(self._dtype if variant in ("unfused", *BOUNDS) else torch.float32)
        if out.shape != expected.shape or not out.numel():
            reference.check(out, expected, allowed, name)
            return 0.0, 0.0
        # one temporary: at these sizes fresh pages cost more than arithmetic
        error = torch.sub(expected, out).abs_()
        largest = error.max().item()
        ratio = error.div_(allowed).max().item()
        if not ratio <= 1.0:
            reference.check(out, expected, allowed, name)
        return largest, ratio

    def _reduce(self, partial: Tensor) -> Tensor:
        if self.case.op == "matmul_reduce_scatter":
            return functional.reduce_scatter(partial, group=self.group, sizes=self._sizes, schedule="unfused")
        return functional.all_reduce(partial, group=self.group, schedule="unfused")

    def _oracle(self, sum_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._expected is None:
            self._expected = reference.matmul(self._a, self._b)
        if sum_dtype not in self._allowed:
            self._allowed[sum_dtype] = reference.bound(
                self._a, self._b, self._dtype, k_sizes=self._k_sizes, sum_dtype=sum_dtype
            )
        return self._expected, self._allowed[sum_dtype]

    def forget_oracle(self) -> None:
        """Free the float64 tensors before timing."""
        self._expected, self._allowed = None, {}
