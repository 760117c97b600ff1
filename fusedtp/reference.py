"""Oracle of the tests and the sweep: the unsharded op in float64, its chunks, and the error that rounding may make.

A check is `|out - ref| <= allowed` for every element. `allowed` is a worst-case bound, not a fitted tolerance. With e
the output dtype's `eps`, e32 float32's, and the partial products p_r = a_r @ b_r over the parts of K:

    rounding the inputs      nothing: the reference is taken on the values that the op was given
    accumulating p_r         K_r * e32 * (|a_r| @ |b_r|): K_r roundings in any order, each of a partial sum under |a||b|
    rounding p_r             e * |p_r|, once per partial; nothing if the contraction is not cut
    summing W partials       W * e_sum * sum |p_r|, e_sum being e32, or e if a backend sums in the output's dtype
    adding the bias          e_sum * |bias|
    rounding the result      e * |ref|

(Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4.) eps is twice the unit roundoff: it covers
conversions and tensor-core accumulators that truncate, and the second-order terms that the list leaves out. On random
normal input the bound stays far below the error of a mistake. |a||b| grows like 0.64 K, so at K = 8192 in float32 the
bound is 5. There the result has a standard deviation of 90, and a missing chunk of 64 makes an error of 8 in every
element of its tile. Never gate on inputs of ones: they hide a chunk that is used in place of another.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        allowed += eps_sum * bias.double().abs()
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
