"""Interruptions, forks and lone destroys: left-over data is never used, and each rank is told which rank left."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal as signal_of_posix
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from types import FrameType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, TensorDataset

import fusedtp
from fusedtp import groups
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import signal
from fusedtp.schedules import decomposed, fused
from fusedtp.workspaces import clock, registry, timeouts

from .beside import CPU, Flags, X, own_group, until


def interrupted(group: ProcessGroup, schedule: str) -> tuple[str, str, float]:
    """Interrupt rank 0 in the middle of an op, after the others have its part; they finish without it."""
    fusedtp.destroy(group)

    def reduce() -> torch.Tensor:
        return fusedtp.all_reduce(X, group=group, schedule=schedule, algorithm="one_shot")

    reduce()
    first, (module, what) = "", (decomposed, "_sum_into") if schedule == "decomposed" else (fused, "reduce")
    if group.rank() == 0:
        with mock.patch.object(module, what, side_effect=KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
            reduce()
    else:
        assert (reduce() == group.size()).all()
        # Kernels look at the timeout only.
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
        # At once, not after the timeout of 60 s.
        assert elapsed < 20


# Functions to interrupt inside one of our calls: the task, the call without and with a gradient, its backward, a
# collective, and the operators of a compiled graph, which run without the functions around them.
STRUCK = {
    "task": ("bound.py", "run"),
    "inference": ("call.py", "run"),
    "forward": ("autograd.py", "forward"),
    "backward": ("autograd.py", "gradients"),
    "all_gather": ("collectives.py", "all_gather"),
    "compiled inference": ("call.py", "run"),
    "compiled all_gather": ("bound.py", "run"),
}


def struck_as_it_returns(group: ProcessGroup, schedule: str, what: str) -> tuple[str, str]:
    """Interrupt rank 1 as a function of STRUCK returns: the op has ended, but rank 1 has no result. Return the outcomes
    of repeated calls on both ranks.
    """
    rank, seen, (file, function) = group.rank(), ["", ""], STRUCK[what]
    fusedtp.destroy(group)
    weight = torch.ones(1, 1, requires_grad=True)
    all_gather, linear = fusedtp.all_gather, fusedtp.all_gather_linear
    if what.startswith("compiled"):
        all_gather, linear = (torch.compile(each, backend="aot_eager") for each in (all_gather, linear))

    def call(step: int) -> list[float]:
        mine = torch.full((1, 1), 10.0 * step + rank)
        if what.endswith("all_gather"):
            return all_gather(mine, group=group, schedule=schedule).flatten().tolist()
        with torch.set_grad_enabled(not what.endswith("inference")):
            out = linear(mine.requires_grad_(), weight, group=group, schedule=schedule)
        if what == "backward":
            out.backward(mine.detach().repeat(2, 1))
            assert mine.grad is not None
            return mine.grad.flatten().tolist()
        return out.flatten().tolist()

    def right(step: int) -> list[float]:
        return [20.0 * step + 1] if what == "backward" else [10.0 * step, 10.0 * step + 1]

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code.co_name != function or not frame.f_code.co_filename.endswith(f"/{file}"):
            return None
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    call(0)
    if rank == 1:
        sys.settrace(trace)
        try:
            call(1)
            seen[0] = "returned"
        except KeyboardInterrupt:
            seen[0] = "interrupted"
        finally:
            sys.settrace(None)
    fusedtp.set_timeout(1, group)
    for step in (1, 2, 3) if rank == 0 else (1, 2):
        try:
            if (got := call(step)) != right(step):
                seen[1] = f"step {step}: {got} for {right(step)}"
        except (RuntimeError, fusedtp.PeerTimeout) as error:
            seen[1] = f"{type(error).__name__}: {error}"
            break
    fusedtp.set_timeout(110)
    dist.barrier(group)
    fusedtp.destroy(group)
    assert call(4) == right(4)
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("schedule", "what"),
    [*(("decomposed", what) for what in STRUCK), ("fused", "task"), ("fused", "compiled inference")],
)
def test_an_op_whose_result_nobody_has_is_not_taken_for_the_next(pool: RankPool, schedule: str, what: str) -> None:
    (_, first), (struck, again) = pool.run(struck_as_it_returns, schedule, what, world_size=2)
    assert struck == "interrupted"
    assert first.startswith("PeerTimeout: ")
    assert "left an op with an exception" in first
    assert again.startswith("RuntimeError: ")
    assert "an exception left rank 1 in the middle of the op" in again


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
    """Fork every rank: the child's calls are refused, and the parent goes on."""

    def reduce(schedule: str) -> torch.Tensor:
        return fusedtp.all_reduce(X, group=group, schedule=schedule)

    # The prepared calls use the parent's memory.
    layer = fusedtp.RowParallelLinear(8 * group.size(), 4, group=group, schedule="decomposed")
    x = torch.ones(group.size(), 8, requires_grad=True)
    y = layer(x)
    layer(x).sum().backward()

    def child() -> list[str]:
        texts = []
        calls = [partial(reduce, schedule) for schedule in ("decomposed", "unfused", "auto")]
        for call in (*calls, lambda: layer(x), y.sum().backward):
            try:
                call()
            except RuntimeError as error:
                texts.append(str(error))
        with contextlib.suppress(RuntimeError):
            how = ("unfused", "auto", "auto", "", 0)
            torch.ops.fusedtp.collective(X, "all_reduce", [], group.rank(), group.group_name, *how)
            texts.append("the operator ran")
        # set_timeout and destroy must not touch the parent's memory either.
        fusedtp.set_timeout(5)
        fusedtp.destroy()
        # The lock was held at the fork, and the child has no clock thread.
        word = torch.zeros(1, dtype=torch.int32)
        clock.drive(word)
        before = clock.now_ms()
        until(lambda: int(word) - before > 30)
        clock.release(word)
        return texts

    reduce("decomposed")
    ws, name = registry.get(group, CPU), str(os.getpid())
    read, write = os.pipe()
    with warnings.catch_warnings(), clock._lock:
        # Python 3.12 warns of forks with threads, which this test is about.
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
    assert ws is registry.get(group, CPU)
    assert ws.host_words[signal.BUDGET_MS.value] == ws.seconds * 1000 != 5000
    assert not ws.host_words[signal.LEFT.value]
    assert (reduce("decomposed") == group.size()).all()
    assert (reduce("unfused") == group.size()).all()
    return [text.replace(str(pid), "PID") for text in texts] if name != str(pid) else []


