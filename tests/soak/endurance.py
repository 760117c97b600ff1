"""The part of one rank in `soak`: make every call after a random delay, check it, and measure the rank's memory.

A module apart from the command, as ranks import it by its own name.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed import ProcessGroup

import fusedtp

from .mixed import Call, Operands, draw

# More ranks than cores, with interpreted kernels: a peer may be late, but not this late.
WAIT_SECONDS = 120.0
# Memory may grow by this many bytes a rank from the second quarter of a run to the last. Caches (plans, views, a
# library's primitives) are full after the first quarter, as shapes repeat from then on. Pages that the allocator and
# Python have not returned vary by this much. A tensor of ours leaked at every call, at least 1 KiB with its
# bookkeeping, would be 5 MiB over the 5,000 calls of 10,000 in between.
NOISE_BYTES = 4 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """A rank after some calls: resident memory, open descriptors, its workspace's epoch and signal-bearing arena."""

    resident_bytes: int
    num_fds: int
    epoch: int


def delay(seed: int, number: int, rank: int) -> float:
    """Return the seconds that `rank` is late for a call: mostly 0, else 10 us to 5 ms, evenly by order of magnitude."""
    source = random.Random(f"{seed}/{number}/delay of {rank}")
    return 10.0 ** source.uniform(-5, -2.3) if source.random() < 0.4 else 0.0


def drawn(seed: int, number: int, num_shapes: int, world_size: int) -> Call:
    """Return call `number` of a seed; after `num_shapes` calls the same calls repeat with other values."""
    call = draw(random.Random(f"{seed}/{number % num_shapes}"), world_size)
    return replace(call, seed=call.seed + number)


def make_calls(
    group: ProcessGroup, seed: int, num_shapes: int, first: int, count: int, epoch: int | None
) -> Sample:  # fmt: skip
    """Make calls `first` to `first + count - 1` on this rank and check them; `epoch`: of a new workspace, or None."""
    from fusedtp.workspaces import registry

    cpu, rank = torch.device("cpu"), group.rank()
    if epoch is not None:
        fusedtp.destroy()
        fusedtp.set_timeout(WAIT_SECONDS)
        registry.get(group, cpu, epoch=epoch)
    for number in range(first, first + count):
        call = drawn(seed, number, num_shapes, group.size())
        try:
            operands = Operands(call, rank)
            time.sleep(delay(seed, number, rank))
            operands.check(operands.run(group, partial(time.sleep, delay(seed, -number, rank))))
        except Exception as error:
            error.add_note(f"in call {number} of seed {seed}: {call}")
            raise
    with open("/proc/self/statm") as file:
        resident_bytes = int(file.read().split()[1]) * _PAGE_BYTES
    return Sample(resident_bytes, len(os.listdir("/proc/self/fd")), registry.get(group, cpu).epoch)


def growth(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the growth from the second quarter to the last in bytes and descriptors. Medians ignore caches that are
    filled at the start, and single peaks.
    """
    quarter = len(samples) // 4
    middle, last = samples[quarter : 2 * quarter], samples[-quarter:]

    def median(each: Sequence[Sample], of: Callable[[Sample], int]) -> float:
        return statistics.median(map(of, each))

    resident = [median(each, lambda sample: sample.resident_bytes) for each in (middle, last)]
    fds = [median(each, lambda sample: sample.num_fds) for each in (middle, last)]
    return resident[1] - resident[0], fds[1] - fds[0]


def check_flat(by_rank: Sequence[Sequence[Sample]]) -> None:
    """Assert that no rank's memory or number of open files has grown."""
    for rank, samples in enumerate(by_rank):
        grown_bytes, grown_fds = growth(samples)
        assert grown_fds == 0, f"rank {rank} has {grown_fds:+g} descriptors open, of {samples[-1].num_fds}"
        assert grown_bytes <= NOISE_BYTES, (
            f"rank {rank} has grown by {grown_bytes / 2**20:.1f} MiB from the second quarter to the last, of "
            f"{samples[-1].resident_bytes / 2**20:.0f} MiB: at most {NOISE_BYTES / 2**20:.0f} are noise"
        )


def check_wrapped(by_rank: Sequence[Sequence[Sample]]) -> None:
    """Assert that every rank's epoch has wrapped past the largest int32, and that all ranks have the same epochs."""
    for rank, samples in enumerate(by_rank):
        epochs = [sample.epoch for sample in samples]
        assert epochs[0] > 0 > epochs[-1], f"epochs of rank {rank} did not wrap: {epochs[0]} to {epochs[-1]}"
        assert epochs == [sample.epoch for sample in by_rank[0]], f"rank {rank} has other epochs than rank 0"
