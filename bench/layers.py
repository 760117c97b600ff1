"""Layers on CPU ranks beside torch's DTensor styles, `fusedtp mlp | grouped | decode`, and a call's cost on its host.

Every variant of a layer starts from the same weights, is checked against the dense layer in float64, and takes its turn
in the rounds of `timing`. All is float32, host time included. `local` is a rank's share of the arithmetic without
communication, a lower bound for all variants. `overhead` gives the microseconds that a small call takes beyond its
work.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import FusedColwiseParallel, FusedGroup, trace
from fusedtp.layers import ParallelMLP
from fusedtp.reference import chunk
from fusedtp.shards import even_sizes

from .intervals import Timing, careful, ratio
from .machine import describe
from .operands import finished
from .ranks import RankPool
from .store import cell, origin
from .tables import CellTable
from .timing import measure

# Relative error of float32 sums of a few thousand terms through two matmuls, forward and backward, with a margin.
TOLERANCE = 1e-4
EPS = 1e-6

Step: TypeAlias = Callable[[], Sequence[Tensor]]
# Closures by variant, and this rank's part of each result by name; surplus results are concatenated in the last part.
LayerRuns: TypeAlias = tuple[dict[str, Step], dict[str, Tensor]]


def step(model: nn.Module, x: Tensor, dy: Tensor) -> Step:
    """Return the closure of forward and backward: y, dx and the gradients of the parameters, which it resets."""
    parameters = list(model.parameters())

    def run() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = model(leaf)
        y.backward(dy)
        grads = [leaf.grad, *(parameter.grad for parameter in parameters)]
        for parameter in parameters:
            parameter.grad = None
        return [y.detach(), *(grad for grad in grads if grad is not None)]

    return run


def _mesh(group: ProcessGroup) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


class Dense(nn.Sequential):
    """The MLP in one process, drawn like ParallelMLP."""

    def __init__(self, num_in: int, hidden: int) -> None:
        up, down = nn.Linear(num_in, hidden, bias=False), nn.Linear(hidden, num_in, bias=False)
        super().__init__(OrderedDict(up_proj=up, activation=nn.GELU(), down_proj=down))


def mlp(group: ProcessGroup, schedule: str, M: int, num_in: int, hidden: int) -> LayerRuns:
    """Return a tensor-parallel MLP with sequence parallelism, y = gelu(gather(x) @ up.T) @ down.T, reduce-scattered.

    x and y [M / W, D], up [F, D], down [D, F]; forward and backward with all gradients.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, world_size = group.rank(), group.size()
    torch.manual_seed(0)
    dense = Dense(num_in, hidden)
    styles = {
        "up_proj": ColwiseParallel(input_layouts=Shard(0)), "down_proj": RowwiseParallel(output_layouts=Shard(0))
    }  # fmt: skip
    dtensor = parallelize_module(copy.deepcopy(dense), _mesh(group), styles)
    torch.manual_seed(0)
    ours = ParallelMLP(num_in, hidden, bias=False, group=group, schedule=schedule)
    random = torch.Generator().manual_seed(1)
    x, dy = torch.randn(M, num_in, generator=random), torch.randn(M, num_in, generator=random)
    rows, features = (partial(chunk, rank=rank, sizes=even_sizes(length, world_size)) for length in (M, hidden))
    mine, dmine = rows(x, 0).clone(), rows(dy, 0).clone()
    local = Dense(num_in, even_sizes(hidden, world_size)[rank])
    y, dx, dup, ddown = step(dense.double(), x.double(), dy.double())()
    runners = {"dtensor": step(dtensor, mine, dmine), "fusedtp": step(ours, mine, dmine), "local": step(local, x, dy)}
    return runners, {"y": rows(y, 0), "dx": rows(dx, 0), "dup": features(dup, 0), "ddown": features(ddown, 1)}


class Projections(nn.Module):
    """q, k and v of one input, side by side."""

    def __init__(self, num_in: int, widths: Sequence[int]) -> None:
        super().__init__()
        for name, width in zip("qkv", widths, strict=True):
            self.add_module(name, nn.Linear(num_in, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in "qkv"], -1)


