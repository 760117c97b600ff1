"""Steps of the protocol for schedules that run from the host: enter, signal, wait, leave.

On a CPU the steps are acquire loads and release stores of the words that interpreted kernels access with atomics. On a
GPU each step is a kernel with one program on the current stream.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import trace
from ..kernels import signal
from ..kernels.launch import Channel
from ..kernels.steps import step
from ..op import OPS
from . import clock
from .agreement import Fingerprints
from .streams import driver
from .words import (
    PLAIN,
    fingerprint_place,
    int32_at,
    int64_at,
    load_acquire,
    load_fingerprint,
    raised,
    store_fingerprint,
    store_release,
    wrapping_difference,
)

# A wait polls for _SPIN_SECONDS before it sleeps between polls. With more ranks than cores it polls for a shorter time,
# because polling takes a core from the peer. A sleep is at most _SLEEP_SECONDS and at most _SLEEP_PART of the time
# waited so far, which bounds the delay.
_SPIN_SECONDS, _SPIN_SECONDS_CROWDED, _SLEEP_PART, _SLEEP_SECONDS = 1e-3, 50e-6, 1 / 16, 500e-6
_CORES = len(os.sched_getaffinity(0))

_SIGNALS: int = signal.SIGNALS.value
_ENTRY: int = signal.ENTRY_SLOT.value
_EPOCH: int = signal.EPOCH.value


class Epochs(Protocol):
    """A workspace as far as steps on any device use it: its ranks, arenas and epochs."""

    rank: int
    world_size: int
    addresses: list[int]
    seconds: float
    meanings: Fingerprints

    def next_epoch(self) -> int: ...
    def take_epoch(self) -> int: ...


class HostEpochs(Epochs, Protocol):
    """A workspace as far as steps on a CPU use it. A failed wait raises by `give_up` or `disagree`."""

    host_words: Any

    def give_up(self, op: str, peer: int, slot: int, expected: int, seen: int, seconds: float) -> None: ...
    def disagree(self, op: str, peer: int, epoch: int) -> None: ...


class DeviceEpochs(Epochs, Protocol):
    """A workspace as far as steps on a GPU use it."""

    device: torch.device
    host_block: Tensor
    words: Tensor
    data: Tensor

    def channel(self) -> Channel: ...


class HostSteps:
    """Steps on a CPU for the current op, with name `op` and epoch `epoch`."""

    def __init__(self, workspace: HostEpochs) -> None:
        self._ws = workspace
        self.op, self.epoch = "", 0
        self._rank, self._world_size = workspace.rank, workspace.world_size
        self._peers = [(workspace.rank + i) % workspace.world_size for i in range(1, workspace.world_size)]

    @classmethod
    def beside(cls, workspace: HostEpochs, op: str) -> HostSteps:
        """Return separate steps for the workspace's next epoch, with name `op`."""
        steps = cls(workspace)
        steps.reach(workspace.addresses)
        steps.op, steps.epoch = op, workspace.next_epoch()
        return steps

    def reach(self, addresses: list[int]) -> None:
        """Set the addresses of all ranks' arenas."""
        self._addresses = addresses
        # The address of this rank's signal of slot 0 in every rank's header; then that of the first signal in its own.
        self._signals = [address + 4 * (_SIGNALS + self._rank) for address in addresses]
        self._own = addresses[self._rank] + 4 * _SIGNALS
        self._step = 4 * self._world_size
        # Offset in bytes of this rank's fingerprint in a header, for each half.
        self._fingerprint_at = [4 * fingerprint_place(half, self._rank, self._world_size) for half in (0, 1)]
        # Addresses of every rank's fingerprint in this rank's header, by half and rank.
        begin, ranks = addresses[self._rank], range(self._world_size)
        self._fingerprints = [
            [begin + 4 * fingerprint_place(half, src, self._world_size) for src in ranks] for half in (0, 1)
        ]

    def signal(self, dst: int, slot: int) -> None:
        """Signal `slot` of rank `dst`. The signal releases all earlier stores."""
        if PLAIN:
            int32_at(self._signals[dst] + slot * self._step).value = self.epoch
        else:
            store_release(self._signals[dst] + slot * self._step, self.epoch)

    def write(self, dst: int, slot: int, count: int) -> None:
        """Signal `count` slots of rank `dst`, from `slot` on."""
        for each in range(slot, slot + count):
            self.signal(dst, each)

    def wait(self, src: int, slot: int) -> None:
        """Wait until rank `src` has raised `slot`. Raises PeerTimeout."""
        address = self._own + slot * self._step + 4 * src
        if PLAIN and int32_at(address).value == self.epoch:
            return
        if raised(load_acquire(address), self.epoch):
            return
        with trace.span("wait", src):
            self._wait_slowly(lambda: load_acquire(address), src, slot, self.epoch)

    def meet(self) -> None:
        """Increment GROWING, a step in growing the workspace, and wait until every peer has done the same.

        Raises PeerTimeout if a peer does not come in time or is gone.
        """
        ws, word = self._ws, 4 * signal.GROWING.value
        step = load_acquire(ws.addresses[ws.rank] + word) + 1
        store_release(ws.addresses[ws.rank] + word, step)
        for peer in self._peers:
            # A peer that has gone since has come, unless it broke off: then it has taken its steps back.
            come = partial(load_acquire, ws.addresses[peer] + word)
            self._wait_slowly(come, peer, signal.GROWTH_SLOT.value, step)

    def _gone(self, peer: int) -> list[int]:
        # Addresses of the words by which rank `peer` tells that it raises no more signals.
        return [self._ws.addresses[peer] + 4 * word.value for word in (signal.GIVEN_UP, signal.LEFT)]

    def _wait_slowly(self, poll: Callable[[], int], src: int, slot: int, expected: int) -> None:
        ws = self._ws
        ws.host_words[signal.WAITING_SLOT.value] = slot
        ws.host_words[signal.WAITING_FOR.value] = src + 1
        ran, waited = clock.Stopwatch(), 0.0
        gone = self._gone(src)
        spin = _SPIN_SECONDS if ws.world_size <= _CORES else _SPIN_SECONDS_CROWDED
        while not raised(seen := poll(), expected):
            # Read before the last poll: a rank raises all its signals before it gives up or leaves.
            is_gone = waited >= spin and any(map(load_acquire, gone))
            if waited >= spin and self._has_entered(src) and self._disagrees(src):
                ws.disagree(self.op, src, self.epoch)
            # `waited` was read before the poll: a rank that was stopped in between sees signals that arrived meanwhile.
            if waited > ws.seconds or (is_gone and not raised(poll(), expected)):
                # If ranks disagree, the entry stays, so that the other ranks find the difference too.
                for peer in self._peers:
                    if self._has_entered(peer) and self._disagrees(peer):
                        ws.disagree(self.op, peer, self.epoch)
                self._take_back()
                ws.give_up(self.op, src, slot, expected, seen, waited)
            waited = ran.seconds()
            if waited < spin:
                os.sched_yield()
            else:
                time.sleep(min(_SLEEP_PART * waited, _SLEEP_SECONDS))
        ws.host_words[signal.WAITING_FOR.value] = 0

    def enter(self, op: str) -> None:
        """Begin an epoch with op `op`, and give every peer this rank's entry and fingerprint."""
        self.op, self.epoch = op, self._ws.take_epoch()
        fingerprint, addresses, epoch = self._ws.meanings.now.fingerprint, self._addresses, self.epoch
        place = self._fingerprint_at[epoch & 1]
        entry = _ENTRY * self._step
        if not PLAIN:
            store_fingerprint(addresses[self._rank] + place, fingerprint)
            for dst in self._peers:
                store_fingerprint(addresses[dst] + place, fingerprint)
                store_release(self._signals[dst] + entry, epoch)
            return
        int64_at(addresses[self._rank] + place).value = fingerprint
        for dst in self._peers:
            int64_at(addresses[dst] + place).value = fingerprint
            int32_at(self._signals[dst] + entry).value = epoch

    def _disagrees(self, src: int) -> bool:
        # Return whether rank `src`, which has entered, has another fingerprint.
        theirs = load_fingerprint(self._fingerprints[self.epoch & 1][src])
        return theirs != self._ws.meanings.now.fingerprint

    def _has_entered(self, src: int) -> bool:
        ws = self._ws
        entry = _SIGNALS + signal.ENTRY_SLOT.value * ws.world_size + src
        return raised(load_acquire(ws.addresses[ws.rank] + 4 * entry), self.epoch)

    def _take_back(self) -> None:
        # As in `kernels.signal`: no peer may end an op that this rank has given up, but a peer may end the previous op.
        # And no peer may pass `meet` with this rank.
        ws, before = self._ws, wrapping_difference(self.epoch, 1)
        for peer in range(ws.world_size):
            if peer != ws.rank:
                entry = _SIGNALS + signal.ENTRY_SLOT.value * ws.world_size + ws.rank
                store_release(ws.addresses[peer] + 4 * entry, before)
        store_release(ws.addresses[ws.rank] + 4 * signal.GROWING.value, 0)

    def leave(self) -> None:
        """Wait for every peer's entry, compare fingerprints, and end the epoch."""
        for src in self._peers:
            self.wait(src, _ENTRY)
            if self._disagrees(src):
                self._ws.disagree(self.op, src, self.epoch)
        store_release(self._addresses[self._rank] + 4 * _EPOCH, self.epoch)


