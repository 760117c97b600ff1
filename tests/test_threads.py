"""Threads: allowed combinations run at once, others are refused with a remedy."""

from __future__ import annotations

import os
import random
import signal as signals
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import locks
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import signal
from fusedtp.schedules.local import LocalScatter
from fusedtp.workspaces import registry

from .beside import CPU, Flags, InThread, X, own_group, until
from .harness import on_ranks
from .soak.mixed import Call, Operands, draw


def mixed(seed: int, world_size: int, number: int) -> list[Call]:
    """Draw calls of the schedules that several threads may run, many of them with a backward pass."""
    source = random.Random(seed)
    drawn = [draw(source, world_size) for _ in range(4 * number)]
    return [call for call in drawn if call.schedule != "fused"][:number]


def two_threads(group: ProcessGroup) -> int:
    def run(seed: int, of: ProcessGroup) -> int:
        calls = mixed(seed, of.size(), 40)
        for call in calls:
            operands = Operands(call, of.rank())
            operands.check(operands.run(of))
        return sum(call.backward for call in calls)

    with own_group(group) as other:
        there = InThread(lambda: run(1, other))
        here = run(2, group)
        return here + there.result()


def test_two_threads_use_two_groups_at_once(pool: RankPool) -> None:
    assert all(num_backward > 10 for num_backward in pool.run(two_threads))


def backward_beside_forward(group: ProcessGroup) -> bool:
    """Run the backward passes of this thread's graphs in another thread, beside forward ops in another group."""
    with own_group(group) as other:
        calls = [call for call in mixed(3, group.size(), 80) if call.backward][:10]
        operands = [Operands(call, other.rank()) for call in calls]
        graphs = [each.call_on(other) for each in operands]

        def differentiate() -> None:
            for each, y in zip(operands, graphs, strict=True):
                each.check([y.detach(), *torch.autograd.grad(y, each.leaves, each.dy)])

        there = InThread(differentiate)
        for call in mixed(4, group.size(), 30):
            each = Operands(call, group.rank())
            each.check([each.call_on(group).detach()])
        there.result()
    return len(calls) == 10


def test_backward_in_another_thread_beside_forward(pool: RankPool) -> None:
    assert all(pool.run(backward_beside_forward))


def one_group(group: ProcessGroup) -> list[str]:
    """Use a group in two threads of rank 0 while its peers are late."""
    flags, refused = Flags("one group"), []

    def reduce() -> torch.Tensor:
        return fusedtp.all_reduce(X, group=group, schedule="decomposed")

    reduce()
    if group.rank() == 0:
        there = InThread(reduce)
        until(lambda: registry.get(group, CPU).host_words[signal.WAITING_FOR.value])
        for call in (reduce, lambda: fusedtp.all_gather(X, group=group, schedule="unfused"), fusedtp.destroy):
            try:
                call()
            except RuntimeError as error:
                refused.append(str(error))
        flags.raise_("refused")
        out = there.result()
    else:
        flags.wait("refused")
        out = reduce()
    assert (out == group.size()).all()
    # Refused calls leave nothing behind.
    assert (reduce() == group.size()).all()
    return refused


def test_one_group_in_two_threads_is_refused(pool: RankPool) -> None:
    refused, *others = pool.run(one_group, world_size=2)
    assert others == [[]]
    assert len(refused) == 3
    for text, op in zip(refused, ("all_reduce", "all_gather", "destroy"), strict=True):
        assert text.startswith(f"{op}: all_reduce is under way in thread 'the other thread' on the same group")
        assert "new_group()" in text


