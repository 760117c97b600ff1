"""A norm at the end of a sum over ranks: y is as without it, to the bit, its norm that of y's rows; and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.op import NORMS

from .spread import spread
from .test_residual import N, Problem
from .test_several import cut, whole

SCHEDULES = ("unfused", "decomposed", "fused")
EPS = 1e-5


def parameters(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """A norm's arguments."""
    more = {"norm_bias": whole((N,), dtype, 5)} if name == "layer_norm" else {}
    return {"norm": name, "norm_eps": EPS, "norm_weight": whole((N,), dtype, 4), **more}


def in_float64(y: Tensor, norm: str, norm_eps: float, norm_weight: Tensor, norm_bias: Tensor | None = None) -> Tensor:
    """The norm of y."""
    weight, bias = norm_weight.double(), None if norm_bias is None else norm_bias.double()
    if norm == "rms_norm":
        return F.rms_norm(y.double(), (N,), weight, norm_eps)
    return F.layer_norm(y.double(), (N,), weight, bias, norm_eps)


def check_norm(normed: Tensor, y: Tensor, given: dict[str, Any]) -> None:
    """normed against float64, of y as it was rounded: a rounding of means, of the result, and of what is subtracted."""
    assert normed.dtype == y.dtype
    assert normed.stride() == y.stride()
    exact, eps = in_float64(y, **given), torch.finfo(torch.float64 if y.dtype == torch.float64 else torch.float32).eps
    spread_ = y.double().std(-1, keepdim=True, correction=0) if given["norm"] == "layer_norm" else y.double().abs()
    largest = y.double().abs().amax(-1, keepdim=True) / (spread_ + EPS) * given["norm_weight"].double().abs()
    means = 4 * N * eps * (exact.abs() + (largest if given["norm"] == "layer_norm" else 0))
    reference.check(normed, exact, means + torch.finfo(y.dtype).eps * exact.abs() + 1e-30, "normed")


def through(
    problem: Problem, call: Callable[..., Any], mine: Callable[[Tensor], Tensor], name: str, used: str = "both"
) -> None:
    """Forward as without the norm, then every gradient against those of one process, in float64."""
    dtype = problem.y.dtype if problem.x.dtype == torch.float64 else problem.x.dtype
    given, residual = parameters(name, dtype), mine(problem.residual).clone().requires_grad_()
    for key, each in given.items():
        if isinstance(each, Tensor):
            given[key] = each.requires_grad_()
    leaves = problem.leaves()
    normed, y = call(*leaves, residual=residual, **given)
    with torch.no_grad():
        assert torch.equal(y, call(*leaves, residual=residual))
        again = call(*leaves, residual=residual, **given)
        assert torch.equal(again[0], normed)
        assert torch.equal(again[1], y)
    plain = {key: each.detach() if isinstance(each, Tensor) else each for key, each in given.items()}
    check_norm(normed.detach(), y.detach(), plain)
    if problem.x.dtype not in (torch.float32, torch.float64):
        return
    # What follows is linear in both results, the same on all ranks.
    shape = problem.residual.shape
    dnormed, dy = (whole(shape, torch.float64, seed) for seed in (7, 8))
    loss = torch.zeros(())
    loss = loss + (normed * mine(dnormed)).sum() if used != "y" else loss
    loss = loss + (y * mine(dy)).sum() if used != "normed" else loss
    loss.backward()
    of_whole = problem.y.clone().requires_grad_()
    norms = {key: each.detach().double().requires_grad_() if isinstance(each, Tensor) else each
             for key, each in given.items()}  # fmt: skip
    expected = (in_float64(of_whole, **norms) * dnormed).sum() * (used != "y")
    (expected + (of_whole * dy).sum() * (used != "normed")).backward()
    into_y = of_whole.grad
    assert into_y is not None
    flat, x, w, bias = into_y.flatten(0, -2), *leaves
    assert x is not None
    assert w is not None
    pairs = [
        (residual.grad, mine(into_y)),
        (x.grad, into_y @ w.detach().double()),
        (w.grad, flat.t() @ x.detach().double().flatten(0, -2)),
        *(((bias.grad, flat.sum(0)),) if bias is not None else ()),
        *((given[key].grad, each.grad) for key, each in norms.items() if isinstance(each, Tensor)),
    ]
    for found, exact in pairs:
        assert found is not None
        assert exact is not None
        tolerance = 1e-11 if found.dtype == torch.float64 else 2e-3
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))