class DeviceSteps:
    """Steps on a GPU's current stream. A wait that times out writes a report, as in other kernels."""

    def __init__(self, workspace: DeviceEpochs) -> None:
        self._ws = workspace
        self.op, self.epoch = "", 0

    def signal(self, dst: int, slot: int) -> None:
        """Signal `slot` of rank `dst`. The signal releases this stream's earlier stores."""
        step(self._ws.channel(), OPS[self.op].number, "signal", dst, slot)

    def write(self, dst: int, slot: int, count: int) -> None:
        """Signal `count` slots of rank `dst`, from `slot` on, by stream memory operations, which need no SM.

        One call of the driver for all. Each operation fences the stream's earlier work at system scope (CUDA driver
        API, "Stream Memory Operations").
        """
        first = self._ws.addresses[dst] + 4 * self._word(slot, self._ws.rank)
        step = 4 * self._ws.world_size
        driver().write_all(self._stream(), range(first, first + count * step, step), self.epoch)

    def _stream(self) -> int:
        handle: int = torch.cuda.current_stream(self._ws.device).cuda_stream
        return handle

    def _word(self, slot: int, source: int) -> int:
        return _SIGNALS + slot * self._ws.world_size + source

    def wait(self, src: int, slot: int) -> None:
        """Hold this stream until rank `src` has raised `slot`."""
        step(self._ws.channel(), OPS[self.op].number, "wait", src, slot)

    def enter(self, op: str) -> None:
        """Begin an epoch with op `op`, and give every peer this rank's entry and fingerprint."""
        self.op, self.epoch = op, self._ws.take_epoch()
        step(self._ws.channel(), OPS[op].number, "enter")

    def leave(self) -> None:
        """Wait for every peer's entry, compare fingerprints, and end the epoch."""
        step(self._ws.channel(), OPS[self.op].number, "leave")
