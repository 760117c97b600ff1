"""`python -m fusedtp.bench.gpu` as far as it goes without a GPU: a dry run of every stage, what it keeps, what it does
with what is wrong, late or lost; and the checks that ranks run there, on ranks here.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from fusedtp.bench import gpu, gpu_kernels, gpu_links, gpu_matmul, store
from fusedtp.bench import gpu_preset as preset
from fusedtp.bench.cases import Case
from fusedtp.bench.gpu_rows import EMULATED, LEFT_OVER, LOST, WRONG
from fusedtp.bench.store import Row
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def command(*arguments: str, seconds: float = 540.0) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", "-m", "fusedtp.bench.gpu", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(gpu.gpu)
    return CliRunner().invoke(app, arguments)


def invoke(*arguments: str) -> tuple[int, str]:
    result = run(*arguments)
    return result.exit_code, " ".join(result.output.replace("\u2502", " ").split())


def test_the_stages_are_listed() -> None:
    code, said = invoke("--list")
    assert code == 0
    assert [int(number) for number in re.findall(r"(\d)  ?[a-z]", said)] == [1, 2, 3, 4, 5]
    assert "torch.mm" in said
    assert "gpu-two-ranks.csv" in said


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A dry run of all stages: its folder, and what it said. Stages are run here, as their commands say, not each in a
    process of its own: that is the next test's, and nothing here may end this one.
    """
    folder, said = tmp_path_factory.mktemp("dry"), []

    def here(command: Sequence[str], seconds: float, env: dict[str, str]) -> int:
        assert command[:3] == [sys.executable, "-m", "fusedtp.bench.gpu"]
        with mock.patch.dict(os.environ, env):
            result = run(*command[3:])
        said.append(result.output)
        return result.exit_code

    with (
        mock.patch("faulthandler.dump_traceback_later"),
        mock.patch.object(gpu, "conduct", partial(gpu.conduct, start=here)),
    ):
        result = run("--emulate", "--out", str(folder))
    said.append(result.output)
    assert result.exit_code == 0, "".join(said)
    return folder, "".join(said)


def test_a_dry_run_goes_through_every_stage(dry: tuple[Path, str]) -> None:
    folder, said = dry
    for number, stage in gpu.stages().items():
        assert f"stage {number}: right" in said
        rows = store.read(folder / "emulated" / stage.file, of_ops=False)
        assert rows
        for row in rows:
            assert row.passed, row
            assert row.interpreted
            assert EMULATED in row.path
            assert row.machine == "emulated"
    done = {row.op for row in store.read(folder / "emulated" / "gpu-kernels.csv", of_ops=False)}
    assert done == {*gpu_kernels.KERNELS, *gpu_kernels.MOVES, gpu_kernels.STEPS}
    shapes = {
        (row.model, row.layer, row.tokens) for row in store.read(folder / "emulated" / "gpu-matmul.csv", of_ops=False)
    }
    assert len(shapes - {("", "", 0)}) == 12
    assert (folder / "emulated" / "gpu-doctor.txt").read_text().strip()
    assert all(line.endswith("(emulated)") for line in said.splitlines() if "x own matmul" in line or ">= 0.95" in line)


