"""Multiply whole local operands: any schedule on one rank, and the matmuls beside a collective.

The library multiplies, or our kernel if the order is a tree (`kernels.contraction`): its bits are those that a
collective's kernels give to the same product.

On CPUs with AMX, torch's 16-bit matmul needs padded operands. oneDNN reads an operand's rows up to a multiple of 32
elements there and multiplies the elements past a row's end by zeros. NaN or infinity past the end is NaN in the
result, whatever tensor it belongs to (oneDNN issue 5717, fixed in oneDNN by pull request 5723 of July 2026; torch 2.13
still has the bug). So views whose rows end elsewhere are copied and padded with zeros. Contiguous rows are left alone,
as by torch: NaN in one may reach the result's previous row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from .. import activations, locks, norms, scaled_mm
from ..norms import Norm
from ..op import GATED, Task
from ..scaled import Matrix, Quantized, by_columns
from ..torch_private import FakeTensor
from .verbs import Epilogue, Product

# The fast paths to a matmul call `padded` only for these.
NARROW = (torch.bfloat16, torch.float16)
_STEP = 32


@cache
def _has_amx() -> bool:
    try:
        return "amx_" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def reads_beside(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's matmul may read past the rows of its operands."""
    return dtype in NARROW and device.type == "cpu" and _has_amx()


def padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [K, N], or copies padded with zeros along K if torch reads past their rows."""
    if a.shape[1] % _STEP == 0 or not reads_beside(a.dtype, a.device):
        return a, b
    return _rows(a), _rows(b.t()).t()


def _rows(x: Tensor) -> Tensor:
    rows, K = x.shape
    if x.stride(1) != 1 or x.stride(0) == K:
        return x
    whole = torch.zeros(rows, -(-K // _STEP) * _STEP, dtype=x.dtype, device=x.device)
    return whole[:, :K].copy_(x)


def tree_product(
    terms: Sequence[tuple[Tensor, Tensor]], leaves: int, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum of terms a [M, K] @ b [K, N] (+ bias [N]), in a's dtype or in `dtype`."""
    (a, b), *more = terms
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype or a.dtype, device=a.device)
    # A compiler's fake tensors have shapes alone.
    if isinstance(out, FakeTensor) or not out.numel():
        return out
    # Imported late, as these load Triton.
    from ..kernels import INTERPRETED
    from ..kernels.epilogue import epilogue_of
    from ..kernels.launch import config_for
    from ..kernels.matmul import matmul

    epilogue, config = epilogue_of(bias, per_row=False), config_for(a.device, a.dtype, tree=True)
    multiply = partial(matmul, a, b, out, epilogue, config=config, leaves=leaves, more=more)
    # Beside a collective, the op has the interpreter already.
    if not INTERPRETED or locks.is_mine(locks.INTERPRETER):
        multiply()
    else:
        locks.alone(locks.INTERPRETER, "a product in leaves", multiply)
    return out


class Alone:
    """`verbs.Verbs` for one rank; `leaves` as in `op.Task`."""

    where, by_host, sent_by, layout = "after it", False, "", None

    rank, world_size = 0, 1

    def __init__(self, leaves: int = 0) -> None:
        self._leaves = leaves

    def one_shot(self, task: Task) -> bool:
        return True

    def gather(
        self, sizes: Sequence[int], other: int, dim: int, *, products: Sequence[str] = (), result: int = 0,
        beside: bool = False, sums: bool = False,
    ) -> LocalGather:  # fmt: skip
        return LocalGather(dim, self._leaves)

    def scatter(self, sizes: Sequence[int], other: int, dim: int, *, to_all: bool, multiplies: bool) -> LocalScatter:
        return LocalScatter(self._leaves)


class LocalGather:
    """`verbs.Gather` for one rank."""

    def __init__(self, dim: int, leaves: int) -> None:
        self._dim, self._leaves = dim, leaves

    def start(self, x: Matrix) -> None:
        pass

    start_beside = start

    def multiply(self, x: Matrix, products: Sequence[Product]) -> list[Tensor]:
        return multiplied(x.t() if self._dim == 1 else x, products, self._leaves)

    def whole(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)


