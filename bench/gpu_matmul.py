"""Stage 1: the plain matmul against float64, and its time beside torch.mm's.

At twelve shapes: what a rank multiplies in a block of Llama 3 8B on four ranks and of 70B on eight, all four layers at
8192 tokens and the MLP's two at 512. A fused kernel is this matmul with hooks, so it can be no faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from statistics import geometric_mean

import torch
from torch import Tensor

from .cases import Item
from .gpu_preset import plain, poisoned
from .gpu_rows import Run, found, time_alone
from .models import block
from .oracle import Product
from .rows import Outcome
from .store import Row
from .timing import Verdict

DTYPES = ("bfloat16", "float16")
BLOCKS = (("llama3-8b", 4, 8192, 0), ("llama3-70b", 8, 8192, 0), ("llama3-8b", 4, 512, 2), ("llama3-70b", 8, 512, 2))
# Of torch.mm's speed, in geometric mean over the shapes.
LEAST_SPEED = 0.95
SECONDS = 0.5


def items(*, emulate: bool = False) -> list[Item]:
    """The twelve shapes in both dtypes. A dry run has their names in one dtype, and sizes that end inside tiles."""
    made = []
    for dtype in DTYPES[:1] if emulate else DTYPES:
        for model, ranks, tokens, first in BLOCKS:
            for case in block(model, tokens, ranks, dtype)[first:]:
                gathers = case.kind == "gather"
                M, N, K = case.M, case.N // (ranks if gathers else 1), case.K // (1 if gathers else ranks)
                if emulate:
                    M, N, K = min(M, 70), min(N, 83), min(K, 61)
                made.append(
                    Item("matmul", M, N, K, dtype, ranks, model=model, tokens=tokens, layer=case.layer)
                )  # fmt: skip
    return made


def draw(M: int, N: int, K: int, dtype: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """x [M, K] and a weight [N, K] as torch has it, transposed to [K, N]: standard normal."""
    random = torch.Generator(device).manual_seed(seed)
    x, w = (torch.randn(shape, generator=random, device=device).to(getattr(torch, dtype)) for shape in ((M, K), (N, K)))
    return x, w.t()


def work(item: Item, run: Run) -> list[Outcome]:
    """Check both on one draw, then time them on two."""
    M, N, K = item.M, item.N, item.K
    draws = [draw(M, N, K, item.dtype, run.device, seed) for seed in range(2)]
    outs = [poisoned(draws[0][0], M, N) for _ in draws]
    pairs = list(zip(draws, outs, strict=True))
    calls: dict[str, list[Callable[[], object]]] = {
        "own_matmul": [functools.partial(plain(a, b), out) for (a, b), out in pairs],
        "matmul": [functools.partial(torch.mm, a, b, out=out) for (a, b), out in pairs],
    }
    product = Product(*draws[0], (K,))
    verdicts = {}
    for name, each in calls.items():
        outs[0].fill_(math.nan)
        each[0]()
        verdicts[name] = Verdict(*product.check(outs[0], outs[0].dtype, name))
    del product
    times = time_alone(calls, run, SECONDS)
    return [
        found(
            name, verdicts[name], times[name], tflops=2e-9 * M * N * K / times[name].median_ms,
            matmul_fraction=times["matmul"].median_ms / times[name].median_ms,
        )
        for name in calls
    ]  # fmt: skip


def verdicts(rows: Sequence[Row]) -> list[str]:
    """By dtype, whether the own matmul is as fast as it should be, and where it is slower."""
    lines = []
    for dtype in DTYPES:
        speeds = {
            f"{row.model} {row.layer}, {row.tokens} tokens ({row.M}x{row.N}x{row.K})": row.matmul_fraction
            for row in rows
            if row.variant == "own_matmul" and row.dtype == dtype and row.passed and row.matmul_fraction
        }
        if not speeds:
            lines.append(f"own matmul {dtype}: not timed")
            continue
        mean = geometric_mean(speeds.values())
        word = "yes" if mean >= LEAST_SPEED else "NO"
        lines.append(f"own matmul {dtype} >= {LEAST_SPEED} of torch.mm: {word}, {mean:.3f} over {len(speeds)} shapes")
        slow = {name: speed for name, speed in speeds.items() if speed < LEAST_SPEED}
        lines += [f"  slower: {name} {speed:.3f}" for name, speed in sorted(slow.items(), key=lambda each: each[1])]
    return lines


def compile_only(device: torch.device) -> None:
    """Launch what this stage launches, without a look at what comes out."""
    for item in items():
        a, b = (torch.empty(shape, dtype=getattr(torch, item.dtype), device=device) for shape in
            ((item.M, item.K), (item.N, item.K)))  # fmt: skip
        plain(a, b.t())(a.new_empty(item.M, item.N))
