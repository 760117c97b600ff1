"""Few tokens: matmul + all-reduce + residual + RMSNorm on CPU ranks: python -P -m fusedtp.bench.decode --out results

What a decoder does after its attention and its MLP for every token that it makes: y = all_reduce(x @ w.T) + residual,
and its norm; x [M, K / W], w [N, K / W], float32, without a gradient, host time included, in the rounds of `timing`:

    torch      F.linear, dist.all_reduce by gloo, +=, F.rms_norm
    dtensor    RowwiseParallel with a replicated output, +, nn.RMSNorm
    fusedtp    linear_all_reduce(x, w, residual=.., norm_weight=..)
    local      the same without the all-reduce: what all would take if sending cost nothing
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp.bench.generated import rewrite
from fusedtp.bench.machine import describe
from fusedtp.bench.mlp import TOLERANCE, rows_of
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import Timing, measure
from fusedtp.reference import chunk
from fusedtp.shards import even_sizes

TOKENS = (1, 4, 16, 64)
# N, K: an output projection, and the second linear of an MLP.
SHAPES = ((1024, 1024), (1024, 2816), (2048, 2048))
RANKS = (2, 4)
EPS = 1e-6


def compare(group: ProcessGroup, M: int, N: int, K: int, seconds: float, schedule: str = "auto") -> dict[str, Timing]:
    """Check and time one size on this rank: by variant. AssertionError for a wrong result."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    random = torch.Generator().manual_seed(0)
    whole, residual = torch.randn(M, K, generator=random), torch.randn(M, N, generator=random)
    scale = torch.rand(N, generator=random)
    linear = nn.Linear(K, N, bias=False)
    linear.weight = nn.Parameter(torch.randn(N, K, generator=random) / K**0.5)
    features = even_sizes(K, group.size())
    x, w = (chunk(each.detach(), 1, group.rank(), features).clone() for each in (whole, linear.weight))
    y = F.linear(whole.double(), linear.weight.detach().double()) + residual.double()
    expected = F.rms_norm(y, (N,), scale.double(), EPS), y
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    split, norm = parallelize_module(linear, mesh, RowwiseParallel()), nn.RMSNorm(N, EPS)
    norm.weight = nn.Parameter(scale)

    def by_hand() -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        dist.all_reduce(y, group=group)
        y += residual
        return F.rms_norm(y, (N,), scale, EPS), y

    def by_dtensor() -> tuple[Tensor, Tensor]:
        y = split(x) + residual
        return norm(y), y

    def ours() -> tuple[Tensor, Tensor]:
        return fusedtp.linear_all_reduce(
            x, w, group=group, schedule=schedule, residual=residual, norm_weight=scale, norm_eps=EPS
        )  # fmt: skip

    def local() -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        y += residual
        return F.rms_norm(y, (N,), scale, EPS), y

    runners: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "torch": by_hand, "dtensor": by_dtensor, "fusedtp": ours, "local": local
    }  # fmt: skip
    with torch.inference_mode():
        for name in ("torch", "dtensor", "fusedtp"):
            for what, got, want in zip(("normed", "y"), runners[name](), expected, strict=True):
                error = ((got.double() - want).norm() / want.norm()).item()
                assert error < TOLERANCE, f"{name}: {what} is off by {error:.1e} of its norm at {M}, {N}, {K}"
        return measure(runners, group, torch.device("cpu"), seconds=seconds)


def table(frame: pd.DataFrame) -> str:
    """Markdown of what was measured: by ranks and tokens, speed-ups as geometric means over the sizes of weights."""
    lines = ["| ranks | tokens | of torch | of DTensor | no all-reduce, of torch |", "|---:|---:|---:|---:|---:|"]

    def line(ranks: str, tokens: str, part: pd.DataFrame) -> str:
        ours, local = (part[part.variant == name] for name in ("fusedtp", "local"))
        means = [statistics.geometric_mean(each) for each in (
            ours.speedup_vs_torch, ours.speedup_vs_dtensor, local.speedup_vs_torch
        )]  # fmt: skip
        return f"| {ranks} | {tokens} | {' | '.join(f'{mean:.2f}' for mean in means)} |"

    for (ranks, tokens), part in frame.groupby(["world_size", "M"]):
        lines.append(line(str(ranks), str(tokens), part))
    lines.append(line("all", "all", frame))
    first, sizes = frame.iloc[0], frame[["N", "K"]].drop_duplicates().itertuples(index=False)
    lines += [
        "",
        "Linear, all-reduce, residual and RMSNorm of few tokens, forward, host time included: speed-ups of medians, "
        f"geometric means over N x K of {', '.join(f'{N} x {K}' for N, K in sizes)}; {first['dtype']}, {first.cpu} "
        f"({first.cores} cores), torch {first.torch}, commit {first.commit[:12]}. torch: F.linear, gloo's all_reduce, "
        "+=, F.rms_norm. The last column is what would be gained if sending cost nothing.",
    ]
    return "\n".join(lines)


def size(text: str) -> tuple[int, int, int]:
    """M, N, K; ValueError for a K that not all numbers of ranks split evenly, as torch's style takes it to be."""
    M, N, K = (int(part) for part in text.split(","))
    if min(M, N, K) < 1 or K % max(RANKS):
        raise ValueError(text)
    return M, N, K


def main() -> None:
    """Time every size on two and four CPU ranks, and keep the rows in decode.csv."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows, one folder a machine")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for the rounds of one size")
    parser.add_argument("--ranks", action="append", type=int, choices=RANKS, help="numbers of ranks; may be repeated")
    parser.add_argument("--size", action="append", type=size, help="M,N,K, K a multiple of 4; may be repeated")
    parser.add_argument("--readme", type=Path, help="a document whose part `decode` is written anew")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    sizes = given.size or [(M, N, K) for N, K in SHAPES for M in TOKENS]
    for ranks in given.ranks or RANKS:
        with RankPool(ranks, timeout=300) as pool:
            for M, N, K in sizes:
                about = {"layer": "linear, all-reduce, residual, RMSNorm; forward", "M": M, "N": N, "K": K}
                for timings in (pool.run_again(compare, M, N, K, given.seconds) or ())[:1]:
                    rows += rows_of({**about, "world_size": ranks, "dtype": "float32"}, timings, ("dtensor", "torch"))
    frame, path = pd.DataFrame(rows), given.out / describe().name / "decode.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)
    speedups = ["speedup_vs_torch", "speedup_vs_dtensor"]
    print(frame[["world_size", "M", "N", "K", "variant", "median_ms", *speedups]].to_string(index=False))
    ours = frame[frame.variant == "fusedtp"]
    for ranks in given.ranks or RANKS:
        mine = ours[ours.world_size == ranks]
        over_torch, over_dtensor = (statistics.geometric_mean(mine[each]) for each in speedups)
        print(
            f"{ranks} ranks: {over_torch:.2f}x torch, {over_dtensor:.2f}x dtensor, geometric means of {len(mine)} sizes"
        )
    if given.readme is not None:
        rewrite(given.readme, "decode", table(frame))


if __name__ == "__main__":
    main()
