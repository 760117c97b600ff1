"""Stage 3: virtual ranks on one GPU behind emulated links (`bench.virtual`): what overlap hides, link by link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusedtp.sharding.plan import ITEMSIZE

from . import gpu_moves, gpu_preset
from .cases import Case, Item
from .gpu_rows import Run
from .store import Row
from .virtual import LABEL, OP, measure, shown

LINKS = (50, 100, 200, 400)
ROUNDS = 20
# Copies are emulated to take what the link would: measured rates and clocks wander while ranks share the device.
MARGIN = 0.1
# Concurrent is to be no slower than phased, but for what starting and sharing cost.
MOST_OF_PHASED = 1.2


def items(*, emulate: bool = False) -> list[Item]:
    """One a link, for two and for four ranks."""
    found = []
    for world_size in (2, 4):
        M, N, K = (46, 12 * world_size, 24) if emulate else (8192, 3584, 8192)
        dtype = "float32" if emulate else "bfloat16"
        links = LINKS[:1] if emulate else LINKS
        found += [Item(OP, M, N, K, dtype, world_size, model=f"link {gbps} GB/s", layer=LABEL) for gbps in links]
    return found


def work(item: Item, run: Run) -> list[Row]:
    """Every variant behind the item's link."""
    gbps = int(item.model.split()[1])
    case = Case(item.op, item.M, item.N, item.K, item.dtype, item.world_size)
    return measure(case, [gbps], 1 if run.emulate else ROUNDS, run.machine)


def least_comm_ms(M: int, K: int, itemsize: int, world_size: int, gbps: float) -> float:
    """What the copies take at the least: all of x but the own shard behind the link, less the margin."""
    return (1 - MARGIN) * (world_size - 1) / world_size * M * K * itemsize / (gbps * 1e6)


def check(median_ms: Mapping[str, float], case: Case, gbps: float) -> None:
    """AssertionError unless copies took as long as on the link, and the concurrent run hardly longer than the phased.

    For a link so slow that issuing the work is not what is timed.
    """
    least = least_comm_ms(case.M, case.K, ITEMSIZE[case.dtype], case.world_size, gbps)
    assert median_ms["comm"] > least, f"copies took {median_ms['comm']:.3f} ms, no less than {least:.3f} expected"
    most = MOST_OF_PHASED * median_ms["phased"]
    assert median_ms["concurrent"] < most, f"concurrent took {median_ms['concurrent']:.3f} ms, phased allows {most:.3f}"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The rows in words, and of the slowest link whether it was one."""
    lines = [f"{row.world_size} ranks  {line}" for row in rows for line in shown([row])[1:]]
    of_link: dict[Case, dict[str, float]] = {}
    for row in rows:
        if row.model == f"link {LINKS[0]} GB/s" and row.median_ms is not None and not row.interpreted:
            case = Case(row.op, row.M, row.N, row.K, row.dtype, row.world_size)
            of_link.setdefault(case, {})[row.variant] = row.median_ms
    for case, median_ms in of_link.items():
        try:
            check(median_ms, case, LINKS[0])
            word = "yes"
        except AssertionError as error:
            word = f"NO, {error}"
        lines.append(f"{case.world_size} ranks  copies take what {LINKS[0]} GB/s would, and are hidden: {word}")
    return lines or ["links: nothing timed"]


def compile_only(device: torch.device) -> None:
    """Launch what this stage launches, without a look at what comes out."""
    for world_size, item in {item.world_size: item for item in items()}.items():
        dtype: torch.dtype = getattr(torch, item.dtype)
        sizes = item.M, item.N // world_size, item.K
        gpu_preset.gather(device, dtype, world_size, *sizes, last=False).launch()
        gpu_moves.steps(device, world_size, item.op).launch()
