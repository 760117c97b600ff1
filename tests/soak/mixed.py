"""Random calls of the library: operands, and expected result and gradients.

Calls are drawn from a seed and a number alone, so every rank draws the same calls and any call can be repeated. Sizes
are at most two tiles of the interpreter; shards are even, uneven or empty. Every rank draws the whole operands and cuts
its shards. It compares its part of y, and of the gradients if the call has a backward pass, with the unsharded products
in float64, within the errors that `fusedtp.reference` derives. Half of the calls are of small integers, whose sums are
exact in every dtype and order: they must be right bit for bit. Operands have any layout.

The shapes, for x @ weight.T + bias of M rows, N output and K input features; `_X` marks a dim that is split over ranks:

    all_gather_linear       x [M_X, K] or [M, K_X]   weight [N_X, K]   ->  y [M, N_X]
    linear_reduce_scatter   x [M, K_X]               weight [N, K_X]   ->  y [M_X, N] or [M, N_X]
    linear_all_reduce       x [M, K_X]               weight [N, K_X]   ->  y [M, N]
    fsdp_linear             x [M_X, K]               weight [N_X, K]   ->  y [M_X, N]
    all_gather              x [M_X, N]                                 ->  y [M, N]
    reduce_scatter          x [M, N], a term each                      ->  y [M_X, N]
    all_reduce              x [M, N], a term each                      ->  y [M, N]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference
from fusedtp.op import MATMUL_ALL_REDUCE, Op
from fusedtp.op import OPS as TABLE
from fusedtp.shards import even_sizes

from .layouts import LAYOUTS, alike, laid_out

MATMULS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "fsdp_linear")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# Matmuls to whose result a residual may be added.
SUMS = ("linear_reduce_scatter", "linear_all_reduce")
OPERANDS = ("x", "weight", "bias", "residual", "dy")


def algorithms(op: Op, schedule: str) -> tuple[str, ...]:
    """Return the algorithms beside "auto": a ring needs kernels, and process groups pick their own algorithm."""
    if schedule == "unfused":
        return ()
    return tuple(each for each in op.algorithms if each != "ring" or schedule == "fused")


# Key: call, then schedule.
ALGORITHMS = {
    name: {schedule: algorithms(op, schedule) for schedule in ("fused", "decomposed")}
    for name, op in {**{name: TABLE[name] for name in COLLECTIVES}, "linear_all_reduce": MATMUL_ALL_REDUCE}.items()
}
OPS = (*MATMULS, *COLLECTIVES)
DTYPES = {
    "fused": ("float32", "bfloat16", "float16"),
    "decomposed": ("float32", "bfloat16", "float16", "float64"),
    "unfused": ("float32", "bfloat16", "float16", "float64"),
}
# One call with interpreted kernels takes as long as a hundred calls of the other schedules.
WEIGHTS = {"decomposed": 11, "unfused": 6, "fused": 3}


@dataclass(frozen=True)
class Call:
    """One call.

    - `sizes`: the ranks' lengths of M, N and K. `dim`: the gathered or scattered dim, 0 or -1.
    - `exact`: whether all sums are exact. `layouts`: of `OPERANDS`, in their order.
    """

    op: str
    schedule: str
    algorithm: str
    dtype: str
    dim: int
    sizes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    bias: bool
    backward: bool
    seed: int
    residual: bool = False
    exact: bool = False
    layouts: tuple[str, ...] = ("contiguous",) * len(OPERANDS)


def _split(source: random.Random, world_size: int) -> tuple[int, ...]:
    # Draw a length, mostly within a tile, and its shards: as even as possible, random, or all on one rank.
    length = source.randint(0, 40) if source.random() < 0.95 else source.randint(64, 131)
    if source.random() < 0.3:
        return even_sizes(length, world_size)
    if source.random() < 0.1:
        owner = source.randrange(world_size)
        return tuple(length if rank == owner else 0 for rank in range(world_size))
    ends = [0, *sorted(source.randint(0, length) for _ in range(world_size - 1)), length]
    return tuple(end - begin for begin, end in pairwise(ends))


def draw(source: random.Random, world_size: int, weights: Mapping[str, float] = WEIGHTS) -> Call:
    """Draw a call of any op and schedule; `weights`: how often each schedule is drawn."""
    (schedule,) = source.choices(list(weights), list(weights.values()))
    op = source.choice(OPS)
    m_sizes, n_sizes, k_sizes = (_split(source, world_size) for _ in range(3))
    return Call(
        op=op, schedule=schedule,
        algorithm=source.choice(("auto", *ALGORITHMS.get(op, {}).get(schedule, ()))),
        dtype=source.choice(DTYPES[schedule]),
        dim=source.choice((0, -1)) if op in ("all_gather_linear", "linear_reduce_scatter") else 0,
        sizes=(m_sizes, n_sizes, k_sizes),
        bias=op in MATMULS and source.random() < 0.5, backward=source.random() < 0.3, seed=source.getrandbits(31),
        residual=op in SUMS and source.random() < 0.5, exact=source.random() < 0.5,
        layouts=tuple(source.choice(LAYOUTS) for _ in OPERANDS),
    )  # fmt: skip


class Expected:
    """An expected result, by name, and the error that rounding may leave."""

    def __init__(self, name: str, whole: Tensor, allowed: Tensor) -> None:
        self.name, self.whole, self.allowed = name, whole, allowed

    def plus(self, term: Tensor, eps: float) -> Expected:
        """Return the sum with another term, whose rounding may add `eps` of it to the error."""
        return Expected(self.name, self.whole + term, self.allowed + eps * term.abs())

    def part(self, dim: int, rank: int, sizes: Sequence[int]) -> Expected:
        """Return rank `rank`'s part along `dim`."""
        return Expected(self.name, *(reference.chunk(each, dim, rank, sizes) for each in (self.whole, self.allowed)))


