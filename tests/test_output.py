"""Output of the commands: control characters of files are shown as text, and a closed output gives a one-line error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fusedtp.bench import output, providers, report, store
from fusedtp.bench.cli import app
from fusedtp.files import visible

from .command import command, folded
from .harness import LARGE, spread

# Every control character except newline and tab, those of 8 bits included.
CONTROLS = "".join(map(chr, [*range(1, 9), 11, 12, *range(14, 32), *range(127, 160)]))
# It sets a terminal's title, colours, goes up a line, erases it, makes a link, writes the clipboard, and rings.
ESCAPES = "\x1b]0;t\x07\x1b[38;5;213m\x1b[1A\x1b[2K\x1b]8;;http://x\x07\x1b]52;c;eA==\x1b\\\x9b31m\r[bold]:boom:\x7f"
# Rich's own, to a terminal.
STYLES = re.compile(r"\x1b\[(\d+(;\d+)*)?m|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r")
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
MakeRow = Callable[..., store.Measurement]

ROW = ("--op", "all_gather_matmul", "--shape", "8,8,8", "--rounds", "1")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "plan": ("CONFIG",), "predict": ("all_gather_matmul", "--m", "8", "--n", "8", "--k", "8", "--hardware", "h100"),
    "explain": ("FSDP",), "report": ("ROWS",), "compare": ("ROWS", "ROWS"),
    "timeline": ("--out", "OUT"), "tune": ("--out", "OUT/tuning.json"), "sweep": (*ROW, "--out", "OUT"),
    "train": ("--out", "OUT"),
    "overhead": ("--out", "OUT/overhead.csv"), "doctor": (),
}  # fmt: skip


def arguments_of(name: str, folder: Path, rows: list[store.Measurement]) -> list[str]:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    store.write(folder / "rows.csv", rows)
    places = {"CONFIG": str(folder / "config.json"), "ROWS": str(folder / "rows.csv")}
    return [name, *(places.get(each, each.replace("OUT", str(folder / "out"))) for each in ARGUMENTS[name])]


def commands() -> list[str]:
    """Return all commands that run here: a plan needs transformers."""
    found = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert found == set(ARGUMENTS)
    return sorted(found if find_spec("transformers") else found - {"plan"})


def timed(make_row: MakeRow, **columns: Any) -> list[store.Measurement]:
    names = {"unfused": 2.0, "decomposed": 1.0, "matmul": 0.5, "comm": 1.5}
    return [
        make_row(
            **{"variant": name, "median_ms": ms, "speedup_vs_unfused": 2.0 / ms, "matmul_fraction": 0.5 / ms} | columns
        )
        for name, ms in names.items()
    ]


def is_harmless(said: str) -> bool:
    return not OBEYED.search(STYLES.sub("", said)) and "\\x07" in "".join(said.split())


def prints_to(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands print to a "pipe", or style and move as to a "terminal"."""
    monkeypatch.setenv("TERM", "xterm")
    if where == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")


TEXTS = ("model", "layer", "path", "machine", "cpu", "gpu", "torch", "driver", "commit", "backend")


