"""Parts that schedules share: a side stream for copies beside matmuls on a GPU, and the way of an all-reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..cost.overlap import IN_SWITCH, ONE_SHOT, TWO_SHOT, way_of
from ..op import Task
from ..shards import size_class
from ..workspaces.decisions import Decisions
from ..workspaces.workspace import Workspace

_ways: Decisions[str] = Decisions()

# A side stream for each stream that ops run on: virtual ranks of a process must not wait for each other's copies.
_side_streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def way(ws: Workspace, schedule: str, task: Task) -> str:
    """Return the way of an all-reduce (`cost.overlap.way_of`): the caller's, or the fastest by the cost model.

    With order "any", NVLink's switch may replace two-shot. The choice depends only on values that all ranks share, so
    all decide alike. The sum of several products is never one-shot by choice: stored to all ranks, it would take more
    registers than there are.
    """
    switch = schedule == "fused" and task.any_order and ws.has_multicast
    if task.algorithm == ONE_SHOT:
        return ONE_SHOT
    if task.algorithm == TWO_SHOT or len(task.each("b")) > 1:
        return IN_SWITCH if switch else TWO_SHOT
    # Few decisions serve all numbers of rows, as in `dispatch`.
    rows, cols = map(size_class, task.moved)
    alone, dtype, machine = not task.op.multiplies, task.dtype_name, ws.hardware

    def decide() -> str:
        return way_of(rows, cols, ws.world_size, dtype, machine, schedule, alone=alone, switch=switch)

    found = _ways.get(ws, (schedule, rows, cols, dtype, alone, switch, id(machine)), decide)
    # The model has no switch for a CPU: there kernels visit the ranks one by one.
    return IN_SWITCH if switch and ws.reads_peers and found == TWO_SHOT else found


def side_stream(ws: Workspace) -> torch.cuda.Stream:
    main = torch.cuda.current_stream(ws.device)
    if main not in _side_streams:
        _side_streams[main] = torch.cuda.Stream(ws.device, priority=-1)
    return _side_streams[main]


@contextlib.contextmanager
def travelling(ws: Workspace) -> Iterator[None]:
    """Issue the work inside on a side stream, beside the matmuls that follow; on a CPU, do nothing."""
    if ws.device.type == "cpu":
        yield
        return
    side = side_stream(ws)
    side.wait_stream(torch.cuda.current_stream(ws.device))
    with torch.cuda.stream(side):
        yield


def settle(ws: Workspace) -> None:
    """Wait for the side stream, which must have read the op's inputs before the op ends or they are reused."""
    if ws.device.type == "cuda" and (main := torch.cuda.current_stream(ws.device)) in _side_streams:
        side = _side_streams[main]
        if torch.cuda.is_current_stream_capturing():
            # The side stream is in the capture only if this op, or an earlier one of the capture, has used it.
            with torch.cuda.stream(side):
                if not torch.cuda.is_current_stream_capturing():
                    return
        main.wait_stream(side)
