"""torch.ops.symm_mem.fused_* by `fusedtp.drop_in`: values, layouts, gradients, compilers, callers' forms, refusals."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

import fusedtp
from fusedtp.reference import bound, chunk, matmul
from fusedtp.schedules import NAMES
from fusedtp.torch_private import scaled_mm
from fusedtp.workspaces import registry

from .harness import LARGE, few_kernels, last_path, mesh_of, on_ranks, spread

drop_in: Any = sys.modules["fusedtp.drop_in"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((8, 16), (4, 8, 16), (2, 4, 8, 16), (0, 16), (4, 0, 16))
GATHER, SCATTER, SCALED_GATHER, SCALED_SCATTER = (text.partition("(")[0] for text in drop_in.SCHEMAS)


def op(name: str) -> Any:
    return getattr(torch.ops.symm_mem, name)


def made(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shards(group: ProcessGroup, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return every rank's tensor, which each rank can make."""
    return [made(100 + rank, *shape, dtype=dtype) for rank in range(group.size())]


def layouts(x: Tensor) -> list[Tensor]:
    found = [x, x.transpose(-1, -2).contiguous().transpose(-1, -2)]
    return found if x.ndim == 2 else [*found, x.transpose(0, 1).contiguous().transpose(0, 1)]


def look(out: Any) -> Any:
    """Return shapes, strides and dtypes."""
    if isinstance(out, Tensor):
        return tuple(out.shape), out.stride(), out.dtype
    return None if out is None else [look(each) for each in out]


