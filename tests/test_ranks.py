"""The pool of rank processes: results, failures named without a hang, nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedtp.bench import ranks as rank_pool
from fusedtp.bench.ranks import ForkServer, NotJoined, RankError, RankPool

from .command import command


@dataclass
class Point:
    x: int


class Odd(Exception):
    """An exception that cannot be rebuilt from its arguments, so it does not survive pickling."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd one")


def summed(group, point):
    value = torch.full((1,), float(dist.get_rank(group) + point.x))
    dist.all_reduce(value, group=group)
    return Point(int(value)), dist.get_world_size(group)


def raising(group, ranks, odd=False):
    if dist.get_rank(group) in ranks:
        raise Odd(1, 2) if odd else ValueError(f"planted on {dist.get_rank(group)}")
    dist.barrier(group)


def dying(group, victim, how):
    if dist.get_rank(group) == victim:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank(group)


def stuck_on_one(group):
    while dist.get_rank(group) == 1:
        time.sleep(0.1)


def forked_from(group):
    return os.getppid()


def large(group, tensor):
    return tensor * (dist.get_rank(group) + 1)


def shared_files(group, tensor):
    """Return this rank's open or mapped files in /dev/shm, through which torch's own pickling would pass tensors.

    Semaphores are not among them: tqdm makes one, in a process that has loaded a model of transformers.
    """
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    lines = [*opened, *Path("/proc/self/maps").read_text().splitlines()]
    return [line for line in lines if "/dev/shm" in line and "/dev/shm/sem." not in line]


def gloo_workers(group):
    """Return the number of this process's groups, and of threads that run their collectives."""
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return len(dist.distributed_c10d._world.pg_map), names.count("pt_gloo_runloop")


def with_another_group(group):
    dist.barrier(dist.new_group([0, 1]))
    return gloo_workers(group)


def open_fds() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"), key=int)


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def two():
    with RankPool(2, timeout=20) as pool:
        yield pool


def test_results_by_rank_and_classes_of_this_file(two):
    assert two.run(summed, Point(1)) == [(Point(3), 2)] * 2
    assert two.run(summed, Point(5), world_size=1) == [(Point(5), 1)]
    with pytest.raises(ValueError, match="world_size is 3, the pool has 2 ranks"):
        two.run(summed, Point(0), world_size=3)


def test_one_worker_a_gloo_group():
    """Also for a group that a function makes."""
    with RankPool(2, timeout=20, gloo_workers=1) as pool:
        for groups, workers in (*pool.run(gloo_workers), *pool.run(with_another_group)):
            assert workers == groups > 0


def test_large_messages_and_nothing_in_dev_shm(two):
    tensor = torch.randn(300, 1000)
    first, second = two.run(large, tensor)
    assert torch.equal(first, tensor)
    assert torch.equal(second, 2 * tensor)
    assert two.run(shared_files, tensor) == [[], []]
    assert shared_files(None, first) == []


def test_all_ranks_raising_alike_keeps_the_pool(two):
    pids = two.pids
    with pytest.raises(RankError, match="planted on 1") as caught:
        two.run(raising, [0, 1])
    assert sorted(caught.value.failures) == [0, 1]
    assert "in raising" in caught.value.failures[0]
    assert isinstance(caught.value.__cause__, ValueError)
    assert two.pids == pids
    # An error that cannot be pickled.
    with pytest.raises(RankError, match="Odd: odd one"):
        two.run(raising, [0, 1], True)


def test_one_rank_raising_names_it_and_the_waiting_one(two):
    pids = two.pids
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        two.run(raising, [1])
    assert time.monotonic() - started < 15
    assert "ValueError: planted on 1" in caught.value.failures[1]
    # rank 0 waits in a barrier that rank 1 never enters
    assert "in raising" in caught.value.failures[0]
    assert not running(pids)
    assert two.run(summed, Point(0)) == [(Point(1), 2)] * 2


@pytest.mark.parametrize(("how", "text"), [("exit", "exited with status 3"), ("kill", "killed by SIGKILL")])
def test_dying_rank_is_reported_promptly(two, how, text):
    started = time.monotonic()
    results = two.start(dying, 1, how).wait()
    assert time.monotonic() - started < 15
    assert results[0] == 0
    assert isinstance(results[1], RankError)
    assert text in str(results[1])
    assert two.run(summed, Point(0)) == [(Point(1), 2)] * 2


def test_rank_killed_between_calls(two):
    old = two.pids
    two.kill(0)
    deadline = time.monotonic() + 10
    while two._ranks.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert two.run(summed, Point(0)) == [(Point(1), 2)] * 2
    assert not set(old) & set(two.pids)
    assert not running(old)


def test_late_rank_shows_its_stack(two):
    pids = two.pids
    with pytest.raises(RankError) as caught:
        two.run(stuck_on_one, timeout=1.0)
    assert list(caught.value.failures) == [1]
    assert "no answer within 1" in caught.value.failures[1]
    assert "in stuck_on_one" in caught.value.failures[1]
    assert not running(pids)


def test_one_call_at_a_time(two):
    pending = two.start(summed, Point(0))
    with pytest.raises(RuntimeError, match="under way"):
        two.start(summed, Point(0))
    assert pending.wait() == [(Point(1), 2)] * 2
    with pytest.raises(RuntimeError, match="waited for already"):
        pending.wait()


