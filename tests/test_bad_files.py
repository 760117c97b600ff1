"""Bad plans, options and files, one a row: each is refused with the argument and its value, before anything starts.

Calls on ranks: test_bad_input.py, test_bad_modules.py.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedtp
from fusedtp import NotationError
from fusedtp.bench import arguments, store, sweep, timeline
from fusedtp.bench.ranks import RankPool
from fusedtp.choose import tuning

from .command import command, folded

ROOT = Path(__file__).parent.parent
SIZES, MESH = {"M": 8, "K": 6, "N": 5}, {"X": 2}
SPEC = "[M_X, K] @ [K, N] -> [M, N]"

PLANS: list[tuple[str, Any, dict[str, Any], type[Exception], str]] = [
    ("spec is None", None, {}, TypeError, "spec must be a notation string, not NoneType: got None"),
    ("spec is empty", "", {}, NotationError, "expected '['"),
    ("spec is long", "X" * 100_000, {}, NotationError, "a spec has at most 1000 characters, got 100000: 'XXX"),
    ("sizes alone", SPEC, {"mesh": None}, ValueError, "sizes and mesh go together"),
    ("length is NaN", SPEC, {"sizes": {**SIZES, "K": float("nan")}}, TypeError, "sizes['K'] must be an int, got nan"),
    ("length is huge", SPEC, {"sizes": {**SIZES, "M": 2**64}}, ValueError, f"below 2**63, got {2**64}"),
    ("a length is missing", SPEC, {"sizes": {"M": 8}}, ValueError, "the length of M, K, N, got M=8"),
    ("dtype of integers", SPEC, {"dtype": torch.int8}, ValueError, "dtype must be one of float64, float32, bfloat16"),
]


@pytest.mark.parametrize(("spec", "given", "kind", "text"), [row[1:] for row in PLANS], ids=[row[0] for row in PLANS])
@pytest.mark.parametrize("call", [fusedtp.plan, fusedtp.explain])
def test_bad_plan(call: Callable[..., object], spec: Any, given: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call(spec, **{"sizes": SIZES, "mesh": MESH, **given})
    assert type(caught.value) is kind
    assert call(SPEC, sizes=SIZES, mesh=MESH) is not None


# A command line and its message.
OPTIONS: list[tuple[str, str]] = [
    ("sweep --op ,", "--op must be among all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, got ','"),
    ("sweep --model llama3-8b --world-size 3", "32 attention heads, which 3 ranks cannot share"),
    ("sweep --shape 4,4", "--shape must be M,N,K, got '4,4'"),
    ("sweep --shape=-1,4,4", "--shape must be positive, got '-1,4,4'"),
    ("sweep --shape 4.0,4,4", "--shape must be integers, got '4.0,4,4'"),
    ("sweep --world-size 1000000", "--world-size must be at most 256, got '1000000'"),
    ("sweep --seconds nan", "Invalid value for '--seconds'"),
    ("sweep --out FILE", "--out must be a folder that can be written, got 'FILE'"),
    ("tune --out FILE/t.json", "--out must be a file that can be written, got 'FILE/t.json'"),
    (
        "sweep --suite mlp --shape 5,4,4 --world-size 2",
        "--shape: lengths that are split must be multiples of the 2 ranks, got 5,4,4",
    ),
    ("tune --show --out FILE", "FILE is ignored, not a table of fusedtp tune"),
    ("report missing.csv", "there is no file missing.csv"),
    ("report FILE", "FILE is not a CSV file of results"),
    ("predict all_gather --m 512:1000", "--m 512:1000: 512 doubled again and again is never 1000"),
    ("explain FSDP --sizes M=8,M=9,K=4,N=4 --mesh X=2", "--sizes must have each name once, got M twice"),
    ("explain FSDP --sizes M=1_0,K=4,N=4 --mesh X=2", "--sizes takes NAME=NUMBER, comma-separated, got 'M=1_0"),
    ("frobnicate", "No such command 'frobnicate'"),
]


@pytest.mark.parametrize(("line", "text"), OPTIONS, ids=[line for line, _ in OPTIONS])
def test_bad_option(line: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No rank may start.
    monkeypatch.delattr(RankPool, "_started")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("text\n")
    said = command(*[part.strip("'") for part in line.split(" ")], code=2, columns=80)
    assert max(map(len, said.splitlines())) <= 80
    # The message is in a frame, wrapped to the frame's width, so only spaces differ.
    assert "".join(text.split()) in folded(said).replace(" ", "")
    # A sweep makes its folder first, and leaves the folder empty.
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["FILE"]


def test_a_range_of_sizes_doubles_up_to_its_last() -> None:
    assert arguments.numbers("512:2048,3", "--m") == (512, 1024, 2048, 3)


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("WORLD_SIZE", "two", "must be an integer from 1 to 2147483647, got 'two'"),
        ("RANK", "2", "must be an integer from 0 to 1, got '2'"),
        ("MASTER_PORT", None, "is not set, while RANK and WORLD_SIZE are"),
    ],
)
def test_launched_in_an_odd_environment(
    name: str, value: str | None, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for each, usual in (LAUNCHED | {name: value}).items():
        if usual is None:
            monkeypatch.delenv(each, raising=False)
        else:
            monkeypatch.setenv(each, usual)
    said = folded(command("sweep", "--out", tmp_path, code=2))
    assert (
        f"{name} of the environment {text}; `env -u RANK -u WORLD_SIZE fusedtp sweep` starts ranks of its own" in said
    )


@pytest.mark.parametrize(("rank", "size"), [(0, 4), (1, 2)])
def test_launched_without_the_others(rank: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in (LAUNCHED | {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sweep, "NOTICE_SECONDS", 0.0)
    absent = ", ".join(str(each) for each in range(size) if each != rank) if rank == 0 else "0"
    notice, error = command("sweep", "--shape", "8,8,8", "--patience", 1, "--out", tmp_path, code=1).splitlines()[-2:]
    me = f"fusedtp takes itself for rank {rank} of {size}, as RANK and WORLD_SIZE are set"
    assert notice.startswith(f"{me}, and waits for rank {absent} at 127.0.0.1:{port}, 1 s at most; `env -u RANK")
    assert error.startswith(f"{me}, and rank {absent} has not come to 127.0.0.1:{port} within 1 s")


def test_launched_where_the_port_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        for name, value in (LAUNCHED | {"MASTER_PORT": str(taken.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        said = command("sweep", "--shape", "8,8,8", "--out", tmp_path, code=1).splitlines()[-1]
    assert said.startswith("fusedtp takes itself for rank 0 of 2, as RANK and WORLD_SIZE are set, and has no store at ")
    assert "address already in use" in said


NUMBERS = {
    "int": "1",
    "float | None": "1.5",
    "tuple[float, ...]": "1.5",
    "tuple[int, ...]": "",
    "bool": "False",
    "str": "text",
}
NAMES = {"op": "all_gather_matmul", "direction": "forward", "dtype": "float32", "gate": "passed"}
# Not the ratio of these numbers.
NAMES |= {"tflops": "", "tokens_per_s": "", "roofline": ""}
CELLS = {field.name: NUMBERS[str(field.type)] for field in fields(store.Measurement)} | NAMES
HEAD, LINE = ",".join(CELLS), ",".join(CELLS.values())


def table(**cells: str) -> bytes:
    return f"{HEAD}\n{','.join({**CELLS, **cells}.values())}\n".encode()


# Content of a file of rows, and the message.
ROWS: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "is not a CSV file of results"),
    ("another table", b"name,price\napple,3\n", "unknown columns name, price"),
    ("not UTF-8", table(cpu="Som\u00e9").decode().encode("latin1"), "is not a CSV file of results"),
    ("columns in another order", (",".join(reversed(CELLS)) + "\n").encode(), "columns in another order"),
    ("a cell too many", f"{HEAD}\n{LINE},1\n".encode(), f"column time_utc: {len(CELLS) + 1} cells, not {len(CELLS)}"),
    ("a word for a length", table(M="many"), "row 1, column M: 'many' is not a whole number"),
    ("a time of NaN", table(median_ms="nan"), "row 1, column median_ms: 'nan' is not a number"),
    ("an unknown op", table(op="matmul"), "row 1, column op: 'matmul' is not one of all_gather_matmul,"),
    ("a time outside its own spread", table(p20_ms="1.6"), "column median_ms: 1.5 is not between p20_ms 1.6 and"),
    ("a round too many", table(rounds_ms="1 2"), "line 2, row 1, column rounds_ms: 2 times of 1 rounds"),
    ("a median of other rounds", table(median_ms="1.6", p80_ms="1.7"), "median_ms: 1.6, but its rounds give 1.5"),
    ("rounds of what was refused", table(gate="wrong", median_ms=""), "column gate: 'wrong', and yet there is a time"),
    ("a row twice", table() + table().splitlines()[1], "line 3, row 2: the same case and variant as row 1"),
    ("more than is read", b" " * (store.MAX_BYTES + 1), f"larger than the {store.MAX_BYTES} bytes that are read"),
]


@pytest.mark.parametrize(("content", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_bad_rows(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "sweep.csv"
    path.write_bytes(table())
    (good,) = store.read(path)
    path.write_bytes(content)
    for touch in (store.read, lambda path: store.update(path, [good])):
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            touch(path)
        assert text in str(caught.value)
        assert path.read_bytes() == content


READERS: list[Callable[[Path], object]] = [store.read, timeline.read, lambda path: tuning.load(path)[2] or None]


@pytest.mark.parametrize("reader", READERS, ids=["rows", "timeline", "tuning"])
def test_no_reader_waits_or_reads_without_end(reader: Callable[[Path], object], tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 40)  # sparse: uses no disk space
    for path, text in ((pipe, "not a regular file"), (Path("/dev/zero"), "not a regular"), (large, "is larger than")):
        try:
            said = str(reader(path))
        except ValueError as error:
            said = str(error)
        assert text in said


JSON = ("", "[]", "null", "[" * 100_000, '{"format": 1}', '{"format": NaN}', '{"otherData": 1, "traceEvents": []}')


@pytest.mark.parametrize("content", [*(text.encode() for text in JSON), b"\xff"])
def test_what_is_no_tuning_table_and_no_timeline(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    found, _, why = tuning.load(path)
    assert found is None
    assert why.startswith(f"{path} is ignored, ")
    assert why.count(str(path)) == 1
    with pytest.raises(ValueError, match="is not a timeline of fusedtp"):
        timeline.read(path)


# A change of a valid timeline or baseline, and the message.
TIMELINES: list[tuple[str, str, str]] = [
    ('"cat": "travel"', '"cat": "nonsense"', "].cat must be one of call, travel, multiply, wait, add, collective, got"),
    ('"cat": "travel",', "", "].cat is missing"),
    ('"tid": 1', f'"tid": {"7" * 400}', "].tid must be an integer from 0 to 1, got inf"),
    ('"M": ', '"M": "x", "M": ', "'M' is there twice"),
]


@pytest.mark.parametrize(("old", "new", "text"), TIMELINES)
def test_timelines_that_mean_nothing(old: str, new: str, text: str, tmp_path: Path) -> None:
    path, (stored,) = tmp_path / "timeline.json", (ROOT / "results").glob("*/timeline.json")
    content = stored.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a timeline of fusedtp: ")) as caught:
        timeline.read(path)
    assert text in str(caught.value)
    assert timeline.read(stored).marks
