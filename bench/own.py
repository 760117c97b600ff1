"""Our kernels with every flag raised before: what the fused op costs when no wait ever blocks and nothing travels.

The rank gets arenas of its own for all ranks (`memory.local`). Its signals are put far ahead of the epoch, and both
halves hold what the peers would have pushed, so a kernel that gathers finds everything there; one that scatters stores
its tiles into local memory instead of its peers'. What fused - own_matmul shows is waiting and the links.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from fusedtp.kernels import INTERPRETED
from fusedtp.kernels.gather_matmul import gather_matmul
from fusedtp.kernels.launch import config_for
from fusedtp.kernels.layout import pitch_of
from fusedtp.kernels.matmul import matmul
from fusedtp.kernels.matmul_scatter import matmul_scatter
from fusedtp.kernels.signal import CLOCK_MS, FINGERPRINT_SLOT, FIRST_SLOT, LEAD, SIGNALS
from torch import Tensor

from fusedtp.memory.local import local_memories
from fusedtp.schedules.producer import piece_rows
from fusedtp.workspaces import clock
from fusedtp.workspaces.workspace import Workspace

from .operands import Operands, Results, Runner

# As far ahead of the epoch as still counts as raised: for that many ops.
AHEAD = LEAD.value - 2


def runner(operands: Operands, parts: tuple[str, ...]) -> Runner:
    """The closure of `own_matmul`, which gives these parts: those that the library's `matmul` gives."""
    steps = [_step(operands, name) for name in parts]

    def run() -> Results:
        return tuple([step() for step in steps])

    return run


def _step(operands: Operands, name: str) -> Callable[[], Tensor | list[Tensor]]:
    # The kernels that the fused schedule runs, one rank's of them: it gathers for dw beside dx's, then multiplies.
    op, alone = operands.case.op, operands.group.size() == 1
    x, w = operands.x, operands.w
    if op == "all_gather_matmul":
        if name == "y":
            return _plain(x, w.t()) if alone else _gathered(operands, x, operands.x_whole, w.t())
        if name == "dw":
            return _plain(operands.dy.t(), operands.x_whole)
        return _plain(operands.dy, w) if alone else _scattered(operands, operands.dy, w)
    if name == "y_partial":
        return _plain(x, w.t()) if alone else _scattered(operands, x, w.t())
    if name == "dw":
        return _plain(operands.dy_whole.t(), x)
    if alone or op == "matmul_all_reduce":
        return _plain(operands.dy_whole, w)
    return _gathered(operands, operands.dy, operands.dy_whole, w)


def _plain(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    config = config_for(a.device, a.dtype, a.shape[0], b.shape[1])

    def step() -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[1])
        matmul(a, b, out, None, config=config, upcast=INTERPRETED)
        return out

    return step


def _workspace(operands: Operands, rows: int, pitch: int, slots: int) -> Workspace:
    # Room for `rows` of `pitch` elements, every signal raised, every entry counted.
    memory = local_memories(operands.group.size(), operands.device)[operands.group.rank()]
    ws = Workspace(memory, operands.device)
    # Nothing here waits, so nothing needs the clock, which would hold on to the workspace.
    clock.release(ws.host_block[CLOCK_MS.value :])
    ws.require(rows * pitch * operands.x.element_size(), slots)
    ws.words[SIGNALS.value :] = ws.epoch + AHEAD
    # Every peer means the same.
    fingerprint = torch.tensor([ws.meanings.now.fingerprint]).view(torch.int32)
    fingerprints = ws.words[SIGNALS.value + FINGERPRINT_SLOT.value * ws.world_size :][: 4 * ws.world_size]
    fingerprints.copy_(fingerprint.repeat(2 * ws.world_size))
    return ws


def _gathered(operands: Operands, shard: Tensor, whole: Tensor, b: Tensor) -> Callable[[], Tensor]:
    # whole @ b, of which this rank's kernel reads its own rows from `shard`.
    sizes = operands.m_sizes
    config = config_for(shard.device, shard.dtype, max(sizes), b.shape[1])
    pitch = pitch_of(whole.shape[1], shard.dtype)
    piece = piece_rows(pitch * shard.element_size(), config)
    ws = _workspace(operands, whole.shape[0], pitch, FIRST_SLOT.value + -(-max(sizes) // piece))
    for epoch in (0, 1):
        ws.view(ws.rank, epoch, 0, (whole.shape[0], pitch), whole.dtype)[:, : whole.shape[1]] = whole

    def step() -> Tensor:
        out = shard.new_empty(whole.shape[0], b.shape[1])
        gather_matmul(
            ws.channel(), shard, b, out, None, ws.table(sizes), sizes,
            gather_dim=0, pitch=pitch, piece_rows=piece, pushed=True, config=config, upcast=INTERPRETED,
        )  # fmt: skip
        return out

    return step


def _scattered(operands: Operands, a: Tensor, b: Tensor) -> Callable[[], list[Tensor]]:
    # a @ b [M, N], each owner's rows in its own arena. The kernel that adds up is left out, so the epoch stays.
    sizes, N = operands.m_sizes, b.shape[1]
    config = config_for(a.device, a.dtype, max(sizes), N)
    pitch, region_rows = pitch_of(N, a.dtype), max(sizes)
    tiles = -(-region_rows // config.block_m) * -(-N // config.block_n)
    ws = _workspace(operands, len(sizes) * region_rows, pitch, FIRST_SLOT.value + tiles)
    epoch, begin = ws.epoch + 1, ws.rank * region_rows * pitch * a.element_size()
    parts = [ws.view(owner, epoch, begin, (size, pitch), a.dtype)[:, :N] for owner, size in enumerate(sizes)]

    def step() -> list[Tensor]:
        matmul_scatter(
            ws.channel(), "matmul_reduce_scatter", a, b, ws.table(sizes), sizes,
            region_rows=region_rows, pitch=pitch, to_all=False, config=config, upcast=INTERPRETED,
        )  # fmt: skip
        return parts

    return step
