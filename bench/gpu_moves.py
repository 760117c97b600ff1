"""The kernels that move and add rows, with every signal raised in advance: see `gpu_preset`.

What they should move at is the memory's rate, of which they are no more than a part: the fused matmuls' other half.
"""

from __future__ import annotations

import torch
from fusedtp.kernels import INTERPRETED
from fusedtp.kernels.launch import config_for
from fusedtp.kernels.layout import pitch_of
from fusedtp.kernels.push import collect, push
from fusedtp.kernels.reduce import reduce
from fusedtp.kernels.ring import ring
from fusedtp.kernels.signal import ENTRY_SLOT, SIGNALS
from fusedtp.kernels.steps import step
from torch import Tensor

from fusedtp import reference
from fusedtp.schedules.producer import piece_rows
from fusedtp.shards import even_sizes, offsets

from .gpu_matmul import poisoned
from .gpu_preset import FIRST, RANK, Arenas, Checked, Preset, close, exact, normal, slots, table


def pushes(
    device: torch.device, dtype: torch.dtype, world_size: int, M: int, C: int, *, scatter: bool = False
) -> Preset:
    """The own rows of x [M, C] to every peer, or to each its own."""
    sizes = even_sizes(M, world_size)
    x = normal(device, dtype, M if scatter else sizes[RANK], C)
    config, pitch = config_for(device, dtype), pitch_of(C, dtype)
    piece = config.block_m if scatter else piece_rows(pitch * dtype.itemsize, config)
    row = RANK * max(sizes) if scatter else offsets(sizes)[RANK]
    arenas = Arenas(device, world_size, (M + world_size) * pitch * dtype.itemsize, FIRST + -(-M // piece))
    at = table(device, sizes)

    def launch() -> None:
        push(
            arenas.channel(), "reduce_scatter" if scatter else "all_gather", x, at, dst_row=row, pitch=pitch,
            scatter=scatter, with_own=False, config=config, piece_rows=piece,
        )  # fmt: skip

    def check() -> Checked:
        for rank, part in enumerate(x.split(sizes) if scatter else [x] * world_size):
            if rank != RANK:
                exact(arenas.view(rank, 1, row, part.shape[0], pitch, dtype)[:, :C], part, f"on rank {rank}")
        return 0.0, 0.0

    sent = (M - sizes[RANK]) * C if scatter else (world_size - 1) * sizes[RANK] * C
    return Preset(arenas, launch, check, moved_bytes=2 * sent * dtype.itemsize)


def collects(device: torch.device, dtype: torch.dtype, world_size: int, M: int, C: int, *, per_tile: bool) -> Preset:
    """The peers' rows of x [M, C] out of the own arena."""
    sizes = even_sizes(M, world_size)
    x = normal(device, dtype, M, C)
    config, pitch = config_for(device, dtype), pitch_of(C, dtype)
    arenas = Arenas(device, world_size, M * pitch * dtype.itemsize, slots(config, M, C))
    arenas.fill(0, x, pitch)
    out, at = poisoned(x, M, C), table(device, sizes)
    own = slice(offsets(sizes)[RANK], offsets(sizes)[RANK + 1])

    def launch() -> None:
        collect(
            arenas.channel(), "all_gather", out, at, first_slot=FIRST, region_row=0, pitch=pitch, per_tile=per_tile,
            config=config, piece_rows=0 if per_tile else piece_rows(pitch * dtype.itemsize, config),
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
    rows = even_sizes(M, world_size)[RANK]
    parts = [normal(device, dtype, rows, C, seed=rank) for rank in range(world_size)]
    config, pitch = config_for(device, dtype, *((rows, C) if not broadcast else ())), pitch_of(C, dtype)
    result_row, second = world_size * rows, slots(config, rows, C)
    arenas = Arenas(device, world_size, (result_row + rows) * pitch * dtype.itemsize, 2 * second)
    for rank, part in enumerate(parts):
        arenas.fill(rank * rows, part, pitch)
    out = poisoned(parts[0], C, rows).t() if transposed else poisoned(parts[0], rows, C)

    def launch() -> None:
        reduce(
            arenas.channel(), "all_reduce" if broadcast else "matmul_reduce_scatter", out, None, region_rows=rows,
            pitch=pitch, per_tile=not broadcast, config=config, upcast=INTERPRETED,
            own=parts[RANK] if broadcast else None, result_row=result_row if broadcast else None, second_slot=second,
        )  # fmt: skip

    def check() -> Checked:
        found = close(out, reference.total(parts), reference.total_bound(parts, dtype), "sum")
        for rank in range(world_size if broadcast else 0):
            if rank != RANK:
                exact(arenas.view(rank, 1, result_row, rows, pitch, dtype)[:, :C], out, f"shown to rank {rank}")
        return found

    written = world_size if broadcast else 1
    return Preset(arenas, launch, check, moved_bytes=(world_size + written) * rows * C * dtype.itemsize)


def rings(device: torch.device, dtype: torch.dtype, world_size: int, M: int, C: int, *, op: str) -> Preset:
    """One rank of a ring whose messages are there: its sum ends with what its neighbour has sent, plus its own."""
    sizes = even_sizes(M, world_size)
    config, pitch = config_for(device, dtype), pitch_of(C, dtype)
    pieces = slots(config, max(sizes), C)
    arenas = Arenas(device, world_size, 2 * M * pitch * dtype.itemsize, FIRST + 2 * world_size * pieces)
    received, gathered = normal(device, dtype, M, C, seed=1), normal(device, dtype, M, C, seed=2)
    arenas.fill(0, gathered if op == "all_gather" else received, pitch)
    arenas.fill(M, gathered, pitch)
    own = slice(offsets(sizes)[RANK], offsets(sizes)[RANK + 1])
    whole = normal(device, dtype, M, C)
    x = whole[own] if op == "all_gather" else whole
    out = poisoned(x, sizes[RANK] if op == "reduce_scatter" else M, C)
    at = table(device, sizes)

    def launch() -> None:
        ring(arenas.channel(), op, x, out, at, sizes, pitch=pitch, config=config, upcast=INTERPRETED)

    def check() -> Checked:
        if op == "all_gather":
            return exact(out, torch.cat([gathered[: own.start], x, gathered[own.stop :]]), "gathered")
        terms = [received[own], x[own]]
        mine = out if op == "reduce_scatter" else out[own]
        found = close(mine, reference.total(terms), reference.total_bound(terms, dtype), "sum")
        if op == "all_reduce":
            exact(out, torch.cat([gathered[: own.start], mine, gathered[own.stop :]]), "gathered")
        return found

    passes = {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 6}[op]
    return Preset(arenas, launch, check, moved_bytes=passes * M * C * dtype.itemsize)


def steps(device: torch.device, world_size: int, op: str) -> Preset:
    """An op that the host drives: enter, a signal, a wait, leave."""
    arenas = Arenas(device, world_size, 4096, FIRST + 1)
    done: Tensor = arenas.memory[RANK, :4].view(torch.int32)  # the epoch

    def launch() -> None:
        for name in ("enter", "signal", "wait", "leave"):
            step(arenas.channel(), op, name, (RANK + 1) % world_size, FIRST)

    def check() -> Checked:
        assert int(done), "the epoch has not advanced"
        channel, peer = arenas.channel(), (RANK + 1) % world_size
        words = arenas.memory[peer, : channel.data_offset].view(torch.int32)
        for slot in (ENTRY_SLOT.value, FIRST):
            assert int(words[SIGNALS.value + slot * world_size + RANK]) == 1, f"slot {slot} is not raised"
        return 0.0, 0.0

    return Preset(arenas, launch, check, moved_bytes=0)
