"""Workspaces: contents, growth, what remains of them, and where none is possible."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import time
import warnings
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.choose import dispatch
from fusedtp.kernels import signal
from fusedtp.workspaces import clock, decisions, registry
from fusedtp.workspaces.workspace import Workspace

from .beside import CPU, arenas, mappings
from .harness import last_path
from .soak import interruptions
from .virtual_ranks import local_memories, running

# Tests here destroy every group on some ranks only.
pytestmark = pytest.mark.usefixtures("destroyed_on_all_ranks")


def life(group: ProcessGroup) -> None:
    fusedtp.destroy()
    # Exceptions of other tests keep memory mapped until a collection.
    gc.collect()
    shm = os.listdir("/dev/shm")
    x = torch.randn(8, 8)
    fusedtp.all_reduce(x, group=group, schedule="decomposed")
    ws = registry.get(group, CPU)
    first = ws.half_bytes
    big = torch.ones(512, 1024)
    whole = fusedtp.all_gather(big, group=group, schedule="decomposed")
    # The arena's file refuses to change its size, even for its owner.
    try:
        os.ftruncate(arenas()[0], 1)
        sealed = False
    except OSError as error:
        sealed = error.errno == errno.EPERM
    grown, epoch = ws.half_bytes, ws.epoch
    maps = mappings()
    fusedtp.destroy(group)
    after = mappings()
    # The workspace is made again, with every rank taking part.
    again = fusedtp.all_reduce(torch.ones(3), group=group, schedule="decomposed")
    fusedtp.destroy()
    assert bool((whole == 1).all())
    assert again.tolist() == [group.size()] * 3
    # An arena has its own rank's rows, which the peers read there.
    assert 3 * 512 * 1024 * 4 > grown >= 512 * 1024 * 4 > first
    assert epoch == 2  # growing kept the count
    assert sealed
    assert (maps, after, arenas()) == (3, 0, [])
    assert os.listdir("/dev/shm") == shm


def test_posix_arenas_grow_are_sealed_and_leave_nothing(pool: RankPool) -> None:
    pool.run(life, world_size=3)


def refused_on_one(group: ProcessGroup, lacks: str) -> tuple[str, str, list[str], list[int]]:
    """Put rank 1 on another machine, or without descriptors. Return the schedule of `auto`, the error of `decomposed`,
    the warnings and the descriptors left; afterwards the group works again.
    """
    from fusedtp.memory import posix

    def none_left(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    fusedtp.destroy()
    machine, x, weight = posix._machine, torch.randn(4, 6), torch.randn(5, 6)
    there = machine()[0] ^ 1, machine()[1]
    change = {
        "the machine": mock.patch.object(posix, "_machine", return_value=there),
        "descriptors": mock.patch.object(os, "memfd_create", none_left),
    }[lacks]
    with warnings.catch_warnings(record=True) as said, change if group.rank() == 1 else contextlib.nullcontext():
        warnings.simplefilter("always")
        outs = [fusedtp.all_gather_linear(x, weight, group=group) for _ in range(2)]
        path = last_path()
        with pytest.raises(registry.Unreachable) as refused:
            fusedtp.all_gather_linear(x, weight, group=group, schedule="decomposed")
    begin = 4 * group.rank()
    assert all(bool(torch.allclose(out[begin : begin + 4], x @ weight.t())) for out in outs)
    fusedtp.destroy()
    left = arenas()
    assert fusedtp.all_reduce(torch.ones(3), group=group, schedule="decomposed").tolist() == [3.0] * 3
    fusedtp.destroy()
    return path.schedule, str(refused.value), [str(each.message) for each in said], left


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        (
            "the machine",
            "rank 0 cannot map the memory of rank 1: they are on different machines: use schedule 'unfused' between "
            "machines",
        ),
        ("descriptors", "its process has no file descriptor left: raise the limit, ulimit -n"),
    ],
)
def test_memory_that_one_rank_cannot_share_is_told_all_once(pool: RankPool, lacks: str, why: str) -> None:
    replies = pool.run(refused_on_one, lacks, world_size=3)
    refusals = {refused for _, refused, _, _ in replies}
    for schedule, refused, said, left in replies:
        assert schedule == "unfused"
        assert why in refused
        assert len(said) == 1
        assert refused in said[0]
        assert left == []
    assert len(refusals) == 1


def unlike(group: ProcessGroup) -> list[str]:
    """Let both ranks grow by different amounts; then one grows while the other destroys."""
    fusedtp.destroy(group)
    said = []

    def gather(rows: int) -> bool:
        out = fusedtp.all_gather(torch.full((rows, 1000), float(rows)), group=group, schedule="decomposed")
        return bool((out == rows).all())

    assert gather(3)
    for _ in range(2):
        with pytest.raises(fusedtp.RanksDisagree, match="do not agree") as differs:
            gather((200, 400)[group.rank()])
        said.append(str(differs.value))
        assert (differs.value.op, differs.value.rank) == ("all_gather", group.rank())
        assert [meant is not None for meant in differs.value.meant] == [rank == group.rank() for rank in range(2)]
        # No rank has sent anything of the op: they go on with their memory, or grow alike.
        assert gather(3)
    assert gather(50)
    if group.rank() == 1:
        fusedtp.destroy(group)
    else:
        with pytest.raises(fusedtp.PeerTimeout) as caught:
            gather(600)
        assert caught.value.peer == 1
        said.append(str(caught.value))
        fusedtp.destroy(group)
    # Rank 1 waits in this call.
    assert gather(600)
    return said


def test_ranks_whose_arenas_differ_are_told(pool: RankPool) -> None:
    (first, second, left), others = pool.run(unlike, world_size=2)
    assert others == [first, second]
    for said, epoch in ((first, 1), (second, 2)):
        assert said.startswith("the workspace cannot grow: the ranks do not agree on the bytes of an arena: ")
        assert f"from epoch {epoch} on rank 0, " in said
        assert f"from epoch {epoch} on rank 1: " in said
    assert "rank 1 has called fusedtp.destroy: call fusedtp.destroy for this group on every rank" in left


def grows_alone(group: ProcessGroup, other_op: bool) -> tuple[str, float]:
    """Let rank 0 grow while rank 1 calls nothing, or an op that fits."""
    fusedtp.destroy(group)
    fits, grows = torch.ones(3, 3), torch.ones(600, 1000)
    fusedtp.all_gather(fits, group=group, schedule="decomposed")
    # Both ranks are here before the short timeout is set.
    dist.barrier(group)
    fusedtp.set_timeout(1.0, group)
    begin, said = time.monotonic(), ""
    if group.rank() == 0 or other_op:
        kind = fusedtp.RanksDisagree if other_op else fusedtp.PeerTimeout
        with pytest.raises(kind) as caught:
            fusedtp.all_gather(grows if group.rank() == 0 else fits, group=group, schedule="decomposed")
        assert other_op or caught.value.peer == 1
        said = str(caught.value)
    seconds = time.monotonic() - begin
    dist.barrier(group)
    fusedtp.destroy(group)
    fusedtp.set_timeout(110.0)
    whole = fusedtp.all_gather(grows, group=group, schedule="decomposed")
    assert whole.shape[0] == grows.shape[0] * group.size()
    return said, seconds


@pytest.mark.parametrize("other_op", [False, True])
def test_growth_does_not_wait_longer_than_an_op(pool: RankPool, other_op: bool) -> None:
    """The backend's own timeout is half an hour by default."""
    for rank, (said, seconds) in enumerate(pool.run(grows_alone, other_op, world_size=2, timeout=60)):
        assert seconds < 10
        if other_op:
            assert "do not agree on sizes: (600, 600) on rank 0, (3, 3) on rank 1" in said
        elif rank == 0:
            assert said.startswith("workspace growth: rank 0 waited ")
            assert "its memory to grow: step 1 expected, 0 seen" in said


