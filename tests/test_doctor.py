"""The report of `fusedtp doctor` for a machine that lacks something."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from fusedtp import doctor
from fusedtp.choose.tuning import Sample, Table


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make a folder that is all of PATH."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(path: Path) -> None:
    path.write_text("")
    path.chmod(0o755)


def test_a_compiler_is_found_as_triton_finds_it(no_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.compiler()[1].startswith("no C compiler")
    assert [name for name, _ in doctor.compiler_lines()] == ["missing"]
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(no_compiler)})
    (no_compiler / "Python.h").touch()
    for name in ("clang", "gcc"):
        program(no_compiler / name)
        assert doctor.compiler() == (str(no_compiler / name), "")
    program(no_compiler / "mycc")
    for named in ("gone", "mycc -m64", ""):
        monkeypatch.setenv("CC", named)
        chosen, missing = doctor.compiler()
        assert (chosen, repr(named) in missing) == ("", True)
    monkeypatch.setenv("CC", "mycc")
    assert doctor.compiler() == ("mycc", "")
    (no_compiler / "Python.h").unlink()
    chosen, missing = doctor.compiler()
    assert chosen == "mycc"
    assert "Python's development files" in missing


TABLE = Table({}, (Sample("all_gather_matmul", 2, "float32", 512, 512, 512, {"unfused": 2.0, "decomposed": 1.0}),), {})
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (doctor.Findings("", 0, 2, True, ""), ("fused is interpreted", "auto takes decomposed")),
        (doctor.Findings("", 0, 2, True, "", table=TABLE), ("fused is interpreted", "by 1 measurements")),
        (doctor.Findings("", 0, 2, False, "rank 1 raised\nTrace"), ("rank 1 raised)", "auto takes unfused")),
        (doctor.Findings(H100, 1, 16, True, ""), (f"1x {H100}", "never timed", "predicted for NVIDIA H100 SXM")),
        (doctor.Findings("NVIDIA RTX A1000", 8, 16, True, ""), ("8x NVIDIA RTX A1000", "auto takes fused")),
        (doctor.Findings(H100, 2, 16, False, "GPU 0 lacks atomics"), ("GPU 0 lacks atomics", "auto takes unfused")),
        (doctor.Findings(H100, 2, 16, True, "", "no C compiler"), ("no C compiler", "auto fails")),
    ],
)
def test_the_verdict_says_what_runs_and_what_auto_takes(found: doctor.Findings, said: tuple[str, ...]) -> None:
    assert all(each in found.verdict for each in said), found.verdict
    # unfused always runs; the others need shared memory and a compiler for kernels
    lacking = not found.reached or found.missing
    assert ("decomposed and fused do not run" in found.verdict) == bool(lacking)