def scattered(group: ProcessGroup, schedule: str, dtype: torch.dtype, name: str, dim: int, how: str, used: str) -> None:
    """By a reduce-scatter, whose ranks norm their own rows."""
    shape = (7, 5)
    sizes = cut(shape[dim], group.size(), how)
    call = partial(fusedtp.linear_reduce_scatter, group=group, schedule=schedule, scatter_dim=dim, sizes=sizes)
    mine = partial(torch.split, split_size_or_sections=sizes, dim=dim)
    through(Problem(group, shape, dtype, dim == 0), call, lambda each: mine(each)[group.rank()], name, used)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [4, 2, 1]))
def test_after_a_reduce_scatter(pool: RankPool, schedule: str, world_size: int, name: str) -> None:
    exact = torch.float32 if schedule == "fused" else torch.float64
    pool.run(scattered, schedule, exact, name, 0, "lopsided", "both", world_size=world_size)
    pool.run(scattered, schedule, torch.bfloat16, name, 1, "on the last", "both", world_size=world_size)
    pool.run(scattered, schedule, exact, name, 1, "even", "normed" if name == "rms_norm" else "y",
             world_size=world_size)  # fmt: skip


def reduced(group: ProcessGroup, schedule: str, algorithm: str, dtype: torch.dtype, name: str) -> None:
    """By an all-reduce."""
    call = partial(fusedtp.linear_all_reduce, group=group, schedule=schedule, algorithm=algorithm)
    through(Problem(group, (9, 3), dtype, True), call, lambda each: each, name)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [2, 1, 4]))
def test_after_an_all_reduce(pool: RankPool, schedule: str, world_size: int, name: str) -> None:
    algorithms = ("auto",) if schedule == "unfused" else ("one_shot", "two_shot")
    exact = torch.float32 if schedule == "fused" else torch.float64
    for algorithm, dtype in itertools.product(algorithms, (exact, torch.float16)):
        pool.run(reduced, schedule, algorithm, dtype, name, world_size=world_size)


def the_same_rows(group: ProcessGroup, schedule: str) -> None:
    """A row has the same bits one-shot, two-shot and scattered. Another eps is another call."""
    problem = Problem(group, (33,), torch.float32, False)
    given = parameters("rms_norm", torch.float32)
    call = partial(fusedtp.linear_all_reduce, group=group, schedule=schedule, **given)
    normed, y = call(problem.x, problem.w, algorithm="one_shot")
    for other in (call(problem.x, problem.w, algorithm="two_shot"), call(problem.x, problem.w)):
        assert torch.equal(other[1], y)
        assert torch.equal(other[0], normed)
    other = {**given, "norm_eps": 0.5}
    check_norm(fusedtp.linear_all_reduce(problem.x, problem.w, group=group, schedule=schedule, **other)[0], y, other)
    sizes = cut(33, group.size(), "even")
    mine = fusedtp.linear_reduce_scatter(problem.x, problem.w, group=group, schedule=schedule, sizes=sizes, **given)
    assert torch.equal(mine[0], normed.split(sizes)[group.rank()])


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_rows_have_their_bits_wherever_they_are_made(pool: RankPool, schedule: str) -> None:
    pool.run(the_same_rows, schedule, world_size=3)


def layers(group: ProcessGroup, name: str, sequence_parallel: bool) -> None:
    """RowParallelLinear with a norm as nn.Linear, a residual and the norm in one process; its state fits another."""
    torch.manual_seed(2)
    dense = nn.Linear(10, N, dtype=torch.float64)
    norm: Any = (nn.RMSNorm if name == "rms_norm" else nn.LayerNorm)(N, eps=EPS, dtype=torch.float64)
    torch.manual_seed(2)
    layer = fusedtp.RowParallelLinear(
        10, N, dtype=torch.float64, group=group, sequence_parallel=sequence_parallel, norm=name, norm_eps=EPS,  # type: ignore[arg-type]
    )  # fmt: skip
    assert name in repr(layer)
    x, residual = whole((6, 10), torch.float64, 1), whole((6, N), torch.float64, 2)
    y = dense(x) + residual
    normed = norm(y)
    (normed.square().sum() + (3 * y).sum()).backward()
    rank, sizes = group.rank(), cut(6, group.size(), "even")
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) if sequence_parallel else slice(None)
    mine = x.split(list(layer.feature_sizes), -1)[rank]
    ours, total = layer(mine, residual[rows])
    torch.testing.assert_close(total, y[rows])
    torch.testing.assert_close(ours, normed[rows])
    (ours.square().sum() + (3 * total).sum()).backward()
    # A whole result is one tensor, whose loss counts once.
    for found, exact in ((layer.norm_weight, norm.weight), (layer.norm_bias, getattr(norm, "bias", None)),
                         (layer.bias, dense.bias), (layer.weight, dense.weight)):  # fmt: skip
        if exact is not None:
            assert type(found.grad) is type(found.data)
            torch.testing.assert_close(found.grad.full_tensor(), exact.grad)
    state = layer.state_dict()
    assert {each for each in state if each.startswith("norm")} == {
        "norm_weight", *(["norm_bias"] if name == "layer_norm" else [])
    }  # fmt: skip
    with torch.no_grad():
        layer.norm_weight.mul_(2)
    layer.load_state_dict(state)
    layer.reset_parameters()
    assert torch.equal(layer.norm_weight.full_tensor(), torch.ones(N, dtype=torch.float64))