def test_a_workspace_that_is_interrupted_while_it_is_made_can_be_closed() -> None:
    number = 0
    place = "somewhere"
    while place:
        number += 1
        (ws,) = (Workspace(memory, CPU, make=False) for memory in local_memories(1, CPU))
        place, raised = interruptions.before_line(number, ws.make)
        assert bool(place) == raised == (not ws.made)
        ws.close()
    assert number > 20


def many_shapes(group: ProcessGroup) -> tuple[int, int, bool]:
    """Return the number of cached decisions and tables, and whether the workspace goes with `destroy`."""
    fusedtp.destroy(group)
    with mock.patch.object(decisions, "_MAX_DECISIONS", 4):
        for rows in (*range(1, 9), *range(1, 9)):
            out = fusedtp.all_gather(torch.ones(rows, 2), group=group)
            assert out.shape == (rows * group.size(), 2)
    ws = registry.get(group, CPU)
    for length in range(3000):
        assert ws.table((length,)).tolist() == [0, length]
    num_decisions, num_tables, there = len(dispatch._paths.of(ws)), len(ws._tables), ref(ws)
    assert ws in dispatch._shared
    fusedtp.destroy(group)
    del ws
    gc.collect()
    return num_decisions, num_tables, there() is None


def test_decisions_and_tables_of_shapes_do_not_pile_up_and_go_with_the_workspace(pool: RankPool) -> None:
    for num_decisions, num_tables, is_gone in pool.run(many_shapes, world_size=2):
        assert 1 <= num_decisions <= 4
        assert num_tables <= 1024
        assert is_gone


