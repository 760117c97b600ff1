"""AMD's own float8, fnuz: chosen where the machine multiplies it, and right wherever torch can cast to it.

No machine here has it: `float8.native`, which says what a device multiplies, is replaced.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import fusedtp
from fusedtp import Scaled, float8, reference, scaled
from fusedtp.bench import arguments
from fusedtp.bench.cases import EVERY_DTYPE
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.dispatch import Ready
from fusedtp.float8 import E8M0
from fusedtp.scaled import RECIPES, Quantized, casts_of
from fusedtp.schedules import local

from .harness import on_gfx942
from .oracle import cut, whole
from .test_float8 import allowed

E4M3, E5M2 = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
# Their largest numbers: 1.875 * 2**7 and 1.75 * 2**15.
LARGEST = {E4M3: 240.0, E5M2: 57344.0}
SCHEDULES = ("unfused", "decomposed")


@pytest.mark.parametrize(
    ("hip", "target", "kind", "expected"),
    [
        ("7.0", "gfx942:sramecc+:xnack-", "cuda", float8.FNUZ),
        ("7.0", "gfx950:sramecc+:xnack-", "cuda", float8.OCP),
        ("7.0", "gfx90a", "cuda", float8.OCP),
        ("7.0", "gfx942", "cpu", float8.OCP),
        (None, "", "cuda", float8.OCP),
    ],
)
def test_what_a_device_multiplies(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, target: str, kind: str, expected: float8.Formats
) -> None:
    asked = mock.Mock(return_value=SimpleNamespace(gcnArchName=target))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    float8._of_amds.cache_clear()
    assert float8.native(torch.device(kind)) == expected
    # A device is asked once, and none where there can be no other answer.
    float8.native(torch.device(kind))
    assert asked.call_count == int(hip is not None and kind == "cuda")
    float8._of_amds.cache_clear()


def test_what_scaled_makes() -> None:
    x = torch.randn(5, 64)
    for recipe in ("rowwise", "tensorwise", "mxfp8"):
        ocp = scaled(x, recipe)  # type: ignore[arg-type]
        assert ocp.data.dtype == torch.float8_e4m3fn
        with on_gfx942():
            # Blocks are OCP's, and no unit of gfx942 multiplies them.
            made = scaled(x, recipe)  # type: ignore[arg-type]
            assert made.data.dtype == (torch.float8_e4m3fn if recipe == "mxfp8" else E4M3)
            assert scaled(x, recipe, dtype=torch.float8_e5m2).data.dtype == torch.float8_e5m2  # type: ignore[arg-type]
    made = scaled(x, dtype=E4M3)
    assert torch.equal(made.scale, (x.abs().amax(-1, keepdim=True).double() / 240).float())
    assert bool(made.data.float().abs().amax(-1).eq(240).all())


# torch.finfo has 2**-3 for e5m2fnuz too, which has two bits behind its first one.
@pytest.mark.parametrize(("dtype", "eps", "least"), [(E4M3, 2**-3, 2.0**-10), (E5M2, 2**-2, 2.0**-17)])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_scales_and_what_no_scale_can_hold(dtype: torch.dtype, eps: float, least: float, recipe: Any) -> None:
    """No value is off by more than half a step; one code is NaN, none is an infinity, and zero has no sign."""
    x = torch.randn(50, 64) * torch.logspace(-20, 20, 50)[:, None]
    made = scaled(x, recipe, dtype=dtype)
    scale = made.scale.float().repeat_interleave(32, -1) if recipe == "mxfp8" else made.scale
    assert bool((made.data.float().abs() <= LARGEST[dtype]).all())
    assert bool(((made.values() - x).abs() <= eps / 2 * 1.001 * x.abs() + least / 2 * 1.001 * scale).all())
    rows = torch.ones(5, 32)
    rows[0, :2] = torch.tensor([-0.0, -1e-30])
    rows[1, 3], rows[2, 4], rows[3, 5] = float("inf"), float("-inf"), float("nan")
    rows[4] = 0
    made = scaled(rows, recipe, dtype=dtype)
    data = made.data.view(torch.uint8)
    lost = ~rows.isfinite()
    assert bool((data[lost] == 0x80).all())
    assert bool((data[~lost] != 0x80).all())
    assert torch.equal(made.values()[~lost], torch.where(rows == -1e-30, 0.0, rows)[~lost])
    assert bool(made.values()[lost].isnan().all())


def rounded(
    x: Tensor, dtype: torch.dtype, over: tuple[int, ...] | None, *, power_of_two: bool, most: Tensor | None = None
) -> Tensor:
    """What x stands for in this float8, in float64, with a scale for each index of the dims that are not `over`."""
    if most is None:
        most = x.abs().amax(over, keepdim=True) if over is not None else x.abs().amax()
    scale = most.double() / LARGEST[dtype]
    scale = (2.0 ** scale.log2().ceil() if power_of_two else scale).float()
    return (x.float() / scale).to(dtype).double() * scale.double()


def against_float64(group: ProcessGroup, schedule: str, recipe: Any) -> None:
    """y = x @ w.T summed over ranks, dx = dy @ w and dw = dy.T @ x, of what operands stand for."""
    rank, size, M, N, K = group.rank(), group.size(), 18, 21, 48
    features, rows = cut(K, size, "lopsided"), cut(M, size, "lopsided")
    xs = [whole((M, part), torch.float32, 7 + r) for r, part in enumerate(features)]
    ws = [whole((N, part), torch.float32, 70 + r) for r, part in enumerate(features)]
    dy = whole((M, N), torch.float32, 90)
    x, w = (each[rank].clone().requires_grad_() for each in (xs, ws))
    with on_gfx942():
        y = fusedtp.linear_reduce_scatter(x, w, group=group, sizes=rows, schedule=schedule, float8=recipe)
        y.backward(dy.split(rows)[rank])
    casts = casts_of(recipe, float8.FNUZ)
    largest = {name: torch.stack([each.abs().amax() for each in parts]).amax()
               for name, parts in (("x", xs), ("w", ws), ("dy", [dy]))}  # fmt: skip

    def its(made: str, name: str, part: Tensor, contracted: int) -> Tensor:
        cast = casts[made].get(name)
        if cast is None:
            return part.double()
        over, most = (None, largest[name]) if cast.whole else ((contracted,), None)
        return rounded(part, cast.dtype, over, power_of_two=cast.power_of_two, most=most)

    a, b = [its("y", "x", each, 1) for each in xs], [its("y", "w", each, 1) for each in ws]
    gradient, w_for_dx, x_for_dw = its("dx", "dy", dy, 1), its("dx", "w", ws[rank], 0), its("dw", "x", xs[rank], 0)
    # What has travelled with scales of rows is cast again to those of columns.
    for_dw = its("dw", "dy", gradient.float() if casts["dw"] else dy, 0)
    left, right = torch.cat(a, 1), torch.cat(b, 1).t()
    off = allowed(left, right, torch.float32, size)
    reference.check(y, (left @ right).split(rows)[rank], off.split(rows)[rank], f"{recipe}: y")
    assert x.grad is not None
    assert w.grad is not None
    for name, grad, one_of, other in (("dx", x.grad, gradient, w_for_dx), ("dw", w.grad, for_dw.t(), x_for_dw)):
        reference.check(grad, one_of @ other, allowed(one_of, other, torch.float32), f"{recipe}: {name}")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("schedule", "world_size"), [("unfused", 1), ("decomposed", 2), ("unfused", 3)])
def test_recipes_against_float64(pool: RankPool, schedule: str, world_size: int, recipe: str) -> None:
    pool.run(against_float64, schedule, recipe, world_size=world_size)


def layers_and_shardings(group: ProcessGroup) -> None:
    """What layers and `sharded_matmul` send is fnuz too, forward and backward, also in a compiled graph."""
    sent: list[torch.dtype] = []
    run, mesh = Ready.run, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))

    def seen(ready: Ready, operands: Any) -> Any:
        sent.extend(each.data.dtype for each in operands.values() if type(each) is Quantized)
        return run(ready, operands)

    mlp = fusedtp.ParallelMLP(32, 48, activation="swiglu", group=group, schedule="decomposed", float8="tensorwise")
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    x, grads = torch.randn(8, 32), []
    with on_gfx942(), mock.patch.object(Ready, "run", seen):
        for called in (mlp, compiled):
            leaf = x.clone().requires_grad_()
            called(leaf).square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)
        assert set(sent) == {E4M3, E5M2}
        sent.clear()
        fusedtp.sharded_matmul(x, torch.randn(32, 6), "[M_X, K] @ [K, N_X] -> [M, N_X]", mesh=mesh, float8="rowwise")
        assert set(sent) == {E4M3}
    torch.compiler.reset()


def test_layers_and_shardings(pool: RankPool) -> None:
    pool.run(layers_and_shardings, world_size=2, timeout=400)


def refused(group: ProcessGroup) -> None:
    """`fused` here: before anything is sent, scales' numbers too."""
    x, w = torch.randn(4, 8), torch.randn(4, 8)
    with on_gfx942(), mock.patch.object(Ready, "run", side_effect=AssertionError("it is sent")):
        for recipe in RECIPES:
            with pytest.raises(RuntimeError, match=r"cannot multiply torch\.float8_e4m3fnuz here: Triton's interp"):
                fusedtp.all_gather_linear(x, w, group=group, schedule="fused", float8=recipe)  # type: ignore


