"""`auto` on ranks: a planted table decides, ranks with different tables agree, and no file is fatal."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import float8
from fusedtp.bench.cases import EVERY_DTYPE
from fusedtp.bench.ranks import RankPool
from fusedtp.choose import dispatch, tuning
from fusedtp.choose.tuning import Sample
from fusedtp.cost.hardware import HARDWARE
from fusedtp.op import OPS, Task
from fusedtp.workspaces import generation, registry

from . import direct
from .harness import last_path, on_ranks

SMALL, LARGE = 32, 512


def planted(fast_when_small: str, fast_when_large: str, **machine: Any) -> str:
    """Return a table in which for every op one schedule is twice as fast at a small size, and one at a large size."""
    samples = []
    for op in OPS:
        for size, fast in ((SMALL, fast_when_small), (LARGE, fast_when_large)):
            ms = {name: 1.0 if name == fast else 2.0 for name in ("unfused", "decomposed")}
            samples.append(Sample(op, 2, "float32", size, size, size if "matmul" in op else 0, ms))
    return tuning.dump(tuning.Table(tuning.identity() | machine, tuple(samples), {}))


def run_all(group: ProcessGroup, size: int) -> dict[str, tuple[str, str]]:
    """Return (schedule, reason) of every op at about `size`, and check each result."""
    n, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(size, size, generator=generator) for _ in range(2))
    rows = x.tensor_split(n)[rank]
    part, w_part = (each.tensor_split(n, 1)[rank].contiguous() for each in (x, w))
    product = x @ w.t()
    calls: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
        "all_gather_matmul": (lambda: fusedtp.all_gather_linear(rows, w, group=group), product),
        "matmul_reduce_scatter": (
            lambda: fusedtp.linear_reduce_scatter(part, w_part, group=group),
            product.tensor_split(n)[rank],
        ),
        "matmul_all_reduce": (lambda: fusedtp.linear_all_reduce(part, w_part, group=group), product),
        "all_gather": (lambda: fusedtp.all_gather(rows, group=group), x),
        "reduce_scatter": (lambda: fusedtp.reduce_scatter(x, group=group), n * x.tensor_split(n)[rank]),
        "all_reduce": (lambda: fusedtp.all_reduce(x, group=group), n * x),
    }
    taken = {}
    with torch.no_grad():
        for op, (call, expected) in calls.items():
            for _ in range(2):
                assert torch.allclose(call(), expected, atol=1e-3), op
                path = last_path()
                assert path.op == op
                taken[op] = path.schedule, path.reason
    return taken


@contextlib.contextmanager
def reading(group: ProcessGroup, file: str) -> Iterator[None]:
    """Give the group a new start with this tuning table, and afterwards one without a table."""
    fusedtp.destroy(group)
    dispatch._warned.clear()
    os.environ["FUSEDTP_TUNING"] = file
    try:
        yield
    finally:
        os.environ["FUSEDTP_TUNING"] = "off"
        fusedtp.destroy(group)


def with_tables(group: ProcessGroup, files: list[str], sizes: list[int]) -> tuple[list[Any], list[str]]:
    """Return every op's schedule at each size, rank r reading files[r], and this rank's warnings."""
    with reading(group, files[group.rank()]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return [run_all(group, size) for size in sizes], [str(each.message) for each in said]


def test_a_planted_table_steers(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "table").write_text(planted("unfused", "decomposed"))
    results = pool.run(with_tables, [str(tmp_path / "table")] * 2, [SMALL, LARGE, SMALL + 4], world_size=2)
    assert results[0] == results[1]
    (small, large, near), said = results[0]
    assert not said
    for op in OPS:
        assert small[op][0] == near[op][0] == "unfused"
        assert large[op][0] == "decomposed"
        nearest = f"{LARGE}x{LARGE} on 2 ranks, the nearest size measured here"
        assert large[op][1] == f"measured: decomposed 2.00x as fast as unfused at {nearest}"


def test_ranks_with_different_tables_agree(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "one").write_text(planted("unfused", "decomposed"))
    (tmp_path / "other").write_text(planted("decomposed", "unfused"))
    for files, expected in (
        (["one", "other"], "unfused"),
        (["other", "one"], "decomposed"),
        (["other", "no"], "decomposed"),
    ):
        paths = [str(tmp_path / name) for name in files]
        results = pool.run(with_tables, paths, [SMALL], world_size=2)
        assert results[0] == results[1]
        assert {schedule for schedule, _ in results[0][0][0].values()} == {expected}


# A fault of rank 0's table, and its message.
FAULTS = {
    "bad": "not a table",
    "foreign": "measured with torch 1.0, here ",
    "~nosuchuser/x": "FUSEDTP_TUNING is '~nosuchuser/x'",
    "400 digits": "samples[3].ms.unfused must be a number from",
    "slower than time": "rates.2.host_us must be a number",
    "a reader that fails": "MemoryError: no room for a table",
}


def faulty(group: ProcessGroup, file: str) -> tuple[list[Any], list[str]]:
    """Run `with_tables`; a file named so makes rank 0's reader raise."""
    broken = file.endswith("a reader that fails") and group.rank() == 0
    fails = mock.patch.object(tuning, "load", side_effect=MemoryError("no room for a table"))
    with fails if broken else contextlib.nullcontext():
        return with_tables(group, [file, file], [SMALL, LARGE])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_table_that_cannot_be_used_is_told_once_and_missed_by_all(fault: str, pool: RankPool, tmp_path: Path) -> None:
    content = json.loads(planted("unfused", "unfused"))
    rates = {"memory_gbps": 10.0, "collective_gbps": 1.0, "flag_us": 1.0, "collective_start_us": 1.0, "host_us": 1e300}
    if fault == "foreign":
        content = json.loads(planted("unfused", "unfused", torch="1.0"))
    elif fault == "400 digits":
        content["samples"][3]["ms"]["unfused"] = int("7" * 400)
    elif fault == "slower than time":
        content["rates"] = {"2": {"matrix_tflops": {"float32": 1.0}, **rates}}
    path = fault if fault.startswith("~") else str(tmp_path / fault)
    if path != fault:
        Path(path).write_text("{]" if fault == "bad" else json.dumps(content))
    ((small, large), said), second = pool.run(faulty, path, world_size=2, timeout=60)
    assert second == ([small, large], [])
    assert small == large
    assert len(said) == 1
    assert FAULTS[fault] in said[0]
    assert fault == "a reader that fails" or path in said[0]
    for op, taken in small.items():
        assert taken == ("decomposed", f"ranks share memory, and {dispatch._unmeasured(op, 'float32')}")


