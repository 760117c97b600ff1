"""Kernels compiled without a GPU are those that Triton looks for on the machine that has it, shown with a driver that
names a GPU and has none: all that the stages launch there with tensors in memory, found in a folder that was made
elsewhere, with tensors that have none.

Which compiler made the folder is compared before it is taken; that the GPU machine's Triton is the same to the byte is
seen only there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from fusedtp.bench import gpu, gpu_compiled
from typer.testing import CliRunner

# A few of what the stages launch, and of one more tile that is not among them.
COMPILE = """
import sys
from pathlib import Path
from fusedtp.bench import gpu_compiled, gpu_kernels, gpu_links, gpu_matmul
from fusedtp.bench.cases import Item
few = [Item("matmul", 512, 256, 64, "bfloat16"), Item("matmul", 500, 250, 60, "float16")]
gpu_matmul.items = lambda: few
kinds = [("gather rows", 512, 256, 64), ("scatter", 512, 256, 64), ("collect pieces", 64, 40, 0)]
gpu_kernels.items = lambda: [Item(name, M, N, K, "bfloat16", 2) for name, M, N, K in kinds]
gpu_links.items = lambda **_: [Item(gpu_links.OP, 512, 256, 64, "bfloat16", 2)]
"""
MAKE = "print(gpu_compiled.compile_all('sm_90', Path(sys.argv[1])))"
LAUNCH = """
import torch
assert not gpu_compiled.differences(Path(sys.argv[1])), gpu_compiled.differences(Path(sys.argv[1]))
if sys.argv[2] == "take":
    print(gpu_compiled.take(Path(sys.argv[1])))
counted, loaded = gpu_compiled.Counted(), []
with gpu_compiled.absent("sm_90"):
    from triton.runtime.driver import driver
    load = driver.active.utils.load_binary
    driver.active.utils.load_binary = lambda name, cubin, *rest: loaded.append(cubin[:4]) or load(name, cubin, *rest)
    for stage in gpu_compiled.STAGES[: None if sys.argv[2] == "take" else 1]:
        stage.compile_only(torch.device("cpu"))
assert loaded and set(loaded) == {b"\\x7fELF"}, loaded
print(counted.compiled, counted.found)
"""


def run(code: str, cache: Path, *arguments: object) -> list[int]:
    env = {**os.environ, **gpu_compiled.environment(cache)}
    words = [sys.executable, "-P", "-c", COMPILE + code, *map(str, arguments)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled kernels, carried away from where it was made."""
    made = tmp_path_factory.mktemp("made") / "kernels"
    made.mkdir()
    (count,) = run(MAKE, made, made)
    carried = tmp_path_factory.mktemp("carried") / "elsewhere"
    shutil.move(made, carried)
    # Both matmuls twice, as own and beside a fused one; steps of an op each a kernel.
    assert count >= 8
    return carried


def test_a_carried_folder_is_found_whole(folder: Path, tmp_path: Path) -> None:
    taken, compiled, found = run(LAUNCH, tmp_path / "cache", folder, "take")
    assert compiled == 0
    assert found == taken >= 8
    # Taken again there is nothing to do.
    assert gpu_compiled.take(folder, tmp_path / "cache") == 0


def test_a_folder_that_is_only_copied_is_not(folder: Path, tmp_path: Path) -> None:
    """Triton's groups name files by absolute paths: why `take` writes them anew."""
    shutil.copytree(folder, tmp_path / "cache")
    compiled, found = run(LAUNCH, tmp_path / "cache", folder, "copied")
    assert found == 0
    assert compiled == 2


def test_a_folder_of_another_compiler_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert gpu_compiled.differences(folder) == []
    about = json.loads((folder / gpu_compiled.ABOUT).read_text())
    (tmp_path / gpu_compiled.ABOUT).write_text(json.dumps(about | {"key": "0" * 64}))
    (different,) = gpu_compiled.differences(tmp_path)
    assert different.startswith("key 000")
    (missing,) = gpu_compiled.differences(tmp_path / "nowhere")
    assert "cannot be read" in missing
    assert gpu_compiled.differences(folder, "sm_90") == []
    assert gpu_compiled.differences(folder, "sm_80") == ["compiled for sm_90, not for sm_80"]
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/bin/ptxas")
    assert gpu_compiled.differences(folder) == ["TRITON_PTXAS_PATH is /usr/bin/ptxas"]


def test_a_folder_is_gone_on_with_by_the_same_compiler_and_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert gpu_compiled.begin("sm_90", tmp_path) == []
    # As an interruption leaves it.
    (left,) = gpu_compiled.differences(tmp_path, "sm_90")
    assert left.startswith("it is unfinished")
    assert gpu_compiled.begin("sm_90", tmp_path) == []
    assert gpu_compiled.begin("sm_80", tmp_path) == ["compiled for sm_90, not for sm_80"]
    monkeypatch.setattr(gpu_compiled.triton, "__version__", "3.0")
    (other,) = gpu_compiled.begin("sm_90", tmp_path)
    assert other.endswith("3.0 here")


def test_a_command_refuses_a_folder_of_another_target(tmp_path: Path) -> None:
    assert gpu_compiled.begin("sm_80", tmp_path) == []
    app = typer.Typer()
    app.command()(gpu.gpu)
    result = CliRunner().invoke(app, ["--compile-for", "sm_90", "--into", str(tmp_path)])
    assert result.exit_code == 2
    assert "compiled for sm_80, not for sm_90" in " ".join(result.output.split())


def test_interpreted_kernels_cannot_be_compiled() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=0"), gpu_compiled.absent("sm_90"):
        pass
