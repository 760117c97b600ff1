"""Order a workspace's ops on a GPU's streams, in and out of captured graphs.

Two ops of a workspace must not run at once: both would use one epoch and one half. So an op on another stream than the
last one waits for an event that the last op has recorded.

Work that is captured runs later, at replays of which the host knows nothing. So each captured graph has nodes of its
own:

    a wait node      before the first op: a replay waits for the last op or replay that was issued before it
    edges            between ops on different streams, by an event that is recorded in the capture
    a record node    after every op: later ops and replays, on any stream, wait for the replay

Ops of a capture never wait for the record node, so the node does not lengthen a chain of ops. CUDA's driver API permits
to add nodes during a capture ("cuStreamGetCaptureInfo"), and each launch of a graph records the events of its nodes
("cuGraphAddEventRecordNode").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from ..memory.cuda import Driver


@cache
def driver() -> Driver:
    """Return the driver, loaded once."""
    return Driver()


@dataclass
class _Capture:
    # stream: of the last op. ended: recorded after the last op, inside the capture. record: the record node, 0 for
    # none; `joined` are the nodes that it follows.
    stream: torch.cuda.Stream
    ended: torch.cuda.Event
    record: int = 0
    joined: set[int] = field(default_factory=set)


class Turns:
    """Order of a workspace's ops on a GPU's streams: one at a time, in the order of issue. Made outside of captures."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        # Recorded by every op outside of captures and by every replay. A graph needs an event that exists.
        self._done = torch.cuda.Event()
        self._done.record(self._stream)
        # By the number of the capture, which is unique in a process.
        self._captures: dict[int, _Capture] = {}

    def begin(self, *, capturing: bool) -> None:
        """Let the current stream wait for the last op."""
        stream = torch.cuda.current_stream(self._device)
        if capturing:
            self._begin_captured(stream)
        elif stream != self._stream or self._captures:
            # If there are graphs, the last op may be a replay on any stream.
            stream.wait_event(self._done)
        self._stream = stream

    def end(self, *, capturing: bool) -> None:
        """Let later ops and replays wait for the op, after all its work was issued."""
        if capturing:
            self._end_captured()
        else:
            self._done.record(self._stream)

    def _begin_captured(self, stream: torch.cuda.Stream) -> None:
        number, _, _ = driver().capture(stream.cuda_stream)
        capture = self._captures.get(number)
        if capture is None:
            driver().add_wait(stream.cuda_stream, self._done.cuda_event)
            capture = self._captures[number] = _Capture(stream, torch.cuda.Event())
            capture.ended.record(stream)
        elif stream != capture.stream:
            stream.wait_event(capture.ended)
        capture.stream = stream

    def _end_captured(self) -> None:
        number, graph, last = driver().capture(self._stream.cuda_stream)
        capture = self._captures[number]
        capture.ended.record(self._stream)
        if not capture.record:
            capture.record = driver().add_record(graph, last, self._done.cuda_event)
        elif new := [node for node in last if node not in capture.joined]:
            driver().add_edges(graph, new, capture.record)
        capture.joined.update(last)
