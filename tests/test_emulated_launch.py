"""Every kernel launches through Triton's own driver and launcher, with the parameters of its launcher.

Runs in a process without Triton's interpreter: `nox -s emulate`, `nox -s launches` with each supported Triton, and
`test_emulated.py` in the ordinary tests.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("Triton's interpreter is chosen for this process; nox -s emulate", allow_module_level=True)

import triton
from triton.compiler import compiler

from fusedtp.epilogue import Epilogue
from fusedtp.kernels import loading, prepared, steps
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.launch import FP_FUSION, config_for
from fusedtp.kernels.matmul import _matmul_kernel, matmul
from fusedtp.op import Task
from fusedtp.schedules.forms import Prepared
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .virtual_gpu import evidence
from .virtual_gpu.cases import DTYPES, FLOAT8, OF_FIVE, issue, problem, run, small, virtual_ranks
from .virtual_gpu.driver import KERNELS, EmulatedDriver, device
from .virtual_gpu.machine import Schedule, Waiting

pytestmark = pytest.mark.emulated

ALL = os.environ.get("FUSEDTP_EMULATION") in ("all", "write")
# Every thirteenth: every op, with dtypes and targets in turn.
UNITS = [
    *evidence.units()[:: 1 if ALL else 13], *(evidence.Unit(90, "bfloat16", op) for op in OF_FIVE)
]  # fmt: skip
BF16 = torch.bfloat16


@pytest.fixture
def hopper() -> Iterator[EmulatedDriver]:
    with device(90) as found:
        yield found


def taken(driver: EmulatedDriver) -> list[Waiting]:
    """Return all pending launches, and drop them."""
    waiting, driver.machine.waiting = driver.machine.waiting, []
    return waiting


def launched(driver: EmulatedDriver, unit: evidence.Unit, how: str) -> set[str]:
    """Launch an op twice on two or three virtual ranks, execute nothing, and return the names of its kernels."""
    dtype, world_size = (DTYPES | FLOAT8)[unit.dtype], 2 + (how == "empty")
    with virtual_ranks(world_size) as ranks, one_form_a_task():
        start, _, _ = problem(unit.op, world_size, dtype, 0, small(unit.target, dtype, how))
        for _ in range(2):
            before = driver.num_prepared
            issue(driver, ranks, [start(ws, ws.rank) for ws in ranks])
            waiting = taken(driver)
        assert driver.num_prepared - before == len(waiting), "a call like an earlier one is looked up"
    return {each.name for each in waiting}


@contextlib.contextmanager
def one_form_a_task() -> Iterator[None]:
    """Let virtual ranks share one form for equal tasks, as calls do."""
    made: dict[Any, Prepared] = {}

    def form(schedule: str, task: Task, ws: Workspace, **how: Any) -> Prepared:
        key = schedule, task, ws.rank, *how.items()
        return made.get(key) or made.setdefault(key, Prepared(schedule, task, ws=ws, **how))

    with mock.patch.object(direct, "Prepared", form):
        yield


def test_every_kernel_is_launched() -> None:
    """Each launch, prepared or not, is compared with the launcher's arguments, parameter by parameter."""
    found: set[str] = set()
    for target in evidence.TARGETS:
        with device(target) as driver:
            for i, unit in enumerate(UNITS):
                if unit.target == target:
                    for how in ("uneven", "empty") if ALL else ("uneven", "empty")[i % 2 : i % 2 + 1]:
                        found |= launched(driver, unit, how)
            with virtual_ranks(2) as ranks, driver.on(1):
                steps.step(ranks[1].channel(), 3, "signal", 0, 2)
                found |= {each.name for each in taken(driver)}
    # Only bench and the emulator's tests use the plain matmul. `test_emulated_cores` launches the other core's kernels,
    # and the GPU command those that time signals.
    elsewhere = ("warp_specialised", "latency")
    own = {each.fn.__name__ for each in KERNELS if each.fn.__module__.rpartition(".")[2] not in elsewhere}
    assert own - found <= {"_matmul_kernel"}