def on_meta(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return what torch's meta implementation says of the result."""

    def moved(each: Any) -> Any:
        if isinstance(each, list):
            return [moved(one) for one in each]
        return each.to("meta") if isinstance(each, Tensor) else each

    return look(op(name)(*map(moved, args), **kwargs))


def near(y: Tensor, a: Tensor, b: Tensor, dim: int = 0, rank: int = 0, ranks: int = 1, by: int = 1) -> None:
    """Compare y with this rank's part, along `dim`, of (a @ b) / by, within the error that rounding makes."""
    shape, flat = (*a.shape[:-1], b.shape[1]), a.reshape(-1, a.shape[-1])
    ref = matmul(flat, b)
    # A backend may add in the result's dtype, and an average is rounded once more.
    allowed = bound(flat, b, y.dtype, ranks, sum_dtype=y.dtype) + torch.finfo(y.dtype).eps * ref.abs()
    sizes = (shape[dim] // ranks,) * ranks
    ref, allowed = (chunk(each.reshape(shape) / by, dim, rank, sizes) for each in (ref, allowed))
    assert y.shape == ref.shape
    assert bool(((y.double() - ref).abs() <= allowed).all())


def check_gather(group: ProcessGroup, shape: Sequence[int], dim: int, dtype: torch.dtype) -> None:
    everyone = shards(group, shape, dtype)
    whole = torch.cat(everyone, dim)
    K = whole.shape[-1]
    Bs = [made(7, 10, K, dtype=dtype).t(), made(8, K, 6, dtype=dtype)]
    for A in layouts(everyone[group.rank()]):
        for some, kwargs in ((Bs, {}), (Bs[:1], {"return_A": False}), ([], {}), ([], {"return_A": False})):
            given = (A, some, dim, group.group_name)
            out, ys = op(GATHER)(*given, **kwargs)
            assert look((out, ys)) == on_meta(GATHER, *given, **kwargs)
            assert out is None if kwargs else torch.equal(out, whole)
            assert out is None or not out.numel() or out.data_ptr() != A.data_ptr()
            for y, B in zip(ys, some, strict=True):
                near(y, whole, B)


def check_scatter(group: ProcessGroup, shape: Sequence[int], dim: int, dtype: torch.dtype) -> None:
    rank, ranks = group.rank(), group.size()
    everyone = shards(group, shape, dtype)
    Bs = [made(9 + each, 4 * ranks, shape[-1], dtype=dtype).t() for each in range(ranks)]
    for A in layouts(everyone[rank]):
        for reduce_op in ("sum", "avg"):
            given = (A, Bs[rank], reduce_op, dim, group.group_name)
            y = op(SCATTER)(*given)
            assert look(y) == on_meta(SCATTER, *given)
            near(y, torch.cat(everyone, -1), torch.cat(Bs), dim, rank, ranks, by=ranks if reduce_op == "avg" else 1)


@pytest.mark.parametrize(
    ("schedule", "dtype", "world_size"), spread(NAMES, [torch.float32, torch.bfloat16], [2, 4 if LARGE else 2, 1])
)
@on_ranks(timeout=300)
def test_values_and_layouts(group: ProcessGroup, schedule: str, dtype: torch.dtype, world_size: int) -> None:
    """As torch's meta implementations say, whatever the operands' layouts; the gathered A has the same bits."""
    with fusedtp.drop_in(schedule):
        # Interpreted kernels are slow. From one rank torch gathers a view, whose empty dims have strides of their own.
        for shape in SHAPES[1:2] if schedule == "fused" else SHAPES[: 3 if world_size == 1 else 5]:
            for dim in range(-(schedule != "fused" or LARGE), len(shape)):
                check_gather(group, shape, dim, dtype)
                if dim in (-1, len(shape) - 1) or shape[dim] % world_size == 0:
                    check_scatter(group, shape, dim, dtype)


@pytest.mark.parametrize("dim", [0, 1, 2])
@on_ranks(2)
def test_the_returned_operand_takes_no_second_gather(group: ProcessGroup, dim: int) -> None:
    for schedule in ("decomposed", "fused"):
        with fusedtp.drop_in(schedule):
            K = 32 if dim == 2 else 16
            given = made(1, 4, 8, 16), [made(2, K, 6), made(3, K, 5)], dim, group.group_name
            op(GATHER)(*given)
            ws = registry.get(group, torch.device("cpu"))
            before = ws.epoch
            op(GATHER)(*given)
            assert (ws.epoch - before, last_path().op, last_path().schedule) == (1, "all_gather_matmul", schedule)


# Scaled ops: the products in float64 of float8 values, times scales, plus biases, rounded.

# The error of rounding a result, relative and absolute. Some CPUs round to float8 by way of float16.
ROUNDING = {torch.float32: (2**-20, 0.0), torch.bfloat16: (2**-8, 0.0), E4M3: (2**-3.9, 2**-9)}


def test_float8_results_are_rounded_as_torchs() -> None:
    a, b = (torch.randn(rows, 64).to(E4M3) for rows in (48, 96))
    scale, one = torch.tensor(0.3), torch.ones(())
    exact = scaled_mm(a, b.t(), scale, one, out_dtype=torch.float32)
    torchs = scaled_mm(a, b.t(), scale, one, out_dtype=E4M3)
    assert torch.equal(drop_in._rounded(exact, E4M3, None).float(), torchs.float())


def near_scaled(y: Tensor, exact: Tensor, terms: Tensor, dtype: torch.dtype, extra: int = 1) -> None:
    """Compare y with `exact`. `terms`: the sum of magnitudes, which float32 rounds; `extra`: roundings to dtype."""
    relative, absolute = ROUNDING[dtype]
    allowed = relative * (exact.abs() + (extra - 1) * terms) + absolute + 2**-18 * terms
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    assert bool(((y.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(
    ("schedule", "dim", "scales"), spread(NAMES, [0, 1], ["one", "rows", "replicated"], large=True)
)
@on_ranks(2)
def test_scaled_gather(group: ProcessGroup, schedule: str, dim: int, scales: str) -> None:
    """Also biases, scales of float8 results, and results of several dtypes, by one gather."""
    shape, count = (4, 8, 32), 4
    parts = [each.to(E4M3) for each in shards(group, shape)]
    whole = torch.cat([each.float() for each in parts], dim).to(E4M3)
    Bs = [made(20 + i, 16, 32).to(E4M3).t() for i in range(count)]
    rows = 0.1 + made(40, *whole.shape[:-1], 1).abs()
    own = chunk(rows, dim, group.rank(), (shape[dim],) * 2)
    A_scale = {"one": torch.tensor([[0.1]]), "rows": own, "replicated": rows}[scales]
    B_scales = [torch.tensor(0.5 + i) if scales == "one" else 0.5 + made(30 + i, 1, 16).abs() for i in range(count)]
    biases = [None, made(50, 16, dtype=torch.bfloat16), made(51, 16), None]
    result_scales = [None, torch.tensor(2.0), None, torch.tensor(4.0)]
    dtypes = [None, torch.bfloat16, torch.float32, None]
    given = (A_scale, B_scales, dim, group.group_name, biases, result_scales, dtypes, [False] * count)
    with fusedtp.drop_in(schedule):
        out, ys = op(SCALED_GATHER)(parts[group.rank()], Bs, *given)
        (one,) = op(SCALED_GATHER)(
            parts[group.rank()], Bs[:1], A_scale, B_scales[:1], dim, group.group_name, [None], [None], [15], [True]
        )[1]
    assert torch.equal(out.view(torch.uint8), whole.view(torch.uint8))
    left = whole.double() * (rows.double() if scales != "one" else 0.1)
    for y, B, scale, bias, result_scale, dtype in zip(
        (*ys, one), (*Bs, Bs[0]), (*B_scales, B_scales[0]), (*biases, None), (*result_scales, None),
        (*dtypes, torch.bfloat16), strict=True,
    ):  # fmt: skip
        right, by = B.double() * scale.double(), 1.0
        if result_scale is not None and dtype is None:
            by = result_scale.item()
        exact = left @ right + (0 if bias is None else bias.double())
        near_scaled(y, exact / by, left.abs() @ right.abs() / by, dtype or E4M3)
        # The gathered dim is outermost, as torch lays it out.
        assert y.movedim(dim, 0).is_contiguous()
    assert out.movedim(dim, 0).is_contiguous()


@pytest.mark.parametrize(("schedule", "dim", "reduce_op"), spread(NAMES, [0, 1, 2], ["sum", "avg"]))
@on_ranks(2)
def test_scaled_scatter(group: ProcessGroup, schedule: str, dim: int, reduce_op: str) -> None:
    """A of two dims or three, scales of rows or one, with a bias of each rank's own, and without output_shape."""
    rank, by, name = group.rank(), 2 if reduce_op == "avg" else 1, group.group_name
    everyone = [each.to(E4M3) for each in shards(group, (4, 8, 32))]
    Bs = [made(20 + each, 16, 32).to(E4M3).t() for each in range(2)]
    rows = [0.1 + made(40 + each, 4, 8, 1).abs() for each in range(2)]
    columns = [0.5 + made(50 + each, 1, 16).abs() for each in range(2)]
    biases = [made(60 + each, 16, dtype=torch.bfloat16) for each in range(2)]
    A, shape, after = everyone[rank], [4, 8, 16], 0 if dim < 2 else 1
    forms: list[tuple[Any, ...]] = [
        (A, rows[rank], dim, shape, None), (A.flatten(0, 1), rows[rank].flatten(0, 1), after, shape, None),
        (A, rows[rank], dim, None, biases[rank]),
    ]  # fmt: skip
    with fusedtp.drop_in(schedule):
        for x, scale, after, shape, bias in forms:
            y = op(SCALED_SCATTER)(
                x, Bs[rank], scale, columns[rank], reduce_op, dim, after, name, shape, bias, None, torch.bfloat16
            )
            lefts = [each.double() * its.double() for each, its in zip(everyone, rows, strict=True)]
            rights = [each.double() * its.double() for each, its in zip(Bs, columns, strict=True)]
            added = sum(each.double() for each in biases) if bias is not None else 0
            exact = (sum(map(torch.matmul, lefts, rights)) + added) / by
            terms = sum(a.abs() @ b.abs() for a, b in zip(lefts, rights, strict=True)) / by
            near_scaled(y, *(each.chunk(2, dim)[rank] for each in (exact, terms)), torch.bfloat16, 4)
            assert y.is_contiguous()


# Gradients


def twice(call: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of a call, and the gradients of a loss that depends on each element."""
    own = [each.clone().requires_grad_() for each in tensors]
    outs = call(*own)
    total = sum(
        (out * (torch.arange(out.numel()).view(out.shape) % 7 - 3)).sum() * (i + 1) for i, out in enumerate(outs)
    )
    total.backward()  # type: ignore[union-attr]
    return [each.detach() for each in outs] + [each.grad for each in own]  # type: ignore[misc]


@pytest.mark.parametrize("backend", ["", "aot_eager"])
@on_ranks(2)
def test_gradients(group: ProcessGroup, backend: str) -> None:
    """Those of public functions with gradients, bit by bit, eager and compiled into one graph. The op stays in it."""
    graphs: list[str] = []

    def seen(graph: Any, example: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend(backend)(graph, example)

    def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(call, backend=seen, fullgraph=True) if backend else call

    name = group.group_name
    with fusedtp.drop_in("decomposed"), few_kernels():
        for dim, return_A in ((0, True), (1, False), (2, True), (1, True)):
            K = 32 if dim == 2 else 16
            given = [shards(group, (4, 8, 16))[group.rank()], made(1, 10, K), made(2, 6, K)]

            def gathers(A: Tensor, *ws: Tensor, dim: int = dim, return_A: bool = return_A) -> Any:
                whole, ys = op(GATHER)(A, [w.t() for w in ws], dim, name, return_A=return_A)
                return (*ys, whole) if return_A else tuple(ys)

            def public(A: Tensor, *ws: Tensor, dim: int = dim, return_A: bool = return_A) -> Any:
                ys = fusedtp.all_gather_linear(A, ws, group=group, gather_dim=dim, schedule="decomposed")
                whole = (fusedtp.all_gather(A, group=group, gather_dim=dim, schedule="decomposed"),)
                return (*ys, *whole) if return_A else ys

            for got, expected in zip(twice(compiled(gathers), given), twice(public, given), strict=True):
                torch.testing.assert_close(got, expected)
        for dim, reduce_op in ((0, "sum"), (1, "avg"), (2, "sum")):
            given = [shards(group, (4, 8, 16))[group.rank()], made(3 + group.rank(), 10, 16)]

            def scatters(A: Tensor, w: Tensor, dim: int = dim, reduce_op: str = reduce_op) -> Any:
                return (op(SCATTER)(A, w.t(), reduce_op, dim, name),)

            def plain(A: Tensor, w: Tensor, dim: int = dim, reduce_op: str = reduce_op) -> Any:
                y = fusedtp.linear_reduce_scatter(A, w, group=group, scatter_dim=dim, schedule="decomposed")
                return (y / 2 if reduce_op == "avg" else y,)

            for got, expected in zip(twice(compiled(scatters), given), twice(plain, given), strict=True):
                torch.testing.assert_close(got, expected)
    torch._dynamo.reset()
    assert len(graphs) == (7 if backend else 0)
    assert all("torch.ops.symm_mem.fused_" in graph for graph in graphs)


@on_ranks(2)
def test_gradients_that_are_not_needed_and_second_ones(group: ProcessGroup) -> None:
    A, w, name = made(1, 8, 16), made(2, 4, 16), group.group_name
    with fusedtp.drop_in("decomposed"):
        for needs in ((True, False), (False, True)):
            x, y = (each.clone().requires_grad_(need) for each, need in zip((A, w), needs, strict=True))
            _, (first, second) = op(GATHER)(x, [y.t(), made(3, 16, 5)], 0, name)
            first.sum().backward()
            assert (x.grad is not None, y.grad is not None) == needs
            assert second.requires_grad
        x = A.clone().requires_grad_()
        (dx,) = torch.autograd.grad(op(SCATTER)(x, w.t(), "sum", 0, name).square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            dx.sum().backward()


# Callers: torchtitan's linears, Inductor's pass, and the forms in which inference engines call.


class Column(torch.autograd.Function):
    """y = all_gather(x) @ w.T, which keeps its columns of the gathered x and gathers them again for dw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: ProcessGroup, *more: Tensor) -> Any:
        whole, ys = op(GATHER)(x, [each.T for each in (w, *more)], 0, group.group_name)
        ctx.save_for_backward(whole.chunk(group.size(), 1)[group.rank()].contiguous(), w, *more)
        ctx.group = group
        return tuple(ys) if more else ys[0]

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        columns, *ws = ctx.saved_tensors
        name = ctx.group.group_name
        dx = op(SCATTER)(torch.cat(dys, 1), torch.cat(ws), "sum", 0, name)
        _, dws = op(GATHER)(columns.T.contiguous(), [dy.contiguous() for dy in dys], 0, name)
        first, *others = (dw.T.contiguous() for dw in dws)
        return dx, first, None, *others


class Row(torch.autograd.Function):
    """y = reduce_scatter(x @ w.T) + bias, with one gather of dy for dx and dw, which is accumulated in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        y: Tensor = op(SCATTER)(x, w.T, "sum", 0, group.group_name)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        whole, (dx,) = op(GATHER)(dy.contiguous(), [w], 0, ctx.group.group_name)
        dw = torch.mm(whole.flatten(0, -2).T, x.flatten(0, -2), out_dtype=torch.float32)
        return dx, dw.to(w.dtype), None, None


@pytest.mark.parametrize("schedule", ["decomposed", "unfused"])
@on_ranks(2)
def test_linears_of_a_trainer(group: ProcessGroup, schedule: str) -> None:
    """Gradients that no rank adds to have the bits of the library's matmuls of gathered operands."""
    rank, (M, N, K), dtype = group.rank(), (16, 64, 32), torch.bfloat16
    x, w, v, dy = (made(i, *shape, dtype=dtype) for i, shape in enumerate(((M, K), (N, K), (N, K), (M, N))))
    bias = made(9, N, dtype=dtype)
    rounded = {"rtol": 2e-2, "atol": 2e-2}
    with fusedtp.drop_in(schedule):
        for ws in ((w,), (w, v)):
            xs = x.chunk(2)[rank].clone().requires_grad_()
            own = [each.chunk(2)[rank].clone().requires_grad_() for each in ws]
            mine = dy.chunk(2, 1)[rank]
            ys = Column.apply(xs, own[0], group, *own[1:])  # type: ignore[no-untyped-call]
            torch.autograd.backward(ys, [mine] * len(ws) if len(ws) > 1 else mine)
            for y, one, each in zip(ys if len(ws) > 1 else (ys,), own, ws, strict=True):
                torch.testing.assert_close(y, F.linear(x, each).chunk(2, 1)[rank], **rounded)
                assert one.grad is not None
                assert torch.equal(one.grad, torch.mm(x.T, mine).T)
            expected = sum(dy.float() @ each.float() for each in ws).chunk(2)[rank]
            torch.testing.assert_close(xs.grad.float(), expected, rtol=2e-2, atol=0.25)  # type: ignore[union-attr]
        xs = x.chunk(2, 1)[rank].contiguous().requires_grad_()
        one = w.chunk(2, 1)[rank].contiguous().requires_grad_()
        y = Row.apply(xs, one, bias, group)  # type: ignore[no-untyped-call]
        y.backward(dy.chunk(2)[rank])
        torch.testing.assert_close(y, F.linear(x, w, bias).chunk(2)[rank], rtol=2e-2, atol=0.1)
        assert torch.equal(xs.grad, torch.mm(dy, one.detach()))  # type: ignore[arg-type]
        exact = torch.mm(dy.float().T, xs.detach().float()).to(dtype)
        assert torch.equal(one.grad, exact)  # type: ignore[arg-type]


class Block(nn.Module):
    """A norm, and a gated MLP of three linears."""

    def __init__(self, hidden: int = 64, width: int = 96) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate, self.up = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = self.down(F.silu(self.gate(h)) * self.up(h)) + x
        return out


@on_ranks(2, timeout=300)
def test_micro_pipeline_of_mlps(group: ProcessGroup) -> None:
    """Inductor's pass makes every gather and scatter of torch's own styles one of the ops, which run by fusedtp."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    dim, num_blocks = 1, 2 if LARGE else 1
    torch.manual_seed(0)
    model, mesh = nn.Sequential(*(Block() for _ in range(num_blocks))), mesh_of(group)
    for block in model:
        parallelize_module(block, mesh, {
            "norm": SequenceParallel(sequence_dim=dim, use_local_output=False),
            "gate": ColwiseParallel(input_layouts=Shard(dim)), "up": ColwiseParallel(input_layouts=Shard(dim)),
            "down": RowwiseParallel(output_layouts=Shard(dim)),
        })  # fmt: skip
    x = made(5, 2, 32, 64).chunk(2, dim)[group.rank()].contiguous()

    def step(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach()] + [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]

    expected = step(copy.deepcopy(model))
    torch._dynamo.reset()
    with fusedtp.drop_in(), few_kernels(), config.patch({"_micro_pipeline_tp": True}):
        fused = torch.compile(model, fullgraph=True)
        got, codes = run_and_get_code(lambda: step(fused))
        ws = registry.get(group, torch.device("cpu"))
        before = ws.epoch
        got = step(fused)
        # Every collective of a step was one of our ops. The pass of torch 2.14 leaves each block's gather in forward.
        left = num_blocks * (torch.__version__ >= "2.14")
        assert (ws.epoch - before, last_path().op) == (5 * num_blocks - left, "matmul_reduce_scatter")
    torch._dynamo.reset()
    code = "\n".join(codes)
    assert [code.count(f"torch.ops.symm_mem.{name}.default(") for name in (GATHER, SCATTER)] == [
        2 * num_blocks - left,
        3 * num_blocks,
    ]
    assert code.count("torch.ops._c10d_functional.all_gather_into_tensor.default(") == left
    for each, ref in zip(got, expected, strict=True):
        torch.testing.assert_close(each, ref, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_forms_of_inference_engines(group: ProcessGroup) -> None:
    """Keywords, weights that are not transposed, lists of None, results changed in place, inference mode."""
    rank, name = group.rank(), group.group_name
    everyone = shards(group, (4, 16), torch.bfloat16)
    whole, w = torch.cat(everyone), made(2, 16, 6, dtype=torch.bfloat16)
    scale, eight = torch.ones(1), [each.to(E4M3) for each in everyone]
    weight = made(3, 6, 16).to(E4M3).t()
    with fusedtp.drop_in("decomposed"), torch.inference_mode():
        out, (y,) = op(GATHER).default(everyone[rank], [w], gather_dim=0, group_name=name, return_A=False)
        assert out is None
        near(y, whole, w)
        y.relu_()
        for form in (op(SCATTER), op(SCATTER).default):
            y = form(whole, w, "avg", scatter_dim=0, group_name=name)
            near(y, whole, w, 0, rank, 2)
        _, (y,) = op(SCALED_GATHER)(
            eight[rank], [weight], scale_a := torch.ones(4, 1), [torch.ones(1, 6)], gather_dim=0, biases=[None],
            result_scales=[None], out_dtypes=[torch.bfloat16], use_fast_accum=[False], group_name=name,
        )  # fmt: skip
        both = torch.cat([each.bfloat16() for each in eight])
        near(y, both, weight.bfloat16())
        y = op(SCALED_SCATTER)(
            both.to(E4M3), weight, scale, scale_a[:1], "sum", orig_scatter_dim=0, scatter_dim_after_maybe_reshape=0,
            group_name=name, output_shape=[8, 6], out_dtype=torch.bfloat16, use_fast_accum=False,
        )  # fmt: skip
        near(y, both, 2 * weight.bfloat16(), 0, rank, 2)
    x = everyone[rank].clone().requires_grad_()
    with fusedtp.drop_in("decomposed"):
        op(GATHER)(x, [w], 0, name)[1][0].relu_().sum().backward()
        op(SCATTER)(x, w, "sum", 0, name).relu_().sum().backward()


# Refusals, torch's own code, the switch


def refused(x: Tensor, w: Tensor, name: str) -> list[tuple[Callable[[], Any], str]]:
    e, s, one = x.to(E4M3), w.to(E4M3), torch.ones(())
    lists = ([None], [None], [torch.bfloat16], [False])
    return [
        (lambda: op(GATHER)(x[0], [w], 0, name), "A must have at least 2 dimensions"),
        (lambda: op(GATHER)(x, [w[0]], 0, name), "B must have 2 dimensions"),
        (lambda: op(GATHER)(x, [w], 2, name), r"gather_dim must be in \[-1, 1\]"),
        (lambda: op(GATHER)(x, [w], -2, name), r"gather_dim must be in \[-1, 1\]"),
        (lambda: op(GATHER)(x, [w.bfloat16()], 0, name), "dtype"),
        (lambda: op(GATHER)(x.int(), [], 0, name), "must be one of"),
        (lambda: op(GATHER)(x, [w[:5]], 0, name), "features"),
        (lambda: op(GATHER)(x, [w], 0, "no group"), "not the name of a process group"),
        (lambda: op(SCATTER)(x[:7], w, "sum", 0, name), "dim 0 of .* must be a multiple"),
        (lambda: op(SCATTER)(x, w[:, :5], "sum", -1, name), "dim 1 of .* must be a multiple"),
        (lambda: op(SCATTER)(x, w, "max", 0, name), "reduce_op must be sum or avg"),
        (lambda: op(SCALED_GATHER)(e, [s], one, [one], 1, name, *lists), "must not be the last one"),
        (lambda: op(SCALED_GATHER)(e, [s], one, [one], 0, name, [], *lists[1:]), "biases must be as many"),
        (lambda: op(SCALED_GATHER)(e, [], one, [], 0, name, [], [], [], []), "must not be empty"),
        (lambda: op(SCALED_GATHER)(e, [s], torch.ones(3, 1), [one], 0, name, *lists), "A_scale.scale must be"),
        (lambda: op(SCALED_GATHER)(e, [s], one.double(), [one], 0, name, *lists), "A_scale must be torch.float32"),
        (lambda: op(SCALED_SCATTER)(e, s, one, one, "sum", 0, 0, name, [8, 6]), "out_dtype must be"),
        (lambda: op(SCALED_SCATTER)(e, s, torch.ones(3, 1), one, "sum", 0, 0, name, [8, 6]), "A_scale must be one"),
    ]  # fmt: skip


@on_ranks(2)
def test_refusals(group: ProcessGroup) -> None:
    """Every rank raises the same error before anything is sent."""
    with fusedtp.drop_in("decomposed"):
        op(SCATTER)(torch.ones(2, 2), torch.ones(2, 2), "sum", 0, group.group_name)
        ws = registry.get(group, torch.device("cpu"))
        before = ws.epoch
        for call, text in refused(made(1, 8, 16), made(2, 16, 6), group.group_name):
            with pytest.raises(ValueError, match=text) as found:
                call()
            assert "x is A" in found.value.__notes__[0]
        assert ws.epoch == before


@on_ranks(2)
def test_where_torch_has_its_own_code(group: ProcessGroup) -> None:
    """As on CUDA: a refused op is torch's, which is said once, like the replacement."""
    given = (made(1, 8, 16), made(2, 16, 6), "sum", 0, group.group_name)
    kernel = drop_in._kernel(SCATTER, drop_in._CHECKS[SCATTER], falls_back=True)
    theirs = mock.Mock(return_value="torch's")
    with mock.patch.object(drop_in.torch_private, "symm_mem_function", return_value=theirs) as asked:
        for _ in range(2):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                near(kernel(*given), torch.cat([given[0]] * 2, 1), torch.cat([given[1]] * 2), 0, group.rank(), 2)
                assert kernel(given[0].int(), *given[1:]) == "torch's"
            texts = [str(each.message) for each in said]
            if _ == 0:
                assert f"{SCATTER} runs fusedtp's code in place of torch's own" in texts[0]
                assert f"{SCATTER} runs torch's own code, as fusedtp refuses: x must be one of" in texts[1]
    assert (len(texts), theirs.call_count) == (0, 2)
    asked.assert_called_with(SCATTER)
    # Its forward has run; backward says what is refused.
    A, B = (each.to(torch.complex64) for each in given[:2])
    for setup, backward, inputs in (
        (drop_in._setup_scatter, drop_in._scatter_backward, ((A, B, *given[2:]),)),
        (drop_in._setup_gather, lambda ctx, dy: drop_in._gather_backward(ctx, None, [dy]),
         ((A, [B], 0, group.group_name), {})),
    ):  # fmt: skip
        ctx = mock.Mock(needs_input_grad=(True, True))
        setup(ctx, *inputs, None)
        with pytest.raises(
            NotImplementedError, match=r"own code, which has no gradient, as fusedtp refuses: x must be"
        ):
            backward(ctx, A)


@on_ranks(2)
def test_test_mode_defers(group: ProcessGroup) -> None:
    from torch.distributed._symmetric_memory import _test_mode

    A, B, scale = made(1, 8, 16), made(2, 16, 6), torch.ones(())
    scaled = (A.to(E4M3), made(3, 16, 16).to(E4M3).t(), scale, scale, "sum", 0, 0, group.group_name, [8, 16])
    with fusedtp.drop_in():
        op(GATHER)(A, [B], 0, group.group_name)
        before = fusedtp.last_path()
        with _test_mode():
            _, (y,) = op(GATHER)(A, [B], 0, group.group_name)
            z = op(SCATTER)(A, B, "sum", 0, group.group_name)
            op(SCALED_SCATTER)(*scaled, out_dtype=torch.bfloat16)
        assert fusedtp.last_path() is before
    assert torch.equal(y, torch.cat([A, A]) @ B)
    torch.testing.assert_close(z, 2 * (A @ B).chunk(2)[group.rank()])


@on_ranks(2)
def test_the_switch(group: ProcessGroup) -> None:
    """Switches nest, and the last one's schedule counts; without one all is as before."""
    from torch.compiler import config

    def call() -> str:
        op(SCATTER)(torch.ones(2, 2), torch.ones(2, 2), "sum", 0, group.group_name)
        return last_path().schedule

    before, has_nccl = (dist.is_nccl_available, config.cache_key_tag), dist.is_nccl_available()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="CPU"):
            call()
        first = fusedtp.drop_in("decomposed")
        with fusedtp.drop_in("unfused") as second:
            assert call() == "unfused"
            first.undo()
            first.undo()
            assert call() == "unfused"
            # Nobody but Inductor's pass is told of an NCCL that is not there.
            assert dist.is_nccl_available() == has_nccl
            assert config.cache_key_tag != before[1]
        second.undo()
        assert (dist.is_nccl_available, config.cache_key_tag) == before
    with pytest.raises(NotImplementedError):
        torch.mm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16(), out_dtype=torch.float32)
    with pytest.raises(ValueError, match="schedule must be one of"):
        fusedtp.drop_in("none")


CHANGES = {
    "int scatter_dim": ("int scatter_dims", "no scatter_dims; int scatter_dim is new"),
    "str reduce_op, int scatter_dim": ("int scatter_dim, str reduce_op", "the order is A, B, reduce_op, scatter_dim"),
    "str reduce_op": ("int reduce_op", "int reduce_op is str reduce_op"),
    "-> Tensor": ("-> (Tensor, Tensor)", "it returns Tensor instead of Tensor, Tensor"),
    "str group_name": ("str group_name, bool more=True", "no more"),
    "fused_matmul": ("fused_no_matmul", "there is none"),
}


@pytest.mark.parametrize("old", CHANGES)
def test_another_schema_is_refused(old: str) -> None:
    assert all(drop_in.difference(text) == "" for text in drop_in.SCHEMAS)
    new, said = CHANGES[old]
    (text,) = (each for each in drop_in.SCHEMAS if each.startswith(f"{SCATTER}("))
    assert old in text
    with mock.patch.object(drop_in, "SCHEMAS", [text.replace(old, new)]), pytest.raises(RuntimeError) as found:
        fusedtp.drop_in()
    assert said in str(found.value)
    assert torch.__version__ in str(found.value)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the package asks it; here the other values are read as the import reads them."""
    with mock.patch.object(drop_in, "drop_in", side_effect=AssertionError("installed")):
        for value in ("", "0"):
            monkeypatch.setenv("FUSEDTP_DROP_IN", value)
            drop_in.if_asked()
        monkeypatch.setenv("FUSEDTP_DROP_IN", "on")
        with pytest.raises(ValueError, match=r"^FUSEDTP_DROP_IN must be 1, 0 or empty, got 'on'$"):
            drop_in.if_asked()
    code = """
import fusedtp
import torch.distributed._symmetric_memory
print(fusedtp.torch_private.has_kernel("symm_mem::fused_matmul_reduce_scatter", "CPU"))
"""
    monkeypatch.setenv("FUSEDTP_DROP_IN", "1")
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