def test_a_fork_after_init_is_refused_and_its_parent_goes_on(pool: RankPool) -> None:
    for texts in pool.run(forked, world_size=2, timeout=100):
        assert len(texts) == 5
        # With CUDA, torch itself refuses backward in a child.
        by_torch = texts[-1].startswith("Unable to handle autograd's threading in combination with fork")
        for text in texts[:-1] if by_torch else texts:
            assert text.startswith("process PID was forked after torch.distributed was initialised")
            assert "before init_process_group, or with multiprocessing.get_context('spawn')" in text


def loads(group: ProcessGroup, start: str) -> bool:
    """Load batches in a worker of rank 0 that starts after the group's first op, with ops in between and after."""

    def reduce(schedule: str, values: torch.Tensor = X) -> torch.Tensor:
        return fusedtp.all_reduce(values, group=group, schedule=schedule)

    assert (reduce("decomposed") == group.size()).all()
    numbers = torch.arange(12.0).reshape(6, 2)
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        worker = {"num_workers": 1, "multiprocessing_context": start} if group.rank() == 0 else {}
        loader = DataLoader(TensorDataset(numbers), batch_size=2, **worker)
        sums = [reduce("fused" if number == 1 else "decomposed", batch) for number, (batch,) in enumerate(loader)]
    assert torch.equal(torch.cat(sums), group.size() * numbers)
    return bool((reduce("decomposed") == group.size()).all())


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers_start_after_the_first_op(start: str, pool: RankPool) -> None:
    assert pool.run(loads, start, world_size=2, timeout=170) == [True, True]


def test_a_fork_before_init_is_a_process_like_any_other() -> None:
    with mock.patch.object(groups, "inherited", "of before"):
        groups._after_fork()
        assert groups.inherited is None
        groups.check_fork()


