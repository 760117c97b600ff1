"""What a rank of `soak` does: make its part of every call, late by chance, check it, and say how large it has become.

Apart from the command, as ranks import it by its own name.
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

# Ranks on fewer cores, interpreted kernels among them: a peer may be late, but not this late.
WAIT_SECONDS = 120.0
# What memory may grow by from the second quarter of a run to the last, in bytes a rank. What is kept for a shape
# (plans, views, a library's primitives) is all there after the first, as shapes come again from then on. Pages that the
# allocator and Python have not handed back come and go by this much; a tensor of ours that was kept at every call, the
# smallest of them 1 KiB with its bookkeeping, would be 5 MiB over the 5,000 calls of 10,000 that lie between.
NOISE_BYTES = 4 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """A rank after some calls: resident memory, open descriptors, its workspace's epoch and signal-bearing arena."""

    resident_bytes: int
    num_fds: int
    epoch: int


def delay(seed: int, number: int, rank: int) -> float:
    """Seconds that `rank` is late for a call: mostly nothing, else 10 us to 5 ms, evenly by order of magnitude."""
    source = random.Random(f"{seed}/{number}/delay of {rank}")
    return 10.0 ** source.uniform(-5, -2.3) if source.random() < 0.4 else 0.0


def drawn(seed: int, number: int, num_shapes: int, world_size: int) -> Call:
    """Call `number` of a seed: after `num_shapes` calls they come again, with other values in them."""
    call = draw(random.Random(f"{seed}/{number % num_shapes}"), world_size)
    return replace(call, seed=call.seed + number)


def make_calls(
    group: ProcessGroup, seed: int, num_shapes: int, first: int, count: int, epoch: int | None
) -> Sample:  # fmt: skip
    """Make calls `first` to `first + count - 1` on this rank and check them; `epoch`: of a new workspace, None to go
    on with the old one.
    """
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
    """By how many bytes, and how many descriptors, the last quarter lies above the second: medians, so that neither
    what is filled once at the start nor a single peak counts.
    """
    quarter = len(samples) // 4
    middle, last = samples[quarter : 2 * quarter], samples[-quarter:]

    def median(each: Sequence[Sample], of: Callable[[Sample], int]) -> float:
        return statistics.median(map(of, each))

    resident = [median(each, lambda sample: sample.resident_bytes) for each in (middle, last)]
    fds = [median(each, lambda sample: sample.num_fds) for each in (middle, last)]
    return resident[1] - resident[0], fds[1] - fds[0]


def check_flat(by_rank: Sequence[Sequence[Sample]]) -> None:
    """AssertionError unless the memory of every rank is as large, and as many files open, at the end as before."""
    for rank, samples in enumerate(by_rank):
        grown_bytes, grown_fds = growth(samples)
        assert grown_fds == 0, f"rank {rank} has {grown_fds:+g} descriptors open, of {samples[-1].num_fds}"
        assert grown_bytes <= NOISE_BYTES, (
            f"rank {rank} has grown by {grown_bytes / 2**20:.1f} MiB from the second quarter to the last, of "
            f"{samples[-1].resident_bytes / 2**20:.0f} MiB: at most {NOISE_BYTES / 2**20:.0f} are noise"
        )


def check_wrapped(by_rank: Sequence[Sequence[Sample]]) -> None:
    """AssertionError unless every rank's epoch went past the largest int32, to the same one on all."""
    for rank, samples in enumerate(by_rank):
        epochs = [sample.epoch for sample in samples]
        assert epochs[0] > 0 > epochs[-1], f"epochs of rank {rank} did not wrap: {epochs[0]} to {epochs[-1]}"
        assert epochs == [sample.epoch for sample in by_rank[0]], f"rank {rank} has other epochs than rank 0"
