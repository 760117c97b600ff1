"""Rows survive the file; foreign files are refused and left alone; no half-written file is ever visible."""

from __future__ import annotations

import csv
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from fusedtp.bench import store
from fusedtp.bench.cases import Case
from fusedtp.bench.intervals import Timing
from fusedtp.bench.store import COLUMNS, Measurement, Outcome, rows_of
from fusedtp.bench.sweep import together
from fusedtp.bench.timing import Verdict
from fusedtp.machine import describe

ROW = Measurement(
    op="all_gather_matmul", variant="decomposed", M=4096, N=512, K=4096, dtype="float32", world_size=2,
    direction="forward", model="llama3-8b", tokens=4096, layer="mlp up", median_ms=95.25, p20_ms=94.4, p80_ms=97.55,
    total_ms=480.5, rounds=5, rounds_ms=(94.0, 94.5, 95.25, 97.0, 99.75), speedup_vs_unfused=1.625,
    matmul_fraction=0.96875, tflops=0.0901885, bound_ms=94.0, hidden=0.875, gate="passed",
    max_error=0.00048828, error_ratio=0.0078125, path="decomposed: asked for", machine="cpu-some-2c",
    cpu='Some, CPU "quoted"', cores=2, links="shared memory", threads=1, backend="gloo", python="3.11.7",
    torch="2.13.0+cpu", triton="3.7.1", commit="0123456789ab", dirty=True, time_utc="2026-01-02T03:04:05Z",
)  # fmt: skip
NUMBERS = [each.name for each in fields(Measurement) if each.default is None]
REFUSED = replace(
    ROW, variant="fused", rounds=0, rounds_ms=(), gate="3 of 4 elements are wrong,\nthe worst at (0, 1)",
    interpreted=True, **dict.fromkeys(NUMBERS),
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machine" / "sweep.csv"


def test_round_trip(path: Path) -> None:
    store.write(path, [ROW, REFUSED])
    assert store.read(path) == [ROW, REFUSED]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert os.listdir(path.parent) == ["sweep.csv"]


@pytest.mark.parametrize("beyond", [1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_rows_of_one_run_are_read_however_little_is_sent(path: Path, beyond: float) -> None:
    """Where sequential takes hardly longer than the matmul, `hidden` is a quotient of small differences."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        matmul = draw.uniform(100, 9000)
        times = {"matmul": matmul, "comm": 1.0, "unfused": matmul * draw.uniform(0.9, 1.1)}
        times |= {"sequential": matmul * (1 + beyond), "decomposed": matmul * (1 + draw.uniform(-5, 5) * beyond)}
        outcomes = [Outcome(name, "forward", Verdict(), Timing.of([ms] * 3)) for name, ms in times.items()]
        rows = rows_of(Case("all_gather_matmul", 2048, 28672, 4096, "float32", 2), outcomes, describe())
        store.write(path, rows)
        assert [row.variant for row in store.read(path)] == list(times)


def test_a_file_from_before_rounds_were_kept_is_read(path: Path) -> None:
    store.write(path, [ROW, REFUSED])
    with path.open(newline="") as file:
        lines = [{**cells} for cells in csv.DictReader(file)]
    old = [name for name in COLUMNS if name not in ("rounds_ms", "launches")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, old, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    assert store.read(path) == [replace(ROW, rounds_ms=()), REFUSED]
    # a new row has its rounds, beside rows without
    new = replace(ROW, M=8192, tflops=None)
    assert store.update(path, [new]) == store.read(path) == [replace(ROW, rounds_ms=()), REFUSED, new]


LAUNCHED = replace(ROW, M=16, tflops=None, launches=(2, 3))


def test_rounds_of_several_launches_are_kept_apart(path: Path) -> None:
    store.write(path, [ROW, LAUNCHED])
    assert store.read(path) == [ROW, LAUNCHED]
    good = path.read_text()
    for text in ("5", "2 4", "0 5", "2 2"):
        path.write_text(good.replace(",2 3,", f",{text},"))
        with pytest.raises(ValueError, match=f"launches: {text} rounds in two launches or more, of 5 times"):
            store.read(path)


def test_outcomes_of_several_launches_are_joined() -> None:
    """A variant that failed in one launch has no time, whatever it took in the others."""
    case = Case("all_gather_matmul", 16, 16, 16, "float32", 2)
    first = [Outcome(name, "forward", Verdict(), Timing.of([ms] * 3)) for name, ms in (("unfused", 3.0), ("auto", 2.0))]
    second = [
        replace(first[0], timing=Timing.of([4.0] * 5)),
        replace(first[1], timing=None, verdict=Verdict(error="no")),
    ]
    unfused, auto = rows_of(case, together([first, second]), describe())
    assert (unfused.rounds_ms, unfused.launches) == ((3.0,) * 3 + (4.0,) * 5, (3, 5))
    assert (unfused.median_ms, unfused.speedup_vs_unfused) == (4.0, 1.0)
    assert (auto.gate, auto.median_ms, auto.launches) == ("no", None, ())
    (one,) = together([first[:1]])
    assert one == first[0]


def case_rows(launch: int = 0) -> list[Measurement]:
    """Return the rows of a run of one case."""
    case, outcomes = Case("all_gather_matmul", 512, 256, 128, "float32", 2), []
    random = np.random.default_rng(launch)
    for place, variant in enumerate(("matmul", "comm", "unfused", "sequential", "decomposed", "dtensor")):
        rounds = (10.0 + place) * random.lognormal(0, 0.02, 7)
        outcomes.append(Outcome(variant, "forward", Verdict(), Timing.of(rounds.tolist()), threads=1))
    return rows_of(case, outcomes, describe())


NUMBERS_OF_A_CASE = [
    "median_ms", "p20_ms", "p80_ms", "total_ms", "rounds_ms", "speedup_vs_unfused", "speedup_vs_sequential",
    "matmul_fraction", "hidden", "tflops", "bound_ms", "algbw_gbps", "busbw_gbps", "roofline", "tokens_per_s",
]  # fmt: skip


@pytest.mark.parametrize("factor", [0.5, 0.98, 1.03])
@pytest.mark.parametrize("name", NUMBERS_OF_A_CASE)
def test_rows_that_contradict_themselves_are_refused(path: Path, name: str, factor: float) -> None:
    rows = case_rows()
    store.write(path, rows)
    assert [row.variant for row in store.read(path)] == [row.variant for row in rows]
    changed = 0
    for place, row in enumerate(rows):
        value = getattr(row, name)
        if not value or (name == "hidden" and abs(value * (factor - 1)) < 2e-3):
            continue
        other = tuple(factor * each for each in value) if name == "rounds_ms" else factor * value
        changed += 1
        store.write(path, [*rows[:place], replace(row, **{name: other}), *rows[place + 1 :]])
        with pytest.raises(ValueError, match=rf"row {place + 1}, column \w+: .* (give|is not between)"):
            store.read(path)
    assert changed


@pytest.mark.parametrize("name", ["median_ms", "all times"])
def test_halved_times_with_halved_ratios_are_refused(path: Path, name: str) -> None:
    """A variant is made twice as fast in every number but its rounds, or in its rounds too."""
    times = ("median_ms", "p20_ms", "p80_ms", "total_ms")
    changed = []
    for row in case_rows():
        if row.variant == "decomposed":
            half = {each: getattr(row, each) / 2 for each in times}
            if name == "all times":
                half["rounds_ms"] = tuple(each / 2 for each in row.rounds_ms)
            else:
                half["speedup_vs_unfused"] = 2 * (row.speedup_vs_unfused or 0)
            row = replace(row, **half)
        changed.append(row)
    store.write(path, changed)
    with pytest.raises(ValueError, match=r"row 5, column \w+: .*, but (its rounds|the medians of its case) give"):
        store.read(path)


OTHERS = {
    "commit": "aaaaaaaaaaaa", "dirty": None, "torch": "2.0", "triton": "3.0.0", "python": "3.8.0",
    "time_utc": "2020-01-01T00:00:00Z",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_rows_of_two_runs_in_one_case_are_refused(path: Path, name: str) -> None:
    rows = case_rows()
    other = replace(rows[-2], **{name: not rows[-2].dirty if name == "dirty" else OTHERS[name]})
    store.write(path, [*rows[:-2], other, rows[-1]])
    with pytest.raises(ValueError, match=rf"row 5, column {name}: .* in row 1 of the same case: not one run"):
        store.read(path)
    # Two cases may be of two runs, and a row without a time is compared with nothing.
    untimed = dict.fromkeys(NUMBERS) | {"rounds_ms": (), "rounds": 0, "gate": store.NOT_RUN + "here"}
    store.write(
        path,
        [*rows, replace(other, M=1024, tflops=None, tokens_per_s=None), replace(other, variant="fused", **untimed)],
    )
    assert len(store.read(path)) == len(rows) + 2


TEXTS = ["=1+1", "+1", "-1", "@x", "\tx", "\rx", "'=1", "'quoted'", "nan", "NA", "None", "a'b", 'a,"b"', "a\r\nb"]


def test_text_survives_and_cannot_start_a_formula(path: Path) -> None:
    rows = [replace(ROW, gpu=text, M=number, tflops=None) for number, text in enumerate(TEXTS, 1)]
    store.write(path, rows)
    with path.open(newline="") as file:
        assert not any(cells["gpu"].startswith(("=", "+", "-", "@", "\t", "\r")) for cells in csv.DictReader(file))
    # line ends are normalized
    assert store.read(path) == [replace(row, gpu=row.gpu.replace("\r\n", "\n").replace("\r", "\n")) for row in rows]


def test_a_byte_order_mark_of_a_spreadsheet_is_no_part_of_the_header(path: Path) -> None:
    store.write(path, [ROW])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert store.read(path) == [ROW]


def test_update_replaces_whole_cases(path: Path) -> None:
    # the same size in another direction or block is a different case
    row = replace(ROW, speedup_vs_unfused=None, tflops=None)
    others = [replace(row, M=8192), replace(row, direction="backward"), replace(row, layer="mlp down"), REFUSED]
    store.write(path, [row, replace(row, variant="unfused"), *others])
    again = replace(row, path="auto")
    assert store.update(path, [again]) == [*others, again]
    assert store.read(path) == [*others, again]


def test_what_cannot_run_has_not_failed() -> None:
    absent = replace(REFUSED, gate=store.NOT_RUN + "its fused ops need CUDA")
    found = [(row.passed, row.failed) for row in (ROW, REFUSED, absent)]
    assert found == [(True, False), (False, True), (False, False)]


def test_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(path, [ROW])
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(path, [ROW, REFUSED])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["sweep.csv"]


def test_a_file_is_replaced_as_a_whole_with_its_mode(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file is readable by others. The umask stays, as other threads make files too."""
    link, old = tmp_path / "link.csv", os.umask(0o022)
    try:
        with monkeypatch.context() as patched:
            patched.delattr(os, "umask")
            store.write(path, [ROW])
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o604)
    link.symlink_to(path)
    before = path.stat().st_ino
    store.write(link, [REFUSED])
    assert link.is_symlink()
    assert store.read(path) == [REFUSED]
    assert path.stat().st_mode & 0o777 == 0o604
    assert path.stat().st_ino != before
    assert os.listdir(path.parent) == ["sweep.csv"]
