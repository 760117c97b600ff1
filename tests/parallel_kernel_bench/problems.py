"""ParallelKernelBench's problems: inputs and a reference for each that `solutions` solves, and a reason for the others.

github.com/togethercomputer/ParallelKernelBench (Apache-2.0). Numbers and names are the suite's. Groups, inputs and
references are ours. A reference is given the inputs of all ranks and runs in one process, so it has no collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import solutions

COLLECTIVES, TENSOR, DATA = "collectives", "tensor parallel", "FSDP and data parallel"
Inputs = tuple[Any, ...]
Ranks = Sequence[Inputs]


class Draw:
    """A rank's random inputs, which every process can draw."""

    def __init__(self, number: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._own = torch.Generator().manual_seed(100 * number + rank + 1)
        self._same = torch.Generator().manual_seed(100 * number)

    def own(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self._own, dtype=dtype)

    def same(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self._same, dtype=dtype)

    def on_rank_0(self, *shape: int) -> Tensor:
        return self.same(*shape) if self.rank == 0 else torch.zeros(shape, dtype=torch.float64)

    def part(self, *shape: int, dim: int = 0) -> Tensor:
        """Return this rank's part of a tensor of this shape along `dim`."""
        return self.same(*shape).chunk(self.world_size, dim)[self.rank].clone()

    def integers(self, high: int, *shape: int, same: bool = False) -> Tensor:
        return torch.randint(high, shape, generator=self._same if same else self._own)


@dataclass(frozen=True)
class Problem:
    """A problem that is solved; `solution` takes the inputs, then `mesh=`."""

    number: int
    name: str
    group: str
    solution: Callable[..., Any]
    inputs: Callable[[Draw], Inputs]
    reference: Callable[[Ranks, int], Any]
    shown: Callable[..., Any] | None = None  # the solution on the page, if `solution` only calls it


def total(ranks: Ranks, i: int = 0) -> Tensor:
    return torch.stack([inputs[i] for inputs in ranks]).sum(0)


def whole(ranks: Ranks, i: int = 0, dim: int = 0) -> Tensor:
    return torch.cat([inputs[i] for inputs in ranks], dim)


def mine(tensor: Tensor, ranks: Ranks, rank: int, dim: int = 0) -> Tensor:
    return tensor.chunk(len(ranks), dim)[rank]


def by_owner(ranks: Ranks, rank: int) -> Tensor:
    indices, rows = ranks[rank]
    owned = [indices[indices // len(rows) == owner] for owner in range(len(ranks))]
    return whole(ranks, 1)[torch.cat(owned)]


def two_layers(ranks: Ranks, rank: int) -> Tensor:
    _, w1, w2 = ranks[rank]
    return mine(F.silu(whole(ranks, dim=1) @ w1), ranks, rank) @ w2


def turned(ranks: Ranks, i: int) -> Tensor:
    x, cos, sin = (whole(ranks, each, 1) for each in (i, 2, 3))
    half = x.shape[-1] // 2
    # Each pair of features is a point of the plane.
    a, b = x.split(half, -1)
    (cos_a, cos_b), (sin_a, sin_b) = (each[:, :, None].split(half, -1) for each in (cos, sin))
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], -1)


def normed(ranks: Ranks, rank: int) -> Tensor:
    x = whole(ranks, dim=1)
    return mine(F.rms_norm(x, x.shape[-1:], whole(ranks, 1), ranks[0][2]), ranks, rank, 1)


def entropy(ranks: Ranks, rank: int) -> Tensor:
    target = ranks[0][1]
    return F.cross_entropy(whole(ranks, dim=-1).flatten(0, 1), target.flatten(), reduction="none").view_as(target)


def orthogonal(ranks: Ranks, rank: int) -> Tensor:
    # Odd polynomials act on singular values alone.
    x = whole(ranks, dim=1)
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for a, b, c in ranks[0][1]:
        s = a * s + b * s**3 + c * s**5
    return mine(u @ s.diag() @ v, ranks, rank, 1)


def quantized(ranks: Ranks, rank: int) -> tuple[Tensor, Tensor]:
    x, block = whole(ranks), ranks[0][1]
    blocks = x.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1) / 448
    return (blocks / scale[..., None]).to(torch.float8_e4m3fn).view_as(x), scale


