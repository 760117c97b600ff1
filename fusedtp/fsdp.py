"""FSDP2 over symmetric memory: after `use(model)`, modules of torch's `fully_shard` gather and reduce by fusedtp's ops.

    model = ...
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fusedtp.fsdp.use(model)

| FSDP2's collective         | here                                                                              |
|----------------------------|-----------------------------------------------------------------------------------|
| all-gather of parameters   | own shard to the arena once; peers' shards from their arenas straight to the result |
| reduce-scatter of gradients | terms to their owners; float32 sum in rank order, rounded once to the reduce dtype |

Parameters, gradients, states and checkpoints stay torch's. The all-reduce of HSDP stays the process group's. Where
ranks cannot reach each other's memory, the process group gathers and reduces, as without `use`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from . import lanes, locks
from .calls.bound import BoundTask
from .calls.operators import ready_for
from .choose import dispatch
from .op import ALL_GATHER, REDUCE_SCATTER, Op
from .schedules import SCHEDULES

__all__ = ["use"]

Model = TypeVar("Model", bound=nn.Module)

# Most columns of the matrix that a flat buffer is seen as, and fewest: the kernels move rows of 16 bytes and more.
_MOST_COLUMNS, _FEWEST_COLUMNS = 1024, 16


def use(model: Model, *, schedule: str = "auto") -> Model:
    """Let every module of `model` that `fully_shard` has wrapped communicate by fusedtp's ops, and return the model.

    Call this on every rank, after the last `fully_shard`. Results have the bits of FSDP2 with gloo on 2 ranks; on more
    ranks gradients are summed in rank order, so that two runs have the same bits.

    - `schedule`: as in `fusedtp.all_gather`, but not "fused": its kernels wait for peers, and must not do so beside
      those of other ops.

    Errors:

    - ValueError: no module is wrapped, or the schedule is unknown or "fused"; by torch, if a module's parameters are
      sharded over several meshes.
    - NotImplementedError, in backward: a gradient's reduction that is neither a sum nor an average.

    FSDP2's prefetch overlaps gathers with compute: in backward by itself, in forward of the modules that
    `set_modules_to_forward_prefetch` names. On a GPU they run on FSDP2's streams. On a CPU a gather runs on a thread of
    its own until its module needs the parameters, where it raises its errors; a reduce-scatter ends before it returns.
    """
    dispatch.check_schedule(schedule)
    if schedule != "auto":
        SCHEDULES[schedule].check_lane("fsdp.use", lanes.GATHERS)
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    if not modules:
        raise ValueError(
            f"no module of {type(model).__name__} is an FSDPModule: call torch.distributed.fsdp.fully_shard on it first"
        )
    gather, reduce = _AllGather(schedule), _ReduceScatter(schedule)
    for each in modules:
        each.set_custom_all_gather(gather)  # type: ignore[arg-type]  # torch's base classes are private
        each.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
    return model


class _Comm:
    """Base of the two collectives, each in its own lane: a gather may be in flight during a reduce-scatter."""

    op: ClassVar[Op]
    lane: ClassVar[int]

    def __init__(self, schedule: str) -> None:
        self._schedule = schedule

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an undefined buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(
        self, x: Tensor, out: Tensor, rows: int, group: ProcessGroup, async_op: bool,
        after: Callable[[], object] | None = None,
    ) -> dist.Work | None:  # fmt: skip
        # Run the collective of x [R, C] into `out`, for `rows` of every rank, and then `after`.
        name, key = self.op.name, lanes.lock(str(group.group_name), self.lane)
        ready = ready_for(self.op, x, (rows,) * group.size(), group, self._schedule, lane=self.lane)
        if not ready.is_prepared:
            # The first op of a lane makes its workspace, collectively: in the order of the calls.
            lanes.wait_for_others(key, name)
        in_flight = async_op and not _blocks(ready.prepared())

        def run() -> None:
            ready.run({"a": x}, [out])
            if after is not None:
                after()

        return lanes.run(key, name + lanes.said(self.lane), run, (x, out), in_flight=in_flight)


class _AllGather(_Comm):
    """FSDP2's all-gather, for `FSDPModule.set_custom_all_gather`."""

    op, lane = ALL_GATHER, lanes.GATHERS

    @locks.one
    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` [n] of all ranks into `output_tensor` [ranks * n].

        Returns the op in flight on a CPU, where FSDP2 waits for what is returned, and with `async_op`. Its `wait`
        returns when the tensor is there, or raises the op's error; on a GPU it holds the current stream.
        """
        out, own = output_tensor, input_tensor
        if out.element_size() == 1 and own.numel() % 2 == 0:
            # Kernels move 16 bits. float8 has 8, and uint8 is what FSDP2 makes of parameters with several dtypes.
            out, own = out.view(torch.bfloat16), own.view(torch.bfloat16)
        if not own.numel():
            return None
        rows, columns = _matrix(own.numel())
        return self._run(own.view(rows, columns), out.view(-1, columns), rows, group, async_op or out.is_cpu)


class _ReduceScatter(_Comm):
    """FSDP2's reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`."""

    op, lane = REDUCE_SCATTER, lanes.REDUCTIONS

    @locks.one
    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum `input_tensor` [ranks * n] over ranks, and put this rank's part in `output_tensor` [n].

        With `async_op` returns the op in flight, as the gather does.
        """
        factor = _factor(op, group.size())
        if not output_tensor.numel():
            return None

        rows, columns = _matrix(output_tensor.numel())
        x, mine = input_tensor.view(-1, columns), output_tensor.view(rows, columns)
        scale = None if factor is None else partial(output_tensor.mul_, factor)
        return self._run(x, mine, rows, group, async_op, scale)


def _blocks(ready: BoundTask) -> bool:
    # Ops of a process group on a CPU, from several threads, would be in another order on every rank.
    return ready.ws is None and not ready.on_gpu


def _matrix(length: int) -> tuple[int, int]:
    # Return the shape of one rank's part of a flat buffer.
    columns = math.gcd(length, _MOST_COLUMNS)
    return (length // columns, columns) if columns >= _FEWEST_COLUMNS else (1, length)


def _factor(op: Any, world_size: int) -> Any:
    # Return what the sum is multiplied with, None for 1.
    if op == dist.ReduceOp.SUM:
        return None
    if op == dist.ReduceOp.AVG:
        return 1 / world_size
    if op == dist.ReduceOp.PREMUL_SUM:
        # Its factor is public in its pickled state only.
        return op.__getstate__()[1]
    raise NotImplementedError(f"a reduction of gradients must be SUM, AVG or PREMUL_SUM, got {op}")
