"""Matmuls of one rank by NumPy's library: when it is taken, and that it gives what torch's gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedtp import blas, reference

THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine on which NumPy is taken; a test takes away what it likes."""
    monkeypatch.setattr(blas, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(blas, "_blas_of_numpy", lambda: "scipy-openblas")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.delenv(blas.ENVIRONMENT, raising=False)
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    blas._chosen.cache_clear()
    yield monkeypatch
    blas._chosen.cache_clear()


def test_openblas_on_a_processor_that_is_not_intels(machine: pytest.MonkeyPatch) -> None:
    assert blas.choice() == ("numpy", "OpenBLAS is faster than MKL on a processor of AuthenticAMD")
    machine.setenv("OPENBLAS_NUM_THREADS", "1")
    machine.setenv("OMP_NUM_THREADS", "8")
    assert blas.choice()[0] == "numpy"


def test_torch_everywhere_else_and_why(machine: pytest.MonkeyPatch) -> None:
    def why() -> str:
        library, text = blas.choice()
        assert library == "torch"
        return text

    with machine.context() as patch:
        patch.setenv(blas.ENVIRONMENT, "torch")
        assert why() == "FUSEDTP_CPU_MATMUL=torch"
    with machine.context() as patch:
        patch.setattr(torch.backends.mkl, "is_available", lambda: False)
        assert why() == "this torch multiplies without MKL"
    for vendor, text in (("GenuineIntel", "GenuineIntel"), ("", "an unknown vendor")):
        with machine.context() as patch:
            patch.setattr(blas, "_vendor", lambda vendor=vendor: vendor)
            assert why() == f"MKL on a processor of {text}"
    for name, text in (("mkl-sdl", "mkl-sdl"), ("", "an unknown library")):
        with machine.context() as patch:
            patch.setattr(blas, "_blas_of_numpy", lambda name=name: name)
            assert why() == f"NumPy multiplies with {text}, not with OpenBLAS"
    with machine.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "4")
        assert "OpenBLAS may use several threads: OMP_NUM_THREADS is 4" in why()
    with machine.context() as patch:
        patch.delenv("OMP_NUM_THREADS")
        assert "OMP_NUM_THREADS is not set" in why()


