"""Any schedule on one rank: nothing is sent, and the library multiplies, or our kernel if the order is a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import activations, norms, scaled_mm
from ..norms import Norm
from ..op import GATED, Task
from ..scaled import Matrix, Quantized, by_columns
from .padded import NARROW, padded
from .verbs import Epilogue, Product


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
    ) -> Gather:  # fmt: skip
        return Gather(dim, self._leaves)

    def scatter(self, sizes: Sequence[int], other: int, dim: int, *, to_all: bool, multiplies: bool) -> Scatter:
        return Scatter(self._leaves)


class Gather:
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


class Scatter:
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
    # The kernel that adds up subtrees rounds once too, with bias and residual. Imported late: it loads Triton.
    from .ordered import product

    out = product(terms, leaves, dtype=torch.float32)
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
        from .ordered import product

        return product([(a, b)], leaves, bias)
    if type(a) is Quantized and type(b) is Quantized:
        return scaled_mm.mm(a, b, bias)
    if a.dtype in NARROW:
        a, b = padded(a, b)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def summed(terms: Sequence[tuple[Matrix, Matrix]], bias: Tensor | None = None, leaves: int = 0) -> Tensor:
    """Return the sum of terms a [M, K] @ b [K, N] (+ bias), rounded after each; float8 and leaves are rounded once."""
    (a, b), *others = terms
    if leaves:
        from .ordered import product

        return product(terms, leaves, bias)
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