def clipped(ranks: Ranks, rank: int) -> tuple[Tensor, ...]:
    grads, most, p = ranks[rank]
    norm = torch.cat([grad.flatten() for each, *_ in ranks for grad in each]).norm(p)
    return norm, *(grad * min(1.0, most / norm.item()) for grad in grads)


def loss_sums(ranks: Ranks, rank: int) -> tuple[Tensor, ...]:
    losses = [loss.nan_to_num().requires_grad_() for loss, *_ in ranks]
    summed = torch.stack([loss * valid for loss, (_, valid, *_) in zip(losses, ranks, strict=True)]).sum()
    mean = summed / ranks[0][2]
    (grad,) = torch.autograd.grad((mean, summed), losses[rank], ranks[rank][3:])
    return mean.detach(), summed.detach(), grad


def importance(ranks: Ranks, rank: int) -> tuple[Tensor, ...]:
    weight, ignored = ranks[0][1], ranks[0][5]
    x, labels, old, advantages = (whole(ranks, i) for i in (0, 2, 3, 4))
    logs = (x @ weight.t()).log_softmax(-1).gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    kept = labels != ignored
    logs = logs * kept
    change = (logs - old).clamp(-20, 20)
    each = -change.exp() * advantages * kept
    ratio, change = change.exp()[kept], change[kept]
    metrics = ratio.mean(), ratio.min(), ratio.max(), (ratio - change - 1).mean(), -logs[kept].mean()
    return each.sum() / kept.sum(), mine(logs, ranks, rank), mine(each, ranks, rank), torch.stack(metrics)


# A network of 4, 2 and 2 features has 16 parameters: equal parts on 2 and 4 ranks.
SHAPES = ((2, 4), (2,), (2, 2), (2,))
HOW = (0.01, 0.9, 0.99, 1e-8)


def gradient(ranks: Ranks, w: Tensor) -> Tensor:
    """Return the gradient of the mean squared error on all ranks' rows together."""
    w = w.clone().requires_grad_()
    out = (whole(ranks, 0) @ w[:8].view(2, 4).t() + w[8:10]).relu() @ w[10:14].view(2, 2).t() + w[14:]
    (out - whole(ranks, 1)).square().mean().backward()
    assert w.grad is not None
    return w.grad


