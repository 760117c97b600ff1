"""Model of CUDA's streams, events and captured graphs: what is ordered after what, and which calls CUDA refuses.

A stream, an event and a node of a graph have the work that they are ordered after, closed under "before". Nothing else
is assumed: two pieces of work without an order may run at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from fusedtp.memory.cuda import Driver
from fusedtp.workspaces import streams, workspace


@dataclass
class Node:
    """Node of a graph: the nodes it follows, and its work, or the event that it waits for or records."""

    kind: str
    follows: set[int]
    event: Event | None = None
    work: Any = None


@dataclass
class Graph:
    """Captured graph. Its nodes are numbered from 1, across all graphs, as handles are unique."""

    number: int
    origin: Stream
    nodes: dict[int, Node] = field(default_factory=dict)
    # Set when the capture has ended.
    ended: bool = False
    # Nodes that were added or cut off by direct calls do not count as forks that were not joined.
    direct: set[int] = field(default_factory=set)


class Stream:
    """Stream: the work before its next piece, or the graph that captures it and the nodes before the next one."""

    def __init__(self, cuda: Cuda, handle: int) -> None:
        self.cuda, self.cuda_stream = cuda, handle
        self.after: set[int] = set()
        self.graph: Graph | None = None
        self.nodes: set[int] = set()

    def wait_event(self, event: Event) -> None:
        if event.graph is None:
            assert self.graph is None or not event.recorded, "a capture waits for work outside of it"
            self.after |= event.after
            return
        assert not event.graph.ended, "a stream waits for an event of a capture that has ended"
        assert self.graph in (None, event.graph), "two captures are merged"
        if self.graph is None:
            self.graph, self.nodes = event.graph, set()
        self.nodes |= event.nodes


class Event:
    """Event: the work before its last record, or the nodes of a capture before it."""

    handles: ClassVar[dict[int, Event]] = {}

    def __init__(self) -> None:
        self.cuda_event = 0
        self.after: set[int] = set()
        self.graph: Graph | None = None
        self.nodes: set[int] = set()
        self.recorded = False

    def record(self, stream: Stream) -> None:
        # torch makes the event when it is first recorded.
        self.cuda_event = self.cuda_event or 1 + len(self.handles)
        self.handles[self.cuda_event] = self
        self.graph, self.recorded = stream.graph, True
        self.after, self.nodes = set(stream.after), set(stream.nodes)


class Cuda:
    """A device with streams. `ran` has every piece of work that was put on it, with the work before it, in order."""

    def __init__(self, num_streams: int) -> None:
        self.streams = [Stream(self, 16 * (1 + i)) for i in range(num_streams)]
        self.current = self.streams[0]
        self.ran: list[tuple[Any, int, frozenset[int]]] = []
        self._handles, self._graphs = itertools.count(1), itertools.count(1)

    def put(self, work: Any) -> None:
        """Put a piece of work on the current stream: it runs, or is captured."""
        stream = self.current
        if stream.graph is None:
            stream.after.add(self._run(work, stream.after))
        else:
            stream.nodes = {self._add(stream.graph, Node("work", stream.nodes, work=work))}

    def _run(self, work: Any, after: set[int]) -> int:
        self.ran.append((work, len(self.ran), frozenset(after)))
        return len(self.ran) - 1

    def _add(self, graph: Graph, node: Node) -> int:
        number = next(self._handles)
        graph.nodes[number] = node
        return number

    def fork(self, a: Stream, b: Stream) -> None:
        """Let `b` wait for the work on `a`."""
        event = Event()
        event.record(a)
        b.wait_event(event)

    def begin(self, stream: Stream) -> Graph:
        assert stream.graph is None
        stream.graph, stream.nodes = Graph(next(self._graphs), stream), set()
        return stream.graph

    def end(self, graph: Graph) -> None:
        """End a capture. Every fork must have been joined."""
        before, found = set(graph.origin.nodes), list(graph.origin.nodes)
        while found:
            new = graph.nodes[found.pop()].follows - before
            before |= new
            found += new
        assert set(graph.nodes) - before <= graph.direct, "the capture has a fork that was not joined"
        graph.ended = True
        for each in self.streams:
            if each.graph is graph:
                each.graph, each.nodes = None, set()

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Launch a graph: events are read and recorded in the order of launches."""
        assert graph.ended
        assert stream.graph is None
        after: dict[int, set[int]] = {}
        recorded: list[tuple[Event, set[int]]] = []
        whole = set(stream.after)
        left = dict(graph.nodes)
        while left:
            number = next(each for each, node in left.items() if not node.follows & set(left))
            node = left.pop(number)
            before = set(stream.after).union(*(after[each] for each in node.follows))
            if node.kind == "wait":
                assert node.event is not None
                before |= node.event.after
            elif node.kind == "record":
                assert node.event is not None
                recorded.append((node.event, set(before)))
            else:
                before.add(self._run(node.work, before))
            after[number] = before
            whole |= before
        assert len({id(event) for event, _ in recorded}) == len(recorded), "two nodes of a graph record one event"
        for event, before in recorded:
            event.after, event.recorded = before, True
        stream.after = whole

    # The driver's functions, with the arguments that ctypes would pass on.

    def _of(self, handle: Any) -> Stream:
        return next(each for each in self.streams if each.cuda_stream == handle.value)

    def _graph(self, handle: Any) -> Graph:
        return next(each.graph for each in self.streams if each.graph and each.graph.number == handle.value)

    def _info(self, handle: Any, status: Any, number: Any, graph: Any, nodes: Any, count: Any) -> int:
        stream = self._of(handle)
        status._obj.value = 0 if stream.graph is None else 1
        if stream.graph is not None:
            number._obj.value = graph._obj.value = stream.graph.number
            count._obj.value = len(stream.nodes)
            nodes._obj.contents = (ctypes.c_void_p * (1 + len(stream.nodes)))(*sorted(stream.nodes))
        return 0

    def _node(self, kind: str, made: Any, graph: Any, nodes: Any, count: Any, event: Any) -> int:
        assert len(nodes) == count.value == len(set(nodes))
        owner = self._graph(graph)
        made._obj.value = self._add(owner, Node(kind, {each for each in nodes if each}, Event.handles[event.value]))
        owner.direct.add(made._obj.value)
        return 0

    def _update(self, handle: Any, nodes: Any, count: Any, flags: int) -> int:
        assert (count.value, flags) == (1, 1)
        self._of(handle).nodes = {nodes._obj.value}
        return 0

    def _edges(self, graph: Any, begins: Any, ends: Any, count: Any) -> int:
        assert len(begins) == len(ends) == count.value > 0
        for begin, end in zip(begins, ends, strict=True):
            follows = self._graph(graph).nodes[end].follows
            assert begin not in follows, "an edge is there already"
            follows.add(begin)
        return 0

    def library(self) -> Any:
        """Return the functions that `Driver` calls."""
        return SimpleNamespace(
            cuInit=lambda flags: 0, cuStreamGetCaptureInfo_v2=self._info, cuGraphAddDependencies=self._edges,
            cuStreamUpdateCaptureDependencies=self._update,
            cuGraphAddEventWaitNode=lambda *of: self._node("wait", *of),
            cuGraphAddEventRecordNode=lambda *of: self._node("record", *of),
        )  # fmt: skip


@contextlib.contextmanager
def running_on(cuda: Cuda) -> Iterator[None]:
    """Let torch.cuda and the driver be the model."""
    driver = Driver(cuda.library())

    def current_stream(device: object = None) -> Stream:
        return cuda.current

    def is_capturing() -> bool:
        return cuda.current.graph is not None

    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "current_stream", current_stream),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", is_capturing),
        mock.patch.object(streams, "driver", return_value=driver),
        # Tensors are on a CPU.
        mock.patch.object(workspace, "check_device", return_value=None),
    ):
        yield
