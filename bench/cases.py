"""Cases: ops, layers, blocks and collectives; directions, variants and sizes, with the FLOPs and bytes of each.

Sizes are global, y[M, N] = x[M, K] @ w[N, K].T over W ranks:

    all_gather_matmul        x_shard_m [M/W, K],  w_shard_n [N/W, K]  ->  y_shard_n [M, N/W]
    matmul_reduce_scatter    x_shard_k [M, K/W],  w_shard_k [N, K/W]  ->  y_shard_m [M/W, N]
    matmul_all_reduce        x_shard_k [M, K/W],  w_shard_k [N, K/W]  ->  y [M, N]

Backward is the gradient of both operands, dx = dy @ w and dw = dy.T @ x. dy is sharded like y. `both` is forward and
then backward, timed together.

float8 operands have a scale for each row, mxfp8 operands one for each 32 elements of a row. They are cast before
anything is timed. y is bfloat16. There is no backward pass.

With T tokens (batch x sequence) split between the ranks outside attention and MLP, a block is four of them:

    attention qkv  all-gather + matmul      M = T, N = (heads + 2 * kv_heads) * head_dim,  K = hidden
    attention out  matmul + reduce-scatter  M = T, N = hidden,                             K = heads * head_dim
    mlp up         all-gather + matmul      M = T, N = intermediate, twice if gated,       K = hidden
    mlp down       matmul + reduce-scatter  M = T, N = hidden,                             K = intermediate

Gate and up are one matmul, as `ParallelMLP` and every serving stack do it; so are query, key and value.

Other cases consist of such matmuls, or of a collective alone (`matmuls`). M is always the number of rows or tokens:

    mlp              N = hidden features, K = features                  up, GELU, down
    grouped          N = all output features, `widths` of each, K = features     several weights, one gathered input
    decode           N = output features, K = input features            matmul + all-reduce, residual, RMSNorm
    block            N = intermediate, K = hidden, `sizes`              norm, attention, norm, MLP, with residuals
    all_gather, reduce_scatter, all_reduce    N = K = columns           a collective of [M, N]
    kernel, check    one rank's sizes; `layer` names the kernel, or the check, of the ten-minute command (`gpu`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusedtp.files import read_text
from fusedtp.op import (
    ALL_GATHER,
    ALL_GATHER_MATMUL,
    ALL_REDUCE,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    REDUCE_SCATTER,
    Kind,
)
from fusedtp.op import OPS as TABLE
from fusedtp.scaled import packed_bytes
from fusedtp.schedules import NAMES
from fusedtp.sharding.plan import ITEMSIZE, made_of

OPS = tuple(name for name, op in TABLE.items() if op.multiplies)
COLLECTIVES = tuple(name for name, op in TABLE.items() if not op.multiplies)
LAYERED = ("mlp", "grouped", "decode", "block")
EVERY_OP = (*OPS, *LAYERED, *COLLECTIVES, "kernel", "check")
DIRECTIONS = ("forward", "backward", "both")
SCHEDULES = NAMES[::-1]
# Bounds for every schedule: the library's unsplit matmul and the backend's collective, each alone.
BOUNDS = ("matmul", "comm")
# Variants that are no competitors: the bounds, our kernels with every signal raised in advance, and of a layer a rank's
# arithmetic with nothing sent.
ALONE = ("matmul", "own_matmul", "comm", "local")
# Our own collective, then one matmul, or the reverse (`sequential`). What overlap gains is measured against it.
SEQUENTIAL = "sequential"
# auto: the schedule that dispatch picks. Every other variant is a provider's (`providers`). All but those of ALONE run
# the whole op, so that a speed-up means something.
OWN = (*ALONE[:3], SCHEDULES[0], SEQUENTIAL, *SCHEDULES[1:], "auto")
DTYPES = ("float32", "bfloat16", "float16")
# float8 dtypes, run only on request: for NVIDIA's GPUs and CPUs; for AMD's gfx942; for NVIDIA's GPUs and CPUs with a
# scale for each block of 32.
FLOAT8, FNUZ, MXFP8 = EVERY_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "mxfp8")
EVERY_DTYPE = (*DTYPES, *EVERY_FLOAT8)
# Display names.
TITLES = {
    ALL_GATHER_MATMUL.name: "all-gather + matmul",
    MATMUL_REDUCE_SCATTER.name: "matmul + reduce-scatter",
    MATMUL_ALL_REDUCE.name: "matmul + all-reduce",
    "mlp": "MLP", "grouped": "q, k, v", "decode": "linear, all-reduce, residual, norm", "block": "block",
    "kernel": "kernel", "check": "check",
    ALL_GATHER.name: "all-gather", REDUCE_SCATTER.name: "reduce-scatter", ALL_REDUCE.name: "all-reduce",
}  # fmt: skip
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", FLOAT8: "fp8", FNUZ: "fp8 fnuz", MXFP8: MXFP8}

Shape = tuple[int, int, int]

_GATHER: tuple[Shape, ...] = ((4096, 512, 4096), (2048, 512, 8192), (8192, 512, 2048))
_SCATTER: tuple[Shape, ...] = ((4096, 4096, 512), (2048, 8192, 512), (8192, 2048, 512))

# `comm`: little arithmetic per byte that travels. GPU sizes are the MLP of a 70B model at 4096 and 8192 tokens.
SHAPES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "small": dict.fromkeys(OPS, ((256, 512, 512),)),
    "medium": dict.fromkeys(OPS, ((1024, 1024, 1024),)),
    "square": dict.fromkeys(OPS, ((2048, 2048, 2048),)),
    "comm": {
        ALL_GATHER_MATMUL.name: _GATHER,
        MATMUL_REDUCE_SCATTER.name: _SCATTER,
        MATMUL_ALL_REDUCE.name: _SCATTER[:1],
    },
    "large": {
        ALL_GATHER_MATMUL.name: ((4096, 28672, 8192), (8192, 28672, 8192)),
        MATMUL_REDUCE_SCATTER.name: ((4096, 8192, 28672), (8192, 8192, 28672)),
        MATMUL_ALL_REDUCE.name: ((512, 8192, 28672), (4096, 8192, 28672)),
    },
}
# Small, as an interpreted kernel takes seconds where a library takes a millisecond. The second size is uneven.
CHECK_SHAPES: tuple[Shape, ...] = ((96, 80, 64), (97, 83, 61))


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of one block. `gated`: SwiGLU, whose gate is as wide as up. `source`: where the numbers are from."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    gated: bool
    source: str


@dataclass(frozen=True)
class Case:
    """One op at one size, dtype and world size.

    - model, tokens, layer: the block it is a matmul of, or "", 0, "".
    - widths: output features of each weight of `grouped`. sizes: those of a `block`.
    """

    op: str
    M: int
    N: int
    K: int
    dtype: str
    world_size: int
    seed: int = 0
    model: str = ""
    tokens: int = 0
    layer: str = ""
    widths: tuple[int, ...] = ()
    sizes: BlockSizes | None = None

    def __post_init__(self) -> None:
        if self.op not in EVERY_OP:
            raise ValueError(f"op must be one of {', '.join(EVERY_OP)}, got {self.op!r}")
        if self.dtype not in EVERY_DTYPE:
            raise ValueError(f"dtype must be one of {', '.join(EVERY_DTYPE)}, got {self.dtype!r}")
        if min(self.M, self.N, self.K, self.world_size) < 1:
            raise ValueError(f"M, N, K and world_size must be positive, got {self}")

    def __str__(self) -> str:
        name = f"{self.model} {self.layer}, ".replace(" ,", ",") if self.model else ""
        third = "" if self.op in COLLECTIVES else f"x{self.K}"
        return f"{name}{self.op} {self.M}x{self.N}{third} {self.dtype} on {self.world_size}"

    @property
    def kind(self) -> Kind:
        """Return the kind of the op's collective."""
        return TABLE[self.op].kind

    @property
    def is_float8(self) -> bool:
        """Return True if x and w are float8 with scales."""
        return self.dtype in EVERY_FLOAT8

    @property
    def even(self) -> bool:
        """Return True if all shards of each split dim have the same length."""
        split = (self.M, self.N) if self.kind == "gather" else (self.M, self.K)
        return all(length % self.world_size == 0 for length in split)


