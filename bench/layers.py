"""Layers, a transformer block and collectives alone, as cases of the sweep: set-up, variants and checks.

Every variant of a layer starts from the same weights, and is compared with the dense layer in float64. The input and
the gradient of the result are drawn twice, and take turns in place, so a result that was kept is wrong.

    mlp       y = gelu(x @ up.T) @ down.T                              x, y [M, K] split by rows
    grouped   y_i = x @ w_i.T                                          x [M, K] by rows, y by features
    decode    y = all_reduce(x @ w.T) + residual, and its norm         x [M, K] by features, y [M, N] whole
    block     x + out(attend(qkv(norm(x)))), then x + mlp(norm(x))     x, y [tokens, hidden] by rows

Variants besides the schedules:

    local          a rank's share of the arithmetic, with nothing sent: a bound
    comm           torch.distributed's collectives of the pass, with nothing computed
    dtensor        torch's ColwiseParallel and RowwiseParallel
    dtensor_once   of `grouped`: PrepareModuleInput gathers x for all weights
    concatenated   of `grouped`: one linear with the rows of all weights
    torch          of `decode`: F.linear, dist.all_reduce, +=, F.rms_norm
    one_shot, two_shot, multimem     of `all_reduce`: torch's own over its symmetric memory
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import FusedColwiseParallel, FusedGroup, FusedRowwiseParallel, collectives, torch_private
from fusedtp.layers import ParallelMLP
from fusedtp.op import OPS as TABLE
from fusedtp.reference import chunk
from fusedtp.shards import even_sizes

from .cases import COLLECTIVES, MODELS, SCHEDULES, BlockSizes, Case, traffic
from .operands import Results, Runner, Workload
from .providers import Missing

EPS = 1e-6
# Allowed error over the norm of the expected result: that of float32 sums of a few thousand terms through two matmuls,
# and in units of a reduced dtype's rounding; and how much more one element may have.
TOLERANCE, ROUNDINGS, SPIKE = 1e-4, 4.0, 16.0
GLANCED = 8


class Drawn(Workload):
    """A workload whose inputs are drawn twice, and take turns in place."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(case, group.rank(), device)
        self.group, self.dtype = group, getattr(torch, case.dtype)
        self._buffers: list[Tensor] = []
        self._draws: list[list[Tensor]] = []
        self._own_parts: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._at = 0
        self._expected: dict[tuple[int, str], dict[str, Tensor]] = {}

    def _normal(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.case.seed * 100 + seed)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def _draw(self, *shapes: tuple[int, int]) -> list[Tensor]:
        """Return buffers for these inputs, with the first draw in them."""
        self._draws = [[self._normal(*shape, seed=10 * i + j) for j, shape in enumerate(shapes)] for i in range(2)]
        self._buffers = [each.clone() for each in self._draws[0]]
        return self._buffers

    def _follow(self, make: Callable[[], Tensor]) -> Tensor:
        """Return this rank's part of the inputs, a copy that is made again at each turn."""
        part = make().clone(memory_format=torch.contiguous_format)
        self._own_parts.append((part, make))
        return part

    def turn(self, direction: str) -> None:
        """Put the other draw into the inputs."""
        self._at = 1 - self._at
        for buffer, drawn in zip(self._buffers, self._draws[self._at], strict=True):
            buffer.copy_(drawn)
        for part, make in self._own_parts:
            part.copy_(make())

    def expected(self, direction: str) -> dict[str, Tensor]:
        """Return this rank's part of each result of the present draw, in float64, made once."""
        key = self._at, direction
        if key not in self._expected:
            self._expected[key] = self._exact(direction)
        return self._expected[key]

    def _exact(self, direction: str) -> dict[str, Tensor]:
        raise NotImplementedError

    def check(self, variant: str, results: Results, direction: str = "forward") -> tuple[float, float]:
        """Return (largest error, its share of what is allowed); AssertionError if a result is wrong. NaN fails."""
        if variant == "local":
            return 0.0, 0.0
        wanted = self.received(direction) if variant == "comm" else self.expected(direction)
        outs = [out for each in results for out in (each if isinstance(each, list) else [each])]
        # Surplus results are parts of the last one.
        outs[len(wanted) - 1 :] = [torch.cat([each.flatten() for each in outs[len(wanted) - 1 :]])]
        largest = ratio = 0.0
        for (name, want), out in zip(wanted.items(), outs, strict=True):
            error, share = self._off(out.reshape(want.shape), want)
            where = f"{self.case}, {direction}, {variant}, rank {self.rank}: {name}"
            assert share <= 1, f"{where} is off by {error:.1e} of its norm, {share:.1f} times what is allowed"
            largest, ratio = max(largest, error), max(ratio, share)
        return largest, ratio

    def _off(self, out: Tensor, want: Tensor) -> tuple[float, float]:
        # Return the error over the norm, and over what is allowed of the norm and of each element.
        if not want.numel():
            return 0.0, 0.0
        allowed = max(TOLERANCE, ROUNDINGS * torch.finfo(self.dtype).eps)
        error, scale = (out.double() - want).abs_(), want.norm() / want.numel() ** 0.5
        norm = (error.norm() / want.norm()).item()
        share = max(norm, (error.max() / scale).item() / SPIKE) / allowed
        return norm, share if share == share else float("inf")

    def glance(self, variant: str, results: Results, direction: str, place: float) -> None:
        """Check a few rows of y, at `place` from 0 to 1; AssertionError if one is wrong."""
        if variant in ("local", "comm") or isinstance(results[0], list):
            return
        want = next(iter(self.expected(direction).values()))
        begin = int(place * max(0, want.shape[0] - GLANCED))
        rows = slice(begin, begin + GLANCED)
        _, share = self._off(results[0][rows], want[rows])
        assert share <= SPIKE, f"{self.case}, {direction}, {variant}, rank {self.rank}: rows from {begin} on are wrong"

    def _comm(self, direction: str) -> Runner:
        # The backend's collectives of the pass, on tensors of its sizes.
        n, sent = self.group.size(), traffic(self.case, direction)
        given: dict[str, Any] = {"group": self.group, "schedule": "unfused"}
        whole = self._whole(sent)
        steps: list[Callable[[], Tensor]] = []
        for (kind, _), x in zip(sent, whole, strict=True):
            if kind == "all_reduce":
                steps.append(partial(collectives.all_reduce, x, **given))
                continue
            sizes = even_sizes(x.shape[0], n)
            own = chunk(x, 0, self.rank, sizes).clone() if kind == "all_gather" else x
            steps.append(partial(getattr(collectives, kind), own, sizes=sizes, **given))
        return lambda: tuple([step() for step in steps])

    def _whole(self, sent: Sequence[tuple[str, int]]) -> list[Tensor]:
        cols = [num_bytes // self.dtype.itemsize // self.case.M for _, num_bytes in sent]
        return [self._normal(self.case.M, each, seed=90 + i) for i, each in enumerate(cols)]

    def received(self, direction: str) -> dict[str, Tensor]:
        """Return what `comm` gives: every rank sends the same whole tensor."""
        n, sent, found = self.group.size(), traffic(self.case, direction), {}
        for i, ((kind, _), x) in enumerate(zip(sent, self._whole(sent), strict=True)):
            exact = x.double() * (1 if kind == "all_gather" else n)
            scatters = kind == "reduce_scatter"
            found[f"{kind} {i}"] = chunk(exact, 0, self.rank, even_sizes(x.shape[0], n)) if scatters else exact
        return found


class Dense(nn.Sequential):
    """The MLP in one process, drawn like ParallelMLP."""

    def __init__(self, num_in: int, hidden: int) -> None:
        up, down = nn.Linear(num_in, hidden, bias=False), nn.Linear(hidden, num_in, bias=False)
        super().__init__(OrderedDict(up_proj=up, activation=nn.GELU(), down_proj=down))


class Projections(nn.Module):
    """Linears of one input, their results side by side."""

    def __init__(self, num_in: int, widths: Sequence[int]) -> None:
        super().__init__()
        for i, width in enumerate(widths):
            self.add_module(f"w{i}", nn.Linear(num_in, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.children()], -1)


def rotated(x: Tensor) -> Tensor:
    """Apply rotary positions; x [.., S, size] holds the whole sequence."""
    half, sequence = x.shape[-1] // 2, x.shape[-2]
    exponents = -torch.arange(half, device=x.device) / half
    angle = torch.arange(sequence, device=x.device)[:, None] * 10_000**exponents
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class DecoderBlock(nn.Module):
    """Llama's block on x [S, .., hidden], a rank's part of the sequence; the linears gather and scatter.

    - heads, kv_heads: of this rank. Queries of a key-value head lie together with its key and value, and a feature's
      gate with its up, so the rows of both weights can be cut anywhere.
    - column, row: make the linears that gather, and those that scatter.
    """

    def __init__(
        self, sizes: BlockSizes, parts: int = 1, column: Callable[..., nn.Module] = nn.Linear,
        row: Callable[..., nn.Module] = nn.Linear,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, self.size, self.queries = sizes.hidden, sizes.head_dim, sizes.heads // sizes.kv_heads
        self.gated, kv_heads, intermediate = sizes.gated, sizes.kv_heads // parts, sizes.intermediate // parts
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = column(hidden, kv_heads * (self.queries + 2) * self.size, bias=False)
        self.out = row(kv_heads * self.queries * self.size, hidden, bias=False)
        self.up = column(hidden, (1 + sizes.gated) * intermediate, bias=False)
        self.down = row(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.qkv(self.attention_norm(x))))
        up = self.up(self.mlp_norm(x))
        if not self.gated:
            return x + self.down(F.gelu(up))  # type: ignore[no-any-return]
        gate, up = up.unflatten(-1, (-1, 2)).unbind(-1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor) -> Tensor:
        # [S, .., kv heads here * (queries + 2) * size] -> [.., kv heads, queries or 1, S, size] each
        heads = qkv.unflatten(-1, (-1, self.queries + 2, self.size)).movedim(0, -2)
        query, key, value = heads.split([self.queries, 1, 1], -3)
        attend = partial(F.scaled_dot_product_attention, is_causal=True)
        query, key = rotated(query), rotated(key)
        if qkv.dtype == torch.float64 and qkv.dim() == 2:
            # The reference: a head at a time, as the scores of all may not fit.
            once: Any = partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=False)
            attended = torch.stack([once(*each) for each in zip(query, key, value, strict=True)])
        else:
            shape = query.shape
            attended = attend(query, key.expand(shape), value.expand(shape))
        return attended.movedim(-2, 0).flatten(-3)