@pytest.mark.parametrize(("column", "where"), spread(["variant", "gate", "others"], ["terminal", "pipe"]))
def test_cells_are_shown(
    column: str, where: str, tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints_to(where, monkeypatch)
    if column == "variant":
        rows = [*timed(make_row), make_row(variant=ESCAPES, median_ms=1.0, speedup_vs_unfused=2.0)]
    elif column == "gate":
        rows = [make_row(variant=name, gate=text + ESCAPES) for name, text in (("a", ""), ("b", "not run: "))]
        rows += timed(make_row)
    else:
        rows = timed(make_row, tokens=8, **{name: f"{name}{ESCAPES[5:20]}" for name in TEXTS})
    path, before = tmp_path / f"{ESCAPES[:8]}.csv", tmp_path / "before.csv"
    store.write(path, rows)
    store.write(before, timed(make_row))
    for typed in (("report", path, "--verbose"), ("compare", path, before, "--all", "--across-machines")):
        said = command(*typed, code=None)
        assert not OBEYED.search(STYLES.sub("", said) if where == "terminal" else said)
        assert "\\x1b[38" in said or (column, typed[0]) == ("gate", "compare")
    page = path.with_suffix(".html").read_text()
    assert not OBEYED.search(page)
    assert "\\x1b[38;5;213m" in page


def test_names_that_look_alike_are_one(tmp_path: Path, make_row: MakeRow) -> None:
    names = ("a\x1b", "a\\x1b")
    store.write(tmp_path / "rows.csv", timed(make_row) + [make_row(variant=name, median_ms=1.0) for name in names])
    assert "the same case and variant as row 5" in command("report", tmp_path / "rows.csv", code=2)


@pytest.mark.parametrize("where", ["pipe", "terminal"])
def test_what_is_typed_is_shown(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints_to(where, monkeypatch)
    odd = f"{ESCAPES.replace('/', '')}{CONTROLS}\udc9b"
    usage: list[tuple[object, ...]] = [(odd,), ("predict", odd), ("explain", odd), ("sweep", "--model", odd)]
    usage += [
        ("sweep", f"--{odd}"),
        ("tune", "--kernels", "--out", tmp_path / "tuned.json", "--shape", odd),
        ("train", "--order", odd),
    ]
    usage += [("report", tmp_path / odd), ("compare", tmp_path / odd, odd), ("sweep", "--out", f"/dev/null/{odd}")]
    usage += [("tune", "--show", "--out", tmp_path / odd), ("plan", tmp_path / odd)]
    for typed in usage:
        assert is_harmless(command(*typed, code=2)), typed
    (tmp_path / odd).write_text("{}")
    for typed in (("report", tmp_path / odd), ("tune", "--show", "--out", tmp_path / odd)):
        assert is_harmless(command(*typed, code=2)), typed
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, odd.replace("\0", ""))
    assert is_harmless(command("sweep", code=2))


def test_keys_of_a_configuration_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, ESCAPES: 1}))
    assert is_harmless(command("plan", tmp_path))


def test_exceptions_of_providers_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object) -> str:
        raise ValueError(ESCAPES)

    mine = providers.Provider("mine", raising, raising)
    monkeypatch.setattr(providers, "found", lambda: providers.ProvidersFound({"mine": mine}, (ESCAPES,)))
    said = command("doctor", "--providers")
    assert said.count(";c;eA==") == 2
    assert is_harmless(said)


def test_a_traceback_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_row: MakeRow) -> None:
    def raising(*_: object, **__: object) -> None:
        raise LookupError(ESCAPES)

    monkeypatch.setattr("fusedtp.bench.report.show", raising)
    said = command(*arguments_of("report", tmp_path, timed(make_row)), code=1)
    assert is_harmless(said)
    assert "LookupError: " in said


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=40), is_terminal=st.booleans())
def test_no_text_is_obeyed(text: str, is_terminal: bool) -> None:
    class File(StringIO):
        def isatty(self) -> bool:
            return is_terminal

    table = Table(f"{text}", title=text)
    table.add_row(text, Text(text))
    before, sys.stdout = sys.stdout, File()
    try:
        console = output.Console()
        for each in (text, Text(text), Padding(text, 1), table, Panel(text)):
            console.print(each, style="bold red")
        with Progress(TextColumn("{task.description}", markup=False), console=console, **output.LIVE) as bar:
            bar.add_task(text, total=1)
            console.print(text)
            said = sys.stdout.getvalue()
        with output.streams():
            print(text)
            print(text, file=sys.stderr)
            typer.echo(text)
        printed = sys.stdout.getvalue()[len(said) :]
    finally:
        sys.stdout = before
    assert not OBEYED.search(STYLES.sub("", said) if is_terminal else said)
    assert printed.endswith(f"{visible(text)}\n" * 2)
    assert not OBEYED.search(visible(text))
    assert is_terminal or not STYLES.search(said)


def test_text_that_the_encoding_has_not(tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, "ascii"))
    folder = tmp_path / "\u00e9\udce9"
    folder.mkdir()
    assert ended(arguments_of("report", folder, timed(make_row))) == 0
    assert rb"\xe9\udce9/rows.html" in written.getvalue()


