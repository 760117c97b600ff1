"""Launchers give to the compiler what `nox -s kernels` compiles: ways of reading, constants, options."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedtp.kernels import gather_matmul, matmul, matmul_scatter
from fusedtp.kernels.configs import INTERPRETER, SHAPES, TABLE, compiled_config
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.launch import Channel, Config, moving_options, options
from fusedtp.kernels.layout import pitch_of
from fusedtp.workspaces.workspace import Workspace

from .compiled.arguments import flat
from .compiled.build import config_of, is_flattened, launch_options
from .compiled.cases import TARGETS, VARIANTS, Case
from .virtual_ranks import local_memories

CPU = torch.device("cpu")
CHUNKS = (128, 64, 0)
PLAIN = epilogue_of(None, per_row=False)


@pytest.fixture
def channel() -> Any:
    """Return rank 0's channel of three, with halves large enough for every matrix here."""
    ranks = [Workspace(memory, CPU) for memory in local_memories(len(CHUNKS), CPU)]
    ranks[0].require(1 << 20, 4096)
    yield ranks[0].channel()
    for ws in ranks:
        ws.close()


def launched(module: ModuleType, kernel: str, launcher: Any, *args: Any, **given: Any) -> dict[str, Any]:
    """Return the arguments of a launcher's kernel, by name."""
    names = getattr(module, kernel).arg_names
    with mock.patch.object(module, kernel, mock.MagicMock()) as started:
        launcher(*args, **given)
    (call,) = started.__getitem__.return_value.call_args_list
    return flat(names, call.args) | call.kwargs


def config_for(target: str, shape: str) -> Config:
    return replace(compiled_config(target, 2, shape), programs=4)


def operands(target: str, M: int, N: int, K: int) -> tuple[Tensor, Tensor, str, str]:
    """A [M, K] and B [K, N], bfloat16, as the target mainly reads them, and the two ways."""
    by = ("rows", "columns") if TARGETS[target].described else ("pointers", "pointers")
    return torch.zeros(M, K, dtype=torch.bfloat16), torch.zeros(N, K, dtype=torch.bfloat16).t(), *by


def gather(channel: Channel, config: Config, a: Tensor, b: Tensor, *, transposed: bool) -> dict[str, Any]:
    M, N = sum(CHUNKS), b.shape[1]
    out = a.new_empty((N, M) if transposed else (M, N))
    kernel = gather_matmul.GatherMatmul(
        0, CHUNKS, on_rows=True, pitch=pitch_of(a.shape[1], a.dtype), piece_rows=64, config=config
    )
    return launched(
        gather_matmul, "_gather_matmul_kernel", kernel, channel, a, [b], [out.t() if transposed else out],
        epilogue_of(a.new_empty(M if transposed else N), per_row=transposed),
        torch.zeros(4, dtype=torch.int32), pushed=False,
    )  # fmt: skip


def multiply(config: Config, a: Tensor, b: Tensor, *, transposed: bool) -> dict[str, Any]:
    M, N = a.shape[0], b.shape[1]
    out = a.new_empty((N, M) if transposed else (M, N))
    return launched(
        matmul, "_matmul_kernel", matmul.matmul, a, b, out.t() if transposed else out,
        epilogue_of(a.new_empty(M if transposed else N), per_row=transposed), config=config,
    )  # fmt: skip


def check(found: dict[str, Any], case: Case, **more: Any) -> None:
    """A kernel was launched as the case is compiled: its tile, its options, how it reads."""
    fitted = config_of(case)
    expected = launch_options(case, fitted) | {"A_BY": case.a_by, "B_BY": case.b_by} | more
    expected |= {"BLOCK_M": fitted.block_m, "BLOCK_N": fitted.block_n, "BLOCK_K": fitted.block_k}
    assert {name: found.get(name) for name in expected} == expected
    assert ("maxnreg" in found) == ("maxnreg" in expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TABLE)
