"""Rates and latencies of machines for the cost model, with the source of each number.

Bandwidths are GB/s (1e9 bytes) one way, rates dense TFLOP/s, latencies microseconds. A machine without a rate for a
float8 dtype has no units for it: the library then widens the operands. The machines are in `hardware.toml`; `sources`
has an entry for every number. Predictions are as good as these numbers: `fusedtp tune` replaces them by measurements
of this machine.
"""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..sharding.plan import ITEMSIZE, is_float8


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator, the domain whose members reach each other's memory, and the network between domains.

    - `link_gbps`: to all peers together. `peer_gbps`: to one peer, as a small group uses only some links.
    - `memory_gbps`: read and written together. `network_gbps`: a GPU's, to other domains.
    - `matrix_tflops`: of matmuls, by dtype. `num_sms`: multiprocessors. `domain_size`: GPUs of a domain.
    - `matrix_fraction`: a large library matmul's part of the rate, at sustained clocks. `burst_fraction`: the same in
      the first `BURST_US` of a cool chip (None: as sustained). `kernel_fraction`: our kernel's part of the library's.
    - `memory_fraction`: a kernel's part of the memory bandwidth.
    - `copy_fraction`, `store_fraction`: part of the link that the copy engine reaches, and a kernel's stores.
    - `collective_fraction`, `ll_fraction`, `switch_fraction`: part of the link that the library's collectives reach
      with long messages, short ones, and sums in the switch (None if it cannot).
    - `own_step`: time of a collective for a rank's own data, as a fraction of that for one peer's.
    - `multicast_fraction`, `multicast_sum_fraction`: part of the link that our kernel reaches with reads or stores
      through the switch, and with both at once.
    - `overlap_slowdown`: a matmul's extra time beside arriving data, as a fraction.
    - `collective_start_us`: start of a library's collective. `simple_start_us`, `switch_start_us`: more for long
      messages, and in the switch. `torch_us`: torch's part, whose streams wait for one another.
    - `ll_hop_us`, `tree_hop_us`, `simple_hop_us`: from one rank to the next, by NCCL's algorithm and protocol.
    - `copy_start_us`, `network_start_us`: start of a copy engine's copy, and of a message between domains.
    - `flag_us`: a wait until the signal is there. `poll_us`: from then until the program continues.
    - `launch_us`: a kernel after another; on a CPU, the host's cost of an op. `lone_us`: a kernel timed alone.
    - `chunk_us`: the host's time to issue a chunk of a matmul with its copy, its signal and its wait.
    - `in_place`: whether ranks are processes on one CPU that read each other's memory in place.
    - `widens_float8`: whether the library widens float8 despite units for it: torch's scaled matmul is not used here.
    - `gpu`: words that are all in a driver's name of the GPU, see `of_gpu`.
    """

    name: str
    title: str
    link_gbps: float
    memory_gbps: float
    matrix_tflops: Mapping[str, float]
    num_sms: int
    domain_size: int
    network_gbps: float
    matrix_fraction: float
    sources: Mapping[str, str] = field(repr=False)
    peer_gbps: float | None = None
    kernel_fraction: float = 0.97
    burst_fraction: float | None = None
    memory_fraction: float = 0.85
    collective_fraction: float = 0.8
    ll_fraction: float = 0.42
    own_step: float = 0.6
    switch_fraction: float | None = None
    multicast_fraction: float | None = None
    multicast_sum_fraction: float | None = None
    copy_fraction: float = 0.82
    store_fraction: float = 0.76
    overlap_slowdown: float = 0.19
    collective_start_us: float = 5.1
    torch_us: float = 9.0
    ll_hop_us: float = 1.0
    tree_hop_us: float = 1.5
    simple_start_us: float = 9.0
    simple_hop_us: float = 2.5
    switch_start_us: float = 66.0
    copy_start_us: float = 2.7
    flag_us: float = 1.5
    poll_us: float = 1.0
    launch_us: float = 3.0
    lone_us: float = 7.0
    chunk_us: float = 30.0
    network_start_us: float = 10.0
    in_place: bool = False
    widens_float8: bool = False
    gpu: str = ""

    def link(self, num_ranks: int) -> float:
        """Return the bytes per microsecond that one of `num_ranks` ranks sends to the others together."""
        gbps = self.link_gbps if self.peer_gbps is None else min(self.link_gbps, self.peer_gbps * (num_ranks - 1))
        return gbps * 1e3

    def rate(self, dtype: str) -> float:
        """Return the FLOPs per microsecond of a large library matmul; ValueError for a dtype without a rate."""
        if dtype not in self.matrix_tflops:
            known = " or ".join(self.matrix_tflops)
            raise ValueError(f"no matmul rate of {dtype} is known for {self.name}: give dtype {known}, or matmul_us")
        return self.matrix_tflops[dtype] * 1e6 * self.matrix_fraction

    @property
    def memory(self) -> float:
        """Return the bytes per microsecond that a kernel reads and writes together."""
        return self.memory_gbps * 1e3 * self.memory_fraction

    @property
    def burst(self) -> Hardware:
        """Return this machine at burst clocks: those of its first `BURST_US` of matmuls."""
        return replace(self, matrix_fraction=self.burst_fraction or self.matrix_fraction)

    def multiplied(self, dtype: str) -> str:
        """Return the dtype that the library multiplies operands of `dtype` in: `dtype`, or a wider one for float8."""
        if dtype not in FLOAT8 or (dtype in self.matrix_tflops and not self.widens_float8):
            return dtype
        return WIDENED_BLOCKS if dtype == "mxfp8" and not self.in_place else WIDENED

    def knows(self, dtype: str) -> bool:
        """Return whether the time of a matmul in `dtype` can be predicted."""
        return self.multiplied(dtype) in self.matrix_tflops

    @property
    def float8(self) -> str:
        """Return the e4m3 dtype that the machine multiplies, or OCP's if it multiplies none."""
        return FNUZ if FNUZ in self.matrix_tflops else OCP

    @property
    def flops_per_byte(self) -> float:
        """Return the FLOPs in the time of one byte over the link, in the fastest dtype: `plan` weighs bytes by it.

        float8 does not count: its ratio is about the same, as a byte is twice as many elements.
        """
        wider = [dtype for dtype in self.matrix_tflops if dtype not in FLOAT8]
        fastest = max(wider, key=lambda dtype: self.matrix_tflops[dtype])
        return self.rate(fastest) / (self.link_gbps * 1e3 * self.collective_fraction)

    @property
    def start_bytes(self) -> int:
        """Return the bytes that the link carries in the time a collective takes to start."""
        return int((self.collective_start_us + self.torch_us) * self.link_gbps * 1e3 * self.collective_fraction)