def budgets_of_groups(group: ProcessGroup) -> list[float]:
    fusedtp.set_timeout(110)
    with own_group(group) as other:
        fusedtp.set_timeout(77, other)
        seen = [registry.get(each, CPU).seconds for each in (group, other)]
        fusedtp.set_timeout(88, other.group_name)
        seen += [registry.get(each, CPU).seconds for each in (group, other)]
        fusedtp.destroy(other)
        # The timeout belongs to the group, not to its memory.
        seen.append(registry.get(other, CPU).host_words[signal.BUDGET_MS.value] / 1000)
        fusedtp.set_timeout(110)
        seen += [registry.get(each, CPU).seconds for each in (group, other)]
    # Without a timeout that was set, a rank may be as late as the process group allows.
    with mock.patch.object(timeouts, "_seconds", None), own_group(group, timeout=timedelta(seconds=123)) as other:
        ws = registry.get(other, CPU)
        seen += [ws.seconds, ws.host_words[signal.BUDGET_MS.value] / 1000]
    return seen


def test_a_group_may_have_a_budget_of_its_own(pool: RankPool) -> None:
    assert pool.run(budgets_of_groups) == [[110, 77, 110, 88, 88, 110, 110, 123, 123]] * 4


def suspended(group: ProcessGroup, schedule: str) -> bool:
    """Stop both ranks for longer than the timeout while one waits for the other, and continue them one by one."""
    flags = Flags(f"suspended {schedule}")

    def reduce() -> bool:
        return bool((fusedtp.all_reduce(X, group=group, schedule=schedule) == group.size()).all())

    fusedtp.destroy(group)
    assert reduce()
    fusedtp.set_timeout(2.0, group)
    flags._store.set(f"suspended {schedule}/{group.rank()}", str(os.getpid()))
    pids = [int(flags._store.get(f"suspended {schedule}/{rank}")) for rank in range(2)]
    if group.rank() == 1:
        first, second = pids
        stop = f"sleep 0.5; kill -STOP {first} {second}; sleep 2.5; kill -CONT {first}; sleep 0.5; kill -CONT {second}"
        with subprocess.Popen(["sh", "-c", stop]):
            time.sleep(1)
    right = reduce()
    fusedtp.set_timeout(110)
    return right


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_a_suspended_job_goes_on(pool: RankPool, schedule: str) -> None:
    assert pool.run(suspended, schedule, world_size=2) == [True, True]


def of_a_part(group: ProcessGroup) -> list[str]:
    """Make a call on rank 1 alone, and another one on both, in groups of ranks 2, 3 and 0, 1 of the job."""
    pair = (2, 3) if group.rank() > 1 else (0, 1)
    made = [dist.new_group([each, each + 1]) for each in (0, 2)][group.rank() // 2]
    said, x = list[str](), torch.ones(2, 4)
    fusedtp.set_timeout(0.3, made)
    fusedtp.all_gather(x, group=made, schedule="decomposed")
    dist.barrier()
    if made.rank() == 0:
        with pytest.raises(fusedtp.PeerTimeout) as late:
            fusedtp.all_gather(x, group=made, schedule="decomposed")
        assert (late.value.peer, late.value.global_peer) == (1, pair[1])
        assert str(pickle.loads(pickle.dumps(late.value))) == str(late.value)
        said.append(str(late.value))
    dist.barrier()
    fusedtp.destroy(made)
    fusedtp.set_timeout(60, made)
    with pytest.raises(fusedtp.RanksDisagree) as unlike:
        fusedtp.all_gather(x.to(torch.bfloat16) if made.rank() else x, group=made, schedule="decomposed")
    said.append(str(unlike.value))
    dist.barrier()
    fusedtp.destroy(made)
    fusedtp.all_gather(x, group=made, schedule="decomposed")
    dist.barrier()
    if made.rank() == 1:
        fusedtp.destroy(made)
    dist.barrier()
    if made.rank() == 0:
        with pytest.raises(fusedtp.PeerTimeout) as left:
            fusedtp.all_gather(x, group=made, schedule="decomposed")
        said.append(str(left.value))
    fusedtp.destroy(made)
    dist.destroy_process_group(made)
    return said


def test_errors_name_global_ranks(pool: RankPool) -> None:
    first, _, third, fourth = pool.run(of_a_part)
    assert first[0].startswith("all_gather: rank 0 waited 0.3 s for rank 1, which")
    assert third[0].startswith("all_gather: rank 0 (global rank 2) waited 0.3 s for rank 1 (global rank 3), which")
    for text in (third[1], *fourth):
        assert "ranks are numbered in the group of global ranks [2, 3]. Call fusedtp.destroy" in text
    assert re.search(r"; rank 1 .*; ranks are numbered in the group of global ranks \[2, 3\]", third[2])
    assert "global" not in "".join(first)
