"""One workspace a (group, device): the arenas of all its ranks, the epoch, and what went wrong.

An arena is a header with the signals (see `kernels.signal`), then two halves of data; an op at epoch e uses half e % 2.
Workspaces grow collectively, are never freed by the garbage collector, and are destroyed explicitly. One stream at a
time: on a GPU, ops issued on different streams are chained by events.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import clock, groups
from .errors import PeerTimeout
from .groups import Group
from .kernels import signal
from .kernels.launch import Channel
from .memory import Arena, Memory, Unreachable
from .memory.cuda import CudaMemory
from .memory.posix import PosixMemory
from .shards import check_number, offsets
from .steps import DeviceSteps, HostSteps, load_acquire

_MIN_SLOTS = 64
_MIN_HALF_BYTES = 1 << 16
# Making a view takes longer than looking one up; a layer asks for the same few again and again.
_MAX_VIEWS = 1024

_seconds = 30.0
_workspaces: dict[tuple[str, torch.device], Workspace] = {}
_unreachable: dict[tuple[str, torch.device], str] = {}
# How often each group was destroyed; None: all of them.
_destroyed: Counter[str | None] = Counter()


def _wrap(epoch: int) -> int:
    return (epoch + 2**31) % 2**32 - 2**31


class Workspace:
    """One rank's end of a group's symmetric memory."""

    def __init__(self, memory: Memory, device: torch.device, *, epoch: int = 0) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self.device, self.count_bytes = device, False
        # On a CPU a peer's memory is as near as the own one; on a GPU a matmul must not read it again and again.
        self.in_place = device.type == "cpu"
        self.slots = self.half_bytes = 0
        self.seconds = _seconds
        self.failure: PeerTimeout | None = None
        self._memory = memory
        self._arena: Arena | None = None
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._views: dict[tuple[Any, ...], Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # What dispatch knows of and has decided for this group: it is agreed anew with every workspace.
        self.choices: dict[Any, Any] = {}
        self._first_epoch = self._mirror = epoch
        self._mirror_is_exact = True
        self._last_stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        on_gpu = device.type == "cuda"
        self.host_block = torch.zeros(signal.HOST_WORDS, dtype=torch.int32, pin_memory=on_gpu)
        self._report = self.host_block.numpy()
        self._allocate(_MIN_HALF_BYTES, _MIN_SLOTS)
        clock.drive(self.host_block[signal.CLOCK_MS.value :])

    def _allocate(self, half_bytes: int, slots: int) -> None:
        epoch = self.epoch if self._arena is not None else self._first_epoch
        words = signal.SIGNALS.value + slots * self.world_size
        header = torch.zeros(-(-words // 64) * 64, dtype=torch.int32)
        # Signals start at the present epoch, not at 0: near the wrap 0 could pass for a later one.
        header[signal.SIGNALS.value :] = epoch
        header[signal.EPOCH.value] = epoch
        header[signal.BUDGET_MS.value] = math.ceil(self.seconds * 1000)
        old = self._arena
        self._views.clear()
        self._arena = self._memory.allocate(header.numel() * 4 + 2 * half_bytes, header)
        self.half_bytes, self.slots, self.data_offset = half_bytes, slots, header.numel() * 4
        self.words = self._arena.tensors[self.rank][: self.data_offset].view(torch.int32)
        self.data = self._arena.tensors[self.rank][self.data_offset : self.data_offset + 2 * half_bytes]
        # The same words for the host, where it can reach them: an element of a tensor takes ten times as long.
        self.host_words = (self.words if self.device.type == "cpu" else torch.zeros(0)).numpy()
        self.addresses = [each.data_ptr() for each in self._arena.tensors]
        table = torch.tensor([*self.addresses, self.host_block.data_ptr()], dtype=torch.int64)
        self.peers = table.to(self.device)
        if old is not None:
            # Nobody reads it any more: a peer only got here after finishing its last op, which read none of ours later
            # than its own.
            old.release()

    @property
    def epoch(self) -> int:
        """The last epoch that this rank has finished. On a GPU this waits for the device."""
        return int(self.words[signal.EPOCH.value])

    def next_epoch(self) -> int:
        """The epoch of the op that the host is about to drive."""
        if self.device.type == "cpu":
            return _wrap(load_acquire(self.addresses[self.rank] + 4 * signal.EPOCH.value) + 1)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "schedule 'decomposed' copies to addresses chosen on the host and cannot be captured: use 'fused'"
            )
        if not self._mirror_is_exact:
            self._mirror, self._mirror_is_exact = self.epoch, True
        return _wrap(self._mirror + 1)

    def require(self, half_bytes: int, slots: int) -> None:
        """Grow until a half holds `half_bytes` and there are `slots` signals a source. Collective where it grows."""
        self._check()
        if half_bytes <= self.half_bytes and slots <= self.slots:
            return
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the workspace must grow to halves of {half_bytes} bytes, which a graph capture does not allow: "
                    "run the same op once before capturing"
                )
            torch.cuda.synchronize(self.device)
        grown = (
            max(self.half_bytes, -(-max(half_bytes, self.half_bytes * 3 // 2) // 4096) * 4096)
            if half_bytes > self.half_bytes
            else self.half_bytes
        )
        self._allocate(grown, max(self.slots, 2 * slots) if slots > self.slots else self.slots)

    def channel(self) -> Channel:
        """What a kernel's launcher needs."""
        return Channel(
            self.peers, self.data, self.rank, self.world_size, self.half_bytes, self.data_offset, self.count_bytes
        )

    def table(self, sizes: tuple[int, ...]) -> Tensor:
        """The row offsets of `sizes` on the device (int32, world_size + 1)."""
        if sizes not in self._tables:
            self._tables[sizes] = torch.tensor(offsets(sizes), dtype=torch.int32, device=self.device)
        return self._tables[sizes]

    def view(self, peer: int, epoch: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[rows, cols] of `dtype`, contiguous, `offset` bytes into rank `peer`'s half for `epoch`."""
        key = (peer, epoch & 1, offset, shape, dtype)
        view = self._views.get(key)
        if view is None:
            assert self._arena is not None
            begin = self.data_offset + (epoch & 1) * self.half_bytes + offset
            part = self._arena.tensors[peer][begin : begin + math.prod(shape) * dtype.itemsize]
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = part.view(dtype).view(shape)
        return view

    def scratch(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[rows, cols] to use until the next op begins: on a CPU the same pages every time, not fresh ones."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(dtype).view(shape)

    def steps(self, op: str) -> HostSteps | DeviceSteps:
        """The protocol's steps for an op driven from the host."""
        return HostSteps(self, op) if self.device.type == "cpu" else DeviceSteps(self, op)

    @contextlib.contextmanager
    def running(self, op: str) -> Iterator[None]:
        """Around every op: refuses a workspace that has failed, chains streams, and raises what the op reported."""
        self._check()
        on_gpu = self.device.type == "cuda"
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        if on_gpu and not capturing:
            stream = torch.cuda.current_stream(self.device)
            if self._done is not None and stream != self._last_stream:
                stream.wait_event(self._done)
            self._last_stream = stream
        yield
        if on_gpu and not capturing:
            self._done = self._done or torch.cuda.Event()
            self._done.record(self._last_stream)
        # A captured op advances the device's epoch at every replay, which the host does not see.
        self._mirror, self._mirror_is_exact = _wrap(self._mirror + 1), self._mirror_is_exact and not capturing
        self._check()

    def _check(self) -> None:
        """Raise what a kernel has reported, and again at every later use. On a GPU: what has arrived by now."""
        if self.failure is not None:
            raise self.failure
        if self._report[signal.REPORT.value]:
            report = self._report[signal.REPORT_OP.value : signal.REPORT_SEEN.value + 1]
            op, peer, slot, expected, seen = report.tolist()
            self._fail(signal.OPS[op], peer, slot, expected, seen)

    def check(self) -> None:
        """Wait for the device and raise PeerTimeout if any op so far has reported one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._check()

    def give_up(self, op: str, peer: int, slot: int, expected: int, seen: int) -> None:
        """A wait on the host has spent its budget: tell the peers who look, and raise."""
        self.words[signal.GIVEN_UP.value] = 1
        self.words[signal.MISSING.value] = peer
        self._fail(op, peer, slot, expected, seen)

    def _fail(self, op: str, peer: int, slot: int, expected: int, seen: int) -> None:
        missing = self._really_missing(peer)
        detail = f"signal slot {slot}: epoch {expected} expected, {seen} seen"
        if missing != peer:
            detail += f"; rank {peer} was itself waiting for rank {missing}"
        self.failure = PeerTimeout(op, self.rank, missing, self.seconds, detail)
        raise self.failure

    def _really_missing(self, peer: int) -> int:
        """Follow who waits for whom: a peer that is stuck behind another one is not the one to name."""
        assert self._arena is not None
        chain = [self.rank]
        while peer not in chain:
            chain.append(peer)
            words = self._arena.tensors[peer][: 4 * signal.SIGNALS.value].view(torch.int32).tolist()
            if words[signal.GIVEN_UP.value]:
                peer = words[signal.MISSING.value]
            elif words[signal.WAITING_FOR.value]:
                peer = words[signal.WAITING_FOR.value] - 1
        return chain[-1]

    def bytes_sent(self) -> int:
        """Bytes stored into peers' arenas since `count_bytes` was set; resets the count."""
        counter = self.words[signal.BYTES_SENT.value : signal.BYTES_SENT.value + 2].view(torch.int64)
        count = int(counter)
        counter.zero_()
        return count

    def set_timeout(self, seconds: float) -> None:
        """The budget of every wait from the next op on."""
        self.seconds = seconds
        self.words[signal.BUDGET_MS.value] = math.ceil(seconds * 1000)

    def close(self) -> None:
        """Give the memory back. The peers may still use theirs."""
        clock.release(self.host_block[signal.CLOCK_MS.value :])
        if self._arena is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            arena, self._arena = self._arena, None
            self._views.clear()
            del self.words, self.host_words, self.data
            arena.release()


def _key(group: dist.ProcessGroup, device: torch.device) -> tuple[str, torch.device]:
    if device.type == "cuda" and str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return str(group.group_name), device


def get(group: dist.ProcessGroup, device: torch.device) -> Workspace:
    """The workspace of `group` on `device`, made on first use (collective).

    Raises `Unreachable` where ranks share no memory.
    """
    key = _key(group, device)
    if key in _unreachable:
        raise Unreachable(_unreachable[key])
    if key not in _workspaces:
        memory = PosixMemory(group) if device.type == "cpu" else CudaMemory(group, device)
        try:
            _workspaces[key] = Workspace(memory, key[1])
        except Unreachable as error:
            _unreachable[key] = str(error)
            raise
    return _workspaces[key]


def reachable(group: dist.ProcessGroup, device: torch.device) -> tuple[bool, str]:
    """Whether the ranks of `group` can address each other's memory on `device`, and why (not).

    Collective on the first call.
    """
    try:
        get(group, device)
    except Unreachable as error:
        return False, str(error)
    return True, "ranks share memory" if device.type == "cpu" else "ranks reach each other's GPU memory"


def timeout() -> float:
    """The budget of a wait, in seconds, as `set_timeout` has set it."""
    return _seconds


def set_timeout(seconds: float) -> None:
    """How long a wait for a peer may take before `PeerTimeout`, in seconds (30 at first): every group of this process,
    from now on.

    Raises ValueError unless 0 < seconds <= 2,000,000 (the clock is an int32 of milliseconds), TypeError for no number.
    """
    global _seconds
    check_number("seconds", seconds)
    if not 0 < seconds <= 2_000_000:
        raise ValueError(f"seconds must be above 0 and at most 2,000,000, got {seconds!r}")
    _seconds = float(seconds)
    for workspace in _workspaces.values():
        workspace.set_timeout(_seconds)


def generation(name: str) -> int:
    """How often `destroy` has been called for the group of that name: the same on all ranks that call it alike."""
    return _destroyed[None] + _destroyed[name]


def destroy(group: Group = None) -> None:
    """Give back the symmetric memory of `group`, or of every group of this process.

    A later op makes it anew, collectively. Errors for what is no group as in the functions; one that torch.distributed
    has destroyed already is one still.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        group = groups.resolve(group)
    name = None if group is None else str(group.group_name)
    _destroyed[name] += 1
    for key in [key for key in _workspaces if name in (None, key[0])]:
        _workspaces.pop(key).close()
    for key in [key for key in _unreachable if name in (None, key[0])]:
        del _unreachable[key]