def step(model: nn.Module, x: Tensor, dy: Tensor) -> Runner:
    """Return the closure of forward and backward: y, dx and the gradients of the parameters, which it resets."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run() -> Results:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = model(leaf)
            y.backward(dy)
        grads = [leaf.grad, *(parameter.grad for parameter in parameters)]
        for parameter in parameters:
            parameter.grad = None
        return (y.detach(), *(grad for grad in grads if grad is not None))

    return run


class Layer(Drawn):
    """An MLP, several linears of one input, or a block: forward, and forward with backward."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(case, group, device)
        self._rows = even_sizes(case.M, group.size())
        self.x, self.dy = self._draw((case.M, case.K), (case.M, sum(case.widths) or case.K))
        self.x_own = self._follow(lambda: chunk(self.x, 0, self.rank, self._rows))
        self.dy_own = self._follow(lambda: self._own(self.dy))
        torch.manual_seed(case.seed)
        self.dense = self._made(1)
        # Dims along which the weights are split, in their order.
        self.dims = {"mlp": (0, 1), "grouped": (0,) * len(case.widths), "block": (0, 1, 0, 1)}[case.op]

    def _made(self, parts: int) -> nn.Module:
        # Return the layer in plain torch, or one of so many parts of its arithmetic.
        case = self.case
        with torch.device(self.device):
            if case.op == "block":
                layer: nn.Module = DecoderBlock(case.sizes or MODELS[case.model], parts)
                # Weights of norms stay, as their gradients would need an all-reduce of their own.
                for norm in (layer.attention_norm, layer.mlp_norm):
                    norm.requires_grad_(False)
            elif case.op == "mlp":
                layer = Dense(case.K, case.N // parts)
            else:
                layer = Projections(case.K, [width // parts for width in case.widths])
            return layer.to(self.dtype)

    def _own(self, y: Tensor) -> Tensor:
        # Return this rank's part of y or dy: rows, or features of several results side by side.
        if not self.case.widths:
            return chunk(y, 0, self.rank, self._rows)
        parts = y.split(list(self.case.widths), -1)
        return torch.cat([part.chunk(self.group.size(), -1)[self.rank] for part in parts], -1)

    def _exact(self, direction: str) -> dict[str, Tensor]:
        dense = copy.deepcopy(self.dense).double()
        if direction == "forward":
            with torch.no_grad():
                return {"y": self._own(dense(self.x.double()))}
        run: Any = step(dense, self.x.double(), self.dy.double())
        (y, dx, *dws), n = run(), self.group.size()
        own = [chunk(each, dim, self.rank, even_sizes(each.shape[dim], n)).flatten()
               for each, dim in zip(dws, self.dims, strict=True)]  # fmt: skip
        return {"y": self._own(y), "dx": chunk(dx, 0, self.rank, self._rows), "dw": torch.cat(own)}

    def _runner(self, variant: str, direction: str) -> Runner:
        if variant == "comm":
            return self._comm(direction)
        if variant == "local":
            model, x, dy = self._made(self.group.size()), self.x, self.dy_own if self.case.widths else self.dy
        else:
            model, x, dy = self._parallel(variant), self.x_own, self.dy_own
        if direction == "forward":
            return lambda: (model(x),)
        return step(model, x, dy)

    def _parallel(self, variant: str) -> nn.Module:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            parallelize_module,
        )

        case, ours, n = self.case, variant in (*SCHEDULES, "auto"), self.group.size()
        if case.op == "mlp" and ours:
            made: Any = ParallelMLP(
                case.K, case.N, bias=False, group=self.group, schedule=variant, device=self.device, dtype=self.dtype
            )
            for own, whole, dim in zip(made.parameters(), self.dense.parameters(), self.dims, strict=True):
                own.data.to_local().copy_(chunk(whole.detach(), dim, self.rank, even_sizes(whole.shape[dim], n)))
            return made  # type: ignore[no-any-return]
        mesh = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("tp",))
        rows: Any = Shard(0)
        schedule: dict[str, Any] = {"schedule": variant} if ours else {}
        column: Any = FusedColwiseParallel if ours or variant == "concatenated" else ColwiseParallel
        row: Any = FusedRowwiseParallel if ours else RowwiseParallel
        gathers, scatters = column(input_layouts=rows, **schedule), row(output_layouts=rows, **schedule)
        model: Any = copy.deepcopy(self.dense)
        if variant == "concatenated":
            # Rank by rank, so that a rank's rows are its parts of all weights.
            weights: Any = [each.weight.detach() for each in model.children()]
            one = nn.Linear(case.K, sum(case.widths), bias=False, device=self.device, dtype=self.dtype)
            one.weight = nn.Parameter(torch.cat([weight.chunk(n)[rank] for rank in range(n) for weight in weights]))
            return parallelize_module(one, mesh, gathers)
        if case.op == "grouped" and ours:
            names = [name for name, _ in model.named_children()]
            return parallelize_module(model, mesh, FusedGroup(*names, input_layouts=rows, **schedule))
        if variant == "dtensor_once":
            once = PrepareModuleInput(input_layouts=rows, desired_input_layouts=Replicate())
            model, gathers = parallelize_module(model, mesh, once), ColwiseParallel()
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for linear, dim in zip(linears.values(), self.dims, strict=True):
            # Wrap this rank's shard: a style would scatter the whole from rank 0.
            own = chunk(linear.weight.detach(), dim, self.rank, even_sizes(linear.weight.shape[dim], n)).clone()
            linear.weight = nn.Parameter(DTensor.from_local(own, mesh, [Shard(dim)], run_check=False))
        plan = {name: scatters if dim else gathers for name, dim in zip(linears, self.dims, strict=True)}
        return parallelize_module(model, mesh, plan)


class Decode(Drawn):
    """y = all_reduce(x @ w.T) + residual and its norm, forward alone: what a decoder runs after attention and MLP."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(case, group, device)
        (self.whole,) = self._draw((case.M, case.K))
        self.residual, self.scale = self._normal(case.M, case.N, seed=30), self._normal(1, case.N, seed=31)[0].abs()
        self.weight = self._normal(case.N, case.K, seed=32) / case.K**0.5
        self.features = even_sizes(case.K, group.size())
        self.x = self._follow(lambda: chunk(self.whole, 1, self.rank, self.features))
        self.w = chunk(self.weight, 1, self.rank, self.features).clone()

    def _exact(self, direction: str) -> dict[str, Tensor]:
        y = F.linear(self.whole.double(), self.weight.double()) + self.residual.double()
        return {"normed": F.rms_norm(y, (self.case.N,), self.scale.double(), EPS), "y": y}

    def _runner(self, variant: str, direction: str) -> Runner:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        x, w, residual, scale, shape = self.x, self.w, self.residual, self.scale, (self.case.N,)
        if variant == "comm":
            return self._comm(direction)
        if variant in ("torch", "local"):

            def by_hand() -> Results:
                y = F.linear(x, w)
                if variant == "torch":
                    dist.all_reduce(y, group=self.group)
                y += residual
                return F.rms_norm(y, shape, scale, EPS), y

            return by_hand
        if variant == "dtensor":
            linear = nn.Linear(self.case.K, self.case.N, bias=False, device="meta")
            mesh = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("tp",))
            linear.weight = nn.Parameter(DTensor.from_local(w.clone(), mesh, [Shard(1)], run_check=False))
            split = parallelize_module(linear, mesh, RowwiseParallel())

            def by_dtensor() -> Results:
                y = split(x) + residual
                return F.rms_norm(y, shape, scale, EPS), y

            return by_dtensor
        given: dict[str, Any] = {"group": self.group, "schedule": variant}
        given |= {"residual": residual, "norm_weight": scale, "norm_eps": EPS}
        return lambda: fusedtp.linear_all_reduce(x, w, **given)


class Collective(Drawn):
    """A collective of a tensor [M, N], of which every rank reduces other rows."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(case, group, device)
        (self.whole,) = self._draw((case.M, case.N))
        self._rows = even_sizes(case.M, group.size())
        self.x = self._follow(self._sent)

    def _sent(self) -> Tensor:
        own = partial(chunk, self.whole, 0, self.rank, self._rows)
        return own() if TABLE[self.case.op].kind == "gather" else self.whole.roll(self.rank, 0)

    def _exact(self, direction: str) -> dict[str, Tensor]:
        kind = TABLE[self.case.op].kind
        if kind == "gather":
            return {"whole": self.whole.double()}
        total = sum(self.whole.double().roll(rank, 0) for rank in range(self.group.size()))
        assert isinstance(total, Tensor)
        return {"sum": total if kind == "all_reduce" else chunk(total, 0, self.rank, self._rows).clone()}

    def _runner(self, variant: str, direction: str) -> Runner:
        op, x = self.case.op, self.x
        if variant in SYMMETRIC:
            return self._symmetric(variant)
        given: dict[str, Any] = {"group": self.group, "schedule": variant}
        if op != "all_reduce":
            given["sizes"] = self._rows
        call = partial(getattr(collectives, op), x, **given)
        return lambda: (call(),)

    def _symmetric(self, variant: str) -> Runner:
        # torch/csrc/distributed/c10d/symm_mem, 2.11 to 2.13. The input lies outside of symmetric memory, as the result
        # of an earlier op would.
        x, name, ops = self.x, self.group.group_name, torch.ops.symm_mem
        buffer = torch_private.symmetric_empty(x.nbytes, self.device).view(x.dtype).view(x.shape)
        handle = torch_private.symmetric_rendezvous(buffer, name)
        if variant == "multimem" and not handle.multicast_ptr:
            raise Missing("this memory has no address of all ranks (NVLS)")

        def run() -> Results:
            if variant == "one_shot":
                return (ops.one_shot_all_reduce_copy(buffer, x, "sum", name),)
            buffer.copy_(x)
            if variant == "two_shot":
                return (ops.two_shot_all_reduce_out(buffer, "sum", name, torch.empty_like(x)),)
            return (ops.multimem_all_reduce_(buffer, "sum", name),)

        return run


# torch's own all-reduces.
SYMMETRIC = ("one_shot", "two_shot", "multimem")
SETUPS: Mapping[str, type[Drawn]] = {
    "mlp": Layer, "grouped": Layer, "block": Layer, "decode": Decode, **dict.fromkeys(COLLECTIVES, Collective)
}  # fmt: skip