def again(group: ProcessGroup, file: str, kind: type[BaseException]) -> tuple[int, list[float]]:
    """Return how often a first op raised on this rank, and its results once it no longer raised."""
    raised = 0
    with reading(group, file), warnings.catch_warnings(), contextlib.ExitStack() as once:
        warnings.simplefilter("error")
        if kind is KeyboardInterrupt and group.rank() == 0:
            once.enter_context(mock.patch.object(tuning, "load", side_effect=kind("in the middle of the file")))
        while True:
            try:
                results = [fusedtp.all_reduce(torch.ones(2), group=group)[0].item() for _ in range(3)]
                return raised, results
            except kind:
                once.close()
                raised += 1


@pytest.mark.parametrize("kind", [UserWarning, KeyboardInterrupt])
def test_rank_0_may_call_again_after_its_table_raised(
    kind: type[BaseException], pool: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_text("{]")
    assert pool.run(again, str(tmp_path / "bad"), kind, world_size=2, timeout=60) == [(1, [2.0] * 3), (0, [2.0] * 3)]


def uneven(group: ProcessGroup, file: str) -> tuple[str, float]:
    """Run forward and backward on ranks with different numbers of features: the shared dims decide, so ranks agree."""
    with reading(group, file):
        x = torch.ones(LARGE // 2, 64, requires_grad=True)
        w = torch.ones((4, 3000)[group.rank()], 64, requires_grad=True)
        out = fusedtp.all_gather_linear(x, w, group=group)
        schedule = last_path().schedule
        out.sum().backward()
        assert x.grad is not None
        return schedule, x.grad[0, 0].item()


def test_ranks_with_uneven_weights_agree(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "table").write_text(planted("unfused", "decomposed"))
    assert pool.run(uneven, str(tmp_path / "table"), world_size=2) == [("decomposed", 3004.0)] * 2


def asked(group: ProcessGroup, file: str) -> list[tuple[str, str]]:
    x, taken = torch.ones(SMALL, SMALL), []
    with reading(group, file):
        for algorithm in ("auto", "one_shot", "two_shot"):
            assert torch.equal(fusedtp.all_reduce(x, group=group, algorithm=algorithm), x * group.size())
            fusedtp.linear_all_reduce(x, x, group=group, algorithm=algorithm)
            path = last_path()
            taken.append((path.schedule, path.reason.split(":")[0]))
        fusedtp.all_reduce(x, group=group, schedule="decomposed")
        path = last_path()
        return [*taken, (path.schedule, path.reason)]


def test_what_the_caller_asks_for_wins_over_the_table(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "table").write_text(planted("unfused", "unfused"))
    without = ("decomposed", f"ranks share memory, and {dispatch._unmeasured('matmul_all_reduce', 'float32')}")
    for taken in pool.run(asked, str(tmp_path / "table"), world_size=2):
        assert taken == [("unfused", "measured"), without, without, ("decomposed", "asked for")]


@on_ranks(1)
def test_one_rank_needs_no_memory(group: ProcessGroup) -> None:
    # This group only: rank 0 keeps its memory of other groups.
    fusedtp.destroy(group)
    fusedtp.all_gather_linear(torch.ones(4, 4), torch.ones(4, 4), group=group)
    assert (last_path().schedule, last_path().reason) == ("unfused", "one rank has nothing to send")
    assert group.group_name not in [name for name, *_ in registry._workspaces]


@pytest.mark.parametrize(
    ("op", "operands", "options", "shape"),
    [
        ("all_gather_matmul", 3, {"sizes": (3, 5)}, (8, 7)),
        ("all_gather_matmul", 3, {"dim": 1, "sizes": (3, 7)}, (3, 10)),
        ("all_gather_matmul", 4, {"sizes": (3, 5)}, (8, 7)),
        ("matmul_reduce_scatter", 3, {"dim": 1, "sizes": (3, 5)}, (3, 11)),
        ("matmul_reduce_scatter", 5, {"sizes": (1, 2)}, (3, 11)),
        ("matmul_all_reduce", 3, {"algorithm": "auto"}, (3, 11)),
        ("matmul_all_reduce", 3, {"algorithm": "one_shot"}, None),
        ("all_gather", 1, {"sizes": (3, 4)}, (7, 7)),
        ("reduce_scatter", 1, {"sizes": (1, 2)}, (3, 7)),
        ("all_reduce", 1, {}, (3, 7)),
    ],
)
def test_what_travels(op: str, operands: int, options: dict[str, Any], shape: tuple[int, int] | None) -> None:
    """The table is looked up by this shape; not for a given algorithm, for which there are no measurements."""
    x, b, right = torch.empty(3, 7), torch.empty(7, 11), torch.empty(8, 4)
    given = (x, b, None, right, torch.empty(1, 11))[:operands]
    task = direct.task_of(op, *given, **options)
    assert dispatch.rounded_shape(task) == shape
    assert task.moved == shape or shape is None


def float8_task(op: str = "all_gather_matmul", dtype: torch.dtype = torch.float8_e4m3fn, **options: Any) -> Task:
    """Return a float8 task on 512 rows, with a bfloat16 result."""
    x, b = torch.empty(256, 1024, dtype=torch.bfloat16), torch.empty(1024, 512, dtype=torch.bfloat16)
    sizes = (256, 256) if op == "all_gather_matmul" else ()
    return direct.task_of(op, x, b, sizes=sizes, float8=dtype, **options)


@pytest.mark.parametrize(
    ("dtype", "target", "why"),
    [
        (torch.float8_e4m3fn, "8.0", "since capability 8.9, this GPU has 8.0"),
        (torch.float8_e5m2, "7.5", "since capability 8.9, this GPU has 7.5"),
        (torch.float8_e4m3fn, "8.9", ""),
        (torch.float8_e4m3fn, "10.3", ""),
        (torch.float8_e4m3fnuz, "9.0", "NVIDIA's GPUs multiply"),
        (torch.float8_e4m3fnuz, "gfx942", ""),
        (torch.float8_e5m2fnuz, "gfx942", ""),
        (torch.float8_e5m2fnuz, "9.0", "NVIDIA's GPUs multiply"),
        (torch.float8_e5m2fnuz, "gfx950", "gfx950 multiplies torch.float8_e4m3fn and torch.float8_e5m2"),
        (torch.float8_e5m2, "gfx942", "gfx942 multiplies torch.float8_e4m3fnuz and torch.float8_e5m2fnuz"),
        (torch.float8_e4m3fn, "gfx942", "gfx942 multiplies torch.float8_e4m3fnuz"),
        (torch.float8_e4m3fnuz, "gfx950", "gfx950 multiplies torch.float8_e4m3fn"),
        (torch.float8_e4m3fn, "gfx950", ""),
        (torch.float8_e4m3fn, "gfx90a", "gfx90a multiplies no float8"),
    ],
)
def test_float8_is_fused_where_there_are_units_for_it(dtype: torch.dtype, target: str, why: str) -> None:
    assert why in float8.without_float8(dtype, target, blocks=False)
    assert bool(why) == bool(float8.without_float8(dtype, target, blocks=False))


@pytest.mark.parametrize(
    ("target", "refuses", "widens"),
    [("8.0", "since capability 8.9", "8.0"), ("9.0", "", "9.0"), ("10.0", "", ""), ("10.3", "", ""),
     ("12.0", "", "12.0"), ("gfx942", "", "gfx942"), ("gfx950", "", "gfx950"), ("", "", "")],
)  # fmt: skip
def test_blocks_are_fused_where_a_unit_takes_their_scales(target: str, refuses: str, widens: str) -> None:
    refused = float8.without_float8(torch.float8_e4m3fn, target, blocks=True)
    assert refuses in refused
    assert bool(refuses) == bool(refused)
    assert float8.widens_blocks(target) == (f"{widens} multiplies no blocks with scales" if widens else "")
    gpu = {"9.0": HARDWARE["h100"], "10.0": HARDWARE["b200"]}.get(target)
    for shape_of in (gpu, None):
        path = dispatch._decide(
            float8_task(in_blocks=True), 2, dispatch.SharedConfig(None, shape_of, target), True, False
        )
        assert (path.schedule == "fused") == (not widens)
        assert path.reason.endswith(f"not fused: {refused or float8.widens_blocks(target)}") == bool(widens)


def test_a_gpu_without_float8_refuses_fused_and_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    group, device = mock.Mock(), torch.device("cuda", 0)
    group.size.return_value = 2
    dispatch._check_float8.cache_clear()
    # While capturing, peers are not asked; the mock has none.
    monkeypatch.setattr(dispatch, "_is_capturing", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(RuntimeError, match=r"cannot multiply torch.float8_e4m3fn here: .* has 8\.0: use 'auto'"):
        dispatch.choose(float8_task(), "fused", group, device)
    assert dispatch.choose(float8_task(), "decomposed", group, device).schedule == "decomposed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert dispatch.choose(float8_task(), "fused", group, device).schedule == "fused"
    for gpu in (HARDWARE["a100"], None):
        for capturing in (False, True):
            path = dispatch._decide(float8_task(), 2, dispatch.SharedConfig(None, gpu, "8.0"), True, capturing)
            assert path.schedule in (("unfused",) if capturing else ("unfused", "decomposed"))
            assert path.reason.endswith("not fused: float8 is multiplied since capability 8.9, this GPU has 8.0")
    asked = float8_task("matmul_all_reduce", algorithm="one_shot")
    assert dispatch._decide(asked, 2, dispatch.SharedConfig(None, None, "8.0"), True, False).schedule == "decomposed"
    assert dispatch._decide(float8_task(), 2, dispatch.SharedConfig(None, None, "9.0"), True, False).schedule == "fused"
    dispatch._check_float8.cache_clear()


def test_float8_is_not_decided_by_measurements_of_bfloat16() -> None:
    ms = {"unfused": 1.0, "decomposed": 2.0}
    narrow = Sample("all_gather_matmul", 2, "bfloat16", 512, 1024, 512, ms)
    known = dispatch.SharedConfig(tuning.Table({"cpu": "any"}, (narrow,), {}), None)
    path = dispatch._decide(float8_task(), 2, known, False, False)
    assert path.schedule == "decomposed"
    assert dispatch._unmeasured("all_gather_matmul", "float8_e4m3fn") in path.reason
    # What cannot be tuned is not advised.
    assert dispatch.TUNED == EVERY_DTYPE
    assert "--dtype" not in dispatch._unmeasured("all_gather", "uint8")
    known = dispatch.SharedConfig(
        tuning.Table({"cpu": "any"}, (narrow, replace(narrow, dtype="float8_e4m3fn")), {}), None
    )  # fmt: skip
    assert dispatch._decide(float8_task(), 2, known, False, False).schedule == "unfused"


@pytest.mark.parametrize(("capturing", "schedule"), [(False, "decomposed"), (True, "fused")])
def test_a_capture_takes_no_copies_however_fast(capturing: bool, schedule: str) -> None:
    fast = Sample("all_gather_matmul", 2, "float8_e4m3fn", 512, 1024, 512, {"unfused": 1.0, "decomposed": 0.5})
    known = dispatch.SharedConfig(tuning.Table({"cpu": "any"}, (fast,), {}), None, "9.0")
    assert dispatch._decide(float8_task(), 2, known, True, capturing).schedule == schedule


def measured_later(group: ProcessGroup) -> list[int]:
    """Return generation.version before and after the first `auto` learns other hardware than an earlier call used."""
    fusedtp.all_reduce(torch.ones(2, 2), group=group, schedule="decomposed")
    ws = registry.get(group, torch.device("cpu"))
    # The state after a first call in a graph capture, which asks no rank.
    del dispatch._shared[ws]
    table = mock.Mock()
    table.hardware.return_value = replace(ws.hardware, name="measured")
    known = dispatch.SharedConfig(table, None), "", None
    decided = fusedtp.Path("all_reduce", "decomposed", "measured")
    before = generation.version
    with mock.patch.object(dispatch, "_share", return_value=known), \
            mock.patch.object(dispatch, "_decide", return_value=decided):  # fmt: skip
        fusedtp.all_reduce(torch.ones(2, 2), group=group)
    assert ws.hardware.name == "measured"
    fusedtp.destroy(group)
    return [before, generation.version]


def test_what_was_decided_with_other_hardware_is_decided_anew(pool: RankPool) -> None:
    """All ranks forget at once: a rank that forgot later than its peers would take another algorithm."""
    for before, after in pool.run(measured_later, world_size=2):
        # Once for the hardware, once for `destroy`.
        assert after == before + 2
