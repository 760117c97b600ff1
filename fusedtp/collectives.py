"""Differentiable collectives without a matmul: all_gather, reduce_scatter and all_reduce.

The first two work along any dim, with uneven parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from . import groups, locks
from .calls import arguments, operators
from .groups import Group
from .op import ALL_GATHER, ALL_REDUCE, RANK_ORDER, REDUCE_SCATTER, Op, Options, Order


def _collective(
    op: Op, x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup, asked: Options, leaves: int = 0
) -> Tensor:
    arguments.refuse_tracing()
    # The matrix has `dim` as rows. sizes: every rank's length of `dim`, () for an all-reduce.
    moved = x.movedim(dim, 0)
    others = tuple(moved.shape[1:])
    rows = moved.reshape(moved.shape[0], math.prod(others))
    arguments.check_reach(asked.schedule, x, [group], (sum(sizes) if sizes else x.shape[dim], 0, rows.shape[1]))
    call = arguments.call_of(dim, x)
    out: Tensor = operators.collective(
        rows, op.name, list(sizes), group.rank(), group.group_name, *asked[:3], call, leaves
    )  # fmt: skip
    return out.view(out.shape[0], *others).movedim(0, dim)


@locks.one
def all_gather(
    x: Tensor,
    *,
    group: Group = None,
    gather_dim: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    schedule: str = "auto",
    producer: str = "auto",
) -> Tensor:
    """Return all ranks' x, concatenated along `gather_dim` in rank order, bit for bit. Differentiable.

    x [.., sizes[rank], ..] -> [.., sum(sizes), ..]

    - `sizes`: every rank's length of `gather_dim`; by default this rank's length on all ranks.
    - `algorithm`: auto, direct (each rank sends to every peer) or ring (each rank sends to the next one). ring needs
      schedule 'fused', or 'auto' on a GPU.
    - `producer`: as in `all_gather_linear`.

    Backward reduce-scatters: it sums the gradients of all ranks' results. If every rank computes the same values from
    the result (a layer with sequence_parallel=False, or a loss), the gradient counts once per rank. Errors are those of
    `all_gather_linear`.
    """
    process_group = groups.resolve(group)
    asked = Options(schedule, algorithm, producer)
    arguments.check_collective(ALL_GATHER, x, asked)
    dim = arguments.dim("gather_dim", gather_dim, x)
    sizes = arguments.gather_sizes(sizes, process_group, x.shape[dim])
    return _collective(ALL_GATHER, x, dim, sizes, process_group, asked)


@locks.one
def reduce_scatter(
    x: Tensor,
    *,
    group: Group = None,
    scatter_dim: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    schedule: str = "auto",
    order: Order = RANK_ORDER,
) -> Tensor:
    """Return this rank's part, along `scatter_dim`, of the sum of all ranks' x. Differentiable.

    x [.., sum(sizes), ..] -> [.., sizes[rank], ..]

    - `sizes`: every rank's length of the result; by default as even as possible.
    - `algorithm`: as in `all_gather`.
    - `order`: with "tree", each rank's x (float32) is the sum of a subtree. Only `fused` adds the subtrees, as a tree.
      "any" changes nothing here: the switch computes sums of all-reduces only.

    Backward all-gathers. Errors are those of `all_gather`.
    """
    process_group = groups.resolve(group)
    asked = Options(schedule, algorithm, order=order)
    arguments.check_collective(REDUCE_SCATTER, x, asked)
    dim = arguments.dim("scatter_dim", scatter_dim, x)
    sizes = arguments.scatter_sizes(sizes, process_group, x.shape[dim])
    leaves = arguments.of_subtrees(asked, process_group.size(), x.dtype)
    return _collective(REDUCE_SCATTER, x, dim, sizes, process_group, asked, leaves)


@locks.one
def all_reduce(
    x: Tensor, *, group: Group = None, algorithm: str = "auto", schedule: str = "auto",
    order: Order = RANK_ORDER,
) -> Tensor:  # fmt: skip
    """Return the sum of all ranks' x, which have one shape, on every rank. Differentiable.

    - `algorithm`: auto, one_shot (fewest steps), two_shot, or ring (fewest bytes), which needs a schedule as in
      `all_gather`.
    - `order`: "tree" as in `reduce_scatter`. With "any", NVLink's switch may compute the sum.

    Backward sends nothing: the gradient of the result, the same on every rank, is the gradient of x. Errors are those
    of `all_gather`.
    """
    process_group = groups.resolve(group)
    asked = Options(schedule, algorithm, order=order)
    arguments.check_collective(ALL_REDUCE, x, asked)
    leaves = arguments.of_subtrees(asked, process_group.size(), x.dtype)
    return _collective(ALL_REDUCE, x, 0, (), process_group, asked, leaves)
