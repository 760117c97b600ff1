"""The ops that the protocol is checked on, each as small as it can be while every phase of it has work to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import torch

from fusedtp.kernels.launch import Config
from fusedtp.schedules import decomposed, fused, producer
from fusedtp.schedules.forms import Prepared
from fusedtp.workspaces import registry
from fusedtp.workspaces.workspace import Workspace

from .. import direct
from ..virtual_ranks import finish, local_memories, running
from .events import Advance, Event, Kernel, Raise, Wait
from .record import Recorder

CPU = torch.device("cpu")
# Tiles of 2 x 2: the sizes below have up to two tiles, and two programs share them.
TINY = Config(block_m=2, block_n=2, block_k=2, group_m=2, programs=2, pushers=2, copy_rows=2, copy_cols=2)
COLS = 2


@dataclass
class _Group:
    """As much of a process group as the schedules look at."""

    rank: Callable[[], int]
    size: Callable[[], int]
    group_name: str = "protocol"


# One rank's op: (workspace, sizes, group).
Op = Callable[[Workspace, tuple[int, ...], _Group], object]


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _pieces(op: Op) -> Op:
    """The op with a slot a row, and a copy a row."""

    def in_pieces(ws: Workspace, sizes: tuple[int, ...], group: _Group) -> object:
        with mock.patch.object(producer, "PIECE_BYTES", 1), mock.patch.object(producer, "COPY_BYTES", 1):
            return op(ws, sizes, group)

    return in_pieces


def _run(op: str, ws: Workspace, *operands: torch.Tensor | None, **options: Any) -> object:
    with running(ws, op):
        return finish(direct.results(op, ws, *operands, **options))


def _gather(
    dim: int = 0, *, split: bool = False, strided: bool = False, kept: bool = False, by: str = "push",
    joined: bool = False,
) -> Op:  # fmt: skip
    def op(ws: Workspace, sizes: tuple[int, ...], group: _Group) -> object:
        mine, whole = sizes[ws.rank], sum(sizes)
        a = _ones(mine, COLS) if dim == 0 else _ones(COLS, mine)
        if strided:
            a = a.t().contiguous().t()
        b = _ones(COLS if dim == 0 else whole, COLS)
        more = (None, _ones(whole, 1)) if kept else ()
        with mock.patch.object(producer, "joined_rows", return_value=sum(sizes) if joined else 0):
            return _run("all_gather_matmul", ws, a, b, *more, sizes=sizes, dim=dim, split=split, producer=by)

    return op


def _scatter(dim: int = 0) -> Op:
    def op(ws: Workspace, sizes: tuple[int, ...], group: _Group) -> object:
        a, b = (_ones(sum(sizes), 1), _ones(1, COLS)) if dim == 0 else (_ones(COLS, 1), _ones(1, sum(sizes)))
        return _run("matmul_reduce_scatter", ws, a, b, sizes=sizes, dim=dim)

    return op


def _scatter_and_gather(by: str) -> Op:
    def op(ws: Workspace, sizes: tuple[int, ...], group: _Group) -> object:
        a, b, x, left = _ones(sum(sizes), 1), _ones(1, COLS), _ones(sizes[ws.rank], COLS), _ones(1, sum(sizes))
        return _run("matmul_reduce_scatter", ws, a, b, None, left, x, sizes=sizes, producer=by)

    return op


def _matmul_all_reduce(algorithm: str, *, split: bool = False) -> Op:
    return lambda ws, sizes, group: _run(
        "matmul_all_reduce", ws, _ones(sum(sizes), 1), _ones(1, COLS), algorithm=algorithm, split=split
    )


def _collective(name: str, algorithm: str, by: str = "push") -> Op:
    def op(ws: Workspace, sizes: tuple[int, ...], group: _Group) -> object:
        x = _ones(sizes[ws.rank] if name == "all_gather" else sum(sizes), COLS)
        lengths = () if name == "all_reduce" else sizes
        return _run(name, ws, x, sizes=lengths, algorithm=algorithm, producer=by)

    return op


def _host(
    name: str, *, algorithm: str = "auto", dim: int = 0, copies: bool = False, few_rows: bool = False,
    second: bool = False,
) -> Op:  # fmt: skip
    # second: with a second product, of what is gathered.
    def op(ws: Workspace, sizes: tuple[int, ...], group: _Group) -> object:
        ws.reads_peers = not copies
        whole, mine = sum(sizes), sizes[ws.rank]
        operands: tuple[torch.Tensor | None, ...]
        if name == "all_gather_matmul":
            a = _ones(mine, COLS) if dim == 0 else _ones(COLS, mine)
            operands = a, _ones(COLS if dim == 0 else whole, COLS), None, *((_ones(whole, 1),) if second else ())
        elif name == "matmul_reduce_scatter":
            a, b = (_ones(whole, 1), _ones(1, COLS)) if dim == 0 else (_ones(COLS, 1), _ones(1, whole))
            operands = a, b, None, *((_ones(1, whole), _ones(mine, COLS)) if second else ())
        elif name == "matmul_all_reduce":
            operands = _ones(whole, 1), _ones(1, COLS), None
        else:
            operands = (_ones(mine if name == "all_gather" else whole, COLS),)
        lengths = () if "all_reduce" in name else sizes
        task = direct.task_of(name, *operands, sizes=lengths, dim=dim, algorithm=algorithm)
        with mock.patch.object(decomposed, "FEW_ROWS", 256 if few_rows else 0):
            prepared = Prepared("decomposed", task, ws=ws)
        with running(ws, name):
            ws.require(prepared.half_bytes, prepared.slots)
            return prepared.go(direct.named(name, *operands))

    return op


FUSED: dict[str, Op] = {
    "gather rows": _gather(),
    "gather rows, pushed before": _gather(split=True),
    "gather rows, own through the arena": _gather(strided=True),
    "gather rows, joined": _gather(joined=True),
    "gather rows, joined, in pieces": _pieces(_gather(joined=True)),
    "gather rows, kept": _gather(kept=True),
    "gather contraction": _gather(1),
    "scatter rows": _scatter(),
    "scatter columns": _scatter(1),
    "scatter and gather": _scatter_and_gather("push"),
    "matmul one_shot": _matmul_all_reduce("one_shot"),
    "matmul two_shot": _matmul_all_reduce("two_shot"),
    "matmul one_shot, split": _matmul_all_reduce("one_shot", split=True),
    "matmul two_shot, split": _matmul_all_reduce("two_shot", split=True),
    "all_gather": _collective("all_gather", "direct"),
    "ring all_gather": _collective("all_gather", "ring"),
    "reduce_scatter": _collective("reduce_scatter", "direct"),
    "ring reduce_scatter": _collective("reduce_scatter", "ring"),
    "one_shot": _collective("all_reduce", "one_shot"),
    "two_shot": _collective("all_reduce", "two_shot"),
    "ring all_reduce": _collective("all_reduce", "ring"),
    "gather rows, in pieces": _pieces(_gather()),
}
# The producer is the copy engine: copies and signals on the side stream, kernels that only wait.
COPIED: dict[str, Op] = {
    "copied: gather rows": _gather(by="copy"),
    "copied: gather rows, joined": _gather(joined=True, by="copy"),
    "copied: gather rows, in pieces": _pieces(_gather(by="copy")),
    "copied: gather rows, own through the arena": _gather(strided=True, by="copy"),
    "copied: gather rows, kept": _gather(kept=True, by="copy"),
    "copied: gather contraction": _gather(1, by="copy"),
    "copied: scatter and gather": _scatter_and_gather("copy"),
    "copied: all_gather": _collective("all_gather", "direct", "copy"),
    "copied: reduce_scatter": _collective("reduce_scatter", "direct", "copy"),
    "copied: one_shot": _collective("all_reduce", "one_shot", "copy"),
    "copied: two_shot": _collective("all_reduce", "two_shot", "copy"),
}


def _host_ops(copies: bool) -> dict[str, Op]:
    ops = {
        "gather rows": _host("all_gather_matmul", copies=copies),
        "gather rows, few": _host("all_gather_matmul", copies=copies, few_rows=True),
        "gather contraction": _host("all_gather_matmul", dim=1, copies=copies),
        "gather rows, two matmuls": _host("all_gather_matmul", second=True, copies=copies),
        "scatter rows": _host("matmul_reduce_scatter", copies=copies),
        "scatter rows, few": _host("matmul_reduce_scatter", copies=copies, few_rows=True),
        "scatter columns": _host("matmul_reduce_scatter", dim=1, copies=copies),
        "scatter and gather": _host("matmul_reduce_scatter", second=True, copies=copies),
        "matmul one_shot": _host("matmul_all_reduce", algorithm="one_shot", copies=copies),
        "matmul two_shot": _host("matmul_all_reduce", algorithm="two_shot", copies=copies),
        "all_gather": _host("all_gather", copies=copies),
        "reduce_scatter": _host("reduce_scatter", copies=copies),
        "one_shot": _host("all_reduce", algorithm="one_shot", copies=copies),
        "two_shot": _host("all_reduce", algorithm="two_shot", copies=copies),
    }
    return {f"{'copy' if copies else 'in place'}: {name}": op for name, op in ops.items()}


COPY, IN_PLACE = _host_ops(True), _host_ops(False)
OPS = FUSED | COPIED | COPY | IN_PLACE


@contextlib.contextmanager
def virtual_ranks(world_size: int, epoch: int = 0) -> Iterator[list[Workspace]]:
    """A workspace a rank, all in this process, with tiny tiles."""
    ranks = [Workspace(memory, CPU, epoch=epoch) for memory in local_memories(world_size, CPU)]
    with (
        mock.patch.object(fused, "config_for", return_value=TINY),
        mock.patch.object(registry, "get", lambda group, device: ranks[group.rank()]),
    ):
        try:
            for ws in ranks:
                ws.set_timeout(0.05)
            yield ranks
        finally:
            for ws in ranks:
                ws.close()


def record(names: Sequence[str], sizes: tuple[int, ...], epoch: int = 0) -> list[list[list[Kernel]]]:
    """[rank][call] -> the kernels of a sequence of ops, every rank recorded alone; the first call's epoch is
    epoch + 1.
    """
    traces = []
    with virtual_ranks(len(sizes), epoch) as ranks:
        for rank, ws in enumerate(ranks):
            group = _Group(lambda rank=rank: rank, lambda: len(sizes))  # type: ignore[misc]
            calls = []
            for name in names:
                with Recorder(ws, side_stream=not name.startswith("in place")) as recorder:
                    calls.append(recorder.call(lambda ws=ws, name=name, group=group: OPS[name](ws, sizes, group)))  # type: ignore[misc]
            traces.append(calls)
    return traces


_both_parities = cache(record)


def sequence(names: Sequence[str], sizes: tuple[int, ...]) -> list[list[list[Kernel]]]:
    """`record` of any sequence of ops, put together from recordings of each op on its own, once on each half."""
    return [
        [
            [shifted(kernel, call - call % 2) for kernel in _both_parities((name, name), sizes)[rank][call % 2]]
            for call, name in enumerate(names)
        ]
        for rank in range(len(sizes))
    ]


def shifted(kernel: Kernel, by: int) -> Kernel:
    """The same kernel `by` epochs later."""

    def later(event: Event) -> Event:
        if isinstance(event, (Raise, Wait, Advance)):
            return event._replace(epoch=(event.epoch + by + 2**31) % 2**32 - 2**31)
        return event

    return replace(kernel, programs=[[later(event) for event in events] for events in kernel.programs])
