"""Threads, forks and interruptions: what may run at once does, and what may not is refused and says what to do."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal as signal_of_posix
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fusedtp.bench.mixed import Call, Operands, draw
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import signal
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import clock, dispatch, groups, turns, workspace
from fusedtp.memory.local import local_memories
from fusedtp.schedules import decomposed
from fusedtp.workspace import Workspace

CPU = torch.device("cpu")
X = torch.ones(4, 4)


class InThread(threading.Thread):
    """A call in a thread of its own; `result` joins it and gives what it returned or raises what it raised."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(name="the other thread")
        self._fn = fn
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._fn()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._value


class Flags:
    """What ranks tell each other beside their groups: through the store, which no op of a group waits for."""

    def __init__(self, name: str) -> None:
        self._store, self._name = dist.distributed_c10d._get_default_store(), name  # type: ignore[attr-defined]

    def raise_(self, flag: str) -> None:
        self._store.set(f"{self._name}/{flag}", "")

    def wait(self, flag: str) -> None:
        self._store.wait([f"{self._name}/{flag}"], timedelta(seconds=60))


@contextlib.contextmanager
def own_group(group: ProcessGroup) -> Iterator[ProcessGroup]:
    """Another group of the same ranks: of all of the pool's, as making one is collective."""
    made = dist.new_group(dist.get_process_group_ranks(group))
    yield made
    fusedtp.destroy(made)
    dist.destroy_process_group(made)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def mixed(seed: int, world_size: int, number: int) -> list[Call]:
    """Calls of the schedules that several threads may run, many of them with a backward pass."""
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
    """Graphs made here are differentiated in another thread, while forward ops go on here in another group."""
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
    """Rank 0 uses a group in two threads while its peers are late."""
    flags, refused = Flags("one group"), []

    def reduce() -> torch.Tensor:
        return fusedtp.all_reduce(X, group=group, schedule="decomposed")

    reduce()
    if group.rank() == 0:
        there = InThread(reduce)
        until(lambda: workspace.get(group, CPU).host_words[signal.WAITING_FOR.value])
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
    # What was refused has left nothing behind.
    assert (reduce() == group.size()).all()
    return refused


def test_one_group_in_two_threads_is_refused(pool: RankPool) -> None:
    refused, *others = pool.run(one_group, world_size=2)
    assert others == [[]]
    assert len(refused) == 3
    for text, op in zip(refused, ("all_reduce", "all_gather", "destroy"), strict=True):
        assert text.startswith(f"{op}: all_reduce is under way in thread 'the other thread' on the same group")
        assert "new_group()" in text


def one_interpreter(group: ProcessGroup) -> str:
    """Rank 0 runs a kernel in one thread, waiting for its peers, and ops of another group beside it."""
    flags, refused = Flags("one interpreter"), ""

    def reduce(of: ProcessGroup, schedule: str) -> torch.Tensor:
        return fusedtp.all_reduce(X, group=of, schedule=schedule)

    with own_group(group) as other:
        for of in (group, other):
            reduce(of, "decomposed")
        if group.rank() == 0:
            there = InThread(lambda: reduce(group, "fused"))
            until(lambda: ("interpreter", "") in turns._taken)
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


