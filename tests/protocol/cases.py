"""The ops that the protocol is checked on. Each is as small as possible while every phase has work to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch

from fusedtp.kernels import signal
from fusedtp.kernels.launch import Config
from fusedtp.schedules import decomposed, fused, producer
from fusedtp.schedules.forms import Prepared
from fusedtp.workspaces import steps
from fusedtp.workspaces.stream_steps import StreamSteps
from fusedtp.workspaces.workspace import Workspace

from .. import direct
from ..virtual_ranks import finish, local_memories, running
from .events import Advance, Event, Kernel, Raise, Wait
from .record import Recorder

CPU = torch.device("cpu")
# Tiles of 2 x 2: the sizes below have at most two tiles, and two programs share them.
TINY = Config(block_m=2, block_n=2, block_k=2, group_m=2, programs=2, pushers=2, copy_rows=2, copy_cols=2)
COLS = 2


# One rank's op on a workspace; the sizes are every rank's rows, or columns where columns are split.
Op = Callable[[Workspace, tuple[int, ...]], object]


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _operands(op: str, rank: int, sizes: tuple[int, ...], dim: int, second: bool) -> tuple[torch.Tensor | None, ...]:
    # second: add the operands of a second product of the gathered matrix.
    whole, mine = sum(sizes), sizes[rank]
    if op == "all_gather_matmul":
        a = _ones(mine, COLS) if dim == 0 else _ones(COLS, mine)
        return a, _ones(COLS if dim == 0 else whole, COLS), None, *((_ones(whole, 1),) if second else ())
    if op == "matmul_reduce_scatter":
        a, b = (_ones(whole, 1), _ones(1, COLS)) if dim == 0 else (_ones(COLS, 1), _ones(1, whole))
        return a, b, None, *((_ones(1, whole), _ones(mine, COLS)) if second else ())
    if op == "matmul_all_reduce":
        return _ones(whole, 1), _ones(1, COLS), None
    return (_ones(mine if op == "all_gather" else whole, COLS),)


def _fused(
    op: str, *, dim: int = 0, algorithm: str = "auto", second: bool = False, strided: bool = False,
    joined: bool = False, in_pieces: bool = False, **how: Any,
) -> Op:  # fmt: skip
    """Return a fused op. in_pieces: one slot and one copy for each row; how: `producer` and `split`."""

    def run(ws: Workspace, sizes: tuple[int, ...]) -> object:
        a, *others = _operands(op, ws.rank, sizes, dim, second)
        assert a is not None
        a = a.t().contiguous().t() if strided else a
        pieces = {"PIECE_BYTES": 1, "COPY_BYTES": 1} if in_pieces else {}
        with mock.patch.multiple(producer, joins=mock.Mock(return_value=joined), **pieces), running(ws, op):
            lengths = () if "all_reduce" in op else sizes
            return finish(direct.results(op, ws, a, *others, sizes=lengths, dim=dim, algorithm=algorithm, **how))

    return run


def _host(
    op: str, *, algorithm: str = "auto", dim: int = 0, copies: bool = False, few_rows: bool = False,
    second: bool = False,
) -> Op:  # fmt: skip
    def run(ws: Workspace, sizes: tuple[int, ...]) -> object:
        ws.reads_peers = not copies
        operands = _operands(op, ws.rank, sizes, dim, second)
        lengths = () if "all_reduce" in op else sizes
        task = direct.task_of(op, *operands, sizes=lengths, dim=dim, algorithm=algorithm)
        with mock.patch.object(decomposed, "AT_ONCE_ROWS", 256 if few_rows else 0):
            prepared = Prepared("decomposed", task, ws=ws)
        with running(ws, op):
            ws.require(prepared.half_bytes, prepared.slots)
            return prepared.go(direct.named(op, *operands))

    return run


GATHER, SCATTER, MATMUL_ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FUSED: dict[str, Op] = {
    "gather rows": _fused(GATHER),
    "gather rows, pushed before": _fused(GATHER, split=True),
    "gather rows, own through the arena": _fused(GATHER, strided=True),
    "gather rows, joined": _fused(GATHER, joined=True),
    "gather rows, joined, in pieces": _fused(GATHER, joined=True, in_pieces=True),
    "gather rows, kept": _fused(GATHER, second=True),
    "gather contraction": _fused(GATHER, dim=1),
    "scatter rows": _fused(SCATTER),
    "scatter rows, joined": _fused(SCATTER, joined=True),
    "scatter columns": _fused(SCATTER, dim=1),
    "scatter and gather": _fused(SCATTER, second=True),
    "matmul one_shot": _fused(MATMUL_ALL_REDUCE, algorithm="one_shot"),
    "matmul two_shot": _fused(MATMUL_ALL_REDUCE, algorithm="two_shot"),
    "matmul one_shot, split": _fused(MATMUL_ALL_REDUCE, algorithm="one_shot", split=True),
    "matmul two_shot, split": _fused(MATMUL_ALL_REDUCE, algorithm="two_shot", split=True),
    "all_gather": _fused("all_gather", algorithm="direct"),
    "ring all_gather": _fused("all_gather", algorithm="ring"),
    "reduce_scatter": _fused("reduce_scatter", algorithm="direct"),
    "ring reduce_scatter": _fused("reduce_scatter", algorithm="ring"),
    "one_shot": _fused("all_reduce", algorithm="one_shot"),
    "two_shot": _fused("all_reduce", algorithm="two_shot"),
    "ring all_reduce": _fused("all_reduce", algorithm="ring"),
    "gather rows, in pieces": _fused(GATHER, in_pieces=True),
}
# The producer is the copy engine: copies and signals run on the side stream, kernels only wait.
COPIED: dict[str, Op] = {
    "copied: gather rows": _fused(GATHER, producer="copy"),
    "copied: gather rows, joined": _fused(GATHER, joined=True, producer="copy"),
    "copied: gather rows, in pieces": _fused(GATHER, in_pieces=True, producer="copy"),
    "copied: gather rows, own through the arena": _fused(GATHER, strided=True, producer="copy"),
    "copied: gather rows, kept": _fused(GATHER, second=True, producer="copy"),
    "copied: gather contraction": _fused(GATHER, dim=1, producer="copy"),
    "copied: scatter and gather": _fused(SCATTER, second=True, producer="copy"),
    "copied: all_gather": _fused("all_gather", algorithm="direct", producer="copy"),
    "copied: reduce_scatter": _fused("reduce_scatter", algorithm="direct", producer="copy"),
    "copied: one_shot": _fused("all_reduce", algorithm="one_shot", producer="copy"),
    "copied: two_shot": _fused("all_reduce", algorithm="two_shot", producer="copy"),
}


def _host_ops(copies: bool) -> dict[str, Op]:
    ops = {
        "gather rows": _host(GATHER, copies=copies),
        "gather rows, few": _host(GATHER, copies=copies, few_rows=True),
        "gather contraction": _host(GATHER, dim=1, copies=copies),
        "gather rows, two matmuls": _host(GATHER, second=True, copies=copies),
        "scatter rows": _host(SCATTER, copies=copies),
        "scatter rows, few": _host(SCATTER, copies=copies, few_rows=True),
        "scatter columns": _host(SCATTER, dim=1, copies=copies),
        "scatter and gather": _host(SCATTER, second=True, copies=copies),
        "matmul one_shot": _host(MATMUL_ALL_REDUCE, algorithm="one_shot", copies=copies),
        "matmul two_shot": _host(MATMUL_ALL_REDUCE, algorithm="two_shot", copies=copies),
        "all_gather": _host("all_gather", copies=copies),
        "reduce_scatter": _host("reduce_scatter", copies=copies),
        "one_shot": _host("all_reduce", algorithm="one_shot", copies=copies),
        "two_shot": _host("all_reduce", algorithm="two_shot", copies=copies),
    }
    return {f"{'copy' if copies else 'in place'}: {name}": op for name, op in ops.items()}


def _in_lane(op: str) -> Op:
    """Return a collective as in a lane beside ordinary calls: copies, and the steps of streams."""
    run_copies = _host(op, algorithm="direct", copies=True)

    def run(ws: Workspace, sizes: tuple[int, ...]) -> object:
        ws.steps = HostStreamSteps(ws)
        return run_copies(ws, sizes)

    return run


class HostStreamSteps(StreamSteps):
    """`StreamSteps` whose stream operations are the host's, in memory of the host."""

    def _write(self, rank: int, word: int, value: int) -> None:
        steps.store_release(self._ws.addresses[rank] + 4 * word, steps.wrapping_difference(value % 2**32, 0))

    def _write_to_host(self, word: int, value: int) -> None:
        self._ws.host_block[word] = value

    def _wait(self, word: int, value: int) -> None:
        slot, source = divmod(word - signal.SIGNALS.value, self._ws.world_size)
        beside = steps.HostSteps(self._ws)
        beside.reach(self._ws.addresses)
        beside.op, beside.epoch = self.op, value
        beside.wait(source, slot)


