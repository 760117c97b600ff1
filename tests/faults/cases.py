"""The ops that faults are injected into, on small whole numbers: float32 holds every result exactly, so a right result
equals the unsharded op bit for bit. Operands depend on the call's number, so data left from another call is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import locks
from fusedtp.cost.overlap import AT_ONCE_ROWS
from fusedtp.schedules import NAMES

from .. import direct

# Pairs of a result and its expected value.
Results = list[tuple[Tensor, Tensor]]
ROWS, K, N = 3, 5, 6


def whole_numbers(call: int, rank: int, rows: int, cols: int) -> Tensor:
    """Return [rows, cols] of whole numbers from -3 to 3 for that rank and call."""
    random = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-3, 4, (rows, cols), generator=random, dtype=torch.int32).float()


@dataclass(frozen=True)
class Call:
    """The group, number and options of one call."""

    group: ProcessGroup
    number: int
    options: dict[str, Any]
    rows: int = ROWS

    @property
    def rank(self) -> int:
        return self.group.rank()

    def everyone(self, rows: int, cols: int) -> list[Tensor]:
        """Return every rank's operand, in rank order."""
        return [whole_numbers(self.number, rank, rows, cols) for rank in range(self.group.size())]

    def weights(self, cols: int) -> list[Tensor]:
        """Return every rank's weight [N, cols]."""
        return [whole_numbers(self.number + 500, rank, N, cols) for rank in range(self.group.size())]

    def own(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part of a result."""
        return whole.chunk(self.group.size(), dim)[self.rank]


def _gather_linear(call: Call, dim: int = 0) -> Results:
    x, weight = call.everyone(call.rows, K), call.weights(K * (call.group.size() if dim else 1))[call.rank]
    out = fusedtp.all_gather_linear(x[call.rank], weight, group=call.group, gather_dim=dim, **call.options)
    return [(out, torch.cat(x, dim) @ weight.t())]


def _linear_scatter(call: Call, dim: int = 0) -> Results:
    # The number of columns must be a multiple of the number of ranks.
    x = call.everyone(call.rows * call.group.size(), K)
    weights = [weight.repeat(call.group.size(), 1) if dim else weight for weight in call.weights(K)]
    out = fusedtp.linear_reduce_scatter(
        x[call.rank], weights[call.rank], group=call.group, scatter_dim=dim, **call.options
    )
    total = sum((a @ b.t() for a, b in zip(x, weights, strict=True)), torch.zeros(()))
    return [(out, call.own(total, dim))]


def _linear_all_reduce(call: Call) -> Results:
    x, weights = call.everyone(call.rows * call.group.size(), K), call.weights(K)
    out = fusedtp.linear_all_reduce(x[call.rank], weights[call.rank], group=call.group, **call.options)
    return [(out, sum((a @ b.t() for a, b in zip(x, weights, strict=True)), torch.zeros(())))]


def _all_gather(call: Call) -> Results:
    x = call.everyone(call.rows, K)
    return [(fusedtp.all_gather(x[call.rank], group=call.group, **call.options), torch.cat(x))]


def _reduce_scatter(call: Call) -> Results:
    x = call.everyone(call.rows * call.group.size(), K)
    out = fusedtp.reduce_scatter(x[call.rank], group=call.group, **call.options)
    return [(out, call.own(torch.stack(x).sum(0)))]


def _all_reduce(call: Call) -> Results:
    x = call.everyone(call.rows * call.group.size(), K)
    return [(fusedtp.all_reduce(x[call.rank], group=call.group, **call.options), torch.stack(x).sum(0))]


def _both(op: str, call: Call, *operands: Tensor | None) -> list[Tensor]:
    # Backward runs two products at once, in a call of its own each time.
    run, sizes = locks.one(direct.run), (call.rows,) * call.group.size()
    return run(op, call.options["schedule"], call.group, *operands, sizes=sizes)


def _two_matmuls(call: Call) -> Results:
    x = call.everyone(call.rows, K)
    b, right = call.weights(K)[call.rank].t(), whole_numbers(call.number, 7, call.rows * len(x), N)
    first, second = _both("all_gather_matmul", call, x[call.rank], b, None, right)
    return [(first, torch.cat(x) @ b), (second, torch.cat(x).t() @ right)]


def _scatter_and_gather(call: Call) -> Results:
    x = call.everyone(call.rows, K)
    a, b = call.everyone(call.rows * len(x), K), [weight.t() for weight in call.weights(K)]
    left = whole_numbers(call.number, 7, N, call.rows * len(x))
    first, second = _both("matmul_reduce_scatter", call, a[call.rank], b[call.rank], None, left, x[call.rank])
    total = sum((one @ other for one, other in zip(a, b, strict=True)), torch.zeros(()))
    return [(first, call.own(total)), (second, left @ torch.cat(x))]


@dataclass(frozen=True)
class Case:
    """One form of an op, described by `name`; `op` is the op's name in errors."""

    name: str
    op: str
    schedule: str
    run: Callable[[Call], Results]
    options: dict[str, Any]
    rows: int = ROWS

    def __call__(self, group: ProcessGroup, number: int, *, more_rows: int = 0) -> bool:
        """Make the call and return whether its results are right."""
        call = Call(group, number, {**self.options, "schedule": self.schedule}, self.rows + more_rows)
        return all(torch.equal(out, expected) for out, expected in self.run(call))


def _cases() -> list[Case]:
    cases = []
    for schedule in [name for name in NAMES if name != "unfused"]:
        forms: list[tuple[str, str, Callable[[Call], Results], dict[str, Any]]] = [
            ("gather rows", "all_gather_matmul", _gather_linear, {}),
            ("gather contraction", "all_gather_matmul", lambda call: _gather_linear(call, -1), {}),
            ("gather for two matmuls", "all_gather_matmul", _two_matmuls, {}),
            ("scatter rows", "matmul_reduce_scatter", _linear_scatter, {}),
            ("scatter columns", "matmul_reduce_scatter", lambda call: _linear_scatter(call, -1), {}),
            ("scatter and gather", "matmul_reduce_scatter", _scatter_and_gather, {}),
            ("matmul, one shot", "matmul_all_reduce", _linear_all_reduce, {"algorithm": "one_shot"}),
            ("matmul, two shots", "matmul_all_reduce", _linear_all_reduce, {"algorithm": "two_shot"}),
            ("all_gather", "all_gather", _all_gather, {"algorithm": "direct"}),
            ("reduce_scatter", "reduce_scatter", _reduce_scatter, {"algorithm": "direct"}),
            ("all_reduce, one shot", "all_reduce", _all_reduce, {"algorithm": "one_shot"}),
            ("all_reduce, two shots", "all_reduce", _all_reduce, {"algorithm": "two_shot"}),
        ]
        if schedule == "fused":
            ring = {"algorithm": "ring"}
            forms += [
                ("all_gather, ring", "all_gather", _all_gather, ring),
                ("reduce_scatter, ring", "reduce_scatter", _reduce_scatter, ring),
                ("all_reduce, ring", "all_reduce", _all_reduce, ring),
            ]
        cases += [Case(name, op, schedule, run, options) for name, op, run, options in forms]
    # Enough rows that chunks are multiplied separately, as they arrive.
    rows = AT_ONCE_ROWS
    return [
        *cases,
        Case("gather rows, by chunk", "all_gather_matmul", "decomposed", _gather_linear, {}, rows),
        Case("scatter rows, by chunk", "matmul_reduce_scatter", "decomposed", _linear_scatter, {}, rows),
    ]


# Key: schedule and name.
CASES = {f"{case.schedule}: {case.name}": case for case in _cases()}
