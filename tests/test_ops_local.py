"""The fused ops on virtual ranks in one process, phased: up to eight ranks, both producers, epochs that wrap, growth,
halves full of NaN.

All ranks' kernels of a phase run one after another here, so an op that needed two ranks at once would time out. The
ring is the one that does: it waits and signals in one kernel, and is left to real processes.
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
from .test_ops import LAYOUTS, Call, Operands
from .virtual_ranks import local_memories, run_together

CPU = torch.device("cpu")
# What one op is on virtual ranks: rank -> its phases; and per rank what it must give, with the error allowed.
Op = tuple[Callable[[Workspace, int], Generator[None, None, Tensor]], list[Tensor], list[Tensor]]
# The task, and what is gathered or scattered (0 rows, 1 the other dim), or the algorithm.
TASKS: dict[str, tuple[str, int | str]] = {
    "gather rows": ("all_gather_matmul", 0), "gather contraction": ("all_gather_matmul", 1),
    "scatter rows": ("matmul_reduce_scatter", 0), "scatter columns": ("matmul_reduce_scatter", 1),
    "matmul one_shot": ("matmul_all_reduce", "one_shot"), "matmul two_shot": ("matmul_all_reduce", "two_shot"),
    "scatter and gather": ("matmul_reduce_scatter", 0), "all_gather": ("all_gather", "direct"),
    "reduce_scatter": ("reduce_scatter", "direct"), "one_shot": ("all_reduce", "one_shot"),
    "two_shot": ("all_reduce", "two_shot"),
}  # fmt: skip
OPS = tuple(TASKS)
# Those whose rows are sent by a producer; elsewhere the matmul itself stores to the peers.
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
    """make(world_size, epoch=0) -> a workspace a virtual rank; closed at the end."""
    made: list[Workspace] = []

    def new(world_size: int, epoch: int = 0) -> list[Workspace]:
        ranks = [Workspace(memory, CPU, epoch=epoch) for memory in local_memories(world_size, CPU)]
        made.extend(ranks)
        for ws in ranks:
            # A wait that cannot end ends soon.
            ws.set_timeout(2.0)
        return ranks

    yield new
    for ws in made:
        ws.close()


def uneven(length: int, world_size: int) -> tuple[int, ...]:
    """Rank 1 has nothing, rank 0 a double share."""
    share = list(even_sizes(length, world_size))
    share[0], share[1] = share[0] + share[1], 0
    return tuple(share)


def problem(
    name: str, world_size: int, dtype: torch.dtype, seed: int, scale: int = 1, by: tuple[str, ...] = ("push",)
) -> Op:
    """The op `name` on random operands of about 40 * scale by 20 by 30, sizes prime or nearly so.

    by: the producer of each rank, in turn.
    """
    (op, option), M, N, K = TASKS[name], 43 * scale, 19, 37
    sizes = [uneven(length, world_size) for length in (M, N, K)]
    layouts = tuple((LAYOUTS[rank % 4], LAYOUTS[rank // 4 % 4]) for rank in range(world_size))
    twice = name == "scatter and gather"
    call = Call("fused", op, option, str(dtype).removeprefix("torch."), *sizes, layouts, not twice, seed)
    ranks = [Operands(call, rank) for rank in range(world_size)]
    expected, allowed = [each.expected for each in ranks], [each.allowed for each in ranks]
    # All rows of another tensor, multiplied with ones on a diagonal, so as they are.
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
    """One op on all virtual ranks, its halves full of NaN before it, checked on each; the epoch moves on by one."""
    start, expected, allowed = problem(name, len(ranks), dtype, seed, scale, by)
    before = ranks[0].epoch
    phases = [start(ws, rank) for rank, ws in enumerate(ranks)]
    for each in phases:
        next(each)
    for ws in ranks:
        # After the growth that the first phase may bring. All bits set is NaN in every dtype.
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
    """Sent by kernels, by copies, or by either: each rank chooses, and the slots are the same."""
    ranks, names = make(world_size), OPS if by == "push" else PRODUCED
    if world_size > 3 and not LARGE:
        # Of more ranks every fourth op, where time counts: another fourth each.
        names = names[(5, 4, 8).index(world_size) :: 4]
    for seed, name in enumerate(names):
        run(ranks, name, DTYPES[world_size % 3], seed, by=tuple(by.split()))


@pytest.mark.parametrize("by", ["push", "copy"])
def test_shards_in_many_pieces(make: Make, by: str) -> None:
    """Pieces of a quarter of a tile, copies of two of them: shards of several tiles and of less than a piece."""
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
        # first, second, first, first, second: each of them on each parity.
        run(ranks, second if seed % 3 == 1 else first, torch.float32, seed)


def test_growth_between_two_ops(make: Make) -> None:
    """While epochs wrap."""
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
    """Rank 0 makes room for the op and then does nothing: the others end, name it, and return no number instead."""
    # The epoch to wait for is the smallest int32, and what lies in the signals the largest: it must not pass for later.
    ranks = make(3, epoch=2**31 - 1)
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
    # What did arrive is right, and the rest is not half right.
    reference.check(torch.where(late, expected[2].float(), out), expected[2], torch.full_like(expected[2], 1e-3), name)


@pytest.mark.parametrize("name", OPS if LARGE else OPS[1::2])
def test_what_comes_after_a_wait_given_up_is_nobodys_result(make: Make, name: str) -> None:
    """Rank 0 gives up on rank 1, which is late, and as on a GPU goes on with what its host had issued already: two more
    ops, whose rows lie where those of the first did. Rank 1 is told, and does not take them for those of the first.
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
    """Behind copies the host ends the op, and raises itself: rank 0 has made room and done nothing."""
    ranks = make(2, epoch=2**31 - 1)
    start, _, _ = problem("gather rows", 2, torch.float32, 0, by=("copy",))
    phases = [start(ws, rank) for rank, ws in enumerate(ranks)]
    for ws, each in zip(ranks, phases, strict=True):
        ws.set_timeout(0.1)
        next(each)
    with pytest.raises(PeerTimeout, match=r"rank 1 waited 0.1 s for rank 0"):
        run_together(phases[1:])
