"""Virtual ranks that call differentiable functions: a thread a rank, which meet at every fused op.

What a rank's thread computes on the host needs the results of the ops before; so an op's launches of all ranks are run
when the last of them has come, and then all go on.
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

from fusedtp import turns
from fusedtp.calls import dispatch
from fusedtp.schedules import fused
from fusedtp.schedules.alone import multiplied as library_multiplied
from fusedtp.schedules.prepared import Prepared, finish
from fusedtp.workspaces import registry
from fusedtp.workspaces.workspace import Workspace

from .cases import virtual_ranks
from .driver import EmulatedDriver
from .machine import Ran, Schedule


def _groups(world_size: int) -> list[dist.ProcessGroup]:
    """A group a virtual rank, which knows its rank and size and communicates nothing."""
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


class _Turns:
    """One thread at a time, always in the order of the ranks: in which order kernels are launched decides what the
    machine's schedule makes of them.
    """

    def __init__(self, together: threading.Barrier) -> None:
        self._together, self._now, self._passed = together, 0, threading.Condition()

    def take(self, rank: int) -> None:
        """Wait for this rank's turn, or until a rank has failed."""
        with self._passed:
            self._passed.wait_for(lambda: self._now == rank or self._together.broken)

    def give(self) -> None:
        """To the next rank; the last one gives it to the first."""
        with self._passed:
            self._now = (self._now + 1) % self._together.parties
            self._passed.notify_all()

    def meet(self) -> None:
        """Run what all ranks have launched, once the last of them has come."""
        rank = self._now
        self.give()
        self._together.wait()
        self.take(rank)


def run_ranks(
    driver: EmulatedDriver, world_size: int, schedule: Schedule, call: Callable[[int, dist.ProcessGroup], Any]
) -> tuple[list[Any], list[Ran]]:
    """call(rank, group) in a thread for each virtual rank; what each gave, and how each op ran."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    ran: list[Ran] = []

    with virtual_ranks(world_size) as ranks, _distributed():
        groups = _groups(world_size)
        for each in ranks:
            # These groups have no store through which the first rank could tell what it measured.
            each.knowledge = dispatch.Knowledge(None, None)
        together = threading.Barrier(world_size, lambda: ran.append(driver.run(ranks, schedule)), timeout=300)
        in_turn = _Turns(together)

        def get(group: dist.ProcessGroup, device: torch.device, *, epoch: int = 0) -> Workspace:
            return ranks[group.rank()]

        def go(prepared: Prepared, operands: Any) -> list[Tensor]:
            ws = prepared.ws
            assert ws is not None
            with driver.on(ws.rank):
                outs = finish(prepared.phases(*operands))
            in_turn.meet()
            ws.check()
            return outs

        def multiplied(whole: Tensor, products: Any, leaves: int = 0) -> list[Tensor]:
            # The library multiplies what kernels have gathered.
            in_turn.meet()
            return library_multiplied(whole, products, leaves)

        def thread(rank: int) -> None:
            in_turn.take(rank)
            try:
                results[rank] = call(rank, groups[rank])
            except BaseException as error:
                errors.append(error)
                together.abort()
            finally:
                in_turn.give()

        with (
            mock.patch.object(registry, "get", get),
            mock.patch.object(Prepared, "go", go),
            mock.patch.object(fused, "multiplied", multiplied),
            mock.patch.multiple(Workspace, begin=lambda *_: None, end=lambda *_: None),
            mock.patch.object(turns, "Turn", return_value=contextlib.nullcontext()),
        ):
            threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(world_size)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results, ran
