"""Ops in phases: one rank straight through, or all virtual ranks of a process in step or side by side.

An op is a generator that makes room up to its first yield, then issues one kernel, or the copies of a producer, between
two yields. A process that is one rank runs it straight through. Virtual ranks of one process (`memory.local`) run
either *phased* or *concurrent*.

Phased: all make room before the first signal, and every rank's producer is issued before any rank's consumer. So
nothing waits for a later phase, and the kernels need not run at once, nor even on a GPU. Concurrent: each rank has a
stream of its own, and consumers wait for producers that run beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

from ..workspaces.workspace import Workspace
from .forms import finish

T = TypeVar("T")


def run_together(phases: Sequence[Generator[None, None, T]], streams: Sequence[torch.cuda.Stream] = ()) -> list[T]:
    """Run the same op of several virtual ranks phase by phase, and return their results in rank order.

    With `streams` each rank's phase runs on its own stream, and a phase begins when all have ended the previous one.
    """
    results: dict[int, T] = {}
    while len(results) < len(phases):
        for rank, each in enumerate(phases):
            if rank not in results:
                try:
                    with torch.cuda.stream(streams[rank]) if streams else contextlib.nullcontext():
                        next(each)
                except StopIteration as stop:
                    results[rank] = stop.value
        _join(streams)
    return [results[rank] for rank in range(len(phases))]


def run_concurrently(
    ranks: Sequence[Workspace],
    op: str,
    phases: Sequence[Generator[None, None, T]],
    streams: Sequence[torch.cuda.Stream],
) -> list[T]:
    """Run the op of every virtual rank on its own stream, issued in rank order.

    While kernels wait nothing may allocate new device memory or make the host wait, and all programs of all ranks must
    fit on the device at once. So run the op phased before, and give each rank its part of the SMs (`programs`).
    """
    for each in phases:
        # All make room before any rank signals.
        next(each)
    results = []
    for ws, each, stream in zip(ranks, phases, streams, strict=True):
        with torch.cuda.stream(stream), ws.running(op):
            results.append(finish(each))
    return results


def _join(streams: Sequence[torch.cuda.Stream]) -> None:
    # Work issued next on any stream runs after all that has been issued on all of them.
    for stream in streams:
        for other in streams:
            if other is not stream:
                stream.wait_stream(other)
