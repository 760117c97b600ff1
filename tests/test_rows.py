"""Calls with new numbers of rows: right, of the same bits as calls made anew, and without an entry in any cache."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.calls import call, operators
from fusedtp.workspaces import generation, registry, workspace

from .harness import LARGE, mesh_of, on_ranks, spread
from .oracle import Case, Operands, cut
from .test_ops import bounded

SCHEDULES = ("unfused", "decomposed", "fused")
BF16, FP32 = torch.bfloat16, torch.float32
# Calls whose rows change; of the last one, features are gathered.
KINDS = {
    "gather": Case("gather", FP32),
    "several": Case("gather", BF16, widths=(16, 7), biased=(True, False)),
    "gated": Case("gather", FP32, widths=(16, 16), biased=(True, True), activation="swiglu"),
    "scatter": Case("scatter", FP32, widths=(24,), residual=True),
    "norm": Case("scatter", BF16, widths=(24,), norm="rms_norm"),
    "reduce": Case("all_reduce", FP32, widths=(24,), residual=True),
    "fsdp": Case("fsdp", FP32, how="lopsided"),
    "features": Case("gather", FP32, dim=-1, how="lopsided"),
}
HOW = ("even", "lopsided", "on the last")


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[Case, str]]:
    """Draw a call, and how it goes on: with other rows, or with other rows on one rank."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    ndim, first = draw(st.integers(1, 3)), KINDS[kind]
    dim = first.dim if first.dim < 0 else draw(st.integers(0, ndim - 1))
    lengths = st.integers(0, 9) | st.integers(10, 300)
    found = []
    for wrong in draw(st.lists(st.sampled_from(("", "", "", "rows")), min_size=4, max_size=8)):
        shape = tuple(draw(lengths if i == 0 else st.integers(1, 4)) for i in range(ndim))
        how = first.how if kind in ("fsdp", "features") else draw(st.sampled_from(HOW))
        found.append((replace(first, shape=shape, dim=dim if kind != "fsdp" else 0, how=how), wrong))
    return found


def bits(operands: Operands, schedule: str) -> list[Tensor]:
    """Return the results and gradients of a call."""
    leaves = operands.leaves()
    outs = operands.call(schedule, leaves)
    grads = torch.autograd.grad(outs, list(leaves.values()), [torch.ones_like(out) for out in outs])
    return [*outs, *grads]


def refused(case: Case, group: ProcessGroup, schedule: str) -> None:
    """Call with a row more on the last rank: every rank is told."""
    rank, n = group.rank(), group.size()
    sizes = [length + 1 for length in cut(case.shape[case.dim], n, case.how)]
    given = Operands(replace(case, shape=(2,), dim=0, how="even"), group).given
    odd = rank == n - 1
    if case.kind == "gather" and case.dim >= 0:
        sizes[rank] += odd
        x = given["x"].new_ones(sizes[rank], case.features)
        weights = [given[f"w{i}"] for i in range(len(case.widths))]
        more: dict[str, Any] = {"sizes": sizes, "activation": case.activation or None}
        function: Any = fusedtp.all_gather_linear
        weight: Any = weights if len(weights) > 1 else weights[0]
    elif case.kind in ("scatter", "all_reduce"):
        x = given["x"].new_ones(sum(sizes) + odd, given["x"].shape[-1])
        function = fusedtp.linear_reduce_scatter if case.kind == "scatter" else fusedtp.linear_all_reduce
        weight, more = given["w0"], {}
    else:
        return
    with pytest.raises(fusedtp.RanksDisagree, match="do not agree on"):
        function(x, weight, group=group, schedule=schedule, **more)
    fusedtp.destroy(group)


