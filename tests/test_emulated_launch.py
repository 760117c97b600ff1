"""Every kernel launches through Triton's own driver and launcher, with the parameters that its launcher was given.

In a process without Triton's interpreter: `nox -s emulate`, `nox -s launches` with each supported Triton, and
`test_emulated.py` in the ordinary tests.
"""

from __future__ import annotations

import os
import threading
import time
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
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedtp.kernels import descriptors, loading, steps
from fusedtp.kernels.launch import FP_FUSION

from .virtual_gpu import evidence
from .virtual_gpu.cases import DTYPES, FLOAT8, issue, problem, run, small, virtual_ranks
from .virtual_gpu.driver import KERNELS, EmulatedDriver, device
from .virtual_gpu.machine import Failed, Schedule

pytestmark = pytest.mark.emulated

ALL = os.environ.get("FUSEDTP_EMULATION") in ("all", "write")
# Seven from one to the next: every op, with dtypes and targets in turn.
UNITS = evidence.units()[:: 1 if ALL else 13]
BF16 = torch.bfloat16


@pytest.fixture
def hopper() -> Iterator[EmulatedDriver]:
    with device(90) as found:
        yield found


def launched(driver: EmulatedDriver, unit: evidence.Unit, how: str) -> set[str]:
    """Launch an op on two or three virtual ranks and execute nothing; the names of its kernels."""
    dtype, world_size = (DTYPES | FLOAT8)[unit.dtype], 2 + (how == "empty")
    with virtual_ranks(world_size) as ranks:
        start, _, _ = problem(unit.op, world_size, dtype, 0, small(unit.target, dtype, how))
        issue(driver, ranks, [start(ws, ws.rank) for ws in ranks])
    waiting, driver.machine.waiting = driver.machine.waiting, []
    return {each.name for each in waiting}


def test_every_kernel_is_launched() -> None:
    """Each launch is compared with the launcher's arguments, parameter by parameter and map by map."""
    found: set[str] = set()
    for target in evidence.TARGETS:
        with device(target) as driver:
            for i, unit in enumerate(UNITS):
                if unit.target == target:
                    for how in ("uneven", "empty") if ALL else ("uneven", "empty")[i % 2 : i % 2 + 1]:
                        found |= launched(driver, unit, how)
            with virtual_ranks(2) as ranks, driver.on(1):
                steps.step(ranks[1].channel(), 3, "signal", 0, 2)
                found |= {each.name for each in driver.machine.waiting}
                driver.machine.waiting.clear()
    # The plain matmul is for bench and tests of the machine.
    assert {kernel.fn.__name__ for kernel in KERNELS} - found <= {"_matmul_kernel"}


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
    with mock.patch.object(loading, "_paths", swapped), mock.patch.object(loading, "_takes", {}):
        # A kernel that is loaded keeps its launcher.
        forget()
        with pytest.raises(RuntimeError, match="launch"):
            launched(hopper, unit, "uneven")
    assert isinstance(hopper.stub.failure, AssertionError)
    hopper.stub.failure = None
    forget()


def forget() -> None:
    """Have every kernel compiled and loaded anew."""
    for kernel in KERNELS:
        kernel.device_caches.clear()


@pytest.mark.skipif(triton.__version__ >= "3.8", reason="launchers of this Triton expand descriptors inside of tuples")
def test_without_flattening_there_is_no_launch(hopper: EmulatedDriver) -> None:
    def nested(compiled: Any, grid: tuple[int, ...]) -> Any:
        return lambda args: args

    unit = evidence.Unit(90, "bfloat16", "gather rows")
    with mock.patch.object(loading, "load", nested), mock.patch.object(loading, "_takes", {}):
        forget()
        with pytest.raises(AssertionError):
            launched(hopper, unit, "uneven")
    forget()


def test_a_wrong_stride_in_a_tensor_map_is_found(hopper: EmulatedDriver) -> None:
    def wrong(b: torch.Tensor, by: str, config: Any) -> Any:
        right = of_right(b, by, config)
        if right is None:
            return None
        strides = [right.strides[0] - 8, *right.strides[1:]]
        return TensorDescriptor(right.base, right.shape, strides, right.block_shape)

    of_right = descriptors.of_right
    from fusedtp.kernels import operands

    with mock.patch.object(operands, "of_right", wrong), pytest.raises((AssertionError, Failed)):
        run(hopper, ["gather rows"], 2, BF16, small(90, BF16), Schedule(1))


def test_a_kernel_that_asks_for_too_much_has_fewer_stages(
    hopper: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of less shared memory an op runs with fewer stages, and knows it the next time."""
    asked: list[int] = []
    monkeypatch.setattr(loading, "_stages", {})
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: asked.append(device) or 100 << 10)
    forget()
    try:
        shape = replace(small(90, BF16), M=272, N=528, K=400)
        for seed in (1, 2):
            run(hopper, ["gather rows"], 2, BF16, shape, Schedule(seed))
            assert loading._stages
            assert all(stages < dict(key[2])["num_stages"] for key, stages in loading._stages.items())
        before = len(asked)
        run(hopper, ["gather rows"], 2, BF16, shape, Schedule(3))
        assert len(asked) == before
        monkeypatch.setattr(loading, "_stages", {})
        monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 1 << 10)
        forget()
        with pytest.raises(compiler.OutOfResources):
            launched(hopper, evidence.Unit(90, "bfloat16", "gather rows"), "uneven")
    finally:
        forget()


def test_a_capture_refuses_what_is_not_loaded(hopper: EmulatedDriver) -> None:
    """A kernel that is loaded may be captured; one that is not is refused before Triton touches it."""
    unit = evidence.Unit(90, "bfloat16", "gather rows")
    capturing = mock.patch.object(loading, "_is_capturing", return_value=True)
    forget()
    with capturing, pytest.raises(RuntimeError, match="is not loaded, and a graph capture cannot"):
        launched(hopper, unit, "uneven")
    hopper.machine.waiting.clear()
    with virtual_ranks(2) as ranks, loading.only_loading():
        start, _, _ = problem(unit.op, 2, BF16, 0, small(90, BF16))
        issue(hopper, ranks, [start(ws, ws.rank) for ws in ranks])
        assert not hopper.machine.waiting
    with capturing:
        assert launched(hopper, unit, "uneven")


def test_threads_that_load_one_kernel_at_once(hopper: EmulatedDriver) -> None:
    """Both launch with the parameters of the nested arguments, however long loading takes."""
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
            took.append(loading.load(compiled, (1, 1, 1))(args))

        threads = [threading.Thread(target=take) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    first, second = took
    assert [id(x) for x in first] == [id(x) for x in second]
    assert args[0][0] is first[0]
