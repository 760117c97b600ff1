"""How the fused schedule gets rows into the peers' arenas: pushed by programs, or copied by the copy engine.

`push` takes programs of the kernel that multiplies, or of one issued before it, and works in a captured graph;
`multicast` is the same with one store to all ranks, which takes fewer of them: all shards then arrive side by side.
`copy` takes no SM: the host issues copies and a signal behind each on a high-priority side stream, before the kernel
that waits for them. Rows travel in pieces with a slot each, the same for all, so a rank chooses by itself; the cost
model compares the time that pushing programs take from the matmul with what each copy costs to start.

Signals behind copies are written by the stream itself (`DeviceSteps.write`). A kernel that signals could wait forever
for room on an SM, behind kernels that wait for its peers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ..cost.overlap import COPY_BYTES, MULTICAST, num_pushers, producers
from ..cost.work import Work
from ..kernels.launch import Config
from ..kernels.layout import Region
from ..kernels.loading import is_only_loading, only_loading
from ..kernels.push import push
from ..op import Op
from ..scaled import Matrix, Quantized, pack_into
from ..sharding.plan import is_float8
from ..shards import offsets
from ..workspaces.workspace import Workspace
from .transport import settle, side_stream, travelling

# A tile waits for all pieces that hold its rows. One piece a tile costs the fewest polls; but each piece is sent by
# one program, about 0.1 ms a megabyte, so pieces are cut down to this size, but not below a quarter of a tile's rows.
PIECE_BYTES = 1 << 20
_PIECES_A_TILE = 4

# Called after a copy with its bytes.
Pace: TypeAlias = Callable[[int], object]

# Triton compiles a kernel separately for pointers of this alignment.
_KNOWN_ALIGNMENT = 16


def piece_rows(row_bytes: int, config: Config) -> int:
    """Rows a slot stands for, the same on all ranks: a tile's, or half or a quarter of them where rows are long."""
    rows = config.block_m
    while rows * row_bytes > PIECE_BYTES and rows > max(1, config.block_m // _PIECES_A_TILE):
        rows //= 2
    return rows


def part_rows(row_bytes: int, piece: int) -> int:
    """Rows that one copy takes: whole pieces, of COPY_BYTES together or a little more."""
    return piece * max(1, -(-COPY_BYTES // max(1, piece * row_bytes)))


def choose(ws: Workspace, work: Work, *, asked_for: str = "auto") -> str:
    """`push` or `copy` for a gather, on this rank; `multicast` where it is asked for and the memory has it, not of
    float8, whose scales are pushed behind each row. A caller's choice wins over the model's.

    Raises RuntimeError for copies in a graph capture: their addresses are chosen on the host.
    """
    if asked_for == MULTICAST:
        if ws.has_multicast and not is_float8(work.dtype):
            return MULTICAST
        asked_for = "auto"
    if is_only_loading():
        return "push"
    capturing = ws.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if asked_for == "copy" and capturing:
        raise RuntimeError("producer 'copy' copies to addresses chosen on the host and cannot be captured: use 'push'")
    if asked_for == "auto":
        # On a CPU both ways are only there to be checked, neither is fast. HIP has no stream writes in torch.
        fixed = ws.device.type == "cpu" or capturing or torch.version.hip is not None
        return "push" if fixed else _by_model(ws, work)
    return asked_for


def _by_model(ws: Workspace, work: Work) -> str:
    def choose() -> str:
        times = producers(work, ws.hardware)
        return min(times, key=lambda name: times[name])

    return ws.decided(work, choose)


def with_pushers(ws: Workspace, config: Config, programs: int = 0, *, producer: str = "push") -> Config:
    """The configuration with as many pushing programs as fill the link, or as were measured to be best, or a quarter of
    `programs` if that is less; on a CPU it is unchanged.
    """
    if ws.device.type == "cpu":
        return config
    measured = 0 if producer == MULTICAST else config.measured_pushers
    pushers = measured or num_pushers(ws.hardware, ws.world_size, producer)
    return replace(config, pushers=min(pushers, max(1, programs // 4)) if programs else pushers)


def produce(
    ws: Workspace,
    op: Op,
    x: Matrix,
    sizes: tuple[int, ...],
    region: Region,
    *,
    producer: str,
    dst_row: int,
    config: Config,
    scatter: bool = False,
    with_own: bool = False,
    switch: bool = False,
    beside: bool = False,
    programs: int = 0,
    pace: Pace | None = None,
) -> None:
    """Enter the epoch and send x [rows, cols] to `region` of every peer's half, from its row `dst_row` on.

    scatter: each peer its rows of `sizes`. with_own: to the own half too. switch: as in `push`. beside: a kernel that
    pushes runs on the side stream, as copies always do, until `settle`. programs, pace: see `fused.Fused`.
    """
    # The table is kept, so it is made on the main stream.
    kernel_config, table = with_pushers(ws, config, programs, producer=producer), ws.table(sizes)

    data, scale = (x.data, x.for_kernels()) if type(x) is Quantized else (x, None)

    def issue() -> None:
        push(
            ws.channel(), op.number, data, table, dst_row=dst_row, pitch=region.pitch, scatter=scatter,
            with_own=with_own, config=kernel_config, piece_rows=region.piece, first_slot=region.slot, scale=scale,
            switch=switch or producer == MULTICAST,
        )  # fmt: skip

    if producer == "copy":
        load_for_capture(ws, issue, "push", op.name, sizes, scatter, with_own, region.slot, alike(x))
        _copy(ws, op.name, x, sizes, dst_row, region, scatter, with_own, pace)
    elif beside:
        with travelling(ws):
            issue()
    else:
        issue()


def _copy(
    ws: Workspace, op: str, x: Matrix, sizes: tuple[int, ...], dst_row: int, region: Region, scatter: bool,
    with_own: bool, pace: Pace | None,
) -> None:  # fmt: skip
    # The copy engine moves one block, so rows must be as far apart as in an arena. Any other x is laid out like that
    # first, by a kernel on the main stream: on the side stream it could wait for an SM, as one that signals could.
    (rows, cols), pitch, piece = x.shape, region.pitch, region.piece
    if type(x) is Quantized:
        packed = x.data.new_zeros(rows, pitch, dtype=torch.uint8)
        pack_into(packed, x)
        x, cols = packed, pitch
        if ws.device.type == "cuda":
            x.record_stream(side_stream(ws))
    row_bytes = pitch * x.element_size()
    if not x.is_contiguous() or cols != pitch:
        laid_out = x.new_zeros(rows, pitch)
        laid_out[:, :cols] = x
        x = laid_out
        if ws.device.type == "cuda":
            # The side stream still reads it after this op has let go of it.
            x.record_stream(side_stream(ws))
    steps = ws.steps
    steps.enter(op)
    begins = offsets(sizes)

    def send(dst: int) -> None:
        first, count = (begins[dst], sizes[dst]) if scatter else (0, rows)
        part = part_rows(row_bytes, piece)
        for begin in range(0, count, part):
            end = min(begin + part, count)
            if cols:
                view = ws.view(dst, steps.epoch, (dst_row + begin) * row_bytes, (end - begin, pitch), x.dtype)
                view.copy_(x[first + begin : first + end])
                if pace is not None and dst != ws.rank:
                    pace((end - begin) * row_bytes)
            for slot in range(begin // piece, -(-end // piece)):
                steps.write(dst, region.slot + slot)

    if with_own:
        send(ws.rank)
    with travelling(ws):
        for i in range(1, ws.world_size):
            # First the rank before this one: it wants these rows soonest.
            send((ws.rank - i) % ws.world_size)


def load_for_capture(ws: Workspace, issue: Callable[[], None], *key: Any) -> None:
    """Load what `issue` would start, once for a `key`: a capture would push what is copied now, and cannot load
    kernels.
    """

    def load() -> bool:
        with only_loading():
            issue()
        return True

    if ws.loads_for_capture:
        ws.decided(("loaded", *key), load)


def alike(*tensors: Matrix | None) -> tuple[Any, ...]:
    """A key of these tensors: calls with the same key load the same kernels."""
    return tuple(
        None if each is None else (each.shape, each.stride(), each.dtype, each.data_ptr() % _KNOWN_ALIGNMENT)
        for each in (one.data if type(one) is Quantized else one for one in tensors)
    )


def finish(ws: Workspace) -> None:
    """End the epoch of an op whose kernel could not, as its copies may still be on their way."""
    settle(ws)
    ws.steps.leave()
