"""Ops in phases: one rank straight through, or all virtual ranks of a process in step or side by side.

An op is a generator that makes room up to its first yield and then issues one kernel, or the copies of a producer,
between two yields. A process that is one rank runs it straight through. Virtual ranks of one process (`memory.local`)
run either *phased*: all have made room before the first signal, and every rank's producer is issued before any rank's
consumer, so that nothing waits for what comes later and the kernels need not run at once, nor even on a GPU; or
*concurrent*: each on a stream of its own, where consumers wait for producers that run beside them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ..workspace import Workspace

Phases = Generator[None, None, Tensor]


def run(ws: Workspace, op: str, phases: Phases) -> Tensor:
    """Issue every phase of one rank's op."""
    with ws.running(op):
        while True:
            try:
                next(phases)
            except StopIteration as stop:
                out: Tensor = stop.value
                return out


def run_together(phases: Sequence[Phases]) -> list[Tensor]:
    """Phased: the same op of several virtual ranks phase by phase; their results in rank order."""
    results: dict[int, Tensor] = {}
    while len(results) < len(phases):
        for rank, each in enumerate(phases):
            if rank not in results:
                try:
                    next(each)
                except StopIteration as stop:
                    results[rank] = stop.value
    return [results[rank] for rank in range(len(phases))]


def run_concurrently(
    ranks: Sequence[Workspace], op: str, phases: Sequence[Phases], streams: Sequence[torch.cuda.Stream]
) -> list[Tensor]:
    """Concurrent: the op of every virtual rank on its own stream, in rank order; the current stream waits for all.

    Nothing may allocate device memory anew or wait for the host while kernels spin, and all programs of all ranks must
    fit on the device at once: run the op phased before, and give each rank its part of the SMs.
    """
    main = torch.cuda.current_stream(ranks[0].device)
    results = []
    for each in phases:
        # Room is made alike by all, before any rank signals.
        next(each)
    for ws, each, stream in zip(ranks, phases, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(run(ws, op, each))
    for stream in streams:
        main.wait_stream(stream)
    return results
