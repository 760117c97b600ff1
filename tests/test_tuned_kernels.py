"""Tiles that were measured: what is tried, what a file may say, which op takes which, and that all ranks do alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

import fusedtp
from fusedtp.bench import cli_tune, tune_kernels
from fusedtp.bench.cases import Case
from fusedtp.bench.cli import app
from fusedtp.bench.ranks import RankPool
from fusedtp.calls import tuning
from fusedtp.calls.tuning import Tuned
from fusedtp.kernels import choices, loading, matmul
from fusedtp.kernels.choices import Choice
from fusedtp.kernels.configs import TABLE, Config
from fusedtp.kernels.matmul_all_reduce import splits_of
from fusedtp.op import ALL_GATHER, ALL_GATHER_MATMUL, Task
from fusedtp.workspaces import registry

SMALL = Choice(32, 32, 32, 4, 2)
SM_90 = TABLE["sm_90"]["many"]
ROOM = {"shared_bytes": 227 << 10}


def tuned(choice: Choice | None = SMALL, **changes: Any) -> Tuned:
    fields = {"op": "all_gather_matmul", "world_size": 2, "dtype": "float32", "rows": 64, "cols": 48, "third": 40}
    chosen = None if choice is None else choice._asdict()
    measured = {"choice": chosen, "ms": 1.0, "usual_ms": 1.5, "faster": 1.4, "version": tuning.version_here()}
    return Tuned(**(fields | measured | changes))


def table(*kernels: Tuned) -> tuning.Table:
    return tuning.Table(tuning.identity(), (), {}, kernels)


def test_what_is_tried_has_room_and_is_another() -> None:
    tried = choices.tiles(SM_90, 1024, 3584, 2, **ROOM)
    assert len(tried) > 10
    assert choices.of_config(SM_90) not in tried
    assert len(set(tried)) == len(tried)
    for each in tried:
        assert each.block_m * each.block_n // (32 * each.num_warps) in (16, 32, 64, 128)
        assert 2 * (each.num_stages * (each.block_m + each.block_n) * each.block_k) <= 227 << 10
    # Few rows and columns have no tile that is twice as long.
    few = choices.tiles(SM_90, 16, 64, 2, **ROOM)
    assert {each.block_m for each in few} == {64}
    assert {each.block_n for each in few} == {64}
    assert {each.block_m for each in choices.tiles(TABLE["sm_80"]["few rows"], 16, 64, 2, least_rows=32, **ROOM)} == {
        32
    }


def test_what_is_chosen_takes_the_place_of_the_table() -> None:
    assert choices.applied(SM_90, None) is SM_90
    assert choices.applied(SM_90, choices.of_config(SM_90)) is SM_90
    made = choices.applied(SM_90, Choice(128, 128, 64, 4, 3, pushers=8))
    assert (made.block_n, made.num_warps, made.flatten, made.measured_pushers) == (128, 4, False, 8)
    # A narrow tile is moved by eight warps.
    assert (made.moving_warps, made.pointer_warps) == (8, 16)
    assert set(tuning.LIMITS) | {"flatten"} == set(Choice._fields)


def test_parts_of_a_contraction_that_were_chosen() -> None:
    assert splits_of(8, 56, 132) == 8
    assert splits_of(8, 56, 132, 2) == 2
    assert splits_of(8, 56, 132, 1) == 1
    # A tile each has a count, of which there are as many as programs.
    assert splits_of(200, 56, 132, 4) == 1


def test_what_is_written_is_read() -> None:
    known = table(tuned(), tuned(None, rows=128))
    assert tuning.parse(tuning.dump(known)) == known
    again = known.updated(table(tuned(None)))
    assert again.kernels == (tuned(None, rows=128), tuned(None))
    assert "kernels" not in json.loads(tuning.dump(table()))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"op": "all_gather"}, r"kernels\[0\].op"), ({"world_size": 1}, "world_size"), ({"dtype": "int8"}, "dtype"),
        ({"rows": 0}, "rows"), ({"ms": 0}, "ms"), ({"faster": -1}, "faster"), ({"mine": 1}, "mine"),
        ({"choice": {}}, "block_m"), ({"choice": SMALL._asdict() | {"block_m": 48}}, "power of two"),
        ({"choice": SMALL._asdict() | {"block_n": 512}}, "from 16 to 256"),
        ({"choice": SMALL._asdict() | {"flatten": 1}}, "flatten"),
        ({"choice": SMALL._asdict() | {"num_stages": True}}, "num_stages"), ({"choice": 3}, "must be an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], named: str) -> None:
    content = json.loads(tuning.dump(table(tuned())))
    content["kernels"][0] |= changes
    with pytest.raises(ValueError, match=named):
        tuning.parse(json.dumps(content))


def test_the_nearest_size_that_is_near() -> None:
    task = Task(ALL_GATHER_MATMUL, {"a": (32, 48), "b": (48, 40)}, torch.float32, (32, 32))
    other = Choice(64, 32, 32, 4, 2)

    def found(*kernels: Tuned, task: Task = task, world_size: int = 2) -> Any:
        near = tuning.nearest_tile(kernels, task, world_size)
        return near and Choice(**near.choice)

    assert found() is None
    assert found(tuned()) == SMALL
    assert found(tuned(other, rows=100), tuned()) == SMALL
    assert found(tuned(other, rows=100), tuned(rows=40)) == other
    # A later one of the same size counts.
    assert found(tuned(other), tuned()) == SMALL
    assert found(tuned(rows=128)) == SMALL
    assert found(tuned(rows=129)) is None
    assert found(tuned(cols=97)) is None
    # Where the table's was the fastest, no farther one takes its place.
    assert found(tuned(other, rows=100), tuned(None)) is None
    for changes in ({"op": "matmul_all_reduce"}, {"dtype": "bfloat16"}, {"version": "0"}):
        assert found(tuned(**changes)) is None
    assert found(tuned(), world_size=4) is None
    leaves = Task(ALL_GATHER_MATMUL, task.shapes, torch.float32, (32, 32), leaves=8)
    assert found(tuned(), task=leaves) is None
    assert found(tuned(), task=Task(ALL_GATHER, {"a": (32, 48)}, torch.float32, (32, 32))) is None


def taken(group: ProcessGroup, path: str) -> tuple[str, list[tuple[int, int]]]:
    """What `last_path` says, and the tiles of kernels that were launched; only rank 0 can read the file."""
    import os

    os.environ[tuning.ENVIRONMENT] = path if group.rank() == 0 else "off"
    # What the group has learned so far is of another file.
    registry.destroy(group)
    seen: list[tuple[int, int]] = []
    launch = loading._starter

    def starter(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen.extend((each.BLOCK_M.value, each.BLOCK_N.value) for each in args if hasattr(each, "BLOCK_M"))
            return launch(kernel, grid)(*args, **options)

        return call

    loading._starter = starter
    try:
        torch.manual_seed(0)
        rows = (37, 27)
        whole, weights = torch.randn(64, 48), torch.randn(2, 40, 48)
        x = whole.split(rows)[group.rank()]
        y = fusedtp.all_gather_linear(x, weights[group.rank()], sizes=rows, group=group, schedule="fused")
        torch.testing.assert_close(y, whole @ weights[group.rank()].t())
        last = fusedtp.last_path()
        assert last is not None
        return last.kernel, seen
    finally:
        loading._starter = launch
        os.environ.pop(tuning.ENVIRONMENT)
        registry.destroy(group)


def test_all_ranks_take_what_the_first_one_read(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    tuning.write(path, tuning.dump(table(tuned())))
    both = pool.run(taken, str(path), world_size=2)
    text = "32x32x32, 4 warps, 2 stages: 1.50x as fast as the table's, measured at 64x48"
    assert both == [(text, [(32, 32)])] * 2
    tuning.write(path, tuning.dump(table(tuned(None))))
    assert pool.run(taken, str(path), world_size=2) == [("", [(64, 64)])] * 2


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_search(pool: RankPool, op: str) -> None:
    """Interpreted: what is tried runs alone and together, and is right; the table's is among it."""
    found = pool.run(tune_kernels.search, Case(op, 50, 44, 36, "float32", 2), 100.0, world_size=2)[0]
    assert found.usual in found.alone
    assert len(found.alone) >= 3
    assert len(found.together) >= 2
    assert not found.refused
    assert min(found.ms, found.usual_ms) > 0
    entry = found.tuned()
    assert tuning.parse(tuning.dump(table(entry))).kernels == (entry,)