def size_of(case: Case) -> tuple[str, int, str, int, int, int]:
    """Return the key of a case in a table of measurements.

    The last three fields: rows and columns of the whole tensor that travels, and the product's third length on a rank,
    0 for a collective alone.
    """
    if case.op in COLLECTIVES:
        return case.op, case.world_size, case.dtype, case.M, case.N, 0
    cols, third = (case.K, case.N) if case.kind == "gather" else (case.N, case.K)
    return case.op, case.world_size, case.dtype, case.M, cols, -(-third // case.world_size)


def schedules_here(num_gpus: int) -> tuple[str, ...]:
    """Return the schedules that are timed: not `fused` without a GPU, where kernels are interpreted."""
    return ("unfused", "decomposed", "fused") if num_gpus else ("unfused", "decomposed")


def ranks(number: int) -> str:
    """Return the number in words: "1 rank", "2 ranks"."""
    return f"{number} rank" if number == 1 else f"{number} ranks"


def check_direction(direction: str) -> None:
    """Raise ValueError unless `direction` is one of `DIRECTIONS`."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")


def matmuls(case: Case) -> list[Case]:
    """Return the matmuls of a case with their collectives, in the order they run; none for a collective alone.

    Attention's inner products, norms and activations are not among them.
    """
    up, down = replace(case, op=ALL_GATHER_MATMUL.name), replace(case, op=MATMUL_REDUCE_SCATTER.name)
    if case.op in OPS:
        return [case]
    if case.op == "mlp":
        return [up, replace(down, N=case.K, K=case.N)]
    if case.op == "block":
        sizes = case.sizes or MODELS[case.model]
        return block(case.model, case.tokens, case.world_size, case.dtype, sizes)
    return {"grouped": [up], "kernel": [up], "decode": [replace(case, op=MATMUL_ALL_REDUCE.name)]}.get(case.op, [])


def flops(case: Case, direction: str) -> float:
    """Return a rank's floating-point operations, the mean if shards are uneven: one matmul forward, two backward."""
    check_direction(direction)
    times = {"forward": 1, "backward": 2, "both": 3}[direction]
    return sum(times * 2.0 * each.M * each.N * each.K / each.world_size for each in matmuls(case))


def num_results(case: Case, direction: str) -> int:
    """Return the elements of the results of all ranks: y forward, dx and dw backward."""
    check_direction(direction)
    if case.op in COLLECTIVES:
        return case.M * case.N * (1 if TABLE[case.op].kind == "scatter" else case.world_size)
    parts = matmuls(case)
    y, gradients = sum(each.M * each.N for each in parts), sum((each.M + each.N) * each.K for each in parts)
    return {"forward": y, "backward": gradients, "both": y + gradients}[direction]


def traffic(case: Case, direction: str) -> list[tuple[str, int]]:
    """Return (collective, bytes of its whole buffer) for each collective of an unfused pass, in the order they run.

    The whole buffer is the gathered tensor, or the tensor that every rank reduces: S in nccl-tests.
    """
    check_direction(direction)
    if case.op in COLLECTIVES:
        return [(case.op, case.M * case.N * ITEMSIZE[case.dtype])]
    if case.op not in OPS:
        passes = ("forward", "backward") if direction == "both" else (direction,)
        turned = {"forward": matmuls(case), "backward": matmuls(case)[::-1]}
        return [each for name in passes for part in turned[name] for each in traffic(part, name)]
    x, y = case.M * case.K * ITEMSIZE[case.dtype], case.M * case.N * ITEMSIZE[made_of(case.dtype)]
    if case.is_float8:
        x = case.M * packed_bytes(case.K, blocks=case.dtype == MXFP8)
    gather, scatter, reduce = ALL_GATHER.name, REDUCE_SCATTER.name, ALL_REDUCE.name
    forward, backward = {
        "gather": ([(gather, x)], [(scatter, x), (gather, x)]),
        # dy is gathered once, for both gradients.
        "scatter": ([(scatter, y)], [(gather, y)]),
        "all_reduce": ([(reduce, y)], []),
    }[case.kind]
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


_LLAMA_3 = "The Llama 3 Herd of Models (arXiv 2407.21783), table 3"

MODELS = {
    "small": BlockSizes(512, 1408, 8, 4, 64, 8, True, "made up, for CPUs"),
    "llama3-8b": BlockSizes(4096, 14336, 32, 8, 128, 32, True, _LLAMA_3),
    "llama3-70b": BlockSizes(8192, 28672, 64, 8, 128, 80, True, _LLAMA_3),
    "llama3-405b": BlockSizes(16384, 53248, 128, 8, 128, 126, True, _LLAMA_3),
    # Qwen3's heads are 128 wide whatever hidden / heads is
    "qwen3-8b": BlockSizes(4096, 12288, 32, 8, 128, 36, True, "Qwen/Qwen3-8B, config.json"),
    "qwen3-32b": BlockSizes(5120, 25600, 64, 8, 128, 64, True, "Qwen/Qwen3-32B, config.json"),
    "gpt3-175b": BlockSizes(
        12288, 49152, 96, 96, 128, 96, False, "Language Models are Few-Shot Learners (arXiv 2005.14165), table 2.1"
    ),
}
LAYERS = ("attention qkv", "attention out", "mlp up", "mlp down")


# The files of Hugging Face name these sizes so; of some older models otherwise.
_NAMES = {
    "hidden": ("hidden_size", "n_embd"), "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "heads": ("num_attention_heads", "n_head"), "num_blocks": ("num_hidden_layers", "n_layer"),
}  # fmt: skip
_UNGATED = ("gpt2", "gpt_neox", "opt", "phi", "falcon", "bloom", "gpt_bigcode", "starcoder2")
_MOST_CONFIG_BYTES = 4 << 20


def sizes_of(model: str) -> tuple[str, BlockSizes]:
    """Return the name and the sizes of a model: one of `MODELS`, or a Hugging Face config.json or its folder.

    ValueError for any other name, and for a file without these sizes.
    """
    if model in MODELS:
        return model, MODELS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(MODELS)
        raise ValueError(f"model must be one of {known}, or a config.json of Hugging Face or its folder, got {model!r}")
    try:
        given = json.loads(read_text(path, max_bytes=_MOST_CONFIG_BYTES))
        given = given.get("text_config", given)
        found = {name: _integer(given, names) for name, names in _NAMES.items()}
        default = {"num_key_value_heads": found["heads"], "head_dim": found["hidden"] // found["heads"]}
        kv_heads, head_dim = (_integer({**default, **_present(given)}, (name,)) for name in default)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no configuration of a decoder: {error}") from error
    kind = str(given.get("model_type") or "model")
    sizes = BlockSizes(
        **found, kv_heads=kv_heads, head_dim=head_dim, gated=kind not in _UNGATED, source=str(path)
    )  # fmt: skip
    return f"{kind}-{sizes.hidden}x{sizes.intermediate}", sizes


def _present(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _integer(given: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((given[name] for name in names if given.get(name) is not None), None)
    if type(found) is not int or not 1 <= found < 2**31:
        raise ValueError(f"{names[0]} must be a positive integer, got {found!r}")
    return found


def block(model: str, tokens: int, world_size: int, dtype: str, sizes: BlockSizes | None = None) -> list[Case]:
    """Return the cases of one block, in the order of `LAYERS`; sizes: by default those of `sizes_of`.

    ValueError for an unknown model, or if attention heads do not divide evenly: a head is never cut. With more ranks
    than key-value heads, several ranks hold the same key-value head, so N is longer. The tokens and the MLP's features
    may be split unevenly.
    """
    model, sizes = (model, sizes) if sizes else sizes_of(model)
    if tokens < 1 or world_size < 1:
        raise ValueError(f"tokens and world_size must be positive, got {tokens} and {world_size}")
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
        Case(op, tokens, N, K, dtype, world_size, 0, model, tokens, layer)
        for layer, (op, N, K) in zip(LAYERS, matmuls, strict=True)
    ]
