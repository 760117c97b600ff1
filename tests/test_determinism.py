"""The exact bits of results. A partial product is rounded once to the operands' dtype; partials are added in float32 in
rank order, then the bias; the sum is rounded once. This holds literally on every run and rank, for all algorithms but a
ring.

The literal sums need partials without errors, so operands are small integers times powers of two: every product and
every sum of products is exact in float32, in any order. The partials of ranks 0 and 2 are large and cancel. The
partials of ranks 1 and 3 and the bias are so much smaller that they lose bits beside a large one. So another order
gives other bits, which a test asserts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.schedules import decomposed
from fusedtp.shards import even_sizes

from . import direct
from .harness import spread
from .test_ops import VARIANTS, Call, Operands

DTYPES = ["float32", "bfloat16", "float16"]
SUMMING = ["fused", "decomposed"]
# A factor that puts a small partial 18 bits below a large one: a few of its bits survive beside it in float32.
SMALL = 2.0**-18
M, N, K_R = 37, 29, 24  # K_R: length of the contraction on each rank


def exact_operands(world_size: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return a_r [M, K_R] and b_r [K_R, N] by rank and a bias [N], such that a_r @ b_r is exact in float32."""
    random = torch.Generator().manual_seed(11)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-63, 64, shape, generator=random).float()

    a = [integers(M, K_R) for _ in range(world_size)]
    b = [integers(K_R, N) for _ in range(world_size)]
    for rank in range(1, world_size, 2):
        # Each operand has half of the factor: float16 has no normal number below 2**-14.
        a[rank], b[rank] = a[rank] * SMALL**0.5, b[rank] * SMALL**0.5
    if world_size > 2:
        a[2], b[2] = -a[0], b[0]
    bias = integers(N) * 2**6 * SMALL
    for each in (*a, *b, bias):
        assert torch.equal(each.to(dtype).float(), each)
    return [each.to(dtype) for each in a], [each.to(dtype) for each in b], bias.to(dtype)