def grouped(group: ProcessGroup, schedule: str, M: int, num_in: int, *widths: int) -> LayerRuns:
    """Return q, k and v of one input, x [M / W, H] and three weights [N_i, H] split by rows; forward and backward.

    - dtensor: ColwiseParallel(input_layouts=Shard(0)) on each linear, which gathers x and scatters its dx.
    - dtensor_once: PrepareModuleInput gathers x for all three, whose gradients are added before they are scattered.
    - fusedtp: a FusedGroup of the three, one gather and one scatter inside the matmuls.
    - concatenated: FusedColwiseParallel on one linear with the rows of all three.

    dtensor / local is an upper bound of the speed-up.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

    rank, world_size, mesh = group.rank(), group.size(), _mesh(group)
    torch.manual_seed(0)
    dense = Projections(num_in, widths)
    gathers = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    once = parallelize_module(copy.deepcopy(dense), mesh, gathers)

    def own(wholes: Sequence[Tensor], dim: int = 0, which: int = rank) -> list[Tensor]:
        # Return a rank's part of q, k and v.
        return [chunk(each, dim, which, even_sizes(each.shape[dim], world_size)) for each in wholes]

    weights = [getattr(dense, name).weight.detach() for name in "qkv"]
    # Concatenate rank by rank, so that a rank's rows are its parts of q, k and v.
    one = nn.Linear(num_in, sum(widths), bias=False)
    one.weight = nn.Parameter(torch.cat([part for which in range(world_size) for part in own(weights, 0, which)]))
    local = Projections(num_in, [len(part) for part in own(weights)])
    options: dict[str, Any] = {"input_layouts": Shard(0), "schedule": schedule}
    models: dict[str, nn.Module] = {
        "dtensor": parallelize_module(
            copy.deepcopy(dense), mesh, {name: ColwiseParallel(input_layouts=Shard(0)) for name in "qkv"}
        ),
        "dtensor_once": parallelize_module(once, mesh, {name: ColwiseParallel() for name in "qkv"}),
        "fusedtp": parallelize_module(copy.deepcopy(dense), mesh, FusedGroup(*"qkv", **options)),
        "concatenated": parallelize_module(one, mesh, FusedColwiseParallel(**options)),
    }
    random = torch.Generator().manual_seed(1)
    x = torch.randn(M, num_in, generator=random)
    dys = [torch.randn(M, width, generator=random) for width in widths]
    (mine,), dy = own([x]), torch.cat(own(dys, 1), 1)
    runners = {name: step(model, mine.clone(), dy) for name, model in models.items()} | {"local": step(local, x, dy)}
    y, dx, *dws = step(dense.double(), x.double(), torch.cat(dys, 1).double())()
    return runners, {"y": torch.cat(own(y.split(list(widths), 1), 1), 1), "dx": own([dx])[0], "dw": torch.cat(own(dws))}


def decode(group: ProcessGroup, schedule: str, M: int, N: int, K: int) -> LayerRuns:
    """Return y = all_reduce(x @ w.T) + residual and its norm, x [M, K / W], w [N, K / W]; forward alone.

    A decoder runs this after its attention and its MLP, for every token.

    - torch: F.linear, dist.all_reduce by gloo, +=, F.rms_norm.
    - dtensor: RowwiseParallel with a replicated output, +, nn.RMSNorm.
    - fusedtp: linear_all_reduce(x, w, residual=.., norm_weight=..).
    """
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    random = torch.Generator().manual_seed(0)
    whole, residual = torch.randn(M, K, generator=random), torch.randn(M, N, generator=random)
    scale = torch.rand(N, generator=random)
    linear = nn.Linear(K, N, bias=False)
    linear.weight = nn.Parameter(torch.randn(N, K, generator=random) / K**0.5)
    features = even_sizes(K, group.size())
    x, w = (chunk(each.detach(), 1, group.rank(), features).clone() for each in (whole, linear.weight))
    y = F.linear(whole.double(), linear.weight.detach().double()) + residual.double()
    split, norm = parallelize_module(linear, _mesh(group), RowwiseParallel()), nn.RMSNorm(N, EPS)
    norm.weight = nn.Parameter(scale)

    def by_hand(reduces: bool = True) -> Sequence[Tensor]:
        y = F.linear(x, w)
        if reduces:
            dist.all_reduce(y, group=group)
        y += residual
        return F.rms_norm(y, (N,), scale, EPS), y

    def by_dtensor() -> Sequence[Tensor]:
        y = split(x) + residual
        return norm(y), y

    def ours() -> Sequence[Tensor]:
        return fusedtp.linear_all_reduce(
            x, w, group=group, schedule=schedule, residual=residual, norm_weight=scale, norm_eps=EPS
        )  # fmt: skip

    runners: dict[str, Step] = {
        "torch": by_hand,
        "dtensor": by_dtensor,
        "fusedtp": ours,
        "local": partial(by_hand, False),
    }
    return runners, {"normed": F.rms_norm(y, (N,), scale.double(), EPS), "y": y}


@dataclass(frozen=True)
class Suite:
    """One layer, and its sizes by default.

    - columns: names of a size's numbers in rows; the last takes the rest.
    - split: indices of the numbers that ranks share evenly.
    - over: baselines of the speed-ups, the fastest with its interval.
    - variants: what others are, in words.
    - calls: calls in a row that are timed together, from a barrier on.
    """

    make: Callable[..., LayerRuns]
    layer: str
    columns: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    split: tuple[int, ...]
    world_sizes: tuple[int, ...] = (2,)
    over: tuple[str, ...] = ("dtensor",)
    seconds: float = 10.0
    has_backward: bool = True
    variants: str = ""
    calls: int = 1

    def check_size(self, size: Sequence[int], world_size: int) -> None:
        """Raise ValueError for lengths that torch's styles do not split: they need equal shards."""
        told = ",".join(map(str, size))
        if world_size < 2:
            raise ValueError(f"a layer is split over two ranks or more, got {world_size}")
        if len(size) != len(self.sizes[0]):
            raise ValueError(f"a size is {','.join(self.columns).replace('widths', 'Nq,Nk,Nv')}, got {told}")
        if any(size[place] % world_size for place in self.split):
            raise ValueError(f"lengths that are split must be multiples of the {world_size} ranks, got {told}")


