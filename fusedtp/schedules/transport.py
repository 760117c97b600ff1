"""How a schedule driven from the host moves data: entry and exit of an op, a side stream, publishing, gathering.

On a CPU nothing travels: a rank publishes in its own arena and the peers read it where it lies. On a GPU what is
published is pushed into every peer's arena by the copy engine, on a side stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import trace
from ..kernels.signal import FIRST_SLOT
from ..overlap import one_shot_wins
from ..steps import DeviceSteps, HostSteps
from ..workspace import Workspace

Steps = HostSteps | DeviceSteps

_ALIGNMENT = 64

# One beside each stream that ops are issued on: virtual ranks of one process must not wait for each other's copies.
_side_streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def aligned(num_bytes: int) -> int:
    """Rounded up to where the next region may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def one_shot(ws: Workspace, schedule: str, algorithm: str, out: Tensor, *, alone: bool) -> bool:
    """Whether an all-reduce to `out` is one-shot: as the caller says, else what the cost model finds faster.

    It goes by what all ranks share, so all decide alike.
    """
    if algorithm != "auto":
        return algorithm == "one_shot"
    rows, cols = out.shape
    dtype = str(out.dtype).removeprefix("torch.")
    key = ("one_shot", schedule, rows, cols, dtype, alone, ws.hardware.name)
    if key not in ws.choices:
        ws.choices[key] = one_shot_wins(rows, cols, ws.world_size, dtype, ws.hardware, schedule, alone=alone)
    return bool(ws.choices[key])


@contextlib.contextmanager
def op(ws: Workspace, name: str, half_bytes: int, slots: int) -> Iterator[Steps]:
    """One epoch: room for the op, entry, the op itself, exit."""
    with ws.running(name):
        ws.require(half_bytes, FIRST_SLOT.value + slots)
        steps = ws.steps(name)
        steps.enter()
        yield steps
        steps.leave()


@contextlib.contextmanager
def travelling(ws: Workspace) -> Iterator[None]:
    """On a GPU, what is issued inside runs on a side stream, beside the matmuls that follow."""
    if ws.device.type == "cpu":
        yield
        return
    main = torch.cuda.current_stream(ws.device)
    if main not in _side_streams:
        _side_streams[main] = torch.cuda.Stream(ws.device, priority=-1)
    side = _side_streams[main]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield


def settle(ws: Workspace) -> None:
    """The op must not end, nor its inputs be reused, before the side stream has read them."""
    if ws.device.type == "cuda" and (main := torch.cuda.current_stream(ws.device)) in _side_streams:
        main.wait_stream(_side_streams[main])


def publish(ws: Workspace, steps: Steps, x: Tensor, slot: int, offset: int) -> None:
    """Make x [rows, cols] readable by every peer: in the own arena, or in each peer's at this rank's place."""
    shape = (x.shape[0], x.shape[1])
    if ws.in_place:
        with trace.span("travel", ws.rank):
            ws.view(ws.rank, steps.epoch, offset, shape, x.dtype).copy_(x)
        for i in range(1, ws.world_size):
            steps.signal((ws.rank - i) % ws.world_size, slot)
        return
    with travelling(ws):
        for i in range(1, ws.world_size):
            dst = (ws.rank - i) % ws.world_size
            ws.view(dst, steps.epoch, offset, shape, x.dtype).copy_(x)
            steps.signal(dst, slot)


def published(
    ws: Workspace, steps: Steps, src: int, shape: tuple[int, int], dtype: torch.dtype, slot: int, offset: int
) -> Tensor:
    """What rank src has published, once it has."""
    steps.wait(src, slot)
    return ws.view(src if ws.in_place else ws.rank, steps.epoch, offset, shape, dtype)


@contextlib.contextmanager
def gathering(
    ws: Workspace, name: str, x: Tensor, sizes: tuple[int, ...], dim: int
) -> Iterator[Iterator[tuple[int, Tensor]]]:
    """One gather of x [rows, cols] along `dim`: (rank, its shard) of every rank, the own first, then as they arrive."""
    rows, cols = x.shape
    stride = aligned(max(sizes) * (cols if dim == 0 else rows) * x.element_size())

    def chunks(steps: Steps) -> Iterator[tuple[int, Tensor]]:
        yield ws.rank, x
        for i in range(1, ws.world_size):
            src = (ws.rank + i) % ws.world_size
            shape = (sizes[src], cols) if dim == 0 else (rows, sizes[src])
            yield src, published(ws, steps, src, shape, x.dtype, FIRST_SLOT.value, src * stride)

    with op(ws, name, ws.world_size * stride, 1) as steps:
        publish(ws, steps, x, FIRST_SLOT.value, ws.rank * stride)
        yield chunks(steps)
        settle(ws)
