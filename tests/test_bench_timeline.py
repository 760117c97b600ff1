"""Spans cost next to nothing unless recorded, cover the work of ranks, and survive the trace file."""

from __future__ import annotations

import json
import re
import time
import timeit
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

from fusedtp import trace
from fusedtp.bench import theme, timing
from fusedtp.bench import timeline as recorded
from fusedtp.bench.cases import Case
from fusedtp.bench.cli import app
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timeline import Mark, Timeline


def test_span_costs_well_under_a_microsecond_unless_recorded() -> None:
    def spend() -> None:
        with trace.span("multiply", 1):
            pass

    assert trace.span("multiply", 1) is trace.span("wait")
    # the minimum of many runs, without interruptions
    assert min(timeit.repeat(spend, number=2000, repeat=30)) < 2000 * 1e-6


def test_recording_keeps_order_and_ends() -> None:
    with trace.span("add"), trace.recording() as spans:
        with trace.span("wait", 3), trace.span("travel"):
            pass
        with pytest.raises(RuntimeError, match="one recording at a time"), trace.recording():
            pass
        with pytest.raises(ZeroDivisionError), trace.span("multiply", 1):
            _ = 1 // 0
    with trace.span("add"):
        pass
    assert [(span.kind, span.peer) for span in spans] == [("travel", -1), ("wait", 3), ("multiply", 1)]
    travel, wait, multiply = spans
    assert wait.begin_ns <= travel.begin_ns <= travel.end_ns <= wait.end_ns <= multiply.begin_ns <= multiply.end_ns


def late(group: ProcessGroup, case: Case, seconds: float) -> dict[str, list[list[tuple[str, int, int, int]]]]:
    """Run `timeline.record` with rank 1 late for each copy into shared memory."""
    from fusedtp.schedules.decomposed import DecomposedGather
    from fusedtp.schedules.verbs import Pending

    start = DecomposedGather.start

    def start_late(self: DecomposedGather, x: Tensor) -> Pending:
        time.sleep(seconds if group.rank() == 1 else 0)
        return start(self, x)

    with mock.patch.object(DecomposedGather, "start", start_late):
        return recorded.record(group, case, ("decomposed",), 2)


def kinds(spans: list[tuple[str, int, int, int]]) -> list[tuple[str, int]]:
    return [(kind, peer) for kind, peer, *_ in spans if kind != "wait"]


def test_gather_copies_its_own_and_multiplies_every_chunk(pool: RankPool) -> None:
    case = Case("all_gather_matmul", 1056, 48, 64, "float32", 2)
    ranks = pool.run(late, case, 0.05, world_size=2)
    for rank, found in enumerate(ranks):
        assert list(found) == ["decomposed"]
        for spans in found["decomposed"]:
            assert kinds(spans) == [("travel", rank), ("multiply", rank), ("multiply", 1 - rank), CALL]
            *parts, call = spans
            assert call[2] <= parts[0][2]
            assert parts[-1][3] <= call[3]
            assert all(before[3] <= after[2] for before, after in pairwise(parts))
    # rank 0 waited for rank 1 about as long as rank 1 slept, and both clocks agree on the end of the wait
    for spans, others in zip(ranks[0]["decomposed"], ranks[1]["decomposed"], strict=True):
        (wait,) = [span for span in spans if span[0] == "wait" and span[3] - span[2] > 30e6]
        (copy,) = [span for span in others if span[0] == "travel"]
        assert wait[1] == 1
        assert wait[2] < copy[2] < copy[3] <= wait[3]