def interrupted(group: ProcessGroup, schedule: str) -> tuple[str, str, float]:
    """Rank 0 is interrupted in the middle of an op, when the others have its part, and they finish without it."""
    from fusedtp.schedules import fused

    fusedtp.destroy(group)

    def reduce() -> torch.Tensor:
        return fusedtp.all_reduce(X, group=group, schedule=schedule, algorithm="one_shot")

    reduce()
    first, what = "", "_sum_into" if schedule == "decomposed" else "reduce"
    if group.rank() == 0:
        module = decomposed if schedule == "decomposed" else fused
        with mock.patch.object(module, what, side_effect=KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
            reduce()
    else:
        assert (reduce() == group.size()).all()
        # Kernels look at the budget alone.
        fusedtp.set_timeout(60 if schedule == "decomposed" else 1, group)
    started = time.monotonic()
    try:
        reduce()
    except RuntimeError as error:
        first = f"{type(error).__name__}: {error}"
    elapsed = time.monotonic() - started
    dist.barrier(group)
    fusedtp.set_timeout(110)
    fusedtp.destroy(group)
    assert (reduce() == group.size()).all()
    return first, schedule, elapsed


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_an_op_that_was_interrupted_is_not_taken_for_the_next(pool: RankPool, schedule: str) -> None:
    (first, _, _), *others = pool.run(interrupted, schedule, world_size=3)
    assert first.startswith("RuntimeError: all_reduce: an exception left rank 0 in the middle of the op")
    assert "call fusedtp.destroy" in first
    for text, _, elapsed in others:
        assert text.startswith("PeerTimeout: all_reduce: rank ")
        assert "rank 0 left an op with an exception" in text
        # At once, not after the budget of 60 s.
        assert elapsed < 20


def destroyed_alone(group: ProcessGroup) -> tuple[str, float]:
    flags, text, elapsed = Flags("destroyed alone"), "", 0.0
    fusedtp.all_reduce(X, group=group, schedule="decomposed")
    if group.rank() == 0:
        fusedtp.destroy(group)
        flags.wait("noticed")
    else:
        fusedtp.set_timeout(40, group)
        started = time.monotonic()
        with pytest.raises(fusedtp.PeerTimeout) as caught:
            fusedtp.all_reduce(X, group=group, schedule="decomposed")
        assert (caught.value.peer, caught.value.rank) == (0, 1)
        assert caught.value.seconds < 40
        text = str(caught.value)
        elapsed = time.monotonic() - started
        flags.raise_("noticed")
        fusedtp.destroy(group)
        fusedtp.set_timeout(110)
    assert (fusedtp.all_reduce(X, group=group, schedule="decomposed") == 2).all()
    return text, elapsed


def test_a_rank_that_destroys_alone_is_named_at_once(pool: RankPool) -> None:
    _, (text, elapsed) = pool.run(destroyed_alone, world_size=2)
    assert "rank 0 has called fusedtp.destroy: call fusedtp.destroy for this group on every rank" in text
    assert elapsed < 20


def forked(group: ProcessGroup) -> list[str]:
    """A child of every rank tries what it may not; its parent goes on."""

    def reduce(schedule: str) -> torch.Tensor:
        return fusedtp.all_reduce(X, group=group, schedule=schedule)

    def child() -> list[str]:
        texts = []
        for schedule in ("decomposed", "unfused", "auto"):
            try:
                reduce(schedule)
            except RuntimeError as error:
                texts.append(str(error))
        with contextlib.suppress(RuntimeError):
            torch.ops.fusedtp.all_reduce(X, group.group_name, "unfused", "auto")
            texts.append("the operator ran")
        # Nor does what waits for nobody touch the parent's memory.
        fusedtp.set_timeout(5)
        fusedtp.destroy()
        # The lock was held, and the thread is not there.
        word = torch.zeros(1, dtype=torch.int32)
        clock.drive(word)
        before = clock.now_ms()
        until(lambda: int(word) - before > 30)
        clock.release(word)
        return texts

    reduce("decomposed")
    ws, name = workspace.get(group, CPU), str(os.getpid())
    read, write = os.pipe()
    with warnings.catch_warnings(), clock._lock:
        # Python 3.12 warns of what this test is about.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        text = "the child failed"
        signal_of_posix.alarm(50)
        try:
            text = "\n".join(child())
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        texts = pipe.read().split("\n")
    assert os.waitpid(pid, 0)[1] == 0
    assert ws is workspace.get(group, CPU)
    assert ws.host_words[signal.BUDGET_MS.value] == ws.seconds * 1000 != 5000
    assert not ws.host_words[signal.LEFT.value]
    assert (reduce("decomposed") == group.size()).all()
    assert (reduce("unfused") == group.size()).all()
    return [text.replace(str(pid), "PID") for text in texts] if name != str(pid) else []


def test_a_fork_after_init_is_refused_and_its_parent_goes_on(pool: RankPool) -> None:
    for texts in pool.run(forked, world_size=2, timeout=100):
        assert len(texts) == 3
        for text in texts:
            assert text.startswith("process PID was forked after torch.distributed was initialised")
            assert "before init_process_group, or with multiprocessing.get_context('spawn')" in text


def test_a_fork_before_init_is_a_process_like_any_other() -> None:
    with mock.patch.object(groups, "_inherited", "of before"):
        groups._after_fork()
        assert groups._inherited is None
        groups._check_fork()


def budgets_of_groups(group: ProcessGroup) -> list[float]:
    with own_group(group) as other:
        fusedtp.set_timeout(77, other)
        seen = [workspace.get(each, CPU).seconds for each in (group, other)]
        fusedtp.set_timeout(88, other.group_name)
        seen += [workspace.get(each, CPU).seconds for each in (group, other)]
        fusedtp.destroy(other)
        # It is the group's, not its memory's.
        seen.append(workspace.get(other, CPU).host_words[signal.BUDGET_MS.value] / 1000)
        fusedtp.set_timeout(110)
        seen += [workspace.get(each, CPU).seconds for each in (group, other)]
    return seen


def test_a_group_may_have_a_budget_of_its_own(pool: RankPool) -> None:
    assert pool.run(budgets_of_groups) == [[110, 77, 110, 88, 88, 110, 110]] * 4


def test_tables_of_lengths_do_not_pile_up() -> None:
    (ws,) = (Workspace(memory, CPU) for memory in local_memories(1, CPU))
    for length in range(3000):
        assert ws.table((length,)).tolist() == [0, length]
    assert len(ws._tables) <= 1024
    ws.close()


def many_shapes(group: ProcessGroup) -> list[int]:
    fusedtp.destroy(group)
    with mock.patch.object(dispatch, "_MAX_CHOICES", 4):
        for rows in (*range(1, 9), *range(1, 9)):
            out = fusedtp.all_gather(torch.ones(rows, 2), group=group)
            assert out.shape == (rows * group.size(), 2)
    return [len(workspace.get(group, CPU).choices)]


def test_choices_of_shapes_do_not_pile_up(pool: RankPool) -> None:
    for (num_choices,) in pool.run(many_shapes, world_size=2):
        assert 2 <= num_choices <= 5


def test_growth_during_a_capture_is_refused() -> None:
    (ws,) = (Workspace(memory, CPU) for memory in local_memories(1, CPU))
    before = ws.half_bytes, ws.addresses
    with mock.patch.object(ws, "_capturing", return_value=True):
        with pytest.raises(RuntimeError, match=re.escape("run the same op once before capturing")), ws.running("op"):
            ws.require(1 << 20, 100)
        ws.require(*before[:1], 1)
    assert (ws.half_bytes, ws.addresses) == before
    # Refused before anything was sent: the workspace goes on, and may grow now.
    with ws.running("op"):
        ws.require(1 << 20, 100)
    assert ws.half_bytes >= 1 << 20
    ws.close()


def test_memory_that_a_captured_graph_uses_outlives_growth(pool: RankPool) -> None:
    assert pool.run(captured, world_size=2) == [(4, 2)] * 2


def captured(group: ProcessGroup) -> tuple[int, int]:
    # Arenas that are mapped, after growth with a capture before it and without one.
    def arenas() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:fusedtp")

    seen = []
    for graph in (True, False):
        fusedtp.destroy(group)
        others = arenas()
        ws = workspace.get(group, CPU)
        with mock.patch.object(ws, "_capturing", return_value=graph), ws.running("op"):
            table = ws.table((1,) * group.size())
        old = ws._arena
        assert old is not None
        ws.require(1 << 20, 100)
        seen.append(arenas() - others)
        if graph:
            # As a replay would.
            assert old.tensors[1 - group.rank()].sum() >= 0
            assert any(each is table for each in ws._captured)
        fusedtp.destroy(group)
        del old
        assert arenas() == others
    return seen[0], seen[1]


def test_every_case_has_its_test() -> None:
    folder = Path(__file__).parent
    text = (folder.parent / "docs" / "processes.md").read_text()
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) >= 13
    tests = "".join(path.read_text() for path in folder.glob("test_*.py"))
    for name in named:
        assert f"def {name}(" in tests, name
