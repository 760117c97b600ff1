"""One rank's end of a group's symmetric memory: the arenas of all its ranks, the epoch, and what went wrong.

An arena is a header with the signals (see `kernels.signal`), then two halves of data; an op at epoch e uses half e % 2.
Workspaces grow collectively, are never freed by the garbage collector, and are destroyed explicitly. One stream at a
time: on a GPU, ops issued on different streams are chained by events.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import locks
from ..cost import hardware
from ..cost.hardware import Hardware
from ..errors import RanksDisagree
from ..kernels import signal
from ..kernels.launch import Channel
from ..kernels.loading import check_device
from ..memory import Arena, Exchange, Memory, Unreachable
from ..shards import offsets
from ..torch_private import outside_inference
from . import agreement, clock, timeouts
from .agreement import Meaning, Meanings
from .failures import Failing
from .rendezvous import ArenaExchange, StoreExchange
from .steps import DeviceSteps, HostSteps

_MIN_SLOTS = 64
_MIN_HALF_BYTES = 1 << 16
# Making a view takes longer than looking one up; a layer asks for the same few again and again.
_MAX_VIEWS = 1024
# Shapes may never repeat. What is forgotten is decided anew, alike on all ranks, from what they know alike.
_MAX_DECISIONS = 4096

# How far an op has come: none is under way, nothing has been sent, or peers may have seen something of it. Each change
# is one store, to `_SENT` before anything is sent, to `_NO_OP` after everything: an interruption finds one or the
# other.
_NO_OP, _NOTHING_SENT, _SENT = 0, 1, 2

Kept = TypeVar("Kept")

_REPORT: int = signal.REPORT.value
_EPOCH: int = signal.EPOCH.value
_ARRIVED: int = signal.ARRIVED.value
_BUDGET_MS: int = signal.BUDGET_MS.value
_GIVEN_UP: int = signal.GIVEN_UP.value
_TICKETS: int = signal.TICKETS.value


def _wrap(epoch: int) -> int:
    return (epoch + 2**31) % 2**32 - 2**31


class Workspace(Failing):
    """One rank's end of a group's symmetric memory."""

    @outside_inference
    def __init__(
        self,
        memory: Memory,
        device: torch.device,
        *,
        epoch: int = 0,
        seconds: float | None = None,
        make: bool = True,
    ) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self.device = device
        # On a CPU a peer's memory is as near as the own one; on a GPU a matmul must not read it again and again.
        self.in_place = self._on_host = device.type == "cpu"
        self.slots = self.half_bytes = 0
        self.seconds = timeouts.of(None) if seconds is None else seconds
        self.failure: RuntimeError | RanksDisagree | None = None
        self.meanings = Meanings()
        self.made = False
        self._op, self._progress = "", _NO_OP
        # The call that made the last op that peers may have seen something of.
        self._call: locks.Open | None = None
        self._memory = memory
        self._arena: Arena | None = None
        # The protocol's steps for ops that are driven from the host.
        self.steps = HostSteps(self) if self._on_host else DeviceSteps(self)
        self._tables: dict[tuple[int, ...], Tensor] = {}
        # What captured graphs go on reading and writing, however the workspace has changed since.
        self._captured: list[Any] = []
        # Views of the arenas, dropped with them: a view that is kept elsewhere keeps its arena alive.
        self.views: dict[Any, Any] = {}
        # What dispatch knows of this group, and what has been decided by it: the ranks agree on that anew with every
        # workspace.
        self.knowledge: Any = None
        self._decisions: dict[Any, Any] = {}
        self._mirror = epoch
        self._mirror_is_exact = True
        self._last_stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        on_gpu = device.type == "cuda"
        self.host_block = torch.zeros(signal.HOST_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._report = self.host_block.numpy()
        self._gpu = hardware.number_of(hardware.of_gpu(torch.cuda.get_device_name(device)) if on_gpu else None)
        if make:
            self.make()

    def make(self, exchange: StoreExchange | None = None) -> None:
        """Make the arenas, collectively. Until then, or if it raises, all that can be done is to `close`."""
        self._allocate(_MIN_HALF_BYTES, _MIN_SLOTS, self._mirror, exchange)
        # Ranks must decide alike what depends on the machine: all go by rank 0's.
        self.hardware = self._shared_hardware()
        clock.drive(self.host_block[signal.CLOCK_MS.value :])
        self.making = 0 if exchange is None else exchange.making
        self.made = True

    @outside_inference
    def _allocate(self, half_bytes: int, slots: int, epoch: int, exchange: Exchange | None) -> None:
        words = signal.SIGNALS.value + slots * self.world_size
        size = -(-words // 64) * 64 + agreement.TEXT_BYTES // 4
        header = torch.zeros(size, dtype=torch.int32, device="cpu")
        # Signals start at the present epoch, not at 0: near the wrap 0 could pass for a later one.
        header[signal.SIGNALS.value : -agreement.TEXT_BYTES // 4] = epoch
        header[signal.EPOCH.value] = epoch
        header[signal.HARDWARE.value] = self._gpu
        data_offset = header.numel() * 4
        arena = self._memory.allocate(data_offset + 2 * half_bytes, header, exchange)
        if self._arena is not None and self._arena.multicast and not arena.multicast:
            arena.release()  # what was made before counts with it
            raise Unreachable("the larger memory has no address of all ranks, as the present one has")
        own, addresses = arena.tensors[self.rank], [each.data_ptr() for each in arena.tensors]
        old, self._arena = self._arena, arena
        # An interruption from here on leaves a workspace that refuses all use and goes by its arena alone.
        self.views = {}
        self.half_bytes, self.slots, self.data_offset = half_bytes, slots, data_offset
        self.words = own[:data_offset].view(torch.int32)
        # The same words for the host, where it can reach them: an element of a tensor takes ten times as long.
        self.host_words = self.words.numpy() if self.device.type == "cpu" else np.zeros(0)
        self.data, self.addresses = own[data_offset : data_offset + 2 * half_bytes], addresses
        if isinstance(self.steps, HostSteps):
            self.steps.reach(addresses)
        known = [*addresses, self.host_block.data_ptr(), arena.multicast]
        self.peers = torch.tensor(known, dtype=torch.int64, device=self.device)
        self._channel = Channel(self.peers, self.data, self.rank, self.world_size, half_bytes, data_offset)
        # Only now, as the budget may have been set meanwhile.
        self._budget_ms = math.ceil(self.seconds * 1000)
        self.words[_BUDGET_MS] = self._budget_ms
        if old is not None and not self._captured:
            # Nobody reads the old arena any more: a peer gets here only after its last op, and its reads, have ended.
            old.release()

    def _shared_hardware(self) -> Hardware:
        if self.device.type == "cpu":
            return hardware.CPU
        assert self._arena is not None
        words = self._arena.tensors[0][: 4 * signal.SIGNALS.value].view(torch.int32)
        known = hardware.numbered(int(words[signal.HARDWARE.value]))
        return known or hardware.assumed("" if self._gpu else torch.cuda.get_device_name(self.device))

    @property
    def has_multicast(self) -> bool:
        """Whether kernels reach all arenas at once. Interpreted ones do so one after the other."""
        return self._on_host or (self._arena is not None and self._arena.multicast != 0)

    @property
    def epoch(self) -> int:
        """The last epoch that this rank has finished. On a GPU this waits for the device."""
        return int(self.words[signal.EPOCH.value])

    def next_epoch(self) -> int:
        """The epoch of the op that the host is about to drive."""
        if self.device.type == "cpu":
            return _wrap((self._mirror if self._progress else self.epoch) + 1)
        if self._capturing():
            raise RuntimeError(
                "copies go to addresses chosen on the host and cannot be captured: use schedule 'fused', which pushes"
            )
        if not self._mirror_is_exact:
            # Every replay of a graph advances the device's epoch, which the host does not see.
            self._mirror, self._mirror_is_exact = self.epoch, not self._captured
        return _wrap(self._mirror + 1)

    def require(self, half_bytes: int, slots: int) -> None:
        """What every op begins with: grow until a half holds `half_bytes` and there are `slots` signals a source.

        Collective where it grows: on a CPU PeerTimeout where a peer does not come. Raises what an earlier op reported.
        """
        self._check()
        if half_bytes <= self.half_bytes and slots <= self.slots:
            return
        if self._capturing():
            raise RuntimeError(
                f"the workspace must grow to halves of {half_bytes} bytes, which a graph capture does not allow: "
                "run the same op once before capturing"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        grown = self.half_bytes
        if half_bytes > grown:
            grown = -(-max(half_bytes, grown * 3 // 2) // 4096) * 4096
        slots = max(self.slots, 2 * slots) if slots > self.slots else self.slots
        if not self._memory.exchanges:
            self._allocate(grown, slots, self.epoch, None)
            return
        try:
            self._allocate(grown, slots, self.epoch, ArenaExchange(self))
        except RanksDisagree:
            raise
        except (Unreachable, ValueError) as error:
            # Every rank gets this error, and goes on with the memory that it has.
            self._progress = min(self._progress, _NOTHING_SENT)
            text = f"the workspace cannot grow: {error}"
            if isinstance(error, Unreachable):
                raise Unreachable(text) from error
            ranks, meant = range(self.world_size), self.meanings.now.values
            told = tuple(dict(meant) if rank == self.rank else None for rank in ranks)
            raise RanksDisagree(text, self._op, self.rank, told) from error
        self._progress = min(self._progress, _NOTHING_SENT)

    def tell_peers(self) -> None:
        """To be called before peers may see anything of an op: from here on it cannot be broken off silently."""
        if self._progress:
            self._progress = _SENT
        else:
            # Virtual ranks, whose ops do not pass through `begin` and `end`.
            self._mirror_is_exact = False

    def channel(self) -> Channel:
        """What a kernel's launcher needs."""
        if self._progress:
            self._progress = _SENT
        else:
            self.tell_peers()
        self._channel.fingerprint = self.meanings.now.fingerprint
        return self._channel

    def table(self, sizes: tuple[int, ...]) -> Tensor:
        """The row offsets of `sizes` on the device (int32, world_size + 1)."""
        table = self._tables.get(sizes)
        if table is None:
            if len(self._tables) >= _MAX_VIEWS and not self._capturing():
                # A kernel on another stream may still be reading one.
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self._tables.clear()
            table = self._tables[sizes] = self._made_table(sizes)
        if not self._on_host and self._capturing():
            self._captured.append(table)
        return table

    @outside_inference
    def _made_table(self, sizes: tuple[int, ...]) -> Tensor:
        return torch.tensor(offsets(sizes), dtype=torch.int32, device=self.device)

    def view(self, peer: int, epoch: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[rows, cols] of `dtype`, contiguous, `offset` bytes into rank `peer`'s half for `epoch`."""
        key = (peer, epoch & 1, offset, shape, dtype)
        view: Tensor | None = self.views.get(key)
        if view is None:
            begin = self.data_offset + (epoch & 1) * self.half_bytes + offset
            view = self.keep(key, self._made_view(peer, begin, shape, dtype))
        return view

    def keep(self, key: object, views: Kept) -> Kept:
        """Keep them in `views` until there are too many, or the arenas are replaced."""
        if len(self.views) >= _MAX_VIEWS:
            self.views.clear()
        self.views[key] = views
        return views

    def decided(self, key: object, make: Callable[[], Kept]) -> Kept:
        """What `make` decided for this key, the first time that it was asked for; forgotten when there are too many."""
        if key not in self._decisions:
            made = make()
            if len(self._decisions) >= _MAX_DECISIONS:
                self._decisions.clear()
            self._decisions[key] = made
        found: Kept = self._decisions[key]
        return found

    @outside_inference
    def _made_view(self, peer: int, begin: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        assert self._arena is not None
        return self._arena.tensors[peer][begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def take_epoch(self) -> int:
        """The epoch of an op that the host drives, of which peers may see something from now on."""
        if self._on_host and self._progress:
            # Every op passes here.
            self._progress = _SENT
            return (self._mirror + 1 + 2**31) % 2**32 - 2**31
        epoch = self.next_epoch()
        self.tell_peers()
        return epoch

    def begin(self, op: str, meant: Meaning) -> None:
        """To be called before an op issues anything; `meant`: what it means. Chains streams. RuntimeError if the last
        op has not ended, or the call that made it has not returned.
        """
        if self.meanings.now is not meant:
            self.meanings.take(meant)
        unreturned = self._call is not None and not self._call.returned and self._call is not locks.current()
        if (self._progress == _SENT or unreturned) and self.failure is None:
            # It was interrupted where nothing could notice that.
            self._abandon(self._op, None)
        if self.failure is not None:
            raise self.failure
        self._op, self._progress = op, _NOTHING_SENT
        if self._report[_REPORT]:
            self._check()
        if self._on_host:
            words = self.host_words
            epoch = int(words[_EPOCH])
            if (epoch != self._mirror and self._mirror_is_exact) or words[_ARRIVED] or words[_TICKETS]:
                self._refuse_words(words, self._mirror)
            words[_BUDGET_MS] = self._budget_ms
            self._mirror, self._mirror_is_exact = epoch, True
            return
        check_device(self.data)
        if self._capturing():
            self._captured.append((self._arena, self.peers))
            return
        stream = torch.cuda.current_stream(self.device)
        if self._done is not None and stream != self._last_stream:
            stream.wait_event(self._done)
        self._last_stream = stream

    def end(self) -> None:
        """To be called after all that an op issues: raises what the op has reported by now."""
        if self.device.type != "cpu":
            capturing = self._capturing()
            if not capturing:
                self._done = self._done or torch.cuda.Event()
                self._done.record(self._last_stream)
            # A captured op advances the device's epoch at every replay, which the host does not see.
            self._mirror_is_exact = self._mirror_is_exact and not capturing
        self._check()
        if self._on_host and self._progress == _SENT:
            words = self.host_words
            if words[_GIVEN_UP] or int(words[_EPOCH]) != _wrap(self._mirror + 1):
                self._refuse_words(words, _wrap(self._mirror + 1))
        if self._progress == _SENT or self.device.type != "cpu":
            self._mirror = _wrap(self._mirror + 1)
            self._call = locks.current()
        self._progress = _NO_OP

    def interrupted(self, op: str, error: BaseException) -> None:
        """To be called in place of `end` if the op raises anything. Half way through an op this fails the workspace, as
        the peers are in the middle of it. An error before the first signal leaves no trace: the same call may be made
        again.
        """
        if self._progress != _SENT:
            self._progress = _NO_OP
        elif self.failure is None:
            self._abandon(op, error)

    @contextlib.contextmanager
    def running(self, op: str) -> Iterator[None]:
        """`begin` and `end`, or `interrupted`, around an op."""
        self.begin(op, self.meanings.now)
        try:
            yield
            self.end()
        except BaseException as error:
            self.interrupted(op, error)
            raise

    @property
    def loads_for_capture(self) -> bool:
        """Whether what runs here now may be captured in a graph later."""
        return self.device.type == "cuda" and not self._capturing()

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Wait for the device and raise PeerTimeout if any op so far has reported one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._check()

    def signal_words(self, peer: int) -> Tensor:
        """Rank `peer`'s header as torch's stream operations want it: flat, uint32."""
        assert self._arena is not None
        return self._arena.tensors[peer][: self.data_offset].view(torch.uint32)

    def set_timeout(self, seconds: float) -> None:
        """The budget of every wait from the next op on."""
        self.seconds, self._budget_ms = seconds, math.ceil(seconds * 1000)
        # Another thread may close the workspace meanwhile: its memory stays mapped as long as `words` refers to it.
        words = getattr(self, "words", None)
        if words is not None:
            words[_BUDGET_MS] = self._budget_ms

    def close(self, why: int = 1) -> None:
        """Give the memory back. The peers may still use theirs. why: what they read in LEFT, see `kernels.signal`."""
        try:
            # Kernels that still wait for a lost peer end by the clock, which therefore goes on until they have.
            if self._arena is not None and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            clock.release(self.host_block[signal.CLOCK_MS.value :])
        if (arena := self._arena) is not None:
            self._leave(why)
            self._arena, self.views = None, {}
            for name in ("words", "host_words", "data", "_channel"):
                # A workspace that was interrupted while it was made lacks some of them.
                vars(self).pop(name, None)
            arena.release()
            self._captured.clear()
        # With its traceback, the error keeps frames alive: of a backward pass also the graph, and by that this.
        self.failure = RuntimeError("this workspace has been given back, by fusedtp.destroy or with its group")
