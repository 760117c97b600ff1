"""Workspace: one rank's view of a group's symmetric memory, with all ranks' arenas, the epoch and failures.

An arena is a header with signals (see `kernels.signal`), then two halves of data. An op at epoch e uses half e % 2.
Workspaces grow collectively. `registry` gives them back by `destroy` or with their group. On a GPU, `streams` orders
the ops of several streams.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import lanes, locks
from ..cost import hardware
from ..cost.hardware import Hardware
from ..errors import RanksDisagree
from ..kernels import INTERPRETED, signal
from ..kernels.launch import Channel
from ..kernels.loading import check_device
from ..memory import Arena, Exchange, Memory, Unreachable
from ..shards import offsets
from ..torch_private import outside_inference
from . import agreement, clock, timeouts
from .agreement import Fingerprint, Fingerprints
from .failures import Failing
from .rendezvous import ArenaExchange, StoreExchange
from .steps import DeviceSteps, HostSteps
from .stream_steps import StreamSteps
from .streams import Turns

_MIN_SLOTS = 64
_MIN_HALF_BYTES = 1 << 16
# More than any GPU has multiprocessors.
_NUM_COUNTERS = 1024
# Size of the cache of views. Making a view takes longer than a lookup.
_MAX_VIEWS = 1024
# Number of cached tables of row offsets, because numbers of rows may never repeat.
_MAX_TABLES = 32

# Progress of an op: no op runs, the op has sent nothing, or peers may have seen part of it. Each change is one store,
# so that interruptions find a valid state: `_SENT` is stored before the first send, `_NO_OP` after the op.
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
    """One rank's view of a group's symmetric memory, for the ops of one lane."""

    @outside_inference
    def __init__(
        self,
        memory: Memory,
        device: torch.device,
        *,
        epoch: int = 0,
        seconds: float | None = None,
        make: bool = True,
        lane: int = lanes.ORDINARY,
        members: tuple[int, ...] = (),
    ) -> None:
        self.lane, self.members = lane, members
        self.rank, self.world_size = memory.rank, memory.world_size
        self.device = device
        # True if a matmul may read a peer's memory in place. On a GPU that would load the same data many times.
        self.reads_peers = self._on_host = device.type == "cpu"
        self.slots = self.half_bytes = 0
        self.seconds = timeouts.of_present(None) if seconds is None else seconds
        self.failure: RuntimeError | RanksDisagree | None = None
        # Programs of this rank count by them, and kernels leave them at zero. Made before any op, as an op that is
        # captured would zero its own at every replay.
        self.counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        self.meanings = Fingerprints()
        self.made = False
        self._op, self._progress = "", _NO_OP
        # The call that ran the last op of which peers may have seen a part.
        self._call: locks.ActiveCall | None = None
        self._memory = memory
        self._arena: Arena | None = None
        self.steps: HostSteps | DeviceSteps
        self.steps = HostSteps(self) if self._on_host else StreamSteps(self) if lane else DeviceSteps(self)
        self._tables: dict[tuple[int, ...], Tensor] = {}
        # Memory that captured graphs read and write, kept alive after the workspace has changed.
        self._captured: list[Any] = []
        # Cache of views of the arenas, dropped with them. A view that is kept elsewhere keeps its arena alive.
        self.views: dict[Any, Any] = {}
        # The last finished epoch as the host counts, which needs no read of the device.
        self._host_epoch = epoch
        self._host_epoch_is_exact = True
        on_gpu = device.type == "cuda"
        self._turns = Turns(device) if on_gpu else None
        self.host_block = torch.zeros(signal.HOST_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._report = self.host_block.numpy()
        of_gpu = hardware.of_gpu(torch.cuda.get_device_name(device)) if on_gpu else None
        self._hardware_number = hardware.number_of(of_gpu) if on_gpu else int(INTERPRETED)
        if make:
            self.make()

    def make(self, exchange: StoreExchange | None = None) -> None:
        """Make the arenas, collectively. Before this, or if it raises, only `close` may be called."""
        self._allocate(_MIN_HALF_BYTES, _MIN_SLOTS, self._host_epoch, exchange)
        # Ranks must make the same decisions, so all use rank 0's hardware.
        self.hardware = self._shared_hardware()
        look = self.steps.look if isinstance(self.steps, StreamSteps) else None
        clock.drive(self.host_block[signal.CLOCK_MS.value :], look)
        self.making = 0 if exchange is None else exchange.making
        self.made = True

    @outside_inference
    def _allocate(self, half_bytes: int, slots: int, epoch: int, exchange: Exchange | None) -> None:
        words = signal.SIGNALS.value + slots * self.world_size
        size = -(-words // 64) * 64 + agreement.TEXT_BYTES // 4
        header = torch.zeros(size, dtype=torch.int32, device="cpu")
        # Signals start at the present epoch: near the wrap, 0 could pass for a later epoch.
        header[signal.SIGNALS.value : -agreement.TEXT_BYTES // 4] = epoch
        header[signal.EPOCH.value] = epoch
        header[signal.HARDWARE.value] = self._hardware_number
        data_offset = header.numel() * 4
        arena = self._memory.allocate(data_offset + 2 * half_bytes, header, exchange)
        if self._arena is not None and self._arena.multicast and not arena.multicast:
            arena.release()  # all ranks keep the present arenas
            raise Unreachable("the larger memory has no address of all ranks, as the present one has")
        own, addresses = arena.tensors[self.rank], [each.data_ptr() for each in arena.tensors]
        old, self._arena = self._arena, arena
        # An interruption from here on leaves a workspace that refuses use, except to close its arena.
        self.views = {}
        self.half_bytes, self.slots, self.data_offset = half_bytes, slots, data_offset
        self.words = own[:data_offset].view(torch.int32)
        # The words as an array on a CPU: reading an element of a tensor takes ten times as long.
        self.host_words = self.words.numpy() if self.device.type == "cpu" else np.zeros(0)
        self.data, self.addresses = own[data_offset : data_offset + 2 * half_bytes], addresses
        if isinstance(self.steps, HostSteps):
            self.steps.reach(addresses)
        known = [*addresses, self.host_block.data_ptr(), arena.multicast]
        self.peers = torch.tensor(known, dtype=torch.int64, device=self.device)
        self._channel = Channel(
            self.peers, self.data, self.rank, self.world_size, half_bytes, data_offset,
            arenas=tuple([each[data_offset : data_offset + 2 * half_bytes] for each in arena.tensors]),
        )  # fmt: skip
        # Last, because `set_timeout` may have been called meanwhile.
        self._budget_ms = math.ceil(self.seconds * 1000)
        self.words[_BUDGET_MS] = self._budget_ms
        if old is not None and not self._captured:
            # No peer reads the old arena: a peer gets here only after its last op has ended.
            old.release()

    def _shared_hardware(self) -> Hardware:
        if self.device.type == "cpu":
            return hardware.CPU
        known = hardware.numbered(self._hardware_number_of(0))
        return known or hardware.assumed("" if self._hardware_number else torch.cuda.get_device_name(self.device))

    def _hardware_number_of(self, rank: int) -> int:
        assert self._arena is not None
        words = self._arena.tensors[rank][: 4 * signal.SIGNALS.value].view(torch.int32)
        return int(words[signal.HARDWARE.value])

    def compiling_ranks(self) -> list[int]:
        """Return the ranks that do not interpret kernels, as every rank sees them; for a CPU."""
        return [rank for rank in range(self.world_size) if not self._hardware_number_of(rank)]

    @property
    def has_multicast(self) -> bool:
        """Return whether kernels can reach all arenas by one address. Interpreted kernels emulate that."""
        return self._on_host or (self._arena is not None and self._arena.multicast != 0)

    @property
    def epoch(self) -> int:
        """Return the last epoch that this rank has finished. On a GPU this waits for the device."""
        return int(self.words[signal.EPOCH.value])

    def next_epoch(self) -> int:
        """Return the epoch of the next op that runs from the host."""
        if self.device.type == "cpu":
            return _wrap((self._host_epoch if self._progress else self.epoch) + 1)
        if self._capturing():
            raise RuntimeError(
                "copies go to addresses chosen on the host and cannot be captured: use schedule 'fused', which pushes"
            )
        if not self._host_epoch_is_exact:
            # Every replay of a graph advances the device's epoch. The host does not see that.
            self._host_epoch, self._host_epoch_is_exact = self.epoch, not self._captured
        return _wrap(self._host_epoch + 1)

    def require(self, half_bytes: int, slots: int) -> None:
        """Grow the workspace to halves of at least `half_bytes` and at least `slots` signals for each source.

        Collective if the workspace grows. On a CPU, raises PeerTimeout if a peer does not come. Raises the failure of
        an earlier op.
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
        try:
            self._allocate(grown, slots, self.epoch, ArenaExchange(self) if self._memory.exchanges else None)
        except RanksDisagree:
            raise
        except (Unreachable, ValueError) as error:
            # Every rank gets this error and keeps its present memory.
            self._progress = min(self._progress, _NOTHING_SENT)
            text = f"the workspace cannot grow: {error}"
            if isinstance(error, Unreachable):
                raise Unreachable(text) from error
            ranks, meant = range(self.world_size), self.meanings.now.values
            values = tuple(dict(meant) if rank == self.rank else None for rank in ranks)
            raise RanksDisagree(text, self._op, self.rank, values) from error
        self._progress = min(self._progress, _NOTHING_SENT)

    def tell_peers(self) -> None:
        """Record that peers may see part of the op from now on. After that, an interruption is a failure."""
        if self._progress:
            self._progress = _SENT
        else:
            # Ops of virtual ranks do not call `begin` and `end`.
            self._host_epoch_is_exact = False

    def channel(self) -> Channel:
        """Return the arguments of a kernel's launcher, and record that the op sends."""
        if self._progress:
            self._progress = _SENT
        else:
            self.tell_peers()
        self._channel.fingerprint = self.meanings.now.fingerprint
        return self._channel

    def table(self, sizes: tuple[int, ...]) -> Tensor:
        """Return the row offsets of `sizes` on the device (int32, world_size + 1)."""
        table, capturing = self._tables.get(sizes), not self._on_host and self._capturing()
        if table is None:
            table = self._made_table(sizes, capturing)
            if not capturing:
                if len(self._tables) >= _MAX_TABLES:
                    oldest = self._tables.pop(next(iter(self._tables)))
                    if self.device.type == "cuda":
                        # This op's stream waits for the ops of all streams, which may read the table.
                        oldest.record_stream(torch.cuda.current_stream(self.device))
                self._tables[sizes] = table
        if capturing:
            self._captured.append(table)
        return table

    @outside_inference
    def _made_table(self, sizes: tuple[int, ...], capturing: bool) -> Tensor:
        if self._on_host:
            return torch.tensor(offsets(sizes), dtype=torch.int32, device=self.device)
        if capturing:
            # A capture refuses copies from the host. The numbers are there in replays only, so no other op may read it.
            table = torch.empty(len(sizes) + 1, dtype=torch.int32, device=self.device)
            for each, begin in zip(table, offsets(sizes), strict=True):
                each.fill_(begin)
            return table
        # A copy from pageable memory would wait for the device.
        table = torch.tensor(offsets(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
        return table.to(self.device, non_blocking=True)

    def view(self, peer: int, epoch: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of `shape` and `dtype`, `offset` bytes into rank `peer`'s half for `epoch`.

        `offset` is a multiple of the dtype's size.
        """
        key = peer, epoch & 1, dtype
        half, begin = self.views.get(key) or self.keep(key, self._half(*key))
        return half.as_strided(shape, (shape[1], 1), begin + offset // dtype.itemsize)

    def keep(self, key: object, views: Kept) -> Kept:
        """Cache `views` until the cache is full or the arenas are replaced, and return them."""
        if len(self.views) >= _MAX_VIEWS:
            self.views.clear()
        self.views[key] = views
        return views

    @outside_inference
    def _half(self, peer: int, half: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        # Return a half as one row, and the place of its first element in its storage.
        assert self._arena is not None
        begin = self.data_offset + half * self.half_bytes
        row = self._arena.tensors[peer][begin : begin + self.half_bytes].view(dtype)
        return row, int(row.storage_offset())

    def take_epoch(self) -> int:
        """Return the epoch of an op that runs from the host, and record that the op sends."""
        if self._on_host and self._progress:
            # `next_epoch`, inlined because every op runs this.
            self._progress = _SENT
            return (self._host_epoch + 1 + 2**31) % 2**32 - 2**31
        epoch = self.next_epoch()
        self.tell_peers()
        return epoch

    def begin(self, op: str, meant: Fingerprint) -> None:
        """Begin an op with the meaning `meant`, before it issues work.

        Raises RuntimeError if the last op has not ended, or if the call that ran it has not returned.
        """
        self.meanings.now = meant
        unreturned = self._call is not None and not self._call.returned and self._call is not locks.current()
        if (self._progress == _SENT or unreturned) and self.failure is None:
            # The last op was interrupted outside of any handler.
            self._abandon(self._op, None)
        if self.failure is not None:
            # Without the frames of the calls that were refused before, and their tensors.
            raise self.failure.with_traceback(None)
        self._op, self._progress = op, _NOTHING_SENT
        if self._report[_REPORT]:
            self._check()
        if self._on_host:
            words = self.host_words
            epoch = int(words[_EPOCH])
            if (epoch != self._host_epoch and self._host_epoch_is_exact) or words[_ARRIVED] or words[_TICKETS]:
                self._refuse_words(words, self._host_epoch)
            words[_BUDGET_MS] = self._budget_ms
            self._host_epoch, self._host_epoch_is_exact = epoch, True
            return
        # A GPU may report an op after the host has begun the next one.
        self.meanings.keep()
        check_device(self.data)
        if capturing := self._capturing():
            self._captured.append((self._arena, self.peers))
        assert self._turns is not None
        self._turns.begin(capturing=capturing)

    def end(self) -> None:
        """End an op after all its work was issued. Raises a failure that the op has reported by now."""
        if self.device.type != "cpu":
            capturing = self._capturing()
            assert self._turns is not None
            self._turns.end(capturing=capturing)
            # A captured op advances the device's epoch at every replay. The host does not see that.
            self._host_epoch_is_exact = self._host_epoch_is_exact and not capturing
        self._check()
        if self._on_host and self._progress == _SENT:
            words = self.host_words
            if words[_GIVEN_UP] or int(words[_EPOCH]) != _wrap(self._host_epoch + 1):
                self._refuse_words(words, _wrap(self._host_epoch + 1))
        if self._progress == _SENT or self.device.type != "cpu":
            self._host_epoch = _wrap(self._host_epoch + 1)
            self._call = locks.current()
        self._progress = _NO_OP

    def interrupted(self, op: str, error: BaseException) -> None:
        """End an op that has raised `error`.

        If peers may have seen part of the op, the workspace fails. Otherwise the same call may be made again.
        """
        if self._progress != _SENT:
            self._progress = _NO_OP
        elif self.failure is None:
            self._abandon(op, error)

    @property
    def loads_for_capture(self) -> bool:
        """Return whether the running op may be captured in a graph later."""
        return self.device.type == "cuda" and not self._capturing()

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Wait for the device and raise the failure that an op has reported, if any."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._check()

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of waits, from the next op on."""
        self.seconds, self._budget_ms = seconds, math.ceil(seconds * 1000)
        # Another thread may close the workspace meanwhile. A reference to `words` keeps the memory mapped.
        words = getattr(self, "words", None)
        if words is not None:
            words[_BUDGET_MS] = self._budget_ms

    def close(self, why: int = 1) -> None:
        """Give the memory back, and write `why` to LEFT (see `kernels.signal`). Peers may still use their memory."""
        try:
            # Kernels that wait for a lost peer end by the clock, so the clock runs until they have ended.
            if self._arena is not None and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            clock.release(self.host_block[signal.CLOCK_MS.value :])
        if (arena := self._arena) is not None:
            if self._progress == _SENT:
                # Interrupted outside of any handler.
                self._leave(2)
            self._leave(why)
            self._arena, self.views = None, {}
            for name in ("words", "host_words", "data", "_channel"):
                # A workspace that was interrupted in `make` lacks some of these.
                vars(self).pop(name, None)
            arena.release()
            self._captured.clear()
        # A new error: the old one's traceback keeps frames alive. Frames of a backward pass hold the graph, which holds
        # this workspace.
        self.failure = RuntimeError("this workspace has been given back, by fusedtp.destroy or with its group")
