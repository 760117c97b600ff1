"""Producers of the fused schedule: rows are pushed into the peers' arenas by programs, or copied by the copy engine.

`push` takes programs of the kernel that multiplies, or of one issued before it, and works in a captured graph.
`multicast` pushes with one store to all ranks, which takes fewer programs; all shards then arrive side by side. `copy`
takes no SM: before the kernel that waits, the host issues copies, each followed by a signal, on a high-priority side
stream. Rows travel in pieces with a slot each, the same for all producers, so a rank chooses by itself: the cost model
compares the time that pushing programs take from the matmul with the start of each copy.

The stream itself writes the signals after a copy, by one call of the driver for all pieces of the copy
(`DeviceSteps.write`). A kernel that signals could wait forever for room on an SM while kernels that wait for peers hold
all SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from ..cost import overlap
from ..cost.overlap import COPY_BYTES, MULTICAST, late_share, num_pushers, producers
from ..cost.work import Work
from ..kernels.choices import shared_memory_of
from ..kernels.configs import FEW_ROWS
from ..kernels.launch import Config
from ..kernels.layout import Region
from ..kernels.loading import is_only_loading, only_loading
from ..kernels.push import push
from ..op import Op
from ..scaled import Matrix, Quantized, pack_into
from ..sharding.plan import ITEMSIZE, is_float8
from ..shards import offsets
from ..workspaces.decisions import Decisions
from ..workspaces.workspace import Workspace
from .transport import settle, side_stream, travelling

# A tile waits for all pieces that hold its rows. One piece a tile costs the fewest polls. But one program sends a
# piece, in about 0.1 ms a megabyte, so pieces are cut down to this size, though not below a quarter of a tile's rows.
PIECE_BYTES = 1 << 20
_PIECES_A_TILE = 4

# Triton compiles a kernel separately for pointers of this alignment.
_KNOWN_ALIGNMENT = 16

# Producers by `Work`, and the keys of `load_for_capture`.
_producers: Decisions[str] = Decisions()
_loaded: Decisions[None] = Decisions()


def piece_rows(row_bytes: int, config: Config) -> int:
    """Return the rows of a slot, the same on all ranks: a tile's, or half or a quarter of them if rows are long."""
    rows = config.block_m
    while rows * row_bytes > PIECE_BYTES and rows > max(1, config.block_m // _PIECES_A_TILE):
        rows //= 2
    return rows


def joins(ws: Workspace, kind: Literal["gather", "scatter"], rows: int, cols: int, dtype: str) -> bool:
    """Return whether tiles of a moved [rows, cols] have rows of several ranks, the same on all ranks."""
    if ws.device.type == "cpu":
        # CPU checks run both cases.
        return rows <= 64
    return overlap.joins(kind, rows, cols, ws.world_size, dtype, ws.hardware)


def joined_shape(rows: int) -> tuple[int, int]:
    """Return the rows and the number of chunks by which the tiles of `rows` joined rows are chosen."""
    low = FEW_ROWS
    return (low, -(-rows // low)) if low < rows <= overlap.JOINED_LOW_ROWS else (rows, 1)


def part_rows(row_bytes: int, piece: int) -> int:
    """Return the rows of one copy: whole pieces, of COPY_BYTES together or a little more."""
    return piece * max(1, -(-COPY_BYTES // max(1, piece * row_bytes)))


def choose(ws: Workspace, work: Work, *, asked_for: str = "auto") -> str:
    """Choose `push`, `copy` or `multicast` for a gather on this rank: as the caller asks, or by the cost model.

    `multicast` needs memory that has it, and takes no float8, as scales are pushed after each row. If it cannot be
    used, the choice is automatic. Raises RuntimeError for copies in a graph capture: their addresses are chosen on the
    host.
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
        # On a CPU both ways only serve checks, and neither is fast. HIP has no stream writes in torch.
        fixed = ws.device.type == "cpu" or capturing or torch.version.hip is not None
        return "push" if fixed else _by_model(ws, work)
    return asked_for


def _by_model(ws: Workspace, work: Work) -> str:
    def choose() -> str:
        times = producers(work, ws.hardware)
        return min(times, key=lambda name: times[name])

    return _producers.get(ws, work, choose)


def with_pushers(ws: Workspace, config: Config, programs: int = 0, *, producer: str = "push") -> Config:
    """Return the configuration with enough pushing programs to fill the link, or as many as were measured to be best.

    With `programs`, at most a quarter of them push. On a CPU the configuration is unchanged.
    """
    if ws.device.type == "cpu":
        return config
    measured = 0 if producer == MULTICAST else config.measured_pushers
    pushers = measured or num_pushers(ws.hardware, ws.world_size, producer)
    return replace(config, pushers=min(pushers, max(1, programs // 4)) if programs else pushers)


def gather_config(ws: Workspace, config: Config, work: Work, programs: int, producer: str) -> tuple[Config, float]:
    """Return the configuration of a gather + matmul with its pushing programs, and the kernel's `GatherMatmul.late`.

    The grid has a program for each multiprocessor, and the pushing ones besides. If only one program fits, as many
    multiplying programs start when the pushing ones end. Arguments as in `with_pushers`.
    """
    config = with_pushers(ws, config, programs, producer=producer)
    if ws.device.type == "cpu":
        # An arbitrary value, so that checks run an uneven deal.
        return config, 0.5
    if programs or not work.flops or not ws.hardware.knows(work.dtype):
        return config, 0.0
    room = torch.cuda.get_device_properties(ws.device).shared_memory_per_multiprocessor
    fit = room // shared_memory_of(config, ITEMSIZE[work.dtype])
    return config, late_share(work, ws.hardware, config.pushers) if fit < 2 else 0.0


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
) -> None:
    """Enter the epoch and send x [rows, cols] to `region` of every peer's half, from its row `dst_row` on.

    - `scatter`: each peer gets its rows of `sizes`.
    - `with_own`: the own half gets rows too.
    - `switch`: as in `push`.
    - `beside`: a kernel that pushes runs on the side stream, as copies always do, until `settle`.
    - `programs`: as in `fused.Fused`.
    """
    on_cpu = ws.device.type == "cpu"
    kernel_config = config if on_cpu else with_pushers(ws, config, programs, producer=producer)
    # Make the table on the main stream, as it is cached.
    table = ws.table(sizes)
    data, scale = (x.data, x.for_kernels()) if type(x) is Quantized else (x, None)

    def issue() -> None:
        push(
            ws.channel(), op.number, data, table, dst_row=dst_row, pitch=region.pitch, scatter=scatter,
            with_own=with_own, config=kernel_config, piece_rows=region.piece, first_slot=region.slot, scale=scale,
            switch=switch or producer == MULTICAST,
        )  # fmt: skip

    if producer == "copy":
        load_for_capture(ws, issue, "push", op.name, sizes, scatter, with_own, region.slot, layouts_of(x))
        _copy(ws, op.name, x, sizes, dst_row, region, scatter, with_own)
    elif beside:
        with travelling(ws):
            issue()
    else:
        issue()


def _copy(
    ws: Workspace, op: str, x: Matrix, sizes: tuple[int, ...], dst_row: int, region: Region, scatter: bool,
    with_own: bool,
) -> None:  # fmt: skip
    # The copy engine moves one block, so rows must be as far apart as in an arena. A kernel on the main stream first
    # lays out any other x like that: on the side stream it could wait for an SM, like a kernel that signals.
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
            # The side stream may read x after this op has released it.
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
            first_piece = begin // piece
            steps.write(dst, region.slot + first_piece, -(-end // piece) - first_piece)

    if with_own:
        send(ws.rank)
    with travelling(ws):
        for i in range(1, ws.world_size):
            # Start with the previous rank, which needs these rows first.
            send((ws.rank - i) % ws.world_size)


def load_for_capture(ws: Workspace, issue: Callable[[], object], *key: Any) -> None:
    """Load the kernels that `issue` would start, once a key: a capture pushes instead, and cannot load kernels."""

    def load() -> None:
        with only_loading():
            issue()

    if ws.loads_for_capture:
        _loaded.get(ws, key, load)


def layouts_of(*tensors: Matrix | None) -> tuple[Any, ...]:
    """Return a key of these tensors: calls with the same key load the same kernels."""
    return tuple(
        None if each is None else (each.shape, each.stride(), each.dtype, each.data_ptr() % _KNOWN_ALIGNMENT)
        for each in (one.data if type(one) is Quantized else one for one in tensors)
    )


def finish(ws: Workspace) -> None:
    """End the epoch of an op with copies: its kernel cannot end the epoch while copies may be in flight."""
    settle(ws)
    ws.steps.leave()