def test_a_matmul_and_a_gather_are_launched_as_they_are_compiled(
    channel: Channel, target: str, shape: str, transposed: bool
) -> None:
    config, way = config_for(target, shape), " transposed" if transposed else ""
    a, b, a_by, b_by = operands(target, CHUNKS[0], 96, 128)
    found = {"matmul": multiply(config, a, b, transposed=transposed)}
    found["gather rows"] = gather(channel, config, a, b, transposed=transposed)
    for name in found:
        case = Case(name + way, target, shape=shape, a_by=a_by, b_by=b_by)
        constants = {flag: value for flag, value in VARIANTS[case.variant].flags.items() if flag != "PUSHERS"}
        check(found[name], case, FLATTEN=is_flattened(case), **constants)
    assert found["gather rows"]["PUSHERS"] > 0
    unit = {"stride_ak", "stride_bk", "stride_cm" if transposed else "stride_cn"}
    strides = {name: value for name, value in found["gather rows"].items() if name.startswith("stride_")}
    assert {name for name, value in strides.items() if value == 1} == unit
    # Lengths that are no multiples of 16 have smaller tiles.
    a, b, _, _ = operands(target, CHUNKS[0], 97, 129)
    found = {"matmul": multiply(config, a, b, transposed=transposed)}
    found["gather rows"] = gather(channel, config, a, b, transposed=transposed)
    for name in found:
        check(found[name], Case(name + way, target, shape=shape, aligned=()), FLATTEN=False)
        assert found[name]["BLOCK_N"] <= 128
        assert found[name]["BLOCK_K"] == 32
        assert found[name]["num_warps"] >= 8


@pytest.mark.parametrize("N", [96, 88, 97])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TABLE)
def test_a_scatter_is_launched_as_it_is_compiled(channel: Channel, target: str, shape: str, N: int) -> None:
    a, b, a_by, b_by = operands(target, sum(CHUNKS), N, 128)
    config, pitch = config_for(target, shape), pitch_of(N, torch.bfloat16)
    for to_all in (False, True):
        name = "scatter to all" if to_all or (pitch % 16 and N % 16 == 0) else "scatter"
        case = Case(name, target, shape=shape, a_by=a_by, b_by=b_by, aligned=() if N % 16 else None)
        kernel = matmul_scatter.MatmulScatter(0, CHUNKS, region_rows=192, pitch=pitch, to_all=to_all, config=config)
        found = launched(
            matmul_scatter, "_matmul_scatter_kernel", kernel, channel, [a], [b], torch.zeros(4, dtype=torch.int32)
        )
        check(found, case, TO_ALL=to_all, BLOCK_M=config.block_m, BLOCK_N=config.block_n)


@pytest.mark.parametrize(
    ("columns", "offset", "stored"), [(96, 0, True), (96, 16, True), (96, 1, False), (88, 0, False)]
)  # fmt: skip
def test_a_result_is_stored_16_bytes_at_a_time_or_not(columns: int, offset: int, stored: bool) -> None:
    config = config_for("sm_90", "many")
    whole = torch.zeros(64 * 96 + 16, dtype=torch.bfloat16)
    out = whole[offset : offset + 64 * columns].view(64, columns)
    a, b = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(columns, 128, dtype=torch.bfloat16).t()
    found = launched(matmul, "_matmul_kernel", matmul.matmul, a, b, out, PLAIN, config=config)
    assert found["BLOCK_N"] == (config.block_n if stored else 128)
    assert (found["A_BY"], found["B_BY"], found["BLOCK_K"]) == ("rows", "columns", config.block_k)


@pytest.mark.parametrize("by", ["rows", "pointers"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_multiprocessor_has_the_registers_of_a_program(target: str, shape: str, by: str) -> None:
    """Or the launch fails: 64 Ki of them, given to a warp in units of 256."""
    config = compiled_config(target, 2, shape)
    for given in (options(config, by, by), moving_options(config)):
        assert -(-32 * given.get("maxnreg", 0) // 256) * 256 * given["num_warps"] <= 64 << 10


def test_what_has_no_limit_of_registers() -> None:
    """What is interpreted and what AMD's compiler makes, which has no such option; float32 has as many as a thread can
    have."""
    for target in TABLE:
        most = 0 if target == "gfx942" else 255
        assert all(compiled_config(target, 4, shape).registers == most for shape in SHAPES)
    kinds: tuple[dict[str, Any], ...] = (
        {"itemsize": 1}, {"itemsize": 2}, {"itemsize": 4}, {"itemsize": 1, "blocks": True},
        {"itemsize": 2, "tree": True},
    )  # fmt: skip
    amd = [compiled_config("gfx942", shape=shape, **kind) for shape in SHAPES for kind in kinds]
    for config in (INTERPRETER, *amd):
        assert "maxnreg" not in options(config, "pointers", "pointers") | moving_options(config)
