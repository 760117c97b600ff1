"""Measurements of this machine, and the choice of a schedule from measurements and the cost model.

`fusedtp tune` writes one small JSON file: the machine and versions, rates, and for a few sizes of each op the times of
its schedules. A difference within the noise of the times decides nothing. A prediction for another size is corrected by
the model's error at the nearest size measured. With `--kernels` the file also has the fastest tiles. Its path is
FUSEDTP_TUNING (`off` for none), or fusedtp/tuning.json in the user's cache folder.

A choice must be the same on every rank. So it depends only on data that all ranks share: the table, the op, the dtype,
and the shape of the tensor that travels. Ranks may not share the product's third dim, as a weight may be split
unevenly. The third dim is that of the nearest measurement, or without one that of an MLP: four times the columns of the
tensor that travels.

An op takes the tile tuned for the nearest shape of the tensor that travels, unless rows or columns differ by more than
a factor of `FARTHEST`. Signals count tile rows, so this too depends only on data that ranks agree on.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as changed
from functools import cache
from importlib.metadata import version
from math import log
from pathlib import Path
from typing import Any

import torch

from ..cost import hardware
from ..cost.hardware import Hardware, of_gpu
from ..cost.model import estimate
from ..cost.work import Work
from ..files import Entry, entry_of, read_text, replace, visible
from ..machine import installed
from ..op import OPS, Task
from ..schedules import NAMES
from ..sharding.plan import ITEMSIZE

FORMAT = 1
# Hundreds of times the size of a usual file.
MAX_BYTES = 1 << 20
ENVIRONMENT = "FUSEDTP_TUNING"
# Smallest ratio of two predictions that tells which schedule is faster. tests/test_cost.py has the model's errors.
MODEL_ERROR = 1.1
# Lower bound of times, also for an op on empty tensors on a machine without latencies.
_LEAST_US = 1e-6
_RATES = ("memory_gbps", "collective_gbps")
_LATENCIES = ("host_us", "flag_us", "collective_start_us")
# Limits of numbers in a file: a measurement cannot be beyond these.
MOST_RANKS, MOST_LENGTH, LEAST_MS, MOST_MS = 1 << 16, 1 << 40, 1e-9, 1e9
# Fields that older files lack, with the limits of their values.
_NOISE = {"p25": (LEAST_MS, MOST_MS), "p75": (LEAST_MS, MOST_MS), "slower": (0.0, MOST_MS / LEAST_MS)}

# Largest ratio between the op's rows and the tuned rows, in either direction; likewise for columns.
FARTHEST = 2.0
# Limits of the fields of `kernels.choices.Choice`, repeated here because that module loads Triton.
LIMITS = {
    **dict.fromkeys(("block_m", "block_n", "block_k"), (16, 256)),
    "num_warps": (1, 16), "num_stages": (1, 6), "pushers": (0, 256), "splits": (0, 8),
}  # fmt: skip
CORES = "loop", "warp_specialised"


@dataclass(frozen=True)
class Size:
    """Op that was measured, and its size.

    - `rows`, `cols`: shape of the whole tensor that travels.
    - `third`: the product's third dim on a rank, 0 for none.
    """

    op: str
    world_size: int
    dtype: str
    rows: int
    cols: int
    third: int

    @property
    def size(self) -> tuple[str, int, str, int, int, int]:
        """Return the key of the measurement: everything but its outcome and version."""
        return self.op, self.world_size, self.dtype, self.rows, self.cols, self.third


@dataclass(frozen=True)
class Sample(Size):
    """Measured times of an op's schedules at one size.

    - `ms`: median time of each schedule.
    - `p25`, `p75`: quartiles of the times.
    - `slower`: lower end of the 95 % interval of each schedule's time over the fastest one's. At 1 or below, the
      difference is noise.

    `p25`, `p75` and `slower` are empty in older files. Then no difference counts as noise.
    """

    ms: Mapping[str, float]
    p25: Mapping[str, float] = field(default_factory=dict)
    p75: Mapping[str, float] = field(default_factory=dict)
    slower: Mapping[str, float] = field(default_factory=dict)

    def alike(self) -> set[str]:
        """Return the fastest schedules, whose differences are noise; none if the noise is unknown."""
        return {name for name, least in self.slower.items() if least <= 1}


@dataclass(frozen=True)
class Tuned(Size):
    """The fastest tile measured for a size of an op.

    - `choice`: fields of `kernels.choices.Choice`; None if the table's tile was as fast as any.
    - `ms`, `usual_ms`: median times with the choice and with the table's tile.
    - `faster`: lower end of the 95 % interval of `usual_ms / ms`.
    - `version`: version of this package, whose kernels were measured.
    """

    choice: Mapping[str, int | str] | None
    ms: float
    usual_ms: float
    faster: float
    version: str


@dataclass(frozen=True)
class Table:
    """A machine's measurements.

    - `machine`: see `identity`.
    - `samples`: times of schedules.
    - `rates`: arguments of `hardware.measured_cpu` by number of ranks; for CPUs only.
    - `kernels`: fastest tiles of `fused`; for GPUs only.
    """

    machine: Mapping[str, Any]
    samples: tuple[Sample, ...]
    rates: Mapping[int, Mapping[str, Any]]
    kernels: tuple[Tuned, ...] = ()

    def hardware(self, world_size: int) -> Hardware | None:
        """Return the machine's rates for the nearest number of ranks, None without any.

        Raise ValueError for impossible rates.
        """
        size = min(self.rates, key=lambda size: abs(log(size / world_size)), default=0)
        title = f"{self.machine['cpu']}, {size} ranks"
        return hardware.measured_cpu(title, source="fusedtp tune", **self.rates[size]) if size else None

    def updated(self, newer: Table) -> Table:
        """Return this table with `newer` added, whose samples and tiles replace those of the same size."""
        again, sizes = {each.size for each in newer.samples}, {each.size for each in newer.kernels}
        samples = (*(each for each in self.samples if each.size not in again), *newer.samples)
        kernels = (*(each for each in self.kernels if each.size not in sizes), *newer.kernels)
        return Table(newer.machine, samples, {**self.rates, **newer.rates}, kernels)

    def nearest(self, op: str, dtype: str, world_size: int, rows: int, cols: int) -> Sample | None:
        """Return the sample of this op and dtype with the nearest number of ranks, then the nearest size and shape."""

        def distance(sample: Sample) -> tuple[float, float]:
            size = abs(log(max(1, rows * cols) / (sample.rows * sample.cols)))
            shape = abs(log(max(1, rows) / max(1, cols) / (sample.rows / sample.cols)))
            return abs(log(world_size / sample.world_size)), size + shape / 4

        samples = [each for each in self.samples if (each.op, each.dtype) == (op, dtype)]
        return min(samples, key=distance, default=None)


def identity() -> dict[str, Any]:
    """Return the parts of the machine and the versions that times depend on."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        model_name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model_name = None
    return {
        "cpu": model_name.group(1).strip() if model_name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(0) if num_gpus else "",
        "num_gpus": num_gpus,
        "torch": torch.__version__,
        "triton": installed("triton"),
    }


