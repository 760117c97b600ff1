"""The registered operators, `torch.ops.fusedtp.*`: opaque to the compiler, with exact fakes.

Operands are 2-D with any strides, groups travel by name, `sizes` holds every rank's length, and results are contiguous.
Each resolves its schedule when it runs. Arguments are checked by the functions of `functional`, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import agreement, calls, dispatch, groups, turns
from .registered import operator


@calls.one
def _run(
    op: str, schedule: str, x: Tensor, group_name: str, *operands: Tensor | None, debug: bool = False,
    producer: str = "auto", call: str = "", **options: Any,
) -> Tensor:  # fmt: skip
    group = groups.resolve(group_name)
    with turns.Turn("group", group_name, op):
        if debug or agreement.wanted():
            agreement.check(op, group, x, *operands, schedule=schedule, call=call, **options)
        out: Tensor = dispatch.run(op, schedule, group, x, *operands, producer=producer, call=call, **options)
    return out


# Fakes: the shapes of results. What an operator takes beside that is told once, by its own signature.


def _fake_all_gather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, gather_dim: int, sizes: Sequence[int], *_: object
) -> Tensor:
    return a.new_empty(sum(sizes) if gather_dim == 0 else a.shape[0], b.shape[1])


@operator("all_gather_matmul", _fake_all_gather_matmul)
def all_gather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, gather_dim: int, sizes: Sequence[int], group_name: str, schedule: str
) -> Tensor:
    """a [sizes[rank], K] @ b [K, N], or a [M, sizes[rank]] @ b [sum(sizes), N] for gather_dim 1 -> [M, N]."""
    sizes = tuple(sizes)
    return _run("all_gather_matmul", schedule, a, group_name, b, bias, gather_dim=gather_dim, sizes=sizes)


def _fake_matmul_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor | None, scatter_dim: int, sizes: Sequence[int], rank: int, *_: object
) -> Tensor:
    local = sizes[rank]
    return a.new_empty((local, b.shape[1]) if scatter_dim == 0 else (a.shape[0], local))


@operator("matmul_reduce_scatter", _fake_matmul_reduce_scatter)
def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scatter_dim: int,
    sizes: Sequence[int],
    rank: int,
    group_name: str,
    schedule: str,
) -> Tensor:
    """a [M, K_r] @ b [K_r, N] summed over ranks -> [sizes[rank], N], or [M, sizes[rank]] for scatter_dim 1."""
    sizes = tuple(sizes)
    return _run("matmul_reduce_scatter", schedule, a, group_name, b, bias, scatter_dim=scatter_dim, sizes=sizes)


def _fake_matmul_all_reduce(a: Tensor, b: Tensor, *_: object) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@operator("matmul_all_reduce", _fake_matmul_all_reduce)
def matmul_all_reduce(
    a: Tensor, b: Tensor, bias: Tensor | None, group_name: str, schedule: str, algorithm: str
) -> Tensor:
    """a [M, K_r] @ b [K_r, N] summed over ranks -> [M, N] on every rank."""
    return _run("matmul_all_reduce", schedule, a, group_name, b, bias, algorithm=algorithm)


# The gradient of a gather is the scatter of its sum and the other way round. The sum of an all-reduce is the same
# tensor on every rank, and so is its gradient, which is therefore passed on as it is.


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, _, ctx.debug, *ctx.more = inputs


def _setup_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group_name, ctx.schedule, _, ctx.debug, _ = inputs


def _through_reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return reduce_scatter(grad, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, "auto", ctx.debug), *[None] * (
        6 + len(ctx.more)
    )


def _through_all_gather(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return all_gather(grad, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, "auto", ctx.debug), *[None] * (
        6 + len(ctx.more)
    )


def _as_it_is(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        # With create_graph=True: from here on it is each rank's own, and a second gradient is the sum of theirs.
        grad = as_it_is(grad, ctx.group_name, ctx.schedule, ctx.debug)
    return grad, *[None] * 5


def _summed(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return all_reduce(grad, ctx.group_name, ctx.schedule, "auto", ctx.debug), *[None] * 3


def _setup_as_it_is(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group_name, ctx.schedule, ctx.debug = inputs


def _fake_as_it_is(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@operator("as_it_is", _fake_as_it_is, _summed, _setup_as_it_is)
def as_it_is(x: Tensor, group_name: str, schedule: str, debug: bool = False) -> Tensor:
    """x [R, C], the same on every rank; what is computed with it is each rank's own."""
    return x.clone()


def _fake_all_gather(x: Tensor, sizes: Sequence[int], *_: object) -> Tensor:
    return x.new_empty(sum(sizes), x.shape[1])


@operator("all_gather", _fake_all_gather, _through_reduce_scatter, _setup_gather)
def all_gather(
    x: Tensor, sizes: Sequence[int], rank: int, group_name: str, schedule: str, algorithm: str, debug: bool = False,
    producer: str = "auto", call: str = "",
) -> Tensor:  # fmt: skip
    """x [sizes[rank], C] -> [sum(sizes), C]. call: see `meaning`."""
    options: dict[str, Any] = {"sizes": tuple(sizes), "algorithm": algorithm}
    return _run("all_gather", schedule, x, group_name, debug=debug, producer=producer, call=call, **options)


def _fake_reduce_scatter(x: Tensor, sizes: Sequence[int], rank: int, *_: object) -> Tensor:
    return x.new_empty(sizes[rank], x.shape[1])


@operator("reduce_scatter", _fake_reduce_scatter, _through_all_gather, _setup_gather)
def reduce_scatter(
    x: Tensor,
    sizes: Sequence[int],
    rank: int,
    group_name: str,
    schedule: str,
    algorithm: str,
    debug: bool = False,
    call: str = "",
) -> Tensor:
    """x [sum(sizes), C] summed over ranks -> [sizes[rank], C]."""
    options: dict[str, Any] = {"sizes": tuple(sizes), "algorithm": algorithm}
    return _run("reduce_scatter", schedule, x, group_name, debug=debug, call=call, **options)


def _fake_all_reduce(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@operator("all_reduce", _fake_all_reduce, _as_it_is, _setup_all_reduce)
def all_reduce(
    x: Tensor, group_name: str, schedule: str, algorithm: str, debug: bool = False, call: str = ""
) -> Tensor:
    """x [R, C] summed over ranks -> [R, C] on every rank."""
    return _run("all_reduce", schedule, x, group_name, debug=debug, call=call, algorithm=algorithm)
