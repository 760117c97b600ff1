"""Measured tiles: the candidates, valid files, the tile of each op, and the same choice on all ranks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench import cli_tune, tune_kernels
from fusedtp.bench.cases import Case
from fusedtp.bench.ranks import RankPool
from fusedtp.choose import tuning
from fusedtp.choose.tuning import Tuned
from fusedtp.kernels import choices, cores, gather_matmul, loading, matmul, matmul_all_reduce, matmul_scatter
from fusedtp.kernels.choices import Choice
from fusedtp.kernels.configs import TABLE, Config
from fusedtp.kernels.matmul_all_reduce import splits_of
from fusedtp.op import ALL_GATHER, ALL_GATHER_MATMUL, Task
from fusedtp.schedules import producer
from fusedtp.workspaces import registry

from .command import command, folded
from .harness import last_path

SMALL = Choice(32, 32, 32, 4, 2)
SM_90 = TABLE["sm_90"]["many"]
ROOM = {"shared_bytes": 227 << 10}
SHAPES = ["--shape", "24,20,16", "--shape", "48,20,16"]


def tuned(choice: Choice | None = SMALL, **changes: Any) -> Tuned:
    fields = {"op": "all_gather_matmul", "world_size": 2, "dtype": "float32", "rows": 64, "cols": 48, "third": 40}
    chosen = None if choice is None else choice._asdict()
    measured = {"choice": chosen, "ms": 1.0, "usual_ms": 1.5, "faster": 1.4, "version": tuning.version_here()}
    return Tuned(**(fields | measured | changes))


def table(*kernels: Tuned) -> tuning.Table:
    return tuning.Table(tuning.identity(), (), {}, kernels)


def test_what_is_tried_has_room_and_is_another() -> None:
    tried = choices.tiles(SM_90, 1024, 3584, 2, **ROOM)
    assert len(set(tried)) == len(tried) > 10
    assert choices.of_config(SM_90) not in tried
    for each in tried:
        assert each.block_m * each.block_n // (32 * each.num_warps) in (16, 32, 64, 128)
        assert 2 * (each.num_stages * (each.block_m + each.block_n) * each.block_k) <= 227 << 10
    # With few rows and columns no tile may be twice as long.
    few = choices.tiles(SM_90, 16, 64, 2, **ROOM)
    assert {(each.block_m, each.block_n) for each in few} == {(64, 64)}
    fewer = choices.tiles(TABLE["sm_80"]["few rows"], 16, 64, 2, least_rows=32, **ROOM)
    assert {each.block_m for each in fewer} == {32}


def test_what_is_chosen_takes_the_place_of_the_table() -> None:
    assert choices.applied(SM_90, None) is SM_90
    assert choices.applied(SM_90, choices.of_config(SM_90)) is SM_90
    made = choices.applied(SM_90, Choice(128, 128, 64, 4, 3, pushers=8))
    assert (made.block_n, made.num_warps, made.flatten, made.measured_pushers) == (128, 4, False, 8)
    # Eight warps move a narrow tile.
    assert (made.moving_warps, made.pointer_warps) == (8, 16)
    assert set(tuning.LIMITS) | {"flatten", "core"} == set(Choice._fields)
    assert tuning.CORES == (cores.LOOP, cores.WARP_SPECIALISED)


def test_tiles_of_the_other_core() -> None:
    """They are tiles of the loop whose rows its warpgroups have; which core was chosen is told and applied."""
    usual = choices.of_config(SM_90)
    tried = choices.on_other_core((usual, *choices.tiles(SM_90, 1024, 3584, 2, **ROOM)))
    assert tried[0] == usual._replace(core=cores.WARP_SPECIALISED)
    assert len(tried) > 4
    assert all((each.block_m, each.num_warps) in {(64, 4), (128, 8)} for each in tried)
    assert str(tried[0]) == "128x256x64, 8 warps, warp-specialised"
    made = choices.applied(SM_90, tried[0])
    assert made == replace(SM_90, core=cores.WARP_SPECIALISED)
    known = table(tuned(tried[0]), tuned(usual))
    assert tuning.parse(tuning.dump(known)) == known
    older = json.loads(tuning.dump(table(tuned())))
    del older["kernels"][0]["choice"]["core"]
    assert tuning.parse(json.dumps(older)) == table(tuned())


def test_parts_of_a_contraction_and_pushers_that_were_chosen() -> None:
    assert [splits_of(8, 56, 132, *chosen) for chosen in ((), (2,), (1,))] == [8, 2, 1]
    # Each tile has a counter, and there are as many counters as programs.
    assert splits_of(200, 56, 132, 4) == 1
    ws: Any = SimpleNamespace(device=torch.device("cuda"), hardware=None, world_size=8)
    assert producer.with_pushers(ws, Config(measured_pushers=4)).pushers == 4


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
        ({"choice": SMALL._asdict() | {"core": "other"}}, "core"),
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
    assert found(tuned()) == found(tuned(rows=128)) == SMALL
    assert found(tuned(other, rows=100), tuned()) == SMALL
    assert found(tuned(other, rows=100), tuned(rows=40)) == other
    # A later entry of the same size counts.
    assert found(tuned(other), tuned()) == SMALL
    # If the table's tile was the fastest, no farther entry replaces it.
    assert found(tuned(other, rows=100), tuned(None)) is None
    others = {"rows": 129}, {"cols": 97}, {"op": "matmul_all_reduce"}, {"dtype": "bfloat16"}, {"version": "0"}
    assert all(found(tuned(**changes)) is None for changes in others)
    assert found(tuned(), world_size=4) is None
    leaves = Task(ALL_GATHER_MATMUL, task.shapes, torch.float32, (32, 32), leaves=8)
    alone = Task(ALL_GATHER, {"a": (32, 48)}, torch.float32, (32, 32))
    assert found(tuned(), task=leaves) is found(tuned(), task=alone) is None


def taken(group: ProcessGroup, path: str) -> tuple[str, list[tuple[int, int]]]:
    """Return `last_path().kernel` and the launched kernels' tiles; only rank 0 can read the file."""
    # Forget a table that the group has read before.
    registry.destroy(group)
    seen: list[tuple[int, int]] = []
    launch = loading._starter

    def starter(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen.extend((each.BLOCK_M.value, each.BLOCK_N.value) for each in args if hasattr(each, "BLOCK_M"))
            return launch(kernel, grid)(*args, **options)

        return call

    known = {tuning.ENVIRONMENT: path if group.rank() == 0 else "off"}
    with mock.patch.dict(os.environ, known), mock.patch.object(loading, "_starter", starter):
        torch.manual_seed(0)
        rows = (37, 27)
        whole, weights = torch.randn(64, 48), torch.randn(2, 40, 48)
        x = whole.split(rows)[group.rank()]
        y = fusedtp.all_gather_linear(x, weights[group.rank()], sizes=rows, group=group, schedule="fused")
    torch.testing.assert_close(y, whole @ weights[group.rank()].t())
    kernel = last_path().kernel
    registry.destroy(group)
    return kernel, seen


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
    """Interpreted: candidates run alone and together, and are right; the table's tile is one of them."""
    found = pool.run(tune_kernels.search, Case(op, 50, 44, 36, "float32", 2), 100.0, world_size=2)[0]
    assert found.usual in found.alone
    assert len(found.alone) >= 3
    assert len(found.together) >= 2
    assert not found.refused
    assert min(found.ms, found.usual_ms) > 0
    entry = found.tuned()
    assert tuning.parse(tuning.dump(table(entry))).kernels == (entry,)


def planted(group: ProcessGroup, op: str) -> tune_kernels.TileSearch:
    """Run a search in which every tile but the table's gives wrong results on one rank."""

    def wrong(start: Any) -> Any:
        def launch(kernel: Any, grid: tuple[int, ...], blocks: Any = None) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                tiles = next((each for each in args if hasattr(each, "BLOCK_M")), None)
                if tiles is not None and group.rank() == 1 and tiles.BLOCK_M.value + tiles.BLOCK_K.value != 128:
                    first = args[0].ptr
                    scaled = tuple([x * 1.5 for x in first]) if isinstance(first, tuple) else first * 1.5
                    args = (args[0]._replace(ptr=scaled), *args[1:])
                return start(kernel, grid, blocks)(*args, **options)

            return call

        return launch

    with contextlib.ExitStack() as stack:
        for module in (matmul, gather_matmul, matmul_all_reduce, matmul_scatter):
            stack.enter_context(mock.patch.object(module, "launch", wrong(module.launch)))  # type: ignore[attr-defined]
        return tune_kernels.search(group, Case(op, 50, 44, 36, "float32", 2), 100.0)


def test_a_tile_that_is_wrong_on_one_rank_is_never_timed(pool: RankPool) -> None:
    found = pool.run(planted, "all_gather_matmul", world_size=2)[0]
    others = {name for name in found.refused if not name.startswith("64x64x64")}
    assert others
    assert all("rank 1" in found.refused[name] for name in others)
    assert not others & (found.alone.keys() | found.together.keys())
    assert found.best.startswith("64x64x64")


def test_the_command_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says that nothing is measured, and stores nothing."""
    asked: list[tuple[int, int, int]] = []

    def tuned_cases(cases: list[Case], *, done: Callable[[Any], None], **_: Any) -> list[Case]:
        asked.extend((each.M, each.N, each.K) for each in cases)
        done(tune_kernels.TileSearch(cases[0], "a", "a", None, 1.0, 1.0, 1.0))
        return cases[1:]

    monkeypatch.setattr(tune_kernels, "search", None)
    monkeypatch.setattr(tune_kernels, "tune_kernels", tuned_cases)
    out = tmp_path / "tuning.json"
    for given, sizes, code, said in (
        (["--kernels"], {cli_tune.TINY}, 0, "2 of 3 sizes were not reached"),
        (["--kernels", *SHAPES, "--world-size", "2"], {(24, 20, 16), (48, 20, 16)}, 0, "nothing is kept"),
        (["--model", "llama3-8b"], set(), 2, "are for --kernels"),
        (["--kernels", "--model", "llama3-8b"], set(), 2, "leave --model out"),
        (["--kernels", "--shape", "129,128,128"], set(), 2, "a product M x N x K of at most 2097152"),
    ):
        asked.clear()
        assert said in folded(command("tune", *given, "--out", out, code=code))
        assert set(asked) == sizes
        assert not out.exists()


def test_what_was_found_is_kept_at_once_and_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends to be on a GPU: cut off after the first size, the command goes on with the second."""
    cases = [Case("all_gather_matmul", rows, 80, 48, "bfloat16", 2) for rows in (64, 512)]
    out, searched = tmp_path / "tuning.json", []

    def tune(cases: list[Case], *, done: Callable[[Any], None], **_: Any) -> list[Case]:
        searched.append(cases)
        done(tune_kernels.TileSearch(cases[0], "a", "b", SMALL._asdict(), 1.0, 2.0, 1.9))
        return cases[1:]

    monkeypatch.setattr(tune_kernels, "tune_kernels", tune)
    machine = tuning.identity() | {"num_gpus": 2}
    monkeypatch.setattr(tuning, "identity", lambda: machine)
    for _ in range(3):
        cli_tune.tune_tiles(cases, out, machine, seconds=1, again=False, console=Console(quiet=True))
    assert searched == [cases, cases[1:]]
    known, _, _ = tuning.load(out)
    assert known is not None
    assert [(each.rows, each.cols, each.third) for each in known.kernels] == [(64, 48, 40), (512, 48, 40)]
