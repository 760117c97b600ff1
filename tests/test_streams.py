"""Ops of one workspace on several streams, in and out of captured graphs: no two may run at once."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedtp.memory.cuda import Driver
from fusedtp.workspaces import streams
from fusedtp.workspaces.streams import Turns
from fusedtp.workspaces.workspace import Workspace

from .beside import CPU
from .modelled_cuda import Cuda, Graph, Stream, running_on
from .virtual_ranks import local_memories, running

GPU = torch.device("cuda")
NUM_STREAMS, NUM_GROUPS = 4, 2


class Program:
    """Workspaces of several groups on a model of a GPU."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.captures: list[Graph] = []
        self.graphs: list[Graph] = []
        self.workspaces = []
        for _ in range(NUM_GROUPS):
            (ws,) = (Workspace(memory, CPU) for memory in local_memories(1, CPU))
            # From here on as on a GPU.
            ws.device, ws._on_host, ws._turns = GPU, False, Turns(GPU)
            self.workspaces.append(ws)

    def op(self, group: int, stream: int) -> None:
        """Run an op of a group on a stream: it has two kernels."""
        ws = self.workspaces[group]
        self.cuda.current = self.cuda.streams[stream]
        with running(ws, "op"):
            ws.tell_peers()
            self.cuda.put(group)
            self.cuda.put(group)

    def failing(self, group: int, stream: int) -> None:
        """Run an op that is refused before it issues work."""
        self.cuda.current = self.cuda.streams[stream]
        with contextlib.suppress(ValueError), running(self.workspaces[group], "op"):
            raise ValueError

    def work(self, stream: int) -> None:
        self.cuda.current = self.cuda.streams[stream]
        self.cuda.put(None)

    def fork(self, a: int, b: int) -> None:
        """Let stream `b` wait for stream `a`, unless CUDA would refuse that: out of or between captures."""
        begin, end = self.cuda.streams[a], self.cuda.streams[b]
        if end.graph in (None, begin.graph):
            self.cuda.fork(begin, end)

    def begin(self, stream: int, forks: set[int]) -> None:
        """Begin a capture on a stream, and fork it."""
        if self.cuda.streams[stream].graph is None:
            self.captures.append(self.cuda.begin(self.cuda.streams[stream]))
            for each in forks:
                self.fork(stream, each)

    def end(self) -> None:
        """End the capture that was begun last, after all its streams were joined."""
        if self.captures:
            graph = self.captures.pop()
            for each in self.cuda.streams:
                if each.graph is graph and each is not graph.origin:
                    self.cuda.fork(each, graph.origin)
            self.cuda.end(graph)
            self.graphs.append(graph)

    def replay(self, graph: int, stream: int) -> None:
        if self.graphs and self.cuda.streams[stream].graph is None:
            self.cuda.replay(self.graphs[graph % len(self.graphs)], self.cuda.streams[stream])

    def check(self) -> None:
        """Check that each group's work has all of the group's earlier work before it."""
        before: dict[int, set[int]] = {}
        for group, number, after in self.cuda.ran:
            if group is not None:
                earlier = before.setdefault(group, set())
                assert earlier <= after, f"group {group}: {number} may run beside {sorted(earlier - after)}"
                earlier.add(number)


STREAMS, GROUPS = st.integers(0, NUM_STREAMS - 1), st.integers(0, NUM_GROUPS - 1)
OP = st.tuples(st.just("op"), GROUPS, STREAMS)
STEPS = st.one_of(
    OP,
    OP,
    OP,
    st.tuples(st.just("failing"), GROUPS, STREAMS),
    st.tuples(st.just("work"), STREAMS),
    st.tuples(st.just("fork"), STREAMS, STREAMS),
    st.tuples(st.just("begin"), STREAMS, st.sets(STREAMS)),
    st.tuples(st.just("end")),
    st.tuples(st.just("replay"), st.integers(0, 7), STREAMS),
)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, max_size=30))
# Two branches of a capture, begun on a side stream after an op outside; a nested fork; an op outside in between.
@example(steps=[("op", 0, 0), ("begin", 1, {2}), ("op", 0, 1), ("op", 0, 2), ("end",), ("replay", 0, 3)])
@example(steps=[("begin", 0, {1}), ("fork", 1, 2), ("op", 0, 2), ("op", 0, 1), ("op", 0, 3), ("op", 0, 0)])
@example(steps=[("begin", 0, {1}), ("op", 0, 0), ("op", 0, 1), ("op", 0, 0)])
# The first op of a capture fails.
@example(steps=[("op", 0, 3), ("begin", 0, {1}), ("failing", 0, 0), ("op", 0, 1), ("op", 0, 3), ("op", 0, 1)])
# A graph and an op, or two graphs, on two streams.
@example(steps=[("begin", 0, set()), ("op", 0, 0), ("end",), ("op", 0, 0), ("replay", 0, 1), ("op", 0, 0)])
@example(steps=[("begin", 0, set()), ("op", 0, 0), ("end",), ("begin", 0, set()), ("op", 0, 0)])
# Two captures at once; two groups in one.
@example(steps=[("begin", 0, {1}), ("begin", 2, {3}), ("op", 0, 0), ("op", 0, 2), ("op", 0, 1), ("op", 0, 3)])
@example(steps=[("begin", 0, {1}), ("op", 0, 0), ("op", 1, 1), ("op", 0, 1), ("op", 1, 0)])
def test_ops_run_one_at_a_time(steps: list[Any]) -> None:
    cuda = Cuda(NUM_STREAMS)
    with running_on(cuda):
        program = Program(cuda)
        for name, *where in steps:
            getattr(program, name)(*where)
        while program.captures:
            program.end()
        # Every graph once more, each on another stream, with ops in between.
        for i in range(len(program.graphs)):
            program.replay(i, i % NUM_STREAMS)
            program.op(i % NUM_GROUPS, (i + 1) % NUM_STREAMS)
        program.check()


def test_ops_of_one_stream_wait_for_nothing() -> None:
    """A graph of a chain of ops has one wait node and one record node, which nothing follows."""
    cuda = Cuda(NUM_STREAMS)
    with running_on(cuda):
        program = Program(cuda)
        with mock.patch.object(Stream, "wait_event", side_effect=AssertionError):
            program.op(0, 0)
            program.op(0, 0)
            program.begin(0, set())
            for _ in range(5):
                program.op(0, 0)
            program.end()
    nodes = program.graphs[0].nodes
    assert [node.kind for node in nodes.values()] == ["wait", "work", "work", "record", *["work"] * 8]
    record = next(number for number, node in nodes.items() if node.kind == "record")
    assert not any(record in node.follows for node in nodes.values())


def test_an_op_of_an_invalid_capture_is_refused() -> None:
    """A call that CUDA refuses in a capture ends the capture; nothing can be ordered in it then."""
    cuda = Cuda(NUM_STREAMS)
    library = cuda.library()
    library.cuStreamGetCaptureInfo_v2 = lambda stream, status, *places: setattr(status._obj, "value", 2) or 0
    with running_on(cuda):
        program = Program(cuda)
        program.begin(0, set())
        driver = Driver(library)
        with (
            mock.patch.object(streams, "driver", return_value=driver),
            pytest.raises(RuntimeError, match="no longer valid"),
        ):
            program.op(0, 0)
        library.cuStreamGetCaptureInfo_v2 = lambda *_: 801
        with mock.patch.object(streams, "driver", return_value=driver), pytest.raises(RuntimeError, match="error 801"):
            program.op(0, 0)
        # Nothing was sent, so the workspace still works.
        program.op(0, 0)
