"""A workspace is made or grows while a rank is interrupted, late or killed: no wrong number, no wait beyond the
timeout, and the missing rank is named.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal as signal_of_posix
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import PeerTimeout
from fusedtp.bench.ranks import RankError, RankPool
from fusedtp.hf import inputs
from fusedtp.kernels import signal
from fusedtp.memory import Unreachable, posix
from fusedtp.workspaces import clock, registry, rendezvous, timeouts
from fusedtp.workspaces.workspace import Workspace

from .beside import CPU, Flags, until
from .harness import spread
from .virtual_ranks import local_memories, running

pytestmark = pytest.mark.usefixtures("destroyed_on_all_ranks")
LARGE = 600


def gather(group: ProcessGroup, rows: int, value: float = 1.0, schedule: str = "decomposed") -> bool:
    """Gather and return whether every rank's rows are right."""
    mine = torch.full((rows, 1000), value + group.rank())
    whole = fusedtp.all_gather(mine, group=group, schedule=schedule).view(group.size(), -1)
    return all(bool((each == value + rank).all()) for rank, each in enumerate(whole))


def small(group: ProcessGroup, seconds: float) -> None:
    """Make a workspace that has been used and fits a few rows."""
    fusedtp.set_timeout(110.0)
    fusedtp.destroy(group)
    assert gather(group, 3)
    fusedtp.set_timeout(seconds, group)


def refused(group: ProcessGroup, rows: int, value: float = 1.0, schedule: str = "decomposed") -> str:
    try:
        assert gather(group, rows, value, schedule)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_right(group: ProcessGroup) -> None:
    dist.barrier(group)
    fusedtp.set_timeout(110.0)
    fusedtp.destroy(group)
    assert gather(group, LARGE)


@contextlib.contextmanager
def a_real_interruption(condition: Any) -> Iterator[None]:
    """Send SIGINT as soon as `condition`, polled from a thread, holds."""

    def strike() -> None:
        until(condition)
        signal_of_posix.raise_signal(signal_of_posix.SIGINT)

    before = signal_of_posix.signal(signal_of_posix.SIGINT, signal_of_posix.default_int_handler)
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal_of_posix.signal(signal_of_posix.SIGINT, before)


def test_a_growth_that_memory_refuses_is_told_as_such() -> None:
    """Memory that makes its own exchanges, as on GPUs, finds ranks that ask for different sizes."""
    (memory,) = local_memories(1, CPU)
    ws = Workspace(memory, CPU)
    differ = ValueError("ranks ask for different arenas")
    try:
        assert not memory.exchanges
        for error, kind in ((differ, fusedtp.RanksDisagree), (Unreachable("no memory"), Unreachable)):
            with (
                running(ws, "all_gather"), mock.patch.object(memory, "allocate", side_effect=error),
                pytest.raises(kind, match=f"the workspace cannot grow: {error}"),
            ):  # fmt: skip
                ws.require(4 * ws.half_bytes, ws.slots)
    finally:
        ws.close()


def test_calls_that_a_failed_workspace_refuses_are_not_kept() -> None:
    (ws,) = (Workspace(memory, CPU) for memory in local_memories(1, CPU))
    ws.failure = PeerTimeout("all_gather", 0, 1, 1.0)
    depths = []
    for _ in range(3):
        with pytest.raises(PeerTimeout) as raised:
            ws.begin("all_gather", ws.meanings.now)
        depths.append(len(raised.traceback))
    ws.close()
    assert len(set(depths)) == 1


def interrupted_growth(group: ProcessGroup) -> str:
    """Interrupt rank 0 while it waits for its peer to grow; then rank 0 makes another call."""
    flags = Flags("interrupted growth")
    small(group, 60.0)
    if group.rank() == 0:
        ws = registry.get(group, CPU)
        with a_real_interruption(lambda: ws.host_words[signal.WAITING_FOR.value]), pytest.raises(KeyboardInterrupt):
            gather(group, LARGE)
        flags.raise_("interrupted")
        said = refused(group, LARGE, 5.0)
    else:
        flags.wait("interrupted")
        began = time.monotonic()
        said = refused(group, LARGE)
        assert time.monotonic() - began < 30
    all_right(group)
    return said


def test_an_interrupted_growth_is_not_taken_for_the_next(pool: RankPool) -> None:
    first, second = pool.run(interrupted_growth, world_size=2)
    assert first.startswith("RuntimeError: all_gather: an exception left rank 0 in the middle of the op")
    assert second.startswith("PeerTimeout: workspace growth: rank 1 waited ")
    assert "rank 0 left an op with an exception" in second