def planted(group: ProcessGroup, op: str) -> tune_kernels.TileSearch:
    """A search in which every tile but the table's gives wrong results, on one rank alone."""
    from fusedtp.kernels import gather_matmul, matmul_all_reduce, matmul_scatter

    modules = (matmul, gather_matmul, matmul_all_reduce, matmul_scatter)
    starts = [module.launch for module in modules]  # type: ignore[attr-defined]

    def wrong(start: Any) -> Any:
        def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                tiles = next((each for each in args if hasattr(each, "BLOCK_M")), None)
                if tiles is not None and group.rank() == 1 and tiles.BLOCK_M.value + tiles.BLOCK_K.value != 128:
                    first = args[0].ptr
                    scaled = tuple([x * 1.5 for x in first]) if isinstance(first, tuple) else first * 1.5
                    args = (args[0]._replace(ptr=scaled), *args[1:])
                return start(kernel, grid)(*args, **options)

            return call

        return launch

    for module, start in zip(modules, starts, strict=True):
        module.launch = wrong(start)  # type: ignore[attr-defined]
    try:
        return tune_kernels.search(group, Case(op, 50, 44, 36, "float32", 2), 100.0)
    finally:
        for module, start in zip(modules, starts, strict=True):
            module.launch = start  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_tile_that_is_wrong_on_one_rank_is_never_timed(pool: RankPool, op: str) -> None:
    found = pool.run(planted, op, world_size=2)[0]
    others = {name for name in found.refused if not name.startswith("64x64x64")}
    assert others
    assert all("rank 1" in found.refused[name] for name in others)
    assert not others & (found.alone.keys() | found.together.keys())
    assert found.best.startswith("64x64x64")


