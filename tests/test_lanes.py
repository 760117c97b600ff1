"""Lanes: ops of one group in flight at once, each in a workspace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import fsdp, lanes, locks
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.operators import ready_for
from fusedtp.kernels import signal
from fusedtp.memory.cuda import Driver
from fusedtp.op import ALL_GATHER, REDUCE_SCATTER, Op
from fusedtp.workspaces import registry, words
from fusedtp.workspaces.workspace import Workspace

from .beside import CPU, Flags, InThread, X, own_group, until
from .modelled_cuda import Cuda, Stream, running_on
from .protocol.cases import HostStreamSteps
from .virtual_gpu import build
from .virtual_ranks import local_memories, running

GATHER, REDUCE = fsdp._AllGather("auto"), fsdp._ReduceScatter("auto")

pytestmark = pytest.mark.usefixtures("destroyed_on_all_ranks")


def run(op: Op, x: Tensor, group: ProcessGroup, lane: int, schedule: str = "decomposed") -> Tensor:
    rows = x.shape[0] // (1 if op is ALL_GATHER else group.size())
    return ready_for(op, x, (rows,) * group.size(), group, schedule, lane=lane).run({"a": x})[0]


def waits(group: ProcessGroup, lane: int) -> bool:
    """Return whether this rank waits for a peer in an op of the lane."""
    return bool(registry.get(group, CPU, lane).host_words[signal.WAITING_FOR.value])


def in_flight(group: ProcessGroup) -> list[str]:
    """Let rank 0 have an op in flight in each lane, while its peer is late, and end them in another order."""
    flags, n = Flags("in flight"), group.size()
    fusedtp.destroy(group)
    x = torch.randn(4 * n, 8, generator=torch.Generator().manual_seed(group.rank()))
    ops = {lanes.ORDINARY: ALL_GATHER, lanes.GATHERS: ALL_GATHER, lanes.REDUCTIONS: REDUCE_SCATTER}
    expected = {lane: run(op, x, group, lane) for lane, op in ops.items()}
    assert torch.equal(expected[lanes.GATHERS], fusedtp.all_gather(x, group=group, schedule="unfused"))
    refused = []
    if group.rank() == 0:
        threads = {lanes.GATHERS: InThread(lambda: run(ALL_GATHER, x, group, lanes.GATHERS))}
        until(lambda: waits(group, lanes.GATHERS))
        for again in (lambda: run(ALL_GATHER, x, group, lanes.GATHERS), fusedtp.destroy):
            with pytest.raises(RuntimeError, match="is under way in thread 'the other thread'") as error:
                again()
            refused.append(str(error.value))
        threads[lanes.REDUCTIONS] = InThread(lambda: run(REDUCE_SCATTER, x, group, lanes.REDUCTIONS))
        threads[lanes.ORDINARY] = InThread(lambda: run(ALL_GATHER, x, group, lanes.ORDINARY))
        until(lambda: all(waits(group, lane) for lane in ops))
        flags.raise_("refused")
        found = {lane: thread.result() for lane, thread in threads.items()}
    else:
        flags.wait("refused")
        found = {lane: run(op, x, group, lane) for lane, op in reversed(ops.items())}
    assert all(torch.equal(found[lane], expected[lane]) for lane in ops)
    # Each lane counts its own ops.
    assert [registry.get(group, CPU, lane).epoch for lane in ops] == [2, 2, 2]
    return refused


def test_a_group_has_an_op_in_flight_in_each_lane(pool: RankPool) -> None:
    refused, others = pool.run(in_flight, world_size=2)
    assert others == []
    assert "in lane 1, FSDP2's gathers: ranks would run the two in different orders" in refused[0]
    assert refused[1].startswith("destroy: ")


def missing(group: ProcessGroup) -> str:
    """Let rank 1 miss an op in lane 1; lane 0 goes on."""
    for lane in (lanes.ORDINARY, lanes.GATHERS):
        run(ALL_GATHER, X, group, lane)
    fusedtp.set_timeout(0.5, group)
    said = ""
    if group.rank() == 0:
        with pytest.raises(fusedtp.PeerTimeout) as error:
            run(ALL_GATHER, X, group, lanes.GATHERS)
        assert (error.value.op, error.value.peer) == ("all_gather", 1)
        said = str(error.value)
        with pytest.raises(fusedtp.PeerTimeout):
            fusedtp.check(group)
    dist.barrier(group)
    fusedtp.set_timeout(110.0)
    assert run(ALL_GATHER, X, group, lanes.ORDINARY).shape[0] == 2 * X.shape[0]
    if group.rank() == 1:
        with pytest.raises(RuntimeError, match="in lane 1, FSDP2's gathers"):
            run(ALL_GATHER, X, group, lanes.GATHERS)
    fusedtp.destroy(group)
    # All lanes were given back, and are made again.
    assert not [key for key in registry._workspaces if key[0] == group.group_name]
    for lane in (lanes.GATHERS, lanes.ORDINARY):
        run(ALL_GATHER, X, group, lane)
    return said


def test_a_timeout_names_the_peer_and_the_lane(pool: RankPool) -> None:
    said, _ = pool.run(missing, world_size=2)
    assert "in lane 1, FSDP2's gathers" in said


def without_the_peer(group: ProcessGroup) -> str:
    """Let rank 0 begin a lane alone."""
    run(ALL_GATHER, X, group, lanes.ORDINARY)
    fusedtp.set_timeout(0.3)
    said = ""
    if group.rank() == 0:
        with pytest.raises(fusedtp.PeerTimeout) as error:
            run(ALL_GATHER, X, group, lanes.REDUCTIONS)
        said = str(error.value)
    dist.barrier(group)
    fusedtp.set_timeout(110.0)
    fusedtp.destroy(group)
    return said


def test_a_lane_is_made_by_all_ranks(pool: RankPool) -> None:
    said, _ = pool.run(without_the_peer, world_size=2)
    assert said.startswith("making the workspace in lane 2, FSDP2's reduce-scatters: rank 0 waited 0.3")


def gathered(group: ProcessGroup, value: float) -> tuple[Tensor, dist.Work]:
    """Start a gather of 6 values a rank."""
    out = torch.empty(6 * group.size())
    work = GATHER(out, torch.full((6,), value + group.rank()), group, async_op=True)
    assert work is not None
    return out, work


def in_order(group: ProcessGroup) -> None:
    """Let rank 0 start gathers, and reduce beside them, while its peer reduces first."""
    flags, n = Flags("in order"), 6

    def reduced(op: dist.ReduceOp, **how: bool) -> tuple[Tensor, dist.Work | None]:
        out = torch.empty(n)
        return out, REDUCE(out, torch.arange(2.0 * n) * (1 + group.rank()), group, op, **how)

    gathered(group, 0.0)[1].wait()
    reduced(dist.ReduceOp.SUM)
    if group.rank() == 0:
        started = [gathered(group, 10.0 * i) for i in range(3)]
        # A call in turn would have to wait: in another thread it is refused.
        for call in (lambda: gathered(group, 0.0), lambda: GATHER(torch.empty(12), torch.empty(n), group)):
            with pytest.raises(
                RuntimeError, match="all_gather in lane 1, FSDP2's gathers is under way in thread 'Main"
            ):
                InThread(call).result()
        flags.raise_("ahead")
    else:
        flags.wait("ahead")
    whole, _ = reduced(dist.ReduceOp.SUM)
    mean, summed = reduced(dist.ReduceOp.AVG, async_op=True)
    assert summed is not None
    assert summed.wait()
    assert torch.equal(whole, 3 * torch.arange(2.0 * n).chunk(2)[group.rank()])
    assert torch.equal(mean, whole / 2)
    if group.rank() == 0:
        assert not any(work.is_completed() for _, work in started)
        flags.raise_("reduced")
    else:
        flags.wait("reduced")
        started = [gathered(group, 10.0 * i) for i in range(3)]
    # In any order; the last first.
    for i, (out, work) in reversed(list(enumerate(started))):
        assert work.wait()
        assert out.tolist() == [10.0 * i] * 6 + [10.0 * i + 1] * 6
    with torch.inference_mode():
        out, work = gathered(group, 5.0)
        work.wait()
    assert out.is_inference()
    # In turn, after one in flight.
    _, first = gathered(group, 1.0)
    in_turn = torch.empty(12)
    lanes.run(lanes.lock(group.group_name, lanes.GATHERS), "op", lambda: in_turn.fill_(1), [in_turn], in_flight=False)
    assert first.is_completed()


def test_ops_of_a_lane_are_in_flight_in_order(pool: RankPool) -> None:
    pool.run(in_order, world_size=2)


def lost(group: ProcessGroup) -> None:
    """Let rank 1 miss a gather that is in flight on rank 0."""
    gathered(group, 0.0)[1].wait()
    fusedtp.set_timeout(0.3, group)
    if group.rank() == 0:
        started = [gathered(group, 1.0)[1] for _ in range(2)]
        for work in started:
            for _ in range(2):
                with pytest.raises(fusedtp.PeerTimeout, match=r"rank 0 waited 0.3.* for rank 1.* in lane 1") as error:
                    work.wait()
                assert error.value.peer == 1
            assert not work.is_success()
        with pytest.raises(RuntimeError, match=r"has not ended within 0\.05 s"):
            never_ends().wait(timedelta(seconds=0.05))
        gathered(group, 1.0)
    dist.barrier(group)
    fusedtp.set_timeout(110.0)
    fusedtp.destroy(group)
    assert not lanes._untold
    gathered(group, 0.0)[1].wait()


def never_ends() -> dist.Work:
    work = lanes.run(("lane", "of a test"), "op", lambda: time.sleep(1), [X], in_flight=True)
    assert work is not None
    return work


def test_an_error_is_raised_where_an_op_is_waited_for(pool: RankPool) -> None:
    pool.run(lost, world_size=2)


def test_a_thread_that_could_not_be_started_is_started_by_the_next_op(monkeypatch: pytest.MonkeyPatch) -> None:
    key, start = ("lane", "without a thread"), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        lanes.run(key, "op", lambda: None, [X], in_flight=True)
    monkeypatch.setattr(threading.Thread, "start", start)
    work = lanes.run(key, "op", lambda: None, [X], in_flight=True)
    assert work is not None
    assert work.wait(timedelta(seconds=10))


def test_a_child_has_no_ops_in_flight_of_its_parent() -> None:
    work = never_ends()
    if (child := os.fork()) == 0:
        try:
            work.wait()
        except RuntimeError as error:
            os._exit("forked" in str(error))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert work.wait()


def test_a_lane_has_a_stream_on_a_gpu() -> None:
    """An op in flight comes after the caller's earlier work and before its work after `wait`; no other order holds."""
    cuda = Cuda(2)
    _, side = cuda.streams
    tensors = [mock.Mock(device=torch.device("cuda")), mock.Mock(device=torch.device("cuda"))]

    def on(stream: Stream) -> contextlib.ExitStack:
        before, cuda.current = cuda.current, stream
        stack = contextlib.ExitStack()
        stack.callback(setattr, cuda, "current", before)
        return stack

    lanes._stream.cache_clear()
    with (
        running_on(cuda),
        mock.patch.object(torch.cuda, "Stream", return_value=side),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(Stream, "wait_stream", lambda self, other: cuda.fork(other, self), create=True),
    ):
        cuda.put("before")
        started = [
            lanes.run(("lane", "g"), "op", partial(cuda.put, f"op {i}"), tensors, in_flight=True) for i in range(2)
        ]
        cuda.put("beside")
        for i, work in enumerate(started):
            assert isinstance(work, dist.Work)
            work.wait()
            cuda.put(f"after op {i}")
        lanes.run(("lane", "g"), "op", partial(cuda.put, "in turn"), tensors, in_flight=False)
        # What the stream still does with the tensors of an op that raises goes on.
        raises = mock.Mock(device=torch.device("cuda"))
        with pytest.raises(ZeroDivisionError):
            lanes.run(("lane", "g"), "op", lambda: 1 / 0, [raises], in_flight=True)
        raises.record_stream.assert_called_with(side)
    lanes._stream.cache_clear()
    numbers = {work: number for work, number, _ in cuda.ran}
    after = {work: {name for name, number in numbers.items() if number in earlier} for work, _, earlier in cuda.ran}
    assert after["op 0"] == {"before"}
    assert after["op 1"] == {"before", "op 0"}
    assert after["beside"] == {"before"}
    assert after["after op 0"] == {"before", "op 0", "beside"}
    assert after["after op 1"] == {"before", "op 0", "op 1", "beside", "after op 0"}
    assert "after op 1" in after["in turn"]
    for each in tensors:
        each.record_stream.assert_called_with(side)


