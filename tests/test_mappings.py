"""An arena is mapped exactly as long as anything refers to it; it goes with its group, whoever destroys the group."""

from __future__ import annotations

import gc
import operator
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import signal
from fusedtp.workspaces import registry

from .beside import CPU, X, mappings

pytestmark = pytest.mark.usefixtures("destroyed_on_all_ranks")


def reduce(group: ProcessGroup) -> bool:
    return bool((fusedtp.all_reduce(X, group=group, schedule="decomposed") == group.size()).all())


def locals_of(error: BaseException) -> list[torch.Tensor]:
    """Return every tensor that a traceback with locals would show."""
    # Skip the test's own frame, which would keep its locals.
    assert error.__traceback__ is not None
    tensors, traceback = [], error.__traceback__.tb_next
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            tensors += [value] if isinstance(value, torch.Tensor) else []
            tensors += [each for each in value if isinstance(each, torch.Tensor)] if isinstance(value, list) else []
        traceback = traceback.tb_next
    return tensors


def kept_error(group: ProcessGroup) -> bool:
    """Check that an exception of an op outlives `destroy`, with tensors among its locals."""
    fusedtp.destroy()
    gc.collect()
    assert reduce(group)
    ws = registry.get(group, CPU)
    view = ws.view(ws.rank, 0, 8192, (16, 16), torch.float32)
    view.fill_(7)
    mine = ws._arena
    assert mine is not None
    kept, words = [*mine.tensors], ws.host_words
    if group.rank() == 0:
        fusedtp.set_timeout(1.0, group)
        with pytest.raises(fusedtp.PeerTimeout) as caught:
            reduce(group)
        fusedtp.destroy(group)
        assert "tensor(" in "".join(map(repr, locals_of(caught.value)))
        del caught
    else:
        fusedtp.destroy(group)
    # All of the memory can still be read and written.
    assert float(view.sum()) == 7 * 256
    assert all(int(each.sum()) >= 0 for each in kept)
    words[signal.BUDGET_MS.value] = 5
    # The workspace keeps the exception that it raises again.
    del view, kept, words, mine, ws
    gc.collect()
    gone = mappings() == 0
    dist.barrier(group)
    fusedtp.set_timeout(110)
    return reduce(group) and gone


def test_what_an_exception_shows_stays_mapped(pool: RankPool) -> None:
    assert pool.run(kept_error, world_size=2) == [True] * 2


def failed_in_backward(group: ProcessGroup) -> int:
    """Return the mappings left after a failed backward, once its workspace is destroyed and its error is gone."""
    fusedtp.destroy()
    gc.collect()
    others = mappings()

    def step() -> None:
        # Rank 1 needs no gradient of x, so it makes another op.
        x, weight = torch.ones(3, 6, requires_grad=group.rank() == 0), torch.ones(4, 6, requires_grad=True)
        y = fusedtp.all_gather_linear(x, weight, group=group, schedule="decomposed")
        with pytest.raises(fusedtp.RanksDisagree):
            y.sum().backward()

    step()
    fusedtp.destroy()
    gc.collect()
    return mappings() - others


def test_a_failed_backward_leaves_nothing_mapped(pool: RankPool) -> None:
    assert pool.run(failed_in_backward, world_size=2) == [0, 0]