class Operands:
    """A call's operands on one rank, as leaves, with the expected result and gradients."""

    def __init__(self, call: Call, rank: int, device: torch.device | str = "cpu") -> None:
        self.call, self.rank = call, rank
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self._random = torch.Generator().manual_seed(call.seed)
        # A backend sums in the operands' dtype, and a ring sends running sums in that dtype; all else sums in float32.
        by_dtype = call.schedule == "unfused" or call.algorithm == "ring"
        self._sum_dtype = self.dtype if by_dtype else torch.float32
        self.bias: Tensor | None = None
        self.weight: Tensor | None = None
        self.residual: Tensor | None = None
        self._layouts = dict(zip(OPERANDS, call.layouts, strict=True))
        self.expected: list[Expected] = []
        self.x = self.dy = torch.empty(0)
        if call.op in MATMULS:
            self._matmul()
        else:
            self._collective()
        given = dict(zip(OPERANDS, (self.x, self.weight, self.bias, self.residual, self.dy), strict=True))
        placed = {
            name: laid_out(each.to(device), self._layouts[name]) for name, each in given.items() if each is not None
        }
        self.dy = placed.pop("dy")
        self.leaves = [each.requires_grad_(call.backward) for each in placed.values()]

    def _drawn(self, name: str, *shape: int) -> Tensor:
        # Values for the operand `name`. Integers add up to at most 133, which bfloat16 has.
        if self.call.exact:
            made = torch.randint(-1, 2, shape, generator=self._random)
        else:
            made = torch.randn(shape, generator=self._random)
        return alike(made.to(self.dtype), self._layouts[name])

    def _product(self, name: str, a: Tensor, b: Tensor, bias: Tensor | None = None, cut: Any = None) -> Expected:
        # a @ b + bias. `cut`: the ranks' lengths of the contraction, if their products are summed.
        whole = reference.matmul(a, b, bias)
        if self.call.exact:
            return self._exact(name, whole)
        bound = reference.bound(a, b, self.dtype, k_sizes=cut, bias=bias, sum_dtype=self._sum_dtype)
        return Expected(name, whole, bound)

    def _total(self, name: str, parts: Sequence[Tensor]) -> Expected:
        whole = reference.total(parts)
        if self.call.exact:
            return self._exact(name, whole)
        return Expected(name, whole, reference.total_bound(parts, self.dtype, sum_dtype=self._sum_dtype))

    def _exact(self, name: str, whole: Tensor) -> Expected:
        return Expected(name, whole.double(), torch.zeros_like(whole, dtype=torch.float64))

    def _matmul(self) -> None:
        call, rank = self.call, self.rank
        m, n, k = call.sizes
        M, N, K = map(sum, call.sizes)
        x, w, dy = self._drawn("x", M, K), self._drawn("weight", N, K), self._drawn("dy", M, N)
        bias = self._drawn("bias", N) if call.bias else None
        ones = torch.ones(1, M, dtype=self.dtype)
        cut = reference.chunk
        y = self._product("y", x, w.t(), bias, None if call.op in ("all_gather_linear", "fsdp_linear") else k)
        if call.op == "all_gather_linear":
            # Every rank has its own output features; dx is the sum over ranks.
            self.x = cut(x, 0, rank, m) if call.dim == 0 else cut(x, 1, rank, k)
            self.weight, self.bias = cut(w, 0, rank, n), None if bias is None else cut(bias, 0, rank, n)
            self.dy = cut(dy, 1, rank, n)
            dx = self._product("dx", dy, w, None, n)
            self.expected = [
                y.part(1, rank, n), dx.part(0, rank, m) if call.dim == 0 else dx.part(1, rank, k),
                self._product("dw", self.dy.t(), x), self._product("db", ones, self.dy),
            ]  # fmt: skip
        elif call.op == "fsdp_linear":
            self.x, self.weight, self.bias = cut(x, 0, rank, m), cut(w, 0, rank, n), bias
            self.dy = cut(dy, 0, rank, m)
            self.expected = [
                y.part(0, rank, m), self._product("dx", self.dy, w),
                self._product("dw", dy.t(), x, None, m).part(0, rank, n), self._product("db", ones, dy, None, m),
            ]  # fmt: skip
        else:
            self.x, self.weight, self.bias = cut(x, 1, rank, k), cut(w, 1, rank, k), bias
            self.dy = dy
            if call.residual:
                self.residual = self._drawn("residual", M, N)
                # One more term of the sum, and of the rounding.
                y = y.plus(self.residual.double(), 0.0 if call.exact else 2 * torch.finfo(self.dtype).eps)
            if call.op == "linear_reduce_scatter":
                dim, sizes = (0, m) if call.dim == 0 else (1, n)
                y, self.dy = y.part(dim, rank, sizes), cut(dy, dim, rank, sizes)
                self.residual = None if self.residual is None else cut(self.residual, dim, rank, sizes)
            # If dy is split, each rank sums the bias's gradient over its own part of dy.
            over_ranks = m if call.op == "linear_reduce_scatter" and call.dim == 0 else None
            self.expected = [
                y, self._product("dx", dy, self.weight), self._product("dw", dy.t(), self.x),
                self._product("db", ones, dy, None, over_ranks),
            ]  # fmt: skip
        if self.bias is None:
            self.expected.pop()
        if self.residual is not None:
            self.expected.append(self._exact("dresidual", self.dy))

    def _collective(self) -> None:
        call, rank = self.call, self.rank
        m, n, _ = call.sizes
        M, N, world_size = sum(m), sum(n), len(m)
        if call.op == "all_gather":
            whole, grads = self._drawn("x", M, N), [self._drawn("dy", M, N) for _ in range(world_size)]
            self.x, self.dy = reference.chunk(whole, 0, rank, m), grads[rank]
            self.expected = [self._exact("y", whole), self._total("dx", grads).part(0, rank, m)]
            return
        terms, dy = [self._drawn("x", M, N) for _ in range(world_size)], self._drawn("dy", M, N)
        self.x, self.dy, y = terms[rank], dy, self._total("y", terms)
        if call.op == "reduce_scatter":
            y, self.dy = y.part(0, rank, m), reference.chunk(dy, 0, rank, m)
        self.expected = [y, self._exact("dx", dy)]

    def call_on(self, group: ProcessGroup, producer: str = "auto") -> Tensor:
        """Return the result; differentiable if the call has a backward pass. producer: for ops that gather."""
        call, function = self.call, getattr(fusedtp, self.call.op)
        options: dict[str, Any] = {"group": group, "schedule": call.schedule}
        m, n, k = call.sizes
        if call.op == "all_gather_linear":
            options |= {"gather_dim": call.dim, "sizes": m if call.dim == 0 else k}
        elif call.op == "linear_reduce_scatter":
            options |= {"scatter_dim": call.dim, "sizes": m if call.dim == 0 else n}
        elif call.op == "fsdp_linear":
            options |= {"sizes": n}
        elif call.op in ("all_gather", "reduce_scatter"):
            options |= {"sizes": m}
        if producer != "auto" and call.op in ("all_gather_linear", "linear_reduce_scatter", "fsdp_linear"):
            options |= {"producer": producer}
        if call.op in ALGORITHMS:
            options |= {"algorithm": call.algorithm}
        given = self.leaves
        if self.residual is not None:
            *given, options["residual"] = self.leaves
        out: Tensor = function(*given, **options)
        return out

    def run(
        self, group: ProcessGroup, between: Callable[[], None] = lambda: None, producer: str = "auto"
    ) -> list[Tensor]:
        """Return y, and after `between` the gradients of the leaves."""
        y = self.call_on(group, producer)
        if not self.call.backward:
            return [y]
        between()
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]

    def check(self, results: Sequence[Tensor]) -> None:
        """Assert that results are right in dtype, shape and every element."""
        assert len(results) in (1, len(self.expected))
        for out, want in zip(results, self.expected, strict=False):
            what = f"{want.name} of {self.call} on rank {self.rank}"
            assert out.dtype == self.dtype, f"{what}: {out.dtype}"
            whole = want.whole[0] if want.name == "db" else want.whole
            reference.check(out.cpu(), whole, want.allowed[0] if want.name == "db" else want.allowed, what)
