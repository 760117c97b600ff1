"""Solutions of ParallelKernelBench's problems over public functions; docs/guide/parallel-kernel-bench.md shows them.

Arguments are a rank's inputs in the suite's order, then the mesh, whose axis X has all ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import fusedtp


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors])


def unflat(whole: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = whole.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def loss_of(weights: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    return F.mse_loss(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), y)


def adam(
    w: Tensor, grad: Tensor, m: Tensor, v: Tensor, lr: float, beta1: float, beta2: float, eps: float, step: int,
    decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad.square()
    change = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    return (1 - lr * decay) * w - lr * change, m, v


def to_float8(x: Tensor, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    history = torch.cat([history[1:], x.abs().amax()[None].to(history.dtype)])
    scale = history.amax().float().clamp_min(1e-12) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale, history


def allreduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return fusedtp.all_reduce(x, group=mesh)


def allgather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return fusedtp.all_gather(x[None], group=mesh)


def broadcast(x: Tensor, mesh: DeviceMesh) -> Tensor:
    # Rank 0 has all rows, the others have none.
    sizes = [len(x), *[0] * (mesh.size() - 1)]
    return fusedtp.all_gather(x[: sizes[mesh.get_local_rank()]], sizes=sizes, group=mesh)


def reduce(x: Tensor, dst: int, mesh: DeviceMesh) -> Tensor:
    # Rank dst gets all rows, the others get none.
    sizes = [len(x) if rank == dst else 0 for rank in range(mesh.size())]
    total = fusedtp.reduce_scatter(x, sizes=sizes, group=mesh)
    return total if mesh.get_local_rank() == dst else x


def reducescatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return fusedtp.reduce_scatter(x, group=mesh)


def layernorm_backward(x_hat: Tensor, dy: Tensor, mesh: DeviceMesh) -> tuple[Tensor, ...]:
    return fusedtp.all_reduce(torch.stack([(dy * x_hat).sum(0), dy.sum(0)]), group=mesh).unbind()


def embedding_lookup(indices: Tensor, rows: Tensor, mesh: DeviceMesh) -> Tensor:
    # The suite returns rows in the order of their owners. torch gathers the integers; one rank has the row of an index.
    indices = indices[(indices // len(rows)).argsort(stable=True)]
    parts = [torch.empty_like(indices) for _ in range(mesh.size())]
    dist.all_gather(parts, indices, group=mesh.get_group())
    every = torch.cat(parts)
    found = rows[every % len(rows)]
    found[every // len(rows) != mesh.get_local_rank()] = 0
    return fusedtp.reduce_scatter(found, group=mesh)


def allgather_gemm(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    return fusedtp.sharded_matmul(a, b, "[M, K_X] @ [K, N_X] -> [M, N_X]", mesh)


def gemm_allreduce(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    return fusedtp.linear_all_reduce(a, b.t(), group=mesh)


def gemm_allgather(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    return fusedtp.sharded_matmul(a, b, "[M, K] @ [K, N_X] -> [M, N]", mesh)


def combined_sharded_gemms(x: Tensor, w1: Tensor, w2: Tensor, mesh: DeviceMesh) -> Tensor:
    # The suite's reduce-scatter adds zeros to this rank's rows: nothing need be sent.
    hidden = fusedtp.all_gather_linear(x, w1.t(), gather_dim=-1, activation="silu", group=mesh)
    return hidden.chunk(mesh.size())[mesh.get_local_rank()] @ w2


def gemm_reducescatter(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    return fusedtp.linear_reduce_scatter(a, b.t(), group=mesh)


def rope_allgather(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mesh: DeviceMesh) -> tuple[Tensor, ...]:
    both = torch.stack([q, k])
    first, second = both.chunk(2, dim=-1)
    turned = both * cos.unsqueeze(2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(2)
    return fusedtp.all_gather(turned, gather_dim=2, group=mesh).unbind()


def tp_rms_norm(x: Tensor, weight: Tensor, eps: float, mesh: DeviceMesh) -> Tensor:
    squares = fusedtp.all_reduce(x.square().sum(-1, keepdim=True), group=mesh)
    return weight * x * (squares / (mesh.size() * x.shape[-1]) + eps).rsqrt()


def gemv_decode(x: Tensor, weight: Tensor, bias: Tensor, mesh: DeviceMesh) -> Tensor:
    logits = fusedtp.sharded_matmul(x, weight.t(), "[M, K] @ [K, N_X] -> [M, N]", mesh)
    return logits + fusedtp.all_gather(bias, group=mesh)


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    # Two numbers of each token travel: log-sum-exp of this rank's logits, and the target's logit or 0.
    here = target - mesh.get_local_rank() * logits.shape[-1]
    mine = (here >= 0) & (here < logits.shape[-1])
    picked = logits.gather(-1, torch.where(mine, here, 0)[..., None])[..., 0] * mine
    parts = fusedtp.all_gather(torch.stack([logits.logsumexp(-1), picked])[None], group=mesh)
    return parts[:, 0].logsumexp(0) - parts[:, 1].sum(0)


def conv3d_allreduce(x: Tensor, weight: Tensor, bias: Tensor, *how: int, mesh: DeviceMesh) -> Tensor:
    return fusedtp.all_reduce(F.conv3d(x, weight, None, *how), group=mesh) + bias.view(-1, 1, 1, 1)


def muon_orthogonalization(x: Tensor, coefficients: Sequence[Sequence[float]], mesh: DeviceMesh) -> Tensor:
    x = x / fusedtp.all_reduce(x.square().sum()[None], group=mesh).sqrt()
    for a, b, c in coefficients:
        gram = fusedtp.linear_all_reduce(x, x, group=mesh)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def blocked_fp8_quantize(x: Tensor, block: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    # Two float8 numbers travel as one of 16 bits: a gather changes no bit.
    mine = fusedtp.scaled(x.view(-1, block), dtype=torch.float8_e4m3fn)
    data = fusedtp.all_gather(mine.data.view(torch.bfloat16), group=mesh).view(mine.data.dtype)
    scale = fusedtp.all_gather(mine.scale, group=mesh)
    return data.view(-1, *x.shape[1:]), scale.view(-1, *x.shape[1:-1], x.shape[-1] // block)


def clip_grad_norm(grads: Sequence[Tensor], most: float, p: float, mesh: DeviceMesh) -> Tensor:
    powers = torch.stack([grad.norm(p) ** p for grad in grads]).sum(0, keepdim=True)
    norm = fusedtp.all_reduce(powers, group=mesh)[0] ** (1 / p)
    for grad in grads:
        grad.mul_((most / norm).clamp_max(1))
    return norm


def grad_acc_loss(
    loss: Tensor, valid: Tensor, all_valid: Tensor, grad_mean: Tensor, grad_sum: Tensor, mesh: DeviceMesh
) -> tuple[Tensor, Tensor, Tensor]:
    mine = (loss if valid > 0 else loss.nan_to_num()) * valid
    total = fusedtp.all_reduce(mine[None], group=mesh)[0]
    return total / all_valid, total, (grad_mean / all_valid + grad_sum) * valid


def importance_sampling_loss(
    x: Tensor, weight: Tensor, labels: Tensor, old: Tensor, advantages: Tensor, ignored: int, mesh: DeviceMesh
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Seven numbers of each rank travel at once. A gather serves sums, a minimum and a maximum alike.
    valid = labels != ignored
    entropy = F.cross_entropy(F.linear(x, weight), labels, ignore_index=ignored, reduction="none")
    change = torch.where(valid, -entropy.detach() - old, 0).clamp(-20, 20)
    ratio = change.exp()
    policy = torch.where(valid, -ratio * advantages, 0)
    sums = torch.stack([valid.to(x.dtype), policy, ratio * valid, (ratio - change - 1) * valid, entropy * valid]).sum(1)
    lowest, highest = torch.where(valid, ratio, math.inf).amin(), torch.where(valid, ratio, -math.inf).amax()
    parts = fusedtp.all_gather(torch.stack([*sums.detach(), lowest, highest])[None], group=mesh)
    tokens, total, *means = parts[:, :5].sum(0)
    tokens = tokens.clamp_min(1)
    surrogate = -(policy * entropy).sum() / tokens
    metrics = means[0] / tokens, parts[:, 5].amin(), parts[:, 6].amax(), means[1] / tokens, means[2] / tokens
    return total / tokens + surrogate - surrogate.detach(), -entropy.detach(), policy, torch.stack(metrics)


def ddp(x: Tensor, y: Tensor, *given: Any, mesh: DeviceMesh) -> list[Tensor]:
    tensors, how = given[:12], given[12:]
    shapes = [each.shape for each in tensors]
    w, m, v = broadcast(flat(tensors), mesh).chunk(3)
    w.requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(unflat(w, shapes[:4]), x, y), w)
    grad = fusedtp.all_reduce(grad, group=mesh) / mesh.size()
    return unflat(flat(adam(w.detach(), grad, m, v, *how)), shapes)


def zero(x: Tensor, y: Tensor, *given: Any, mesh: DeviceMesh) -> list[Tensor]:
    # ZeRO-1 and ZeRO-2: for either, a rank needs the sum of its own part of the gradient only.
    weights, (m, v), how = given[:4], given[4:6], given[6:]
    shapes = [each.shape for each in weights]
    whole = broadcast(flat(weights), mesh).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(unflat(whole, shapes), x, y), whole)
    grad = fusedtp.reduce_scatter(grad, group=mesh) / mesh.size()
    own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()]
    w, m, v = adam(own, grad, m, v, *how)
    return [*unflat(fusedtp.all_gather(w, group=mesh), shapes), m, v]


def adam_allgather(grad: Tensor, w: Tensor, m: Tensor, v: Tensor, *how: Any, mesh: DeviceMesh) -> Tensor:
    return fusedtp.all_gather(adam(w, grad, m, v, *how)[0], group=mesh)


def quantized_grad_allreduce(grad: Tensor, block: int, mesh: DeviceMesh) -> Tensor:
    blocks = F.pad(grad.flatten(), (0, -grad.numel() % block)).view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
    kept = ((blocks / scale).round() * scale).flatten()[: grad.numel()]
    return fusedtp.all_reduce(kept.view_as(grad), group=mesh) / mesh.size()


def reducescatter_rmsnorm(x: Tensor, gamma: Tensor, eps: float, mesh: DeviceMesh) -> Tensor:
    rows = fusedtp.reduce_scatter(x.view(-1, len(gamma)), group=mesh) / mesh.size()
    return F.rms_norm(rows, gamma.shape, gamma, eps)


def fsdp_step(
    x: Tensor, y: Tensor, shard: Tensor, shapes: Sequence[Sequence[int]], m: Tensor, v: Tensor, lr: float,
    beta1: float, beta2: float, eps: float, decay: float, step: int, mesh: DeviceMesh,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # The gradient of an all-gather is a reduce-scatter.
    own = shard.detach().requires_grad_()
    loss = loss_of(unflat(fusedtp.all_gather(own, group=mesh), shapes), x, y)
    (grad,) = torch.autograd.grad(loss, own)
    return adam(shard, grad / mesh.size(), m, v, lr, beta1, beta2, eps, step, decay)


def fsdp_and_tp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, mesh: DeviceMesh) -> Tensor:
    # Axis D of this mesh is FSDP's, T tensor parallelism's.
    up, down = "[B_D, K] @ [K_D, H_T] -> [B_D, H_T]", "[B_D, H_T] @ [H_T, N_D] -> [B_D, N]"
    gate, value = (fusedtp.sharded_matmul(x, w, up, mesh) for w in (w1, w2))
    return fusedtp.sharded_matmul(F.silu(gate) * value, w3, down, mesh)


def fp8_reduce_scatter(grads: Tensor, history: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    data, scale, history = to_float8(grads, history)
    kept = (data.float() * scale).to(grads.dtype)
    return fusedtp.reduce_scatter(kept, group=mesh) / mesh.size(), history


def fp8_allgather(shard: Tensor, history: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    # float8 travels, two numbers as one of 16 bits, and each rank's scale.
    data, scale, history = to_float8(shard, history)
    every = fusedtp.all_gather(data.view(torch.bfloat16)[None], group=mesh).view(data.dtype)
    scales = fusedtp.all_gather(scale[None], group=mesh)
    return (every.float() * scales[:, None]).to(shard.dtype).flatten(), history
