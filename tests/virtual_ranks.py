"""Virtual ranks: W ranks of one process on one device, whose ops run in phases.

An op is a generator. Before its first yield it makes room; between two yields it issues one kernel, or the copies of a
producer. All ranks make room before the first signal, and every rank's producer is issued before any rank's consumer.
So nothing waits for a later phase, and the kernels need not run at once, nor even on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fusedtp.memory import Arena, Exchange
from fusedtp.schedules.forms import Prepared
from fusedtp.schedules.verbs import Operands
from fusedtp.workspaces.workspace import Workspace

T = TypeVar("T")
Phases = Generator[None, None, list[Tensor]]


@contextlib.contextmanager
def running(ws: Workspace, op: str) -> Iterator[None]:
    """Run an op between `begin` and `end`, or `interrupted` if it raises."""
    ws.begin(op, ws.meanings.now)
    try:
        yield
        ws.end()
    except BaseException as error:
        ws.interrupted(op, error)
        raise


def phases(prepared: Prepared, operands: Operands) -> Phases:
    """Run every stage in phases, which virtual ranks go through together; make room up to the first `yield`."""
    on, ws = prepared.on, prepared.ws
    if ws is not None:
        ws.require(prepared.half_bytes, prepared.slots)
        yield
        if on.by_host:
            ws.steps.enter(prepared.task.op.name)
    form, state = prepared.form, None
    for i, stage in enumerate(form.stages):
        if i:
            yield
        state = stage(form, operands, state)
    if ws is not None:
        on.end()
    outs: list[Tensor] = state
    return outs


def finish(phases: Generator[None, None, T]) -> T:
    """Run the remaining phases and return the result."""
    while True:
        try:
            next(phases)
        except StopIteration as stop:
            found: T = stop.value
            return found


def run_together(phases: Sequence[Generator[None, None, T]]) -> list[T]:
    """Run the same op of several virtual ranks phase by phase, and return their results in rank order."""
    results: dict[int, T] = {}
    while len(results) < len(phases):
        for rank, each in enumerate(phases):
            if rank not in results:
                try:
                    next(each)
                except StopIteration as stop:
                    results[rank] = stop.value
    return [results[rank] for rank in range(len(phases))]


class _Shared:
    """State shared by the virtual ranks: the arenas of every generation, made by the rank that asks first."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size, self.device = world_size, device
        self.arenas: dict[int, list[Tensor]] = {}

    def tensors(self, generation: int, num_bytes: int) -> list[Tensor]:
        if generation not in self.arenas:
            shape = (self.world_size, num_bytes)
            self.arenas[generation] = list(torch.zeros(shape, dtype=torch.uint8, device=self.device).unbind())
        assert self.arenas[generation][0].numel() == num_bytes, "virtual ranks must allocate alike"
        return self.arenas[generation]


class LocalMemory:
    """One virtual rank's view of memory that all virtual ranks share.

    All ranks must have allocated before any of them signals.
    """

    exchanges = False

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.world_size, self._shared, self._generation = rank, shared.world_size, shared, 0

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """Allocate as `Memory.allocate` does; the ranks may call one after another."""
        num_bytes = -(-num_bytes // 4096) * 4096
        self._generation += 1
        generation = self._generation
        tensors = self._shared.tensors(generation, num_bytes)
        tensors[self.rank][: header.numel() * 4].view(torch.int32).copy_(header)

        def release() -> None:
            self._shared.arenas.pop(generation, None)

        return Arena(list(tensors), release)


def local_memories(world_size: int, device: torch.device) -> list[LocalMemory]:
    shared = _Shared(world_size, device)
    return [LocalMemory(rank, shared) for rank in range(world_size)]
