"""What pytest-benchmark keeps of the regression check's timings, read again and compared by it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer

from fusedtp.bench import regress

pytest.importorskip("pytest_benchmark")
from .launches import IDS, RATIOS, noisy, samples

STUB = """
import json, os, pytest
NOW = [0.0]
def clock():
    return NOW[0]
SAMPLES = json.loads(os.environ["SAMPLES"])
@pytest.mark.benchmark(timer=clock)
@pytest.mark.parametrize("key", SAMPLES)
def test_ratio(benchmark, key):
    left = iter(SAMPLES[key])
    def one_round():
        NOW[0] += next(left)
    benchmark.pedantic(one_round, rounds=len(SAMPLES[key]), iterations=1)
"""


def test_what_pytest_benchmark_saves_is_read_and_compared_by_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `run` starts it, with these tests' conftest; the samples are made up."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bench.py").write_text(STUB)
    (tmp_path / "tests" / "conftest.py").write_text(
        "from pathlib import Path\nimport importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('shared', {str(Path(__file__).parent / 'conftest.py')!r})\n"
        "shared = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(shared)\n"
        "globals().update({name: each for name, each in vars(shared).items() if name.startswith('pytest_benchmark')})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    here = regress.describe()
    for folder, factor in (("before", 1.0), ("after", 1.5)):
        launches = [noisy({"decomposed": factor}, seed) for seed in range(2)]
        monkeypatch.setenv("SAMPLES", json.dumps(samples(launches)))
        against = next((tmp_path / "before").rglob("*.json"), None)
        found = regress.read(regress.run(tmp_path / folder, 1, "", against), here)
        expected = {key: median(values) for key, values in samples(launches).items()}
        assert found.ratios == pytest.approx({key: expected[key] for key in RATIOS})
        assert found.matmul == pytest.approx(expected["matmul"])
    assert f"test_ratio[{IDS[1]} / matmul] (NOW)" in capfd.readouterr().out


def test_benchmarks_that_fail_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no tests/test_bench.py: run it in the folder of a checkout"):
        regress.run(tmp_path, 1, "")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bench.py").write_text("def test_ratio():\n    assert False, 'a wrong result'\n")
    with pytest.raises(typer.Exit) as left:
        regress.run(tmp_path, 1, "")
    assert left.value.exit_code == 1


def test_saved_timings_are_not_compared_across_machines(pytestconfig: pytest.Config) -> None:
    hook = pytestconfig.hook
    pytest.importorskip("pytest_benchmark")
    ours = hook.pytest_benchmark_generate_machine_info(config=pytestconfig)
    assert {"name", "gpu", "num_gpus", "links", "driver", "torch"} <= set(ours)
    assert not {"commit", "node"} & set(ours)

    def compare(theirs: dict[str, Any]) -> None:
        hook.pytest_benchmark_compare_machine_info(
            config=pytestconfig, benchmarksession=None, machine_info=ours, compared_benchmark={"machine_info": theirs}
        )

    compare(ours)
    with pytest.raises(pytest.UsageError, match="saved on another machine: cores"):
        compare(ours | {"cores": ours["cores"] + 1})
    with pytest.raises(pytest.UsageError, match="saved on another machine: name"):
        compare({"node": "somewhere", "cpu": {"brand_raw": "Some"}})