@pytest.mark.parametrize(("name", "sequence_parallel"), [("rms_norm", True), ("layer_norm", False)])
def test_a_layer(pool: RankPool, name: str, sequence_parallel: bool) -> None:
    pool.run(layers, name, sequence_parallel, world_size=3)


def elsewhere(group: ProcessGroup, name: str) -> None:
    """Compiled in one graph, under autocast, of torch.func, with create_graph, of Scaled and a float8 recipe."""
    sizes = cut(8, group.size(), "even")
    problem, given = Problem(group, (8,), torch.float32, True), parameters(name, torch.float32)
    residual = problem.residual.split(sizes)[group.rank()].clone()
    weight, *biases = [each for each in given.values() if isinstance(each, Tensor)]

    def call(x: Tensor, w: Tensor, weight: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
        more = dict(given, norm_weight=weight, **dict(zip(["norm_bias"], biases, strict=False)))
        return fusedtp.linear_reduce_scatter(x, w, None, group=group, residual=residual, **more)

    x, w, _ = problem.leaves()
    leaves = [x, w, *(each.clone().requires_grad_() for each in (weight, *biases))]

    def loss(made: tuple[Tensor, Tensor]) -> Tensor:
        return made[0].square().sum() + made[1].sum()

    expected = call(*leaves)  # type: ignore[arg-type]
    grads = torch.autograd.grad(loss(expected), leaves)  # type: ignore[arg-type]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    for one, other in ((compiled, expected), (torch.autograd.grad(loss(compiled), leaves), grads)):  # type: ignore[arg-type]
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    places = tuple(range(len(leaves)))
    of_func = torch.func.grad(lambda *given: loss(call(*given)), argnums=places)(*(each.detach() for each in leaves))  # type: ignore[union-attr]
    again = torch.autograd.grad(loss(call(*leaves)), leaves, create_graph=True)  # type: ignore[arg-type]
    for found in (of_func, again):
        for mine, theirs in zip(found, grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        made = call(*leaves)  # type: ignore[arg-type]
    assert {each.dtype for each in made} == {torch.bfloat16}
    torch.testing.assert_close(made[0].float(), expected[0], rtol=0.1, atol=0.2)
    with torch.no_grad():
        scaled = [fusedtp.scaled(each.detach(), "rowwise") for each in (x, w)]  # type: ignore[union-attr]
        more = {key: each.bfloat16() if isinstance(each, Tensor) else each for key, each in given.items()}
        run: Any = partial(fusedtp.linear_reduce_scatter, *scaled, group=group, residual=residual.bfloat16())
        normed, y = run(**more)
        assert torch.equal(y, run())
        check_norm(normed, y, more)
        assert torch.equal(torch.compile(lambda: run(**more), fullgraph=True, backend="aot_eager")()[1], y)
    cast = partial(fusedtp.linear_reduce_scatter, x, w, group=group, float8="rowwise")
    normed, y = cast(**given)
    check_norm(normed.detach(), y.detach(), given)
    loss((normed, y)).backward()
    with pytest.raises(NotImplementedError, match="or a norm"):
        torch.autograd.grad(call(*leaves), leaves, [torch.ones(2, *residual.shape)] * 2, is_grads_batched=True)  # type: ignore[arg-type]


def of_other_shards(group: ProcessGroup) -> None:
    """A layer whose shards are not as DTensor splits them, and are padded: as one whose are."""
    sizes, x = (10, 14), whole((6, 24), torch.float32, 1)
    made = []
    for given in (sizes, None):
        torch.manual_seed(0)
        layer = fusedtp.RowParallelLinear(24, 20, group=group, feature_sizes=given, norm="layer_norm")
        begin = sum(layer.feature_sizes[: group.rank()])
        normed, y = layer(x[:, begin : begin + layer.feature_sizes[group.rank()]])
        (normed.square().sum() + y.sum()).backward()
        assert layer.norm_weight is not None
        assert layer.norm_bias is not None
        grads = [each.grad.full_tensor() for each in (layer.norm_weight, layer.norm_bias)]
        made.append([normed.detach(), y.detach(), *grads])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_with_shards_of_its_own(pool: RankPool) -> None:
    pool.run(of_other_shards, world_size=2)


@pytest.mark.parametrize("name", NORMS)
def test_elsewhere(pool: RankPool, name: str) -> None:
    pool.run(elsewhere, name, world_size=2)


def refused(group: ProcessGroup) -> None:
    """Before anything is sent."""
    x, w, g = torch.ones(4, 3), torch.ones(5, 3), torch.ones(5)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"norm": "norm", "norm_weight": g}, "norm must be one of rms_norm, layer_norm, got 'norm'"),
        ({"norm_eps": -1.0, "norm_weight": g}, "norm_eps must be a number"),
        ({"norm_eps": float("nan"), "norm_weight": g}, "norm_eps must be a number"),
        ({"norm_bias": g, "norm": "layer_norm"}, "takes a norm_weight"),
        ({"norm": "layer_norm"}, "takes a norm_weight"),
        ({"norm_weight": g, "norm_bias": g}, "norm_bias is for norm='layer_norm'"),
        ({"norm_weight": torch.ones(4)}, r"norm_weight must be \[5\]"),
        ({"norm_weight": torch.ones(1, 5)}, r"norm_weight must be \[5\]"),
        ({"norm_weight": g, "norm_bias": torch.ones(4), "norm": "layer_norm"}, r"norm_bias must be \[5\]"),
        ({"norm_weight": g.double()}, "norm_weight must have x's dtype"),
    )
    for more, text in cases:
        for call in (fusedtp.linear_reduce_scatter, fusedtp.linear_all_reduce):
            with pytest.raises(ValueError, match=text):
                call(x, w, group=group, **more)
    with pytest.raises(TypeError, match="norm_weight must be a tensor"):
        fusedtp.linear_all_reduce(x, w, group=group, norm_weight=[1.0] * 5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="a norm is of whole rows"):
        fusedtp.linear_reduce_scatter(x, w, group=group, scatter_dim=-1, norm_weight=g)
    for name in ("norm", 1):
        with pytest.raises(ValueError, match="norm must be one of"):
            fusedtp.RowParallelLinear(4, 4, group=group, norm=name)  # type: ignore[arg-type]


