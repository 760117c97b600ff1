"""Stage 2: every fused kernel with its signals raised in advance, right, and timed against the own matmul.

What a fused kernel adds to the matmul when nothing blocks should be next to nothing: at most 3 % in time. A kernel that
pushes as well, or stores each tile to all ranks, does more than multiply and has no bound; those that move or add rows
are shown with the bytes a second that they move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from fusedtp.op import MATMUL_REDUCE_SCATTER

from . import gpu_moves as moves
from . import gpu_preset as preset
from .cases import Item
from .gpu_matmul import DTYPES
from .gpu_preset import Preset
from .gpu_rows import Run, found, time_alone
from .rows import Outcome
from .store import Row
from .timing import Verdict

# A fused kernel's time over the own matmul's.
MOST_TIME = 1.03
SECONDS = 0.4

Shape = tuple[int, int, int, int]  # ranks, M, N, K as one rank multiplies them

# MLPs of Llama 3 70B on eight ranks and of 8B on four, at 8192 tokens and at 512.
_UP: tuple[Shape, ...] = ((8, 8192, 7168, 8192), (4, 8192, 7168, 4096), (8, 512, 7168, 8192))
_DOWN: tuple[Shape, ...] = ((8, 8192, 8192, 3584), (4, 8192, 4096, 3584), (8, 512, 8192, 3584))
# What is gathered and summed around them.
_ROWS: tuple[Shape, ...] = ((8, 8192, 8192, 0),)

Make = Callable[..., Preset]

KERNELS: dict[str, tuple[Make, tuple[Shape, ...]]] = {
    "gather rows": (preset.gather, _UP),
    "gather rows, pushing": (functools.partial(preset.gather, pushed=False), _UP),
    "gather rows, copied": (functools.partial(preset.gather, last=False), _UP[:1]),
    "gather rows, through the arena": (functools.partial(preset.gather, in_place=False), _UP[:1]),
    "gather rows transposed": (functools.partial(preset.gather, transposed=True), _UP[:1]),
    "gather contraction": (functools.partial(preset.gather, along=1), _UP[:2]),
    "scatter": (preset.scatter, _DOWN),
    "scatter, turned": (functools.partial(preset.scatter, turned=True), _DOWN[:1]),
    "scatter to all": (functools.partial(preset.scatter, to_all=True), _DOWN[2:]),
}
MOVES: dict[str, tuple[Make, tuple[Shape, ...]]] = {
    "push": (moves.pushes, _ROWS),
    "push a scatter": (functools.partial(moves.pushes, scatter=True), _ROWS),
    "collect pieces": (functools.partial(moves.collects, per_tile=False), _ROWS),
    "collect tiles": (functools.partial(moves.collects, per_tile=True), _ROWS),
    "reduce": (moves.reduces, _ROWS),
    "reduce transposed": (functools.partial(moves.reduces, transposed=True), _ROWS),
    "reduce and broadcast": (functools.partial(moves.reduces, broadcast=True), _ROWS),
    **{f"ring {op}": (functools.partial(moves.rings, op=op), _ROWS)
       for op in ("all_gather", "reduce_scatter", "all_reduce")},
}  # fmt: skip
STEPS = "steps of a host-driven op"


def items(*, emulate: bool = False) -> list[Item]:
    """Every kernel at its shapes in both dtypes; what multiplies first. A dry run has one shape in one dtype."""
    made = []
    for dtype in DTYPES[:1] if emulate else DTYPES:
        for name, (_, shapes) in (KERNELS | MOVES).items():
            for ranks, M, N, K in shapes[:1] if emulate else shapes:
                size = (2, 90, 83, 61 if K else 0) if emulate else (ranks, M, N, K)
                made.append(Item(name, *size[1:], dtype, size[0]))
    return [
        *made,
        *(Item(STEPS, world_size=2 if emulate else ranks, dtype="int32") for ranks in (2, 4)[: 1 if emulate else 2]),
    ]


def build(item: Item, device: torch.device, seed: int = 0) -> Preset:
    """The kernel of an item."""
    if item.op == STEPS:
        return moves.steps(device, item.world_size, MATMUL_REDUCE_SCATTER.name)
    dtype: torch.dtype = getattr(torch, item.dtype)
    if item.op in MOVES:
        return MOVES[item.op][0](device, dtype, item.world_size, item.M, item.N)
    return KERNELS[item.op][0](device, dtype, item.world_size, item.M, item.N, item.K, seed=seed)


def work(item: Item, run: Run) -> list[Outcome]:
    """Check one draw, then time two, or one of what only moves."""
    first = build(item, run.device)
    first.arenas.run(first.launch)
    verdict, plain_verdict = Verdict(*first.check()), Verdict()
    if first.plain is not None and first.check_plain is not None:
        first.plain()
        plain_verdict = Verdict(*first.check_plain())
    draws = [first] if first.plain is None else [first, build(item, run.device, seed=2)]
    for each in draws[1:]:
        each.arenas.run(each.launch)
    calls = {"fused": [each.launch for each in draws]}
    if first.plain is not None:
        calls["own_matmul"] = [each.plain for each in draws if each.plain is not None]
    times = time_alone(calls, run, SECONDS)
    # Whatever was timed has waited for nothing.
    for each in draws:
        each.arenas.run(lambda: None)
    fused = times["fused"].median_ms
    if first.plain is None:
        gbps = first.moved_bytes / fused / 1e6 if first.moved_bytes else None
        return [found("fused", verdict, times["fused"], algbw_gbps=gbps)]
    flops, plain = 2e-9 * item.M * item.N * item.K, times["own_matmul"]
    path, fraction = "" if first.bounded else "does more than the matmul", plain.median_ms / fused
    return [
        found("fused", verdict, times["fused"], path, tflops=flops / fused, matmul_fraction=fraction),
        found("own_matmul", plain_verdict, plain, tflops=flops / plain.median_ms),
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Whether every fused kernel that only multiplies takes hardly more than the matmul, and which do not."""
    held = [row for row in rows if row.variant == "fused" and row.passed and row.matmul_fraction and row.op in KERNELS]
    times = {
        f"{row.op} {row.M}x{row.N}x{row.K} {row.dtype} on {row.world_size}": 1 / (row.matmul_fraction or 1)
        for row in held
        if "does more" not in row.path
    }
    if not times:
        return ["fused, signals preset: not timed"]
    slow = {name: time for name, time in times.items() if time > MOST_TIME}
    word = "NO" if slow else "yes"
    lines = [f"fused, signals preset <= {MOST_TIME} x own matmul: {word}, {len(times) - len(slow)} of {len(times)}"]
    lines += [f"  slower: {name} {time:.3f} x" for name, time in sorted(slow.items(), key=lambda each: -each[1])]
    return lines


def compile_only(device: torch.device) -> None:
    """Launch what this stage launches, without a look at what comes out."""
    for item in items():
        each = build(item, device)
        each.launch()
        if each.plain is not None:
            each.plain()
