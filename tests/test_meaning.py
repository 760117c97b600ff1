"""Ranks that mean different things are told so by every schedule over shared memory; no rank gets a wrong number."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import fusedtp
from fusedtp import op, scaled
from fusedtp.bench.ranks import RankPool
from fusedtp.epilogue import Epilogue
from fusedtp.kernels import signal
from fusedtp.norms import LAYER_NORM, RMS_NORM
from fusedtp.op import Task
from fusedtp.workspaces import agreement, registry
from fusedtp.workspaces.failures import Failing
from fusedtp.workspaces.steps import HostSteps
from fusedtp.workspaces.words import fingerprint_place, store_fingerprint, store_release

from .harness import LARGE, on_gfx942, on_ranks

SECONDS = 20.0
FSDP = "[M_X, K] @ [K_X, N] -> [M_X, N]"
ODD = ": rank 1 against 2 that agree"


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


X, W = ones(3, 6), ones(5, 6)


class Here:
    """One rank, and functions whose default operands are valid."""

    def __init__(self, group: ProcessGroup, schedule: str) -> None:
        self.group, self.schedule = group, schedule
        self.options: dict[str, Any] = {"group": group, "schedule": schedule}
        self.mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
        self.column = fusedtp.ColumnParallelLinear(6, 6, **self.options)
        self.mlp = fusedtp.ParallelMLP(6, 6, **self.options)
        style = fusedtp.FusedRowwiseParallel(output_layouts=Replicate(), schedule=schedule)
        self.replicated = style._apply(nn.Linear(6, 6), self.mesh)

    def gather(self, x: Tensor = X, w: Any = W, **more: Any) -> Any:
        return fusedtp.all_gather_linear(x, w, **{**self.options, **more})

    def scatter(self, x: Tensor = X, w: Tensor = W, **more: Any) -> Any:
        return fusedtp.linear_reduce_scatter(x, w, **self.options, **more)

    def reduce(self, x: Tensor = X, w: Tensor = W, **more: Any) -> Any:
        return fusedtp.linear_all_reduce(x, w, **{**self.options, **more})

    def sharded(self, a: Tensor, spec: str) -> Tensor:
        return fusedtp.sharded_matmul(a, ones(6, 6), spec, self.mesh, schedule=self.schedule)

    def alone(self, function: Callable[..., Tensor], x: Tensor, **more: Any) -> Tensor:
        return function(x, **{**self.options, **more})

    def on_a_machine(self, of_amd: bool, *operands: Any, **more: Any) -> Any:
        with on_gfx942(of_amd):
            return self.gather(*map(scaled, operands), **more, schedule="decomposed")


all_gather, all_reduce, reduce_scatter = fusedtp.all_gather, fusedtp.all_reduce, fusedtp.reduce_scatter
# A call that differs on one of three ranks if `odd`, and the message on all ranks.
# fmt: off
CALLS: dict[str, tuple[Callable[[Here, bool], object], str]] = {
    "rows to gather": (
        lambda h, odd: h.gather(ones(3 + odd, 6)),
        f"all_gather_matmul: the ranks do not agree on sizes: (3, 3, 3) on rank 0, (4, 4, 4) on rank 1, "
        f"(3, 3, 3) on rank 2{ODD}"),
    "rows to reduce": (
        lambda h, odd: h.reduce(ones(3 + odd, 6)),
        f"matmul_all_reduce: the ranks do not agree on M: 3 on rank 0, 4 on rank 1, 3 on rank 2{ODD}"),
    "columns": (
        lambda h, odd: h.scatter(w=ones(5 + odd, 6)), f"do not agree on N: 5 on rank 0, 6 on rank 1, 5 on rank 2{ODD}"),
    "bias": (
        lambda h, odd: h.reduce(bias=None if odd else ones(5)),
        f"do not agree on bias: given on rank 0, none on rank 1, given on rank 2{ODD}"),
    "residual": (
        lambda h, odd: h.reduce(residual=None if odd else ones(3, 5)),
        f"residual: given on rank 0, none on rank 1, given on rank 2{ODD}"),
    "weights": (
        lambda h, odd: h.gather(w=(W, W) if odd else W),
        f"all_gather_matmul: the ranks do not agree on weights: 1 on rank 0, 2 on rank 1, 1 on rank 2{ODD}"),
    "dtype": (
        lambda h, odd: h.alone(all_gather, X.half() if odd else X),
        "all_gather: the ranks do not agree on dtype: torch.float32 on rank 0, torch.float16 on rank 1"),
    "dtype and rows": (
        lambda h, odd: h.alone(all_gather, ones(4, 6).half() if odd else X), "ranks do not agree on dtype:"),
    "schedule": (
        lambda h, odd: h.alone(all_reduce, ones(3), schedule="fused" if odd else "decomposed"),
        f"on schedule: decomposed on rank 0, fused on rank 1, decomposed on rank 2{ODD}"),
    "algorithm": (
        lambda h, odd: h.alone(all_reduce, ones(3), algorithm="two_shot" if odd else "one_shot"),
        f"on algorithm: one_shot on rank 0, two_shot on rank 1, one_shot on rank 2{ODD}"),
    "op": (
        lambda h, odd: h.alone(reduce_scatter if odd else all_gather, X),
        f"the ranks do not agree on the op: all_gather on rank 0, reduce_scatter on rank 1, all_gather on rank 2{ODD}"),
    "spec": (
        lambda h, odd: h.sharded(ones(3, 6 if odd else 18), "[M_X, K] @ [K, N] -> [M, N]" if odd else FSDP),
        "the ranks do not agree on the op"),
    "the dim to gather": (
        lambda h, odd: h.gather(ones(3, 3, 6), gather_dim=int(odd)),
        "do not agree on call: [R0_X, R1, K] @ [K, N_X] -> [R0, R1, N_X], R1=3 on rank 0, [R0, R1_X, K] @"),
    "the shape of as many rows": (
        lambda h, odd: h.reduce(ones(6, 2, 6) if odd else ones(3, 4, 6)),
        "do not agree on call: [R0, R1, K_X] @ [K_X, N] -> [R0, R1, N], R0=3, R1=4 on rank 0, [R0, R1, K_X] @"),
    "the dim of a collective": (
        lambda h, odd: h.alone(all_gather, ones(3, 3, 6), gather_dim=int(odd)),
        "do not agree on call: x of any x 3 x 6 on rank 0, x of 3 x any x 6 on rank 1"),
    "layers of layers": (lambda h, odd: h.mlp(ones(3 + odd, 6)), "do not agree on sizes: (3, 3, 3) on rank 0"),
    "a style that all-reduces": (lambda h, odd: h.replicated(ones(3 + odd, 2)), "do not agree on M: 3 on rank 0, 4"),
    "order": (
        lambda h, odd: h.reduce(order="rank" if odd else "any", schedule="fused"),
        "order: any on rank 0, that of ranks on rank 1"),
    "float8": (
        lambda h, odd: h.gather(scaled(X, dtype=torch.float8_e5m2 if odd else torch.float8_e4m3fn), scaled(W)),
        "do not agree on float8: torch.float8_e4m3fn on rank 0, torch.float8_e5m2 on rank 1"),
    "scales": (
        lambda h, odd: h.gather(*(scaled(each, "mxfp8" if odd else "rowwise") for each in (X, W))),
        "do not agree on scales: of rows, or of the tensor on rank 0, of blocks on rank 1"),
    # One of the recipes exchanges the largest magnitudes first.
    **{f"recipe {other}": (
        lambda h, odd, other=other: h.gather(float8=other if odd else "rowwise"),
        f"float8=rowwise on rank 0, ... float8={other} on rank 1") for other in ("rowwise_with_gw_hp", "tensorwise")},
    "machine, tensorwise": (
        lambda h, odd: h.on_a_machine(odd, float8="tensorwise"),
        "float8=tensorwise on rank 0, ... float8=tensorwise in fnuz on rank 1"),
    "machine": (
        lambda h, odd: h.on_a_machine(odd, X, W),
        "do not agree on float8: torch.float8_e4m3fn on rank 0, torch.float8_e4m3fnuz on rank 1"),
    "the gradients that are needed": (
        lambda h, odd: h.column(ones(3, 6, requires_grad=not odd)).sum().backward(), "(in backward) on rank"),
}
# fmt: on


def disagreed(group: ProcessGroup, schedule: str) -> dict[str, str]:
    """Return the error of each call, made after a call that agrees; all ranks destroy after an error."""
    fusedtp.set_timeout(SECONDS, group)
    found, here = {}, Here(group, schedule)
    # Interpreted kernels are slow, and compare one fingerprint only.
    every = list(CALLS.items())
    for name, (call, _) in every[::3] if schedule == "fused" and not LARGE else every:
        call(here, False)
        try:
            call(here, group.rank() == 1)
        except fusedtp.RanksDisagree as error:
            found[name] = str(error)
            with pytest.raises(fusedtp.RanksDisagree):
                fusedtp.all_gather(torch.ones(1, 1), group=group, schedule="decomposed")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "a number"
        fusedtp.destroy(group)
    return found


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_all_ranks_are_told_who_differs(pool: RankPool, schedule: str) -> None:
    found = pool.run(disagreed, schedule, world_size=3)
    wrong = {
        name: (said[name], expected)
        for name, (_, expected) in CALLS.items()
        for said in found
        if name in said and not all(part in said[name] for part in expected.split(" ... "))
    }
    assert not wrong
    # Advice about rows is given where rows differ first.
    assert all(("These count rows" in each) == ("agree on sizes:" in each) for said in found for each in said.values())


REDUCED = Task(op.ALL_REDUCE, {"a": (3, 4)}, torch.float32)
GATHERED = Task(op.ALL_GATHER_MATMUL, {"a": (3, 4), "b": (4, 5)}, torch.bfloat16, (3, 3))
NORMED = Epilogue(norm=RMS_NORM, norm_weight=("norm_weight",), eps=1e-6)
SUMMED = Task(op.MATMUL_ALL_REDUCE, {"a": (3, 4), "b": (4, 5)}, torch.bfloat16, epilogue=NORMED)
SCATTERED = Task(op.MATMUL_REDUCE_SCATTER, {"a": (6, 4), "b": (4, 5), "x": (3, 7)}, torch.bfloat16, (3, 3))
KEEPING = replace(GATHERED, epilogue=Epilogue(activation="silu"))
# For each field, of a task or its epilogue: a task, and another value of the field.
OTHERWISE: dict[str, tuple[Task, object]] = {
    "op": (REDUCED, op.ALL_GATHER), "shapes": (REDUCED, {"a": (3, 5)}), "dtype": (REDUCED, torch.bfloat16),
    "sizes": (GATHERED, (3, 4)), "dim": (GATHERED, 1), "transposed": (GATHERED, True), "algorithm": (REDUCED, "ring"),
    "activation": (GATHERED, "relu"), "keeps": (KEEPING, True), "bias": (SUMMED, ("bias",)),
    "residual": (SUMMED, ("residual",)), "norm_weight": (SUMMED, ("other",)), "norm_bias": (SUMMED, ("norm_bias",)),
    "float8": (GATHERED, torch.float8_e4m3fn), "in_blocks": (replace(GATHERED, float8=torch.float8_e4m3fn), True),
    "norm": (SUMMED, LAYER_NORM), "eps": (SUMMED, 1e-5), "leaves": (REDUCED, 8), "any_order": (REDUCED, True),
    "whole": (replace(GATHERED, dim=1), True), "gathers": (SCATTERED, "x"),
    "further": (replace(GATHERED, shapes={**GATHERED.shapes, "dy": (6, 7)}), (op.Product("outer", "dy"),)),
}  # fmt: skip
# Fields that may differ between ranks, and why.
OWN = {
    "keeps": "a rank keeps its products for its own gradients, and they do not travel",
    "norm_weight": "every norm has one",
    "further": "a rank may multiply what it gathers with anything of its own",
}
TASK_FIELDS = [each.name for each in fields(Task) if each.name != "epilogue"]


@pytest.mark.parametrize("name", [*TASK_FIELDS, *Epilogue._fields])
def test_every_option_of_a_task_is_compared(name: str) -> None:
    assert name in OTHERWISE, (
        f"Task.{name}: name it in `Task.agreed`, if all ranks must mean it alike, or else say in OWN why not; and give "
        "OTHERWISE a task and another value"
    )
    task, value = OTHERWISE[name]
    changed: dict[str, Any] = {name: value}
    if name in Epilogue._fields:
        changed = {"epilogue": task.epilogue._replace(**changed)}
    one, other = (agreement.fingerprint_of(each, "fused", "cpu") for each in (task, replace(task, **changed)))
    if name in OWN:
        assert one.values == other.values, f"Task.{name} is compared: take it out of OWN"
    else:
        assert one.values != other.values, f"Task.{name}: all ranks must mean it alike, name it in `Task.agreed`"
        assert one.fingerprint != other.fingerprint


def test_all_that_is_said_of_tasks_is_of_a_field() -> None:
    assert OWN.keys() <= OTHERWISE.keys() <= {*TASK_FIELDS, *Epilogue._fields}


@on_ranks(2)
def test_a_rank_that_enters_while_its_words_are_read_means_the_same(group: ProcessGroup) -> None:
    """Rank 1 gives up on rank 0. Then rank 0 enters the op between rank 1's reads of its fingerprint and its entry."""
    fusedtp.set_timeout(SECONDS, group)
    fusedtp.all_reduce(X, group=group, schedule="decomposed")
    fusedtp.set_timeout(0.2, group)
    if group.rank() == 1:
        ws, header = registry.get(group, torch.device("cpu")), Failing._header
        epoch, entry = ws.epoch + 1, signal.SIGNALS.value + signal.ENTRY_SLOT.value * 2

        def enters(self: Failing, peer: int) -> list[int]:
            first = header(self, peer)
            store_fingerprint(ws.addresses[1] + 4 * fingerprint_place(epoch, 0, 2), ws.meanings.now.fingerprint)
            store_release(ws.addresses[1] + 4 * entry, epoch)
            return [*first[:entry], *header(self, peer)[entry:]]

        with mock.patch.object(Failing, "_header", enters), pytest.raises(fusedtp.PeerTimeout, match="rank 0"):
            fusedtp.all_reduce(X, group=group, schedule="decomposed")
    dist.barrier(group)
    fusedtp.destroy(group)


