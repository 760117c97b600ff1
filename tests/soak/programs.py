"""Random programs, which test every promise at once: the steps of all ranks of a job.

A program is a list of steps that a seed and a number alone decide, so every rank draws the same program. Most steps are
calls on one of several groups, by any schedule, at any sizes, with or without gradients. Other steps give memory back,
destroy a group by torch alone, set timeouts in another thread, or run a backward pass later. In some steps one rank
goes wrong. `performing` runs programs and checks their outcome.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fusedtp.shards import even_sizes

from .mixed import DTYPES, MATMULS, WEIGHTS, Call, draw

STEPS = 40

# The groups of a program, by number of ranks. Groups of one line are made and used like those of a mesh axis. The first
# is torch's own group, which no program destroys.
AXES: dict[int, tuple[tuple[tuple[int, ...], ...], ...]] = {
    2: (((0, 1),), ((0, 1),), ((0,), (1,))),
    3: (((0, 1, 2),), ((0, 1, 2),), ((0, 1),), ((1, 2),)),
    4: (((0, 1, 2, 3),), ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2),), ((1, 2, 3),)),
}
MODES = ("grad", "grad", "no_grad", "inference", "made in inference")


@dataclass(frozen=True)
class Step:
    """One step of an axis's groups. Rank `rank` of each group goes wrong at `where`: a line, seconds, or a limit."""

    kind: str
    axis: int
    call: Call
    mode: str = "grad"
    rank: int = 0
    where: float = 0.0
    # The call of the rank that disagrees.
    other: Call | None = None
    # Give the workspace back first, so that the call makes it.
    fresh: bool = False


@dataclass(frozen=True)
class _Drawing:
    # Inputs for drawing a step: the axis, and the number of ranks of its groups.
    source: random.Random
    axis: int
    world_size: int
    weights: Mapping[str, float]


def _quiet(source: random.Random, world_size: int) -> Call:
    # A simple call in which every rank has a part.
    sizes = tuple(even_sizes(world_size * source.randint(1, 4), world_size) for _ in range(3))
    return Call("all_gather", "decomposed", "auto", "float32", 0, sizes, False, False, source.getrandbits(31))  # type: ignore[arg-type]


def probe(number: int, world_size: int) -> Call:
    """Return the call that a rank makes to learn the outcome of the last call."""
    return _quiet(random.Random(number), world_size)


def grows(source: random.Random, world_size: int) -> Call:
    """Return a call that a new workspace is too small for, and perhaps a grown one too."""
    rows, columns = source.randint(120, 500), source.randint(150, 600)
    sizes = (even_sizes(rows, world_size), even_sizes(columns, world_size), even_sizes(8, world_size))
    return replace(_quiet(source, world_size), op=source.choice(("all_gather", "all_reduce")), sizes=sizes)


def _call(d: _Drawing) -> Step:
    call, mode = draw(d.source, d.world_size, d.weights), d.source.choice(MODES)
    return Step("call", d.axis, replace(call, backward=call.backward and mode == "grad"), mode)


def _kept(d: _Drawing) -> Step:
    # The backward pass comes later.
    return Step("kept", d.axis, replace(draw(d.source, d.world_size, d.weights), backward=True))


def _growth(d: _Drawing) -> Step:
    return Step("growth", d.axis, grows(d.source, d.world_size), d.source.choice(MODES))


def _plain(kind: str) -> Callable[[_Drawing], Step]:
    return lambda d: Step(kind, d.axis, _quiet(d.source, d.world_size), where=d.source.random())


def _driven(d: _Drawing, *, fused: float = 0.0) -> Call:
    # A call over shared memory, in which something will go wrong; a third of these calls grow the workspace.
    if d.source.random() < 0.3:
        return grows(d.source, d.world_size)
    return draw(d.source, d.world_size, {"decomposed": 1.0, "fused": fused})


