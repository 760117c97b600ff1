"""Columns and pictures of scaling, of fast_p, of speed-ups against tokens and of busbw; the state of a GPU by NVML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from matplotlib.text import Annotation

from fusedtp import machine
from fusedtp.bench import figures, report, tables, theme
from fusedtp.bench.cases import LAYERS, OPS, Case
from fusedtp.bench.frames import distinct, fast_p, frame_of
from fusedtp.bench.intervals import Timing
from fusedtp.bench.report import late, uncaptured
from fusedtp.bench.store import Measurement, ratios
from fusedtp.bench.sweep import of_ranks

MakeRow = Callable[..., Measurement]


def case_rows(make_row: MakeRow, tokens: int, world_size: int, auto_ms: float, **more: Any) -> list[Measurement]:
    """Return rows of a block; the fastest other takes 10 ms."""
    given = {"op": "block", "model": "small", "tokens": tokens, "M": tokens, "world_size": world_size, **more}
    times = {"local": 4.0, "comm": 6.0, "unfused": 10.0, "dtensor": 12.0, "auto": auto_ms}
    return [make_row(variant=name, median_ms=ms, **given) for name, ms in times.items()]


def test_scaling_is_over_one_rank_and_the_fastest_other_counts(make_row: MakeRow) -> None:
    alone = [make_row(variant="unfused", median_ms=16.0, op="block", model="small", tokens=64, M=64, world_size=1)]
    frame = frame_of([*alone, *case_rows(make_row, 64, 2, 8.0), *case_rows(make_row, 64, 4, 5.0)])
    found = frame.set_index([frame["variant"].astype(str), "world_size"])
    assert found.loc[("auto", 2), "scaling"] == pytest.approx(16 / 8 / 2)
    assert found.loc[("auto", 4), "scaling"] == pytest.approx(16 / 5 / 4)
    assert found.loc[("unfused", 2), "scaling"] == pytest.approx(16 / 10 / 2)
    assert found.loc[("auto", 2), "over_best"] == pytest.approx(10 / 8)
    assert found["over_best"].notna().sum() == 2
    # Of other code's time on one rank nothing can be said.
    for changed in ({"commit": "another"}, {"dirty": True}, {"digest": "another"}, {"torch": "another"}):
        other = frame_of([replace(alone[0], **changed), *case_rows(make_row, 64, 2, 8.0)])
        assert other["scaling"].dropna().tolist() == [1.0]
    on_two = frame_of([replace(alone[0], gpu="H100", num_gpus=8, world_size=8, nodes=2)])
    assert on_two["hardware"].tolist() == ["8x H100 on each of 2 nodes"]
    assert fast_p(frame) == {"auto": pytest.approx([10 / 8, 10 / 5])}
    told = " ".join(tables.verdict(frame))
    assert "fast_p of auto, right and with a median p times as fast as the fastest other's: " in told
    assert "other's: 100% at p = 1, 100% at p = 1.2, 50%" in told
    wrong = replace(case_rows(make_row, 64, 8, 5.0)[-1], gate="wrong", median_ms=None, p20_ms=None, p80_ms=None)
    assert fast_p(frame_of([*case_rows(make_row, 64, 8, 5.0)[:-1], wrong])) == {"auto": [0.0]}


def test_each_suite_has_a_verdict_and_totals_of_its_own(make_row: MakeRow) -> None:
    """Decoding has layers of the same names as the matmuls of a block."""
    given = {"model": "small", "tokens": 64, "M": 64}
    rows = [
        make_row(op=OPS[place % 2], variant=name, median_ms=ms, layer=layer, **given)
        for place, layer in enumerate(LAYERS) for name, ms in (("matmul", 1.0), ("unfused", 2.0), ("decomposed", 4.0))
    ]  # fmt: skip
    alone, totals = tables.verdict(frame_of(rows)), tables.totals(frame_of(rows)).cells
    assert alone[0].startswith("No gain: decomposed is faster than unfused in 0 of 4 cases, slower in 4")
    rows += [make_row(op="decode", variant=name, median_ms=ms, layer=layer, **given)
             for layer in ("attention out", "mlp down") for name, ms in (("unfused", 2.0), ("auto", 1.0))]  # fmt: skip
    rows += case_rows(make_row, 64, 2, 8.0)
    frame = frame_of(rows)
    told = tables.verdict(frame)
    at = [told.index(f"Suite {name}:") for name in ("ops", "decode", "block")]
    assert told[at[0] + 1 : at[1]] == alone
    assert told[at[1] + 1].startswith("Gain: auto is faster than unfused in 2 of 2 cases, slower in 0")
    assert told[at[2] + 1].startswith("Gain: auto is faster than unfused in 1 of 1 cases, slower in 0")
    pd.testing.assert_frame_equal(tables.totals(frame).cells, totals)
    assert set(tables.summary(frame).cells["suite"]) == {"ops", "decode", "block"}
    assert "suite" not in tables.summary(frame_of(rows[:12])).cells
    assert sorted(words for words, _ in report._groups(frame, ("direction",))) == [
        "small, block, forward", "small, decode, forward", "small, forward"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "faster", "slower", "said"),
    [
        (1, 1, 0, "Gain"), (8, 3, 1, "Gain"), (3, 1, 0, "No clear gain"), (60, 0, 0, "No gain"),
        (60, 2, 1, "No clear gain"), (60, 5, 1, "Gain"), (60, 5, 5, "No clear gain"),
    ],
)  # fmt: skip
def test_a_gain_is_more_than_chance_gives(make_row: MakeRow, count: int, faster: int, slower: int, said: str) -> None:
    times = [1.0] * faster + [4.0] * slower + [2.0] * (count - faster - slower)
    for launches, why in (((), "of one launch; launches differ by more: --launches 3"), ((10, 10), "over launches")):
        rows = [
            make_row(M=M, variant=name, median_ms=ms, launches=launches)
            for M, mine in enumerate(times, 1) for name, ms in (("unfused", 2.0), ("decomposed", mine))
        ]  # fmt: skip
        told = tables.verdict(frame_of(rows))[0]
        counts = f"{faster} of {count} cases, slower in {slower}, no difference in the others (95 % intervals "
        assert told.startswith(f"{said}: decomposed is faster than unfused in {counts}")
        assert why in told
    assert f"about {0.025 * count:.1f} are faster by chance" in told


def test_auto_is_left_out_where_it_ran_the_code_of_another(make_row: MakeRow) -> None:
    rows = [make_row(variant=name, median_ms=1.0) for name in ("unfused", "decomposed")]
    for path, left in (("decomposed: asked", 2), ("unfused: few", 2), ("fused: many", 3), ("", 2)):
        assert len(distinct(frame_of([*rows, make_row(variant="auto", median_ms=1.0, path=path)]))) == left


def test_pictures_have_a_line_a_number_of_ranks_and_a_line_a_variant(make_row: MakeRow) -> None:
    rows = [row for tokens in (16, 64, 256) for n in (2, 4) for row in case_rows(make_row, tokens, n, 8.0)]
    with theme.style():
        drawn = figures.by_tokens(frame_of(rows))
        assert figures.by_tokens(frame_of(rows[:10])) is None
        (axes,) = drawn.axes
        assert [line.get_label() for line in axes.get_lines()[1:]] == ["2 ranks", "4 ranks"]
        assert list(axes.get_lines()[1].get_xdata()) == [16, 64, 256]
        assert list(axes.get_lines()[1].get_ydata()) == pytest.approx([10 / 8] * 3)
        # However slow, a line lies within its band, and the axis has several ticks.
        for auto_ms in (9.5, 8e5):
            slow = figures.by_tokens(frame_of([row for n in (16, 64) for row in case_rows(make_row, n, 2, auto_ms)]))
            (panel,), ((low, high),) = slow.axes, [each.get_datalim(slow.axes[0].transData).intervaly
                                                   for each in slow.axes[0].collections]  # fmt: skip
            assert low < 10 / auto_ms < high
            least, most = panel.get_ylim()
            assert sum(least <= tick <= most for tick in panel.get_yticks()) >= 3
        sent = [
            make_row(op="all_reduce", variant=name, median_ms=ms, M=M, N=1024, K=1024,
                     **{key: value for key, value in ratios(Case("all_reduce", M, 1024, 1024, "float32", 2), "forward",
                                                            name, {name: ms}).items() if value})
            for M in (4, 64) for name, ms in (("unfused", 2.0), ("decomposed", 1.0))
        ]  # fmt: skip
        drawn = figures.bus_rates(frame_of(sent))
    assert all(" KB" in str(tick.get_text()) for tick in drawn.axes[0].get_xticklabels())
    (axes,) = drawn.axes
    assert {line.get_label() for line in axes.get_lines()} == {"unfused", "decomposed"}
    # On two ranks an all-reduce sends twice half of its bytes: 16 KB in 1 ms.
    ((_, low),) = [(line, line.get_ydata()[0]) for line in axes.get_lines() if line.get_label() == "decomposed"]
    assert low == pytest.approx(4 * 1024 * 4 / 1e-3 / 1e9)


def test_no_line_of_a_bound_crosses_the_time_beside_a_bar(make_row: MakeRow) -> None:
    times = {"matmul": 4.0, "comm": 8.5, "unfused": 10.0, "sequential": 9.0, "decomposed": 3.0}
    with theme.style():
        drawn = figures.time_parts(frame_of([make_row(variant=name, median_ms=ms) for name, ms in times.items()]))
    (axes,) = drawn.axes
    lines = [max(line.get_xdata()) for line in axes.get_lines()]
    assert sorted(lines) == pytest.approx([40.0, 85.0, 90.0])
    beside = {text.get_text(): text.xy[0] for text in axes.texts if isinstance(text, Annotation)}
    assert beside == {"10 ms": pytest.approx(100), "9 ms": pytest.approx(90), "3 ms": pytest.approx(90)}


def test_rows_that_the_host_made_longer_or_that_are_no_graphs_are_told(make_row: MakeRow, tmp_path: Path) -> None:
    rows = [make_row(median_ms=1.0, variant="dtensor", late_rounds=n, host_us=900.0) for n in (0, 10, 11)]
    assert late(rows[:2]) == ""
    assert "Careful, in 1 rows (dtensor) the host took longer" in late(rows)
    report.write([make_row(median_ms=1.0), rows[2]], tmp_path / "sweep.csv")
    assert "Careful, in 1 rows (dtensor) the host took longer" in (tmp_path / "sweep.html").read_text()
    paths = {"fused": "fused: asked; captured", "dtensor": "not captured: RuntimeError: a copy to the host"}
    calls = [make_row(median_ms=1.0, variant=name, graph=True, path=path) for name, path in paths.items()]
    assert uncaptured(calls[:1]) == ""
    assert "Careful, 1 rows (dtensor) could not be captured" in report.warnings([*rows, *calls])[-1]
    timings = [replace(Timing.of([1.0, 2.0]), host_us=us, late_rounds=1) for us in (10.0, 30.0)]
    joined = Timing.together(timings)
    assert (joined.host_us, joined.late_rounds, joined.each_of(2).host_us) == (30.0, 2, 15.0)


def test_the_state_of_a_gpu_is_by_nvml_and_empty_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> Any:
        raise OSError(f"no {name}")

    monkeypatch.setattr(machine.ctypes, "CDLL", no_library)
    assert machine.gpu_state(0) == ""
    asked: list[object] = []

    def gives(of: Callable[..., int]) -> Callable[..., int]:
        def function(gpu: object, *given: Any) -> int:
            given[-1]._obj.value = of(*given[:-1])
            return 0

        return function

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByIndex_v2=lambda index, gpu: asked.append(index),
        nvmlDeviceGetHandleByUUID=lambda uuid, gpu: asked.append(uuid),
        nvmlDeviceGetClockInfo=gives(lambda kind: 1000 * kind), nvmlDeviceGetPowerUsage=gives(lambda: 312_400),
        nvmlDeviceGetTemperature=gives(lambda sensor: 61),
        nvmlDeviceGetCurrentClocksThrottleReasons=gives(lambda: 0x44),
    )  # fmt: skip
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    said = "SM 1000 MHz, memory 2000 MHz, 312 W, 61 C, throttled: power cap, hardware thermal"
    assert machine.gpu_state(1) == said
    # Some schedulers name the visible GPUs by UUID.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,MIG-cd80,")
    assert [machine.gpu_state(index) for index in range(3)] == [said] * 3
    assert asked == [5, b"GPU-8932f937", b"MIG-cd80", 2]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = gives(lambda: 1)
    assert machine.gpu_state(0).endswith("throttled: no")
    # A rank may have no NVML, and a GPU may be slower than rank 0's.
    quick, slow = (f"SM {clock} MHz, memory 2619 MHz" for clock in (1980, 1410))
    for states, told in (
        ([quick, "", quick], quick),
        (["", ""], ""),
        ([quick, "", slow, quick], f"{quick}; slowest, rank 2: {slow}"),
        (["", slow], f"slowest, rank 1: {slow}"),
    ):
        assert of_ranks(states) == told
    nvml.nvmlDeviceGetPowerUsage = lambda gpu, found: 3
    assert machine.gpu_state(0) == ""
