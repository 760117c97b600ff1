"""The protocol's steps for schedules that run from the host: enter, signal, wait, leave.

On a CPU they are done right here, as acquiring loads and releasing stores of the words that kernels in Triton's
interpreter wait on and signal with atomics. On a GPU each is a one-program kernel on the current stream.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from triton._C.libtriton import interpreter

from .. import trace
from ..kernels import signal
from ..kernels.steps import step
from ..op import OPS
from . import clock

if TYPE_CHECKING:
    from .workspace import Workspace

# How long a wait polls before it sleeps between polls; less where ranks outnumber cores, as polling then takes a core
# from the rank that is waited for. A sleep is this part of the time waited so far, so that no wait gets longer by more
# than that, and at most so long.
_SPIN_SECONDS, _SPIN_SECONDS_CROWDED, _SLEEP_PART, _SLEEP_SECONDS = 1e-3, 50e-6, 1 / 16, 500e-6
_CORES = len(os.sched_getaffinity(0))

# On x86 every aligned load acquires and every store releases, so plain ones are enough, and take a tenth of the time.
_PLAIN_WORDS = platform.machine().lower() in ("x86_64", "amd64")

_SIGNALS: int = signal.SIGNALS.value
_FINGERPRINTS: int = signal.FINGERPRINT_SLOT.value
_ENTRY: int = signal.ENTRY_SLOT.value
_EPOCH: int = signal.EPOCH.value

_TRUE = np.ones(1, dtype=bool)
_ZERO = np.zeros(1, dtype=np.int32)


@lru_cache(maxsize=1 << 14)
def _at(address: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([address], dtype=np.uint64)


@lru_cache(maxsize=1 << 14)
def _word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


@lru_cache(maxsize=1 << 14)
def _fingerprint(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def load_fingerprint(address: int) -> int:
    """The int64 at `address`, of a rank whose entry has been seen."""
    return _fingerprint(address).value


def store_fingerprint(address: int, value: int) -> None:
    """Write the int64 at `address`, before an entry is raised."""
    _fingerprint(address).value = value


def fingerprint_place(epoch: int, source: int, world_size: int) -> int:
    """The word of a header at which the fingerprint of rank `source` for an epoch begins."""
    return _SIGNALS + (_FINGERPRINTS + 2 * (epoch & 1)) * world_size + 2 * source


def load_acquire(address: int) -> int:
    """The int32 at `address`; what its writer stored before releasing it is visible afterwards."""
    if _PLAIN_WORDS:
        return _word(address).value
    at = _at(address)
    return int(interpreter.atomic_rmw(interpreter.RMW_OP.ADD, at, _ZERO, _TRUE, interpreter.MEM_SEMANTIC.ACQUIRE)[0])


def store_release(address: int, value: int) -> None:
    """Write the int32 at `address` after everything stored before."""
    if _PLAIN_WORDS:
        _word(address).value = value
        return
    at = _at(address)
    word = np.array([value], dtype=np.int32)
    interpreter.atomic_rmw(interpreter.RMW_OP.XCHG, at, word, _TRUE, interpreter.MEM_SEMANTIC.RELEASE)


def wrapping_difference(a: int, b: int) -> int:
    """a - b as int32: negative where epoch a is before epoch b, also around the wrap."""
    return (a - b + 2**31) % 2**32 - 2**31


def raised(seen: int, epoch: int) -> bool:
    """Whether a signal that holds `seen` has been raised for `epoch`: see `kernels.signal.LEAD`."""
    lead: int = signal.LEAD.value
    return 0 <= wrapping_difference(seen, epoch) < lead


class HostSteps:
    """The steps on a CPU, for the current op: `op` names it in a report, `epoch` is its number."""

    def __init__(self, workspace: Workspace) -> None:
        self._ws = workspace
        self.op, self.epoch = "", 0
        self._rank, self._world_size = workspace.rank, workspace.world_size
        self._peers = [(workspace.rank + i) % workspace.world_size for i in range(1, workspace.world_size)]

    @classmethod
    def beside(cls, workspace: Workspace, op: str) -> HostSteps:
        """Separate steps for the workspace's next epoch."""
        steps = cls(workspace)
        steps.reach(workspace.addresses)
        steps.op, steps.epoch = op, workspace.next_epoch()
        return steps

    def reach(self, addresses: list[int]) -> None:
        """Go by the arenas at these addresses from now on."""
        self._addresses = addresses
        # The address of this rank's signal of slot 0 in every rank's header; and that of the first signal in its own.
        self._signals = [address + 4 * (_SIGNALS + self._rank) for address in addresses]
        self._own = addresses[self._rank] + 4 * _SIGNALS
        self._step = 4 * self._world_size
        # Where this rank's fingerprint is in a header, in bytes from its beginning, for each half.
        self._fingerprint_at = [4 * fingerprint_place(half, self._rank, self._world_size) for half in (0, 1)]
        # Where every rank's is in this rank's own, by half and rank.
        begin, ranks = addresses[self._rank], range(self._world_size)
        self._fingerprints = [
            [begin + 4 * fingerprint_place(half, src, self._world_size) for src in ranks] for half in (0, 1)
        ]

    def signal(self, dst: int, slot: int) -> None:
        """Release everything stored for rank `dst`, under `slot`."""
        if _PLAIN_WORDS:
            _word(self._signals[dst] + slot * self._step).value = self.epoch
        else:
            store_release(self._signals[dst] + slot * self._step, self.epoch)

    # The host itself has only one way to signal.
    write = signal

    def wait(self, src: int, slot: int) -> None:
        """Wait until rank `src` has raised `slot`; PeerTimeout when the budget is spent."""
        address = self._own + slot * self._step + 4 * src
        if _PLAIN_WORDS and _word(address).value == self.epoch:
            return
        if raised(load_acquire(address), self.epoch):
            return
        with trace.span("wait", src):
            self._wait_slowly(lambda: load_acquire(address), src, slot, self.epoch)

    def meet(self) -> None:
        """Tell every peer that this rank has come one step further in growing the workspace, and wait until all have.

        PeerTimeout if one does not come, or has come but is gone.
        """
        ws, word = self._ws, 4 * signal.GROWING.value
        step = load_acquire(ws.addresses[ws.rank] + word) + 1
        store_release(ws.addresses[ws.rank] + word, step)

        def come(peer: int) -> int:
            # In this order: a rank gives up only after it has come.
            seen = load_acquire(ws.addresses[peer] + word)
            return 0 if any(map(load_acquire, self._gone(peer))) else seen

        for i in range(1, ws.world_size):
            peer = (ws.rank + i) % ws.world_size
            self._wait_slowly(partial(come, peer), peer, signal.GROWTH_SLOT.value, step)

    def _gone(self, peer: int) -> list[int]:
        # The words in which that rank says that it raises no more signals.
        return [self._ws.addresses[peer] + 4 * word.value for word in (signal.GIVEN_UP, signal.LEFT)]

    def _wait_slowly(self, poll: Callable[[], int], src: int, slot: int, expected: int) -> None:
        ws = self._ws
        ws.host_words[signal.WAITING_SLOT.value] = slot
        ws.host_words[signal.WAITING_FOR.value] = src + 1
        ran, waited = clock.Stopwatch(), 0.0
        gone = self._gone(src)
        spin = _SPIN_SECONDS if ws.world_size <= _CORES else _SPIN_SECONDS_CROWDED
        while not raised(seen := poll(), expected):
            # Read before the last poll: a rank that gives up or leaves has raised all its signals by then.
            is_gone = waited >= spin and any(map(load_acquire, gone))
            if waited >= spin and self._has_entered(src) and self._disagrees(src):
                ws.disagree(self.op, src, self.epoch)
            # `waited` is from before the poll: a rank that was itself stopped in between finds what arrived
            # meanwhile.
            if waited > ws.seconds or (is_gone and not raised(poll(), expected)):
                # Where ranks disagree the entry stands, for the others to find that out.
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
        """Begin an epoch with that op: tell every peer so, with a fingerprint of what this rank means by it."""
        self.op, self.epoch = op, self._ws.take_epoch()
        fingerprint, addresses, epoch = self._ws.meanings.now.fingerprint, self._addresses, self.epoch
        place = self._fingerprint_at[epoch & 1]
        entry = _ENTRY * self._step
        if not _PLAIN_WORDS:
            store_fingerprint(addresses[self._rank] + place, fingerprint)
            for dst in self._peers:
                store_fingerprint(addresses[dst] + place, fingerprint)
                store_release(self._signals[dst] + entry, epoch)
            return
        _fingerprint(addresses[self._rank] + place).value = fingerprint
        for dst in self._peers:
            _fingerprint(addresses[dst] + place).value = fingerprint
            _word(self._signals[dst] + entry).value = epoch

    def _disagrees(self, src: int) -> bool:
        # Whether that rank, whose entry is there, means something else.
        theirs = load_fingerprint(self._fingerprints[self.epoch & 1][src])
        return theirs != self._ws.meanings.now.fingerprint

    def _has_entered(self, src: int) -> bool:
        ws = self._ws
        entry = _SIGNALS + signal.ENTRY_SLOT.value * ws.world_size + src
        return raised(load_acquire(ws.addresses[ws.rank] + 4 * entry), self.epoch)

    def _take_back(self) -> None:
        # As in `kernels.signal`, no peer may end an op that this rank has given up, though it may end the one before.
        # Nor may it meet this rank where the memory grows.
        ws, before = self._ws, wrapping_difference(self.epoch, 1)
        for peer in range(ws.world_size):
            if peer != ws.rank:
                entry = _SIGNALS + signal.ENTRY_SLOT.value * ws.world_size + ws.rank
                store_release(ws.addresses[peer] + 4 * entry, before)
        store_release(ws.addresses[ws.rank] + 4 * signal.GROWING.value, 0)

    def leave(self) -> None:
        """Wait for every peer's entry, compare what they mean with what this rank does, and end the epoch."""
        for src in self._peers:
            self.wait(src, _ENTRY)
            if self._disagrees(src):
                self._ws.disagree(self.op, src, self.epoch)
        store_release(self._addresses[self._rank] + 4 * _EPOCH, self.epoch)