def test_the_command_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that nothing is measured, and keeps nothing."""
    monkeypatch.setattr(tune_kernels, "search", None)
    asked: list[Case] = []

    def tuned_cases(cases: list[Case], *, done: Callable[[Any], None], **_: Any) -> list[Case]:
        asked.extend(cases)
        done(tune_kernels.TileSearch(cases[0], "a", "a", None, 1.0, 1.0, 1.0))
        return cases[1:]

    monkeypatch.setattr(tune_kernels, "tune_kernels", tuned_cases)
    out = tmp_path / "tuning.json"
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", "--kernels", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "nothing is kept" in result.output
    assert "2 of 3 sizes were not reached" in result.output
    assert not out.exists()
    assert {(each.M, each.N, each.K) for each in asked} == {cli_tune.TINY}
    asked.clear()
    given = ["--shape", "24,20,16", "--shape", "48,20,16", "--world-size", "2", "--out", str(out)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", "--kernels", *given])
    assert result.exit_code == 0, result.output
    assert {(each.M, each.N, each.K) for each in asked} == {(24, 20, 16), (48, 20, 16)}
    wrong = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", "--model", "llama3-8b"])
    assert wrong.exit_code == 2
    assert "are for --kernels" in " ".join(wrong.output.split())


def test_what_was_found_is_kept_at_once_and_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: cut off behind the first size, the command goes on with the second."""
    cases = [Case("all_gather_matmul", rows, 80, 48, "bfloat16", 2) for rows in (64, 512)]
    out, searched = tmp_path / "tuning.json", []
    console = Console(quiet=True)

    def tune(cases: list[Case], *, done: Callable[[Any], None], **_: Any) -> list[Case]:
        searched.append(cases)
        done(tune_kernels.TileSearch(cases[0], "a", "b", SMALL._asdict(), 1.0, 2.0, 1.9))
        return cases[1:]

    monkeypatch.setattr(tune_kernels, "tune_kernels", tune)
    machine = tuning.identity() | {"num_gpus": 2}
    monkeypatch.setattr(tuning, "identity", lambda: machine)
    for _ in range(3):
        cli_tune.tune_tiles(cases, out, machine, seconds=1, again=False, console=console)
    assert searched == [cases, cases[1:]]
    known, _, _ = tuning.load(out)
    assert known is not None
    assert [(each.rows, each.cols, each.third) for each in known.kernels] == [(64, 48, 40), (512, 48, 40)]


def test_pushers_that_were_measured() -> None:
    from fusedtp.schedules import producer

    ws = SimpleNamespace(device=torch.device("cuda"), hardware=None, world_size=8)
    assert producer.with_pushers(ws, Config(measured_pushers=4)).pushers == 4  # type: ignore[arg-type]
