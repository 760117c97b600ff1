"""FusedGroup: linears of one module share one gather of their input, without a change of the module's code."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.optim.adamw import adamw
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import fusedtp
from fusedtp.bench.ranks import RankPool

from .harness import on_ranks
from .test_counting import counting

HEADS, KV, HEAD, HIDDEN = 4, 2, 6, 20


class Attention(nn.Module):
    """Grouped-query attention that calls q, k and v in the usual order; one of them has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV * HEAD, bias=True)
        self.v_proj = nn.Linear(HIDDEN, KV * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, HEAD)).transpose(0, 1) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2).transpose(0, 1))


def attention() -> Attention:
    torch.manual_seed(3)
    return Attention().double()


def parallel(group: ProcessGroup, dense: nn.Module, split: bool, **options: Any) -> nn.Module:
    """Return the module with its first three linears in a group and its tokens split or whole."""
    layout = Shard(0) if split else Replicate()
    plan: dict[str, Any] = {
        "": fusedtp.FusedGroup("q_proj", "k_proj", "v_proj", input_layouts=layout, **options),
        "o_proj": fusedtp.FusedRowwiseParallel(output_layouts=layout, **options),
    }
    return parallelize_module(copy.deepcopy(dense), DeviceMesh.from_group(group, "cpu"), plan)


def part(x: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return x.chunk(group.size())[group.rank()].clone() if split else x.clone()


def close(out: Tensor, ref: Tensor, name: str) -> None:
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    torch.testing.assert_close(whole, ref, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


def trained(group: ProcessGroup, split: bool, schedule: str, is_compiled: bool) -> None:
    """Train, evaluate and train again at several sizes (compiled: at one), and compare with one process."""
    dense = attention()
    module = parallel(group, dense, split, schedule=schedule)
    assert list(module.state_dict()) == list(dense.state_dict())
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (dense, module)]
    for step, length in enumerate((8,) if is_compiled else (8, 16, 4, 8)):
        x = torch.randn(length, 3, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        with torch.inference_mode() if step % 2 else torch.no_grad():
            close(module(part(x, group, split)), part(dense(x), group, split), f"evaluation {step}")
        whole, mine = x.clone().requires_grad_(), part(x, group, split).requires_grad_()
        y, ref = call(mine), dense(whole)
        close(y, part(ref, group, split), f"y {step}")
        if step == 2:
            y = checkpoint(module, mine, use_reentrant=False)
        y.square().sum().backward()
        ref.square().sum().backward()
        close(mine.grad, part(whole.grad, group, split), f"dx {step}")
        for (name, parameter), other in zip(module.named_parameters(), dense.parameters(), strict=True):
            close(parameter.grad, other.grad, f"{name} {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("world_size", "split", "schedule"),
    [(2, True, "decomposed"), (2, False, "unfused"), (1, True, "unfused"), (2, True, "compiled")],
)
def test_a_module_trains_as_in_one_process(pool: RankPool, world_size: int, split: bool, schedule: str) -> None:
    given = ("auto", True) if schedule == "compiled" else (schedule, False)
    pool.run(trained, split, *given, world_size=world_size, timeout=120)


class Five(nn.Module):
    """Five linears of one input, of which some have a bias."""

    def __init__(self) -> None:
        super().__init__()
        widths = 8, 70, 2, 36, 16
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, each, bias=i % 2 == 0) for i, each in enumerate(widths)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x).square().sum() for head in self.heads]).sum()


def five_in_kernels(group: ProcessGroup) -> None:
    """Compare the gradients of five linears with one process: their weights are in a table of the kernels' blocks."""
    torch.manual_seed(3)
    dense = Five()
    style = fusedtp.FusedGroup(*(f"heads.{i}" for i in range(5)), input_layouts=Shard(0), schedule="fused")
    module = parallelize_module(copy.deepcopy(dense), DeviceMesh.from_group(group, "cpu"), {"": style})
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    whole, mine = x.clone().requires_grad_(), part(x, group, True).requires_grad_()
    dense(whole).backward()
    module(mine).backward()
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, part(whole.grad, group, True), rtol=1e-4, atol=1e-4)
    for parameter, other in zip(module.parameters(), dense.parameters(), strict=True):
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(found, other.grad, rtol=1e-4, atol=1e-4)


def test_a_group_of_five_in_kernels(pool: RankPool) -> None:
    pool.run(five_in_kernels, world_size=2, timeout=120)