FLOAT8 = tuple(dtype for dtype in ITEMSIZE if is_float8(dtype))
# `float8.Formats.e4m3` by name: nothing in this module loads torch.
OCP, FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
# `local` widens to these if torch has no scaled matmul. Blocks with their scales are exact in bfloat16, which a CPU
# does not multiply any faster.
WIDENED, WIDENED_BLOCKS = "float32", "bfloat16"

_ON_SHEET = ("link_gbps", "memory_gbps", "matrix_tflops", "num_sms", "domain_size")


def _machines() -> Iterator[Hardware]:
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    fitted: dict[str, str] = table.pop("fitted")
    generations: dict[str, dict[str, Any]] = table.pop("generations")
    elsewhere = {
        name: source if source.startswith("assumed") else f"assumed as on {source}" for name, source in fitted.items()
    }
    for name, entry in table.items():
        shared = fitted if entry.pop("is_fitted", False) else elsewhere
        generation = dict(generations.get(entry.pop("generation", ""), {}))
        source = generation.pop("source", "")
        of_generation = dict.fromkeys(generation, source)
        sources = dict.fromkeys(_ON_SHEET, entry.pop("sheet")) | shared | of_generation | entry.pop("sources")
        yield Hardware(name, sources=sources, **(generation | entry))


HARDWARE: dict[str, Hardware] = {each.name: each for each in _machines()}

# A matmul of this many microseconds, called 36 times in a row, is the longest that runs at burst clocks: NVIDIA
# AIConfigurator's tables of H100, H200 and B200.
BURST_US = 300.0

# Rates and latencies beyond these are not real, and may overflow or divide by 0.
LEAST_RATE, MOST_RATE, MOST_US = 1e-9, 1e9, 1e9

# Fields that are numbers; the other fields describe the kind of machine.
NUMBERS = tuple(
    each.name
    for each in fields(Hardware)
    if each.name not in ("name", "title", "sources", "in_place", "widens_float8", "gpu")
)


def listing() -> Iterator[tuple[str, list[str]]]:
    """Yield titles and lines: what the numbers mean, every machine's, those of all machines once, each source once."""
    about = (Hardware.__doc__ or "").replace("`", "").split("\n    - ")[1:]
    meanings = [f"    {' '.join(text.split())}" for text in about if text.split(":")[0].split(",")[0] in NUMBERS]
    yield "gbps: GB/s (1e9 bytes) one way. tflops: TFLOP/s, dense. us: microseconds", meanings
    first, *others = HARDWARE.values()
    shared = [name for name in NUMBERS if all(getattr(first, name) == getattr(each, name) for each in others)]

    def numbers(machine: Hardware, names: Iterable[str]) -> list[str]:
        values = {name: value for name in names if (value := getattr(machine, name)) is not None}
        if rates := values.get("matrix_tflops"):
            values["matrix_tflops"] = " ".join(f"{dtype} {rate:g}" for dtype, rate in rates.items())
        return ["    " + ", ".join(f"{name} {value}" for name, value in values.items())]

    sources: dict[tuple[str, str], list[str]] = {}
    for machine in HARDWARE.values():
        yield f"{machine.name}: {machine.title}", numbers(machine, [name for name in NUMBERS if name not in shared])
        for name, source in machine.sources.items():
            sources.setdefault((source, name), []).append(machine.name)
    yield "all", numbers(first, shared)
    of: dict[tuple[str, str], list[str]] = {}
    for (source, name), machines in sources.items():
        if (as_on := source.removeprefix("assumed as on ")) == source or (as_on, name) not in sources:
            of.setdefault((source, "all" if len(machines) == len(HARDWARE) else ", ".join(machines)), []).append(name)
    told = [f"{whose}: {', '.join(names)}: {source}" for (source, whose), names in of.items()]
    yield "Sources; on a machine not named the number is assumed to be the same", told