def test_what_is_refused(pool: RankPool) -> None:
    pool.run(refused, world_size=2)


def test_the_librarys_scaled_matmul_is_ocps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    for dtype, blocks in ((torch.float8_e4m3fn, False), (E4M3, False), (torch.float8_e4m3fn, True), (E4M3, True)):
        a, b = (scaled(torch.randn(32, 64), "mxfp8" if blocks else "rowwise", dtype=dtype) for _ in range(2))
        left, right = Quantized.of(a, torch.bfloat16), Quantized.of(b, torch.bfloat16).t()
        assert local._multiplied_by_library(left, right) == (dtype != E4M3)
    assert (a.scale.dtype == E8M0) == isinstance(a, Scaled)


def test_fp8_is_the_machines() -> None:
    assert arguments.dtypes_here("fp8,bf16", EVERY_DTYPE, "--dtype") == ("float8_e4m3fn", "bfloat16")
    with on_gfx942():
        assert arguments.dtypes_here("fp8,bf16", EVERY_DTYPE, "--dtype") == ("float8_e4m3fnuz", "bfloat16")
    text = str(
        fusedtp.explain(
            "[M_X, K] @ [K, N_X] -> [M, N_X]", sizes={"M": 64, "K": 32, "N": 32}, mesh={"X": 2}, hardware="mi300x",
            dtype=E5M2,
        )
    )  # fmt: skip
    assert "float8_e5m2fnuz, sums in bfloat16" in text