def late_growth(group: ProcessGroup) -> str:
    flags = Flags("late growth")
    small(group, 1.0)
    if group.rank() == 1:
        flags.wait("given up")
    began = time.monotonic()
    said = refused(group, LARGE)
    assert time.monotonic() - began < 20
    flags.raise_("given up")
    all_right(group)
    return said


def test_a_rank_that_comes_late_to_a_growth_does_not_wait(pool: RankPool) -> None:
    first, second = pool.run(late_growth, world_size=2)
    assert first.startswith("PeerTimeout: workspace growth: rank 0 waited ")
    assert second.startswith("PeerTimeout: workspace growth: rank 1 came too late: rank 0 had given up on rank 1 ")


def interrupted_making(group: ProcessGroup, then: str) -> bool:
    """Interrupt rank 0 between the two exchanges of its first op; rank 0 repeats the call.

    `then`: before, it calls "destroy", or is interrupted "again" while it cleans up.
    """
    fusedtp.destroy(group)
    dist.barrier(group)
    if group.rank() == 0:
        outcomes = rendezvous.StoreExchange.outcomes

        def interrupted(self: Any, mine: list[int]) -> None:
            raise KeyboardInterrupt

        rendezvous.StoreExchange.outcomes = interrupted  # type: ignore[method-assign, assignment]
        cleans_up = mock.patch.object(Workspace, "close", side_effect=KeyboardInterrupt)
        with cleans_up if then == "again" else contextlib.nullcontext(), pytest.raises(KeyboardInterrupt):
            gather(group, 3)
        rendezvous.StoreExchange.outcomes = outcomes  # type: ignore[method-assign]
        if then == "destroy":
            fusedtp.destroy(group)
    return gather(group, 3) and gather(group, 5)


@pytest.mark.parametrize("then", ["", "destroy", "again"])
def test_a_first_op_that_was_interrupted_may_be_called_again(pool: RankPool, then: str) -> None:
    assert pool.run(interrupted_making, then, world_size=3) == [True] * 3