def find(hardware: str | Hardware) -> Hardware:
    """Return the hardware of that name; ValueError with the known names for another."""
    if isinstance(hardware, Hardware):
        return hardware
    if str(hardware).lower() not in HARDWARE:
        raise ValueError(f"hardware must be one of {', '.join(HARDWARE)}, got {hardware!r}")
    return HARDWARE[str(hardware).lower()]


def of_gpu(name: str) -> Hardware | None:
    """Return the hardware that a driver calls `name` ("NVIDIA H100 80GB HBM3"), or None if it is not in the table."""
    # Compare whole words: an RTX A1000 is no A100, a GH200 no H200. An A100 PCIe has the words of an A100 too.
    words = set(re.split("[^A-Z0-9]+", name.upper()))
    found = [each for each in HARDWARE.values() if words.issuperset(each.gpu.upper().split())]
    return max(found, key=lambda each: len(each.gpu.split()), default=None)


@cache
def assumed(name: str) -> Hardware:
    """Return an H100, the stand-in for a GPU that the table does not have; warn once for each `name`.

    `name` is the driver's name of the GPU, or "" for rank 0's GPU if this rank's own is another kind.
    """
    which = f"{name!r}" if name else "rank 0's GPU"
    warnings.warn(
        f"fusedtp does not know {which}: how many programs push, whether copies are better and when an all-reduce is "
        "one-shot all ranks decide by an H100's numbers, which may cost time. `fusedtp tune` measures which schedule "
        "is fastest here",
        stacklevel=4,
    )
    return find("h100")


def number_of(machine: Hardware | None) -> int:
    """Return the number that stands for a machine of the table, 0 for none."""
    return 0 if machine is None else 1 + list(HARDWARE).index(machine.name)


def numbered(number: int) -> Hardware | None:
    """Return the machine of a number that `number_of` gave."""
    return list(HARDWARE.values())[number - 1] if number else None


def measured_cpu(
    name: str, *, matrix_tflops: Mapping[str, float], memory_gbps: float, host_us: float, flag_us: float,
    collective_start_us: float, collective_gbps: float, source: str,
) -> Hardware:  # fmt: skip
    """Return a CPU whose ranks are processes, from its own measured rates.

    - `matrix_tflops`: of one rank while all multiply.
    - `memory_gbps`: read and written together.
    - `host_us`: an op's cost without any data.
    - `flag_us`: a wait for a peer's signal.
    - `collective_start_us`, `collective_gbps`: of the process group's backend.
    """
    return Hardware(
        name, name, collective_gbps, memory_gbps, dict(matrix_tflops), 0, 1 << 16, collective_gbps, 1.0,
        dict.fromkeys(NUMBERS, source), collective_fraction=1.0, copy_fraction=1.0, store_fraction=1.0,
        kernel_fraction=1.0, overlap_slowdown=0.0, collective_start_us=collective_start_us, copy_start_us=0.0,
        torch_us=0.0, flag_us=flag_us, poll_us=0.0, launch_us=host_us, lone_us=host_us, chunk_us=0.0,
        memory_fraction=1.0, own_step=0.0, in_place=True,
    )  # fmt: skip


def cpu_rates(
    n: int, host: float, small: Mapping[str, float], large: Mapping[str, float], num_bytes: Sequence[int],
    tflops: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Return arguments of `measured_cpu` from the ms of all-gathers of two sizes, by schedule.

    `decomposed` copies a rank's share once to publish it, and the whole result out of the arenas; each byte is read and
    written. The backend sends the others' shares.
    """
    more = num_bytes[1] - num_bytes[0]
    grown = {name: max(large[name] - small[name], 1e-6) * 1e3 for name in ("decomposed", "unfused")}  # us
    return {
        "matrix_tflops": dict(tflops),
        "memory_gbps": 2 * (1 + 1 / n) * more / grown["decomposed"] / 1e3,
        "host_us": host * 1e3,
        "flag_us": max(0.0, small["decomposed"] - host) * 1e3,
        "collective_start_us": small["unfused"] * 1e3,
        "collective_gbps": (n - 1) / n * more / grown["unfused"] / 1e3,
    }


# For ranks on a CPU that nobody has measured: all ranks must decide alike.
CPU = measured_cpu(
    "cpu", matrix_tflops={"float32": 0.07}, memory_gbps=18.7, host_us=170.0, flag_us=16.0, collective_start_us=1264.0,
    collective_gbps=0.8, source="this project's rows of 2 cores of an AMD EPYC; flag: two ranks behind a gloo barrier",
)  # fmt: skip
