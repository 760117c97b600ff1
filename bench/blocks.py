"""What a transformer block would gain: the sum of its matmuls' rows, for each variant and direction.

A total is there only where every matmul of the block passed its check and has a time in that variant, measured in one
commit on one machine. What is not a matmul (norms, attention itself, activations) is in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .cases import BASELINES, DIRECTIONS, SCHEDULES
from .models import LAYERS
from .store import Row

if TYPE_CHECKING:
    from rich.table import Table

# The columns of the table: bounds, then what runs the whole block.
SHOWN = ("matmul", "own_matmul", "comm", *SCHEDULES, "auto", *BASELINES)


@dataclass(frozen=True)
class Total:
    """The sums of one block in one direction, in ms by variant."""

    model: str
    tokens: int
    world_size: int
    dtype: str
    direction: str
    machine: str
    medians: dict[str, float]

    def speedup(self, variant: str) -> float | None:
        """Over unfused; None where either has no total."""
        own, unfused = self.medians.get(variant), self.medians.get("unfused")
        return unfused / own if own and unfused else None

    @property
    def best(self) -> str | None:
        """Our fastest schedule, unfused too."""
        timed = [name for name in SCHEDULES if name in self.medians]
        return min(timed, key=self.medians.__getitem__) if timed else None


def totals(rows: Iterable[Row]) -> list[Total]:
    """The blocks that have at least one total, in the order of model, tokens, ranks and direction."""
    found: dict[tuple[str, int, int, str, str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        if row.model:
            key = (row.model, row.tokens, row.world_size, row.dtype, row.direction, row.machine)
            found.setdefault(key, {}).setdefault(row.variant, {})[row.layer] = row
    made = [Total(*key, medians=_sums(variants)) for key, variants in found.items()]
    order = {direction: place for place, direction in enumerate(DIRECTIONS)}
    with_sums = [total for total in made if total.medians]
    return sorted(
        with_sums, key=lambda each: (each.model, each.tokens, each.world_size, each.dtype, order[each.direction])
    )


def _sums(variants: dict[str, dict[str, Row]]) -> dict[str, float]:
    sums = {}
    for variant, layers in variants.items():
        medians = [row.median_ms for row in layers.values() if row.passed and row.median_ms is not None]
        if set(layers) == set(LAYERS) and len(medians) == len(LAYERS) and len({r.commit for r in layers.values()}) == 1:
            sums[variant] = sum(medians)
    return sums


def table(blocks: Sequence[Total]) -> Table:
    """One line a block and direction: sums in ms, and what the fastest schedule gains over unfused."""
    from rich import box
    from rich.table import Table

    names = [name for name in SHOWN if any(name in block.medians for block in blocks)]
    made = Table(title="The matmuls of one transformer block together, ms", box=box.SIMPLE_HEAD)
    for what in ("model", "tokens", "ranks", "dtype", "direction"):
        made.add_column(what, justify="right" if what in ("tokens", "ranks") else "left")
    for name in names:
        made.add_column(name, justify="right")
    for what in ("best", "speed-up", "auto", "of matmul"):
        made.add_column(what, justify="right")
    before: Any = None
    for block in blocks:
        if before is not None and before != (block.model, block.tokens):
            made.add_section()
        before = block.model, block.tokens
        cells = [block.model, str(block.tokens), str(block.world_size), block.dtype, block.direction]
        cells += [f"{block.medians[name]:.4g}" if name in block.medians else "-" for name in names]
        best = block.best
        alone = block.medians.get("matmul")
        cells += [best or "-", _times(block.speedup(best) if best else None), _times(block.speedup("auto"))]
        cells += [f"{alone / block.medians[best]:.2f}" if best and alone else "-"]
        made.add_row(*cells)
    return made


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