def amid(group: ProcessGroup, late: int) -> tuple[bool, str]:
    """Let rank `late` still leave an op when the others make the next op, in which rank 1 differs. Return whether the
    first op is right, and the error of the second.

    The other ranks send to one peer only, so rank 1 notices in a wait, and other waits follow.
    """
    fusedtp.set_timeout(SECONDS, group)
    rank, leave = group.rank(), HostSteps.leave

    def leave_late(steps: HostSteps) -> None:
        time.sleep(1.0)
        leave(steps)

    x, w = torch.ones(6, 5), torch.ones(4, 5)
    with mock.patch.object(HostSteps, "leave", leave_late if rank == late else leave):
        y = fusedtp.linear_all_reduce(x, w, group=group, schedule="decomposed")
    call = partial(fusedtp.all_gather_linear, x, w) if rank == 1 else partial(fusedtp.all_reduce, x, algorithm="ring")
    with pytest.raises(fusedtp.RanksDisagree) as caught:
        call(group=group, schedule="fused")
    fusedtp.destroy(group)
    return torch.equal(y, torch.full((6, 4), 5.0 * group.size())), str(caught.value)


@pytest.mark.parametrize("late", [0, 2])
def test_the_op_before_is_right_on_a_rank_that_is_late(pool: RankPool, late: int) -> None:
    found = pool.run(amid, late, world_size=3)
    assert [right for right, _ in found] == [True] * 3
    assert all("rank 1 " in said for _, said in found), found


