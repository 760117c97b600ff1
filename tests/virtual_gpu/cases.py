"""The fused ops on virtual ranks: ops, operands, and expected results.

Every rank's kernels wait on its own stream; all of them run together, several epochs in a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedtp import PeerTimeout, reference
from fusedtp.kernels import launch, signal
from fusedtp.kernels.configs import shape_class
from fusedtp.schedules import forms, fused, local, producer
from fusedtp.workspaces import clock
from fusedtp.workspaces.workspace import Workspace

from ..virtual_ranks import finish as finish_phases
from ..virtual_ranks import local_memories, run_together
from . import float8
from .driver import WINDOW, EmulatedDriver
from .machine import Ran, Schedule
from .shapes import Op, Phases, Shape, laid_out, launches_of, split, value_of

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# dtypes of operands with scales, which sm_90 multiplies.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "mxfp8": float8.MXFP8}
MATMULS = (
    "gather rows", "gather rows joined", "gather rows split", "gather rows transposed", "gather rows own pushed",
    "gather rows and keep",
    "gather contraction", "gather contraction split", "scatter rows", "scatter rows joined", "scatter columns",
    "matmul one_shot",
    "matmul one_shot split", "matmul one_shot in parts", "matmul two_shot", "matmul two_shot split",
    "matmul two_shot in parts", "scatter and gather",
)  # fmt: skip
# Ops on five weights or terms, whose operands are in a table in memory.
OF_FIVE = "gather rows of five", "gather contraction of five", "scatter rows of five"
COLLECTIVES = ("all_gather direct", "all_gather ring", "reduce_scatter direct", "reduce_scatter ring",
               "all_reduce one_shot", "all_reduce two_shot", "all_reduce ring")  # fmt: skip
OPS = MATMULS + COLLECTIVES
# Ops in which the switch adds, or multicasts, on sm_90.
IN_SWITCH = (
    "matmul two_shot switch", "matmul two_shot switch in parts", "matmul two_shot switch split",
    "all_reduce two_shot switch", "gather rows at once", "gather contraction at once", "all_gather direct at once",
)  # fmt: skip


def problem(name: str, world_size: int, dtype: torch.dtype, seed: int, shape: Shape, by: str = "push") -> Op:
    """Return the op `name` on random operands."""
    if dtype in FLOAT8.values():
        start, expected, allowed = float8.problem(name.removesuffix(" joined"), world_size, dtype, seed, shape, by)
        if name.endswith(" joined"):
            return (lambda ws, rank: joining(start(ws, rank))), expected, allowed
        return start, expected, allowed
    random = torch.Generator().manual_seed(seed)
    M, N, K = shape.M, shape.N, shape.K
    if name.endswith("in parts"):
        # Few tiles, each with several parts of the contraction.
        M, N, K = min(M, 40), min(N, 528), 8 * K

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(dtype)

    def everywhere(x: Tensor) -> list[Tensor]:
        return [x] * world_size

    unit = 1 if shape.split == "empty" else 16
    m_sizes = split(M, world_size, shape.split, unit)
    name, by = (name.removesuffix(" at once"), "multicast") if name.endswith(" at once") else (name, by)
    kind, _, how = name.partition(" ")
    if kind in ("all_gather", "reduce_scatter", "all_reduce"):
        return _collective(name, m_sizes, dtype, normal, N, by)
    k_sizes = split(K, world_size, shape.split, unit)
    a, b, bias = normal(M, K), normal(K, N), normal(N) if shape.bias else None
    right = laid_out(b, shape.b)
    shards_m = [laid_out(x.clone(), shape.a) for x in a.split(m_sizes)]
    shards_k = [laid_out(x.clone(), shape.a) for x in a.split(k_sizes, 1)]
    rights_k = [laid_out(x.clone(), shape.b) for x in b.split(k_sizes)]
    ref = reference.matmul(a, b, bias)
    allowed = reference.bound(a, b, dtype, bias=bias)
    summed = reference.bound(a, b, dtype, k_sizes=k_sizes, bias=bias)
    if how.endswith("of five"):
        # Uneven weights, of which some have a bias, or uneven terms.
        sizes = m_sizes if how.startswith("rows") else k_sizes
        if kind == "scatter":
            lengths = [split(size, 5, "uneven", 8) for size in k_sizes]
            terms = [
                [operand for a_part, b_part in zip(x.split(each, 1), y.split(each), strict=True)
                 for operand in (laid_out(a_part, shape.a), laid_out(b_part, shape.b), None)]
                for x, y, each in zip(a.split(k_sizes, 1), b.split(k_sizes), lengths, strict=True)
            ]  # fmt: skip
            return (
                lambda ws, rank: launches_of(
                    "matmul_reduce_scatter", ws, *terms[rank][:2], bias, None, None, None, *terms[rank][3:], sizes=sizes
                ),
                list(ref.split(sizes)), list(summed.split(sizes)),
            )  # fmt: skip
        widths = split(N, 5, "uneven", 8)
        biases = [each if i % 2 else None for i, each in enumerate(normal(N).split(widths))]
        pairs = list(zip([laid_out(each, shape.b) for each in b.split(widths, 1)], biases, strict=True))
        of_weights = [operand for pair in pairs[1:] for operand in pair]
        shards = shards_m if how.startswith("rows") else shards_k
        return (
            lambda ws, rank: launches_of(
                "all_gather_matmul", ws, shards[rank], *pairs[0], None, *of_weights, sizes=sizes,
                dim=int(shards is shards_k), producer=by,
            ),
            everywhere(torch.cat([reference.matmul(a, *pair).flatten() for pair in pairs])),
            everywhere(torch.cat([reference.bound(a, w, dtype, bias=each).flatten() for w, each in pairs])),
        )  # fmt: skip
    if kind == "gather":
        dim = 0 if how.startswith("rows") else 1
        mine = [laid_out(x, "columns") for x in shards_m] if how == "rows own pushed" else shards_m
        turned, split_off, keep = how.endswith("transposed"), how.endswith("split"), how.endswith("and keep")
        if turned:
            # The bias of the transposed problem has one element for each row.
            along = normal(M) if shape.bias else None
            ref = a.double() @ b.double() + (0 if along is None else along.double()[:, None])
            allowed = allowed + 2 * torch.finfo(dtype).eps * ref.abs()
            bias_of = along
        else:
            bias_of = bias
        expected, error = (ref.t(), allowed.t()) if turned else (ref, allowed)

        def gather(ws: Workspace, rank: int) -> Phases:
            shard, sizes = (mine[rank], m_sizes) if dim == 0 else (shards_k[rank], k_sizes)
            operands = (shard, right, bias_of, a.new_empty(M, 1)) if keep else (shard, right, bias_of)
            start = joined if how.endswith("joined") else launches_of
            return start(
                "all_gather_matmul", ws, *operands, sizes=sizes, dim=dim, transposed=turned, split=split_off,
                producer=by,
            )  # fmt: skip

        if keep:
            expected = torch.cat([ref.flatten(), a.double().flatten()])
            error = torch.cat([allowed.flatten(), torch.zeros(M * K, dtype=torch.float64)])
        return gather, everywhere(expected), everywhere(error)
    if name == "scatter and gather":
        shares = ref if bias is None else ref - bias.double()
        rows = reference.bound(a, b, dtype, k_sizes=k_sizes)

        exact = torch.zeros(M * K, dtype=torch.float64)
        return (
            lambda ws, rank: launches_of(
                "matmul_reduce_scatter", ws, shards_k[rank], rights_k[rank], None, a.new_empty(1, M), shards_m[rank],
                sizes=m_sizes, producer=by,
            ),
            [torch.cat([x.flatten(), a.double().flatten()]) for x in shares.split(m_sizes)],
            [torch.cat([x.flatten(), exact]) for x in rows.split(m_sizes)],
        )  # fmt: skip
    if kind == "scatter":
        dim, sizes = (0, m_sizes) if how.startswith("rows") else (1, split(N, world_size, shape.split, unit))
        start = joined if how.endswith("joined") else launches_of
        return (
            lambda ws, rank: start(
                "matmul_reduce_scatter", ws, shards_k[rank], rights_k[rank], bias, sizes=sizes, dim=dim
            ),
            list(ref.split(sizes, dim)), list(summed.split(sizes, dim)),
        )  # fmt: skip
    algorithm, _, how = how.partition(" ")
    start, any_order = in_parts if how.endswith("in parts") else launches_of, how.startswith("switch")
    if any_order:
        # The sum is rounded before the bias is added.
        summed = summed + 2 * torch.finfo(dtype).eps * ref.abs()
        summed += 0 if bias is None else torch.finfo(dtype).eps * bias.double().abs()
    return (
        lambda ws, rank: start(
            "matmul_all_reduce", ws, shards_k[rank], rights_k[rank], bias, algorithm=algorithm,
            split=how.endswith("split"), any_order=any_order,
        ),
        everywhere(ref), everywhere(summed),
    )  # fmt: skip


def read(x: Any, products: Any, leaves: int = 0) -> list[Any]:
    """Return X itself in place of the library's products with X; a tree's are kernels."""
    return local.multiply(x, products, leaves) if leaves else [x.gather.read(x)]


def joined(*what: Any, **options: Any) -> Phases:
    """Return the launches with tiles that join rows of several ranks."""
    return joining(launches_of(*what, **options))


def joining(phases: Phases) -> Phases:
    """Return launches with tiles that join rows of several ranks."""
    with mock.patch.object(producer, "joins", return_value=True):
        first = next(phases)
    yield first
    return (yield from phases)


def in_parts(*what: Any, **options: Any) -> Phases:
    """Return the launches with many programs for few tiles."""
    phases = launches_of(*what, **options)
    # The number of programs is decided before the first phase ends.
    with mock.patch.object(launch, "_num_multiprocessors", return_value=24):
        first = next(phases)
    yield first
    return (yield from phases)


def _collective(
    name: str, sizes: tuple[int, ...], dtype: torch.dtype, normal: Callable[..., Tensor], cols: int, by: str
) -> Op:
    kind, how, *rest = name.split()
    world_size, M = len(sizes), sum(sizes)
    parts = [normal(M, cols) for _ in range(world_size)]
    total, allowed = reference.total(parts), reference.total_bound(parts, dtype)
    if how == "ring":
        # A ring sends its running sum, rounded at every hop.
        allowed = reference.total_bound(parts, dtype, sum_dtype=dtype)
    if kind == "all_gather":
        whole = parts[0].double()
        shards = list(parts[0].split(sizes))
        return (
            lambda ws, rank: launches_of("all_gather", ws, shards[rank], sizes=sizes, algorithm=how, producer=by),
            [whole] * world_size, [torch.zeros_like(whole)] * world_size,
        )  # fmt: skip
    if kind == "reduce_scatter":
        return (
            lambda ws, rank: launches_of("reduce_scatter", ws, parts[rank], sizes=sizes, algorithm=how),
            list(total.split(sizes)), list(allowed.split(sizes)),
        )  # fmt: skip
    return (
        lambda ws, rank: launches_of("all_reduce", ws, parts[rank], algorithm=how, any_order=bool(rest)),
        [total] * world_size, [allowed] * world_size,
    )  # fmt: skip


@contextlib.contextmanager
def virtual_ranks(
    world_size: int, *, epoch: int = 0, seconds: float = 1e6, half_bytes: int = 1 << 21, slots: int = 256,
    programs: int = 2, clock_ms: int = 0,
) -> Iterator[list[Workspace]]:  # fmt: skip
    """Make one workspace for each virtual rank, with arenas full of NaN, and a clock that only the machine advances."""
    ranks = [Workspace(memory, CPU, epoch=epoch, seconds=seconds) for memory in local_memories(world_size, CPU)]
    try:
        for ws in ranks:
            clock.release(ws.host_block[signal.CLOCK_MS.value :])
            ws.host_block[signal.CLOCK_MS.value] = clock_ms
        for ws in ranks:
            ws.require(half_bytes, slots)
        for ws in ranks:
            ws.data.fill_(0xFF)
            ws.peers[-1] = WINDOW
        # The library would multiply gathered rows; they are returned as they are, as the machine runs kernels only.
        multiplies = read if world_size > 1 else local.multiply
        with (
            mock.patch.object(fused, "multiply", multiplies),
            mock.patch.object(forms, "multiply", multiplies),
            mock.patch.object(launch, "_num_multiprocessors", return_value=programs),
            mock.patch.object(producer, "joins", return_value=False),
            # Do not always take the tile that suits so few programs.
            mock.patch.object(launch, "shape_class", lambda rows, cols, **_: shape_class(rows, cols)),
        ):
            yield ranks
    finally:
        for ws in ranks:
            ws.close()


def issue(driver: EmulatedDriver, ranks: Sequence[Workspace], phases: Sequence[Phases]) -> list[Tensor]:
    """Launch every rank's kernels onto its stream, one rank after another, without running them."""
    for each in phases:
        next(each)
    return [finish(driver, ws, each) for ws, each in zip(ranks, phases, strict=True)]