def test_refused(pool: RankPool) -> None:
    pool.run(refused, world_size=1)


def told(group: ProcessGroup, schedule: str, differs: str) -> None:
    """Every rank, if one has another norm than the others."""
    x, w, odd = torch.ones(4, 3), torch.ones(5, 3), group.rank() == 1
    given: dict[str, Any] = {"norm_weight": torch.ones(5)}
    if differs == "bias":
        given["norm"] = "layer_norm"
    if odd:
        given = {
            "eps": {**given, "norm_eps": 1e-5}, "name": {**given, "norm": "layer_norm"}, "none": {},
            "bias": {**given, "norm_bias": torch.ones(5)},
        }[differs]  # fmt: skip
    with pytest.raises(fusedtp.RanksDisagree, match="norm"):
        fusedtp.linear_all_reduce(x, w, group=group, schedule=schedule, **given)
    fusedtp.destroy(group)


@pytest.mark.parametrize(
    ("schedule", "differs"),
    [
        ("decomposed", "eps"), ("fused", "none"), ("decomposed", "name"), ("decomposed", "bias"), ("fused", "bias"),
    ],
)  # fmt: skip
def test_ranks_with_other_norms_are_told(pool: RankPool, schedule: str, differs: str) -> None:
    pool.run(told, schedule, differs, world_size=2)


def path(group: ProcessGroup) -> str:
    one = torch.ones(2, 2)
    fusedtp.linear_all_reduce(one, one, group=group, schedule="fused", residual=one, norm_weight=one[0])
    return fusedtp.last_path().epilogue  # type: ignore[union-attr]


def test_the_path_says_where(pool: RankPool) -> None:
    assert pool.run(path, world_size=2)[0] == "residual in the kernel, rms_norm after it"
