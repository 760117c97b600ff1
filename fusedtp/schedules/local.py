"""Products by the library: any schedule on one rank, and the matmuls beside a collective.

The library multiplies, or our kernel if the order is a tree (`kernels.contraction`): its bits are those that a
collective's kernels give to the same product.

On CPUs with AMX, torch's 16-bit matmul needs padded operands. oneDNN reads an operand's rows up to a multiple of 32
elements there and multiplies the elements past a row's end by zeros. NaN or infinity past the end is NaN in the
result, whatever tensor it belongs to (oneDNN issue 5717, fixed in oneDNN by pull request 5723 of July 2026; torch 2.13
still has the bug). So views whose rows end elsewhere are copied and padded with zeros. Contiguous rows are left alone,
as by torch: NaN in one may reach the result's previous row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import locks, trace
from ..epilogue import Epilogue, end, ended, into
from ..float8 import BLOCK, E8M0, FNUZ
from ..op import Product, Task
from ..scaled import Matrix, Quantized, by_columns
from ..torch_private import FakeTensor, scaled_mm
from .verbs import Gather, GatherSpec, Pending, ScatterSpec, ScheduleImpl

# dtypes for which fast paths to a matmul call `padded`.
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

    epilogue, config = epilogue_of([Epilogue(bias=bias)]), config_for(a.device, a.dtype, tree=True)
    multiply = partial(matmul, a, b, out, epilogue, config=config, leaves=leaves, more=more)
    # Beside a collective, the op holds the interpreter's lock already.
    if not INTERPRETED or locks.is_mine(locks.INTERPRETER):
        multiply()
    else:
        locks.alone(locks.INTERPRETER, "a product in leaves", multiply)
    return out


class SingleRank(ScheduleImpl):
    """`verbs.ScheduleImpl` for one rank; `leaves` as in `op.Task`."""

    rank, world_size, sums = 0, 1, "of one rank"

    def __init__(self, leaves: int = 0) -> None:
        self._leaves = leaves

    def one_shot(self, task: Task) -> bool:
        return True

    def gather(self, what: GatherSpec) -> LocalGather:
        return LocalGather(what.dim)

    def scatter(self, what: ScatterSpec) -> LocalScatter:
        return LocalScatter(self._leaves)


class LocalGather(Gather):
    """`verbs.Gather` for one rank: X is this rank's part, maybe the caller's own tensor."""

    lends = True

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def start(self, x: Matrix) -> Pending:
        return Pending(self, x)

    def read(self, of: Pending) -> Matrix:
        return of.x.t() if self.dim == 1 else of.x

    def whole(self, of: Pending, out: Tensor | None = None) -> Tensor:
        return of.x.clone(memory_format=torch.contiguous_format) if out is None else out


class LocalScatter(threading.local):
    """`verbs.Scatter` for one rank, whose ops no lock keeps apart: each thread has its own terms."""

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        self._terms = terms

    def put(self, x: Tensor) -> None:
        pass

    def sum(
        self, epilogue: Epilogue, *, own: Tensor | None, last: bool, out: Tensor | None = None
    ) -> list[Tensor]:  # fmt: skip
        if own is not None:
            return [own.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(own)]
        terms = self._terms
        del self._terms
        if self._leaves:
            # The kernel that adds up subtrees rounds once too, with bias and residual.
            total = tree_product(terms, self._leaves, dtype=torch.float32)
            epilogue.add_to(total)
            made = total.to(terms[0][0].dtype)
            return epilogue.with_norm(made if out is None else out.copy_(made))
        addend = epilogue.addend
        return epilogue.finish(summed(terms, addend, out=out), addend)


def multiply(x: Pending | Matrix, products: Sequence[Product], leaves: int = 0) -> list[Tensor]:
    """Return the products with X, which may be pending; `leaves` as in `op.Task`."""
    lent = False
    if type(x) is Pending:
        gather = x.gather
        if gather.by_parts:
            return _by_parts(x, products)
        x, lent = gather.read(x), gather.lends
    outs: list[Tensor] = []
    for each in products:
        if each.kind == "whole":
            outs.append(_whole(x, each, lent))
            continue
        by_rows = each.kind == "rows"
        left: Any = x if by_rows else by_columns(x)
        if each.transposed:
            left, right = each.other.t(), left.t() if by_rows else left
        else:
            left, right = left if by_rows else left.t(), each.other
        # The epilogue's `addend`.
        bias, out = each.epilogue.bias, None if each.epilogue.keeps else each.out
        if leaves or type(left) is Quantized or trace.spans is not None:
            outs.append(trace.timed("multiply", -1, mm, left, right, bias, leaves, out))
            continue
        # `mm`, inlined because every small op runs this.
        if left.dtype in NARROW:
            left, right = padded(left, right)
        outs.append(torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out))
    if not products[0].epilogue.ends:
        return outs
    return ended([each.epilogue for each in products], outs, [each.out for each in products])


def _whole(x: Matrix, product: Product, lent: bool) -> Tensor:
    # Return X itself, or X.T, in a tensor of the caller's.
    data: Tensor = x.data if type(x) is Quantized else x
    data = data.t() if product.transposed else data
    if product.out is not None:
        return product.out.copy_(data)  # type: ignore[no-any-return]
    # A tensor without elements counts as contiguous whatever its strides.
    if lent or product.transposed:
        return data.clone(memory_format=torch.contiguous_format)
    return data.contiguous()


def _by_parts(pending: Pending, products: Sequence[Product]) -> list[Tensor]:
    """Compute the products as parts of X arrive.

    Along the contraction each part adds a term, rounded once more. In float8, terms are scaled and added in float32,
    and rounded once.
    """
    gather, x = pending.gather, pending.x
    by_rows, outs = products[0].kind == "rows", list[Tensor]()
    # Float32 sums of products whose contraction is split over float8 parts.
    wides: list[Tensor | None] = [None] * len(products)
    for i, each in enumerate(products):
        shape = gather.shape if each.kind == "whole" else (gather.shape[each.kind == "outer"], each.other.shape[1])
        if each.kind == "outer" and type(x) is Quantized:
            wides[i] = x.data.new_zeros(shape, dtype=torch.float32)
        given = None if each.epilogue.keeps else each.out
        if given is None:
            like = x.data if each.kind == "whole" and type(x) is Quantized else x
            given = like.new_empty(shape[::-1] if each.transposed else shape)
        outs.append(given)
    epilogues = [each.epilogue for each in products]
    ends, transposed = any([each.ends for each in epilogues]), products[0].transposed
    ys = into(epilogues[0], outs, [each.out for each in products]) if ends else outs
    begins, first = gather.begins, True
    for src, part in gather.parts(pending):
        at, rows = slice(begins[src], begins[src + 1]), part.t() if gather.dim == 1 else part
        add = _add if trace.spans is None else partial(trace.timed, "multiply", src, _add)
        its = [each.columns(at) for each in epilogues] if transposed and by_rows else epilogues
        for each, epilogue, out, wide in zip(products, its, outs, wides, strict=True):
            add(each, epilogue, rows, at, out, wide, first)
        if ends and by_rows:
            # The rows are in cache.
            place = (slice(None), at) if transposed else at
            end(its, [out[place] for out in outs], [y[place] for y in ys])
        first = False
    for each, out, wide in zip(products, outs, wides, strict=True):
        if wide is not None:
            bias = each.epilogue.addend
            # The bias of a transposed result has an element for each of its columns, the product's rows.
            made = finish(wide, each.other, bias[:, None] if each.transposed and bias is not None else bias)
            out.copy_(made.t() if each.transposed else made)
    if ends and not by_rows:
        end(epilogues, outs, ys)
    return [*ys, *outs] if epilogues[0].keeps else ys


def _add(
    product: Product, epilogue: Epilogue, rows: Matrix, at: slice, out: Tensor, wide: Tensor | None, first: bool
) -> None:  # fmt: skip
    # Add the contribution of the rows `at` of X to a product.
    if product.kind == "whole":
        out[at] = rows.data if type(rows) is Quantized else rows
        return
    if wide is not None:
        if 0 not in rows.shape:
            wide.add_(term(by_columns(rows).t(), product.other[at]))
        return
    if product.kind == "rows":
        left, right = rows, product.other
        out = out[:, at] if product.transposed else out[at]
    else:
        left, right = rows.t(), product.other[at]
    if product.transposed:
        left, right = right.t(), left.t()
    if not out.numel():
        return
    if first or product.kind == "rows":
        mm(left, right, epilogue.addend, out=out)
    else:
        out.addmm_(*(padded(left, right) if out.dtype in NARROW else (left, right)))


def mm(
    a: Matrix, b: Matrix, bias: Tensor | None = None, leaves: int = 0, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return a [M, K] @ b [K, N] -> [M, N], plus a bias: [N], or [M, N] without leaves. out: a tensor for it."""
    if leaves:
        # Imported late: it loads Triton.
        made = tree_product([(a, b)], leaves, bias)
    elif type(a) is Quantized and type(b) is Quantized:
        made = mm_scaled(a, b, bias)
    else:
        if a.dtype in NARROW:
            a, b = padded(a, b)
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    return made if out is None else out.copy_(made)