def in_sequence(group: ProcessGroup, schedule: str, drawn: Sequence[tuple[Case, str]]) -> None:
    """Run calls one after the other, each of which finds what the calls before have left."""
    fusedtp.set_timeout(20.0, group)
    for case, wrong in drawn:
        operands = Operands(case, group)
        told = f"{schedule}, rank {group.rank()} of {group.size()}, {case}"
        if wrong and schedule != "unfused" and group.size() > 1:
            refused(case, group, schedule)
        operands.check(schedule, told)
        found = bits(operands, schedule)
        generation.changed()
        assert all(map(torch.equal, found, bits(operands, schedule))), f"{told}: other bits when it is made anew"
        # Back to the calls before, with caches.
        assert all(map(torch.equal, found, bits(operands, schedule))), f"{told}: other bits when it is called again"


@pytest.mark.parametrize(("schedule", "world_size"), [*spread(SCHEDULES, [2, 4, 3]), ("decomposed", 2)])
@bounded(8 if LARGE else 1)
@given(data=st.data())
def test_rows_in_sequence(pool: RankPool, schedule: str, world_size: int, data: st.DataObject) -> None:
    drawn = data.draw(turns())
    pool.run(in_sequence, schedule, drawn[:3] if schedule == "fused" else drawn, world_size=world_size, timeout=400.0)


# The first numbers of rows, then uneven ones, one rank's alone, none, and with a row more on one rank.
TURNS = (((8, 3), "even", ""), ((5, 3), "lopsided", ""), ((9, 2), "on the last", "rows"), ((0, 3), "even", ""))


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [2, 3, 2]))
def test_pinned_rows(pool: RankPool, schedule: str, world_size: int) -> None:
    for kind in ("gather", "norm", "reduce") if schedule == "fused" else KINDS:
        first = KINDS[kind]
        drawn = [
            (replace(first, shape=shape, how=first.how if kind in ("fsdp", "features") else how), wrong)
            for shape, how, wrong in (TURNS[:2] if schedule == "fused" and kind == "reduce" and not LARGE else TURNS)
        ]
        pool.run(in_sequence, schedule, drawn, world_size=world_size, timeout=400.0)


def held(group: ProcessGroup, schedule: str) -> None:
    """Check a backward pass after forward passes with other rows, which share what the backward pass runs on."""
    for kind in ("gather",) if schedule == "fused" else KINDS:
        first = KINDS[kind]
        cases = [Operands(replace(first, shape=shape), group) for shape in ((8, 3), (5, 3), (300, 2))]
        generation.changed()
        leaves = [each.leaves() for each in cases]
        outs = [each.call(schedule, its) for each, its in zip(cases, leaves, strict=True)]
        grads = [
            torch.autograd.grad(made, list(its.values()), [torch.ones_like(out) for out in made])
            for its, made in zip(leaves, outs, strict=True)
        ]
        for each, made, found in zip(cases, outs, grads, strict=True):
            generation.changed()
            assert all(map(torch.equal, [*made, *found], bits(each, schedule))), f"{kind}, {each.case}"


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [2, 3, 2]))
def test_backward_after_other_rows(pool: RankPool, schedule: str, world_size: int) -> None:
    pool.run(held, schedule, world_size=world_size, timeout=200.0)