COPY, IN_PLACE = _host_ops(True), _host_ops(False)
LANE = {f"lane: {op}": _in_lane(op) for op in ("all_gather", "reduce_scatter")}
OPS = FUSED | COPIED | COPY | IN_PLACE | LANE


@contextlib.contextmanager
def virtual_ranks(world_size: int, epoch: int = 0) -> Iterator[list[Workspace]]:
    """Make one workspace for each rank, all in this process, with tiny tiles."""
    ranks = [Workspace(memory, CPU, epoch=epoch) for memory in local_memories(world_size, CPU)]
    with mock.patch.object(fused, "config_for", return_value=TINY):
        try:
            for ws in ranks:
                ws.set_timeout(0.05)
            yield ranks
        finally:
            for ws in ranks:
                ws.close()


def record(names: Sequence[str], sizes: tuple[int, ...], epoch: int = 0) -> list[list[list[Kernel]]]:
    """Record a sequence of ops, each rank alone; return kernels by [rank][call]. The first call has epoch + 1."""
    traces = []
    with virtual_ranks(len(sizes), epoch) as ranks:
        for ws in ranks:
            calls = []
            for name in names:
                with Recorder(ws, side_stream=not name.startswith("in place")) as recorder:
                    calls.append(recorder.call(partial(OPS[name], ws, sizes)))
            traces.append(calls)
    return traces


_both_parities = cache(record)


def sequence(names: Sequence[str], sizes: tuple[int, ...]) -> list[list[list[Kernel]]]:
    """Return `record` of any sequence of ops, assembled from recordings of each op alone, once on each half."""
    return [
        [
            [shifted(kernel, call - call % 2) for kernel in _both_parities((name, name), sizes)[rank][call % 2]]
            for call, name in enumerate(names)
        ]
        for rank in range(len(sizes))
    ]


def shifted(kernel: Kernel, by: int) -> Kernel:
    """Return the same kernel `by` epochs later."""

    def later(event: Event) -> Event:
        if isinstance(event, (Raise, Wait, Advance)):
            return event._replace(epoch=(event.epoch + by + 2**31) % 2**32 - 2**31)
        return event

    return replace(kernel, programs=[[later(event) for event in events] for events in kernel.programs])