def gathers(group: ProcessGroup, split: bool) -> tuple[list[str], list[str]]:
    """Return the tasks of forward and backward of an attention block."""
    module = parallel(group, attention(), split)
    x = part(torch.randn(8, 3, HIDDEN, dtype=torch.float64), group, split).requires_grad_()
    with counting() as forward:
        y = module(x)
    with counting() as backward:
        y.sum().backward()
    return [name for name, _ in forward.calls], [name for name, _ in backward.calls]


def test_one_gather_for_all_and_one_scatter_of_their_gradients(pool: RankPool) -> None:
    twice = "all_gather_matmul twice"
    expected = {
        True: (["all_gather_matmul", "matmul_reduce_scatter"], [twice, "all_gather_matmul", "matmul_reduce_scatter"]),
        False: (["matmul_all_reduce"], ["matmul_all_reduce"]),
    }
    for split, wanted in expected.items():
        for found in pool.run(gathers, split, world_size=2):
            assert found == wanted


@on_ranks(2)
def test_calls_that_do_not_belong_together(group: ProcessGroup) -> None:
    """Other inputs, missing calls, one call twice, and an input that changes between calls."""
    dense = attention()
    module = parallelize_module(copy.deepcopy(dense), DeviceMesh.from_group(group, "cpu"), {
        "": fusedtp.FusedGroup("q_proj", "k_proj", "v_proj", use_local_output=False),
    })  # fmt: skip
    x, other = torch.randn(2, 5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (getattr(module, name) for name in ("q_proj", "k_proj", "v_proj"))
    close(q(x), dense.q_proj(x), "q")
    close(k(other), dense.k_proj(other), "k of another input")
    close(v(x), dense.v_proj(x), "v")
    close(v(x), dense.v_proj(x), "v again")
    close(q(x), dense.q_proj(x), "q after v")
    x.mul_(2)
    close(k(x), dense.k_proj(x), "k of the changed input")
    with torch.no_grad():
        assert not q(x).requires_grad
    assert k(x).requires_grad
    q(x)
    with torch.no_grad():
        for each in (module, dense):
            each.v_proj.weight.mul_(3)
    close(v(x), dense.v_proj(x), "v of changed weights")
    q(x)
    for each in (module, dense):
        each.v_proj.weight = nn.Parameter(each.v_proj.weight.detach() * 2)
    close(v(x), dense.v_proj(x), "v of another weight")
    q(x)
    with torch.no_grad():
        for each in (module, dense):
            getattr(each.v_proj.weight, "_local_tensor", each.v_proj.weight).mul_(3)
    close(v(x), dense.v_proj(x), "v of a changed part")
    q(x)
    with torch.inference_mode():
        x = x + 1
        q(x)
        x.mul_(2)
        close(k(x), dense.k_proj(x), "k of an input changed in inference mode")
    y = torch.randn(5, HIDDEN, dtype=torch.float32)
    module.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert q(y).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert k(y).dtype == torch.float16


def moved(x: Tensor) -> None:
    """Give x other memory twice: the second allocation may have the first one's address."""
    for factor in (3, 2 / 3):
        x.data = (x.data * factor).clone()


def replaced(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 2)
    torch._foreach_mul_([linear.weight], 2.0)


def averaged(linear: nn.Linear) -> None:
    own = list(linear.parameters())
    get_ema_multi_avg_fn(0.5)(own, [3 * each for each in own], 1)  # type: ignore[no-untyped-call]


def stepped(linear: nn.Linear, **options: Any) -> None:
    """Step by the function of torch's optimizer."""
    own = [linear.weight]
    grads, *averages = ([torch.full_like(each, value) for each in own] for value in (1.0, 0.0, 0.0))
    adamw(
        own, grads, *averages, [], [torch.tensor(1.0)], amsgrad=False, beta1=0.9, beta2=0.9, lr=0.1, weight_decay=0.0,
        eps=1e-8, maximize=False, **options,
    )  # fmt: skip


# Changes of an input, or of a linear, between the calls of a group's linears.
OF_X: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.mul_(2), "foreach": lambda x: torch._foreach_mul_([x], 2.0), "data": moved,
    "set_": lambda x: x.set_(2 * x), "part of the memory": lambda x: x.set_(x.untyped_storage(), 1, (1, HIDDEN)),  # type: ignore[call-overload]
}  # fmt: skip
OF_LINEAR: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda linear: linear.weight.mul_(2),
    "foreach": lambda linear: torch._foreach_mul_(list(linear.parameters()), 2.0),
    "foreach of what is detached": lambda linear: torch._foreach_mul_([linear.weight.detach()], 2.0),
    "data of a part": lambda linear: moved(getattr(linear.weight, "_local_tensor", linear.weight)),
    "average": averaged, "step": partial(stepped, foreach=True), "fused step": partial(stepped, fused=True),
    "replaced": replaced,
}  # fmt: skip