def test_parameters_in_another_order_are_found(hopper: EmulatedDriver) -> None:
    paths = loading._paths

    def swapped(signature: tuple[Any, ...], *path: int) -> Any:
        found = list(paths(signature, *path))
        if path:
            return found
        of_pointers = [i for i, (_, kind) in enumerate(found) if kind == "*bf16"]
        i, j = of_pointers[:2]
        found[i], found[j] = found[j], found[i]
        return found

    unit = evidence.Unit(90, "bfloat16", "gather rows")
    with mock.patch.object(loading, "_paths", swapped), mock.patch.object(loading, "_loaded", {}):
        # A loaded kernel would keep its launcher.
        forget()
        with pytest.raises(RuntimeError, match="launch"):
            launched(hopper, unit, "uneven")
    assert isinstance(hopper.stub.failure, AssertionError)
    hopper.stub.failure = None
    forget()


def forget() -> None:
    """Have every kernel compiled and loaded anew."""
    prepared._known.clear()
    for kernel in KERNELS:
        kernel.device_caches.clear()


def test_a_kernel_that_asks_for_too_much_has_fewer_stages(
    hopper: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with less shared memory an op runs with fewer stages, and remembers the number."""
    asked: list[int] = []
    monkeypatch.setattr(loading, "_stages", {})
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: asked.append(device) or 100 << 10)
    forget()
    try:
        shape = replace(small(90, BF16), M=272, N=528, K=400)
        run(hopper, ["gather rows"], 2, BF16, shape, Schedule(1))
        assert loading._stages
        assert all(stages < dict(key[2])["num_stages"] for key, stages in loading._stages.items())
        before = len(asked)
        run(hopper, ["gather rows"], 2, BF16, shape, Schedule(2))
        assert len(asked) == before
        monkeypatch.setattr(loading, "_stages", {})
        monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 1 << 10)
        forget()
        with pytest.raises(compiler.OutOfResources):
            launched(hopper, evidence.Unit(90, "bfloat16", "gather rows"), "uneven")
    finally:
        forget()


@pytest.mark.parametrize("op", ["gather rows", "gather rows of five"])
def test_a_capture_refuses_what_is_not_loaded(hopper: EmulatedDriver, op: str) -> None:
    """A loaded kernel may be captured, also one that writes a table; another is refused before Triton is called."""
    unit = evidence.Unit(90, "bfloat16", op)
    capturing = mock.patch.object(loading, "_is_capturing", return_value=True)
    forget()
    with capturing, pytest.raises(RuntimeError, match="is not loaded, and a graph capture cannot"):
        launched(hopper, unit, "uneven")
    taken(hopper)
    with virtual_ranks(2) as ranks, loading.only_loading():
        start, _, _ = problem(unit.op, 2, BF16, 0, small(90, BF16))
        issue(hopper, ranks, [start(ws, ws.rank) for ws in ranks])
        assert not hopper.machine.waiting
    with capturing:
        assert launched(hopper, unit, "uneven")


def test_threads_that_load_one_kernel_at_once(hopper: EmulatedDriver) -> None:
    """Both threads launch with the parameters of the nested arguments, however long loading takes."""
    launcher, took = hopper.triton.launcher_cls, []

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return launcher(*args)

    hopper.triton.launcher_cls = slowly
    forget()
    with virtual_ranks(2) as ranks:
        channel = ranks[0].channel()
        args = channel.group(3), channel.rank, channel.fingerprint, 1, 2, "signal"
        compiled = steps._step_kernel.warmup(*args, grid=(1,), num_warps=1, **FP_FUSION)

        def take() -> None:
            took.append(loading._leaves(loading.load(compiled, (1, 1, 1)), args))

        threads = [threading.Thread(target=take) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    first, second = took
    assert [id(x) for x in first] == [id(x) for x in second]
    assert args[0][0] is first[0]


@pytest.mark.parametrize("op", ["gather rows", "scatter rows", "matmul two_shot in parts", "all_reduce ring", *OF_FIVE])
def test_prepared_launches_are_right(hopper: EmulatedDriver, op: str) -> None:
    """The second and third of three ops have prepared launches, with other operands."""
    with one_form_a_task():
        run(hopper, [op] * 3, 2, BF16, small(90, BF16), Schedule(1))
    assert hopper.num_prepared


def multiplied(driver: EmulatedDriver, M: int = 64, *, K: int = 64, at: int = 0, bias: bool = False) -> Waiting:
    """Launch the plain matmul on operands that begin at element `at`."""
    a, b, c = (torch.zeros(at + n, dtype=BF16)[at:] for n in (M * K, K * 64, M * 64))
    b = b.view(K, 64)
    epilogue = epilogue_of([Epilogue(torch.zeros(64, dtype=BF16) if bias else None)])
    matmul(a.view(M, K), b, c.view(M, 64), epilogue, config=config_for(torch.device("cuda"), BF16))
    [waiting] = taken(driver)
    return waiting


def test_only_like_calls_are_prepared(hopper: EmulatedDriver) -> None:
    """Other alignment, length or number of operands is another call, which the driver would not notice."""
    multiplied(hopper)
    for other in ({"at": 1}, {"at": 4}, {"M": 1}, {"M": 72}, {"K": 1}, {"bias": True}):
        for number in range(2):
            before = hopper.num_prepared
            multiplied(hopper, **other)
            assert hopper.num_prepared - before == number, other

    def key() -> Any:
        return prepared._described(matmul, (torch.zeros(64),), {})[0]

    before, knobs = key(), triton.knobs
    for of, name, value in ((knobs.runtime, "debug", True), (knobs.compilation, "instrumentation_mode", "other")):
        assert key() == before
        with mock.patch.object(of, name, value):
            assert key() != before


def test_an_operand_that_is_passed_twice(hopper: EmulatedDriver) -> None:
    x, y, z = (torch.zeros(64, 64, dtype=BF16) for _ in range(3))
    plain, config = epilogue_of(()), config_for(torch.device("cuda"), BF16)
    for a, b in ((x, x), (x, y), (y, y), (x, z)):
        matmul(a, b, z, plain, config=config)
    assert hopper.num_prepared == 1
    taken(hopper)


def test_a_prepared_launch_is_of_its_channel(hopper: EmulatedDriver) -> None:
    """Two calls with the same arenas differ only in the fingerprint; other arenas are another call."""
    with virtual_ranks(2) as ranks:
        channel = ranks[0].channel()
        for given, num_prepared in ((channel, 1), (replace(channel, half_bytes=channel.half_bytes * 2), 2)):
            for given.fingerprint in (1, 1 << 40):
                steps.step(given, 3, "signal", 0, 2)
                [waiting] = taken(hopper)
                assert {given.fingerprint, given.half_bytes} < {*waiting.values.values()}
            assert hopper.num_prepared == num_prepared


def test_a_prepared_launch_is_on_the_current_stream(hopper: EmulatedDriver) -> None:
    assert multiplied(hopper).rank == 0
    with hopper.on(1):
        assert multiplied(hopper).rank == 1
    assert hopper.num_prepared == 1
    away = mock.patch.object(prepared, "check_device", side_effect=ValueError("on cuda:1"))
    with away, pytest.raises(ValueError, match="on cuda:1"):
        multiplied(hopper)


def test_hooks_see_prepared_launches(hopper: EmulatedDriver) -> None:
    """Hooks of profilers get the kernel's name; hooks of a kernel get its arguments."""
    seen: list[Any] = []
    entered = triton.knobs.runtime.launch_enter_hook

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    def before(*args: Any, **options: Any) -> None:
        seen.append(args[-1])

    multiplied(hopper)
    entered.add(enter)
    _matmul_kernel.add_pre_run_hook(before)
    try:
        multiplied(hopper)
        assert seen == [64, "_matmul_kernel"]
        _matmul_kernel.pre_run_hooks.clear()
        multiplied(hopper)
        assert seen == [64, "_matmul_kernel", "_matmul_kernel"]
        assert hopper.num_prepared == 1
    finally:
        entered.remove(enter)
        _matmul_kernel.pre_run_hooks.clear()


@pytest.mark.parametrize("terms", [1, 5])
def test_a_prepared_launch_keeps_no_operand(terms: int) -> None:
    """Nor a table of operands, which a kernel writes for every launch."""
    a, b, c = (torch.zeros(64, 64, dtype=BF16) for _ in range(3))
    more = [(torch.zeros(64, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16)) for _ in range(terms - 1)]
    with device(90) as driver:
        for _ in range(2):
            config = config_for(torch.device("cuda"), BF16)
            matmul(a, b, c, epilogue_of(()), config=config, more=more)
        known = prepared._known
    assert (driver.num_prepared, len(known)) == (1 + (terms > 1), 1)
    del driver
    memory = [weakref.ref(each) for each in (a, b, c, *itertools.chain(*more))]
    del a, b, c, more
    gc.collect()
    assert not any(each() is not None for each in memory)