class LocalScatter:
    """`verbs.Scatter` for one rank."""

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        self._terms = terms

    def put(self, x: Tensor) -> None:
        pass

    def sum(self, epilogue: Epilogue, *, own: Tensor | None, last: bool) -> list[Tensor]:
        if own is not None:
            return [own.clone(memory_format=torch.contiguous_format)]
        terms = self._terms
        del self._terms
        if self._leaves:
            return with_norm(epilogue.norm, _as_tree(terms, self._leaves, epilogue))
        out = summed(terms, epilogue.bias)
        if epilogue.residual is not None:
            out.add_(epilogue.residual)
        return with_norm(epilogue.norm, out)


def _as_tree(terms: Sequence[tuple[Tensor, Tensor]], leaves: int, epilogue: Epilogue) -> Tensor:
    # The kernel that adds up subtrees rounds once too, with bias and residual.
    out = tree_product(terms, leaves, dtype=torch.float32)
    for added in (epilogue.bias, epilogue.residual):
        if added is not None:
            out.add_(added)
    return out.to(terms[0][0].dtype)


def with_norm(norm: Norm | None, y: Tensor) -> list[Tensor]:
    return [y] if norm is None else [y, norms.apply(norm, y)]


def multiplied(whole: Matrix, products: Sequence[Product], leaves: int = 0) -> list[Tensor]:
    """Return the products with `whole`, the gathered X; `leaves` as in `op.Task`."""
    outs = []
    for each in products:
        left, right = whole if each.kind == "rows" else by_columns(whole).t(), each.other
        bias = each.epilogue.bias
        if each.transposed:
            left, right = right.t(), left.t()
        outs.append(mm(left, right, bias, leaves))
    return activated(products[0].epilogue, outs)


def activated(epilogue: Epilogue, zs: list[Tensor]) -> list[Tensor]:
    """Apply the epilogue's activation to the products, in place, or beside them if they are kept."""
    if not epilogue.activation:
        return zs
    ys = into(epilogue, zs)
    activate(epilogue, zs, ys)
    return [*ys, *zs] if epilogue.keeps else ys


def into(epilogue: Epilogue, zs: list[Tensor]) -> list[Tensor]:
    """Return the tensors for an activation's results: the products (gated: the gate), or new ones if they are kept."""
    first = zs[:1] if epilogue.activation in GATED else zs
    return [torch.empty_like(z) for z in first] if epilogue.keeps else first


def activate(epilogue: Epilogue, zs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    if epilogue.activation in GATED:
        activations.apply(epilogue.activation, zs, ys[0])
        return
    for z, y in zip(zs, ys, strict=True):
        activations.apply(epilogue.activation, (z,), y)


def mm(a: Matrix, b: Matrix, bias: Tensor | None = None, leaves: int = 0) -> Tensor:
    """Return a [M, K] @ b [K, N] -> [M, N], plus a bias: [N], or [M, N] without leaves."""
    if leaves:
        # Imported late: it loads Triton.
        return tree_product([(a, b)], leaves, bias)
    if type(a) is Quantized and type(b) is Quantized:
        return scaled_mm.mm(a, b, bias)
    if a.dtype in NARROW:
        a, b = padded(a, b)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def summed(terms: Sequence[tuple[Matrix, Matrix]], bias: Tensor | None = None, leaves: int = 0) -> Tensor:
    """Return the sum of terms a [M, K] @ b [K, N] (+ bias), rounded after each; float8 and leaves are rounded once."""
    (a, b), *others = terms
    if leaves:
        return tree_product(terms, leaves, bias)
    if others and type(a) is Quantized:
        return scaled_mm.summed(terms, bias)
    out = mm(a, b, bias)
    for each in others:
        out.addmm_(*padded(*each))
    return out


def sum_into(terms: Sequence[tuple[Matrix, Matrix]], out: Tensor) -> None:
    if not out.numel():
        return
    first, *others = terms
    if type(first[0]) is Quantized:
        out.copy_(summed(terms))
        return
    torch.mm(*(padded(*first) if out.dtype in NARROW else first), out=out)
    for each in others:
        out.addmm_(*padded(*each))


def summed_rows(x: Tensor, leaves: int) -> Tensor:
    """Return the sum [N] of the rows of x [M, N], in leaves."""
    return mm(x.new_ones(1, x.shape[0]), x, None, leaves)[0]
