"""The fused ops on virtual ranks in one process, in phases: up to eight ranks, both producers, epochs that wrap,
growth, halves full of NaN.

All ranks' kernels of a phase run one after another, so an op that needed two ranks at once would time out. The ring
needs that, as it waits and signals in one kernel, and is left to real processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedtp import PeerTimeout, reference
from fusedtp.kernels import launch
from fusedtp.schedules import producer
from fusedtp.shards import even_sizes
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .bounds import Bounds
from .harness import LARGE
from .soak.layouts import OF_ANY
from .test_ops import Call, Operands
from .virtual_ranks import local_memories, run_together

CPU = torch.device("cpu")
# An op on virtual ranks: a function from workspace and rank to its phases; expected results and allowed errors by rank.
Op = tuple[Callable[[Workspace, int], Generator[None, None, Tensor]], list[Tensor], list[Tensor]]
# The task, and the gathered or scattered dim (0 rows, 1 the other dim) or the algorithm.
TASKS: dict[str, tuple[str, int | str]] = {
    "gather rows": ("all_gather_matmul", 0), "gather contraction": ("all_gather_matmul", 1),
    "scatter rows": ("matmul_reduce_scatter", 0), "scatter columns": ("matmul_reduce_scatter", 1),
    "matmul one_shot": ("matmul_all_reduce", "one_shot"), "matmul two_shot": ("matmul_all_reduce", "two_shot"),
    "scatter and gather": ("matmul_reduce_scatter", 0), "all_gather": ("all_gather", "direct"),
    "reduce_scatter": ("reduce_scatter", "direct"), "one_shot": ("all_reduce", "one_shot"),
    "two_shot": ("all_reduce", "two_shot"),
}  # fmt: skip
OPS = tuple(TASKS)
# Ops whose rows a producer sends; in other ops the matmul stores to the peers.
PRODUCED = tuple(name for name in OPS if not name.startswith(("scatter rows", "scatter columns", "matmul")))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Make = Callable[..., list[Workspace]]


@pytest.fixture(autouse=True)
def _within_bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    with Bounds() as bounds:
        yield
    assert bounds.accesses or "make" not in request.fixturenames


@pytest.fixture
def make() -> Iterator[Make]:
    """Return make(world_size, epoch=0), which makes one workspace for each virtual rank; all are closed at the end."""
    made: list[Workspace] = []

    def new(world_size: int, epoch: int = 0) -> list[Workspace]:
        ranks = [Workspace(memory, CPU, epoch=epoch) for memory in local_memories(world_size, CPU)]
        made.extend(ranks)
        for ws in ranks:
            # A wait that cannot end times out soon.
            ws.set_timeout(2.0)
        return ranks

    yield new
    for ws in made:
        ws.close()


def uneven(length: int, world_size: int) -> tuple[int, ...]:
    """Return shards with none for rank 1 and two shares for rank 0."""
    share = list(even_sizes(length, world_size))
    share[0], share[1] = share[0] + share[1], 0
    return tuple(share)


def problem(
    name: str, world_size: int, dtype: torch.dtype, seed: int, scale: int = 1, by: tuple[str, ...] = ("push",)
) -> Op:
    """Return the op `name` on random operands of about 40 * scale by 20 by 30, with nearly prime sizes.

    by: the producer of each rank, in turn.
    """
    (op, option), M, N, K = TASKS[name], 43 * scale, 19, 37
    sizes = [uneven(length, world_size) for length in (M, N, K)]
    layouts = tuple((OF_ANY[rank % 6], OF_ANY[rank // 6 % 6], OF_ANY[-1 - rank % 6]) for rank in range(world_size))
    twice = name == "scatter and gather"
    call = Call("fused", op, option, str(dtype).removeprefix("torch."), *sizes, layouts, not twice, seed)
    ranks = [Operands(call, rank) for rank in range(world_size)]
    expected, allowed = [each.expected for each in ranks], [each.allowed for each in ranks]
    # All rows of another tensor, multiplied by the identity matrix.
    rows, left = torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).to(dtype), torch.eye(M, dtype=dtype)
    if twice:
        expected = [torch.cat([each.flatten(), rows.double().flatten()]) for each in expected]
        allowed = [torch.cat([each.flatten(), torch.zeros(M * K, dtype=torch.float64)]) for each in allowed]

    def start(ws: Workspace, rank: int) -> Generator[None, None, Tensor]:
        options = dict(ranks[rank].options)
        if name in PRODUCED:
            options["producer"] = by[rank % len(by)]
        if op in ("all_gather_matmul", "matmul_all_reduce"):
            options["split"] = True
        more = (left, rows.split(sizes[0])[rank]) if twice else ()
        return direct.phases(op, ws, *ranks[rank].given, *more, **options)

    return start, expected, allowed


def run(
    ranks: list[Workspace], name: str, dtype: torch.dtype, seed: int, scale: int = 1, by: tuple[str, ...] = ("push",)
) -> None:
    """Run one op on all virtual ranks with halves full of NaN; check the results and that the epoch advances by one."""
    start, expected, allowed = problem(name, len(ranks), dtype, seed, scale, by)
    before = ranks[0].epoch
    phases = [start(ws, rank) for rank, ws in enumerate(ranks)]
    for each in phases:
        next(each)
    for ws in ranks:
        # After growth in the first phase. All bits set is NaN in every dtype.
        arena = ws.view(ws.rank, 0, 0, (2, ws.half_bytes), torch.uint8)
        arena.fill_(0xFF)
    outs = run_together(phases)
    for rank, ws in enumerate(ranks):
        ws.check()
        what = f"{name} by {'/'.join(by)}, {dtype}, rank {rank} of {len(ranks)}"
        reference.check(outs[rank], expected[rank], allowed[rank], what)
        assert (ws.epoch - before) % 2**32 == 1, f"{name}: epoch {before} -> {ws.epoch}"


@pytest.mark.parametrize(
    ("world_size", "by"),
    [(2, "push"), (3, "push"), (4, "push"), (5, "push"), (8, "push"), (2, "copy"), (3, "copy"), (5, "copy"),
     (3, "copy push")],
)  # fmt: skip
def test_every_op(make: Make, world_size: int, by: str) -> None:
    """Sent by kernels, by copies, or by a mix: each rank chooses, and the slots are the same."""
    ranks, names = make(world_size), OPS if by == "push" else PRODUCED
    if world_size > 3 and not LARGE:
        # With more ranks, a few of the ops, different ones for each number of ranks.
        names = names[(5, 4, 8).index(world_size) :: world_size]
    for seed, name in enumerate(names):
        run(ranks, name, DTYPES[world_size % 3], seed, by=tuple(by.split()))


@pytest.mark.parametrize("by", ["push", "copy"])
def test_shards_in_many_pieces(make: Make, by: str) -> None:
    """Pieces of a quarter tile and copies of two pieces; shards of several tiles, and of less than a piece."""
    ranks = make(3)
    with mock.patch.object(producer, "PIECE_BYTES", 1), mock.patch.object(producer, "COPY_BYTES", 2 * 16 * 160):
        assert producer.piece_rows(160, launch.INTERPRETER) == 16
        assert producer.part_rows(160, 16) == 32
        for seed, name in enumerate(("gather rows", "gather contraction", "scatter and gather", "all_gather")):
            run(ranks, name, torch.float32, seed, scale=5, by=(by,))


def test_epochs_wrap_around(make: Make) -> None:
    ranks = make(3, epoch=2**31 - 3)
    for seed, name in enumerate(
        ("gather rows", "two_shot", "scatter rows", "all_gather", "matmul two_shot", "one_shot")
    ):
        run(ranks, name, torch.bfloat16, seed, by=("copy", "push"))
    assert [ws.epoch for ws in ranks] == [-(2**31) + 3] * 3


@pytest.mark.parametrize(("first", "second"), [("gather rows", "two_shot"), ("scatter columns", "all_gather")])
def test_two_ops_in_turn_use_both_halves(make: Make, first: str, second: str) -> None:
    ranks = make(3)
    for seed in range(5):
        # first, second, first, first, second: each op on each parity.
        run(ranks, second if seed % 3 == 1 else first, torch.float32, seed)


def test_growth_between_two_ops(make: Make) -> None:
    """Epochs wrap meanwhile."""
    ranks = make(4, 2**31 - 3)
    small = ranks[0].half_bytes
    run(ranks, "gather contraction", torch.float32, 0)
    assert ranks[0].half_bytes == small
    run(ranks, "matmul one_shot", torch.float32, 1, scale=9)
    grown = ranks[0].half_bytes
    assert grown > small
    run(ranks, "scatter rows", torch.float32, 2)
    run(ranks, "gather rows", torch.float32, 3)
    assert ranks[0].half_bytes == grown


@pytest.mark.parametrize("name", OPS if LARGE else OPS[::2])
def test_what_never_arrives_is_nan_and_named(make: Make, name: str) -> None:
    """Rank 0 makes room for the op and then does nothing: the others end, name rank 0, and return NaN in its place."""
    # The awaited epoch is the smallest int32, and the signals hold the largest, which must not count as later. Or it is
    # below 0, which a word that nobody wrote would hold.
    ranks = make(3, epoch=2**31 - 1 if OPS.index(name) % 4 else -9)
    start, expected, _ = problem(name, 3, torch.float32, 0)
    phases = [start(ws, rank) for rank, ws in enumerate(ranks)]
    for ws, each in zip(ranks, phases, strict=True):
        ws.set_timeout(0.1)
        next(each)
    out = run_together(phases[1:])[1]
    for ws in ranks[1:]:
        with pytest.raises(PeerTimeout, match=f"rank {ws.rank} waited 0.1 s for rank 0"):
            ws.check()
        with pytest.raises(PeerTimeout):
            ws.require(0, 0)
    late = out.isnan()
    assert (
        late.all()
        if name not in ("gather rows", "scatter and gather", "all_gather", "two_shot", "matmul two_shot")
        else late.any()
    )
    # Arrived data is right, and the rest is all NaN.
    reference.check(torch.where(late, expected[2].float(), out), expected[2], torch.full_like(expected[2], 1e-3), name)


@pytest.mark.parametrize("name", OPS if LARGE else OPS[1::2])
def test_what_comes_after_a_wait_given_up_is_nobodys_result(make: Make, name: str) -> None:
    """Rank 0 gives up on the late rank 1. As on a GPU its host has already issued two more ops, whose rows overwrite
    those of the first. Rank 1 is told, and does not use those rows.
    """
    ranks = make(2)
    for ws in ranks:
        ws.set_timeout(0.05)
    late = problem(name, 2, torch.float32, 0)[0](ranks[1], 1)
    for seed in range(3):
        phases = problem(name, 2, torch.float32, seed)[0](ranks[0], 0)
        next(phases)
        if seed == 0:
            next(late)
            ranks[0]._check = lambda: None  # type: ignore[method-assign]
        run_together([phases])
    assert ranks[0].epoch == 3
    run_together([late])
    with pytest.raises(PeerTimeout, match=r"rank 1 came too late: rank 0 had given up on rank 1") as caught:
        ranks[1].check()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.came_late, again.peer) == (str(caught.value), True, 0)


def test_copies_leave_behind_their_peers_entry(make: Make) -> None:
    """After copies the host ends the op and raises the error itself; rank 0 has made room and done nothing."""
    ranks = make(2, epoch=2**31 - 1)
    start, _, _ = problem("gather rows", 2, torch.float32, 0, by=("copy",))
    phases = [start(ws, rank) for rank, ws in enumerate(ranks)]
    for ws, each in zip(ranks, phases, strict=True):
        ws.set_timeout(0.1)
        next(each)
    with pytest.raises(PeerTimeout, match=r"rank 1 waited 0.1 s for rank 0"):
        run_together(phases[1:])
