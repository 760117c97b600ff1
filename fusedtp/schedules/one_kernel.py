"""Matmul + all-reduce as one `fused` kernel: of few rows, or of any number if the switch makes the sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cost.overlap import ONE_KERNEL_ROWS, num_adders
from ..kernels.epilogue import TileEpilogue, constant
from ..kernels.matmul_all_reduce import MatmulAllReduce, room_of
from ..kernels.operands import outputs_of
from ..norms import Norm
from ..op import MATMUL_ALL_REDUCE, Task
from ..scaled import Quantized
from ..torch_private import outside_inference
from .local import with_norm
from .verbs import Operands

if TYPE_CHECKING:
    from .fused import Fused


def is_for(on: Fused, task: Task) -> bool:
    """Return whether the task is one kernel; not for several blocks, nor for a tree's leaves.

    Virtual ranks that share a device have too few programs. Those that run in phases need the programs that wait for
    nothing in a kernel of their own.
    """
    if task.op is not MATMUL_ALL_REDUCE or len(task.each("b")) > 1 or on.split or on.programs or task.leaves:
        return False
    return task.moved[0] <= ONE_KERNEL_ROWS or on.in_switch


class OneKernel:
    """Form of a one-kernel op, one-shot or two-shot, whose owners have columns. Operands: see `op`."""

    def __init__(self, on: Fused, task: Task) -> None:
        self._ws, self._task = on.ws, task
        M, N = task.moved
        to_all = on.one_shot(task)
        switch, few = on.in_switch, M <= ONE_KERNEL_ROWS
        # Few rows get a narrow tile: they have few tiles, and storing to all ranks takes registers for the addresses.
        config = self._config = on.configure(M, 0 if few else N)
        room = room_of(M, N, on.world_size, config, to_all=to_all)
        region = on.layout.region(on.world_size * M, room.cols, task.dtype, slots=room.slots)
        self._places: dict[str, int] = {}
        if not to_all:
            sums = on.layout.region(M, N, task.dtype, slots=room.sums)
            self._places = {"sums_row": sums.row, "sums_pitch": sums.pitch, "second_slot": sums.slot}
        self._launch = MatmulAllReduce(
            task.op.number, on.world_size, on.rank, to_all=to_all, pitch=region.pitch, config=config,
            scales=on.scales, switch=switch,
            adders=0 if few else num_adders(on.ws.hardware, on.world_size),
        )  # fmt: skip
        self._arrivals: Tensor | None = None
        self.stages = self._start, self._finish

    def _start(self, given: Operands) -> None:
        pass

    def _finish(self, given: Operands) -> list[Tensor]:
        task, ws = self._task, self._ws
        a, b, bias, residual = given["a"], given["b"], given.get("bias"), given.get("residual")
        channel = ws.channel()
        scales: Any = None
        if type(a) is Quantized:
            from .fused import scales_of

            scales = scales_of([a], [b], channel.data.view(task.dtype))
            a, b = a.data, b.data
        out = torch.empty(task.moved, dtype=task.dtype, device=ws.device)
        arrivals = self._arrivals if self._arrivals is not None else self._zeros()
        # Every call passes here.
        added = None if residual is None else outputs_of(residual)
        epilogue = TileEpilogue(None if bias is None else (bias,), constant(False), added)
        self._launch(channel, a, b, scales, out, epilogue, arrivals, **self._places)
        if not task.norm:
            return [out]
        return with_norm(Norm(task.norm, task.eps, given["norm_weight"], given.get("norm_bias")), out)

    @outside_inference
    def _zeros(self) -> Tensor:
        # Programs count in these, and kernels leave them at zero.
        self._arrivals = torch.zeros(self._config.programs, dtype=torch.int32, device=self._ws.device)
        return self._arrivals