def destroyed_by_torch(group: ProcessGroup, layers: bool) -> list[tuple[int, ...]]:
    """Return (descriptors, threads, mappings) before and after groups that only torch.distributed has destroyed."""

    def held() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings()

    fusedtp.destroy()
    ranks = dist.get_process_group_ranks(group)

    def use() -> None:
        made = dist.new_group(ranks)
        assert reduce(made)
        weight = torch.ones(2, 4, requires_grad=True)
        if layers:
            fusedtp.ParallelMLP(4, 4, group=made, schedule="decomposed")(X).sum().backward()
        y = fusedtp.all_gather_linear(X, weight, group=made, schedule="decomposed")
        assert y.shape == (4 * len(ranks), 2)
        # Only a layer keeps its group, as the layer may be used again.
        dist.barrier(made)
        dist.destroy_process_group(made)
        del made
        gc.collect()
        if not layers:
            with pytest.raises(RuntimeError, match="the process group of this call has been destroyed"):
                y.sum().backward()

    use()
    # A thread of the first group may still be ending.
    before = tuple(map(min, *(held() for _ in range(5))))
    for _ in range(2):
        use()
    deadline = time.monotonic() + 10
    while any(map(operator.gt, held(), before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [before, held()]


@pytest.mark.parametrize("layers", [False, True])
def test_groups_that_torch_destroys_leave_nothing(pool: RankPool, layers: bool) -> None:
    for before, after in pool.run(destroyed_by_torch, layers):
        assert all(map(operator.le, after, before)), (before, after)
        # DTensor's sharding caches keep the first of several equal meshes.
        assert layers or after[2] == 0


# Header words that decide, and the values written to them before a call by `fused` and by `decomposed`.
STRAY: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "ARRIVED": ((1, -1), (2**31 - 1,)), "GIVEN_UP": ((1, 2, -1), (2, 2**31 - 1)), "TICKETS": ((2,), (2,)),
    "EPOCH": ((1, -1), (5,)), "LEFT": ((1, 2, -1), (2, 2**31 - 1)), "GROWING": ((1, 2, -1), (2, 2**31 - 1)),
    "BUDGET_MS": ((1, 2, -1), (2, 2**31 - 1)), "WAITING_FOR": ((1, 2, -1), (2, 2**31 - 1)),
}  # fmt: skip


def strayed(group: ProcessGroup) -> dict[str, str]:
    """Return the outcome of a call after a stray write to a word of rank 0's header."""
    said, x = {}, torch.ones(4, 8)
    for name, by_schedule in STRAY.items():
        for schedule, values in zip(("fused", "decomposed"), by_schedule, strict=True):
            for value in values:
                fusedtp.destroy(group)
                fusedtp.set_timeout(60, group)
                fusedtp.linear_all_reduce(x, x, group=group, schedule=schedule)
                dist.barrier(group)  # no rank gives up a peer that is still in the call which makes the memory
                fusedtp.set_timeout(20 if name in ("BUDGET_MS", "WAITING_FOR") else 0.5, group)
                if group.rank() == 0:
                    registry.get(group, CPU).words[getattr(signal, name).value] = value
                try:
                    out = fusedtp.linear_all_reduce(x, x, group=group, schedule=schedule)
                    result = "right" if (out == 8 * group.size()).all() else "wrong"
                except RuntimeError as error:
                    result = f"{type(error).__name__}: {error}"
                said[f"{name} {value} {schedule}"] = result
                dist.barrier(group)
    fusedtp.set_timeout(110)
    fusedtp.destroy(group)
    assert reduce(group)
    return said


def test_a_stray_write_to_the_epoch_is_noticed(pool: RankPool) -> None:
    """The same for other words that decide: no rank returns a wrong sum."""
    said, others = pool.run(strayed, world_size=2)
    assert "wrong" not in (*said.values(), *others.values())
    for what in ("ARRIVED 1 fused", "GIVEN_UP 2 fused", "GIVEN_UP -1 fused", "TICKETS 2 decomposed"):
        assert "something else has written there" in said[what], said[what]
    assert said["BUDGET_MS -1 fused"] == said["WAITING_FOR -1 fused"] == "right"
    epoch = "RuntimeError: matmul_all_reduce: rank 0 finds epoch 5 in its memory, where its last op left 1: "
    assert said["EPOCH 5 decomposed"].startswith(epoch)
    assert "PeerTimeout: matmul_all_reduce: rank 1 waited " in others["EPOCH 5 decomposed"]
    assert "rank 0 left an op with an exception" in others["EPOCH 5 decomposed"]