def path() -> Path | None:
    """Return the path of this machine's table; None for none. Raise ValueError for an unknown user's home."""
    from_environment = os.environ.get(ENVIRONMENT)
    if from_environment is not None and from_environment.strip().lower() in ("", "off"):
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name, wanted = (ENVIRONMENT, from_environment) if from_environment is not None else ("XDG_CACHE_HOME", cache)
    try:
        target = Path(wanted).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} is {wanted!r}, the home of an unknown user") from error
    return target if from_environment is not None else target / "fusedtp" / "tuning.json"


def dump(table: Table) -> str:
    """Return the table as the text of a file."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "machine": dict(table.machine),
        "rates": {str(size): dict(values) for size, values in table.rates.items()},
        "samples": [{name: value for name, value in asdict(sample).items() if value != {}} for sample in table.samples],
    }
    if table.kernels:
        content["kernels"] = [asdict(each) for each in table.kernels]
    return json.dumps(content, indent=1) + "\n"


def write(target: Path, text: str) -> None:
    """Write the text to `target` atomically."""
    replace(target, text.encode())


def parse(text: str) -> Table:
    """Parse a file's text. A ValueError names the wrong key."""
    try:
        content = entry_of(text)
        # Optional: older files and files without tuned tiles lack it.
        tuned = [name for name in ("kernels",) if name in content.values]
        content.only("format", "machine", "rates", "samples", *tuned)
        content.integer("format", FORMAT, FORMAT)
        machine = content.entry("machine")
        samples = tuple(_sample(each) for each in content.entries("samples"))
        kernels = tuple(map(_tuned, content.entries("kernels"))) if tuned else ()
        listed, rates = content.entry("rates"), {}
        for size in listed.values:
            if not re.fullmatch("[1-9][0-9]{0,5}", size) or int(size) > MOST_RANKS:
                raise ValueError(f"{listed.where(size[:80])} must be of 1 to {MOST_RANKS} ranks")
            machine.text("cpu")
            rates[int(size)] = _rates(listed.entry(size))
    except ValueError as error:
        raise ValueError(f"not a table of fusedtp tune: {error}") from error
    return Table(machine.values, samples, rates, kernels)


