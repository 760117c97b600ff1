"""Backward under compiled autograd: the gradients of an eager backward, bit for bit, of every op, layer and style."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp.bench.ranks import RankPool

from .harness import LARGE, few_kernels

ROWS, IN, OUT = 6, 8, 12
# A function of a module's own tensors, or a module, with its input. What is compared are the gradients of all leaves.
OutputShape = tuple[nn.Module, Tensor]
Maker = Callable[[ProcessGroup], OutputShape]


class Function(nn.Module):
    """Function of x and this module's tensors."""

    def __init__(self, call: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> None:
        super().__init__()
        self.call, self.options = call, options
        self.tensors = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Any:
        return self.call(x, *self.tensors, **self.options)


def function(call: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Maker:
    return lambda group: (Function(call, *shapes, group=group, **options), torch.randn(ROWS, IN))


def several(x: Tensor, v: Tensor, w: Tensor, a: Tensor, **options: Any) -> Any:
    return fusedtp.all_gather_linear(x, (v, w), (a, None), **options)


def normed(call: Callable[..., Any], x: Tensor, w: Tensor, norm: Tensor, norm_bias: Tensor, **options: Any) -> Any:
    residual = torch.ones(ROWS // 2 if call is fusedtp.linear_reduce_scatter else ROWS, OUT)
    return call(x, w, residual=residual, norm_weight=norm, norm_bias=norm_bias, norm="layer_norm", **options)


def layer(kind: Any, *sizes: int, features: int = IN, **options: Any) -> Maker:
    return lambda group: (kind(*sizes, group=group, **options), torch.randn(ROWS, features))


def styled(plan: Callable[[], dict[str, Any]], dense: Callable[[], nn.Module], x: Callable[[], Tensor]) -> Maker:
    def make(group: ProcessGroup) -> OutputShape:
        return parallelize_module(dense(), DeviceMesh.from_group(group, "cpu"), plan()), x()

    return make


class Attention(nn.Module):
    """Three linears of one input, and one of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(IN)
        self.q, self.k, self.v = (nn.Linear(IN, OUT) for _ in range(3))
        self.o = nn.Linear(OUT, IN)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.norm(x)
        return self.o(self.q(h) * self.k(h).sigmoid() + self.v(h))  # type: ignore[no-any-return]


CASES: dict[str, Maker] = {
    "all_gather_linear": function(fusedtp.all_gather_linear, (OUT, IN), (OUT,)),
    "all_gather_linear, gelu": function(fusedtp.all_gather_linear, (OUT, IN), (OUT,), activation="gelu"),
    "all_gather_linear, several": function(several, (OUT, IN), (4, IN), (OUT,)),
    "all_gather_linear, swiglu": function(several, (OUT, IN), (OUT, IN), (OUT,), activation="swiglu"),
    "linear_reduce_scatter": function(fusedtp.linear_reduce_scatter, (OUT, IN), (OUT,)),
    "linear_reduce_scatter, normed": function(
        partial(normed, fusedtp.linear_reduce_scatter), (OUT, IN), (OUT,), (OUT,)
    ),
    "linear_all_reduce": function(fusedtp.linear_all_reduce, (OUT, IN), (OUT,)),
    "linear_all_reduce, normed": function(partial(normed, fusedtp.linear_all_reduce), (OUT, IN), (OUT,), (OUT,)),
    "fsdp_linear": function(fusedtp.fsdp_linear, (OUT, IN), (2 * OUT,), activation="relu"),
    "all_gather": function(fusedtp.all_gather),
    "reduce_scatter": function(fusedtp.reduce_scatter),
    "all_reduce": function(fusedtp.all_reduce),
    "ColumnParallelLinear": layer(fusedtp.ColumnParallelLinear, IN, OUT),
    "ColumnParallelLinear, whole": layer(fusedtp.ColumnParallelLinear, IN, OUT, sequence_parallel=False),
    "RowParallelLinear": layer(fusedtp.RowParallelLinear, 2 * IN, OUT),
    "RowParallelLinear, normed": layer(fusedtp.RowParallelLinear, 2 * IN, OUT, norm="rms_norm"),
    "RowParallelLinear, whole": layer(fusedtp.RowParallelLinear, 2 * IN, OUT, sequence_parallel=False),
    "FSDPLinear": layer(fusedtp.FSDPLinear, IN, OUT),
    "ParallelMLP": layer(fusedtp.ParallelMLP, IN, OUT, activation="swiglu"),
    "ParallelMLP, whole": layer(fusedtp.ParallelMLP, IN, OUT, sequence_parallel=False),
    "linears": styled(
        lambda: {"0": fusedtp.FusedColwiseParallel(), "2": fusedtp.FusedRowwiseParallel()},
        lambda: nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, IN)),
        lambda: torch.randn(ROWS, IN),
    ),
    "linears, sequence": styled(
        lambda: {
            "0": fusedtp.FusedColwiseParallel(input_layouts=Shard(0)),
            "2": fusedtp.FusedRowwiseParallel(output_layouts=Shard(0)),
        },
        lambda: nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, IN)),
        lambda: torch.randn(ROWS, IN),
    ),
    "norm": styled(
        lambda: {
            "0": fusedtp.FusedNormParallel(sequence_dim=0),
            "1": fusedtp.FusedColwiseParallel(input_layouts=Shard(0)),
        },
        lambda: nn.Sequential(nn.RMSNorm(IN), nn.Linear(IN, OUT)),
        lambda: torch.randn(ROWS, IN),
    ),
    "embedding": styled(
        lambda: {"0": fusedtp.FusedEmbeddingParallel(), "1": fusedtp.FusedColwiseParallel()},
        lambda: nn.Sequential(nn.Embedding(16, IN), nn.Linear(IN, OUT)),
        lambda: torch.arange(ROWS),
    ),
    "embedding, sequence": styled(
        lambda: {
            "0": fusedtp.FusedEmbeddingParallel(output_layouts=Shard(1)),
            "1": fusedtp.FusedColwiseParallel(input_layouts=Shard(1)),
        },
        lambda: nn.Sequential(nn.Embedding(16, IN), nn.Linear(IN, OUT)),
        lambda: torch.arange(ROWS)[None],
    ),
    "group": styled(
        lambda: {"": fusedtp.FusedGroup("q", "k", "v"), "o": fusedtp.FusedRowwiseParallel()},
        Attention,
        lambda: torch.randn(ROWS, IN),
    ),
}


def total(y: Any) -> Tensor:
    parts = y if isinstance(y, tuple) else (y,)
    return sum((part.to_local() if isinstance(part, DTensor) else part).square().sum() for part in parts)  # type: ignore


def compiled_autograd() -> AbstractContextManager[None]:
    # Not at the top: it imports the compiler, which the test processes do without.
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager"))


def gradients(module: nn.Module, x: Tensor, forward: Any, *, compiled: bool) -> dict[str, Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_(x.is_floating_point())
    loss = total(forward(x))
    with compiled_autograd() if compiled else nullcontext():
        loss.backward()
    found = {"x": x.grad} | {name: each.grad for name, each in module.named_parameters()}
    return {
        name: each.to_local() if isinstance(each, DTensor) else each for name, each in found.items() if each is not None
    }


# These are compiled forward too. A compiled RMSNorm multiplies in another order, which rounds differently.
COMPILED = {"all_gather": 0.0, "ParallelMLP": 0.0, "linears": 0.0, "RowParallelLinear, normed": 16.0}


def compared(group: ProcessGroup, name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(group.rank())
    module, x = CASES[name](group)
    with few_kernels():
        expected = gradients(module, x, module, compiled=False)
        assert len(expected) == len([*module.parameters()]) + x.is_floating_point()
        roundings = {module: 0.0}
        if name in COMPILED:
            most = COMPILED[name] * torch.finfo(x.dtype).eps
            roundings[torch.compile(module, backend="aot_eager")] = most
        for forward, rounding in roundings.items():
            # The second backward takes the first one's graph.
            for _ in range(2):
                found = gradients(module, x, forward, compiled=True)
                assert found.keys() == expected.keys()
                for each, ref in expected.items():
                    most = rounding * float(ref.abs().max())
                    torch.testing.assert_close(found[each], ref, rtol=0, atol=most, msg=each)
    torch._dynamo.reset()


# Both operators, several weights, a norm, parameters of a layer, and hooks of styles; `nox -s soak` takes all.
SOME = (
    "all_gather_linear, swiglu", "linear_reduce_scatter, normed", "reduce_scatter", "FSDPLinear", "linears, sequence",
    "group",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES if LARGE else SOME)
def test_gradients_are_those_of_an_eager_backward(pool: RankPool, name: str) -> None:
    pool.run(compared, name, world_size=2, timeout=120)


def changed(group: ProcessGroup) -> None:
    """Change a weight between forward and backward, through its DTensor and through an optimizer."""
    module, x = CASES["FSDPLinear"](group)
    (weight, *_) = module.parameters()
    for change in (lambda: weight.detach().mul_(2), torch.optim.SGD([weight], lr=1.0).step):
        torch._dynamo.reset()
        weight.grad = torch.ones_like(weight)
        loss = total(module(x.requires_grad_()))
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), compiled_autograd():
            loss.backward()
    torch._dynamo.reset()


def test_a_changed_weight_is_refused(pool: RankPool) -> None:
    pool.run(changed, world_size=2, timeout=120)