def summed(
    terms: Sequence[tuple[Matrix, Matrix]], bias: Tensor | None = None, leaves: int = 0, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return the sum of terms a [M, K] @ b [K, N] (+ bias), rounded after each; float8 and leaves are rounded once.

    out: a tensor for it.
    """
    (a, b), *others = terms
    if leaves or (others and type(a) is Quantized):
        made = tree_product(terms, leaves, bias) if leaves else summed_scaled(terms, bias)
        return made if out is None else out.copy_(made)
    out = mm(a, b, bias, out=out)
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


# Library products of float8 operands with scales: torch's scaled matmul if it takes them, else a wider matmul.


def term(a: Quantized, b: Quantized) -> Tensor:
    """Return a [M, K] @ b [K, N] with a's scales in float32: one part of a contraction that `finish` ends."""
    if a.data.is_cuda and a.blocks is None and _multiplied_by_library(a, b):
        return of_data(a, b).mul_(a.row_scales()[:, None])
    wide = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    # With `out`, as torch.autocast would otherwise cast both to bfloat16.
    torch.mm(a.widened(), b.widened(), out=wide)
    return wide if a.blocks is not None else wide.mul_(a.row_scales()[:, None])


def _times_columns(wide: Tensor, b: Quantized) -> Tensor:
    # Apply b's scales, unless they are of blocks and applied already.
    return wide if b.blocks is not None else wide.mul_(b.t().row_scales())


def summed_scaled(terms: Sequence[tuple[Quantized, Quantized]], bias: Tensor | None = None) -> Tensor:
    """Return the sum of several a @ b (+ bias), rounded once."""
    wides = [_times_columns(term(a, b), b) for a, b in terms]
    wide = wides[0]
    for other in wides[1:]:
        wide.add_(other)
    return (wide if bias is None else wide.add_(bias)).to(terms[0][0].dtype)


def finish(wide: Tensor, b: Quantized, bias: Tensor | None = None) -> Tensor:
    """Return a sum of terms with b's scales (+ bias, [N] or as the result), rounded."""
    wide = _times_columns(wide, b)
    return (wide if bias is None else wide.add_(bias)).to(b.dtype)


def mm_scaled(a: Quantized, b: Quantized, bias: Tensor | None = None) -> Tensor:
    """Return a [M, K] @ b [K, N] (+ bias, [N] or as the result), in the operands' result dtype."""
    if a.data.is_cuda and a.dtype == torch.bfloat16 and _multiplied_by_library(a, b):
        return by_library(a, b, bias)
    if a.data.is_cuda and a.blocks is not None and a.dtype == torch.bfloat16:
        # Both are exact in bfloat16, and the library adds in float32.
        return in_bfloat16(a, b, bias)
    return finish(term(a, b), b, bias)


def in_bfloat16(a: Quantized, b: Quantized, bias: Tensor | None = None) -> Tensor:
    """Compute `mm_scaled` of blocks by a matmul in bfloat16."""
    left, right = a.widened(torch.bfloat16), b.widened(torch.bfloat16)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _multiplied_by_library(a: Quantized, b: Quantized) -> bool:
    # torch's cuBLAS and CUTLASS take multiples of 16, and no two e5m2. They take row scales since capability 9.0, and
    # whole blocks with scales on 10.x only. AMD's libraries are not known here, and no NVIDIA GPU takes fnuz.
    if torch.version.hip is not None or a.data.dtype in FNUZ:
        return False
    (M, K), N = a.shape, b.shape[1]
    both = a.data.dtype == b.data.dtype == torch.float8_e5m2
    fits = M > 0 and K > 0 and N > 0 and K % 16 == N % 16 == 0
    capability = torch.cuda.get_device_capability(a.device)
    known = capability >= (9, 0) if a.blocks is None else capability[0] == 10 and K % BLOCK == 0
    return fits and not both and known


def _laid_out(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """Return the data as the library reads it, a by rows, b by columns; gradients are copied, a byte an element."""
    left, right = a.data, b.data.t()
    left = left if left.stride(1) == 1 and left.stride(0) % 16 == 0 else left.contiguous()
    right = right if right.stride(1) == 1 and right.stride(0) % 16 == 0 else right.contiguous()
    return left, right.t()


def of_data(a: Quantized, b: Quantized) -> Tensor:
    """Return the product of the data alone by torch's scaled matmul, in float32."""
    one = torch.ones((), dtype=torch.float32, device=a.device)
    out: Tensor = scaled_mm(*_laid_out(a, b), one, one, out_dtype=torch.float32)
    return out


def by_library(a: Quantized, b: Quantized, bias: Tensor | None = None) -> Tensor:
    if a.blocks is not None:
        scales = blocks_for_library(a.scale), blocks_for_library(b.t().scale)
    else:
        scales = a.row_scales()[:, None], b.t().row_scales()[None, :]
    if bias is not None and bias.ndim > 1:
        return by_library(a, b).add_(bias)
    out: Tensor = scaled_mm(*_laid_out(a, b), *scales, bias=bias, out_dtype=a.dtype)
    return out


def blocks_for_library(scale: Tensor) -> Tensor:
    """Return scales [R, B] of blocks in cuBLAS's layout: tiles of 128 rows and 4 columns, by rows of tiles.

    In a tile, the scale of row r and column c is at byte 16 (r % 32) + 4 (r // 32) + c (cuBLAS, "1D block scaling
    factors layout").
    """
    rows, cols = scale.shape
    down, across = -(-rows // 128), -(-cols // 4)
    padded = scale.new_zeros(down * 128, across * 4)
    padded[:rows, :cols] = scale
    tiles = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(E8M0)