def test_a_second_run_measures_nothing_again(dry: tuple[Path, str]) -> None:
    folder, _ = dry
    path = folder / "emulated" / "gpu-kernels.csv"
    before = path.read_bytes()
    done = command("--emulate", "--out", str(folder), "--stage", "2")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == before
    assert done.stdout.count("have ") == len(gpu_kernels.items(emulate=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "this needs a CUDA device"),
        (("--stage", "6"), "--stage must be from 1 to 5, got 6"),
        (("--emulate", "--out", "results"), "a dry run measures nothing that is to be kept"),
        (("--emulate", "--seconds", "1e9"), "--seconds must be"),
        (("--compile-for", "sm_75", "--into", "x"), "--compile-for takes one of sm_80, sm_90, sm_100"),
        (("--compile-for", "sm_90"), "needs --into a folder"),
        (("--compile-for", "sm_90", "--into", str(ROOT)), "--into must be a new folder"),
        (("--compile-for", "sm_90", "--into", str(ROOT / "README.md")), "--into must be a folder that can be written"),
        (("--compile-for", "sm_90", "--into", "/proc/here"), "--into must be a folder that can be written"),
        (("--emulate", "--out", str(ROOT / "README.md")), "--out must be a folder that can be written"),
        (("--emulate", "--out", "/proc/here"), "--out must be a folder that can be written"),
        (("--compile-for", "sm_90", "--into", "x", "--emulate"), "--compile-for does not go with --emulate"),
        (("--compile-for", "sm_90", "--into", "x", "--seconds", "9"), "--compile-for does not go with --seconds"),
        (("--list", "--kernels", "x"), "--list does not go with --kernels"),
        (("--list", "--stage", "2", "--into", "x"), "--list does not go with --stage, --into"),
        (("--emulate", "--kernels", "x"), "--kernels is of no use with it"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a CUDA device")
def test_refusals(arguments: tuple[str, ...], said: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert said in output


@pytest.mark.parametrize(
    ("ends", "how", "starts"),
    [
        ([0], "right", 1),
        ([WRONG], "something is wrong", 1),
        ([WRONG | LEFT_OVER], "something is wrong and something is left over", 1),
        # Lost, killed by a signal, ended by its own watch: it goes on behind that.
        ([LOST, -11, 1, WRONG], "something is wrong", 4),
        # The status of a command that was misused is none of its own.
        ([2, 0], "right", 2),
        ([None] * 9, "did not end", gpu.MAX_STARTS + 1),
    ],
)
def test_a_stage_goes_on_in_a_new_process(ends: list[int | None], how: str, starts: int, tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []

    def start(command: Sequence[str], seconds: float, env: dict[str, str]) -> int | None:
        commands.append(command)
        return ends[len(commands) - 1]

    assert gpu.conduct(2, tmp_path, emulate=False, seconds=400.0, start=start) == how
    assert len(commands) == starts
    # All of them go by when the first began.
    assert len({each[each.index("--since") + 1] for each in commands}) == 1


def test_a_process_that_goes_on_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "alive"
    inner = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(note)!r}).write_text(str(time.time())); time.sleep(0.1)"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert gpu.bounded([sys.executable, "-c", outer], 3.0, {}) is None
    before = note.read_text()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert note.read_text() == before
    assert (
        gpu.bounded([sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['HERE']))"], 30.0, {"HERE": "7"})
        == 7
    )


def row(make_row: Callable[..., Row], **values: Any) -> Row:
    return make_row(**({"op": "matmul", "variant": "own_matmul", "dtype": "bfloat16"} | values))


def test_verdicts_of_the_matmul(make_row: Callable[..., Row]) -> None:
    rows = [
        row(make_row, model="llama3-8b", layer="mlp up", tokens=512, matmul_fraction=fraction)
        for fraction in (1.0, 0.9604)
    ]
    assert gpu_matmul.verdicts(rows)[0] == "own matmul bfloat16 >= 0.95 of torch.mm: yes, 0.960 over 1 shapes"
    slow = [*rows, row(make_row, model="llama3-70b", layer="mlp down", tokens=8192, matmul_fraction=0.81)]
    lines = gpu_matmul.verdicts(slow)
    assert lines[0] == "own matmul bfloat16 >= 0.95 of torch.mm: NO, 0.882 over 2 shapes"
    assert lines[1] == "  slower: llama3-70b mlp down, 8192 tokens (1024x1024x1024) 0.810"
    assert lines[-1] == "own matmul float16: not timed"


def test_verdicts_of_the_kernels(make_row: Callable[..., Row]) -> None:
    rows = [
        row(make_row, op="scatter", variant="fused", matmul_fraction=1 / 1.02),
        # Its row shows the time, and nothing is asked of it.
        row(make_row, op="scatter to all", variant="fused", matmul_fraction=0.5, path="does more than the matmul"),
    ]
    assert gpu_kernels.verdicts(rows) == ["fused, signals preset <= 1.03 x own matmul: yes, 1 of 1"]
    rows.append(row(make_row, op="gather rows", variant="fused", matmul_fraction=1 / 1.25))
    lines = gpu_kernels.verdicts(rows)
    assert lines[0] == "fused, signals preset <= 1.03 x own matmul: NO, 1 of 2"
    assert lines[1] == "  slower: gather rows 1024x1024x1024 bfloat16 on 2 1.250 x"


def test_twelve_shapes_are_those_of_the_blocks() -> None:
    items = gpu_matmul.items()
    assert len(items) == 2 * 12
    sizes = {(each.model, each.layer, each.tokens): (each.M, each.N, each.K) for each in items}
    assert len(sizes) == 12
    assert sizes["llama3-8b", "attention qkv", 8192] == (8192, (32 + 2 * 8) * 128 // 4, 4096)
    assert sizes["llama3-70b", "mlp down", 512] == (512, 8192, 28672 // 8)


@pytest.mark.parametrize("name", [*gpu_kernels.KERNELS, *gpu_kernels.MOVES])
def test_a_kernel_that_is_wrong_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check fails where the launch does not happen, and where all that it wrote is off by a little."""
    item = next(each for each in gpu_kernels.items(emulate=True) if each.op == name)
    each = gpu_kernels.build(item, CPU)
    with pytest.raises(AssertionError):
        each.check()
    each.arenas.run(each.launch)
    each.check()
    # What it reads or has written: one element of it that is twice what it was.
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: equal(a, b * 2))
    check = gpu_matmul.Product.check
    monkeypatch.setattr(preset.Product, "check", lambda self, out, *rest: check(self, 2 * out, *rest))
    close = preset.close
    monkeypatch.setattr("fusedtp.bench.gpu_moves.close", lambda got, *rest: close(2 * got, *rest))
    with pytest.raises(AssertionError):
        each.check()


def test_a_wait_that_is_given_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset, "BUDGET_MS", 30)
    each = preset.gather(CPU, torch.float16, 2, 90, 83, 61)
    words = each.arenas.memory[preset.RANK, : each.arenas.channel.data_offset].view(torch.int32)
    words[preset.signal.SIGNALS.value :] = 0
    with pytest.raises(AssertionError, match=r"gave up waiting for rank 0, slot 5: epoch 1 expected, 0 seen"):
        each.arenas.run(each.launch)


def test_what_overlap_must_keep_to_has_a_margin() -> None:
    case = Case("all_gather_matmul", 4096, 1024, 2048, "bfloat16", 4)
    link_ms = 0.75 * 4096 * 2048 * 2 / 2e6
    good = {"comm": 0.95 * link_ms, "phased": 10.0, "concurrent": 11.5}
    gpu_links.check(good, case, 2)
    with pytest.raises(AssertionError, match="copies took"):
        gpu_links.check(good | {"comm": 0.85 * link_ms}, case, 2)
    with pytest.raises(AssertionError, match="concurrent took"):
        gpu_links.check(good | {"concurrent": 12.5}, case, 2)


@pytest.mark.parametrize(("faster", "word"), [(1.0, "yes"), (2.0, "NO, copies took")])
def test_verdicts_of_the_links(make_row: Callable[..., Row], faster: float, word: str) -> None:
    gbps = gpu_links.LINKS[0]
    link_ms = 0.5 * 8192 * 8192 * 2 / (gbps * 1e6)
    times = {"comm": link_ms / faster, "matmul": 2.0, "phased": 2.0 + link_ms, "concurrent": 2.1}
    of_link = {"model": f"link {gbps} GB/s", "M": 8192, "K": 8192, "dtype": "bfloat16", "world_size": 2}
    rows = [make_row(variant=name, median_ms=ms, **of_link) for name, ms in times.items()]
    assert f"are hidden: {word}" in gpu_links.verdicts(rows)[-1]
    assert len(gpu_links.verdicts(rows)) == len(rows) + 1


def test_nox_gives_the_tests_what_stages_are_given() -> None:
    text = (ROOT / "noxfile.py").read_text()
    for name, value in gpu.ENVIRONMENT.items():
        if not name.endswith("_THREADS") and name != "PYTHONUNBUFFERED":
            assert f'"{name}": "{value}"' in text


def test_a_stage_ends_with_the_command(tmp_path: Path) -> None:
    """Whoever ends the command ends its stage: two of them would share a GPU and a file."""
    command = [sys.executable, "-P", "-m", "fusedtp.bench.gpu", "--emulate", "--stage", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def inside() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if b"--inside" in words and str(tmp_path).encode() in words:
                    found.append(int(path.parent.name))
        return found

    def becomes(there: bool) -> bool:
        end = time.monotonic() + 60.0
        while bool(inside()) != there and time.monotonic() < end:
            time.sleep(0.05)
        return bool(inside()) == there

    try:
        assert becomes(True)
        process.terminate()
        process.wait(30)
        assert becomes(False)
    finally:
        process.kill()
        for number in inside():
            os.kill(number, signal.SIGKILL)
