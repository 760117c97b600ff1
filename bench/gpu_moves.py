"""The kernels that move and add rows, with every signal raised in advance: see `gpu_preset`.

What they should move at is the memory's rate, of which they are no more than a part: the fused matmuls' other half.
"""

from __future__ import annotations

import torch
from fusedtp.kernels import INTERPRETED
from fusedtp.kernels.launch import config_for
from fusedtp.kernels.layout import Layout
from fusedtp.kernels.operands import epilogue_of
from fusedtp.kernels.push import collect, push
from fusedtp.kernels.reduce import reduce
from fusedtp.kernels.ring import ring
from fusedtp.kernels.signal import ENTRY_SLOT, SIGNALS
from fusedtp.kernels.steps import step
from torch import Tensor

from fusedtp import reference
from fusedtp.op import ALL_GATHER, ALL_REDUCE, MATMUL_REDUCE_SCATTER, OPS, REDUCE_SCATTER
from fusedtp.schedules.fused import num_tiles
from fusedtp.schedules.producer import piece_rows
from fusedtp.shards import even_sizes, offsets

from .gpu_preset import RANK, Arenas, Checked, Preset, close, exact, normal, poisoned, table


def pushes(
    device: torch.device, dtype: torch.dtype, world_size: int, M: int, C: int, *, scatter: bool = False
) -> Preset:
    """The own rows of x [M, C] to every peer, or to each its own."""
    sizes, layout = even_sizes(M, world_size), Layout()
    x = normal(device, dtype, M if scatter else sizes[RANK], C)
    config = config_for(device, dtype)
    piece = config.block_m if scatter else piece_rows(C * dtype.itemsize, config)
    row = RANK * max(sizes) if scatter else offsets(sizes)[RANK]
    region = layout.region(M + world_size, C, dtype, slots=-(-M // piece), piece=piece)
    arenas, at = Arenas(device, world_size, layout), table(device, sizes)

    def launch() -> None:
        push(
            arenas.channel, (REDUCE_SCATTER if scatter else ALL_GATHER).number, x, at, dst_row=row,
            pitch=region.pitch, scatter=scatter, with_own=False, config=config, piece_rows=piece,
        )  # fmt: skip

    def check() -> Checked:
        if not scatter:
            arenas.check_sent(x, row, region.pitch)
        for rank, part in enumerate(x.split(sizes) if scatter else ()):
            if rank != RANK:
                exact(arenas.view(rank, 1, row, part.shape[0], region.pitch, dtype)[:, :C], part, f"on rank {rank}")
        return 0.0, 0.0

    sent = (M - sizes[RANK]) * C if scatter else (world_size - 1) * sizes[RANK] * C
    return Preset(arenas, launch, check, moved_bytes=2 * sent * dtype.itemsize)


def collects(device: torch.device, dtype: torch.dtype, world_size: int, M: int, C: int, *, per_tile: bool) -> Preset:
    """The peers' rows of x [M, C] out of the own arena."""
    sizes, layout = even_sizes(M, world_size), Layout()
    x, config = normal(device, dtype, M, C), config_for(device, dtype)
    piece = 0 if per_tile else piece_rows(C * dtype.itemsize, config)
    slots = num_tiles(max(sizes), C, config) if per_tile else -(-max(sizes) // piece)
    region = layout.region(M, C, dtype, slots=slots, piece=piece)
    arenas, at = Arenas(device, world_size, layout), table(device, sizes)
    arenas.fill(0, x, region.pitch)
    out = poisoned(x, M, C)
    own = slice(offsets(sizes)[RANK], offsets(sizes)[RANK + 1])

    def launch() -> None:
        collect(
            arenas.channel, ALL_GATHER.number, out, at, first_slot=region.slot, region_row=0, pitch=region.pitch,
            per_tile=per_tile, config=config, piece_rows=piece,
        )  # fmt: skip

    def check() -> Checked:
        assert bool(out[own].isnan().all()), "the own rows, which are not its to write, are written"
        rest = torch.ones(M, dtype=torch.bool, device=device)
        rest[own] = False
        return exact(out[rest], x[rest], "collected")

    return Preset(arenas, launch, check, moved_bytes=2 * (M - sizes[RANK]) * C * dtype.itemsize)


def reduces(
    device: torch.device, dtype: torch.dtype, world_size: int, M: int, C: int, *, broadcast: bool = False,
    transposed: bool = False,
) -> Preset:  # fmt: skip
    """The own rows of a sum, of a matmul's tiles; broadcast: pieces, whose sum goes to the peers too."""
    rows, layout = even_sizes(M, world_size)[RANK], Layout()
    parts = [normal(device, dtype, rows, C, seed=rank) for rank in range(world_size)]
    config = config_for(device, dtype, *((rows, C) if not broadcast else ()))
    slots = num_tiles(rows, C, config)
    region = layout.region(world_size * rows, C, dtype, slots=slots)
    second = layout.region(rows, C, dtype, slots=slots)
    arenas = Arenas(device, world_size, layout)
    for rank, part in enumerate(parts):
        arenas.fill(rank * rows, part, region.pitch)
    out = poisoned(parts[0], C, rows).t() if transposed else poisoned(parts[0], rows, C)

    def launch() -> None:
        reduce(
            arenas.channel, (ALL_REDUCE if broadcast else MATMUL_REDUCE_SCATTER).number, out,
            epilogue_of(None, per_row=transposed), region_rows=rows, pitch=region.pitch, per_tile=not broadcast,
            config=config, upcast=INTERPRETED, own=parts[RANK] if broadcast else None,
            result_row=second.row if broadcast else None, second_slot=second.slot,
        )  # fmt: skip

    def check() -> Checked:
        found = close(out, reference.total(parts), reference.total_bound(parts, dtype), "sum")
        if broadcast:
            arenas.check_sent(out, second.row, region.pitch)
        return found

    written = world_size if broadcast else 1
    return Preset(arenas, launch, check, moved_bytes=(world_size + written) * rows * C * dtype.itemsize)


def rings(device: torch.device, dtype: torch.dtype, world_size: int, M: int, C: int, *, op: str) -> Preset:
    """One rank of a ring whose messages are there: its sum ends with what its neighbour has sent, plus its own."""
    sizes, layout, kind = even_sizes(M, world_size), Layout(), OPS[op].kind
    config = config_for(device, dtype)
    region = layout.region(2 * M, C, dtype, slots=2 * world_size * num_tiles(max(sizes), C, config))
    arenas, at = Arenas(device, world_size, layout), table(device, sizes)
    received, gathered = normal(device, dtype, M, C, seed=1), normal(device, dtype, M, C, seed=2)
    arenas.fill(0, gathered if kind == "gather" else received, region.pitch)
    arenas.fill(M, gathered, region.pitch)
    own = slice(offsets(sizes)[RANK], offsets(sizes)[RANK + 1])
    whole = normal(device, dtype, M, C)
    x = whole[own] if kind == "gather" else whole
    out = poisoned(x, sizes[RANK] if kind == "scatter" else M, C)

    def launch() -> None:
        ring(
            arenas.channel, OPS[op].number, x, out, at, sizes, reduces=kind != "gather", gathers=kind != "scatter",
            pitch=region.pitch, config=config, upcast=INTERPRETED,
        )  # fmt: skip

    def check() -> Checked:
        if kind == "gather":
            return exact(out, torch.cat([gathered[: own.start], x, gathered[own.stop :]]), "gathered")
        terms = [received[own], x[own]]
        mine = out if kind == "scatter" else out[own]
        found = close(mine, reference.total(terms), reference.total_bound(terms, dtype), "sum")
        if kind == "all_reduce":
            exact(out, torch.cat([gathered[: own.start], mine, gathered[own.stop :]]), "gathered")
        return found

    passes = 6 if kind == "all_reduce" else 3
    return Preset(arenas, launch, check, moved_bytes=passes * M * C * dtype.itemsize)


def steps(device: torch.device, world_size: int, op: str) -> Preset:
    """An op that the host drives: enter, a signal, a wait, leave."""
    layout = Layout()
    _, slot = layout.take(0)
    arenas, peer = Arenas(device, world_size, layout), (RANK + 1) % world_size
    done: Tensor = arenas.memory[RANK, :4].view(torch.int32)  # the epoch

    def launch() -> None:
        for name in ("enter", "signal", "wait", "leave"):
            step(arenas.channel, OPS[op].number, name, peer, slot)

    def check() -> Checked:
        assert int(done), "the epoch has not advanced"
        words = arenas.memory[peer, : arenas.channel.data_offset].view(torch.int32)
        for each in (ENTRY_SLOT.value, slot):
            assert int(words[SIGNALS.value + each * world_size + RANK]) == 1, f"slot {each} is not raised"
        return 0.0, 0.0

    return Preset(arenas, launch, check, moved_bytes=0)