def stepped(w: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, decay: float = 0.0) -> tuple[Tensor, ...]:
    """Return w, m and v after a step of torch's AdamW."""
    w = w.clone().requires_grad_()
    w.grad = grad
    lr, beta1, beta2, eps = HOW
    optimizer = torch.optim.AdamW([w], lr, (beta1, beta2), eps, decay)
    state = {"step": torch.tensor(step - 1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.state[w] = state
    optimizer.step()
    return w.detach(), state["exp_avg"], state["exp_avg_sq"]


def cut(w: Tensor) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in SHAPES]
    return [part.view(shape) for part, shape in zip(w.split(sizes), SHAPES, strict=True)]


def ddp(ranks: Ranks, rank: int) -> list[Tensor]:
    w, m, v = (torch.cat([each.flatten() for each in ranks[0][i : i + 4]]) for i in (2, 6, 10))
    return [part for each in stepped(w, gradient(ranks, w), m, v, step=3) for part in cut(each)]


def zero(ranks: Ranks, rank: int) -> list[Tensor]:
    w = torch.cat([each.flatten() for each in ranks[0][2:6]])
    w, m, v = stepped(w, gradient(ranks, w), whole(ranks, 6), whole(ranks, 7), step=3)
    return [*cut(w), mine(m, ranks, rank), mine(v, ranks, rank)]


def zero_inputs(draw: Draw) -> Inputs:
    weights = (draw.on_rank_0(*shape) for shape in SHAPES)
    return draw.own(3, 4), draw.own(3, 2), *weights, draw.part(16), draw.part(16).square(), *HOW, 3


def fsdp(ranks: Ranks, rank: int) -> list[Tensor]:
    w, m, v = (whole(ranks, i) for i in (2, 4, 5))
    return [mine(each, ranks, rank) for each in stepped(w, gradient(ranks, w), m, v, step=3, decay=0.1)]


def int8_mean(ranks: Ranks, rank: int) -> Tensor:
    def kept(x: Tensor, block: int) -> Tensor:
        units = [(part, part.abs().max() / 127) for part in x.flatten().split(block)]
        return torch.cat([(part / unit).round().to(torch.int8) * unit for part, unit in units]).view_as(x)

    return torch.stack([kept(*inputs) for inputs in ranks]).mean(0)


def scattered_norm(ranks: Ranks, rank: int) -> Tensor:
    _, gamma, eps = ranks[0]
    x = mine(total(ranks) / len(ranks), ranks, rank).view(-1, len(gamma))
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma


def place(rank: int, world_size: int) -> tuple[int, int, int, int]:
    """Return this rank's place on the mesh of FSDP and tensor parallelism, (2, 1) or (2, 2), and the mesh."""
    return *divmod(rank, world_size // 2), 2, world_size // 2


def gated_inputs(draw: Draw) -> Inputs:
    d, t, ds, ts = place(draw.rank, draw.world_size)
    x, w1, w2, w3 = (draw.same(*shape) for shape in ((6, 4), (4, 6), (4, 6), (6, 4)))
    up = (w.chunk(ds)[d].chunk(ts, 1)[t].clone() for w in (w1, w2))
    return x.chunk(ds)[d].clone(), *up, w3.chunk(ts)[t].chunk(ds, 1)[d].clone()


def gated(ranks: Ranks, rank: int) -> Tensor:
    d, _, ds, ts = place(rank, len(ranks))
    # Rows of this list are those of the mesh.
    rows = [ranks[i * ts : (i + 1) * ts] for i in range(ds)]
    w1, w2 = (torch.cat([whole(row, i, 1) for row in rows]) for i in (1, 2))
    w3 = torch.cat([whole(row, 3) for row in rows], 1)
    x = rows[d][0][0]
    return (F.silu(x @ w1) * (x @ w2)) @ w3


def float8_kept(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, history = inputs
    later = torch.tensor([*history[1:].tolist(), x.abs().max().item()])
    scale = later.max() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale, later


def float8_mean(ranks: Ranks, rank: int) -> tuple[Tensor, Tensor]:
    mean = torch.stack([float8_kept(inputs)[0] for inputs in ranks]).mean(0)
    return mine(mean, ranks, rank), float8_kept(ranks[rank])[1]


def float8_gathered(ranks: Ranks, rank: int) -> tuple[Tensor, Tensor]:
    return torch.cat([float8_kept(inputs)[0] for inputs in ranks]), float8_kept(ranks[rank])[1]


def clip(grads: list[Tensor], *given: Any, mesh: Any) -> tuple[Tensor, ...]:
    return solutions.clip_grad_norm(grads, *given, mesh=mesh), *grads


SOLVED = [
    Problem(
        1, "allreduce", COLLECTIVES, solutions.allreduce,
        lambda draw: (draw.own(5, 3),),
        lambda ranks, rank: total(ranks),
    ),
    Problem(
        2, "allgather", COLLECTIVES, solutions.allgather,
        lambda draw: (draw.own(5, 3),),
        lambda ranks, rank: torch.stack([x for (x,) in ranks]),
    ),
    Problem(
        3, "broadcast", COLLECTIVES, solutions.broadcast,
        lambda draw: (draw.own(5, 3),),
        lambda ranks, rank: ranks[0][0],
    ),
    Problem(
        4, "reduce", COLLECTIVES, solutions.reduce,
        lambda draw: (draw.own(5, 3), 1),
        lambda ranks, rank: total(ranks) if rank == 1 else ranks[rank][0],
    ),
    Problem(
        7, "reducescatter", COLLECTIVES, solutions.reducescatter,
        lambda draw: (draw.own(8, 3),),
        lambda ranks, rank: mine(total(ranks), ranks, rank),
    ),
    Problem(
        9, "layernorm_backward", TENSOR, solutions.layernorm_backward,
        lambda draw: (draw.own(6, 4), draw.own(6, 4)),
        lambda ranks, rank: (torch.einsum("ti,ti->i", whole(ranks), whole(ranks, 1)), whole(ranks, 1).sum(0)),
    ),
    Problem(
        10, "embedding_lookup", TENSOR, solutions.embedding_lookup,
        lambda draw: (draw.integers(4 * draw.world_size, 7), draw.own(4, 3)),
        by_owner,
    ),
    Problem(
        11, "allgather_gemm_AT", TENSOR, solutions.allgather_gemm,
        lambda draw: (draw.own(6, 4), draw.own(4 * draw.world_size, 5)),
        lambda ranks, rank: (ranks[rank][1].t() @ whole(ranks, dim=1).t()).t(),
    ),
    Problem(
        12, "allgather_gemm", TENSOR, solutions.allgather_gemm,
        lambda draw: (draw.own(6, 4), draw.own(4 * draw.world_size, 5)),
        lambda ranks, rank: whole(ranks, dim=1) @ ranks[rank][1],
    ),
    Problem(
        13, "gemm_allreduce", TENSOR, solutions.gemm_allreduce,
        lambda draw: (draw.own(6, 4), draw.own(4, 5)),
        lambda ranks, rank: whole(ranks, dim=1) @ whole(ranks, 1),
    ),
    Problem(
        14, "gemm_allgather", TENSOR, solutions.gemm_allgather,
        lambda draw: (draw.same(6, 8), draw.own(8, 3)),
        lambda ranks, rank: ranks[0][0] @ whole(ranks, 1, 1),
    ),
    Problem(
        15, "combined_sharded_gemms", TENSOR, solutions.combined_sharded_gemms,
        lambda draw: (draw.own(8, 3), draw.own(3 * draw.world_size, 5), draw.own(5, 7)),
        two_layers,
    ),
    Problem(
        16, "gemm_reducescatter", TENSOR, solutions.gemm_reducescatter,
        lambda draw: (draw.own(8, 4), draw.own(4, 5)),
        lambda ranks, rank: mine(whole(ranks, dim=1) @ whole(ranks, 1), ranks, rank),
    ),
    Problem(
        17, "rope_allgather", TENSOR, solutions.rope_allgather,
        lambda draw: (draw.own(2, 3, 2, 4), draw.own(2, 3, 2, 4), draw.own(2, 3, 4), draw.own(2, 3, 4)),
        lambda ranks, rank: (turned(ranks, 0), turned(ranks, 1)),
    ),
    Problem(
        18, "tp_rms_norm", TENSOR, solutions.tp_rms_norm,
        lambda draw: (draw.own(5, 4), draw.own(4), 1e-5),
        normed,
    ),
    Problem(
        46, "gemv_decode", TENSOR, solutions.gemv_decode,
        lambda draw: (draw.same(2, 6), draw.own(4, 6), draw.own(4)),
        lambda ranks, rank: ranks[0][0] @ whole(ranks, 1).t() + whole(ranks, 2),
    ),
    Problem(
        73, "vocab_parallel_cross_entropy_loss", TENSOR, solutions.vocab_parallel_cross_entropy,
        lambda draw: (draw.own(2, 3, 4), draw.integers(4 * draw.world_size, 2, 3, same=True)),
        entropy,
    ),
    Problem(
        76, "opensora_conv3d_allreduce", TENSOR, solutions.conv3d_allreduce,
        lambda draw: (draw.own(1, 2, 4, 4, 4), draw.own(3, 2, 2, 2, 2), draw.same(3), 2, 1, 1, 1),
        lambda ranks, rank: F.conv3d(whole(ranks, dim=1), whole(ranks, 1, 1), ranks[0][2], stride=2, padding=1),
    ),
    Problem(
        86, "tp_muon_orthogonalization", TENSOR, solutions.muon_orthogonalization,
        lambda draw: (draw.own(4, 3), ((1.875, -1.25, 0.375),) * 3),
        orthogonal,
    ),
    Problem(
        19, "blocked_fp8_quantize", DATA, solutions.blocked_fp8_quantize,
        lambda draw: (draw.own(3, 8, dtype=torch.float32), 4),
        quantized,
    ),
    Problem(
        21, "clip_grad_norm_no_ep", DATA, clip,
        lambda draw: ([draw.own(3, 4), draw.own(5)], 1.0, 3.0),
        clipped, solutions.clip_grad_norm,
    ),
    Problem(
        23, "grad_acc_loss", DATA, solutions.grad_acc_loss,
        # Rank 0 has no valid token.
        lambda draw: (
            draw.own() if draw.rank else torch.tensor(math.nan, dtype=torch.float64), torch.tensor(draw.rank),
            torch.tensor(sum(range(draw.world_size))), draw.own(), draw.own(),
        ),
        loss_sums,
    ),
    Problem(
        25, "importance_sampling_loss", DATA, solutions.importance_sampling_loss,
        lambda draw: (
            draw.own(5, 4), draw.same(6, 4), torch.cat([draw.integers(6, 4), torch.tensor([-100])]), draw.own(5),
            draw.own(5), -100,
        ),
        importance,
    ),
    Problem(
        40, "ddp", DATA, solutions.ddp,
        lambda draw: (
            draw.own(3, 4), draw.own(3, 2), *(draw.on_rank_0(*shape) for shape in SHAPES * 2),
            *(draw.on_rank_0(*shape).square() for shape in SHAPES), *HOW, 3,
        ),
        ddp,
    ),
    Problem(41, "zero1_optimizer_shard", DATA, solutions.zero, zero_inputs, zero),
    Problem(42, "zero2_optimizer_shard_grad", DATA, solutions.zero, zero_inputs, zero),
    Problem(
        43, "fused_adam_grad_unshard_allgather", DATA, solutions.adam_allgather,
        lambda draw: (draw.own(5), draw.own(5), draw.own(5), draw.own(5).square(), *HOW, 3),
        lambda ranks, rank: stepped(whole(ranks, 1), whole(ranks), whole(ranks, 2), whole(ranks, 3), step=3)[0],
    ),
    Problem(
        44, "quantized_grad_allreduce", DATA, solutions.quantized_grad_allreduce,
        lambda draw: (draw.own(3, 5), 4),
        int8_mean,
    ),
    Problem(
        45, "reducescatter_fused_rmsnorm", DATA, solutions.reducescatter_rmsnorm,
        lambda draw: (draw.own(12 * draw.world_size), draw.same(4), 1e-5),
        scattered_norm,
    ),
    Problem(
        47, "fsdp_step_e2e", DATA, solutions.fsdp_step,
        lambda draw: (
            draw.own(3, 4), draw.own(3, 2), draw.part(16), SHAPES, draw.part(16), draw.part(16).square(), *HOW, 0.1, 3
        ),
        fsdp,
    ),
    Problem(48, "fsdp_and_tp", DATA, solutions.fsdp_and_tp, gated_inputs, gated),
    Problem(
        52, "fp8_reduce_scatter_grads", DATA, solutions.fp8_reduce_scatter,
        lambda draw: (draw.own(8, dtype=torch.float32), draw.own(4, dtype=torch.float32).abs()),
        float8_mean,
    ),
    Problem(
        53, "fp8_allgather_params", DATA, solutions.fp8_allgather,
        lambda draw: (draw.own(6, dtype=torch.float32), draw.own(4, dtype=torch.float32).abs()),
        float8_gathered,
    ),
]  # fmt: skip

# Of the same groups: no public function exchanges rows between all pairs of ranks, or serves one rank alone.
REFUSED = {
    5: ("scatter", COLLECTIVES, "one sender"),
    6: ("gather", COLLECTIVES, "one receiver"),
    8: ("alltoall", COLLECTIVES, "all-to-all"),
    82: ("vocab_parallel_log_prob_topk", TENSOR, "all-to-all"),
    83: ("vocab_parallel_log_prob_topk_chunked", TENSOR, "all-to-all"),
    84: ("vocab_parallel_log_prob_topk_chunked_backward", TENSOR, "all-to-all"),
    20: ("blocked_fp8_dequantize", DATA, "all-to-all"),
}

# Groups outside: what this package is not for.
OUTSIDE = {
    "expert parallel": ("all-to-all", (22, 24, *range(26, 33), 49, 50, 51)),
    "context parallel": ("ring, all-to-all", (*range(33, 40), *range(54, 58), 71, 72, 74, 75, 77)),
    "graphs and recommendation": ("all-to-all", tuple(range(64, 71))),
    "science and vision": ("stencils, transforms", (*range(58, 64), *range(78, 82), 85, 87)),
}
# Outside too, though all that they send is a sum or a gather of floating-point numbers.
SENT_BY_OURS = (22, 24, 30, 34, 35, 80, 81, 87)