def refused(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"'fused' waits for peers inside kernels.* in lane 1, FSDP2's gathers"):
        run(ALL_GATHER, X, group, lanes.GATHERS, "fused")
    # Nothing was sent.
    assert (run(ALL_GATHER, X, group, lanes.GATHERS, "auto") == 1).all()
    assert (run(ALL_GATHER, X, group, lanes.ORDINARY, "fused") == 1).all()


def test_a_schedule_that_waits_in_kernels_is_refused(pool: RankPool) -> None:
    pool.run(refused, world_size=2)


def gone(group: ProcessGroup) -> None:
    """Destroy a group, and fork, while it has several lanes."""
    with own_group(group) as other:
        for lane in (lanes.ORDINARY, lanes.GATHERS):
            run(ALL_GATHER, X, other, lane)
        kept = [registry.get(other, CPU, lane) for lane in (lanes.ORDINARY, lanes.GATHERS)]
        name = other.group_name
        if (child := os.fork()) == 0:
            os._exit(len(registry._workspaces) + len(locks.taken))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del other
    until(lambda: not [key for key in registry._made_for if key[0] == name])
    assert all(ws.failure is not None for ws in kept)


def test_lanes_end_with_their_group(pool: RankPool) -> None:
    pool.run(gone)


class Ahead(HostStreamSteps):
    """Steps of a stream that the host runs ahead of: a wait holds the stream alone."""

    def _wait(self, word: int, value: int) -> None:
        pass

    def _beside(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@pytest.mark.parametrize("ending", [False, True])
def test_a_streams_wait_has_a_time_limit(ending: bool) -> None:
    """The clock's thread reports it, fills the halves with NaN and lets the stream go on."""
    ws, peer = (Workspace(memory, CPU, lane=lanes.GATHERS) for memory in local_memories(2, CPU))
    slot = signal.FIRST_SLOT.value
    try:
        ws.set_timeout(0.05)
        ahead = ws.steps = Ahead(ws)
        ws.begin("all_gather", ws.meanings.now)
        ahead.enter("all_gather")
        ahead.wait(1, slot)
        ahead.look()
        begin = time.monotonic()
        while not ws._report[signal.REPORT.value]:
            ahead.look(ending)
            time.sleep(0.001)
        assert ending or time.monotonic() - begin > 0.05
        with pytest.raises(fusedtp.PeerTimeout) as error:
            ws.end()
        assert error.value.peer == 1
        assert f"signal slot {slot}: epoch 1 expected, 0 seen in lane 1" in str(error.value)
        assert ws.data.view(torch.bfloat16).isnan().all()
        seen = int(ws.words[signal.SIGNALS.value + slot * 2 + 1])
        # A stream goes on; kernels and hosts do not take the word for a signal.
        for epoch in (1, 2):
            assert words.wrapping_difference(seen, epoch) >= 0
            assert not words.raised(seen, epoch)
    finally:
        ws.close()
        peer.close()


def test_a_stream_writes_and_waits_by_the_driver() -> None:
    """The stub's driver takes the calls' arguments, and compares as the driver does."""
    driver, words = Driver(ctypes.CDLL(str(build.libcuda()))), torch.zeros(2, dtype=torch.int32)
    address = words.data_ptr()
    driver.write(0, address + 4, -(2**31))
    assert words.tolist() == [0, -(2**31)]
    for value in (0, -1, -(2**31) + 1):
        driver.wait(0, address, value)
    waiting = InThread(lambda: driver.wait(0, address, 3))
    for value in (2, -1):
        driver.write(0, address, value)
        time.sleep(0.02)
        assert waiting.is_alive()
    driver.write(0, address, 3 + signal.LEAD.value)
    waiting.result()
    many = torch.zeros(2 * 600, dtype=torch.int32)
    driver.write_all(0, range(many.data_ptr(), many.data_ptr() + 8 * 600, 8), -7)
    assert many.view(600, 2).tolist() == [[-7, 0]] * 600


def test_at_most_two_ops_of_a_stream_are_in_flight() -> None:
    """A third would write to a half that a late peer may still read."""
    ws, peer = (Workspace(memory, CPU, lane=lanes.GATHERS) for memory in local_memories(2, CPU))
    ahead = ws.steps = Ahead(ws)
    words = ws.host_block.numpy()
    try:
        for _ in range(2):
            with running(ws, "all_gather"), mock.patch.object(ws, "_refuse_words"):
                ahead.enter("all_gather")
                ws.words[signal.EPOCH.value] += 1
        third = InThread(lambda: ahead._wait_for_half(ws.next_epoch()))
        time.sleep(0.05)
        assert third.is_alive()
        words[signal.ENDED.value] = 1
        third.result()
        # The stream of a device that is broken never ends an op.
        broken = mock.Mock(query=mock.Mock(side_effect=torch.AcceleratorError("device-side assert triggered")))
        words[signal.ENDED.value] = 0
        with (
            mock.patch.object(ws, "device", torch.device("cuda")),
            mock.patch.object(torch.cuda, "current_stream", return_value=broken),
            pytest.raises(torch.AcceleratorError, match="device-side assert"),
        ):
            ahead._wait_for_half(3)
    finally:
        ws.close()
        peer.close()
