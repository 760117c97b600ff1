"""Our kernels with every flag raised before: what the fused op costs when no wait ever blocks and nothing travels.

The rank gets arenas of its own for all ranks (`preset`): a kernel that gathers finds everything there; one that
scatters stores its tiles into local memory instead of its peers'. What fused - own_matmul shows is waiting and the
links.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import preset
from .operands import Operands, Runner


def runner(operands: Operands, parts: tuple[str, ...]) -> Runner:
    """The closure of `own_matmul`, which gives these parts: those that the library's `matmul` gives."""
    steps = [_step(operands, name) for name in parts]
    return lambda: tuple([step() for step in steps])


def _step(operands: Operands, name: str) -> Callable[[], Tensor | list[Tensor]]:
    # The kernels that the fused schedule runs, one rank's of them: it gathers for dw beside dx's, then multiplies.
    part, sizes, rank = name.removesuffix("_partial"), operands.m_sizes, operands.rank
    a, b = operands.factors(part)
    if operands.case.world_size > 1 and part != name:
        _, scatter, parts = preset.scattered(a, b, sizes, rank)

        def scattered() -> list[Tensor]:
            scatter()
            return parts

        return scattered
    shard = operands.x if part == "y" else operands.dy
    alone = operands.case.world_size == 1 or operands.case.kind == "all_reduce" or part == "dw"
    fill = preset.plain(a, b) if alone else preset.gathered(shard, a, b, sizes, rank)[1]

    def filled() -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[1])
        fill(out)
        return out

    return filled