def finish(driver: EmulatedDriver, ws: Workspace, phases: Phases) -> Tensor:
    """Make the remaining launches of a rank."""
    with driver.on(ws.rank):
        return finish_phases(phases)


def programs_of(schedule: Schedule) -> int:
    """Return the number of multiplying programs: few have many tiles each; with many, rank 1's programs have rows of
    other ranks from their second tile on.
    """
    return (2, 7, 3)[schedule.seed // 3 % 3]


def run(
    driver: EmulatedDriver, names: Sequence[str], world_size: int, dtype: torch.dtype, shape: Shape,
    schedule: Schedule, *, programs: int = 2, epoch: int = 0,
) -> Ran:  # fmt: skip
    """Run the ops `names`, one an epoch, all ranks and epochs at the same time, and check each result on each rank."""
    seed = schedule.seed
    # The clock starts just before its wrap.
    with virtual_ranks(world_size, programs=programs, epoch=epoch, clock_ms=2**31 - 1 - seed % 64) as ranks:
        issued = []
        for i, name in enumerate(names):
            start, expected, allowed = problem(name, world_size, dtype, 97 * seed + i, shape)
            outs = issue(driver, ranks, [start(ws, ws.rank) for ws in ranks])
            # Arenas that have grown have no multicast address.
            assert name not in IN_SWITCH or all(int(ws.peers[-1]) == WINDOW for ws in ranks), "half_bytes is too little"
            issued.append((name, outs, expected, allowed))
        ran = driver.run(ranks, schedule)
        for i, (name, outs, expected, allowed) in enumerate(issued):
            for ws in ranks:
                what = f"{name}, op {i}, {dtype}, sm_{driver.capability}, rank {ws.rank} of {world_size}, seed {seed}"
                ws.check()
                # The results are in a reduced dtype, and may be transposed.
                reference.check(value_of(outs[ws.rank]), expected[ws.rank], allowed[ws.rank], what)
        for ws in ranks:
            assert (ws.epoch - epoch) % 2**32 == len(names), f"epoch {epoch} -> {ws.epoch}"
    return ran


def run_in_phases(
    driver: EmulatedDriver, ranks: Sequence[Workspace], start: Callable[[Workspace, int], Phases], schedule: Schedule
) -> tuple[list[Tensor | None], Ran]:
    """Run each kernel to its end at its launch, and return each rank's result, or None if its host gave up."""
    ran: list[Ran] = []

    def on_its_rank(ws: Workspace) -> Phases:
        phases = start(ws, ws.rank)
        while True:
            try:
                with driver.on(ws.rank):
                    next(phases)
            except PeerTimeout:
                return None
            except StopIteration as stop:
                return stop.value
            yield

    driver.launched = lambda: ran.append(driver.run(ranks, schedule))
    try:
        outs = run_together([on_its_rank(ws) for ws in ranks])
    finally:
        driver.launched = None
    return outs, total(ran)


def total(ran: Sequence[Ran]) -> Ran:
    """Add up several runs."""
    return Ran(*(sum(values) for values in zip(*((r.executed, r.stale, r.late) for r in ran), strict=True)))


def in_phases(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule, by: str
) -> Ran:
    """Run the op with rows that the host copies."""
    with virtual_ranks(world_size, programs=programs_of(schedule)) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape, by)
        outs, ran = run_in_phases(driver, ranks, start, schedule)
        for ws, out in zip(ranks, outs, strict=True):
            ws.check()
            assert out is not None
            reference.check(value_of(out), expected[ws.rank], allowed[ws.rank], f"{name} by {by}, rank {ws.rank}")
    return ran


def small(target: int, dtype: torch.dtype, how: str = "uneven") -> Shape:
    """Return a problem of few tiles, the last of them partial, and two or three steps of k.

    With "uneven" shards every length is a multiple of 16, as is usual; with "empty" shards hardly any is.
    """
    if dtype == torch.float32:
        return Shape(96, 80, 80, how) if how == "uneven" else Shape(88, 72, 72, how)
    odd = 8 * (how != "uneven")
    return Shape(176 - odd, (144 if target == 80 else 272) - odd, 144 - odd, how)
