"""The linear functions with their options in float64: every rank's expected result, and the allowed error of each
element.

`Case` is a call of one function with options. `Operands` makes a rank's operands, runs the call, and checks results and
gradients. Bounds are those of `reference`, carried through the activation f by its own constants (`FUNCTIONS`): if z
may be off by e, f(z) may be off by the largest |f'| times e, and f'(z) by the largest |f''| times e. For |z| <= e the
step of relu may be on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import reference
from fusedtp.activations import GATED
from fusedtp.shards import even_sizes

from .harness import last_path
from .soak.layouts import alike, laid_out


class Function(NamedTuple):
    """An activation of one product z, and the constants of its error.

    - `slope`, `curvature`: the largest |f'| and |f''|.
    - `roundings`, `slope_roundings`: rounding inside f and f' besides that of the result, in units of eps (1 + |z|) of
      the dtype that they are computed in. They are twice the largest error of torch and of the kernels' formulas.
    """

    of: Callable[[Tensor], Tensor]
    slope: float
    curvature: float
    roundings: float
    slope_roundings: float


# test_oracle.py measures each constant again.
FUNCTIONS: dict[str, Function] = {
    "relu": Function(F.relu, 1.0, 0.0, 0.0, 0.0),
    # |f'| is largest at 2.40, |f''| at 0.
    "silu": Function(F.silu, 1.1, 0.5, 0.25, 1.2),
    # |f'| is largest at sqrt(2), |f''| at 0. The kernels' erf is off by 1.5e-7, torch's by more.
    "gelu": Function(F.gelu, 1.13, 0.8, 4.1, 3.7),
    "gelu_tanh": Function(partial(F.gelu, approximate="tanh"), 1.13, 0.8, 0.45, 2.9),
}
K, EPS = 24, 1e-5


def whole(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random values, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(length: int, world_size: int, how: str) -> tuple[int, ...]:
    """Return the ranks' lengths: even, nearly all on the first rank ("lopsided"), or all on the last."""
    if how == "even":
        return even_sizes(length, world_size)
    others = [int(how == "lopsided" and length >= world_size)] * (world_size - 1)
    most = length - sum(others)
    return (most, *others) if how == "lopsided" else (*others, most)


def _function(name: str) -> Function:
    if name not in FUNCTIONS:
        raise KeyError(f"{name}: add its formula and its constants to FUNCTIONS")
    return FUNCTIONS[name]


class Near:
    """Values in float64, and the allowed error of a result."""

    def __init__(self, value: Tensor, off: Tensor, dtype: torch.dtype) -> None:
        self.value, self.off, self.dtype = value, off, dtype
        self._eps = torch.finfo(dtype).eps
        self._eps_inside = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps

    def _made(self, value: Tensor, off: Tensor) -> Near:
        return Near(value, off + self._eps * value.abs() + reference.underflow(self.dtype, 1), self.dtype)

    def times(self, other: Near) -> Near:
        """Return the rounded product with `other`."""
        off = self.value.abs() * other.off + self.off * other.value.abs() + self.off * other.off
        return self._made(self.value * other.value, off)

    def _inside(self, roundings: float) -> Tensor:
        return roundings * self._eps_inside * (1 + self.value.abs())

    def through(self, name: str) -> Near:
        """Return f(value), rounded."""
        f = _function(name)
        return self._made(f.of(self.value), f.slope * self.off + self._inside(f.roundings))

    def slope(self, name: str) -> Near:
        """Return f'(value)."""
        f, z = _function(name), self.value.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f.of(z).sum(), z)
        jump = (self.value.abs() <= self.off).double() if name == "relu" else f.curvature * self.off
        return self._made(slope, jump + self._inside(f.slope_roundings))

    def t(self) -> Near:
        return Near(self.value.t(), self.off.t(), self.dtype)


def near(x: Tensor) -> Near:
    """Return a tensor as exact values."""
    return Near(x.double(), torch.zeros_like(x, dtype=torch.float64), x.dtype)


def product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Near:
    """Return a @ b.T + bias without a sum over ranks."""
    return Near(reference.matmul(a, b.t(), bias), reference.bound(a, b.t(), dtype, bias=bias, sum_dtype=dtype), dtype)


