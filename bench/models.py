"""The tensor-parallel matmuls of a transformer block, from the sizes of well-known models.

With T tokens (batch x sequence) split between the ranks outside attention and MLP, a block is four of them:

    attention qkv  all-gather + matmul      M = T, N = (heads + 2 * kv_heads) * head_dim,  K = hidden
    attention out  matmul + reduce-scatter  M = T, N = hidden,                             K = heads * head_dim
    mlp up         all-gather + matmul      M = T, N = intermediate, twice if gated,       K = hidden
    mlp down       matmul + reduce-scatter  M = T, N = hidden,                             K = intermediate

Gate and up are one matmul, as `ParallelMLP` and every serving stack do it; so are query, key and value.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusedtp.op import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER

from .cases import Case


@dataclass(frozen=True)
class Model:
    """The sizes of one block. `gated`: SwiGLU, whose gate is as wide as up. `source`: where the numbers are from."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    gated: bool
    source: str


_LLAMA_3 = "The Llama 3 Herd of Models (arXiv 2407.21783), table 3"

MODELS = {
    "llama3-8b": Model(4096, 14336, 32, 8, 128, 32, True, _LLAMA_3),
    "llama3-70b": Model(8192, 28672, 64, 8, 128, 80, True, _LLAMA_3),
    "llama3-405b": Model(16384, 53248, 128, 8, 128, 126, True, _LLAMA_3),
    # Qwen3's heads are 128 wide whatever hidden / heads is
    "qwen3-8b": Model(4096, 12288, 32, 8, 128, 36, True, "Qwen/Qwen3-8B, config.json"),
    "qwen3-32b": Model(5120, 25600, 64, 8, 128, 64, True, "Qwen/Qwen3-32B, config.json"),
    "gpt3-175b": Model(
        12288, 49152, 96, 96, 128, 96, False, "Language Models are Few-Shot Learners (arXiv 2005.14165), table 2.1"
    ),
}
LAYERS = ("attention qkv", "attention out", "mlp up", "mlp down")


def block(model: str, tokens: int, world_size: int, dtype: str, seed: int = 0) -> list[Case]:
    """The cases of one block, in the order of `LAYERS`.

    ValueError for a model that is not known, and where attention heads cannot be dealt out evenly: a head is never cut.
    With more ranks than key-value heads each of these is held by several ranks, which makes N longer. The tokens and
    the MLP's features may be split unevenly.
    """
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    if tokens < 1 or world_size < 1:
        raise ValueError(f"tokens and world_size must be positive, got {tokens} and {world_size}")
    sizes = MODELS[model]
    if sizes.heads % world_size:
        raise ValueError(f"{model} has {sizes.heads} attention heads, which {world_size} ranks cannot share evenly")
    if sizes.kv_heads % world_size and world_size % sizes.kv_heads:
        raise ValueError(f"{model} has {sizes.kv_heads} key-value heads, which {world_size} ranks cannot share evenly")
    kv_heads = max(sizes.kv_heads, world_size)
    attention = sizes.heads * sizes.head_dim
    matmuls = (
        (ALL_GATHER_MATMUL.name, attention + 2 * kv_heads * sizes.head_dim, sizes.hidden),
        (MATMUL_REDUCE_SCATTER.name, sizes.hidden, attention),
        (ALL_GATHER_MATMUL.name, (1 + sizes.gated) * sizes.intermediate, sizes.hidden),
        (MATMUL_REDUCE_SCATTER.name, sizes.hidden, sizes.intermediate),
    )
    return [
        Case(op, tokens, N, K, dtype, world_size, seed, model, tokens, layer)
        for layer, (op, N, K) in zip(LAYERS, matmuls, strict=True)
    ]
