"""Virtual ranks that call differentiable functions: one thread for each rank; all threads meet at every fused op.

A rank's thread needs the results of earlier ops on the host, so an op's launches run when the last rank has arrived,
and then all threads go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedtp import locks
from fusedtp.choose import dispatch
from fusedtp.schedules import forms, fused, local
from fusedtp.schedules.forms import Prepared
from fusedtp.schedules.verbs import Pending
from fusedtp.workspaces import registry
from fusedtp.workspaces.workspace import Workspace

from ..virtual_ranks import finish, phases
from .cases import virtual_ranks
from .driver import EmulatedDriver
from .machine import Ran, Schedule


def _groups(world_size: int) -> list[dist.ProcessGroup]:
    """Return a group for each virtual rank, which knows its rank and size and communicates nothing."""
    found = []
    for rank in range(world_size):
        group = dist.ProcessGroup(dist.HashStore(), rank, world_size)
        backend = FakeProcessGroup._create_internal(rank, world_size, FakeProcessGroup.Options())
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        name = f"virtual {rank} of {world_size}"
        group._set_group_name(name)
        _register_process_group(name, group)
        found.append(group)
    return found


@contextlib.contextmanager
def _distributed() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(
    driver: EmulatedDriver, world_size: int, schedule: Schedule, call: Callable[[int, dist.ProcessGroup], Any]
) -> tuple[list[Any], list[Ran]]:
    """Run call(rank, group) in a thread for each virtual rank; return the results, and the counts of each op's run."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    ran: list[Ran] = []
    # One thread runs at a time, except while it waits for the others.
    turn = threading.Lock()

    with virtual_ranks(world_size) as ranks, _distributed():
        groups = _groups(world_size)
        for each in ranks:
            # These groups have no store, through which rank 0 would share its measurements.
            dispatch._shared[each] = dispatch.SharedConfig(None, None)
        together = threading.Barrier(world_size, lambda: ran.append(driver.run(ranks, schedule)), timeout=300)

        def get(group: dist.ProcessGroup, device: torch.device, lane: int = 0, *, epoch: int = 0) -> Workspace:
            return ranks[group.rank()]

        def meet() -> None:
            turn.release()
            try:
                together.wait()
            finally:
                turn.acquire()

        def go(prepared: Prepared, operands: Any) -> list[Tensor]:
            ws = prepared.ws
            assert ws is not None
            with driver.on(ws.rank):
                outs = finish(phases(prepared, operands))
            meet()
            ws.check()
            return outs

        read = fused.FusedGather.read

        def read_together(gather: fused.FusedGather, pending: Pending) -> Any:
            # The library multiplies rows that kernels have gathered.
            rows = read(gather, pending)
            meet()
            return rows

        def thread(rank: int) -> None:
            with turn:
                try:
                    results[rank] = call(rank, groups[rank])
                except BaseException as error:
                    errors.append(error)
                    together.abort()

        with (
            mock.patch.object(registry, "get", get),
            mock.patch.object(Prepared, "go", go),
            mock.patch.object(fused.FusedGather, "read", read_together),
            mock.patch.object(fused, "multiply", local.multiply),
            mock.patch.object(forms, "multiply", local.multiply),
            mock.patch.multiple(Workspace, begin=lambda *_: None, end=lambda *_: None),
            # Threads here are ranks, which run the same op at once.
            mock.patch.object(locks, "alone", lambda key, op, function, *args: function(*args)),
        ):
            threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(world_size)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results, ran