def interrupted_once_made(group: ProcessGroup, rank: int, schedule: str) -> str:
    """Interrupt a rank when all ranks have its memory; the rank repeats its first op."""
    fusedtp.destroy(group)
    fusedtp.set_timeout(2.0, group)
    if group.rank() == rank:
        interrupted = mock.patch.object(Workspace, "_shared_hardware", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            gather(group, 3, schedule=schedule)
    said = refused(group, 3, schedule=schedule)
    dist.barrier(group)
    all_right(group)
    return said


@pytest.mark.parametrize(("rank", "schedule"), spread([0, 1], ["auto", "decomposed"]))
def test_a_first_op_that_was_interrupted_once_all_had_come(pool: RankPool, rank: int, schedule: str) -> None:
    said = pool.run(interrupted_once_made, rank, schedule, world_size=2)
    mine, other = said[rank], said[1 - rank]
    assert mine.startswith(f"PeerTimeout: making the workspace: rank {rank} waited ")
    assert f"(it has not come again since rank {rank} broke off: call fusedtp.destroy for this group" in mine
    if rank == 0:
        assert other.startswith("PeerTimeout: making the workspace: rank 1 waited ")
        assert "(its measurements have not come)" in other
    else:
        assert other.startswith(f"PeerTimeout: all_gather: rank {1 - rank} waited ")
        assert f"rank {rank} broke off while its memory was made: call fusedtp.destroy for this group" in other


def asked_again(group: ProcessGroup) -> str:
    """Let rank 1 finish while rank 0 asks for the rows again, as if a third rank had started over."""
    fusedtp.destroy(group)
    fusedtp.set_timeout(1.0, group)
    exchange, said = rendezvous.StoreExchange(group), ""
    exchange.rows([0])
    dist.barrier(group)
    if group.rank() == 1:
        exchange._tidy_up()
    dist.barrier(group)
    if group.rank() == 0:
        began = time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            exchange.rows([0])
        assert time.monotonic() - began < 20
        said = str(caught.value)
        exchange._tidy_up()
    exchange.ended()
    dist.barrier(group)
    fusedtp.set_timeout(110.0)
    return said


def test_a_rank_that_asks_once_more_does_not_wait_for_those_that_are_done(pool: RankPool) -> None:
    said, _ = pool.run(asked_again, world_size=2)
    assert re.match(r"making the workspace: rank 0 waited 1[.\d]* s for rank 1, which did not answer: ", said)
    assert ": it is lost or late, has raised an error of its own, or made no such call" in said
    assert said.endswith(" (it has not come)")


def without_threads(group: ProcessGroup) -> str:
    """Forbid threads on rank 1 while the memory of the first op is made."""
    fusedtp.destroy(group)
    fusedtp.set_timeout(2.0, group)
    limited = mock.patch.object(clock._Clock, "start", side_effect=RuntimeError("can't start new thread"))
    with limited if group.rank() == 1 else contextlib.nullcontext():
        said = refused(group, 3)
    all_right(group)
    return said


@pytest.fixture(scope="module")
def mortal() -> Iterator[RankPool]:
    """Start ranks that may be killed; at first they have no clock thread."""
    with RankPool(3, timeout=60) as ranks:
        yield ranks


def test_a_rank_without_threads_says_what_it_lacks(mortal: RankPool) -> None:
    first, second = mortal.run(without_threads, world_size=2)
    assert "rank 1 broke off while its memory was made" in first
    assert second.startswith("RuntimeError: the thread that keeps the time of waits cannot be started (can't start new")


def killed(group: ProcessGroup, growing: bool) -> str:
    """Kill the last rank when all have arrived, before the outcomes are exchanged."""
    fusedtp.destroy(group)
    if growing:
        small(group, 2.0)
    fusedtp.set_timeout(2.0, group)
    if group.rank() == group.size() - 1:
        posix._map_of = lambda *_: os.kill(os.getpid(), signal_of_posix.SIGKILL)  # type: ignore[assignment,return-value]
    return refused(group, LARGE)


@pytest.mark.parametrize("growing", [False, True])
def test_a_rank_killed_while_memory_is_made_is_named(mortal: RankPool, growing: bool) -> None:
    *said, gone = mortal.start(killed, growing).wait()
    assert isinstance(gone, RankError)
    for rank, text in enumerate(said):
        what = "workspace growth" if growing else "making the workspace"
        assert text.startswith(f"PeerTimeout: {what}: rank {rank} waited ")
        assert " s for rank 2, which did not answer" in text


def alone(group: ProcessGroup, of_all: bool) -> tuple[str, float, str]:
    """Keep rank 1 away from a first op that has a timeout set."""
    fusedtp.destroy(group)
    fusedtp.set_timeout(0.5, None if of_all else group)
    began = time.monotonic()
    with mock.patch.object(rendezvous, "NOTICE_SECONDS", 0.1), contextlib.redirect_stderr(io.StringIO()) as errors:
        said = refused(group, 3) if group.rank() == 0 else ""
    took = time.monotonic() - began
    dist.barrier(group)
    if group.rank() == 1:
        # Rank 1 comes after rank 0 has given up, and does not blame rank 0.
        said = refused(group, 3)
    fusedtp.destroy(group)
    all_right(group)
    return said, took, errors.getvalue()


@pytest.mark.parametrize("of_all", [False, True])
def test_a_budget_that_was_set_holds_for_a_first_op(pool: RankPool, of_all: bool) -> None:
    """A rank that waits long says once for which rank."""
    (said, took, told), (late, *_) = pool.run(alone, of_all, world_size=2)
    assert said.startswith("PeerTimeout: making the workspace: rank 0 waited 0.5")
    assert late.startswith("PeerTimeout: making the workspace: rank 1 came too late: rank 0 had given up on rank 1 ")
    # The process group's own timeout is longer.
    assert took < 20
    pattern = r"fusedtp: rank 0 has waited 0\.\d+ s at its first op for rank 1; it gives up after 0\.5 s .*\n"
    assert re.fullmatch(pattern, told), told


def hosts(group: ProcessGroup) -> int:
    """Start a store in this process and return its port."""
    global hosted
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True)
    return hosted.port


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's process is stopped: that of rank 0, unless torchrun or the program has put the store elsewhere."""
    group = ProcessGroup(dist.HashStore(), 0, 2)
    timeouts.set_for(group, 0.5)
    with RankPool(1, timeout=60) as host:
        store = dist.TCPStore("127.0.0.1", host.run(hosts)[0], is_master=False)
        monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: store)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
        exchange = rendezvous.StoreExchange(group)
        try:
            os.kill(host.pids[0], signal_of_posix.SIGSTOP)
            calls = exchange.rows, exchange.outcomes, lambda _: inputs.compare_given(group, {}, "parallelize")
            for call in calls:
                began = time.monotonic()
                with pytest.raises(timeouts.StoreSilent, match="and that process is stopped"):
                    call([0])
                assert time.monotonic() - began < 20
        finally:
            exchange.ended()
            os.kill(host.pids[0], signal_of_posix.SIGKILL)