def _rates(entry: Entry) -> dict[str, Any]:
    entry.only("matrix_tflops", *_RATES, *_LATENCIES)
    least, most = hardware.LEAST_RATE, hardware.MOST_RATE
    return {
        "matrix_tflops": entry.numbers("matrix_tflops", least, most, among=ITEMSIZE),
        **{name: entry.number(name, least, most) for name in _RATES},
        **{name: entry.number(name, 0, hardware.MOST_US) for name in _LATENCIES},
    }


def _sample(entry: Entry) -> Sample:
    noise = [name for name in _NOISE if name in entry.values]
    entry.only("op", "world_size", "dtype", "rows", "cols", "third", "ms", *noise)
    ms = entry.numbers("ms", LEAST_MS, MOST_MS, among=NAMES)
    more: dict[str, Any] = {name: entry.numbers(name, *_NOISE[name], among=ms) for name in noise}
    return Sample(**_size(entry, OPS, 1, 0), ms=ms, **more)


def _size(entry: Entry, ops: Collection[str], least_ranks: int, least_third: int) -> dict[str, Any]:
    return {
        "op": entry.text("op", among=ops),
        "world_size": entry.integer("world_size", least_ranks, MOST_RANKS),
        "dtype": entry.text("dtype", among=ITEMSIZE),
        "rows": entry.integer("rows", 1, MOST_LENGTH),
        "cols": entry.integer("cols", 1, MOST_LENGTH),
        "third": entry.integer("third", least_third, MOST_LENGTH),
    }


def _tuned(entry: Entry) -> Tuned:
    entry.only(*Tuned.__dataclass_fields__)
    return Tuned(
        **_size(entry, [name for name, op in OPS.items() if op.multiplies], 2, 1),
        choice=None if entry.value("choice") is None else _choice(entry.entry("choice")),
        faster=entry.number("faster", 0, MOST_MS / LEAST_MS),
        ms=entry.number("ms", LEAST_MS, MOST_MS),
        usual_ms=entry.number("usual_ms", LEAST_MS, MOST_MS),
        version=entry.text("version"),
    )