def test_a_choice_that_there_is_not_is_told_on_import() -> None:
    command = [sys.executable, "-P", "-c", "import fusedtp"]
    env = {**os.environ, blas.ENVIRONMENT: "mkl"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: FUSEDTP_CPU_MATMUL must be auto or torch, got 'mkl'\n")


def layouts(x: Tensor) -> dict[str, Tensor]:
    """x [rows, cols] as BLAS takes it."""
    rows, cols = x.shape
    wide, tall = x.new_full((rows + 3, cols + 5), torch.nan), x.new_full((cols + 2, rows + 7), torch.nan)
    wide[2 : 2 + rows, 3 : 3 + cols], tall[1 : 1 + cols, 4 : 4 + rows] = x, x.t()
    return {
        "plain": x.contiguous(),
        "transposed": x.t().contiguous().t(),
        "sliced": wide[2 : 2 + rows, 3 : 3 + cols],
        "sliced, transposed": tall[1 : 1 + cols, 4 : 4 + rows].t(),
        "with a gradient": x.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(x.clone()),
    }


def operands(m: int = 70, k: int = 200, n: int = 130) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    return (torch.randn(m, k, generator=random), torch.randn(k, n, generator=random), torch.randn(n, generator=random))


@torch.no_grad()
def test_every_layout_gives_the_product(machine: pytest.MonkeyPatch) -> None:
    a, b, bias = operands()
    expected, allowed = reference.matmul(a, b, bias), reference.bound(a, b, torch.float32, k_sizes=(200,), bias=bias)
    with mock.patch.object(blas, "_multiply", wraps=blas._multiply) as multiply:
        for name, left in layouts(a).items():
            for other, right in layouts(b).items():
                what = f"{name} @ {other}"
                reference.check(blas.mm(left, right, bias), expected, allowed, what)
                for place, out in layouts(torch.empty(70, 130)).items():
                    out = out.detach()
                    blas.mm_into(left, right, out, bias)
                    reference.check(out, expected, allowed, f"{what} into {place}")
                    blas.mm_into(left, right, out)
                    blas.add_mm_into(left, right, out)
                    reference.check(out, 2 * (expected - bias.double()), 3 * allowed, f"{what} added to {place}")
    assert multiply.call_count == 6 * 6 * (1 + 6 * 3)


@torch.no_grad()
@pytest.mark.parametrize(("room", "blocks"), [(64 * 130 * 4, 3), (100 * 130 * 4, 2), (1, 3), (1 << 20, 1)])
def test_what_is_added_is_held_in_little_room(machine: pytest.MonkeyPatch, room: int, blocks: int) -> None:
    """A gradient is as large as its weight: a whole product beside it would be too."""
    a, b, _ = operands(m=150)
    out = torch.ones(150, 130)
    allowed = reference.bound(a, b, torch.float32, k_sizes=(200,))
    machine.setattr(blas, "ADDED_BYTES", room)
    with mock.patch.object(blas, "_multiply", wraps=blas._multiply) as multiply:
        for name, left in layouts(a).items():
            for right in layouts(b).values():
                multiply.reset_mock()
                out.fill_(1)
                blas.add_mm_into(left, right, out)
                reference.check(out, reference.matmul(a, b) + 1, 2 * allowed, f"{name} added")
                assert multiply.call_count == blocks
                products = {product.untyped_storage().data_ptr() for (_, _, product), _ in multiply.call_args_list}
                assert len(products) == 1
                (_, _, product), _ = multiply.call_args
                assert product.untyped_storage().nbytes() <= max(room, 64 * 130 * 4)


@torch.no_grad()
def test_the_rest_is_torchs(machine: pytest.MonkeyPatch) -> None:
    a, b, _ = operands()
    with mock.patch.object(blas, "_multiply") as multiply:
        spread = a[:1].expand(70, 200)
        assert torch.equal(blas.mm(spread, b), torch.mm(spread, b))
        assert torch.equal(blas.mm(a[:, ::2], b[::2]), torch.mm(a[:, ::2], b[::2]))
        out = torch.empty(70, 260)[:, ::2]
        blas.mm_into(a, b, out)
        assert torch.equal(out, torch.mm(a, b))
        assert torch.equal(blas.mm(a[:15].repeat(1, 4), b.repeat(4, 1)), torch.mm(a[:15].repeat(1, 4), b.repeat(4, 1)))
        by_columns = b.repeat(4, 1).t().contiguous().t()
        assert torch.equal(blas.mm(a[:23].repeat(1, 4), by_columns), torch.mm(a[:23].repeat(1, 4), by_columns))
        assert torch.equal(blas.mm(a[:40], b), torch.mm(a[:40], b))
        assert torch.equal(blas.mm(a[:, :0], b[:0]), torch.zeros(70, 130))
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            assert torch.equal(blas.mm(a.to(dtype), b.to(dtype)), torch.mm(a.to(dtype), b.to(dtype)))
        assert blas.mm(a.to("meta"), b.to("meta")).shape == (70, 130)
        with FakeTensorMode() as mode:
            assert blas.mm(mode.from_tensor(a), mode.from_tensor(b)).shape == (70, 130)
        machine.setattr(torch, "get_num_threads", lambda: 2)
        assert torch.equal(blas.mm(a, b), torch.mm(a, b))
    multiply.assert_not_called()


@torch.no_grad()
def test_few_rows_are_numpys_where_they_are_many_numbers(machine: pytest.MonkeyPatch) -> None:
    a, b, _ = operands(16, 600, 130)
    with mock.patch.object(blas, "_multiply", wraps=blas._multiply) as multiply:
        blas.mm(a, b)
        blas.mm(b.t(), a.t().contiguous())
        blas.mm(torch.cat([a, a]), b.t().contiguous().t())
    assert multiply.call_count == 3


@torch.no_grad()
def test_bits_do_not_depend_on_where_operands_lie(machine: pytest.MonkeyPatch) -> None:
    a, b, _ = operands(150, 333, 257)
    expected = blas.mm(a, b)
    for offset in range(1, 17):
        moved = [torch.empty(x.numel() + offset)[offset:].view(x.shape).copy_(x) for x in (a, b)]
        assert torch.equal(blas.mm(*moved), expected)