def test_a_report_that_cannot_be_kept_is_printed(tmp_path: Path, make_row: MakeRow) -> None:
    (tmp_path / "rows.png").mkdir()
    said = command(*arguments_of("report", tmp_path, timed(make_row)), code=2)
    assert "1024 x 1024 x 1024" in said
    assert "pictures and page go beside the rows, and cannot be written: [Errno 21] Is a directory" in folded(said)


def ended(given: list[str]) -> object:
    """Run a command on the streams of `sys`, and return its exit status."""
    with pytest.raises(SystemExit) as caught:
        app(given)
    return caught.value.code


class Unwritable:
    """Standard output that cannot be written, by a name of `OUTPUTS`."""

    def __init__(self, how: str) -> None:
        self.file: Any = None
        if how == "full":
            self.file = open("/dev/full", "w")  # noqa: SIM115
        elif how == "read only":
            self.file = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        elif how == "reader gone":
            reads, writes = os.pipe()
            os.close(reads)
            self.file = os.fdopen(writes, "w")
        elif how == "closed later":
            self.file = open(os.devnull, "w")  # noqa: SIM115
            self.file.close()


OUTPUTS = {
    "closed": (1, "cannot write to standard output: it is closed\n"),
    "closed later": (1, "cannot write to standard output: it is closed\n"),
    "full": (1, "cannot write to standard output: No space left on device\n"),
    "read only": (1, "cannot write to standard output: Bad file descriptor\n"),
    "reader gone": (128 + signal.SIGPIPE, ""),
}


def commands_for(how: str) -> list[str]:
    """Return a report and some of the other commands: each has one of the outputs, and all of them in a long run."""
    others = [name for name in commands() if name != "report"]
    return ["report", *(others if LARGE else others[[*OUTPUTS].index(how) :: len(OUTPUTS)])]


@pytest.mark.parametrize("how", OUTPUTS)
def test_output_that_cannot_be_written_ends_in_one_line(
    how: str, tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, line = OUTPUTS[how]
    for name in commands_for(how):
        plain = arguments_of(name, tmp_path, timed(make_row))
        # One command stands for all where standard error is missing or full too.
        others = (None, "full") if name == "report" else ()
        for typed, error in (([name, "--help"], StringIO()), (plain, StringIO()), *((plain, each) for each in others)):
            out, err = Unwritable(how).file, Unwritable("full").file if error == "full" else error
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", err)
            found = ended(typed)
            monkeypatch.undo()
            assert found == status, (typed, error)
            assert not isinstance(error, StringIO) or error.getvalue() == line
            # The interpreter flushes at exit, without a word.
            for file in (out, err):
                if file is not None:
                    file.close()


def test_without_standard_error_a_command_runs(
    tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (None, Unwritable("full").file, Unwritable("reader gone").file):
        said = StringIO()
        monkeypatch.setattr(sys, "stdout", said)
        monkeypatch.setattr(sys, "stderr", error)
        monkeypatch.setattr(report, "PICTURES", {})
        found = ended(arguments_of("report", tmp_path, timed(make_row))), ended(["report", "nothing"])
        monkeypatch.undo()
        assert found == (0, 2)
        assert "rows.html" in said.getvalue()
        if error is not None:
            error.close()


def test_closed_descriptors_are_not_taken_by_files(tmp_path: Path) -> None:
    def ran(script: str, *more: str) -> subprocess.CompletedProcess[str]:
        bash = ["bash", "-c", script, "bash", sys.executable, *more]
        return subprocess.run(bash, capture_output=True, text=True, cwd=tmp_path, timeout=120)

    done = ran('"$1" -m fusedtp predict --list >&-')
    assert (done.returncode, done.stderr) == (1, "cannot write to standard output: it is closed\n")
    # What a library prints to a descriptor would land in the file that has taken its place.
    looks = "import os; from fusedtp.bench.output import streams\nwith streams(): print(*map(os.readlink, FDS))"
    looks = looks.replace("FDS", "[f'/proc/self/fd/{fd}' for fd in (0, 2)]")
    assert ran('"$1" -c "$2" <&- 2>&-', looks).stdout == "/dev/null /dev/null\n"
