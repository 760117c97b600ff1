"""Rows survive the file; foreign files are refused and left alone; no half-written file is ever visible."""

from __future__ import annotations

import csv
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from fusedtp.bench import store
from fusedtp.bench.store import COLUMNS, Measurement

ROW = Measurement(
    op="all_gather_matmul", variant="decomposed", M=4096, N=512, K=4096, dtype="float32", world_size=2,
    direction="forward", model="llama3-8b", tokens=4096, layer="mlp up", median_ms=95.25, p20_ms=94.5, p80_ms=97.0,
    total_ms=480.5, rounds=5, rounds_ms=(94.0, 94.5, 95.25, 97.0, 99.75), speedup_vs_unfused=1.625,
    matmul_fraction=0.96875, tflops=0.125, bound_ms=94.0, hidden=0.875, gate="passed",
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


def test_a_file_from_before_rounds_were_kept_is_read(path: Path) -> None:
    store.write(path, [ROW, REFUSED])
    with path.open(newline="") as file:
        lines = [{**cells} for cells in csv.DictReader(file)]
    old = [name for name in COLUMNS if name != "rounds_ms"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, old, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    assert store.read(path) == [replace(ROW, rounds_ms=()), REFUSED]
    # a new row has its rounds, beside rows without
    new = replace(ROW, M=8192)
    assert store.update(path, [new]) == store.read(path) == [replace(ROW, rounds_ms=()), REFUSED, new]


TEXTS = ["=1+1", "+1", "-1", "@x", "\tx", "\rx", "'=1", "'quoted'", "nan", "NA", "None", "a'b", 'a,"b"', "a\r\nb"]


def test_text_survives_and_cannot_start_a_formula(path: Path) -> None:
    rows = [replace(ROW, gpu=text, M=number) for number, text in enumerate(TEXTS, 1)]
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
    others = [replace(ROW, M=8192), replace(ROW, direction="backward"), replace(ROW, layer="mlp down"), REFUSED]
    store.write(path, [ROW, replace(ROW, variant="unfused"), *others])
    again = replace(ROW, median_ms=95.0)
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
