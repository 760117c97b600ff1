"""Oracle of the tests and the sweep: the unsharded op in float64, its chunks, and the error that rounding may make.

A check is `|out - ref| <= allowed` for every element. `allowed` is a worst-case bound, not a fitted tolerance. With e
the output dtype's `eps`, e32 float32's, and the partial products p_r = a_r @ b_r over the parts of K:

    rounding the inputs      nothing: the reference is taken on the values that the op was given
    accumulating p_r         K_r * e32 * (|a_r| @ |b_r|): K_r roundings in any order, each of a partial sum under |a||b|
    rounding p_r             e * |p_r|, once per partial; nothing if the contraction is not cut
    summing W partials       W * e_sum * sum |p_r|, e_sum being e32, or e if a backend sums in the output's dtype
    adding the bias          (K * e32 + e_sum) * |bias|: a library may begin the sum of K products with it
    rounding the result      e * |ref|

(Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4.) eps is twice the unit roundoff: it covers
conversions and tensor-core accumulators that truncate, and the second-order terms that the list leaves out. On random
normal input the bound stays far below the error of a mistake. |a||b| grows like 0.64 K, so at K = 8192 in float32 the
bound is 5. There the result has a standard deviation of 90, and a missing chunk of 64 makes an error of 8 in every
element of its tile. Never gate on inputs of ones: they hide a chunk that is used in place of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .shards import even_sizes, offsets


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a [M, K] @ b [K, N] + bias [N] in float64, both whole: the result of gathering or summing over ranks."""
    out = a.double() @ b.double()
    return out if bias is None else out + bias.double()


def total(parts: Sequence[Tensor]) -> Tensor:
    """Return the float64 sum of the ranks' parts: a plain all-reduce."""
    return torch.stack([part.double() for part in parts]).sum(0)


def chunk(whole: Tensor, dim: int, rank: int, sizes: Sequence[int]) -> Tensor:
    """Return rank `rank`'s part of a whole tensor split along `dim`: an input, a reference or a bound."""
    assert sum(sizes) == whole.shape[dim], (sizes, tuple(whole.shape), dim)
    return whole.narrow(dim, offsets(sizes)[rank], sizes[rank])


