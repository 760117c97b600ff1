"""The collective, then the matmul, or the reverse: what a careful user of torch.distributed would write.

It is the baseline that the other schedules are compared with and the fallback where ranks cannot reach each other's
memory, so it makes no copy that torch.distributed does not force on it: what is scattered is multiplied straight into
the buffer that is sent, and a transposed problem is solved transposed. It goes through `torch.ops._c10d_functional`,
whose names are the same in every torch we support; the backend (gloo, NCCL) decides how partial sums are rounded.
Uneven shards travel padded to the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import blas, trace

_c10d = torch.ops._c10d_functional


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    *,
    gather_dim: int,
    sizes: Sequence[int],
    group: ProcessGroup,
    transposed: bool = False,
) -> Tensor:
    """a [sizes[rank], K] @ b [K, N], or a [M, sizes[rank]] @ b [sum(sizes), N] for gather_dim 1 -> [M, N].

    transposed: -> [N, M], with a bias [M].
    """
    # Rows are what a collective concatenates: transposing this shard is cheaper than reordering all of what arrives.
    whole = _gather(a, sizes, group) if gather_dim == 0 else _gather(a.t(), sizes, group).t()
    return _matmul(b.t(), whole.t(), bias) if transposed else _matmul(whole, b, bias)


def all_gather_two_matmuls(
    a: Tensor, b: Tensor, right: Tensor, *, sizes: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """a [sizes[rank], K] gathered once -> gather(a) @ b [M, N] and gather(a).T @ right [K, R]."""
    whole = _gather(a, sizes, group)
    return blas.mm(whole, b), blas.mm(whole.t(), right)


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor | None, *, scatter_dim: int, sizes: Sequence[int], group: ProcessGroup
) -> Tensor:
    """a [M, K_r] @ b [K_r, N] summed over ranks -> [sizes[rank], N] for scatter_dim 0, [M, sizes[rank]] for 1."""
    if scatter_dim == 1:
        # The transposed problem scatters rows; only this rank's slice is turned back.
        out = _matmul_scatter_rows(b.t(), a.t(), sizes, group).t().contiguous()  # [M, sizes[rank]]
        if bias is None:
            return out
        first = sum(sizes[: group.rank()])
        return out.add_(bias[first : first + sizes[group.rank()]])
    out = _matmul_scatter_rows(a, b, sizes, group)
    return out if bias is None else out.add_(bias)


def matmul_scatter_and_gather(
    a: Tensor, b: Tensor, left: Tensor, x: Tensor, *, sizes: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """reduce_scatter(a @ b) [sizes[rank], N] and left @ gather(x) [L, C]; the gather is under way during a @ b."""
    if group.size() == 1:
        return blas.mm(a, b), blas.mm(left, x)
    arriving = _start_gather(x, sizes, group)
    scattered = _matmul_scatter_rows(a, b, sizes, group)
    return scattered, blas.mm(left, _finish_gather(arriving, sizes))


def matmul_all_reduce(
    a: Tensor, b: Tensor, bias: Tensor | None, *, group: ProcessGroup, algorithm: str = "auto"
) -> Tensor:
    """a [M, K_r] @ b [K_r, N] summed over ranks -> [M, N] on every rank."""
    _only_auto("matmul_all_reduce", algorithm)
    if group.size() == 1:
        return _matmul(a, b, bias)
    out = _matmul(a, b, None)
    if out.numel():
        with trace.span("collective"):
            out = _c10d.wait_tensor(_c10d.all_reduce_(out, "sum", group.group_name))
    return out if bias is None else out.add_(bias)


def all_gather(x: Tensor, *, sizes: Sequence[int], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """x [sizes[rank], C] -> [sum(sizes), C], in rank order."""
    _only_auto("all_gather", algorithm)
    out = _gather(x, sizes, group)
    return _copy(out) if out is x else out


def reduce_scatter(x: Tensor, *, sizes: Sequence[int], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """x [sum(sizes), C] summed over ranks -> [sizes[rank], C]."""
    _only_auto("reduce_scatter", algorithm)
    if group.size() == 1:
        return _copy(x)
    longest = max(sizes)
    if all(size == longest for size in sizes):
        return _scatter(x.contiguous(), group)
    padded = x.new_empty(longest * len(sizes), x.shape[1])
    for peer, chunk in enumerate(x.split(list(sizes))):
        padded[peer * longest :][: sizes[peer]] = chunk
    return _copy(_scatter(padded, group)[: sizes[group.rank()]])


def all_reduce(x: Tensor, *, group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """x [R, C] summed over ranks -> [R, C] on every rank."""
    _only_auto("all_reduce", algorithm)
    if group.size() == 1 or not x.numel():
        return _copy(x)
    with trace.span("collective"):
        out: Tensor = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group.group_name))
    return out


def _only_auto(op: str, algorithm: str) -> None:
    if algorithm != "auto":
        raise ValueError(
            f"{op}: schedule 'unfused' has no algorithm {algorithm!r}, the process group's backend picks its own: "
            "use algorithm='auto', or schedule 'decomposed' or 'fused'"
        )


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    with trace.span("multiply"):
        return blas.mm(a, b, bias)


def _gather(x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """[sizes[rank], C] -> [sum(sizes), C]; x itself in a world of one."""
    return x if group.size() == 1 else _finish_gather(_start_gather(x, sizes, group), sizes)


def _start_gather(x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    # Every rank's rows, padded to the longest shard; not there before `_finish_gather`.
    longest, columns = max(sizes), x.shape[1]
    if longest == 0 or columns == 0:
        return x.new_empty(longest * len(sizes), columns)
    if x.shape[0] == longest:
        sent = x.contiguous()
    else:
        sent = x.new_empty(longest, columns)
        sent[: x.shape[0]] = x
    # With `out` it is a plain gather. Without, it is a coalesced one, and the name of that is too long for gloo: both
    # threads of a group may free it (torch 2.13, ProcessGroupGloo::runLoop), and the heap with it is broken.
    arriving = sent.new_empty(longest * len(sizes), columns)
    _c10d.all_gather_into_tensor_out(sent, len(sizes), group.group_name, out=arriving)
    return arriving


def _finish_gather(arriving: Tensor, sizes: Sequence[int]) -> Tensor:
    longest, gathered = max(sizes), arriving
    if arriving.numel():
        with trace.span("collective"):
            gathered = _c10d.wait_tensor(arriving)
    if all(size == longest for size in sizes):
        return gathered
    return torch.cat([chunk[:size] for chunk, size in zip(gathered.split(longest), sizes, strict=True)])


def _scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """[world_size * R, C] summed over ranks -> [R, C], x contiguous."""
    world_size = group.size()
    if not x.numel():
        return x.new_empty(x.shape[0] // world_size, x.shape[1])
    with trace.span("collective"):
        out: Tensor = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "sum", world_size, group.group_name))
    return out


def _matmul_scatter_rows(a: Tensor, b: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    if group.size() == 1:
        return blas.mm(a, b)
    longest = max(sizes)
    if all(size == longest for size in sizes):
        return _scatter(_matmul(a, b, None), group)
    # Each chunk is multiplied into its padded place; what the padding holds is summed too, and cut off with it.
    padded = a.new_empty(longest * len(sizes), b.shape[1])
    for peer, chunk in enumerate(a.split(list(sizes))):
        with trace.span("multiply", peer):
            blas.mm_into(chunk, b, padded[peer * longest :][: sizes[peer]])
    return _copy(_scatter(padded, group)[: sizes[group.rank()]])
