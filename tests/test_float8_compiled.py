"""float8 operands with scales in graphs of torch.compile: whole graphs, dynamic lengths, the same bits as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import Scaled, scaled
from fusedtp.bench.ranks import RankPool
from fusedtp.float8 import _power_of_two

from .harness import LARGE, few_kernels
from .test_compile import seen_by

RECIPES = ("rowwise", "tensorwise", "mxfp8")
Call = Callable[..., Any]
# Rows of each rank in successive calls of one graph.
ROWS = (6, 14)


def calls(group: ProcessGroup) -> dict[str, tuple[Call, int]]:
    """Return every function that takes `Scaled`, as a function of x and a weight [24, K], and its K."""
    bias, other = torch.randn(24).bfloat16(), torch.randn(24).bfloat16()
    w2 = torch.randn(24, 64)
    features = 64 * group.size()

    def gated(x: Scaled, w: Scaled, recipe: Any, **given: Any) -> Tensor:
        return fusedtp.all_gather_linear(x, (w, scaled(w2, recipe)), (bias, None), activation="swiglu", **given)

    def several(x: Scaled, w: Scaled, recipe: Any, **given: Any) -> Any:
        return fusedtp.all_gather_linear(x, (w, scaled(w2, recipe)), (None, other), **given)

    def of_features(x: Scaled, w: Scaled, recipe: Any, **given: Any) -> Any:
        return fusedtp.all_gather_linear(x, w, bias, gather_dim=-1, **given)

    def summed(x: Scaled, w: Scaled, recipe: Any, **given: Any) -> Tensor:
        return fusedtp.linear_all_reduce(x, w, bias, residual=x.values(torch.bfloat16)[:, :24], **given)

    return {
        "gather": (lambda x, w, recipe, **given: fusedtp.all_gather_linear(x, w, bias, **given), 64),
        "gated": (gated, 64), "several": (several, 64), "features": (of_features, features), "all-reduce": (summed, 64),
        "scatter": (lambda x, w, recipe, **given: fusedtp.linear_reduce_scatter(x, w, bias, **given), 64),
        "fsdp": (lambda x, w, recipe, **given: fusedtp.fsdp_linear(x, w, **given), 64),
    }  # fmt: skip


def same(found: Any, expected: Any, what: str) -> None:
    found, expected = (each if isinstance(each, tuple) else (each,) for each in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype, what
        assert one.stride() == other.stride(), what
        assert torch.equal(one, other), what


def whole_graphs(group: ProcessGroup, schedule: str, shift: int) -> None:
    """Check operands made inside the graph and passed in, with dynamic rows, and one operator a call."""
    # Compiling is slow, so each schedule has every fourth function; `nox -s soak` takes all.
    turns = list(enumerate(calls(group).items()))
    for i, (name, (call, K)) in turns if LARGE else turns[shift::4]:
        recipe: Any = RECIPES[(i + shift) % len(RECIPES)]
        inside = (i // 2 + shift) % 2 == 0

        def function(x: Any, w: Any, call: Call = call, recipe: Any = recipe, inside: bool = inside) -> Any:
            x, w = (scaled(x, recipe), scaled(w, recipe)) if inside else (x, w)
            return call(x, w, recipe, group=group, schedule=schedule)

        torch.compiler.reset()
        seen, graphs = seen_by("aot_eager")
        compiled = torch.compile(function, fullgraph=True, backend=seen, dynamic=True)
        for rows in ROWS:
            operands = (torch.randn(rows, 64), torch.randn(24, K))
            given: Any = operands if inside else [scaled(each, recipe) for each in operands]
            same(compiled(*given), function(*given), f"{name}, {recipe}, {inside}, {rows} rows")
        # Scaling in blocks is an operator of its own.
        asked = [[each for each in ops if "_blocks." not in each] for ops in graphs]
        assert asked == [["fusedtp.matmul.default"]], (name, recipe, inside, graphs)
    torch.compiler.reset()


@pytest.mark.parametrize(("schedule", "shift"), [("decomposed", 0), ("unfused", 1)])
def test_whole_graphs(pool: RankPool, schedule: str, shift: int) -> None:
    """Functions, recipes and the place where operands are made alternate: `shift` changes the pairs."""
    pool.run(whole_graphs, schedule, shift, world_size=2, timeout=400)


def compiled_block(group: ProcessGroup, backend: str) -> None:
    """Check compiled casts beside our kernel, and a scale that ranks agree on inside the graph."""

    def block(x: Tensor, w: Tensor, v: Tensor, recipe: Any) -> tuple[Tensor, Scaled]:
        y = fusedtp.all_gather_linear(scaled(x, recipe), scaled(w, recipe), group=group, schedule="fused")
        agreed = {"group": group} if recipe == "tensorwise" else {}
        half = scaled(y.relu(), recipe, **agreed)  # type: ignore[arg-type]
        return fusedtp.linear_reduce_scatter(half, scaled(v, recipe), group=group, out_dtype=torch.float32), half

    w, v, x = torch.randn(32, 64), torch.randn(16, 32), torch.randn(6, 64) * (1 + group.rank())
    with few_kernels():
        for recipe in RECIPES[1:]:
            torch.compiler.reset()
            found, half = torch.compile(block, fullgraph=True, backend=backend)(x, w, v, recipe)
            expected, its = block(x, w, v, recipe)
            assert torch.equal(half.data.view(torch.uint8), its.data.view(torch.uint8)), recipe
            assert torch.equal(half.scale.float(), its.scale.float()), recipe
            same(found, expected, recipe)
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if LARGE else [])])
def test_a_compiled_block(pool: RankPool, backend: str) -> None:
    pool.run(compiled_block, backend, world_size=2, timeout=400)


def last_blocks(group: ProcessGroup) -> None:
    """Check a last block that is shorter than the others, in a static graph and in a dynamic one."""

    def both(x: Tensor) -> tuple[Scaled, Tensor]:
        made = scaled(x, "mxfp8")
        return made, made.values()

    x = torch.randn(6, 70, generator=torch.Generator().manual_seed(0))
    expected, values = both(x)
    for dynamic in (False, True):
        torch.compiler.reset()
        with few_kernels():
            found, its = torch.compile(both, fullgraph=True, dynamic=dynamic)(x)
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.scale.view(torch.uint8), expected.scale.view(torch.uint8))
        assert torch.equal(its, values)
    torch.compiler.reset()


def test_the_last_block_of_a_row_by_inductor(pool: RankPool) -> None:
    pool.run(last_blocks, world_size=1, timeout=400)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_powers_of_two(dtype: torch.dtype) -> None:
    """The bit operations equal the arithmetic: the smallest power of two that is at least the quotient."""
    largest = torch.finfo(dtype).max
    bits = torch.randint(0, 0x7F800000, (100_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    at = torch.tensor([largest * 2.0**power for power in range(-160, 100)]).view(torch.int32)
    most = torch.cat([bits, at, at + 1, (at - 1).clamp_min(0)]).view(torch.float32)
    quotient = (most.double() / largest).clamp_min(torch.finfo(torch.float32).tiny)
    assert torch.equal(_power_of_two(most, largest).double(), 2.0 ** quotient.log2().ceil())