def test_growth_during_a_capture_is_refused() -> None:
    (ws,) = (Workspace(memory, CPU) for memory in local_memories(1, CPU))
    before = ws.half_bytes, ws.addresses
    with mock.patch.object(ws, "_capturing", return_value=True):
        with pytest.raises(RuntimeError, match=re.escape("run the same op once before capturing")), running(ws, "op"):
            ws.require(1 << 20, 100)
        ws.require(*before[:1], 1)
    assert (ws.half_bytes, ws.addresses) == before
    # Refused before anything was sent: the workspace still works, and may grow now.
    with running(ws, "op"):
        ws.require(1 << 20, 100)
    assert ws.half_bytes >= 1 << 20
    ws.close()


def test_a_program_that_calls_no_op_asks_what_was_reported(pool: RankPool) -> None:
    """A loop that replays a graph calls no op on the host: here a kernel has reported a missing peer."""
    assert pool.run(reported, world_size=2) == [(1, 0), (0, 1)]


def reported(group: ProcessGroup) -> tuple[int, int]:
    fusedtp.check(group)
    fusedtp.all_reduce(torch.ones(4), group=group, schedule="decomposed")
    fusedtp.check(group)
    fusedtp.check()
    ws, (peer,) = registry.get(group, CPU), [each for each in range(2) if each != group.rank()]
    words = ws._report[signal.REPORT.value : signal.REPORT_SEEN.value + 1]
    words[:] = [peer + 1, 3 * signal.NUM_OPS.value, 8, 7]
    found = []
    for asked in (group, None):
        with pytest.raises(fusedtp.PeerTimeout, match="signal slot 3: epoch 8 expected, 7 seen") as told:
            fusedtp.check(asked)
        found.append(told.value)
    # No further op runs either, though its peers are there.
    with pytest.raises(fusedtp.PeerTimeout) as refused:
        fusedtp.all_reduce(torch.ones(4), group=group, schedule="decomposed")
    assert str(refused.value) == str(found[0])
    dist.barrier(group)
    fusedtp.destroy(group)
    fusedtp.check(group)
    return found[0].peer, found[1].rank


def test_memory_that_a_captured_graph_uses_outlives_growth(pool: RankPool) -> None:
    assert pool.run(captured, world_size=2) == [(4, 2)] * 2


def captured(group: ProcessGroup) -> tuple[int, int]:
    # The number of mapped arenas after growth, with a capture before it and without one.
    seen = []
    for graph in (True, False):
        fusedtp.destroy(group)
        gc.collect()
        others = mappings()
        ws = registry.get(group, CPU)
        # As on a GPU, where graphs are captured.
        captures = mock.patch.multiple(
            ws, _on_host=not graph, _capturing=mock.Mock(return_value=graph), _turns=mock.Mock()
        )
        with captures, running(ws, "op"):
            table = ws.table((1,) * group.size())
        old = ws._arena
        assert old is not None
        ws.require(1 << 20, 100)
        seen.append(mappings() - others)
        if graph:
            # As a replay would.
            assert old.tensors[1 - group.rank()].sum() >= 0
            assert any(each is table for each in ws._captured)
        fusedtp.destroy(group)
        del old
        assert mappings() == others
    return seen[0], seen[1]


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Return a workspace in host memory that takes itself for one on a GPU."""
    (ws,) = (Workspace(memory, CPU) for memory in local_memories(1, CPU))
    ws.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return ws


def test_the_clock_goes_on_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for a lost peer times out by the clock; without it `destroy` would wait forever."""
    ws, driven = as_on_a_gpu(monkeypatch), []
    address = ws.host_block.data_ptr()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driven.append(address in clock._words))
    ws.close()
    assert driven == [True]
    assert address not in clock._words


def test_the_host_asks_for_the_epoch_as_long_as_there_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay advances the epoch on the device alone."""
    ws = as_on_a_gpu(monkeypatch)
    assert ws.next_epoch() == 1
    ws.words[signal.EPOCH.value] = 5
    # Without a graph only the host's ops advance the epoch.
    assert ws.next_epoch() == 1
    ws._captured.append(None)
    ws._host_epoch_is_exact = False
    assert ws.next_epoch() == 6
    ws.words[signal.EPOCH.value] = 7
    assert ws.next_epoch() == 8
    ws.close()