SUITES = {
    # Two large sizes, and two small ones that show the host's share.
    "mlp": Suite(
        mlp, "ParallelMLP, GELU, no bias, sequence-parallel, forward + backward", ("M", "D", "F"),
        ((2048, 1024, 4096), (4096, 2048, 1024), (256, 512, 2048), (16, 512, 2048)), (0, 2),
    ),
    # Equal numbers of heads, and grouped queries.
    "grouped": Suite(
        grouped, "q, k, v, forward + backward", ("M", "H", "widths"),
        ((2048, 512, 512, 512, 512), (2048, 512, 512, 128, 128), (4096, 1024, 1024, 1024, 1024),
         (4096, 1024, 1024, 256, 256)), (0, 2, 3, 4), seconds=20.0,
        variants="dtensor_once: torch's styles, gathering once. concatenated: q, k, v as one linear. ",
    ),
    # N, K: an output projection, and the second linear of an MLP.
    "decode": Suite(
        decode, "linear, all-reduce, residual, RMSNorm; forward", ("M", "N", "K"),
        tuple((M, N, K) for N, K in ((1024, 1024), (1024, 2816), (2048, 2048)) for M in (1, 4, 16, 64)), (2,), (2, 4),
        ("dtensor", "torch"), 6.0, False,
        "torch: F.linear, all_reduce, +=, F.rms_norm. Times are of one of 8 calls in a row, as a decoder makes them. ",
        calls=8,
    ),
}  # fmt: skip


