"""A decoder of one's own: a plain model, and the plan that splits it over the ranks of a mesh.

    model = split(GPT(Config()), mesh["tp"])
    loss = loss_of(model, tokens)          # tokens [batch, length + 1], the same on all ranks of mesh["tp"]

The model's code says nothing of ranks. Between its linears, tokens are split: hidden states [batch, tokens, features]
are DTensors, Shard(1). Queries, keys and values take one all-gather together, as gate and up do; `out` and `down`
reduce-scatter. Embedding and head are split by vocabulary, and logits are never whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F

import fusedtp


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `heads` must divide by the tensor-parallel ranks, and `hidden_size` by twice `heads`."""

    vocabulary: int = 256
    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 2
    heads: int = 8


class Attention(nn.Module):
    """Causal self-attention with rotary positions. On a rank, queries, keys and values are those of its heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.heads
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, hidden_size] -> the same."""
        q, k, v = (each(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        assert isinstance(y, Tensor)
        return y


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs of features [.., tokens, head_size] by angles that grow with the position."""
    half = x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.split(half, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, hidden_size] -> the same."""
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        assert isinstance(y, Tensor)
        return y


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(config.hidden_size), Attention(config)
        self.norm2, self.mlp = nn.RMSNorm(config.hidden_size), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, hidden_size] -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        y = self.head(self.norm(x))
        assert isinstance(y, Tensor)
        return y


TOKENS = Shard(1)


def split(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split the model over a 1-D mesh, in place. All ranks get the first rank's parameters."""
    if model.config.heads % mesh.size():
        raise ValueError(f"{model.config.heads} heads cannot be shared out evenly over {mesh.size()} ranks")
    parallelize_module(
        model,
        mesh,
        {
            "embedding": fusedtp.FusedEmbeddingParallel(output_layouts=TOKENS, use_local_output=False),
            "blocks.*.norm1": fusedtp.FusedNormParallel(),
            "blocks.*.norm2": fusedtp.FusedNormParallel(),
            "blocks.*.attention": fusedtp.FusedGroup("q", "k", "v", input_layouts=TOKENS),
            "blocks.*.mlp": fusedtp.FusedGroup("gate", "up", input_layouts=TOKENS),
            "blocks.*.attention.out": fusedtp.FusedRowwiseParallel(output_layouts=TOKENS, use_local_output=False),
            "blocks.*.mlp.down": fusedtp.FusedRowwiseParallel(output_layouts=TOKENS, use_local_output=False),
            "norm": fusedtp.FusedNormParallel(),
            "head": fusedtp.FusedColwiseParallel(input_layouts=TOKENS, use_local_output=False),
        },
    )
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next token, and run its backward pass if gradients are on.

    tokens [batch, length + 1]. torch's cross-entropy takes logits that are split by vocabulary inside `loss_parallel`,
    where its backward pass must run too.
    """
    with loss_parallel():
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        if torch.is_grad_enabled():
            loss.backward()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()