def results(name: str, zs: Sequence[Near]) -> list[Near]:
    """Return the expected results y."""
    if name not in GATED:
        return [z.through(name) if name else z for z in zs]
    return [zs[0].through(GATED[name]).times(zs[1])]


def gradients(name: str, dys: Sequence[Tensor], zs: Sequence[Near]) -> list[Near]:
    """Return the expected dz of each z."""
    if name not in GATED:
        return [near(dy).times(z.slope(name)) if name else near(dy) for dy, z in zip(dys, zs, strict=True)]
    (dy,), (gate, up), function = dys, zs, GATED[name]
    return [near(dy).times(up).times(gate.slope(function)), near(dy).times(gate.through(function))]


def contracted(dz: Sequence[Near], other: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of dz @ other, rounded after each term, and its allowed error."""
    dtype, sizes = dz[0].dtype, [each.value.shape[1] for each in dz]
    left, off, right = (
        torch.cat(each, dim) for each, dim in (([d.value for d in dz], 1), ([d.off for d in dz], 1), (list(other), 0))
    )
    # The error of dz is contracted too; rounding of that error is of second order.
    allowed = reference.bound(left, right, dtype, k_sizes=sizes, sum_dtype=dtype)
    return reference.matmul(left, right), allowed + 1.01 * (off @ right.double().abs())


def in_float64(y: Tensor, norm: str, norm_eps: float, norm_weight: Tensor, norm_bias: Tensor | None = None) -> Tensor:
    """Return the norm of y."""
    weight, bias = norm_weight.double(), None if norm_bias is None else norm_bias.double()
    if norm == "rms_norm":
        return F.rms_norm(y.double(), weight.shape, weight, norm_eps)
    return F.layer_norm(y.double(), weight.shape, weight, bias, norm_eps)


def check_norm(normed: Tensor, y: Tensor, given: dict[str, Any]) -> None:
    """Check `normed` against the float64 norm of the rounded y: means, result and difference are each rounded once."""
    assert normed.dtype == y.dtype
    assert normed.stride() == y.stride()
    exact, eps = in_float64(y, **given), torch.finfo(torch.float64 if y.dtype == torch.float64 else torch.float32).eps
    spread_ = y.double().std(-1, keepdim=True, correction=0) if given["norm"] == "layer_norm" else y.double().abs()
    largest = y.double().abs().amax(-1, keepdim=True) / (spread_ + EPS) * given["norm_weight"].double().abs()
    means = 4 * y.shape[-1] * eps * (exact.abs() + (largest if given["norm"] == "layer_norm" else 0))
    rounded = torch.finfo(y.dtype).eps * (exact.abs() + torch.finfo(y.dtype).smallest_normal)
    reference.check(normed, exact, means + rounded, "normed")


@dataclass(frozen=True)
class Case:
    """A call: of all_gather_linear (`gather`), fsdp_linear, linear_reduce_scatter (`scatter`) or linear_all_reduce.

    - `shape`: leading dims of the whole x. `dim`: the gathered or scattered dim; -1 is the features.
    - `how`: the cut of `dim`, or of the features of fsdp_linear's weight; `k_how`: of a contraction.
    - `features`: the length of the contraction.
    - `widths`, `biased`: of each weight. `frozen`: operands without a gradient. `unused`: results without one.
    - `layouts`: pairs of an operand and its layout (`layouts`); "dy" for all gradients of results.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...] = (7, 5)
    dim: int = 0
    how: str = "even"
    k_how: str = "even"
    widths: tuple[int, ...] = (37,)
    biased: tuple[bool, ...] = (True,)
    activation: str = ""
    residual: bool = False
    norm: str = ""
    features: int = K
    algorithm: str = "auto"
    frozen: tuple[str, ...] = ()
    unused: tuple[int, ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()


class Operands:
    """A case's operands on one rank, and the expected results of its call there."""

    def __init__(self, case: Case, group: ProcessGroup) -> None:
        self.case, self.group, self.norm = case, group, {}
        self._layouts = dict(case.layouts)
        self.rank, ranks = group.rank(), range(group.size())
        if case.kind == "gather":
            self.sizes = cut((*case.shape, case.features)[case.dim], len(ranks), case.how)
        elif case.kind == "fsdp":
            self.sizes = cut(case.widths[0], len(ranks), case.how)
        else:
            self.sizes = cut((*case.shape, case.widths[0])[case.dim], len(ranks), case.how)
        biases = [self._whole(f"b{i}", (n,), i) if has else None for i, (n, has) in enumerate(self._pairs())]
        self.given: dict[str, Tensor] = {}
        (self._of_sums if case.kind in ("scatter", "all_reduce") else self._of_gathers)(biases, ranks)
        self.given |= {f"b{i}": each for i, each in enumerate(biases) if each is not None}
        if case.norm:
            self.norm = {"norm": case.norm, "norm_eps": EPS}
            names = ("norm_weight", "norm_bias")[: 2 if case.norm == "layer_norm" else 1]
            self.given |= {name: self._whole(name, case.widths, 4 + i) for i, name in enumerate(names)}

    def _whole(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        return alike(whole(shape, self.case.dtype, seed), self._layouts.get(name, ""))

    def _pairs(self) -> list[tuple[int, bool]]:
        return list(zip(self.case.widths, self.case.biased, strict=True))

    def _of_gathers(self, biases: Sequence[Tensor | None], ranks: range) -> None:
        # The gathered operand is the same for all ranks; the other operands differ.
        case, rank = self.case, self.rank
        dtype, outs = case.dtype, case.widths[: 1 if case.activation in GATED else None]
        gathers = case.kind == "gather"
        xs = [self._whole("x", (*case.shape, case.features), 0 if gathers else 10 + r) for r in ranks]
        # Products near 1, where activations are curved.
        seeds = [50 + 100 * r * gathers for r in ranks]
        ws = [
            [self._whole(f"w{i}", (n, case.features), seed + i) / 4 for i, n in enumerate(case.widths)]
            for seed in seeds
        ]  # fmt: skip
        dys = [[self._whole("dy", (*case.shape, n), 1000 + 100 * r + i) for i, n in enumerate(outs)] for r in ranks]
        for each in dys:
            for i in case.unused:
                each[i].zero_()
        self.dys, rows, dzs = dys[rank], [x.flatten(0, -2) for x in xs], []
        for r in ranks:
            zs = [product(rows[r], w, b, dtype) for w, b in zip(ws[r], biases, strict=True)]
            dzs.append(gradients(case.activation, [dy.flatten(0, -2) for dy in dys[r]], zs))
            if r == rank:
                ys = results(case.activation, zs)
        self.expected = [
            tuple(part.view(*case.shape, part.shape[1]) for part in (y.value, y.off)) for y in ys
        ]  # fmt: skip
        self.grads: dict[str, tuple[Tensor, ...]] = {}
        ones = torch.ones(len(rows[0]), 1, dtype=dtype)
        if gathers:
            self.given["x"] = self.mine(xs[0])
            dx = contracted([dz for each in dzs for dz in each], [w for each in ws for w in each])
            self.grads["x"] = tuple(self.mine(each.view_as(xs[0])) for each in dx)
        else:
            self.given["x"] = xs[rank]
            self.grads["x"] = tuple(each.view_as(xs[0]) for each in contracted(dzs[rank], ws[0]))
        for i, w in enumerate(ws[rank]):
            over = [rank] if gathers else list(ranks)
            turned = [dzs[r][i].t() for r in over]
            dw, db = contracted(turned, [rows[r] for r in over]), contracted(turned, [ones] * len(over))
            part = (lambda each: each) if gathers else (lambda each: each.split(self.sizes)[rank])
            self.given[f"w{i}"] = part(w)
            self.grads[f"w{i}"] = tuple(part(each) for each in dw)
            self.grads[f"b{i}"] = tuple(each[:, 0] for each in db)

    def _of_sums(self, biases: Sequence[Tensor | None], ranks: range) -> None:
        # Each rank has a part of the contraction.
        case, (n,) = self.case, self.case.widths
        features = cut(case.features, len(ranks), case.k_how)
        x, w = self._whole("x", (*case.shape, case.features), 10), self._whole("w0", (n, case.features), 20)
        rows, shape = x.flatten(0, -2), (*case.shape, n)
        residual, dy = self._whole("residual", shape, 2), self._whole("dy", shape, 3)
        allowed = reference.bound(rows, w.t(), case.dtype, k_sizes=features, bias=biases[0], sum_dtype=case.dtype)
        self.y, off = reference.matmul(rows, w.t(), biases[0]).view(shape), allowed.view(shape)
        if case.residual:
            # The residual is one more term of the sum, and of the rounding.
            self.y, off = self.y + residual.double(), off + 2 * torch.finfo(case.dtype).eps * residual.double().abs()
        self.expected = [(self.mine(self.y), self.mine(off))]
        own_x, own_w = (each.split(features, -1)[self.rank] for each in (x, w))
        self.given |= {"x": own_x, "w0": own_w} | ({"residual": self.mine(residual)} if case.residual else {})
        self.dys, dz = [self.mine(dy)], near(dy.flatten(0, -2))
        dx = contracted([dz], [own_w])
        # Each rank adds its own rows first, if rows are split.
        of_rows = case.kind != "all_reduce" and case.dim % dy.ndim != dy.ndim - 1
        parts = dy.split(self.sizes, case.dim) if of_rows else [dy]
        turned = [near(each.flatten(0, -2)).t() for each in parts]
        ones = [torch.ones(each.value.shape[1], 1, dtype=case.dtype) for each in turned]
        self.grads = {
            "x": tuple(each.view_as(own_x) for each in dx),
            "w0": contracted([dz.t()], [own_x.flatten(0, -2)]),
            "b0": tuple(each[:, 0] for each in contracted(turned, ones)),
            "residual": (self.dys[0].double(), torch.zeros(self.dys[0].shape, dtype=torch.float64)),
        }

    def mine(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor that is split along `dim`."""
        return x if self.case.kind == "all_reduce" else x.split(self.sizes, self.case.dim)[self.rank]

    def leaves(self, *, dense: bool = False) -> dict[str, Tensor]:
        """Return the operands to call with, by name. Unless `dense`, they have the case's layouts. By default, x and
        weights have NaN between their rows, and the second weight is transposed.
        """
        found = {name: each.clone(memory_format=torch.contiguous_format) for name, each in self.given.items()}
        for name, each in self.given.items():
            if name in self._layouts and not dense:
                found[name] = laid_out(each, self._layouts[name])
            elif name[0] in "xw" and not dense:
                wide = each.new_full((*each.shape[:-1], each.shape[-1] + 3), torch.nan)
                found[name] = wide[..., 1:-2].copy_(each) if name != "w1" else each.t().contiguous().t()
        return {name: each.requires_grad_(name not in self.case.frozen) for name, each in found.items()}

    def call(self, schedule: str, given: dict[str, Tensor], **more: Any) -> list[Tensor]:
        """Run the call and return its results; with a norm, y and then the normed y."""
        case, x = self.case, given["x"]
        options: dict[str, Any] = {"group": self.group, "schedule": schedule, **more}
        weights, biases = ([given.get(f"{each}{i}") for i in range(len(case.widths))] for each in "wb")
        pair: Any = (weights, biases) if len(weights) > 1 else (weights[0], biases[0])
        if case.kind in ("gather", "fsdp"):
            options |= {"sizes": self.sizes, "activation": case.activation or None}
            if case.kind == "gather":
                out: Any = fusedtp.all_gather_linear(x, *pair, gather_dim=case.dim, **options)
            else:
                out = fusedtp.fsdp_linear(x, *pair, **options)
            return [out] if isinstance(out, Tensor) else list(out)
        options |= self.norm | {name: given[name] for name in ("norm_weight", "norm_bias") if name in given}
        options["residual"] = given.get("residual")
        if case.kind == "scatter":
            out = fusedtp.linear_reduce_scatter(x, *pair, scatter_dim=case.dim, sizes=self.sizes, **options)
        else:
            algorithm = "auto" if schedule == "unfused" else case.algorithm
            out = fusedtp.linear_all_reduce(x, *pair, algorithm=algorithm, **options)
        return [out] if isinstance(out, Tensor) else [out[1], out[0]]

    def check(self, schedule: str, name: str, **more: Any) -> None:
        """Check results and every gradient, and that results have the same bits without a gradient and on every rank
        that has all of them, and from kernels also for contiguous operands. `more`: further arguments of the call.
        """
        leaves = self.leaves()
        outs = self.call(schedule, leaves, **more)
        assert len(outs) == len(self.expected) + bool(self.norm)
        self._check_path()
        for i, (out, (value, off)) in enumerate(zip(outs, self.expected, strict=False)):
            assert out.dtype == self.case.dtype
            reference.check(out, value, off, f"{name}: y{i}")
        case, alone = self.case, self.group.size() == 1
        first, operands = outs, self.leaves(dense=True) if schedule == "fused" and not alone else leaves
        if alone and not (case.activation or case.residual or case.norm or len(case.widths) > 1 or more):
            # F.linear computes. For some strides it has other bits without a gradient.
            operands = self.leaves(dense=True)
            first = self.call(schedule, operands)
        with torch.no_grad():
            again = self.call(schedule, operands, **more)
            assert all(map(torch.equal, first, again)), f"{name}: other bits without a gradient, or without strides"
        if self.case.kind == "all_reduce":
            everyones = [torch.empty_like(outs[0]) for _ in range(self.group.size())]
            dist.all_gather(everyones, outs[0].detach(), group=self.group)
            assert all(torch.equal(each, outs[0]) for each in everyones), f"{name}: other bits on another rank"
        if self.norm:
            self._check_norm(leaves, outs, name)
            return
        used = [i for i in range(len(outs)) if i not in self.case.unused and outs[i].requires_grad]
        if used:
            # Transposed, as autograd may pass a gradient.
            layout = self._layouts.get("dy", "transposed" if len(used) % 2 else "contiguous")
            dys = [laid_out(dy, layout) for dy in self.dys]
            torch.autograd.backward([outs[i] for i in used], [dys[i] for i in used])
        for key, leaf in leaves.items():
            of_unused = key[1:].isdigit() and int(key[1:]) in self.case.unused and not self.case.activation
            if not used or of_unused or key in self.case.frozen:
                assert leaf.grad is None, f"{name}: d{key} of nothing"
            else:
                assert leaf.grad is not None, f"{name}: no d{key}"
                reference.check(leaf.grad, *self.grads[key], f"{name}: d{key}")

    def _check_path(self) -> None:
        # The path tells where an activation and a residual are computed, and that a norm comes after them.
        case, path = self.case, last_path()
        schedule = path.schedule if self.group.size() > 1 else "unfused"
        where = {"fused": "in the kernel", "decomposed": "by chunk", "unfused": "after it"}[schedule]
        added = [f"{case.activation or 'residual'} {where}"] if case.activation or case.residual else []
        assert path.epilogue == ", ".join(added + [f"{case.norm} after it"] * bool(case.norm))

    def _check_norm(self, leaves: dict[str, Tensor], outs: Sequence[Tensor], name: str) -> None:
        # y has the same bits as without the norm. Gradients are compared with one process in float64.
        y, normed = outs
        given = {key: each for key, each in leaves.items() if key.startswith("norm")}
        check_norm(normed.detach(), y.detach(), self.norm | {key: each.detach() for key, each in given.items()})
        if self.case.dtype not in (torch.float32, torch.float64):
            return
        # The loss is linear in both results, and the same on all ranks.
        dnormed, dy = (whole(self.y.shape, torch.float64, seed) * (i not in self.case.unused)
                       for i, seed in ((1, 7), (0, 8)))  # fmt: skip
        ((normed * self.mine(dnormed)).sum() + (y * self.mine(dy)).sum()).backward()
        of_whole = self.y.clone().requires_grad_()
        norms = {key: each.detach().double().requires_grad_() for key, each in given.items()}
        ((in_float64(of_whole, **self.norm, **norms) * dnormed).sum() + (of_whole * dy).sum()).backward()
        into_y = of_whole.grad
        assert into_y is not None
        flat, rows = into_y.flatten(0, -2), leaves["x"].detach().double().flatten(0, -2)
        exact = {
            "x": into_y @ leaves["w0"].detach().double(), "w0": flat.t() @ rows, "b0": flat.sum(0),
            "residual": self.mine(into_y), **{key: each.grad for key, each in norms.items()},
        }  # fmt: skip
        for key, leaf in leaves.items():
            found, wanted = leaf.grad, exact[key]
            assert found is not None, f"{name}: no d{key}"
            assert wanted is not None
            tolerance = 1e-11 if found.dtype == torch.float64 else 2e-3
            most = float(wanted.abs().max()) if wanted.numel() else 0.0
            torch.testing.assert_close(
                found.double(), wanted, rtol=tolerance, atol=tolerance * most, msg=f"{name}: d{key}"
            )
