"""Expected results of a rank in float64, and the check of every element against them.

The float64 product of a large matmul would not fit beside float64 copies of its operands, so product and comparison are
made block by block. The allowed error is that of `fusedtp.reference`, except for one upper bound: instead of |a| @ |b|,
a third matmul, this takes |row of a| * |column of b|, which is no less by Cauchy-Schwarz. On normal input the bound is
pi / 2 times as large, and a missing tile or a wrong scale is still far outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusedtp import reference

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
    """a [R, K] @ b [K, C], and the error that an op may leave in it. `k_sizes`: how ranks cut K.

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
        return allowed.add_(reference.underflow(self._dtype, self._parts))

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
