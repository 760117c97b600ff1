"""The check of kernels' addresses finds planted faults. The tests of ops run under the same check."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from triton.runtime.errors import InterpreterError

from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import descriptors, epilogue, gather_matmul, matmul, push, reduce
from fusedtp.kernels.launch import INTERPRETER
from fusedtp.schedules import producer
from fusedtp.shards import even_sizes
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .bounds import Bounds, checked
from .protocol.live import live
from .protocol.mutants import Edit, Mutant, planted
from .test_ops_local import CPU, problem
from .virtual_ranks import local_memories, run_together

NO_BIAS = epilogue.epilogue_of(())

PLANTED = [
    ("_gather_matmul_kernel stores 4 bytes", "gather rows",
        Edit(epilogue, "apply", "& in_n[None, :]", "& (cols <= c.N[0])[None, :]")),
    # The next column of another rank's shard, in the gap between this shard's rows.
    ("_push_kernel loads 4 bytes", "gather contraction",
        Edit(push, "send_block", "(offs_c < cols - col)", "(offs_c <= cols - col)")),
    ("_collect_kernel stores 4 bytes", "all_gather",
        Edit(push, "_collect_kernel", "(offs_m < first + rows - row - strip)",
            "(offs_m <= first + rows - row - strip)")),
    # A store to an operand that is read-only.
    ("_push_kernel stores 4 bytes", "reduce_scatter",
        Edit(push, "send_block", "tl.store(dst_ptr +", "tl.store(src_ptr +")),
    # A load beyond a table of chunks.
    ("_matmul_scatter_kernel loads 4 bytes", "scatter columns",
        Edit(matmul, "locate_in_chunks", "tl.load(table + chunk + 1)", "tl.load(table + chunk + 2)")),
    ("_push_kernel atomically changes 4 bytes", "one_shot",
        Edit(push, "push_rows", "raise_signal(link, dst, piece + first_slot)",
             "raise_signal(link, dst, piece + first_slot + (1 << 24))")),
]  # fmt: skip


@pytest.mark.parametrize(("says", "op", "edit"), PLANTED)
def test_planted_access_is_found(says: str, op: str, edit: Edit) -> None:
    ranks = [Workspace(memory, CPU) for memory in local_memories(3, CPU)]
    start, _, _ = problem(op, 3, torch.float32, 0)
    cut = mock.patch.object(producer, "joins", return_value=False)
    with cut, planted(Mutant(says, op, (edit,))), Bounds(), pytest.raises(InterpreterError, match=says):
        run_together([start(ws, rank) for rank, ws in enumerate(ranks)])
    for ws in ranks:
        ws.close()


def test_between_the_rows_of_a_slice_is_outside() -> None:
    """The plain matmul runs with an edit that ignores the gaps between rows of C."""
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    c = torch.zeros(5, 2 * 3)[:, :3]
    with Bounds() as bounds:
        matmul.matmul(a, b, c, NO_BIAS, config=INTERPRETER)
        assert bounds.accesses > 0
        stride = Edit(epilogue, "apply", "rows * stride_of(c.stride_m, j, c.COUNT, c.UNIT == 0)", "rows * c.N[0]")
        with planted(Mutant("", "", (stride,))), pytest.raises(InterpreterError, match="one of 6 places of 15 outside"):
            matmul.matmul(a, b, c, NO_BIAS, config=INTERPRETER)


def test_columns_may_be_far_apart(tmp_path: Path) -> None:
    """A block of columns, times their stride, is beyond an int32: columns of a matrix of 4 GB in a file with holes."""
    apart, K = 2**31 // INTERPRETER.block_k, INTERPRETER.block_k + 1
    memory = torch.from_file(str(tmp_path / "large"), shared=True, size=apart * K, dtype=torch.bfloat16)
    a, b = memory.as_strided((5, K), (1, apart)), memory[5:].as_strided((K, 3), (apart, 1))
    for each in (a, b):
        each.copy_(torch.randn(each.shape))
    c = torch.zeros(5, 3).bfloat16()
    with Bounds():
        matmul.matmul(a, b, c, NO_BIAS, config=INTERPRETER)
    reference.check(c, reference.matmul(a, b), reference.bound(a, b, c.dtype), "c")


def test_a_descriptor_that_is_too_large_is_found() -> None:
    a, b = torch.randn(40, 24).bfloat16()[:, :20], torch.randn(24, 16).bfloat16()[:20]
    c = torch.zeros(40, 16).bfloat16()
    config = replace(INTERPRETER, descriptors=True)
    with Bounds() as bounds:
        matmul.matmul(a, b, c, NO_BIAS, config=config)
        # Both operands and the result, in one tile.
        assert bounds.accesses == 40 * 20 + 20 * 16 + 40 * 16
        for says, shape in (("one of 80 places of 880", "M, K + 2"), ("one of 20 places of 820", "M + 1, K")):
            larger = Edit(descriptors, "of_left", "[1, M, K], [", f"[1, {shape}], [")
            with planted(Mutant("", "", (larger,))), pytest.raises(InterpreterError, match=says):
                matmul.matmul(a, b, c, NO_BIAS, config=config)


# M, N, K, every rank's length of the gathered dim, and the gathered dims in turn: M (0), K (1) or both.
Lengths = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]


def run_hinted(M: int, N: int, K: int, sizes: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Run all-gather + matmul [M, K] @ [K, N], result plain and transposed, and matmul + reduce-scatter of columns."""
    ranks = [Workspace(memory, CPU) for memory in local_memories(len(sizes), CPU)]
    random = torch.Generator().manual_seed(M)
    a, b = torch.randn(M, K, generator=random), torch.randn(K, N, generator=random)
    for dim, transposed in itertools.product(dims, (False, True)):
        shards = [part.contiguous() for part in a.split(sizes, dim)]
        for out in run_together([
            direct.phases(
                "all_gather_matmul", ws, shards[ws.rank], b, dim=dim, sizes=sizes, transposed=transposed, split=True
            )
            for ws in ranks
        ]):  # fmt: skip
            torch.testing.assert_close(out.t() if transposed else out, a @ b)
    columns, inner = even_sizes(M, len(sizes)), even_sizes(K, len(sizes))
    left, right = b.t().split(inner, 1), a.t().split(inner)
    outs = run_together([
        direct.phases("matmul_reduce_scatter", ws, left[ws.rank], right[ws.rank], dim=1, sizes=columns) for ws in ranks
    ])  # fmt: skip
    torch.testing.assert_close(torch.cat(outs, 1), (a @ b).t())
    for ws in ranks:
        ws.close()


