"""The collectives alone, differentiable: all_gather, reduce_scatter and all_reduce along any dim, in uneven parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from . import groups, locks
from .calls import arguments, operators
from .groups import Group
from .op import ALL_GATHER, ALL_REDUCE, RANK_ORDER, REDUCE_SCATTER, Op, Order
from .options import Options


def _collective(
    op: Op, x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup, asked: Options, leaves: int = 0
) -> Tensor:
    arguments.refuse_tracing()
    # On x as a matrix whose rows are `dim`. sizes: of that dim on every rank; an all-reduce has none.
    moved = x.movedim(dim, 0)
    others = tuple(moved.shape[1:])
    rows = moved.reshape(moved.shape[0], math.prod(others))
    arguments.check_reach(asked.schedule, x, [group], (sum(sizes) if sizes else x.shape[dim], 0, rows.shape[1]))
    call = arguments.call_of(dim if sizes else None, x)
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
    """The ranks' x joined along `gather_dim` in rank order, bit for bit, differentiable.

    x [.., sizes[rank], ..] -> [.., sum(sizes), ..]; `sizes` is by default this rank's length on all. Backward
    reduce-scatters: it adds up the gradients of the ranks' copies, each of which goes its own way. Before a layer with
    sequence_parallel=False, or a loss that every rank computes alike, they would count once a rank. `algorithm`: auto,
    direct (each rank sends to every peer), or ring (to the next rank alone), which only kernels have: with schedule
    'fused', or 'auto' on a GPU. `producer` and errors as in `all_gather_linear`.
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
    """The ranks' x summed; this rank keeps `sizes[rank]` along `scatter_dim`, by default as even as can be.

    Differentiable: backward gathers. `algorithm` and errors as in `all_gather`. `order` "tree": every rank's x, in
    float32, is a subtree; these are added in pairs, pairs in pairs, by `fused` alone. "any" changes nothing here: the
    switch makes the sums of all-reduces only.
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
    """The ranks' x, of one shape, summed, on every rank, differentiable.

    Backward sends nothing: the result is one tensor, and its gradient, the same on every rank, is that of x.
    `algorithm`: auto, one_shot (fewest steps), two_shot, or ring (fewest bytes), which only kernels have, as in
    `all_gather`. Errors as there. `order` "tree" as in `reduce_scatter`; with "any" NVLink's switch may add.
    """
    process_group = groups.resolve(group)
    asked = Options(schedule, algorithm, order=order)
    arguments.check_collective(ALL_REDUCE, x, asked)
    leaves = arguments.of_subtrees(asked, process_group.size(), x.dtype)
    return _collective(ALL_REDUCE, x, 0, (), process_group, asked, leaves)