def compare(group: ProcessGroup, name: str, size: Sequence[int], seconds: float) -> dict[str, Timing]:
    """Check one size on this rank, and return timings by variant. AssertionError for a wrong result or gradient."""
    suite = SUITES[name]
    runners, expected = suite.make(group, "auto", *size)
    with torch.inference_mode(not suite.has_backward):
        for variant in runners.keys() - {"local"}:
            outs = list(finished(runners[variant]()))
            outs[len(expected) - 1 :] = [torch.cat(outs[len(expected) - 1 :])]
            for (what, want), got in zip(expected.items(), outs, strict=True):
                error = ((got.double() - want).norm() / want.norm()).item()
                assert error < TOLERANCE, f"{variant}: {what} is off by {error:.1e} of its norm at {size}"
        rows = {name: partial(_in_a_row, run, suite.calls) for name, run in runners.items()}
        timings = measure(rows, group, torch.device("cpu"), seconds=seconds)
    return {name: Timing.of([ms / suite.calls for ms in timing.rounds_ms]) for name, timing in timings.items()}


def _in_a_row(run: Step, calls: int) -> None:
    # A call's results are there before the next call, as if a layer had used them.
    for _ in range(calls):
        finished(run())


def table(suite: Suite, frame: pd.DataFrame) -> CellTable:
    """Return the medians of every size, fusedtp's speed-ups, and the least one's interval with a verdict."""
    lines = []
    for (*size, ranks), part in frame.groupby([*suite.columns, "world_size"], sort=False):
        ours = part[part.variant == "fusedtp"].iloc[0]
        low, high = ours[["speedup_low", "speedup_high"]]
        verdict = "faster" if low > 1 else "slower" if high < 1 else "no difference"
        lines.append({
            " x ".join(suite.columns): " x ".join(map(str, size)), "ranks": ranks,
            **{f"{name}\nms": ms for name, ms in zip(part.variant, part.median_ms, strict=True)},
            **{f"{name}\nover": ours[f"speedup_vs_{name}"] for name in suite.over[::-1]},
            "95 %\ninterval": f"{low:.2f}-{high:.2f}",
            f"against\n{suite.over[0] if len(suite.over) == 1 else 'fastest'}": verdict,
        })  # fmt: skip
    return CellTable.of("layers", suite.layer, lines, optional=("concatenated", "dtensor_once", "local"))


def warnings(suite: Suite, frame: pd.DataFrame) -> str:
    """Return `careful` of the frame's rounds."""
    groups = [part for _, part in frame.groupby([*suite.columns, "world_size"], sort=False)]
    return careful([Timing.of([*map(float, text.split())]) for text in part["rounds_ms"]] for part in groups)


def rows_of(suite: Suite, size: Sequence[int], world_size: int, timings: Mapping[str, Timing]) -> list[dict[str, Any]]:
    """Return tidy rows, one a variant, with machine, commit and versions."""
    last = len(suite.columns) - 1
    lengths = (*size[:last], size[last] if len(size) == last + 1 else " ".join(map(str, size[last:])))
    about = {"layer": suite.layer, **dict(zip(suite.columns, lengths, strict=True)), "world_size": world_size}
    rows, shared = [], origin(describe(), suite.make.__name__)
    for variant, timing in timings.items():
        found = {name: ratio(timings[name], timing) for name in suite.over}
        fastest = min(found.values(), key=lambda each: each.ratio)
        speedup = {f"speedup_vs_{name}": each.ratio for name, each in found.items()}
        speedup |= {"speedup_low": fastest.low, "speedup_high": fastest.high}
        rounds = {name: cell(getattr(timing, name)) for name in ("rounds_ms", "launches")}
        rows.append({
            **about, "dtype": "float32", "variant": variant, **asdict(timing), **rounds, **speedup, "gate": "passed",
            **shared,
        })  # fmt: skip
    return rows


def run(
    name: str, world_sizes: Sequence[int], sizes: Sequence[Sequence[int]], seconds: float,
    said: Callable[[str], object], done: Callable[[], object] = lambda: None,
) -> pd.DataFrame:  # fmt: skip
    """Time every size on ranks started here. Return the rows, without those of sizes whose ranks died.

    `said` is called for deaths of ranks, `done` after each size.
    """
    suite, rows = SUITES[name], []
    for world_size in world_sizes:
        with RankPool(world_size, timeout=300) as pool:
            for size in dict.fromkeys(sizes):
                for timings in (pool.run_again(compare, name, size, seconds, told=said) or ())[:1]:
                    rows += rows_of(suite, size, world_size, timings)
                done()
    return pd.DataFrame(rows)


