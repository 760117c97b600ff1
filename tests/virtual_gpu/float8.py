"""The fused ops on float8 operands with scales, on virtual ranks; expected: the products of the values.

Scales of rows differ widely, so that a wrong scale is no rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fusedtp
from fusedtp import reference
from fusedtp.float8 import widened
from fusedtp.scaled import Quantized
from fusedtp.workspaces.workspace import Workspace

from .. import oracle
from .shapes import Op, Phases, Shape, laid_out, launches_of, split, value_of

# Includes several weights, and the ops of a layer's forward and gradients.
OPS = (
    "gather rows", "gather rows split", "gather rows transposed", "gather rows own pushed", "gather rows and keep",
    "gather rows several", "gather rows swiglu", "gather rows swiglu kept", "gather contraction",
    "gather contraction split", "scatter rows", "scatter columns", "scatter several", "matmul one_shot",
    "matmul two_shot",
)  # fmt: skip
# Ops on blocks with scales, for which sm_90 has no unit: both operands are widened to bfloat16 in registers.
IN_BLOCKS = "gather rows", "gather rows split", "gather rows several", "gather contraction", "scatter rows"
ONE_OF_EACH_KERNEL = "gather rows split", "gather contraction", "scatter several", "matmul two_shot"
OUT = torch.bfloat16
# Marks x in e4m3, or for odd seeds in e5m2, with a scale for each block.
MXFP8 = torch.float8_e8m0fnu
# The weight's dtype for x of either dtype: gradients, which e5m2 is for, are multiplied with e4m3.
WEIGHT = torch.float8_e4m3fn


class Operands:
    """Random operands of a seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._random, self._seed, self.in_blocks = torch.Generator().manual_seed(seed), seed, dtype == MXFP8
        self.dtype = (WEIGHT, torch.float8_e5m2)[seed % 2] if self.in_blocks else dtype

    def scaled(self, rows: int, cols: int, dtype: torch.dtype | None = None) -> fusedtp.Scaled:
        """Return [rows, cols] with a scale for each row, or for every third seed one scale."""
        # Rows of 1/8 to 8 times the size.
        size = 8 ** (2 * torch.rand(rows, 1, generator=self._random) - 1)
        x = torch.randn(rows, cols, generator=self._random) * size
        if self.in_blocks:
            powers = torch.randint(-2, 3, (1, -(-cols // 32)), generator=self._random)
            x *= 2.0 ** powers.repeat_interleave(32, 1)[:, :cols]
        recipe = "mxfp8" if self.in_blocks else "tensorwise" if self._seed % 3 == 2 else "rowwise"
        return fusedtp.scaled(x, recipe, dtype=dtype or self.dtype)

    def parts(self, sizes: Sequence[int], cols: int, dtype: torch.dtype | None = None) -> list[fusedtp.Scaled]:
        """Return one operand for each number of rows."""
        return [self.scaled(rows, cols, dtype) for rows in sizes]

    def rows(self, rows: int, cols: int) -> Quantized:
        """Return x or a part of it."""
        return Quantized.of(self.scaled(rows, cols), OUT)

    def weight(self, rows: int, cols: int, how: str) -> Quantized:
        """Return [rows, cols] as the right operand of a product, with scales of columns."""
        return laid(Quantized.of(self.scaled(cols, rows, WEIGHT), OUT).t(), how)

    def bias(self, length: int, shape: Shape) -> Tensor | None:
        """Return a bias for results, or None."""
        return torch.randn(length, generator=self._random).to(OUT) if shape.bias else None


def of_blocks(length: int, world_size: int, how: str) -> tuple[int, ...]:
    """Return shares of a gathered contraction: each begins with a block, and the last may end inside a block."""
    sizes = list(split(-(-length // 32) * 32, world_size, how, 32))
    last = max(rank for rank, size in enumerate(sizes) if size)
    sizes[last] -= -length % 32
    return tuple(sizes)


def laid(x: Quantized, how: str) -> Quantized:
    """Lay out the data as `laid_out` does."""
    return Quantized(laid_out(x.data.view(torch.uint8), how).view(x.data.dtype), x.scale, x.dtype, blocks=x.blocks)


def exact(x: Quantized | fusedtp.Scaled) -> Tensor:
    """Return the values in float64."""
    if isinstance(x, fusedtp.Scaled):
        x = Quantized.of(x, OUT)
    return x.widened(torch.float64) if x.blocks is not None else widened(x.data).double() * x.scale.double()


def _values(xs: Sequence[Quantized], dim: int = 0) -> Tensor:
    return torch.cat([exact(x) for x in xs], dim)


def problem(name: str, world_size: int, dtype: torch.dtype, seed: int, shape: Shape, by: str = "push") -> Op:
    """Return the op `name` on random operands; dtype: of x, which travels in a gather."""
    make, M, N, K = Operands(seed, dtype), shape.M, shape.N, shape.K
    unit = 1 if shape.split == "empty" else 16
    of = {"float8": make.dtype, "in_blocks": make.in_blocks}
    m_sizes = split(M, world_size, shape.split, unit)
    kind, _, how = name.partition(" ")
    in_blocks = make.in_blocks and kind == "gather"
    k_sizes = of_blocks(K, world_size, shape.split) if in_blocks else split(K, world_size, shape.split, unit)
    bias = make.bias(N, shape)

    def everywhere(*xs: Tensor) -> list[Tensor]:
        return [xs[0] if len(xs) == 1 else torch.cat([x.flatten() for x in xs])] * world_size

    if kind == "gather" and how.startswith("rows"):
        a = make.rows(M, K)
        lies = "columns" if how == "rows own pushed" else shape.a
        shards = [laid(a[sum(m_sizes[:r]) :][: m_sizes[r]], lies) for r in range(world_size)]
        more = how.startswith(("rows several", "rows swiglu"))
        # Widths that may differ are no multiple of a tile.
        widths = [N, N + 40 if how == "rows several" else N] if more else [N]
        ws = [make.weight(K, width, shape.b) for width in widths]
        turned, activation, keeps = how == "rows transposed", "swiglu" * ("swiglu" in how), how.endswith("kept")
        biases = [make.bias(M if turned else width, shape) for width in widths]
        whole = exact(a)
        zs = [oracle.product(whole, exact(w).t(), None if turned else b, OUT) for w, b in zip(ws, biases, strict=True)]
        if turned and biases[0] is not None:
            along = biases[0].double()[:, None]
            zs[0].value += along
            zs[0].off += 2 * torch.finfo(OUT).eps * (along.abs() + zs[0].value.abs())
        outs = [*(oracle.results(activation, zs) if activation else zs), *(zs if keeps else ())]
        expected, allowed = [out.value for out in outs], [out.off for out in outs]
        right = None
        if how == "rows and keep":
            right = whole.new_empty(M, 1).to(OUT)
            expected.append(value_of(a).double())
            allowed.append(torch.zeros_like(expected[-1]))
        others = [each for pair in zip(ws[1:], biases[1:], strict=True) for each in pair]
        operands = [ws[0], biases[0], right, *others]

        def gather(ws: Workspace, rank: int) -> Phases:
            return launches_of(
                "all_gather_matmul", ws, shards[rank], *(operands if right is not None or more else operands[:2]),
                sizes=m_sizes, transposed=turned, activation=activation, keeps=keeps, **of,
                split=how == "rows split", producer=by,
            )  # fmt: skip

        if turned:
            expected, allowed = [x.t() for x in expected], [x.t() for x in allowed]
        return gather, everywhere(*expected), everywhere(*allowed)
    parts = [make.rows(M, size) for size in k_sizes]
    if kind == "gather":
        w = make.weight(K, N, shape.b)
        whole, right = _values(parts, 1), exact(w)
        shards = [laid(part, shape.a) for part in parts]
        return (
            lambda ws, rank: launches_of(
                "all_gather_matmul", ws, shards[rank], w, bias, sizes=k_sizes, dim=1, **of,
                split=how.endswith("split"), producer=by,
            ),
            everywhere(reference.matmul(whole, right, bias)), everywhere(reference.bound(whole, right, OUT, bias=bias)),
        )  # fmt: skip
    # Every rank has terms of a sum, with its own scales.
    terms = [[(part, make.weight(part.shape[1], N, shape.b))] for part in parts]
    if how == "several":
        for each, size in zip(terms, k_sizes, strict=True):
            each.append((make.rows(M, size + 24), make.weight(size + 24, N, shape.b)))
    left, right = (torch.cat([_values([pair[i] for pair in each], 1 - i) for each in terms], 1 - i) for i in (0, 1))
    lengths = [sum(a.shape[1] for a, _ in each) for each in terms]
    summed, allowed = reference.matmul(left, right, bias), reference.bound(left, right, OUT, k_sizes=lengths, bias=bias)
    terms = [[(laid(a, shape.a), b) for a, b in each] for each in terms]
    if kind == "scatter":
        dim = int(how == "columns")
        sizes = split(N, world_size, shape.split, unit) if dim else m_sizes

        def scatter(ws: Workspace, rank: int) -> Phases:
            (a, b), *others = terms[rank]
            more = [each for pair in others for each in (*pair, None)]
            return launches_of(
                "matmul_reduce_scatter", ws, a, b, bias, *([None, None, None] if more else []), *more, sizes=sizes,
                dim=dim, **of,
            )  # fmt: skip

        return scatter, list(summed.split(sizes, dim)), list(allowed.split(sizes, dim))
    return (
        lambda ws, rank: launches_of(
            "matmul_all_reduce", ws, *terms[rank][0], bias, algorithm=how, **of
        ),
        everywhere(summed), everywhere(allowed),
    )  # fmt: skip