@pytest.mark.parametrize(
    "lengths",
    [
        (96, 16, 96, (32, 48, 16), (0, 1)), (96, 19, 96, (0, 80, 16), (0, 1)), (100, 16, 96, (32, 48, 16), (1,)),
        (96, 16, 100, (16, 0, 80), (0,)), (97, 16, 97, (48, 32, 17), (0, 1)), (41, 16, 96, (64, 16, 16), (1,)),
        (160, 32, 160, (144, 0, 16), (0, 1)),
    ],
)  # fmt: skip
def test_hints_are_true(lengths: Lengths) -> None:
    with Bounds() as bounds:
        run_hinted(*lengths)
    assert bounds.hints


@pytest.mark.parametrize(
    ("says", "lengths", "edit"),
    [
        # Aligned chunks of the contraction do not make rows aligned.
        ("_gather_matmul_kernel takes 41", (41, 16, 96, (64, 16, 16), (1,)),
            Edit(gather_matmul, "_store_gathered", "ctx.chunks.ROWS_ALIGNED", "ctx.chunks.ALIGNED")),
        ("_gather_matmul_kernel takes 17", (97, 16, 97, (48, 32, 17), (0,)),
            Edit(gather_matmul, "_store_gathered", "ctx.chunks.ROWS_ALIGNED", "True")),
        ("_gather_matmul_kernel takes 17", (97, 16, 41, (17, 48, 32), (0,)),
            Edit(gather_matmul, "_row", "if ctx.chunks.ROWS_ALIGNED", "if True")),
        ("_reduce_kernel takes 14", (41, 16, 96, (64, 16, 16), (1,)),
            Edit(reduce, "_reduce_kernel", "if ALIGNED", "if True")),
    ],
)  # fmt: skip
def test_an_untrue_hint_is_found(says: str, lengths: Lengths, edit: Edit) -> None:
    run_hinted(*lengths)
    with planted(Mutant(says, "", (edit,))), Bounds(), pytest.raises(InterpreterError, match=says):
        run_hinted(*lengths)


@pytest.mark.usefixtures("within_bounds")
def test_kernels_of_ranks_are_checked(pool: RankPool) -> None:
    assert pool.run(checked, world_size=2) == [0, 0]
    pool.run(live, "all_gather_matmul", 1, world_size=2)
    assert all(pool.run(checked, world_size=2))