ROWS, FEATURES, CALLS, BATCH = 8, 64, 200, 10


def _us(call: Callable[[], object], times: int = CALLS) -> float:
    # Return the microseconds of a call.
    begin = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - begin) / times / 1e3


def time_overhead(group: ProcessGroup, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return by direction and round the microseconds of `all_gather_linear` beyond its work, and of F.linear.

    On one rank the overhead is the time beyond F.linear, in short batches in turn, as one batch may take many times as
    long on a busy machine. On more ranks it is the time outside of spans (`fusedtp.trace`), measured in separate calls
    right before, as recording takes time. Backward includes torch's autograd engine, like F.linear of the whole rows.
    """
    schedule = "decomposed" if group.size() > 1 else "auto"
    x, weight = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(FEATURES, FEATURES, requires_grad=True)
    out = torch.randn(ROWS * group.size(), FEATURES)
    whole = torch.randn(ROWS * group.size(), FEATURES, requires_grad=True)

    def ours() -> Any:
        return fusedtp.all_gather_linear(x, weight, group=group, schedule=schedule)

    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (ours, lambda: F.linear(whole, weight)),
        "both": (lambda: ours().backward(out), lambda: F.linear(whole, weight).backward(out)),
    }
    found: dict[str, list[tuple[float, float]]] = {direction: [] for direction in calls}
    for turn in range(rounds + 1):
        for direction, (call, linear) in calls.items():
            if group.size() == 1:
                pairs = [(_us(linear, BATCH), _us(call, BATCH)) for _ in range(CALLS // BATCH)]
                linear_us = statistics.median(its for its, _ in pairs)
                each = statistics.median(ours - its for its, ours in pairs), linear_us
            else:
                linear_us = _us(linear)
                with trace.recording() as spans:
                    _us(call)
                inside = sum(span.end_ns - span.begin_ns for span in spans) / CALLS / 1e3
                each = _us(call) - inside, linear_us
            if turn:
                found[direction].append(each)
    return found


def overhead(out: Path, rounds: int, done: Callable[[], object] = lambda: None) -> pd.DataFrame:
    """Append a row for each number of ranks and direction: medians and quartiles of the slowest rank's time.

    `done` is called after each number of ranks.
    """
    machine, rows = describe(), []
    with RankPool(2) as pool:
        for world_size in (1, 2):
            replies = pool.run(time_overhead, rounds, world_size=world_size)
            for direction in replies[0]:
                slowest = [max(each) for each in zip(*(reply[direction] for reply in replies), strict=True)]
                quarters = statistics.quantiles([ours for ours, _ in slowest], n=4)
                linear_us = statistics.median(its for _, its in slowest)
                rows.append({
                    **origin(machine), "world_size": world_size, "direction": direction,
                    "rows": ROWS, "features": FEATURES,
                    "overhead_us": round(quarters[1], 1), "q1_us": round(quarters[0], 1),
                    "q3_us": round(quarters[2], 1), "linear_us": round(linear_us, 1),
                })  # fmt: skip
            done()
    frame = pd.DataFrame(rows)
    # Rows of an older file may have fewer columns.
    before = [pd.read_csv(out, keep_default_na=False, dtype=str)] if out.exists() else []
    pd.concat([*before, frame]).to_csv(out, index=False)
    return frame


def overhead_table(frame: pd.DataFrame) -> CellTable:
    """Return the table of a call's overhead."""
    columns = {"world_size": "ranks", "direction": "direction", "overhead_us": "overhead\nus", "q1_us": "25 %\nus",
               "q3_us": "75 %\nus", "linear_us": "F.linear\nus"}  # fmt: skip
    title = f"A call less its matmul, copies and waits, {ROWS} x {FEATURES} a rank"
    return CellTable.of("overhead", title, frame[list(columns)].rename(columns=columns))
