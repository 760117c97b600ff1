"""A rank is killed before, between and after its signals: the others name it, in time, and leave nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusedtp.bench.ranks import RankError, RankPool
from torch.distributed import ProcessGroup

SECONDS = 2.0
VICTIM = 1
WORLD_SIZE = 3


def _call(op: str, schedule: str, group: ProcessGroup) -> Callable[[], torch.Tensor]:
    import fusedtp

    x, weight = torch.randn(66, 40), torch.randn(70, 40)
    calls = {
        "all_gather_matmul": lambda: fusedtp.all_gather_linear(x, weight, group=group, schedule=schedule),
        "matmul_reduce_scatter": lambda: fusedtp.linear_reduce_scatter(x, weight, group=group, schedule=schedule),
        "matmul_all_reduce": lambda: fusedtp.linear_all_reduce(
            x, weight, group=group, schedule=schedule, algorithm="two_shot"
        ),
        "all_reduce": lambda: fusedtp.all_reduce(x, group=group, schedule=schedule, algorithm="ring"),
    }
    return calls[op]


def _before_each_signal(schedule: str, hook: Callable[[], None]) -> None:
    # Every signal of this process, from kernels or from the host, is an exchange.
    if schedule == "fused":
        from triton._C.libtriton import ir
        from triton.runtime.interpreter import InterpreterBuilder

        atomic_rmw = InterpreterBuilder.create_atomic_rmw

        def create_atomic_rmw(self: Any, op: Any, *args: Any) -> Any:
            if op == ir.ATOMIC_OP.XCHG:
                hook()
            return atomic_rmw(self, op, *args)

        InterpreterBuilder.create_atomic_rmw = create_atomic_rmw
    else:
        from fusedtp import steps

        store_release = steps.store_release

        def store(address: int, value: int) -> None:
            hook()
            store_release(address, value)

        steps.store_release = store


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _traces() -> list[str]:
    # What is left of arenas in this process: descriptors and mappings.
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _exists(fd)]
    return [each for each in [*fds, *Path("/proc/self/maps").read_text().splitlines()] if "memfd:fusedtp" in each]


def _exists(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def outlive(group: ProcessGroup, op: str, schedule: str, when: str) -> dict[str, Any]:
    import fusedtp

    fusedtp.set_timeout(60)
    call = _call(op, schedule, group)
    signals = 0

    def count() -> None:
        nonlocal signals
        signals += 1
        if signals == fatal:
            _die()

    fatal = -1
    _before_each_signal(schedule, count)
    call()  # makes the workspace, and counts the op's signals
    per_call, signals = signals, 0
    if group.rank() == VICTIM:
        # With the long budget still: on a busy machine the victim must not give up on a survivor.
        fatal = {"before": 1, "during": 1 + per_call // 2, "after": -1}[when]
        call()
        _die()
    fusedtp.set_timeout(SECONDS)
    finished, started = 0, time.monotonic()
    try:
        for _ in range(3):
            started = time.monotonic()
            call()
            finished += 1
    except fusedtp.PeerTimeout as error:
        elapsed = time.monotonic() - started
        try:
            call()
            refused = ""
        except fusedtp.PeerTimeout as again:
            refused = str(again)
        fusedtp.destroy()
        return {
            "peer": error.peer, "rank": error.rank, "op": error.op, "text": str(error), "elapsed": elapsed,
            "finished": finished, "refused": refused, "traces": _traces(), "signals": per_call,
        }  # fmt: skip
    raise AssertionError("nobody noticed")


MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
CASES = [
    *[(op, "fused", when) for op in MATMULS for when in ("before", "during", "after")],
    ("all_reduce", "fused", "during"),
    ("matmul_reduce_scatter", "decomposed", "during"),
]


@pytest.fixture(scope="module")
def doomed() -> Any:
    # A pool of its own: it is restarted after every kill.
    with RankPool(WORLD_SIZE) as pool:
        yield pool


@pytest.mark.parametrize(("op", "schedule", "when"), CASES, ids=lambda each: str(each))
def test_survivors_name_the_dead_rank(doomed: RankPool, op: str, schedule: str, when: str) -> None:
    shm = sorted(os.listdir("/dev/shm"))
    pids = doomed.pids
    replies = doomed.start(outlive, op, schedule, when).wait(90)
    assert isinstance(replies[VICTIM], RankError)
    assert "SIGKILL" in str(replies[VICTIM])
    for rank, reply in enumerate(replies):
        if rank == VICTIM:
            continue
        assert isinstance(reply, dict), reply
        assert (reply["rank"], reply["peer"], reply["op"]) == (rank, VICTIM, op), reply["text"]
        assert reply["elapsed"] < SECONDS + 5, reply
        assert reply["refused"] == reply["text"]
        assert reply["traces"] == []
        assert re.search(f"rank {rank} waited .* for rank {VICTIM}", reply["text"])
        # A rank that has signalled everything before it died is not missed until the next call.
        assert reply["finished"] == (1 if when == "after" else 0) or when == "during", reply
    doomed.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert sorted(os.listdir("/dev/shm")) == shm
