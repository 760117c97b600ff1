"""q, k and v at one gather, beside torch's DTensor styles: python -P -m fusedtp.bench.grouped --out results

x [M / W, H] is gathered and multiplied by three weights, [N_i, H] split by rows; forward and backward on CPU ranks, all
gradients, in the rounds of `timing`:

    dtensor        ColwiseParallel(input_layouts=Shard(0)) on each of the three: each gathers x, and scatters its dx
    dtensor_once   PrepareModuleInput gathers x for all three, whose gradients are added before they are scattered
    fusedtp        a FusedGroup of the three: one gather, one scatter, inside the matmuls
    concatenated   FusedColwiseParallel on one linear with the rows of all three
    local          a rank's share of the same matmuls without communication: what all would take if sending cost nothing

dtensor / local is the most that any schedule can gain here: a speed-up above it is out of reach.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedtp import FusedColwiseParallel, FusedGroup
from fusedtp.bench.machine import describe
from fusedtp.bench.mlp import TOLERANCE, rows_of, step
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import Timing, measure
from fusedtp.reference import chunk
from fusedtp.shards import even_sizes

# M, H and the rows of q, k and v: as many of each, and grouped queries.
SIZES = ((2048, 512, (512, 512, 512)), (2048, 512, (512, 128, 128)), (4096, 1024, (1024, 1024, 1024)),
         (4096, 1024, (1024, 256, 256)))  # fmt: skip
NAMES = ("q", "k", "v")


class Projections(nn.Module):
    """q, k and v of one input, side by side."""

    def __init__(self, num_in: int, widths: Sequence[int]) -> None:
        super().__init__()
        for name, width in zip(NAMES, widths, strict=True):
            self.add_module(name, nn.Linear(num_in, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in NAMES], -1)


def compare(group: ProcessGroup, M: int, num_in: int, widths: Sequence[int], seconds: float) -> dict[str, Timing]:
    """Check and time one size on this rank: by variant. AssertionError for a wrong result or gradient."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, parallelize_module

    rank, world_size = group.rank(), group.size()
    torch.manual_seed(0)
    dense = Projections(num_in, widths)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    theirs: dict[str, ParallelStyle] = {name: ColwiseParallel(input_layouts=Shard(0)) for name in NAMES}
    gathers = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    once = parallelize_module(copy.deepcopy(dense), mesh, gathers)
    rows = even_sizes(M, world_size)

    def own(wholes: Sequence[Tensor], dim: int = 0, which: int = rank) -> list[Tensor]:
        # A rank's part of each of q, k and v.
        return [chunk(each, dim, which, even_sizes(each.shape[dim], world_size)) for each in wholes]

    weights = [getattr(dense, name).weight.detach() for name in NAMES]
    # Rank by rank, so that a rank's rows are its parts of q, k and v.
    one = nn.Linear(num_in, sum(widths), bias=False)
    one.weight = nn.Parameter(torch.cat([part for which in range(world_size) for part in own(weights, 0, which)]))
    local = Projections(num_in, [part.shape[0] for part in own(weights)])
    for name, part in zip(NAMES, own(weights), strict=True):
        getattr(local, name).weight = nn.Parameter(part.clone())
    models: dict[str, nn.Module] = {
        "dtensor": parallelize_module(copy.deepcopy(dense), mesh, theirs),
        "dtensor_once": parallelize_module(once, mesh, {name: ColwiseParallel() for name in NAMES}),
        "fusedtp": parallelize_module(copy.deepcopy(dense), mesh, FusedGroup(*NAMES, input_layouts=Shard(0))),
        "concatenated": parallelize_module(one, mesh, FusedColwiseParallel(input_layouts=Shard(0))),
    }
    random = torch.Generator().manual_seed(1)
    x = torch.randn(M, num_in, generator=random)
    dys = [torch.randn(M, width, generator=random) for width in widths]
    mine, dy = chunk(x, 0, rank, rows).clone(), torch.cat(own(dys, 1), 1)
    runners = {name: step(model, mine, dy) for name, model in models.items()} | {"local": step(local, x, dy)}
    y, dx, *dws = step(copy.deepcopy(dense).double(), x.double(), torch.cat(dys, 1).double())()
    want = [torch.cat(own(y.split(list(widths), 1), 1), 1), chunk(dx, 0, rank, rows), torch.cat(own(dws))]
    for name in models:
        outs = [out.to_local() if isinstance(out, DTensor) else out for out in runners[name]()]
        for what, got, expected in zip(("y", "dx", "dw"), (*outs[:2], torch.cat(outs[2:])), want, strict=True):
            error = ((got.double() - expected).norm() / expected.norm()).item()
            assert error < TOLERANCE, f"{name}: {what} is off by {error:.1e} of its norm at {M}, {num_in}, {widths}"
    return measure(runners, group, torch.device("cpu"), seconds=seconds)


def size(text: str) -> tuple[int, int, tuple[int, ...]]:
    """M, H and the rows of q, k and v; ValueError for what two ranks cannot split alike."""
    M, num_in, *widths = (int(part) for part in text.split(","))
    if len(widths) != len(NAMES) or min(M, num_in, *widths) < 1 or any(each % 2 for each in (M, *widths)):
        raise ValueError(text)
    return M, num_in, tuple(widths)


def main() -> None:
    """Time every size on two CPU ranks, and keep the rows in grouped.csv."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows, one folder a machine")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the rounds of one size")
    parser.add_argument("--size", action="append", type=size, help="M,H,Nq,Nk,Nv, multiples of 2; may be repeated")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    with RankPool(2, timeout=300) as pool:
        for M, num_in, widths in given.size or SIZES:
            lengths = {"M": M, "H": num_in, "widths": widths, "world_size": 2, "dtype": "float32"}
            for timings in (pool.run_again(compare, M, num_in, widths, given.seconds) or ())[:1]:
                rows += rows_of({"layer": "q, k, v, forward + backward", **lengths}, timings)
    frame, path = pd.DataFrame(rows), given.out / describe().name / "grouped.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)
    shown = ["M", "H", "widths", "variant", "median_ms", "speedup_vs_dtensor", "speedup_low", "speedup_high"]
    print(frame[shown].to_string(index=False))


if __name__ == "__main__":
    main()