@pytest.mark.parametrize("seconds", [0.2, None])
def test_a_rank_that_has_not_come_yet_is_waited_for_a_little(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """The late rank's values are read when it comes; if it is gone, the others do not wait out their timeout."""
    monkeypatch.setattr(agreement, "GRACE_SECONDS", 0.6)
    places = [torch.zeros(agreement.TEXT_BYTES, dtype=torch.uint8) for _ in range(2)]
    agreement.say(places[0], {"M": "3"})
    if seconds is not None:
        threading.Timer(seconds, agreement.say, (places[1], {"M": "4"})).start()
    begin = time.monotonic()
    said = agreement.everyone(places.__getitem__, 2, lambda peer: False, 30.0)
    assert said == ({"M": "3"}, None if seconds is None else {"M": "4"})
    assert time.monotonic() - begin < 10


def uneven(group: ProcessGroup, schedule: str) -> list[str]:
    """Check plain tokens of a sequence-parallel style, 7 over 2 ranks, though torch takes lengths to be even; and a
    rank that must grow its memory while the other need not.
    """
    fusedtp.set_timeout(5.0, group)
    said, rank, say, look = [], group.rank(), agreement.say, HostSteps._wait_slowly

    def late(*args: Any) -> None:
        # The first rank to notice is slow to publish its values.
        time.sleep(0.1 * rank)
        say(*args)

    def looks_late(steps: HostSteps, poll: Any, src: int, slot: int, expected: int) -> None:
        # Its peer has been told that the memory cannot grow, and has called destroy.
        time.sleep(0.2 * rank * (slot == signal.GROWTH_SLOT.value))
        look(steps, poll, src, slot, expected)

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    style = fusedtp.FusedColwiseParallel(input_layouts=Shard(0), schedule=schedule)
    linear = style._apply(nn.Linear(6, 4), mesh)
    for call in (
        lambda: linear(torch.ones(4 - rank, 6)),
        lambda: fusedtp.all_gather(torch.ones(4 + 4000 * rank, 64), group=group, schedule=schedule),
        lambda: fusedtp.all_gather(torch.ones(9000 * (1 + rank), 64), group=group, schedule=schedule),
    ):
        begin = time.monotonic()
        with (
            mock.patch.object(agreement, "say", late),
            mock.patch.object(HostSteps, "_wait_slowly", looks_late),
            pytest.raises(fusedtp.RanksDisagree) as caught,
        ):
            call()
        # A kernel that waits for a growing peer notices at its timeout, and then tells the peer.
        assert time.monotonic() - begin < SECONDS
        said.append(str(caught.value))
        fusedtp.destroy(group)
        assert fusedtp.all_gather(torch.ones(2, 2), group=group, schedule=schedule).shape == (4, 2)
    return said


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_lengths_that_are_not_those_of_the_others(pool: RankPool, schedule: str) -> None:
    tokens, growth, both_grow = zip(*pool.run(uneven, schedule, world_size=2), strict=True)
    assert tokens[0] == tokens[1]
    assert "do not agree on sizes: (4, 4) on rank 0, (3, 3) on rank 1" in tokens[0]
    assert growth[0] == growth[1]
    assert "do not agree on sizes: (4, 4) on rank 0, (4004, 4004) on rank 1" in growth[0]
    assert both_grow[0] == both_grow[1]
    assert "do not agree on the bytes of an arena" in both_grow[0]


def late_gradient(group: ProcessGroup) -> str:
    """Return the error of a backward that only rank 0 makes."""
    x = torch.ones(4, 6, requires_grad=group.rank() == 0)
    y = fusedtp.all_gather_linear(x, torch.ones(5, 6), group=group, schedule="decomposed")
    fusedtp.set_timeout(0.5, group)
    if group.rank() == 1:
        return ""
    with pytest.raises(fusedtp.PeerTimeout) as caught:
        y.sum().backward()
    return str(caught.value)


@pytest.mark.usefixtures("destroyed_on_all_ranks")
def test_a_backward_that_only_one_rank_makes(pool: RankPool) -> None:
    first, _ = pool.run(late_gradient, world_size=2)
    pool.run(forget, world_size=2)
    assert "in a backward pass" in first
    assert "which rank 1 makes only where it wants the same gradients" in first


def one_call_more(group: ProcessGroup) -> list[float]:
    """Return the numbers of calls that look alike, of which rank 0 makes one twice and rank 1 stops first."""
    fusedtp.set_timeout(1.0, group)
    steps, found = ([1, 1, 2] if group.rank() == 0 else [1, 2]), []
    with pytest.raises(fusedtp.PeerTimeout) if group.rank() == 0 else contextlib.nullcontext():
        for step in steps:
            x = torch.full((3, 6), step * 10.0 ** -group.rank())
            found.append(round(float(all_reduce(x, group=group, schedule="decomposed")[0, 0]), 3))
    return found


@pytest.mark.usefixtures("destroyed_on_all_ranks")
def test_a_call_more_gives_a_number_of_two_steps(pool: RankPool) -> None:
    """A limit that docs/faults.md states."""
    found = pool.run(one_call_more, world_size=2)
    pool.run(forget, world_size=2)
    assert found == [[1.1, 1.2], [1.1, 1.2]]


def forget(group: ProcessGroup) -> None:
    fusedtp.destroy()
    fusedtp.set_timeout(110)