@pytest.mark.parametrize("has_grad", [False, True])
@on_ranks(2)
def test_changes_between_the_calls(group: ProcessGroup, has_grad: bool) -> None:
    """Each linear gives the result for the input and the weight of its own call; the other results are still right."""
    mesh = DeviceMesh.from_group(group, "cpu")
    options: dict[str, Any] = {"output_layouts": Replicate()}
    for name, change in (*OF_X.items(), *OF_LINEAR.items()):
        dense = attention()
        module = parallelize_module(
            copy.deepcopy(dense), mesh, {"": fusedtp.FusedGroup("q_proj", "k_proj", "v_proj", **options)}
        )
        x = torch.randn(2, HIDDEN, dtype=torch.float64)
        given = [x.clone(), x.clone()] if change in OF_X.values() else [x, x]
        with torch.set_grad_enabled(has_grad):
            for each, own in zip((dense, module), given, strict=True):
                each.q_proj(own)
        with torch.no_grad():
            for each, own in zip((dense, module), given, strict=True):
                change(own if change in OF_X.values() else each.k_proj)  # type: ignore[arg-type]
        with torch.set_grad_enabled(has_grad):
            for key in ("k_proj", "v_proj"):
                expected, y = (getattr(each, key)(own) for each, own in zip((dense, module), given, strict=True))
                assert y.requires_grad == has_grad
                close(y, expected, f"{key} after {name}")
    whole = distribute_tensor(x.clone(), mesh, [Replicate()])
    module.q_proj(whole)
    torch._foreach_mul_([whole], 2.0)
    close(module.k_proj(whole), dense.k_proj(2 * x), "k of a changed DTensor")


@pytest.mark.parametrize("is_compiled", [False, True])
@on_ranks(2, timeout=120)
def test_what_is_not_used_has_no_gradient(group: ProcessGroup, is_compiled: bool) -> None:
    """An unused parameter must have no gradient: AdamW would apply weight decay to a gradient of zeros."""
    module = parallel(group, attention(), True)
    module.forward = lambda x: module.q_proj(x)  # type: ignore[method-assign]
    call = torch.compile(nn.Sequential(module), backend="aot_eager", fullgraph=True) if is_compiled else module
    x = torch.randn(4, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    call(x).sum().backward()
    alone = fusedtp.all_gather_linear(x, module.q_proj.weight.to_local().detach(), group=group)
    (dx,) = torch.autograd.grad(alone.sum(), x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dx)
    used = [name for name, each in module.named_parameters() if each.grad is not None]
    # A DTensor's to_local in a graph of torch 2.11 makes gradients of zeros.
    assert used == ["q_proj.weight"] or (is_compiled and torch.__version__ < "2.13"), used
    ws = [torch.randn(size, HIDDEN, dtype=torch.float64, requires_grad=True) for size in (4, 2)]
    bs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (4, 2)]
    for activation in (None, "relu", "gelu"):
        _, y = fusedtp.all_gather_linear(x, ws, bs, group=group, activation=activation)  # type: ignore[misc, arg-type]
        found = torch.autograd.grad(y.sum(), (*ws, *bs), allow_unused=True)
        assert [each is None for each in found] == [True, False, True, False], activation
    g, weight = torch.randn(6, requires_grad=True), torch.randn(6, HIDDEN, requires_grad=True)
    _, y = fusedtp.linear_all_reduce(x.detach().float(), weight, norm_weight=g, group=group)
    assert torch.autograd.grad(y.sum(), (weight, g), allow_unused=True)[1] is None


@on_ranks(2)
def test_nothing_is_kept(group: ProcessGroup) -> None:
    """Results that no linear took are freed with the module's call; a copy and its original share nothing."""
    module = parallel(group, attention(), True)
    module.forward = lambda x: module.q_proj(x)  # type: ignore[method-assign]
    x = torch.randn(4, 3, HIDDEN, dtype=torch.float64)
    y = module(x)
    seen = weakref.ref(x)
    del x, y
    gc.collect()
    assert seen() is None
    twin = copy.deepcopy(module)
    assert twin.q_proj.together is not module.q_proj.together
    assert twin.q_proj.together.linears[1] is twin.k_proj