def _struck(kind: str, where: Callable[[random.Random], float]) -> Callable[[_Drawing], Step]:
    def drawn(d: _Drawing) -> Step:
        source, at_all = d.source, 0.05 if kind == "late" and "fused" in d.weights else 0.0
        call, fresh = _driven(d, fused=at_all), source.random() < 0.4
        if kind == "limit":
            call = grows(source, d.world_size)
        return Step(kind, d.axis, call, rank=source.randrange(d.world_size), where=where(source), fresh=fresh)

    return drawn


def _other(source: random.Random, call: Call) -> Call:
    # The call that one rank makes instead.
    what = source.choice(("dtype", "op", "sizes", "schedule"))
    if what == "dtype":
        return replace(call, dtype=source.choice([each for each in DTYPES["fused"] if each != call.dtype]))
    if what == "op":
        # Only these ops: they differ by name even if they gather the same.
        op = source.choice([each for each in ("all_gather", "all_reduce", "linear_all_reduce") if each != call.op])
        return replace(call, op=op, algorithm="auto", dim=0, bias=call.bias and op in MATMULS)
    if what == "schedule" and call.dtype in DTYPES["fused"]:
        schedule = "fused" if call.schedule == "decomposed" else "decomposed"
        return replace(call, schedule=schedule, algorithm="auto")
    m, n, k = (tuple(length + 1 for length in lengths) for lengths in call.sizes)
    return replace(call, sizes=(m, n, k))


def _differs(d: _Drawing) -> Step:
    call = replace(_driven(d, fused=0.05), backward=False)
    other, rank = _other(d.source, call), d.source.randrange(d.world_size)
    return Step("differs", d.axis, call, rank=rank, other=other, fresh=d.source.random() < 0.2)


# The weight of each kind, and how it is drawn. In WRONG something goes wrong, which takes two ranks.
STEADY: dict[str, tuple[float, Callable[[_Drawing], Step]]] = {
    "call": (70.0, _call),
    "kept": (5.0, _kept),
    "backward": (6.0, _plain("backward")),
    "growth": (5.0, _growth),
    "destroy": (2.0, _plain("destroy")),
    "torch": (0.7, _plain("torch")),
    "thread": (0.7, _plain("thread")),
}
WRONG: dict[str, tuple[float, Callable[[_Drawing], Step]]] = {
    "differs": (3.0, _differs),
    "line": (4.0, _struck("line", lambda source: source.randint(1, source.choice((200, 500, 1500))))),
    "signal": (4.0, _struck("signal", lambda source: 10.0 ** source.uniform(-4.5, -1.5))),
    "late": (1.0, _struck("late", lambda source: source.choice((0.05, 0.15, 0.3, 0.6)))),
    "limit": (1.0, _struck("limit", lambda source: source.choice((0, 1)))),
}
# A pause stops all ranks for longer than a timeout, so it takes that long.
SLOW: dict[str, tuple[float, Callable[[_Drawing], Step]]] = {"pause": (0.1, _struck("pause", lambda source: 0.0))}


def program(
    seed: int,
    number: int,
    world_size: int,
    *,
    weights: Mapping[str, float] = WEIGHTS,
    slow: bool = False,
    steady: bool = False,
) -> list[Step]:
    """Return program `number` of a seed. weights: of schedules; slow: also pause all ranks; steady: no rank fails."""
    source, steps = random.Random(f"{seed}/{number}"), []
    for _ in range(STEPS):
        axis = source.randrange(len(AXES[world_size]))
        ranks = len(AXES[world_size][axis][0])
        may_go_wrong = ranks > 1 and not steady
        kinds = {**STEADY, **(WRONG if may_go_wrong else {}), **(SLOW if slow and may_go_wrong else {})}
        (kind,) = source.choices(list(kinds), [weight for weight, _ in kinds.values()])
        steps.append(kinds[kind][1](_Drawing(source, axis, ranks, weights)))
    return steps