def _choice(entry: Entry) -> dict[str, int | str]:
    # Older files have no core.
    core = [name for name in ("core",) if name in entry.values]
    entry.only(*LIMITS, "flatten", *core)
    numbers = {name: entry.integer(name, *limits) for name, limits in LIMITS.items()}
    for name in ("block_m", "block_n", "block_k", "num_warps"):
        if numbers[name] & (numbers[name] - 1):
            raise ValueError(f"{entry.where(name)} must be a power of two, got {numbers[name]}")
    if type(entry.value("flatten")) is not bool:
        raise ValueError(f"{entry.where('flatten')} must be true or false")
    return numbers | {"flatten": entry.value("flatten"), "core": entry.text("core", among=CORES) if core else CORES[0]}


def load(target: Path | None = None) -> tuple[Table | None, str, str]:
    """Load the table and return (table, its text, why a file is ignored).

    The reason is "" if the file is used or does not exist. A file is ignored if it cannot be read, is malformed, or was
    measured on another machine or with other versions.
    """
    try:
        target = path() if target is None else target
    except ValueError as error:
        return None, "", str(error)
    try:
        if target is None or not target.exists():
            return None, "", ""
        text = read_text(target, max_bytes=MAX_BYTES)
        table = parse(text)
    except (OSError, ValueError) as error:
        why = str(error).replace(f"{target} ", "it ", 1)
        return None, "", visible(f"{target} is ignored, {why}: run `fusedtp tune` again")
    here = identity()
    if other := [
        f"{name} {_plain(table.machine[name])}, here {_plain(here[name])}" if name in table.machine else f"no {name}"
        for name in here
        if table.machine.get(name) != here[name]
    ]:
        return None, "", visible(f"{target} is ignored, measured with {'; '.join(other)}: run `fusedtp tune` again")
    return table, text, ""


def _plain(value: object) -> str:
    # Without quotes, but with the escapes of `repr`: the file may have any text.
    return repr(value).strip("'\"") or "none"