class DeviceSteps:
    """The steps on a GPU's current stream; a wait that is given up reports itself, as in any kernel."""

    def __init__(self, workspace: Workspace) -> None:
        self._ws = workspace
        self.op, self.epoch = "", 0

    def signal(self, dst: int, slot: int) -> None:
        """Release what this stream has stored for rank `dst`, under `slot`."""
        step(self._ws.channel(), OPS[self.op].number, "signal", dst, slot)

    def write(self, dst: int, slot: int) -> None:
        """Like `signal`, by the stream itself: it needs no SM.

        torch writes by cuStreamWriteValue32, which fences what the stream has done before at system scope (CUDA driver
        API, "Stream Memory Operations").
        """
        word = signal.SIGNALS.value + slot * self._ws.world_size + self._ws.rank
        words = self._ws.signal_words(dst)
        torch.ops.symm_mem.stream_write_value32_(words, word, self.epoch % 2**32)

    def wait(self, src: int, slot: int) -> None:
        """Hold this stream until rank `src` has raised `slot`."""
        step(self._ws.channel(), OPS[self.op].number, "wait", src, slot)

    def enter(self, op: str) -> None:
        """Begin an epoch with that op, and tell every peer."""
        self.op, self.epoch = op, self._ws.take_epoch()
        step(self._ws.channel(), OPS[op].number, "enter")

    def leave(self) -> None:
        """Wait for every peer's entry and end the epoch."""
        step(self._ws.channel(), OPS[self.op].number, "leave")