def bound(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    world_size: int = 1,
    *,
    k_sizes: Sequence[int] | None = None,
    bias: Tensor | None = None,
    sum_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the error allowed in each element of a [M, K] @ b [K, N] + bias, both whole; float64 [M, N].

    The contraction is cut into `k_sizes`, or `world_size` even parts; 1 if nothing is summed over ranks. Partials are
    summed in `sum_dtype`: float32 by the schedules that sum themselves, `dtype` by an unfused backend.
    """
    sizes = even_sizes(a.shape[1], world_size) if k_sizes is None else tuple(k_sizes)
    # float64 operands are accumulated in float64.
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    eps_acc = torch.finfo(accumulator).eps
    eps_sum = max(torch.finfo(sum_dtype).eps, eps_acc) if dtype != torch.float64 else eps_acc
    eps_out = torch.finfo(dtype).eps
    a64, b64 = a.double(), b.double()
    out = a64.new_zeros(a.shape[0], b.shape[1])
    allowed = torch.zeros_like(out)
    cut = len(sizes) > 1
    for a_part, b_part in zip(a64.split(list(sizes), 1), b64.split(list(sizes), 0), strict=True):
        partial = a_part @ b_part
        out += partial
        allowed += a_part.shape[1] * eps_acc * (a_part.abs() @ b_part.abs())
        if cut:
            allowed += (eps_out + len(sizes) * eps_sum) * partial.abs()
    if bias is not None:
        out += bias.double()
        allowed += (a.shape[1] * eps_acc + eps_sum) * bias.double().abs()
    return allowed + eps_out * out.abs() + underflow(dtype, len(sizes))


def total_bound(parts: Sequence[Tensor], dtype: torch.dtype, *, sum_dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the error allowed in each element of a plain sum over ranks, whose terms arrive exactly."""
    eps_sum = torch.finfo(torch.float64 if dtype == torch.float64 else sum_dtype).eps
    size = torch.stack([part.double().abs() for part in parts]).sum(0)
    return len(parts) * eps_sum * size + torch.finfo(dtype).eps * total(parts).abs() + underflow(dtype, len(parts))


def check(out: Tensor, ref: Tensor, allowed: Tensor, name: str) -> None:
    """Raise AssertionError, with the worst element, unless out has ref's shape and |out - ref| <= allowed everywhere.

    NaN and infinity fail. `allowed` of zeros asks for equality.
    """
    assert out.shape == ref.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    got = out.detach().to(ref.device, torch.float64)
    error = (got - ref).abs()
    wrong = ~(error <= allowed)  # NaN compares as wrong
    num_wrong = int(wrong.sum())
    if num_wrong:
        excess = torch.where(wrong, torch.nan_to_num(error - allowed, nan=torch.inf), -1.0)
        flat = int(excess.argmax())
        index = tuple(
            int(i) for i in torch.unravel_index(torch.tensor(flat, dtype=torch.int64, device="cpu"), ref.shape)
        )
        raise AssertionError(
            f"{name}: {num_wrong} of {ref.numel()} elements are wrong, the worst at {index}: "
            f"got {got[index].item():.6g}, expected {ref[index].item():.6g}, "
            f"off by {error[index].item():.3g}, allowed {allowed[index].item():.3g}"
        )


def underflow(dtype: torch.dtype, num_parts: int) -> float:
    """Return the additional error: below the smallest normal number every rounding may lose one subnormal step."""
    info = torch.finfo(dtype)
    return (num_parts + 2) * info.smallest_normal * info.eps


# Elements of a float64 block: 64 MB.
BLOCK = 1 << 23


def accumulate_in_float32() -> None:
    """Make the library's matmuls accumulate in float32, as the bounds assume; cuBLAS does not by default."""
    matmuls = torch.backends.cuda.matmul
    matmuls.allow_bf16_reduced_precision_reduction = False
    matmuls.allow_fp16_reduced_precision_reduction = False
    matmuls.allow_tf32 = False


def _blocks(length: int, other: int) -> Iterator[slice]:
    # Yield slices of `length` with at most BLOCK elements each, `other` elements for each index.
    step = max(1, BLOCK // max(1, other))
    for begin in range(0, length, step):
        yield slice(begin, min(length, begin + step))


class ExactProduct:
    """a [R, K] @ b [K, C] in float64, and the error that an op may leave in it. `k_sizes`: how ranks cut K.

    The float64 product of a large matmul would not fit beside float64 copies of its operands, so product and
    comparison are made block by block. The allowed error is that of `bound`, except for one upper bound: instead of
    |a| @ |b|, a third matmul, this takes |row of a| * |column of b|, which is no less by Cauchy-Schwarz. On normal
    input the bound is pi / 2 times as large, and a missing tile or a wrong scale is still far outside.

    dtype: of the op's result, by default that of the operands. For float8, a and b are the exact products of data and
    scales, in float64. An op that scales rounds twice more; the bound covers that, as it counts each of the K roundings
    of a product twice.
    """

    def __init__(self, a: Tensor, b: Tensor, k_sizes: Sequence[int], dtype: torch.dtype | None = None) -> None:
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        self._dtype, self._parts = dtype or a.dtype, len(k_sizes)
        rows, cols = a.shape[0], b.shape[1]
        self.expected = a.new_zeros((rows, cols), dtype=torch.float64)  # [R, C]
        # Sum over ranks of |partial product|, the reference of the errors of rounding and adding partials.
        self._size = a.new_zeros((rows, cols), dtype=torch.float32) if self._parts > 1 else None
        # For each part of K: K_r * |rows of a|, |columns of b|.
        self._norms: list[tuple[Tensor, Tensor]] = []
        for a_part, b_part in zip(a.split(list(k_sizes), 1), b.split(list(k_sizes), 0), strict=True):
            self._add(a_part, b_part)

    def _add(self, a: Tensor, b: Tensor) -> None:
        K, cols = b.shape
        col_norms = b.new_empty(cols, dtype=torch.float64)
        row_norms = a.new_empty(a.shape[0], dtype=torch.float64)
        for rows in _blocks(a.shape[0], K):
            left = a[rows].double()
            row_norms[rows] = left.norm(dim=1)
            for columns in _blocks(cols, max(K, left.shape[0])):
                right = b[:, columns].double()
                if rows.start == 0:
                    col_norms[columns] = right.norm(dim=0)
                partial = left @ right
                self.expected[rows, columns] += partial
                if self._size is not None:
                    self._size[rows, columns] += partial.abs_()
        self._norms.append((K * row_norms, col_norms))

    def _allowed(self, rows: slice, sum_dtype: torch.dtype) -> Tensor:
        eps, eps_acc = torch.finfo(self._dtype).eps, torch.finfo(torch.float32).eps
        allowed = self.expected[rows].abs().mul_(eps)
        for row_norms, col_norms in self._norms:
            allowed.addr_(row_norms[rows], col_norms, alpha=eps_acc)
        if self._size is not None:
            eps_sum = max(torch.finfo(sum_dtype).eps, eps_acc)
            allowed += self._size[rows] * (eps + self._parts * eps_sum)
        return allowed.add_(underflow(self._dtype, self._parts))

    def check(
        self, out: Tensor, sum_dtype: torch.dtype, name: str, *, scale: float = 1.0, only: slice | None = None
    ) -> tuple[float, float]:
        """Return (largest error, largest error / allowed error) of `out`; AssertionError if any is above 1. NaN fails.

        - sum_dtype: dtype in which partials may have been added.
        - scale: a power of two by which operands were multiplied since.
        - only: rows to check, by default all.
        """
        rows, cols = self.expected.shape
        assert out.shape == self.expected.shape, f"{name}: shape {tuple(out.shape)}, expected {(rows, cols)}"
        largest = ratio = 0.0
        wrong = place = 0
        for part in _blocks(rows, cols) if only is None else [only]:
            error = torch.sub(self.expected[part], out[part], alpha=1 / scale).abs_()
            if not error.numel():
                continue
            allowed = self._allowed(part, sum_dtype)
            largest = max(largest, error.max().item())
            bad = int((~(error <= allowed)).sum())  # NaN compares as wrong
            wrong += bad
            share, at = torch.nan_to_num(error / allowed, nan=math.inf).flatten().max(0)
            if share.item() > ratio:
                ratio, place = share.item(), part.start * cols + int(at)
        largest *= scale
        if wrong:
            row, col = divmod(place, cols)
            line = scale * self._allowed(slice(row, row + 1), sum_dtype)[0, col].item()
            got, want = out[row, col].item(), scale * self.expected[row, col].item()
            of = rows if only is None else len(range(rows)[only])
            raise AssertionError(
                f"{name}: {wrong} of {of * cols} elements are wrong, the worst at {(row, col)}: got {got:.6g}, "
                f"expected {want:.6g}, off by {abs(got - want):.3g}, allowed {line:.3g}"
            )
        return largest, ratio
