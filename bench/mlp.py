"""Forward and backward of a tensor-parallel MLP with sequence parallelism: ours against torch's own DTensor styles.

y = gelu(gather(x) @ up.T) @ down.T, reduce-scattered; x and y [M / W, D], up [F, D], down [D, F], all gradients. Both
start from the same weights, are checked against the dense MLP in float64, and take turns in the rounds of `timing`.
`local` is a rank's share of the same arithmetic without communication: what both would take if sending cost nothing.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedtp.layers import ParallelMLP
from fusedtp.reference import chunk
from fusedtp.shards import even_sizes

from .intervals import Interval, Sample, ratio
from .timing import Timing, measure

# M, D, F: two sizes of large work, two where the host's share shows.
SIZES = ((2048, 1024, 4096), (4096, 2048, 1024), (256, 512, 2048), (16, 512, 2048))
# The relative error of float32 sums of a few thousand terms through two matmuls, forward and back, with room to spare.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Result:
    """The timings of one size by variant: dtensor, fusedtp, local."""

    M: int
    D: int
    F: int
    world_size: int
    timings: dict[str, Timing]

    def speedup(self, variant: str = "fusedtp") -> Interval:
        """dtensor's time over a variant's, by medians, with the 95 % interval that their rounds leave."""
        return ratio(Sample.of(self.timings["dtensor"]), Sample.of(self.timings[variant]))

    def __str__(self) -> str:
        medians = "  ".join(f"{name} {each.median_ms:.2f}" for name, each in self.timings.items())
        speedup = self.speedup()
        told = "faster" if speedup.low > 1 else "slower" if speedup.high < 1 else "cannot be told apart"
        rounds = self.timings["fusedtp"].rounds
        return (
            f"M, D, F = {self.M}, {self.D}, {self.F}: {medians} ms over {rounds} rounds; speed-up over dtensor "
            f"{speedup}, 95 % interval in brackets: {told}"
        )


def check_size(M: int, D: int, F: int, world_size: int) -> None:
    """ValueError for lengths that torch's styles do not split: they take all shards to be equal."""
    if M % world_size or F % world_size:
        raise ValueError(f"M and F must be multiples of the {world_size} ranks, got {M},{D},{F}")


class Dense(nn.Sequential):
    """The MLP in one process, drawn like ParallelMLP."""

    def __init__(self, D: int, F: int) -> None:
        up, down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)
        super().__init__(OrderedDict(up_proj=up, activation=nn.GELU(), down_proj=down))


def step(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], list[Tensor]]:
    """Forward and backward: y, dx and the gradients of the parameters, of which none is left behind."""
    parameters = list(model.parameters())

    def run() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = model(leaf)
        y.backward(dy)
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        assert leaf.grad is not None
        return [y.detach(), leaf.grad, *(grad for grad in grads if grad is not None)]

    return run


def compare(group: ProcessGroup, M: int, D: int, F: int, seconds: float, schedule: str = "auto") -> Result:
    """Check and time one size on this rank; the same result on every rank. AssertionError for a wrong gradient."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, world_size = group.rank(), group.size()
    torch.manual_seed(0)
    dense = Dense(D, F)
    dtensor = parallelize_module(
        copy.deepcopy(dense),
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)),
        {
            "up_proj": ColwiseParallel(input_layouts=Shard(0)),
            "down_proj": RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    torch.manual_seed(0)
    ours = ParallelMLP(D, F, bias=False, group=group, schedule=schedule)
    random = torch.Generator().manual_seed(1)
    x, dy = torch.randn(M, D, generator=random), torch.randn(M, D, generator=random)
    rows, features = even_sizes(M, world_size), even_sizes(F, world_size)
    mine, dmine = chunk(x, 0, rank, rows).clone(), chunk(dy, 0, rank, rows).clone()
    runners = {
        "dtensor": step(dtensor, mine, dmine),
        "fusedtp": step(ours, mine, dmine),
        "local": step(Dense(D, features[rank]), x, dy),
    }
    y, dx, dup, ddown = step(copy.deepcopy(dense).double(), x.double(), dy.double())()
    expected = [
        chunk(y, 0, rank, rows),
        chunk(dx, 0, rank, rows),
        chunk(dup, 0, rank, features),
        chunk(ddown, 1, rank, features),
    ]
    for name in ("dtensor", "fusedtp"):
        for what, got, want in zip(("y", "dx", "dup", "ddown"), runners[name](), expected, strict=True):
            local = got.to_local() if isinstance(got, DTensor) else got
            error = ((local.double() - want).norm() / want.norm()).item()
            assert error < TOLERANCE, f"{name}: {what} is off by {error:.1e} of its norm at {M}, {D}, {F}"
    return Result(M, D, F, world_size, measure(runners, group, torch.device("cpu"), seconds=seconds))


def rows_of(
    about: Mapping[str, object], timings: Mapping[str, Timing], over: Sequence[str] = ("dtensor",)
) -> list[dict[str, object]]:
    """Tidy rows, one a variant, with what is said `about` all of them, machine, commit and versions.

    speedup_vs_dtensor is a ratio of medians, speedup_low and speedup_high the ends of its 95 % interval; `over` names
    the variants that there is a speed-up over, of which the first one has the interval.
    """
    from .machine import describe
    from .store import cell

    machine, samples = asdict(describe()), {variant: Sample.of(timing) for variant, timing in timings.items()}
    rows = []
    for variant, timing in timings.items():
        found = [ratio(samples[each], samples[variant]) for each in over]
        speedup = {f"speedup_vs_{name}": each.ratio for name, each in zip(over, found, strict=True)}
        speedup |= {"speedup_low": found[0].low, "speedup_high": found[0].high}
        row = {**about, "variant": variant, **asdict(timing), **speedup, "gate": "passed", **machine}
        rows.append({name: cell(value) if isinstance(value, str | tuple) else value for name, value in row.items()})
    return rows


def write(results: Sequence[Result], path: Path) -> None:
    """`rows_of` all sizes."""
    import pandas as pd

    layer = "ParallelMLP, GELU, no bias, sequence-parallel, forward + backward"
    rows = []
    for each in results:
        size = {"M": each.M, "D": each.D, "F": each.F, "world_size": each.world_size, "dtype": "float32"}
        rows += rows_of({"layer": layer, **size}, each.timings)
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)
