"""The differentiable functions of layers, on virtual ranks: forward and every gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference

from . import float8
from .driver import EmulatedDriver
from .machine import Schedule
from .shapes import Shape, split
from .threads import run_ranks

# For each result of a function on a rank: the expected value, and the allowed error.
Checked = dict[str, tuple[Tensor, Tensor]]
FUNCTIONS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "fsdp_linear")


def _product(a: Tensor, b: Tensor, sizes: tuple[int, ...] | None = None, bias: Tensor | None = None) -> Any:
    """Return a @ b + bias and its bound; float8 values come in float64. `sizes`: the parts of the contraction."""
    dtype = float8.OUT if a.dtype == torch.float64 else a.dtype
    return reference.matmul(a, b, bias), reference.bound(a, b, dtype, k_sizes=sizes, bias=bias)


def _chunk(pair: Any, sizes: tuple[int, ...], rank: int) -> Any:
    return tuple(each.split(sizes)[rank] for each in pair)


def check_scaled(driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, seed: int) -> int:
    """Check a function on float8 operands with scales, x of `dtype`, on each rank, and return the number of results.
    For odd seeds all_gather_linear gathers features.
    """
    make = float8.Operands(seed, dtype)
    # With blocks, K ends inside a block.
    M, N, K = 72, 96, 144 if make.in_blocks else 160
    bias = make.bias(N, Shape(M, N, K))
    m_sizes = split(M, world_size, "empty" if seed % 2 else "uneven")
    n_sizes, k_sizes = split(N, world_size, "uneven", 16), split(K, world_size, "uneven", 16)
    assert bias is not None
    by_features = name == "all_gather_linear" and seed % 2 == 1
    if by_features and make.in_blocks:
        k_sizes = float8.of_blocks(K, world_size, "uneven")
    if by_features:
        xs, ws = [make.scaled(M, k) for k in k_sizes], make.parts(n_sizes, K, float8.WEIGHT)
    elif name in ("all_gather_linear", "fsdp_linear"):
        xs, ws = make.parts(m_sizes, K), make.parts(n_sizes, K, float8.WEIGHT)
    else:
        xs, ws = ([make.scaled(rows, k, of) for k in k_sizes] for rows, of in ((M, make.dtype), (N, float8.WEIGHT)))
    exact = [[float8.exact(each) for each in of] for of in (xs, ws)]
    if name == "all_gather_linear":
        bs = bias.split(n_sizes)
        whole = torch.cat(exact[0], int(by_features))
        expected = [_product(whole, w.t(), None, b) for w, b in zip(exact[1], bs, strict=True)]
        more: dict[str, Any] = {"sizes": k_sizes, "gather_dim": -1} if by_features else {"sizes": m_sizes}
    elif name == "fsdp_linear":
        bs = (bias,) * world_size
        expected = [_product(x, torch.cat(exact[1]).t(), None, bias) for x in exact[0]]
        more = {"sizes": n_sizes}
    else:
        bs = (bias,) * world_size
        y = _product(torch.cat(exact[0], 1), torch.cat(exact[1], 1).t(), k_sizes, bias)
        scatters = name == "linear_reduce_scatter"
        expected = [_chunk(y, m_sizes, r) if scatters else y for r in range(world_size)]
        more = {"sizes": m_sizes} if scatters else {"algorithm": ("one_shot", "two_shot")[seed % 2]}

    def call(rank: int, group: ProcessGroup) -> Tensor:
        return getattr(fusedtp, name)(xs[rank], ws[rank], bs[rank], group=group, schedule="fused", **more)

    found, ran = run_ranks(driver, world_size, Schedule(seed, tick=0.001), call)
    for rank, (got, (ref, allowed)) in enumerate(zip(found, expected, strict=True)):
        reference.check(got, ref, allowed, f"{name} of {dtype}, rank {rank} of {world_size}, seed {seed}")
    assert ran
    return len(found)


def check_not_finite(driver: EmulatedDriver, dtype: torch.dtype) -> None:
    """Check that NaN and infinities in blocks stay in x's own rows, and in the weight's own column."""
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    x[3, 5], x[20, 40], w[7, 1] = float("nan"), float("inf"), float("nan")
    parts, weight = x.split(16), fusedtp.scaled(w, "mxfp8", dtype=dtype)

    def call(rank: int, group: ProcessGroup) -> Tensor:
        mine = fusedtp.scaled(parts[rank], "mxfp8", dtype=dtype)
        return fusedtp.all_gather_linear(mine, weight, group=group, schedule="fused")

    found, _ = run_ranks(driver, 2, Schedule(1, tick=0.001), call)
    expected = torch.zeros(32, 48, dtype=torch.bool)
    expected[[3, 20]], expected[:, 7] = True, True
    for y in found:
        assert torch.equal(~y.isfinite(), expected)


def check(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, seed: int, rows: int = 72
) -> list[str]:
    """Check forward, dx and dw on each rank, and return the names of what was compared."""
    random = torch.Generator().manual_seed(seed)
    M, N, K = rows, 96, 80

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(dtype)

    x, w, bias = normal(M, K), normal(N, K), normal(N)
    m_sizes = split(M, world_size, "uneven")
    n_sizes, k_sizes = split(N, world_size, "uneven", 16), split(K, world_size, "uneven", 16)
    expected: list[Checked] = []
    if name == "all_gather_linear":
        dy = normal(M, N)
        xs, ws, bs, dys = x.split(m_sizes), w.split(n_sizes), bias.split(n_sizes), dy.split(n_sizes, 1)
        dx = _product(dy, w, n_sizes)
        for r in range(world_size):
            expected.append({"y": _product(x, ws[r].t(), None, bs[r]), "dx": _chunk(dx, m_sizes, r),
                "dw": _product(dys[r].t(), x)})  # fmt: skip
        more: dict[str, Any] = {"sizes": m_sizes}
    elif name == "linear_reduce_scatter":
        dy = normal(M, N)
        xs, ws, bs, dys = x.split(k_sizes, 1), w.split(k_sizes, 1), (bias,) * world_size, dy.split(m_sizes)
        y = _product(x, w.t(), k_sizes, bias)
        for r in range(world_size):
            expected.append({"y": _chunk(y, m_sizes, r), "dx": _product(dy, ws[r]), "dw": _product(dy.t(), xs[r])})
        more = {"sizes": m_sizes}
    elif name == "linear_all_reduce":
        dy = normal(M, N)
        xs, ws, bs, dys = x.split(k_sizes, 1), w.split(k_sizes, 1), (bias,) * world_size, (dy,) * world_size
        y = _product(x, w.t(), k_sizes, bias)
        for r in range(world_size):
            expected.append({"y": y, "dx": _product(dy, ws[r]), "dw": _product(dy.t(), xs[r])})
        more = {}
    else:
        dy = normal(M, N)
        xs, ws, bs, dys = x.split(m_sizes), w.split(n_sizes), (bias,) * world_size, dy.split(m_sizes)
        dw = _product(dy.t(), x, m_sizes)
        for r in range(world_size):
            expected.append({"y": _product(xs[r], w.t(), None, bias), "dx": _product(dys[r], w),
                "dw": _chunk(dw, n_sizes, r)})  # fmt: skip
        more = {"sizes": n_sizes}

    def call(rank: int, group: ProcessGroup) -> dict[str, Tensor]:
        mine = [each[rank].clone().requires_grad_() for each in (xs, ws, bs)]
        y = getattr(fusedtp, name)(*mine, group=group, schedule="fused", **more)
        y.backward(dys[rank])
        return {"y": y.detach(), "dx": mine[0].grad, "dw": mine[1].grad}

    found, ran = run_ranks(driver, world_size, Schedule(seed, tick=0.001), call)
    compared = []
    for rank, got in enumerate(found):
        for what, (ref, allowed) in expected[rank].items():
            reference.check(
                got[what], ref, allowed, f"{name} {what}, {dtype}, rank {rank} of {world_size}, seed {seed}"
            )
            compared.append(what)
    assert ran
    return compared
