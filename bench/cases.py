"""What the sweep runs: ops, directions, variants, sizes, and what a case multiplies and sends.

Sizes are global, y[M, N] = x[M, K] @ w[N, K].T over W ranks:

    all_gather_matmul        x_shard_m [M/W, K],  w_shard_n [N/W, K]  ->  y_shard_n [M, N/W]
    matmul_reduce_scatter    x_shard_k [M, K/W],  w_shard_k [N, K/W]  ->  y_shard_m [M/W, N]
    matmul_all_reduce        x_shard_k [M, K/W],  w_shard_k [N, K/W]  ->  y [M, N]

Backward is the gradient of both operands, dx = dy @ w and dw = dy.T @ x, from a dy that is sharded as y is; `both` is
forward and then backward, timed together.

float8 operands have a scale a row, or in mxfp8 one for each 32 of its elements, and are made before anything is timed;
y is bfloat16. They have no backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

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
DIRECTIONS = ("forward", "backward", "both")
SCHEDULES = NAMES[::-1]
# What every schedule is held against: the unsplit library matmul, and the backend's collective, each alone.
BOUNDS = ("matmul", "comm")
# What no schedule is held against as a rival: the bounds, and our kernels with every flag raised before.
ALONE = ("matmul", "own_matmul", "comm")
# auto: the schedule that dispatch picks. Every other variant is a provider's (`providers`). All but those of ALONE run
# the whole op, so that a speed-up means something.
OWN = (*ALONE, *SCHEDULES, "auto")
DTYPES = ("float32", "bfloat16", "float16")
# Run where it is asked for: what NVIDIA's GPUs and a CPU take, what AMD's gfx942 multiplies, and the first one with a
# scale for each block of 32.
FLOAT8, FNUZ, MXFP8 = EVERY_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "mxfp8")
EVERY_DTYPE = (*DTYPES, *EVERY_FLOAT8)
# As people read them.
TITLES = {
    ALL_GATHER_MATMUL.name: "all-gather + matmul",
    MATMUL_REDUCE_SCATTER.name: "matmul + reduce-scatter",
    MATMUL_ALL_REDUCE.name: "matmul + all-reduce",
}
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
# interpreted kernels cost seconds at sizes that a library does in a millisecond; nothing here divides by a tile or by 4
CHECK_SHAPES: tuple[Shape, ...] = ((96, 80, 64), (97, 83, 61))


@dataclass(frozen=True)
class Case:
    """One op at one size, dtype and world size. model, tokens, layer: the block it is a matmul of, or "", 0, ""."""

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

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {self.op!r}")
        if self.dtype not in EVERY_DTYPE:
            raise ValueError(f"dtype must be one of {', '.join(EVERY_DTYPE)}, got {self.dtype!r}")
        if min(self.M, self.N, self.K, self.world_size) < 1:
            raise ValueError(f"M, N, K and world_size must be positive, got {self}")

    def __str__(self) -> str:
        name = f"{self.model} {self.layer}, " if self.model else ""
        return f"{name}{self.op} {self.M}x{self.N}x{self.K} {self.dtype} on {self.world_size}"

    @property
    def kind(self) -> Kind:
        """What its collective does."""
        return TABLE[self.op].kind

    @property
    def is_float8(self) -> bool:
        """Whether x and w are float8 with scales."""
        return self.dtype in EVERY_FLOAT8

    @property
    def even(self) -> bool:
        """Whether every dim that is split is as long on every rank."""
        split = (self.M, self.N) if self.kind == "gather" else (self.M, self.K)
        return all(length % self.world_size == 0 for length in split)


def ranks(number: int) -> str:
    """As people read it: "1 rank", "2 ranks"."""
    return f"{number} rank" if number == 1 else f"{number} ranks"


def check_direction(direction: str) -> None:
    """ValueError unless `direction` is one of `DIRECTIONS`."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")


def flops(case: Case, direction: str) -> float:
    """Floating-point operations of a rank, the mean where shards are uneven: one matmul forward, two backward."""
    check_direction(direction)
    matmuls = {"forward": 1, "backward": 2, "both": 3}[direction]
    return matmuls * 2.0 * case.M * case.N * case.K / case.world_size


def traffic(case: Case, direction: str) -> list[tuple[str, int]]:
    """(collective, bytes of its whole buffer) for each collective of an unfused pass, in the order they run.

    The whole buffer is what is gathered, or what is reduced on every rank: the S of nccl-tests.
    """
    check_direction(direction)
    x, y = case.M * case.K * ITEMSIZE[case.dtype], case.M * case.N * ITEMSIZE[made_of(case.dtype)]
    if case.is_float8:
        x = case.M * packed_bytes(case.K, blocks=case.dtype == MXFP8)
    gather, scatter, reduce = ALL_GATHER.name, REDUCE_SCATTER.name, ALL_REDUCE.name
    forward, backward = {
        "gather": ([(gather, x)], [(scatter, x), (gather, x)]),
        # dy is gathered once, for both gradients
        "scatter": ([(scatter, y)], [(gather, y)]),
        "all_reduce": ([(reduce, y)], []),
    }[case.kind]
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]