def partials(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Return the exact products, rounded once to the operands' dtype."""
    exact = [a_r.double() @ b_r.double() for a_r, b_r in zip(a, b, strict=True)]
    for each in exact:
        assert torch.equal(each.float().double(), each)
    return [each.to(a[0].dtype) for each in exact]


def literal_sum(parts: Sequence[Tensor], bias: Tensor | None, order: Sequence[int]) -> Tensor:
    """Add parts in float32 in `order`, then the bias, and round once."""
    out = parts[order[0]].float()
    for rank in order[1:]:
        out = out + parts[rank].float()
    if bias is not None:
        out = out + bias.float()
    return out.to(parts[0].dtype)


def same_bits(out: Tensor, expected: Tensor, name: str) -> None:
    bits = torch.int32 if out.dtype == torch.float32 else torch.int16
    differ = out.view(bits) != expected.view(bits)
    assert not differ.any(), f"{name}: {int(differ.sum())} of {out.numel()} elements differ"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operands_tell_orders_apart(dtype: str) -> None:
    """Without this the comparisons below would prove nothing."""
    a, b, bias = exact_operands(4, getattr(torch, dtype))
    parts = partials(a, b)
    right = literal_sum(parts, bias, range(4))
    wrong = {
        "the own partial first, on rank 1": literal_sum(parts, bias, (1, 2, 3, 0)),
        "the own partial first, on rank 2": literal_sum(parts, bias, (2, 3, 0, 1)),
        "the own partial last, on rank 0": literal_sum(parts, bias, (1, 2, 3, 0)),
        "the own partial last, on rank 2": literal_sum(parts, bias, (3, 0, 1, 2)),
        "from the last rank down": literal_sum(parts, bias, (3, 2, 1, 0)),
        "in pairs": ((parts[0].float() + parts[1]) + (parts[2].float() + parts[3]) + bias).to(right.dtype),
        "the bias first": literal_sum([bias.expand(M, N), *parts], None, range(5)),
        "the bias on the last partial": literal_sum([*parts[:3], parts[3] + bias], None, range(4)),
        "a running sum in the dtype": ((parts[0] + parts[1]) + parts[2]) + parts[3] + bias,
        "the bias after rounding": literal_sum(parts, None, range(4)) + bias,
        "exactly": (sum(each.double() for each in parts) + bias.double()).to(right.dtype),
    }
    if dtype == "float32":
        # Sums of small numbers are exact in float32, and rounding to the dtype changes nothing.
        del wrong["a running sum in the dtype"], wrong["the bias after rounding"], wrong["the bias on the last partial"]
    else:
        exact = [a_r.float() @ b_r.float() for a_r, b_r in zip(a, b, strict=True)]
        wrong["partials not rounded"] = literal_sum(exact, bias, range(4)).to(right.dtype)
    for name, other in wrong.items():
        assert not torch.equal(other, right), name


def one(schedule: str, group: ProcessGroup, op: str, *operands: Tensor | None, **options: Any) -> Tensor:
    return direct.one(op, schedule, group, *operands, **options)


def sums_are_literal(group: ProcessGroup, schedule: str, dtype: str) -> None:
    rank, world_size, run = group.rank(), group.size(), partial(one, schedule, group)
    a, b, bias = exact_operands(world_size, getattr(torch, dtype))
    parts = partials(a, b)
    rows, cols = even_sizes(M, world_size), even_sizes(N, world_size)
    with_bias, without = (literal_sum(parts, each, range(world_size)) for each in (bias, None))
    mine = a[rank], b[rank]
    for dim, sizes in ((0, rows), (1, cols)):
        for each, whole in ((bias, with_bias), (None, without)):
            out = run("matmul_reduce_scatter", *mine, each, dim=dim, sizes=sizes)
            same_bits(out, reference.chunk(whole, dim, rank, sizes), f"matmul_reduce_scatter, dim {dim}")
    same_bits(
        run("reduce_scatter", parts[rank], sizes=rows, algorithm="direct"),
        reference.chunk(without, 0, rank, rows), "reduce_scatter",
    )  # fmt: skip
    for algorithm in ("one_shot", "two_shot", "auto"):
        out = run("matmul_all_reduce", *mine, bias, algorithm=algorithm)
        same_bits(out, with_bias, f"{algorithm} of a matmul")
        same_bits(run("all_reduce", parts[rank], algorithm=algorithm), without, algorithm)
    # A gather sums nothing over ranks: one exact product, the bias, one rounding, for either gathered dim.
    bias = bias / SMALL
    exact = [a_r.float() @ b[0].float() + bias.float() for a_r in a[::2]]
    out = run("all_gather_matmul", a[rank // 2 * 2], b[0], bias, sizes=(M,) * world_size)
    rows = [exact[peer // 2] for peer in range(world_size)]
    same_bits(out, torch.cat(rows).to(bias.dtype), f"{schedule} all_gather_matmul, rows")
    k_sizes = even_sizes(K_R, world_size)
    a_shard_k = reference.chunk(a[0], 1, rank, k_sizes)
    out = run("all_gather_matmul", a_shard_k, b[0], bias, dim=1, sizes=k_sizes)
    same_bits(out, exact[0].to(bias.dtype), f"{schedule} all_gather_matmul, contraction")


@pytest.mark.parametrize(("dtype", "world_size"), spread(DTYPES, [2, 3, 4]))
@pytest.mark.parametrize("schedule", SUMMING)
def test_sums_are_literally_in_rank_order(pool: RankPool, schedule: str, dtype: str, world_size: int) -> None:
    pool.run(sums_are_literal, schedule, dtype, world_size=world_size)
    if schedule == "decomposed":
        pool.run(by_chunk, sums_are_literal, schedule, dtype, world_size=world_size)


def by_chunk(group: ProcessGroup, check: Callable[..., Any], *arguments: Any) -> Any:
    """Run `check` with chunks multiplied one by one, even if rows are few."""
    with mock.patch.object(decomposed, "AT_ONCE_ROWS", 0):
        return check(group, *arguments)


def two_runs(group: ProcessGroup, schedule: str, dtype: str) -> dict[str, Tensor]:
    """Run each op twice, check that the bits are the same, and return the results. Rank 0 has an empty shard, and the
    contraction is longer than a tile.
    """
    sizes = [(0, *even_sizes(length, group.size() - 1)) for length in (34, 29, 83)]
    layouts = (("contiguous",) * 3,) * group.size()
    calls = [Call(schedule, op, option, dtype, *sizes, layouts, True, 5) for op, option in VARIANTS[schedule]]
    operands = {f"{call.op} {call.option}": Operands(call, group.rank()) for call in calls}
    first, again = ({name: each.issue(group) for name, each in operands.items()} for _ in range(2))
    for name, out in again.items():
        same_bits(out, first[name], f"{name} again on rank {group.rank()}")
    return first


@pytest.mark.parametrize(("schedule", "dtype"), spread(SUMMING, DTYPES))
def test_same_bits_on_every_run_and_every_rank(pool: RankPool, schedule: str, dtype: str) -> None:
    check_ranks(pool.run(two_runs, schedule, dtype, world_size=3))
    if schedule == "decomposed":
        check_ranks(pool.run(by_chunk, two_runs, schedule, dtype, world_size=3))


def check_ranks(by_rank: list[dict[str, Tensor]]) -> None:
    for rank, outs in enumerate(by_rank):
        for name, out in outs.items():
            if name.startswith(("all_gather ", "all_reduce", "matmul_all_reduce")):
                same_bits(out, by_rank[0][name], f"{name} on rank {rank} and on rank 0")
        # For a matmul only exact partials (above) are compared: a library may add others in another order for another
        # number of rows.
        same_bits(outs["all_reduce one_shot"], outs["all_reduce two_shot"], "all_reduce, one shot and two")
