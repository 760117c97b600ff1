"""How a schedule driven from the host moves data: entry and exit of an op, a side stream, publishing, gathering.

On a CPU nothing travels: a rank publishes in its own arena and the peers read it where it lies. On a GPU what is
published is pushed into every peer's arena by the copy engine, on a side stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .. import trace
from ..kernels.signal import FIRST_SLOT
from ..overlap import one_shot_wins
from ..shards import offsets
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


class Epoch:
    """One epoch, as a context: room for the op `name`, entry, the op itself by the steps it is given, exit."""

    # A class, and `Gathering` too, as contextlib's generators take longer than a small op's steps.

    def __init__(self, ws: Workspace, name: str, half_bytes: int, slots: int) -> None:
        self._ws, self._name, self._half_bytes, self._slots = ws, name, half_bytes, FIRST_SLOT.value + slots

    def __enter__(self) -> Any:
        ws = self._ws
        ws.begin(self._name)
        try:
            ws.require(self._half_bytes, self._slots)
            self._steps = steps = ws.steps(self._name)
            steps.enter()
            return self._entered(steps)
        except BaseException as error:
            ws.interrupted(self._name, error)
            raise

    def _entered(self, steps: Steps) -> Any:
        return steps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ws = self._ws
        if error is not None:
            ws.interrupted(self._name, error)
            return
        try:
            settle(ws)
            self._steps.leave()
            ws.end()
        except BaseException as raised:
            ws.interrupted(self._name, raised)
            raise


def side_stream(ws: Workspace) -> torch.cuda.Stream:
    """The stream beside the current one."""
    main = torch.cuda.current_stream(ws.device)
    if main not in _side_streams:
        _side_streams[main] = torch.cuda.Stream(ws.device, priority=-1)
    return _side_streams[main]


@contextlib.contextmanager
def travelling(ws: Workspace) -> Iterator[None]:
    """On a GPU, what is issued inside runs on a side stream, beside the matmuls that follow."""
    if ws.device.type == "cpu":
        yield
        return
    side = side_stream(ws)
    side.wait_stream(torch.cuda.current_stream(ws.device))
    with torch.cuda.stream(side):
        yield


def settle(ws: Workspace) -> None:
    """The op must not end, nor its inputs be reused, before the side stream has read them."""
    if ws.device.type == "cuda" and (main := torch.cuda.current_stream(ws.device)) in _side_streams:
        side = _side_streams[main]
        if torch.cuda.is_current_stream_capturing():
            # It is in the capture only where this op, or one before it there, has gone to it.
            with torch.cuda.stream(side):
                if not torch.cuda.is_current_stream_capturing():
                    return
        main.wait_stream(side)


def publish(ws: Workspace, steps: Steps, x: Tensor, slot: int, offset: int) -> None:
    """Make x [rows, cols] readable by every peer: in the own arena, or in each peer's at this rank's place."""
    shape = (x.shape[0], x.shape[1])
    if ws.in_place:
        trace.timed("travel", ws.rank, ws.view(ws.rank, steps.epoch, offset, shape, x.dtype).copy_, x)
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


def gathered(
    ws: Workspace, steps: Steps, x: Tensor, sizes: tuple[int, ...], slot: int, offset: int
) -> Callable[[], Tensor]:
    """Publish x [sizes[rank], cols], and return what waits for all ranks' rows and gives them one below the other.

    They lie in this rank's own half from `offset` on, until this op ends.
    """
    begins, cols = offsets(sizes), x.shape[1]
    at = [offset + begin * cols * x.element_size() for begin in begins]
    if not ws.in_place:
        ws.view(ws.rank, steps.epoch, at[ws.rank], (x.shape[0], cols), x.dtype).copy_(x)
    publish(ws, steps, x, slot, at[ws.rank])

    def whole() -> Tensor:
        rows = ws.view(ws.rank, steps.epoch, offset, (begins[-1], cols), x.dtype)
        for i in range(1, ws.world_size):
            src = (ws.rank + i) % ws.world_size
            theirs = published(ws, steps, src, (sizes[src], cols), x.dtype, slot, at[src])
            if ws.in_place:
                trace.timed("travel", src, rows[begins[src] : begins[src + 1]].copy_, theirs)
        return rows

    return whole


class Gathering(Epoch):
    """One gather of x [rows, cols] along `dim` as the op `name`: in it, (rank, its shard) of every rank, the own first,
    then as they arrive.
    """

    def __init__(self, ws: Workspace, name: str, x: Tensor, sizes: tuple[int, ...], dim: int) -> None:
        self._x, self._sizes, self._dim = x, sizes, dim
        self._stride = aligned(max(sizes) * x.shape[1 - dim] * x.element_size())
        super().__init__(ws, name, ws.world_size * self._stride, 1)

    def _entered(self, steps: Steps) -> Iterator[tuple[int, Tensor]]:
        publish(self._ws, steps, self._x, FIRST_SLOT.value, self._ws.rank * self._stride)
        return self._chunks(steps)

    def _chunks(self, steps: Steps) -> Iterator[tuple[int, Tensor]]:
        ws, x = self._ws, self._x
        yield ws.rank, x
        rows, cols = x.shape
        for i in range(1, ws.world_size):
            src = (ws.rank + i) % ws.world_size
            shape = (self._sizes[src], cols) if self._dim == 0 else (rows, self._sizes[src])
            yield src, published(ws, steps, src, shape, x.dtype, FIRST_SLOT.value, src * self._stride)


class GatheringWhole(Epoch):
    """One gather of x [sizes[rank], cols] as the op `name`: in it, all ranks' rows, one below the other.

    They lie in symmetric memory: the op must not end before they have been read.
    """

    def __init__(self, ws: Workspace, name: str, x: Tensor, sizes: tuple[int, ...]) -> None:
        self._x, self._sizes = x, sizes
        super().__init__(ws, name, sum(sizes) * x.shape[1] * x.element_size(), 1)

    def _entered(self, steps: Steps) -> Tensor:
        return gathered(self._ws, steps, self._x, self._sizes, FIRST_SLOT.value, 0)()
