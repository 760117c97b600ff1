"""From what a job found out to rows: the ratios between a case's variants, rates, bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from .cases import ALONE, Case, flops, traffic
from .machine import Machine
from .store import NOT_RUN, PASSED, Row

if TYPE_CHECKING:
    from .timing import Timing, Verdict

# Run in Triton's interpreter where there is no GPU.
KERNELS = ("fused", "own_matmul")
# Bytes on a link for each byte of a collective's whole buffer, over n ranks: nccl-tests' busbw / algbw.
_BUS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Ratios:
    """The columns that follow from the medians of one case in one direction; None where one of them is missing."""

    speedup_vs_unfused: float | None = None
    matmul_fraction: float | None = None
    tflops: float | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    ceiling_ms: float | None = None
    overlap_efficiency: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What one job found out about one variant in one direction, the same on every rank."""

    variant: str
    direction: str
    verdict: Verdict | None = None
    timing: Timing | None = None
    path: str = ""
    threads: int = 0
    backend: str = ""
    not_run: str = ""

    @property
    def gate(self) -> str:
        if self.verdict is None:
            return NOT_RUN + self.not_run
        return self.verdict.error or PASSED


def ratios(case: Case, direction: str, variant: str, medians: Mapping[str, float]) -> Ratios:
    """What `variant`'s median says beside those of the others, in ms."""
    own, unfused, matmul, comm = (medians.get(name) for name in (variant, "unfused", "matmul", "comm"))
    if not own:
        return Ratios()
    n = case.world_size
    sent = traffic(case, direction) if n > 1 else []
    # A pass that sends nothing has the matmul alone as its bound, and nothing to hide.
    ceiling = None if matmul is None else matmul if not sent else None if comm is None else max(matmul, comm)
    if variant == "comm" and not sent:
        return Ratios(ceiling_ms=ceiling)
    if variant == "comm":
        # bytes per ms are kB/s, and 1e6 of them GB/s
        algbw = sum(num_bytes for _, num_bytes in sent) / own / 1e6
        busbw = sum(num_bytes * _BUS[kind] * (n - 1) / n for kind, num_bytes in sent) / own / 1e6
        return Ratios(algbw_gbps=algbw, busbw_gbps=busbw, ceiling_ms=ceiling)
    whole = variant not in ALONE
    hidden = None
    if whole and sent and unfused and matmul and unfused > matmul:
        hidden = 1 - (own - matmul) / (unfused - matmul)
    return Ratios(
        speedup_vs_unfused=unfused / own if whole and unfused else None,
        matmul_fraction=matmul / own if (whole or variant == "own_matmul") and matmul else None,
        tflops=flops(case, direction) / own / 1e9,
        ceiling_ms=ceiling,
        overlap_efficiency=hidden,
    )


def rows_of(case: Case, outcomes: Iterable[Outcome], machine: Machine) -> list[Row]:
    """The rows of a job's outcomes, with the ratios between them."""
    outcomes = list(outcomes)
    medians: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.timing is not None:
            medians.setdefault(outcome.direction, {})[outcome.variant] = outcome.timing.median_ms
    shared = asdict(case) | asdict(machine) | {"time_utc": now()}
    shared["machine"] = shared.pop("name")
    rows = []
    for outcome in outcomes:
        timing, verdict = outcome.timing, outcome.verdict
        derived = ratios(case, outcome.direction, outcome.variant, medians.get(outcome.direction, {}))
        values = shared | vars(derived) | (vars(timing) if timing else {})
        values |= {
            name: getattr(outcome, name) for name in ("variant", "direction", "gate", "path", "threads", "backend")
        }
        if verdict is not None and not verdict.error:
            values |= {"max_error": verdict.max_error, "error_ratio": verdict.error_ratio}
        interpreted = outcome.variant in KERNELS and verdict is not None and not machine.num_gpus
        rows.append(Row(**values, interpreted=interpreted))
    return rows


def now() -> str:
    """The time as rows have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
