"""One rank's end of a group's symmetric memory: the arenas of all its ranks, the epoch, and what went wrong.

An arena is a header with the signals (see `kernels.signal`), then two halves of data; an op at epoch e uses half e % 2.
Workspaces grow collectively, are never freed by the garbage collector, and are destroyed explicitly. One stream at a
time: on a GPU, ops issued on different streams are chained by events.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import budgets, clock, hardware, missing
from .errors import PeerTimeout
from .hardware import Hardware
from .kernels import signal
from .kernels.launch import Channel
from .kernels.loading import check_device
from .memory import Arena, Memory
from .shards import offsets
from .steps import DeviceSteps, HostSteps, load_acquire, store_release

_MIN_SLOTS = 64
_MIN_HALF_BYTES = 1 << 16
# Making a view takes longer than looking one up; a layer asks for the same few again and again.
_MAX_VIEWS = 1024


def _wrap(epoch: int) -> int:
    return (epoch + 2**31) % 2**32 - 2**31


class Workspace:
    """One rank's end of a group's symmetric memory."""

    # What is kept for later ops is made outside of inference mode, whatever mode the op that needs it first runs in: a
    # tensor of that mode may be neither written nor viewed by an op that is trained with.
    @torch.inference_mode(False)
    def __init__(self, memory: Memory, device: torch.device, *, epoch: int = 0, seconds: float | None = None) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self.device, self.count_bytes = device, False
        # On a CPU a peer's memory is as near as the own one; on a GPU a matmul must not read it again and again.
        self.in_place = device.type == "cpu"
        self.slots = self.half_bytes = 0
        self.seconds = budgets.of(None) if seconds is None else seconds
        self.failure: RuntimeError | None = None
        self._begun = False  # whether peers may have seen something of the op that is running
        self._memory = memory
        self._arena: Arena | None = None
        self._tables: dict[tuple[int, ...], Tensor] = {}
        # What graphs that were captured here go on reading and writing, however the workspace has changed since.
        self._captured: list[Any] = []
        self._views: dict[tuple[Any, ...], Tensor] = {}
        # What dispatch knows of and has decided for this group: it is agreed anew with every workspace.
        self.choices: dict[Any, Any] = {}
        self._first_epoch = self._mirror = epoch
        self._mirror_is_exact = True
        self._last_stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        on_gpu = device.type == "cuda"
        self.host_block = torch.zeros(signal.HOST_WORDS, dtype=torch.int32, pin_memory=on_gpu)
        self._report = self.host_block.numpy()
        # How the fused schedule sends what it gathers: `auto`, or one of `overlap.PRODUCERS`.
        self.producer = "auto"
        # Programs of a kernel where virtual ranks share a device; 0: as many as the device wants.
        self.programs = 0
        # Called behind each copy with its bytes: an emulated link takes its time there.
        self.pace: Callable[[int], None] | None = None
        self._gpu = hardware.number_of(hardware.of_gpu(torch.cuda.get_device_name(device)) if on_gpu else None)
        self._allocate(_MIN_HALF_BYTES, _MIN_SLOTS)
        # What ranks decide by what the machine can do they must decide alike: by rank 0's.
        self.hardware = self._shared_hardware()
        clock.drive(self.host_block[signal.CLOCK_MS.value :])

    @torch.inference_mode(False)
    def _allocate(self, half_bytes: int, slots: int) -> None:
        epoch = self.epoch if self._arena is not None else self._first_epoch
        words = signal.SIGNALS.value + slots * self.world_size
        header = torch.zeros(-(-words // 64) * 64, dtype=torch.int32)
        # Signals start at the present epoch, not at 0: near the wrap 0 could pass for a later one.
        header[signal.SIGNALS.value :] = epoch
        header[signal.EPOCH.value] = header[signal.GROWING.value] = epoch
        header[signal.BUDGET_MS.value] = math.ceil(self.seconds * 1000)
        header[signal.HARDWARE.value] = self._gpu
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
        if old is not None and not self._captured:
            # Nobody reads it any more: a peer only got here after finishing its last op, which read none of ours later
            # than its own.
            old.release()

    def _shared_hardware(self) -> Hardware:
        if self.device.type == "cpu":
            return hardware.CPU
        assert self._arena is not None
        words = self._arena.tensors[0][: 4 * signal.SIGNALS.value].view(torch.int32)
        known = hardware.numbered(int(words[signal.HARDWARE.value]))
        return known or hardware.assumed("" if self._gpu else torch.cuda.get_device_name(self.device))

    @property
    def epoch(self) -> int:
        """The last epoch that this rank has finished. On a GPU this waits for the device."""
        return int(self.words[signal.EPOCH.value])

    def next_epoch(self) -> int:
        """The epoch of the op that the host is about to drive."""
        if self.device.type == "cpu":
            return _wrap(load_acquire(self.addresses[self.rank] + 4 * signal.EPOCH.value) + 1)
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
        grown = (
            max(self.half_bytes, -(-max(half_bytes, self.half_bytes * 3 // 2) // 4096) * 4096)
            if half_bytes > self.half_bytes
            else self.half_bytes
        )
        if self._memory.waits:
            HostSteps(self, "workspace growth").meet()
        self._allocate(grown, max(self.slots, 2 * slots) if slots > self.slots else self.slots)

    def channel(self) -> Channel:
        """What a kernel's launcher needs."""
        self._begun = True
        return Channel(
            self.peers, self.data, self.rank, self.world_size, self.half_bytes, self.data_offset, self.count_bytes
        )

    def table(self, sizes: tuple[int, ...]) -> Tensor:
        """The row offsets of `sizes` on the device (int32, world_size + 1)."""
        table = self._tables.get(sizes)
        if table is None:
            if len(self._tables) >= _MAX_VIEWS and not self._capturing():
                # A kernel on another stream may be reading one still.
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self._tables.clear()
            with torch.inference_mode(False):
                table = self._tables[sizes] = torch.tensor(offsets(sizes), dtype=torch.int32, device=self.device)
        if self._capturing():
            self._captured.append(table)
        return table

    def view(self, peer: int, epoch: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[rows, cols] of `dtype`, contiguous, `offset` bytes into rank `peer`'s half for `epoch`."""
        key = (peer, epoch & 1, offset, shape, dtype)
        view = self._views.get(key)
        if view is None:
            assert self._arena is not None
            begin = self.data_offset + (epoch & 1) * self.half_bytes + offset
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                part = self._arena.tensors[peer][begin : begin + math.prod(shape) * dtype.itemsize]
                view = self._views[key] = part.view(dtype).view(shape)
        return view

    def steps(self, op: str) -> HostSteps | DeviceSteps:
        """The protocol's steps for an op driven from the host."""
        steps = HostSteps(self, op) if self.device.type == "cpu" else DeviceSteps(self, op)
        self._begun = True
        return steps

    def begin(self) -> None:
        """Before what an op issues: chains streams."""
        self._begun = False
        if self.device.type == "cpu":
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
        """After all that an op issues: raises what it has reported by now."""
        if self.device.type != "cpu":
            capturing = self._capturing()
            if not capturing:
                self._done = self._done or torch.cuda.Event()
                self._done.record(self._last_stream)
            # A captured op advances the device's epoch at every replay, which the host does not see.
            self._mirror, self._mirror_is_exact = _wrap(self._mirror + 1), self._mirror_is_exact and not capturing
        self._check()

    def interrupted(self, op: str, error: BaseException) -> None:
        """In place of `end` where the op raises, whatever it is: half way it fails the workspace, as its peers are in
        the middle of it. What is raised before the first signal leaves no trace: the same call may be made again.
        """
        if self._begun and self.failure is None:
            self._abandon(op, error)

    @contextlib.contextmanager
    def running(self, op: str) -> Iterator[None]:
        """`begin` and `end`, or `interrupted`, around an op."""
        self.begin()
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

    def _abandon(self, op: str, error: BaseException) -> None:
        # The peers may have this rank's part or not: the next op would take what they send of this one for its own.
        self._leave(2)
        # Only the text: the exception would keep its frames alive, and with them views of the arena.
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.failure = RuntimeError(
            f"{op}: an exception left rank {self.rank} in the middle of the op, out of step with its peers: call "
            f"fusedtp.destroy for this group on every rank before its next op ({what})"
        )

    def _leave(self, why: int) -> None:
        # For the peers to see, where memory is the host's.
        if self.device.type == "cpu":
            store_release(self.addresses[self.rank] + 4 * signal.LEFT.value, why)

    def _check(self) -> None:
        """Raise what a kernel has reported, and again at every later use. On a GPU: what has arrived by now."""
        if self.failure is not None:
            raise self.failure
        if self._report[signal.REPORT.value]:
            peer, wait, expected, seen = self._report[signal.REPORT.value : signal.REPORT_SEEN.value + 1].tolist()
            slot, op = divmod(wait, len(signal.OPS))
            self._fail(signal.OPS[op], peer - 1, slot, expected, seen)

    def check(self) -> None:
        """Wait for the device and raise PeerTimeout if any op so far has reported one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._check()

    def give_up(self, op: str, peer: int, slot: int, expected: int, seen: int, seconds: float) -> None:
        """A wait on the host has spent its budget, or its peer is gone: tell the peers who look, and raise."""
        self.words[signal.GIVEN_UP.value] = peer + 1
        self._fail(op, peer, slot, expected, seen, min(self.seconds, max(0.001, round(seconds, 3))))

    def _fail(self, op: str, peer: int, slot: int, expected: int, seen: int, seconds: float | None = None) -> None:
        who = missing.really_missing(self.rank, self.world_size, self._header, peer)
        what = "its memory to grow" if slot == signal.GROWTH_SLOT.value else f"signal slot {slot}"
        detail = f"{what}: epoch {expected} expected, {seen} seen"
        detail += missing.explain(self._header, peer, who)
        self.failure = PeerTimeout(op, self.rank, who, seconds or self.seconds, detail)
        raise self.failure

    def _header(self, peer: int) -> list[int]:
        assert self._arena is not None
        words: list[int] = self._arena.tensors[peer][: self.data_offset].view(torch.int32).tolist()
        return words

    def signal_words(self, peer: int) -> Tensor:
        """Rank `peer`'s header as torch's stream operations want it: flat, uint32."""
        assert self._arena is not None
        return self._arena.tensors[peer][: self.data_offset].view(torch.uint32)

    def sent(self, num_bytes: int, dst: int) -> None:
        """The host has issued a copy of `num_bytes` to rank `dst`."""
        if dst == self.rank:
            return
        if self.count_bytes:
            counter = self.words[signal.BYTES_SENT.value : signal.BYTES_SENT.value + 2].view(torch.int64)
            counter += num_bytes
        if self.pace is not None:
            self.pace(num_bytes)

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
        try:
            # Kernels that still wait for a lost peer end by the clock: it goes on until they have.
            if self._arena is not None and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            clock.release(self.host_block[signal.CLOCK_MS.value :])
        if self._arena is not None:
            self._leave(1)
            arena, self._arena = self._arena, None
            self._views.clear()
            del self.words, self.host_words, self.data
            arena.release()
            self._captured.clear()