def test_on_a_gpu_ranks_meet_behind_the_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs at other clocks spin for other times: ahead of the barrier, and so outside of the recorded time."""
    steps: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: mock.Mock(elapsed_time=lambda mark: 2.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: steps.append("end"))
    monkeypatch.setattr(torch, "zeros", lambda size, device: torch.ones(size))
    monkeypatch.setattr(timing, "spin", lambda ms: steps.append("spin"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda token, group: steps.append("barrier"))
    assert recorded._on_device(lambda: steps.append("call"), mock.Mock()) == [(*CALL, 0, 2_000_000)]
    assert steps == ["spin", "barrier", "call", "end"]


CALL = ("call", -1)
UNFUSED = [("multiply", -1), ("collective", -1), CALL]
PARTS: dict[str, dict[str, list[tuple[str, int]]]] = {
    "matmul_reduce_scatter": {"unfused": UNFUSED, "decomposed": [("multiply", 1), ("multiply", 0), ("add", -1), CALL]},
    "matmul_all_reduce": {"unfused": UNFUSED, "decomposed": [("multiply", -1), ("add", -1), CALL]},
    "all_gather_matmul": {"unfused": [("collective", -1), ("multiply", -1), CALL]},
}


@pytest.mark.parametrize("op", PARTS)
def test_parts_of_each_op(pool: RankPool, op: str) -> None:
    case = Case(op, 1056, 48, 64, "float32", 2)
    found = pool.run(recorded.record, case, tuple(PARTS[op]), 1, world_size=2)[0]
    assert {schedule: kinds(calls[0]) for schedule, calls in found.items()} == PARTS[op]


@pytest.fixture
def found() -> Timeline:
    about = {"op": "all_gather_matmul", "M": 4, "N": 5, "K": 6, "dtype": "float32", "world_size": 2}
    marks = [Mark("decomposed", rank, "call", -1, 0.5 * rank, 90.0) for rank in (0, 1)]
    marks += [Mark("decomposed", rank, "multiply", rank, 10.25, 70.0) for rank in (0, 1)]
    marks += [Mark("unfused", 0, "call", -1, 0.0, 80.0), Mark("unfused", 0, "collective", -1, 1.0, 20.0)]
    return Timeline({**about, "commit": "0123", "format": "fusedtp timeline 1"}, tuple(marks))


def test_trace_file_round_trip_and_format(found: Timeline, tmp_path: Path) -> None:
    path, kept = tmp_path / "timeline.json", with_calls(found, unfused=(1.0, 2.0), decomposed=(0.5,))
    recorded.write(kept, path)
    assert recorded.read(path) == kept
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"decomposed", "unfused", "rank 0", "rank 1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} >= {"call", "multiply, chunk of rank 1", "collective"}
    assert all({"pid", "tid", "ts", "dur", "cat"} <= set(event) for event in slices)
    for old, new, key in (('"ms": 2.0', '"ms": -2.0', "ms"), ('"round": 1', '"round": "1"', "round")):
        recorded.write(kept, path)
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(ValueError, match=rf"is not a timeline of fusedtp: otherData\.calls\[1\]\.{key}"):
            recorded.read(path)


def test_command(tmp_path: Path) -> None:
    def invoke(*more: str) -> tuple[int, str]:
        given = ["timeline", "--shape", "64,48,32", "--rounds", "3", "--out", str(tmp_path), *more]
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, given)
        return done.exit_code, " ".join(done.output.replace("\u2502", " ").split())

    code, said = invoke()
    assert code == 0, said
    (path,) = tmp_path.glob("*/timeline.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    found = recorded.read(path)
    assert found.schedules == ["decomposed", "sequential", "unfused"]
    # `sequential` multiplies once, after all that it copies and waits for.
    for rank in range(2):
        marks = [mark for mark in found.of("sequential") if mark.rank == rank and mark.kind != "call"]
        (multiply,) = (mark for mark in marks if mark.kind == "multiply")
        assert marks[-1] is multiply
        assert all(mark.begin_us + mark.length_us <= multiply.begin_us for mark in marks[:-1])
    assert found.title() == "all-gather + matmul, 64 x 48 x 32 fp32 on 2 ranks"
    assert found.about["rounds"] == 3
    for schedule in found.schedules:
        calls = found.calls(schedule)
        assert calls is not None
        # the shown call is the median call
        assert calls.median_ms == pytest.approx(found.last_ms(schedule), rel=1e-3)
    assert all(" ".join(line.split()) in said for line in recorded.remarks(found))
    assert min(mark.begin_us for mark in found.of("decomposed", "call")) == 0.0
    for bad, message in (("--schedule", "fused"), "one kernel"), (("--op", "matmul"), "--op must be among"):
        code, said = invoke(*bad)
        assert code == 2
        assert message in said


def with_calls(found: Timeline, **ms: tuple[float, ...]) -> Timeline:
    calls = [{"schedule": name, "round": at, "ms": each} for name, times in ms.items() for at, each in enumerate(times)]
    return Timeline({**found.about, "calls": calls}, found.marks)


def test_a_slower_schedule_is_said_to_be_and_by_what(found: Timeline) -> None:
    """The last rank to end decides: 70 ms of multiplying against none; unfused's collective is left out."""
    (said,) = recorded.remarks(found)
    assert re.search(r"^decomposed is slower than .* 0\.0905 ms, unfused 0\.08\. .*multiplying took 0\.07 ms", said)
    assert recorded.remarks(with_calls(found, unfused=(1.0,), decomposed=(2.0,))) == [said]
    for own, verdict in (((3.0, 3.1, 3.2), "slower"), ((0.9, 1.0, 1.1), "neither can"), ((0.3, 0.31, 0.32), "faster")):
        *_, over_all = recorded.remarks(with_calls(found, unfused=(0.95, 1.0, 1.02), decomposed=own))
        assert f"decomposed takes {own[1]:.2f} times as long as unfused" in over_all
        assert f"): {verdict}" in over_all
    *_, careful = recorded.remarks(with_calls(found, unfused=(1.0, 2.0, 3.0), decomposed=(1.0, 2.0, 3.0)))
    assert careful.startswith("Careful, the machine did something else too")
    with theme.style():
        drawn = recorded.figure(found)
        drawn.canvas.draw()
        words = drawn._supxlabel.get_window_extent()
    assert " ".join(drawn.get_supxlabel().split()) == said
    assert drawn.bbox.x0 <= words.x0 <= words.x1 <= drawn.bbox.x1


def test_picture_has_unfused_above_and_a_lane_for_transfers(found: Timeline) -> None:
    with theme.style():
        drawn = recorded.figure(found)
    unfused, decomposed = drawn.axes
    titles = [axes.get_title(loc="left") for axes in drawn.axes]
    assert titles == ["unfused: 0.08 ms", "decomposed: 0.0905 ms"]
    lanes = ["rank 0, compute", "rank 0, transfers", "rank 1, compute", "rank 1, transfers"]
    assert [label.get_text() for label in unfused.get_yticklabels()] == lanes

    def places(axes: Any, kind: str) -> list[float]:
        bars = [bar for bar in axes.patches if to_hex(bar.get_facecolor()) == theme.colour(kind)]
        return [bar.get_y() + bar.get_height() / 2 for bar in bars]

    assert places(unfused, "collective") == [1]
    assert places(decomposed, "multiply") == [0, 2]
    (legend,) = drawn.legends
    parts = ["multiply", "collective", "the rest of the call", "the last rank ends"]
    assert [text.get_text() for text in legend.get_texts()] == parts
