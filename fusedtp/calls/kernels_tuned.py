"""Tiles that `fusedtp tune --kernels` measured to be the fastest on this machine, and the choice for an op.

The tiles are part of the file of measurements (`tuning`), which rank 0 reads for all ranks of a group. An op takes the
tile tuned for the nearest shape of the tensor that travels. If rows or columns differ by more than a factor of
`FARTHEST`, the op takes the fixed table's tile. Signals count tile rows, so the choice depends only on data that ranks
agree on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from math import log
from typing import Any

from ..op import OPS, Task
from ..sharding.plan import ITEMSIZE
from ..workspaces.entries import Entry

# Largest ratio between the op's rows and the tuned rows, in either direction; likewise for columns.
FARTHEST = 2.0
MOST_RANKS, MOST_LENGTH, LEAST_MS, MOST_MS = 1 << 16, 1 << 40, 1e-9, 1e9
# Limits of the fields of `kernels.choices.Choice`, repeated here because that module loads Triton.
LIMITS = {
    **dict.fromkeys(("block_m", "block_n", "block_k"), (16, 256)),
    "num_warps": (1, 16), "num_stages": (1, 6), "pushers": (0, 256), "splits": (0, 8),
}  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """The fastest tile measured for a size of an op.

    - `rows`, `cols`: shape of the whole tensor that travels.
    - `third`: the product's third dim on a rank.
    - `choice`: fields of `kernels.choices.Choice`; None if the table's tile was as fast as any.
    - `ms`, `usual_ms`: median times with the choice and with the table's tile.
    - `faster`: lower end of the 95 % interval of `usual_ms / ms`.
    - `version`: version of this package, whose kernels were measured.
    """

    op: str
    world_size: int
    dtype: str
    rows: int
    cols: int
    third: int
    choice: Mapping[str, int] | None
    ms: float
    usual_ms: float
    faster: float
    version: str

    @property
    def size(self) -> tuple[str, int, str, int, int, int]:
        """Return the key of the measurement: everything but its outcome and version."""
        return self.op, self.world_size, self.dtype, self.rows, self.cols, self.third

    def dumped(self) -> dict[str, Any]:
        """Return the JSON object for the file."""
        return asdict(self)


def parse(entry: Entry) -> Tuned:
    """Parse an object that `dumped` wrote. A ValueError names the wrong key."""
    entry.only(*Tuned.__dataclass_fields__)
    lengths = {name: entry.integer(name, 1, MOST_LENGTH) for name in ("rows", "cols", "third")}
    return Tuned(
        op=entry.text("op", among=[name for name, op in OPS.items() if op.multiplies]),
        world_size=entry.integer("world_size", 2, MOST_RANKS),
        dtype=entry.text("dtype", among=ITEMSIZE),
        choice=None if entry.value("choice") is None else _choice(entry.entry("choice")),
        faster=entry.number("faster", 0, MOST_MS / LEAST_MS),
        ms=entry.number("ms", LEAST_MS, MOST_MS),
        usual_ms=entry.number("usual_ms", LEAST_MS, MOST_MS),
        version=entry.text("version"),
        **lengths,
    )


def _choice(entry: Entry) -> dict[str, int]:
    entry.only(*LIMITS, "flatten")
    numbers = {name: entry.integer(name, *limits) for name, limits in LIMITS.items()}
    for name in ("block_m", "block_n", "block_k", "num_warps"):
        if numbers[name] & (numbers[name] - 1):
            raise ValueError(f"{entry.where(name)} must be a power of two, got {numbers[name]}")
    if type(entry.value("flatten")) is not bool:
        raise ValueError(f"{entry.where('flatten')} must be true or false")
    return numbers | {"flatten": entry.value("flatten")}


@cache
def version_here() -> str:
    """Return the version of this package."""
    return version("fusedtp")


def nearest(tuned: Sequence[Tuned], task: Task, world_size: int) -> Tuned | None:
    """Return the measurement of this op, dtype and number of ranks at the nearest size.

    Return None if no size is near or if the table's tile was the fastest there. The last of several measurements of one
    size counts. Collectives without a matmul, tasks with leaves and tasks with block scales have no tuned tiles.
    """
    if not task.op.multiplies or task.leaves or task.in_blocks:
        return None
    rows, cols = task.moved
    of = task.op.name, world_size, task.multiplied_in

    def distance(each: Tuned) -> float:
        ratios = abs(log(max(1, rows) / each.rows)), abs(log(max(1, cols) / each.cols))
        return sum(ratios) if max(ratios) <= log(FARTHEST) + 1e-9 else float("inf")

    near = [each for each in tuned if (each.op, each.world_size, each.dtype) == of and each.version == version_here()]
    best = min(reversed(near), key=distance, default=None)
    return best if best is not None and best.choice is not None and distance(best) < float("inf") else None


def told(tuned: Tuned) -> str:
    """Return the text of `Path.kernel` for a measurement."""
    # A late import: it loads Triton.
    from ..kernels.choices import of_fields

    assert tuned.choice is not None
    faster = tuned.usual_ms / tuned.ms
    return f"{of_fields(tuned.choice)}: {faster:.2f}x as fast as the table's, measured at {tuned.rows}x{tuned.cols}"