def exchanged(group: ProcessGroup, schedule: str, rows: Sequence[int]) -> None:
    """Check collectives of more numbers of rows than are kept, some of them again. Sums of integers are exact."""
    rank, n, random = group.rank(), group.size(), torch.Generator().manual_seed(5)
    options: dict[str, Any] = {"group": group, "schedule": schedule}
    for length in rows:
        sizes = [0 if rank == length % n else length + 2 * rank for rank in range(n)] if length else [0] * n
        given = torch.randint(-9, 10, (n, sum(sizes), 6), generator=random).float()
        total, mine = given.sum(0), given[0].split(sizes)[rank].clone().requires_grad_()
        whole = fusedtp.all_gather(mine, sizes=sizes, **options)
        assert torch.equal(whole, given[0]), f"all_gather of {sizes}"
        (grad,) = torch.autograd.grad(whole, mine, given[rank])
        assert torch.equal(grad, total.split(sizes)[rank]), f"gradient of all_gather of {sizes}"
        term = given[rank].clone().requires_grad_()
        part = fusedtp.reduce_scatter(term, sizes=sizes, **options)
        assert torch.equal(part, total.split(sizes)[rank]), f"reduce_scatter of {sizes}"
        (grad,) = torch.autograd.grad(part, term, given[0].split(sizes)[rank])
        assert torch.equal(grad, given[0]), f"gradient of reduce_scatter of {sizes}"
        assert torch.equal(fusedtp.all_reduce(given[rank], **options), total), f"all_reduce of {sizes}"


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [2, 3]))
def test_collectives_of_many_rows(pool: RankPool, schedule: str, world_size: int) -> None:
    # The long ones are summed in two steps.
    long, few = (300, 3) if schedule == "fused" else (40_000, 12)
    pool.run(exchanged, schedule, (5, 3, long, 0, 5, *range(1, few), long, 5), world_size=world_size, timeout=200.0)


# Plans by bytes, and their parts, are kept for so many lengths.
MOST_PLANS = 128


def entries() -> dict[str, int]:
    """Return the number of entries of every cache of the package and of the workspaces."""
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("fusedtp"):
            for key, each in vars(module).items():
                if isinstance(each, functools._lru_cache_wrapper):
                    if (each.cache_info().maxsize or MOST_PLANS + 1) > MOST_PLANS:
                        found[f"{name}.{key}"] = each.cache_info().currsize
                elif isinstance(each, dict) and not key.startswith("__"):
                    found[f"{name}.{key}"] = len(each)
                with suppress(TypeError):
                    if key == "_ready":
                        found[f"{name}.{key}"] = sum(map(len, each.values()))
    for i, ws in enumerate(registry._workspaces.values()):
        found |= {f"workspace {i}.{key}": len(each) for key, each in vars(ws).items() if isinstance(each, dict)}
        found[f"workspace {i}.meanings"] = len(ws.meanings._by_fingerprint)
    return found


def few(group: ProcessGroup, schedule: str) -> dict[str, tuple[int, int]]:
    """Make few new numbers of rows, where fewer are kept."""
    with (
        mock.patch.object(call, "MAX_ROWS", 1), mock.patch.object(operators, "MAX_ROWS", 1),
        mock.patch.object(workspace, "_MAX_TABLES", 2),
    ):  # fmt: skip
        return many(group, schedule, 2)


# Views are dropped all at once: here, at every other one.
@mock.patch.object(workspace, "_MAX_VIEWS", 1)
def many(group: ProcessGroup, schedule: str, count: int) -> dict[str, tuple[int, int]]:
    """Return the caches that `count` new numbers of rows have changed, with the entries before and after."""
    rank, n, w = group.rank(), group.size(), torch.ones(4, 6, requires_grad=True)
    options: dict[str, Any] = {"group": group, "schedule": schedule}
    mesh = mesh_of(group)

    def run(rows: int) -> None:
        sizes = (rows, *(rows + 3,) * (n - 1))
        for collective, length, more in (
            (fusedtp.all_gather, sizes[rank], {"sizes": sizes}),
            (fusedtp.reduce_scatter, sum(sizes), {"sizes": sizes}),
            (fusedtp.all_reduce, rows, {}),
            (fusedtp.all_reduce, rows, {"order": "tree"} if schedule == "fused" else {}),
        ):
            collective(torch.ones(length, 6, requires_grad=True), **options, **more).sum().backward()
        x = torch.ones(rows, 6, requires_grad=True)
        spec, lengths = "[M_{tp}, K] @ [K, N_{tp}] -> [M, N_{tp}]", {"M": (rows,) * n, "N": 4 * n}
        fusedtp.sharded_matmul(x, w.t(), spec, mesh, sizes=lengths, schedule=schedule).sum().backward()
        for function, shape, more in (
            (fusedtp.all_gather_linear, (sizes[rank], 6), {"sizes": sizes}),
            (fusedtp.all_gather_linear, (rows, 2, 6), {}),
            (fusedtp.linear_reduce_scatter, (sum(sizes), 6), {"sizes": sizes}),
            (fusedtp.linear_reduce_scatter, (2, rows, 6), {"scatter_dim": 1}),
            (fusedtp.linear_all_reduce, (rows, 6), {}),
            (fusedtp.fsdp_linear, (rows + rank, 6), {}),
        ):
            function(torch.ones(shape, requires_grad=True), w, **options, **more).sum().backward()

    # Even numbers, of the same size classes as the odd ones and more than are kept; the largest first, for its memory.
    for rows in (42 + 2 * count, *range(42, 42 + 2 * count, 2)):
        run(rows)
    gc.collect()
    before = entries()
    for rows in range(41, 41 + 2 * count, 2):
        run(rows)
    # A plan by bytes is each call's own, and such a call refers to itself.
    gc.collect()
    after = entries()
    return {name: (before.get(name, 0), number) for name, number in after.items() if number != before.get(name, 0)}


@pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
def test_new_rows_leave_nothing_behind(pool: RankPool, schedule: str) -> None:
    if LARGE or schedule == "auto":
        assert pool.run(many, schedule, 150 if LARGE else 40, world_size=2) == [{}, {}]
    else:
        assert pool.run(few, schedule, world_size=2) == [{}, {}]


@on_ranks(1)
def test_as_many_are_kept_as_is_said(group: ProcessGroup) -> None:
    """MAX_ROWS numbers of rows in turn are found again, also where each call plans for itself."""
    w, made = torch.ones(8, 8), mock.Mock()
    own = call.Call.__init__

    def counted(self: call.Call, *given: Any) -> None:
        made()
        own(self, *given)

    with mock.patch.object(call.Call, "__init__", counted):
        for expected in (call.MAX_ROWS, 0):
            made.reset_mock()
            for rows in range(101, 101 + call.MAX_ROWS):
                fusedtp.linear_all_reduce(torch.ones(rows, 8), w, order="tree", group=group)
            assert made.call_count == expected


def shared(group: ProcessGroup) -> None:
    """Check that calls that differ in their rows share what does not depend on them, and others do not."""
    rank, n, w = group.rank(), group.size(), torch.ones(4, 6)
    # Makes the memory, which drops the calls before.
    fusedtp.all_gather(torch.ones(1, 1), group=group, schedule="decomposed")

    def found(x: Tensor, **more: Any) -> call.Call:
        before = dict(call._calls)
        fusedtp.all_gather_linear(x, w, group=group, schedule="decomposed", **more)
        (new,) = {id(each): each for key, each in call._calls.items() if key not in before}.values()
        return new

    first, other = found(torch.ones(5, 6)), found(torch.ones(6, 6))
    assert other.first is first.first
    assert found(torch.ones(2 + rank, 6), sizes=tuple(range(2, 2 + n))).first is first.first
    assert found(torch.ones(3, 5, 6)).first is not first.first
    # Checks of rows are made at every call.
    options: dict[str, Any] = {"group": group, "schedule": "decomposed"}
    for rows in (4, 6):
        fusedtp.linear_all_reduce(torch.ones(rows, 6), w, residual=torch.ones(rows, 4), **options)
        with pytest.raises(ValueError, match="residual must have the result's shape"):
            fusedtp.linear_all_reduce(torch.ones(rows + 1, 6), w, residual=torch.ones(rows, 4), **options)
    for sizes in ((5, 5), (4,) * (n + 1), (-1, 5)):
        with pytest.raises(ValueError, match="sizes"):
            fusedtp.all_gather_linear(torch.ones((3, 4)[rank], 6), w, sizes=sizes, **options)


def test_calls_of_other_rows_are_one_call(pool: RankPool) -> None:
    pool.run(shared, world_size=2)