def share(op: str, dtype: str, world_size: int, rows: int, cols: int, third: int | None = None) -> Work:
    """Return a rank's share of an op that moves [rows, cols]. Without `third`, the product's third dim is an MLP's."""
    kind = OPS[op].kind
    if not OPS[op].multiplies:
        return Work(kind, 0, 0, 0, rows * cols, world_size, dtype)
    third = max(1, 4 * cols // world_size) if third is None else third
    inner, outer = (cols, third) if kind == "gather" else (third, cols)
    return Work(kind, rows, outer, inner, rows * cols, world_size, dtype)


def decide(
    table: Table | None, gpu: Hardware | None, op: str, dtype: str, world_size: int, rows: int, cols: int,
    allowed: Sequence[str], *, switch: bool = False,
) -> tuple[str, str] | None:  # fmt: skip
    """Return (schedule, reason) for an op that moves [rows, cols]; None without a measurement and a model.

    - `dtype`: of the operands. Sums of float8 products travel in another dtype.
    - `gpu`: this machine's entry in the hardware table.
    - `allowed`: the schedules that can run. If differences are noise, the choice is the first one, or with a known
      `gpu` the predicted one.
    - `switch`: as in `Work`. Measurements are without the switch.
    """
    sample = table.nearest(op, dtype, world_size, rows, cols) if table is not None else None
    machine = gpu if gpu is not None or table is None else table.hardware(world_size)
    measured = {name: sample.ms[name] for name in allowed if name in sample.ms} if sample is not None else {}
    if sample is None or len(measured) < 2:
        if gpu is None:
            return None
        best, times = _predicted(gpu, op, dtype, world_size, rows, cols, allowed, switch)
        return best, f"predicted for {gpu.title}: {_versus(times, best)}"
    times = measured
    if machine is not None and machine.knows(dtype):
        there = share(op, dtype, sample.world_size, sample.rows, sample.cols, sample.third)
        here = changed(share(op, dtype, world_size, rows, cols, sample.third), switch=switch)
        old, new = (estimate(op, work, machine).times for work in (there, here))
        both = [name for name in measured if name in old and name in new]
        times = {name: _corrected(new[name], old[name], 1e3 * measured[name]) for name in both}
        times = times if len(times) > 1 else measured
    best = min(times, key=lambda name: times[name])
    where = f"{sample.rows}x{sample.cols} on {sample.world_size} ranks, the nearest size measured here"
    usual = allowed[0]
    if gpu is not None and gpu.knows(dtype):
        usual, _ = _predicted(gpu, op, dtype, world_size, rows, cols, allowed, switch)
    are_alike = best != usual and {best, usual} <= sample.alike() & times.keys()
    # Noise at the measured size is noise here too, unless the model predicts a larger difference than its error.
    if are_alike and times[usual] / times[best] <= max(MODEL_ERROR, measured[usual] / measured[best]):
        pair = {name: measured[name] for name in (best, usual)}
        comparison = _versus(pair, min(pair, key=lambda name: pair[name]), pair)
        return usual, f"as without a measurement: {comparison} at {where}"
    if are_alike:
        return best, f"predicted: {_versus(times, best)} here, though the difference is noise at {where}"
    fastest = min(measured, key=lambda name: measured[name])
    if best == fastest:
        return best, f"measured: {_versus(measured, best, sample.alike())} at {where}"
    return best, f"predicted: {_versus(times, best)} here, though {fastest} is the fastest at {where}"


def _predicted(
    gpu: Hardware, op: str, dtype: str, world_size: int, rows: int, cols: int, allowed: Sequence[str], switch: bool
) -> tuple[str, Mapping[str, float]]:
    # The schedule that the model predicts to be the fastest, and the predicted times.
    work = changed(share(op, dtype, world_size, rows, cols), switch=switch)
    times = {name: time for name, time in estimate(op, work, gpu).times.items() if name in allowed}
    best = min(times, key=lambda name: times[name])
    # If predictions differ by less than the model's error, `fused` runs: a graph can capture it.
    if times.get("fused", float("inf")) <= MODEL_ERROR * times[best]:
        best = "fused"
    return best, times


def _corrected(predicted: float, there: float, measured: float) -> float:
    """Correct a prediction by a measurement at another size, for which the model predicts `there`.

    The model's error counts as latency: it is the same at a larger size, and shrinks in proportion at a smaller one.
    """
    # The measurement is added last: rounding must not lose it to a far larger prediction, as times are divisors.
    corrected = measured * (predicted / there) if predicted < there else (predicted - there) + measured
    return max(corrected, _LEAST_US)


def _versus(times: Mapping[str, float], best: str, alike: Collection[str] = ()) -> str:
    """Compare the fastest schedule with `unfused`; if `unfused` is the fastest, with the second fastest.

    `alike`: schedules whose differences are noise.
    """
    others = {name: time for name, time in times.items() if name != best}
    other = "unfused" if "unfused" in others else min(others, key=lambda name: others[name], default=best)
    noise = ", which is noise," if best in alike and other in alike else ""
    return f"{best} {times[other] / times[best]:.2f}x as fast as {other}{noise}" if others else f"{best} alone can run"


@cache
def version_here() -> str:
    """Return the version of this package."""
    return version("fusedtp")


def nearest_tile(tuned: Sequence[Tuned], task: Task, world_size: int) -> Tuned | None:
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


def hardware_here(world_size: int) -> Hardware:
    """Return this machine as `fusedtp tune` has measured it; ValueError if it has not, or not for so many ranks."""
    table, _, ignored = load()
    machine = None if table is None else of_gpu(str(table.machine["gpu"])) or table.hardware(world_size)
    if table is None or machine is None:
        where = path() or f"{ENVIRONMENT}=off"
        what = f"{where}: no rates of this machine: run `fusedtp tune` first, with float32 among its dtypes"
        raise ValueError(ignored or what)
    if machine.in_place and world_size not in table.rates:
        measured = ", ".join(map(str, table.rates))
        raise ValueError(f"this machine was measured on {measured} ranks: give --world-size one of these, or tune it")
    return machine
