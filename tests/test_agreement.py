"""`debug=True` and TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks that mean different things are told so before an op runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fusedtp.bench.ranks import RankPool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import fusedtp
from fusedtp.calls import agreement

SECONDS = 1.0
FSDP = "[M_X, K] @ [K_X, N] -> [M_X, N]"
ODD = ": rank 1 against 2 that agree"


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


class Here:
    """One rank; `odd` on the one that is to differ."""

    def __init__(self, group: ProcessGroup, **how: Any) -> None:
        # A layer's bias is compared too, and layers draw theirs on every rank.
        torch.manual_seed(3)
        how = how or {"debug": True}
        self.options: dict[str, Any] = {"group": group, **how}
        self.how = how
        self.mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
        self.column = fusedtp.ColumnParallelLinear(6, 6, **self.options)
        self.mlp = fusedtp.ParallelMLP(6, 6, **self.options)
        style = fusedtp.FusedRowwiseParallel(output_layouts=Shard(0), **how)
        self.styled = style._apply(nn.Linear(6, 6), self.mesh)
        style = fusedtp.FusedRowwiseParallel(output_layouts=Replicate(), **how)
        self.replicated = style._apply(nn.Linear(6, 6), self.mesh)


# A call that differs on one of three ranks where `odd`, and what is said on all of them.
CALLS: dict[str, tuple[Callable[[Here, bool], object], str]] = {
    "rows to gather": (
        lambda h, odd: fusedtp.all_gather_linear(ones(3 + odd, 6), ones(5, 6), **h.options),
        f"all_gather_matmul: the ranks do not agree on sizes: (3, 3, 3) on rank 0, (4, 4, 4) on rank 1, "
        f"(3, 3, 3) on rank 2{ODD}",
    ),
    "rows to reduce": (
        lambda h, odd: fusedtp.linear_all_reduce(ones(3 + odd, 6), ones(5, 6), **h.options),
        f"matmul_all_reduce: the ranks do not agree on M: 3 on rank 0, 4 on rank 1, 3 on rank 2{ODD}",
    ),
    "columns": (
        lambda h, odd: fusedtp.linear_reduce_scatter(ones(3, 6), ones(5 + odd, 6), **h.options),
        f"the ranks do not agree on N: 5 on rank 0, 6 on rank 1, 5 on rank 2{ODD}",
    ),
    "bias": (
        lambda h, odd: fusedtp.linear_all_reduce(ones(3, 6), ones(5, 6), None if odd else ones(5), **h.options),
        f"the ranks do not agree on bias: given on rank 0, none on rank 1, given on rank 2{ODD}",
    ),
    "values of a bias": (
        lambda h, odd: fusedtp.linear_all_reduce(ones(3, 6), ones(5, 6), ones(5) + odd, **h.options),
        "the ranks do not agree on the bias's values, which have the checksum: 0x",
    ),
    "dtype": (
        lambda h, odd: fusedtp.all_gather(ones(3, 6).to(torch.float16 if odd else torch.float32), **h.options),
        "all_gather: the ranks do not agree on dtype: torch.float32 on rank 0, torch.float16 on rank 1",
    ),
    "schedule: `unfused`": (
        lambda h, odd: fusedtp.all_reduce(ones(3), schedule="unfused" if odd else "decomposed", **h.options),
        f"on schedule: decomposed on rank 0, unfused on rank 1, decomposed on rank 2{ODD}",
    ),
    "algorithm": (
        lambda h, odd: fusedtp.all_reduce(ones(3), algorithm="two_shot" if odd else "one_shot", **h.options),
        f"on algorithm: one_shot on rank 0, two_shot on rank 1, one_shot on rank 2{ODD}",
    ),
    "op": (
        lambda h, odd: (fusedtp.reduce_scatter if odd else fusedtp.all_gather)(ones(3, 6), **h.options),
        f"the ranks do not agree on the op: all_gather on rank 0, reduce_scatter on rank 1, all_gather on rank 2{ODD}",
    ),
    "which rank's weight": (
        lambda h, odd: fusedtp.fsdp_linear(ones(3, 6), ones(5 + odd, 6), **h.options),
        f"do not agree on sizes: (5, 5, 5) on rank 0, (6, 6, 6) on rank 1, (5, 5, 5) on rank 2{ODD}",
    ),
    "spec": (
        lambda h, odd: fusedtp.sharded_matmul(
            ones(3, 6 if odd else 18), ones(6, 6), "[M_X, K] @ [K, N] -> [M, N]" if odd else FSDP, h.mesh, **h.how
        ),
        "the ranks do not agree on the op",
    ),
    "the dim to gather": (
        lambda h, odd: fusedtp.all_gather_linear(ones(3, 3, 6), ones(5, 6), gather_dim=int(odd), **h.options),
        "do not agree on call: [R0_X, R1, K] @ [K, N_X] -> [R0, R1, N_X], R1=3 on rank 0, [R0, R1_X, K] @",
    ),
    "the dim to scatter": (
        lambda h, odd: fusedtp.linear_reduce_scatter(ones(3, 3, 6), ones(5, 6), scatter_dim=int(odd), **h.options),
        "do not agree on call: [R0, R1, K_X] @ [K_X, N] -> [R0_X, R1, N], R1=3 on rank 0, [R0, R1, K_X] @",
    ),
    "the shape of as many rows": (
        lambda h, odd: fusedtp.linear_all_reduce(ones(6, 2, 6) if odd else ones(3, 4, 6), ones(5, 6), **h.options),
        "do not agree on call: [R0, R1, K_X] @ [K_X, N] -> [R0, R1, N], R0=3, R1=4 on rank 0, [R0, R1, K_X] @",
    ),
    "the dim of a collective": (
        lambda h, odd: fusedtp.all_gather(ones(3, 3, 6), gather_dim=int(odd), **h.options),
        "do not agree on call: x of any x 3 x 6 on rank 0, x of 3 x any x 6 on rank 1",
    ),
    "the shape of what is reduced": (
        lambda h, odd: fusedtp.all_reduce(ones(3, 6, 2) if odd else ones(3, 4, 3), **h.options),
        "do not agree on call: x of 3 x 4 x 3 on rank 0, x of 3 x 6 x 2 on rank 1",
    ),
    "a layer": (
        lambda h, odd: h.column(ones(3 + odd, 6)),
        "all_gather_matmul: the ranks do not agree on sizes: (3, 3, 3) on rank 0",
    ),
    "layers of layers": (lambda h, odd: h.mlp(ones(3 + odd, 6)), "do not agree on sizes: (3, 3, 3) on rank 0"),
    "a style": (lambda h, odd: h.styled(ones(3 + odd, 2)), "the ranks do not agree on sizes"),
    "a style that all-reduces": (lambda h, odd: h.replicated(ones(3 + odd, 2)), "do not agree on M: 3 on rank 0, 4"),
    "the gradients that are needed": (
        lambda h, odd: h.column(ones(3, 6, requires_grad=not odd)).sum().backward(),
        "the ranks do not agree on the op",
    ),
}


def disagreed(group: ProcessGroup) -> dict[str, str]:
    """The error of each call, after one that is alike everywhere and before another."""
    fusedtp.set_timeout(60)
    here, found = Here(group), {}
    for name, (call, _) in CALLS.items():
        call(here, False)
        with pytest.raises(ValueError, match="the ranks do not agree") as caught:
            call(here, group.rank() == 1)
        call(here, False)
        found[name] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def said(pool: RankPool) -> list[dict[str, str]]:
    found: list[dict[str, str]] = pool.run(disagreed, world_size=3)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_are_told_who_differs(said: list[dict[str, str]], name: str) -> None:
    first, *others = (each[name] for each in said)
    assert CALLS[name][1] in first
    assert others == [first] * 2


def in_detail(group: ProcessGroup) -> tuple[str, bool]:
    """The switch of torch.distributed, for calls that do not ask themselves."""
    before = len(agreement._records)
    fusedtp.all_gather(ones(4, 6), group=group)
    quiet = len(agreement._records) == before
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with pytest.raises(ValueError, match="the ranks do not agree") as caught:
            fusedtp.all_gather(ones(3 + group.rank(), 6), group=group)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    return str(caught.value), quiet


def test_torchs_own_switch(pool: RankPool) -> None:
    text = "all_gather: the ranks do not agree on sizes: (3, 3) on rank 0, (4, 4) on rank 1"
    assert pool.run(in_detail, world_size=2) == [(text, True)] * 2


def one_call_fewer(group: ProcessGroup) -> tuple[Any, ...]:
    """Rank 1 leaves a call out; the others name it in time, and after `destroy` all count from one again."""
    fusedtp.set_timeout(60)
    options: dict[str, Any] = {"group": group, "debug": True}
    fusedtp.destroy(group)
    fusedtp.all_reduce(ones(3), **options)
    dist.barrier(group)
    fusedtp.set_timeout(SECONDS)
    error, elapsed = None, 0.0
    if group.rank() != 1:
        started = time.monotonic()
        with pytest.raises(fusedtp.PeerTimeout) as caught:
            fusedtp.all_reduce(ones(3), **options)
        error, elapsed = caught.value, time.monotonic() - started
    fusedtp.set_timeout(60)
    fusedtp.destroy(group)
    again = fusedtp.all_reduce(ones(3), **options).tolist()
    if error is None:
        return again, None
    return again, (error.op, error.rank, error.peer, error.seconds), str(error), elapsed


def test_a_call_left_out_is_a_timeout_naming_the_rank(pool: RankPool) -> None:
    for rank, reply in enumerate(pool.run(one_call_fewer, world_size=3)):
        assert reply[0] == [3.0] * 3
        if rank != 1:
            assert reply[1] == ("all_reduce", rank, 1, SECONDS)
            assert "comparing call 2 of group" in reply[2]
            assert SECONDS <= reply[3] < SECONDS + 5


def destroyed_unevenly(group: ProcessGroup) -> list[object]:
    """Rank 1 calls `destroy` more often than the other, and once alone before a call that both make in debug mode."""
    options: dict[str, Any] = {"group": group, "debug": True, "schedule": "unfused"}
    found: list[object] = []
    for alone in (False, True):
        fusedtp.set_timeout(60)
        fusedtp.all_reduce(ones(2), **options)
        if group.rank() == 1:
            fusedtp.destroy(group)
        if alone:
            fusedtp.set_timeout(0.5)
            with pytest.raises(fusedtp.PeerTimeout) as told:
                fusedtp.all_reduce(ones(2), **options)
            found.append(told.value.peer)
            dist.barrier(group)
        fusedtp.set_timeout(60)
        fusedtp.destroy(group)
        found.append(fusedtp.all_reduce(ones(2), **options).tolist())
        with pytest.raises(fusedtp.RanksDisagree, match="do not agree on M"):
            fusedtp.all_reduce(ones(2 + group.rank()), **options)
    return found


def test_ranks_need_not_destroy_as_often(pool: RankPool) -> None:
    expected = [[2.0, 2.0], 1, [2.0, 2.0]], [[2.0, 2.0], 0, [2.0, 2.0]]
    assert pool.run(destroyed_unevenly, world_size=2, timeout=100) == list(expected)


def late(group: ProcessGroup) -> tuple[int, str, list[float]]:
    """Rank 1 makes its call after rank 0 has given up on it: both are told, and both are in step again."""
    fusedtp.set_timeout(60)
    options: dict[str, Any] = {"group": group, "debug": True}
    fusedtp.all_reduce(ones(2), **options)
    store = dist.distributed_c10d._get_process_group_store(group)
    key = f"gave up {agreement._records[group].calls}"
    if group.rank() == 0:
        fusedtp.set_timeout(0.2)
    else:
        store.wait([key])
    with pytest.raises(fusedtp.PeerTimeout) as caught:
        fusedtp.all_reduce(ones(2), **options)
    fusedtp.set_timeout(60)
    store.set(key, "")
    out: list[float] = fusedtp.all_reduce(ones(2), **options).tolist()
    return caught.value.peer, str(caught.value), out


def test_a_late_rank_is_told_that_it_was_given_up(pool: RankPool) -> None:
    (peer, text, out), (late_peer, late_text, late_out) = pool.run(late, world_size=2)
    assert (peer, late_peer) == (1, 0)
    assert "which that rank has not made in debug mode" in text
    assert "it had given up on rank 1 in call" in late_text
    assert out == late_out == [2.0, 2.0]


def without(group: ProcessGroup, missing: int, met: bool, later: bool) -> tuple[int, str] | None:
    """Rank `missing` of three does not come; rank 0 gives up first, while the third waits too, or before it comes."""
    fusedtp.destroy(group)
    fusedtp.set_timeout(60)
    options: dict[str, Any] = {"group": group, "debug": True}
    # The workspace, for which ranks wait as long as for the group itself.
    fusedtp.all_reduce(ones(2), group=group)
    if met:
        fusedtp.all_reduce(ones(2), **options)
    store = dist.distributed_c10d._get_process_group_store(group)
    told = [f"without/{missing}/{met}/{later}/{rank}" for rank in range(3)]
    error = None
    if (rank := group.rank()) != missing:
        if later and rank:
            store.wait([told[0]])
        fusedtp.set_timeout(0.6 if rank else 0.2)
        try:
            fusedtp.all_reduce(ones(2), **options)
        except fusedtp.PeerTimeout as caught:
            error = caught.peer, str(caught)
    store.set(told[rank], "")
    store.wait(told)
    fusedtp.set_timeout(60)
    fusedtp.destroy(group)
    assert fusedtp.all_reduce(ones(2), **options).tolist() == [3.0, 3.0]
    return error


@pytest.mark.parametrize("met", [False, True], ids=["first call", "second call"])
@pytest.mark.parametrize("missing", [1, 2])
def test_all_name_the_rank_that_is_missing(pool: RankPool, missing: int, met: bool) -> None:
    said = pool.run(without, missing, met, False, world_size=3, timeout=100)
    assert said[missing] is None
    for peer, text in filter(None, said):
        assert peer == missing
        assert "which that rank has not made in debug mode" in text


@pytest.mark.parametrize("met", [False, True], ids=["first call", "second call"])
@pytest.mark.parametrize("missing", [1, 2])
def test_who_comes_later_names_it_too(pool: RankPool, missing: int, met: bool) -> None:
    said = pool.run(without, missing, met, True, world_size=3, timeout=100)
    # What rank 0 lacks first.
    assert said[missing] is None
    assert said[0][0] == 1
    peer, text = said[3 - missing]
    assert (peer, "which that rank has not made in debug mode" in text) == (missing, True)
    assert ("; rank 0 had given up on it" in text) == (met and missing == 1)