@on_ranks(1)
def test_one_rank_needs_no_lock(group: ProcessGroup) -> None:
    """Two threads are in one call at once, each behind its matmul's operands and before its sum."""
    met, multiply = threading.Barrier(2), LocalScatter.multiply

    def meet(self: LocalScatter, terms: Any) -> None:
        multiply(self, terms)
        met.wait(60)

    def call(value: float) -> float:
        x, w, residual = torch.full((1, 1), value), torch.ones(1, 1), torch.zeros(1, 1)
        return fusedtp.linear_reduce_scatter(x, w, residual=residual, group=group).item()

    assert (call(1.0), call(1.0)) == (1.0, 1.0)
    with mock.patch.object(LocalScatter, "multiply", meet):
        there = InThread(lambda: call(2.0))
        assert (call(1.0), there.result()) == (1.0, 2.0)


def test_destroy_holds_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op of another thread is refused while a workspace is being given back, and the locks are free afterwards."""
    monkeypatch.setattr(registry, "_made_for", {("one", CPU, 0): None})
    refused: list[str] = []

    def taken() -> None:
        locks.alone(("group", "one"), "op", lambda: None)

    def forget(_: object) -> None:
        try:
            InThread(taken).result()
        except RuntimeError as error:
            refused.append(str(error))
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "_forget", forget)
    with pytest.raises(KeyboardInterrupt):
        registry.destroy()
    assert refused[0].startswith("op: destroy is under way in thread 'MainThread'")
    taken()


def first_op(group: ProcessGroup, by_signal: bool) -> str:
    """Make a second call on rank 0 during a group's first op, which waits for late peers to make the workspace."""
    flags, refused = Flags(f"first op, {by_signal=}"), []

    with own_group(group) as other:

        def second(*_: object) -> None:
            until(lambda: ("group", other.group_name) in locks.taken)
            try:
                fusedtp.all_reduce(100 * X, group=other)
            except RuntimeError as error:
                refused.append(str(error))
            flags.raise_("refused")

        if group.rank() == 0 and by_signal:
            before = signals.signal(signals.SIGUSR1, second)
            there = InThread(lambda: until(lambda: locks.taken) or os.kill(os.getpid(), signals.SIGUSR1))
        elif group.rank() == 0:
            there = InThread(second)
        else:
            flags.wait("refused")
        # The same number of calls on every rank: the refused call sends nothing.
        assert (fusedtp.all_reduce(X, group=other) == group.size()).all()
        assert (fusedtp.all_reduce(2 * X, group=other) == 2 * group.size()).all()
        if group.rank() == 0:
            there.result()
            if by_signal:
                signals.signal(signals.SIGUSR1, before)
    return "".join(refused)


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_second_call_during_a_groups_first_op_is_refused(pool: RankPool, by_signal: bool) -> None:
    refused, *others = pool.run(first_op, by_signal)
    assert refused.startswith("all_reduce: all_reduce is under way in thread 'MainThread' on the same group")
    assert others == [""] * 3


def one_interpreter(group: ProcessGroup) -> str:
    """Run a kernel in one thread of rank 0, which waits for its peers, beside ops of another group."""
    flags, refused = Flags("one interpreter"), ""

    def reduce(of: ProcessGroup, schedule: str) -> torch.Tensor:
        return fusedtp.all_reduce(X, group=of, schedule=schedule)

    with own_group(group) as other:
        for of in (group, other):
            reduce(of, "decomposed")
        if group.rank() == 0:
            there = InThread(lambda: reduce(group, "fused"))
            until(lambda: ("interpreter", "") in locks.taken)
            try:
                reduce(other, "fused")
            except RuntimeError as error:
                refused = str(error)
            beside = reduce(other, "decomposed")
            flags.raise_("done beside")
            out = there.result()
        else:
            beside = reduce(other, "decomposed")
            flags.wait("done beside")
            out = reduce(group, "fused")
        assert (beside == group.size()).all()
        assert (out == group.size()).all()
        assert (reduce(other, "fused") == group.size()).all()
    return refused


def test_interpreted_kernels_in_two_threads_are_refused(pool: RankPool) -> None:
    refused, *others = pool.run(one_interpreter)
    assert others == [""] * 3
    assert "all_reduce is under way in thread 'the other thread' in Triton's interpreter" in refused
    assert "use schedule 'decomposed'" in refused