def test_only_module_level_functions(two):
    with pytest.raises(ValueError, match="cannot be shipped"):
        two.run(lambda group: None)


@pytest.fixture
def servers_of_the_product(monkeypatch):
    """Start servers as users do: those of `fork_servers` stand for them elsewhere, as imports take seconds."""
    monkeypatch.setattr(rank_pool, "ForkServer", ForkServer)
    monkeypatch.setattr(rank_pool, "_preload", "")


@pytest.fixture
def nothing_kept(monkeypatch):
    """Run without the fork server that the tests' fixture keeps."""
    monkeypatch.setattr(rank_pool, "_kept", None)


def test_start_up_failure_is_told():
    env = {"GLOO_SOCKET_IFNAME": "no-such-interface", rank_pool.PRELOAD: ""}
    with RankPool(1, timeout=20, env=env) as pool, pytest.raises(RankError, match=r"rank 0 \(starting\) raised"):
        pool.run(summed, Point(0))


def test_ranks_meet_where_loopback_has_no_ipv4(monkeypatch, tmp_path):
    made, absent = socket.create_server, {socket.AF_INET}

    def create(address, *, family):
        if family in absent:
            raise OSError(errno.EADDRNOTAVAIL, "of a test")
        return made(address, family=family)

    try:
        made(("::1", 0), family=socket.AF_INET6).close()
        works = contextlib.nullcontext()
    except OSError:
        works = pytest.raises(NotJoined)
    monkeypatch.setattr(socket, "create_server", create)
    with works, RankPool(2, timeout=60) as pool:
        assert pool.run(summed, Point(1)) == [(Point(3), 2)] * 2
    absent.add(socket.AF_INET6)
    said = command("sweep", "--suite", "mlp", "--shape", "64,64,64", "--world-size", 2, "--out", tmp_path, code=1)
    assert said.splitlines()[-1].startswith("ranks meet on the loopback interface, which does not answer (127.0.0.1: ")


def settled_fds() -> list[str]:
    # Garbage of other tests must not be closed meanwhile.
    gc.collect()
    seen = [open_fds()]
    while len(seen) < 2 or (seen[-1] != seen[-2] and len(seen) < 20):
        time.sleep(0.2)
        seen.append(open_fds())
    return seen[-1]


def test_ranks_are_forked_from_one_process_also_when_they_start_anew(two, servers_of_the_product, nothing_kept):
    """They leave no process and no file."""
    # The first pool opens files that stay open.
    two.run(summed, Point(0))
    before = settled_fds()
    with RankPool(2, timeout=20) as pool:
        (server,) = set(pool.run(forked_from))
        assert server != os.getpid()
        pids = pool.pids
        with pytest.raises(RankError, match="killed by SIGKILL"):
            pool.run(dying, 0, "kill")
        assert pool.run(forked_from) == [server] * 2
        assert not set(pids) & set(pool.pids)
        # If the server is killed, its ranks are too, and a new one is started.
        pids, pending = pool.pids, pool.start(stuck_on_one)
        os.kill(server, signal.SIGKILL)
        assert "killed by SIGKILL" in str(pending.wait()[1])
        while running(pids):
            time.sleep(0.01)
        (other,) = set(pool.run(forked_from))
        assert other != server
        pids = pool.pids
    assert running([server, other, *pids]) == []
    gc.collect()
    assert open_fds() == before


def has_imported(group, name):
    return name in sys.modules


def test_pools_share_what_is_kept(servers_of_the_product, monkeypatch):
    """Also the modules that it has imported, and at any width of the terminal."""
    with rank_pool.kept("zipapp"):
        with RankPool(1, timeout=20) as pool:
            (server,) = pool.run(forked_from)
            assert pool.run(has_imported, "zipapp") == [True]
        monkeypatch.setenv("COLUMNS", "77")
        with RankPool(1, timeout=20) as pool, RankPool(2, timeout=20) as other:
            assert pool.run(forked_from) + other.run(forked_from) == [server] * 3
        env = {rank_pool.PRELOAD: ""}
        with RankPool(1, timeout=20, env=env) as pool:
            assert pool.run(forked_from) != [server]
            assert pool.run(has_imported, "zipapp") == [False]
    assert running([server]) == []


def dies_once(group: dist.ProcessGroup, path: str, times: int) -> int:
    """Abort rank 1 in the first calls, as a library with a broken heap does."""
    if group.rank() == 1:
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) <= times:
            os.abort()
    dist.barrier(group=group)
    return group.rank()


def test_what_kills_a_rank_is_tried_again(tmp_path: Path) -> None:
    lines: list[str] = []
    with RankPool(2, timeout=30) as pool:
        assert pool.run_again(dies_once, str(tmp_path / "a"), 1, told=lines.append) == [0, 1]
        assert pool.run_again(dies_once, str(tmp_path / "b"), 9, told=lines.append, tries=2) is None
        with pytest.raises(RankError, match="ZeroDivisionError"):
            pool.run_again(divides_by_zero, told=lines.append)
    assert [line.partition("; ")[2] for line in lines] == [
        "ranks are started anew", "ranks are started anew", "given up after 2 tries",
    ]  # fmt: skip
    assert all(line.startswith("rank 1 died: killed by SIGABRT") for line in lines)


def divides_by_zero(group: dist.ProcessGroup) -> float:
    return 1 / 0
