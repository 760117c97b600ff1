"""Steps of the protocol on a GPU in a lane beside ordinary calls: stream memory operations, which need no SM (`lanes`).

The stream writes signals and waits for them, between copies and kernels that wait for nothing. `leave` is a kernel; the
stream has waited for every entry before it, so the kernel finds them, compares fingerprints and ends the epoch.

A wait of a stream accepts every epoch whose difference to its own is not negative as an int32. So a slot that is unused
for 2^31 ops of its lane passes for raised (`kernels.signal` on LEAD).

A wait of a stream has no time limit. So the stream also tells the host which epoch it has begun and ended, and the
clock's thread looks at that. A wait whose time is over is reported like a kernel's. Then this rank's halves are filled
with NaN, and its waits are released by a value that streams accept, but neither kernels nor hosts: so `leave` takes
this rank's entry back. At most two ops are in flight, one for each half: ops that were issued before a timeout write to
no half that a late peer still reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from ..kernels import signal
from ..kernels.steps import step
from ..op import OPS
from .clock import Stopwatch
from .steps import DeviceEpochs, DeviceSteps
from .streams import driver
from .words import fingerprint_place, raised, wrapping_difference

_POLL_SECONDS = 50e-6
_SIGNALS: int = signal.SIGNALS.value
_ENTRY: int = signal.ENTRY_SLOT.value
_LEAD: int = signal.LEAD.value
_BEGUN: int = signal.BEGUN.value
_ENDED: int = signal.ENDED.value


class StreamSteps(DeviceSteps):
    """Steps on a GPU's current stream that wait in no kernel."""

    def __init__(self, workspace: DeviceEpochs) -> None:
        super().__init__(workspace)
        # For each half: the op's number in reports, and its waits.
        self._ops = [0, 0]
        self._waits: list[list[tuple[int, int]]] = [[], []]
        # The epoch of the last op, None before the first.
        self._last: int | None = None
        # The epoch that the stream was last seen in, and the time since.
        self._seen: int | None = None
        self._ran = Stopwatch()

    def _write(self, rank: int, word: int, value: int) -> None:
        # Write a word of rank `rank`'s header, after the stream's earlier work.
        driver().write(self._stream(), self._ws.addresses[rank] + 4 * word, value)

    def _write_to_host(self, word: int, value: int) -> None:
        driver().write(self._stream(), self._ws.host_block.data_ptr() + 4 * word, value)

    def _wait(self, word: int, value: int) -> None:
        # Hold the stream until a word of this rank's header is `value` or later.
        driver().wait(self._stream(), self._ws.addresses[self._ws.rank] + 4 * word, value)

    def signal(self, dst: int, slot: int) -> None:
        """Signal `slot` of rank `dst`. The signal releases this stream's earlier stores."""
        self._write(dst, self._word(slot, self._ws.rank), self.epoch)

    def wait(self, src: int, slot: int) -> None:
        """Hold this stream until rank `src` has raised `slot`."""
        self._waits[self.epoch & 1].append((src, slot))
        self._wait(self._word(slot, src), self.epoch)

    def enter(self, op: str) -> None:
        """Begin an epoch with op `op`, and give every peer this rank's entry and fingerprint.

        The host waits here until the op before the last one has ended.
        """
        ws = self._ws
        self._wait_for_half(ws.next_epoch())
        self.op, self.epoch = op, ws.take_epoch()
        self._ops[self.epoch & 1], self._waits[self.epoch & 1] = OPS[op].number, []
        self._last = self.epoch
        self._write_to_host(_BEGUN, self.epoch)
        fingerprint, place = ws.meanings.now.fingerprint, fingerprint_place(self.epoch, ws.rank, ws.world_size)
        for i in range(ws.world_size):
            dst = (ws.rank + i) % ws.world_size
            for word in (0, 1):
                self._write(dst, place + word, fingerprint >> 32 * word)
            if dst != ws.rank:
                self.signal(dst, _ENTRY)

    def leave(self) -> None:
        """Wait for every peer's entry, compare fingerprints, and end the epoch."""
        ws = self._ws
        for i in range(1, ws.world_size):
            self.wait((ws.rank + i) % ws.world_size, _ENTRY)
        step(ws.channel(), OPS[self.op].number, "leave")
        self._write_to_host(_ENDED, self.epoch)

    def _wait_for_half(self, epoch: int) -> None:
        words = self._ws.host_block.numpy()
        if self._last is None:
            words[_BEGUN] = words[_ENDED] = wrapping_difference(epoch, 1)
        stream = torch.cuda.current_stream(self._ws.device) if self._ws.device.type == "cuda" else None
        while not raised(int(words[_ENDED]), wrapping_difference(epoch, 2)):
            if stream is not None:
                # Raises the error of a device that is broken: its streams never end the op.
                stream.query()
            time.sleep(_POLL_SECONDS)

    def look(self, ending: bool = False) -> None:
        """Give up waits whose time is over, or all waits if the process is `ending`. For the clock's thread."""
        ws, words = self._ws, self._ws.host_block.numpy()
        begun = int(words[_BEGUN])
        if self._last is None or int(words[_ENDED]) == self._last:
            self._seen = None
        elif self._seen != begun and not ending:
            # A wait's time counts from the moment at which the stream has reached its op.
            self._seen, self._ran = begun, Stopwatch()
        elif ending or words[signal.REPORT.value] or self._ran.seconds() > ws.seconds:
            self._release(begun)

    def _release(self, epoch: int) -> None:
        ws, report = self._ws, self._ws.host_block.numpy()
        with self._beside():
            seen = ws.words.tolist()
            waits = [each for each in self._waits[epoch & 1] if not raised(seen[self._word(each[1], each[0])], epoch)]
            if not waits:
                # The op computes or copies.
                return
            if not report[signal.REPORT.value]:
                (src, slot), *_ = waits
                report[signal.REPORT_WAIT.value] = slot * signal.NUM_OPS.value + self._ops[epoch & 1]
                report[signal.REPORT_EXPECTED.value] = epoch
                report[signal.REPORT_SEEN.value] = seen[self._word(slot, src)]
                ws.words[signal.GIVEN_UP.value] = src + 1
                ws.data.fill_(0xFF)
                report[signal.REPORT.value] = src + 1
            # Later than both ops in flight.
            released = wrapping_difference(epoch + 1, -_LEAD)
            for src, slot in {*self._waits[0], *self._waits[1]}:
                if not raised(seen[self._word(slot, src)], epoch):
                    self._write(ws.rank, self._word(slot, src), released)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        # A stream that nothing holds.
        with torch.cuda.stream(torch.cuda.Stream(self._ws.device)):
            yield
