"""Our kernels with every flag raised before: what the fused op costs when no wait ever blocks and nothing travels.

The rank gets arenas of its own for all ranks (`memory.local`). Its signals are put far ahead of the epoch, and both
halves hold what the peers would have pushed, so a kernel that gathers finds everything there; one that scatters stores
its tiles into local memory instead of its peers'. What fused - own_matmul shows is waiting and the links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fusedtp.kernels import INTERPRETED
from fusedtp.kernels.gather_matmul import gather_matmul
from fusedtp.kernels.launch import config_for, pitch_of
from fusedtp.kernels.matmul import matmul
from fusedtp.kernels.matmul_scatter import matmul_scatter
from fusedtp.kernels.signal import CLOCK_MS, FIRST_SLOT, SIGNALS
from torch import Tensor

from fusedtp import clock, reference
from fusedtp.memory.local import local_memories
from fusedtp.workspace import Workspace

if TYPE_CHECKING:
    from .problem import Problem, Results, Runner

# Far enough ahead of the epoch for any number of ops, and less than half the int32 range.
AHEAD = 1 << 30


def runner(problem: Problem, direction: str) -> Runner:
    """The closure of `own_matmul`: the parts that the library's `matmul` gives too."""
    steps = [_step(problem, name) for name in problem.parts("own_matmul", direction)]

    def run() -> Results:
        return tuple([step() for step in steps])

    return run


def _step(problem: Problem, name: str) -> Callable[[], Tensor | list[Tensor]]:
    op, alone = problem.case.op, problem.group.size() == 1
    x, w = problem.x, problem.w
    if op == "all_gather_matmul":
        if name == "y":
            return _plain(x, w.t()) if alone else _gathered_rows(problem, x, problem.x_whole, w.t())
        if name == "dx_partial":
            return _plain(problem.dy, w) if alone else _scattered(problem, problem.dy, w)
        return _plain(problem.dy.t(), x) if alone else _gathered_contraction(problem)
    if name == "y_partial":
        return _plain(x, w.t()) if alone else _scattered(problem, x, w.t())
    if name == "dw":
        return _plain(problem.dy_whole.t(), x)
    if alone or op == "matmul_all_reduce":
        return _plain(problem.dy_whole, w)
    return _gathered_rows(problem, problem.dy, problem.dy_whole, w)


def _plain(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    config = config_for(a.device, a.dtype)

    def step() -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[1])
        matmul(a, b, out, None, config=config, upcast=INTERPRETED)
        return out

    return step


def _workspace(problem: Problem, rows: int, pitch: int, slots: int) -> Workspace:
    # Room for `rows` of `pitch` elements, every signal raised, every entry counted.
    memory = local_memories(problem.group.size(), problem.device)[problem.group.rank()]
    ws = Workspace(memory, problem.device)
    # Nothing here waits, so nothing needs the clock, which would hold on to the workspace.
    clock.release(ws.host_block[CLOCK_MS.value :])
    ws.require(rows * pitch * problem.x.element_size(), slots)
    ws.words[SIGNALS.value :] = ws.epoch + AHEAD
    return ws


def _fill(ws: Workspace, begin: int, pitch: int, rows: Tensor) -> None:
    # Put `rows` at row `begin` of both of the own halves.
    for epoch in (0, 1):
        place = ws.view(ws.rank, epoch, begin * pitch * rows.element_size(), (rows.shape[0], pitch), rows.dtype)
        place[:, : rows.shape[1]] = rows


def _gathered_rows(problem: Problem, shard: Tensor, whole: Tensor, b: Tensor) -> Callable[[], Tensor]:
    # whole @ b, of which this rank's kernel reads its own rows from `shard`.
    sizes, config = problem.m_sizes, config_for(shard.device, shard.dtype)
    pitch = pitch_of(whole.shape[1], shard.dtype)
    ws = _workspace(problem, whole.shape[0], pitch, FIRST_SLOT.value + -(-max(sizes) // config.block_m))
    _fill(ws, 0, pitch, whole)

    def step() -> Tensor:
        out = shard.new_empty(whole.shape[0], b.shape[1])
        gather_matmul(
            ws.channel(), shard, b, out, None, ws.table(sizes), sizes,
            gather_dim=0, pitch=pitch, pushed=True, config=config, upcast=INTERPRETED,
        )  # fmt: skip
        return out

    return step


def _gathered_contraction(problem: Problem) -> Callable[[], Tensor]:
    # dw [N/W, K] = dy.T @ x as the fused backward makes it: dw.T = x.T @ dy, x.T gathered along the contraction.
    sizes, x, dy = problem.m_sizes, problem.x, problem.dy
    config, K = config_for(x.device, x.dtype), x.shape[1]
    pitch = pitch_of(max(sizes), x.dtype)
    ws = _workspace(problem, len(sizes) * K, pitch, FIRST_SLOT.value + -(-K // config.block_m))
    for src in range(len(sizes)):
        _fill(ws, src * K, pitch, reference.chunk(problem.x_whole, 0, src, sizes).t())

    def step() -> Tensor:
        out = x.new_empty(dy.shape[1], K)
        gather_matmul(
            ws.channel(), x.t(), dy, out.t(), None, ws.table(sizes), sizes,
            gather_dim=1, pitch=pitch, pushed=True, config=config, upcast=INTERPRETED, transposed=True,
        )  # fmt: skip
        return out

    return step


def _scattered(problem: Problem, a: Tensor, b: Tensor) -> Callable[[], list[Tensor]]:
    # a @ b [M, N], each owner's rows in its own arena. The kernel that adds up is left out, so the epoch stays.
    sizes, config, N = problem.m_sizes, config_for(a.device, a.dtype), b.shape[1]
    pitch, region_rows = pitch_of(N, a.dtype), max(sizes)
    tiles = -(-region_rows // config.block_m) * -(-N // config.block_n)
    ws = _workspace(problem, len(sizes) * region_rows, pitch, FIRST_SLOT.value + tiles)
    epoch, begin = ws.epoch + 1, ws.rank * region_rows * pitch * a.element_size()
    parts = [ws.view(owner, epoch, begin, (size, pitch), a.dtype)[:, :N] for owner, size in enumerate(sizes)]

    def step() -> list[Tensor]:
        matmul_scatter(
            ws.channel(), "matmul_reduce_scatter", a, b, ws.table(sizes), sizes,
            region_rows=region_rows, pitch=pitch, to_all=False, config=config, upcast=INTERPRETED,
        )  # fmt: skip
        return parts

    return step
