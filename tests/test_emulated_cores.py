"""The warp-specialised core on compiled code: results against float64, launches that it refuses, faults put into it.

Runs in a process without Triton's interpreter: `nox -s emulate`, and a sample in `test_emulated.py`.
"""

from __future__ import annotations

import contextlib
import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("Triton's interpreter is chosen for this process; nox -s emulate", allow_module_level=True)

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from fusedtp import reference
from fusedtp.epilogue import Epilogue
from fusedtp.kernels import configs, cores
from fusedtp.kernels.configs import SHAPES, Config, compiled_config
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.matmul import matmul

from .harness import spread
from .virtual_gpu import cases, float8, giveups, mutants
from .virtual_gpu.driver import EmulatedDriver, device
from .virtual_gpu.machine import Failed, Schedule
from .virtual_gpu.shapes import Shape, laid_out, launches_of

pytestmark = pytest.mark.emulated

KERNEL, GATHER, SCATTER = (f"_warp_specialised_{name}_kernel" for name in ("matmul", "gather", "scatter"))
# Schedules for each case; the ordinary tests run a sample.
FEW = os.environ.get("FUSEDTP_EMULATION") == "few"
SEEDS = 1 if FEW else {"all": 8, "write": 8}.get(os.environ.get("FUSEDTP_EMULATION", ""), 3)


@pytest.fixture
def gpu() -> Iterator[EmulatedDriver]:
    with device(90) as found:
        yield found


def config(shape: str = "many", itemsize: int = 2) -> Config:
    return replace(compiled_config("sm_90", itemsize, shape), core=cores.WARP_SPECIALISED, programs=3)


def operands(M: int, N: int, K: int, dtype: torch.dtype, seed: int, layouts: tuple[str, str]) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=random).to(dtype), torch.randn(K, N, generator=random).to(dtype)
    return laid_out(a, layouts[0]), laid_out(b, layouts[1])


def run(gpu: EmulatedDriver, seed: int) -> set[str]:
    """Run what was launched, under a schedule of this seed, and return the names of all kernels so far."""
    how = Schedule(seed, residents=(64, 1, 2)[seed % 3], stale=(0.5, 1.0)[seed % 2])
    assert gpu.machine.run(how).executed
    return {program.name for program in gpu.programs.values()}


LAYOUTS = ("rows", "columns"), ("columns", "rows"), ("rows", "rows"), ("columns", "columns")


@pytest.mark.parametrize(
    ("M", "N", "K"),
    # Whole tiles; the last row, column and block of K inside a tile; less than a tile; a long and a short contraction.
    [(256, 512, 256), (200, 520, 72), (136, 264, 1000), (16, 1032, 64), (600, 256, 8), (8, 8, 8)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul(gpu: EmulatedDriver, M: int, N: int, K: int, dtype: torch.dtype) -> None:
    # Of a sample, each size has two layouts.
    for seed, layouts in list(enumerate(LAYOUTS))[N // 8 % 2 if FEW else 0 :: 2 if FEW else 1]:
        a, b = operands(M, N, K, dtype, seed, layouts)
        c = torch.full((M, N), 7.0, dtype=dtype)
        matmul(a, b, c, epilogue_of(()), config=config(SHAPES[seed % 3]))
        assert run(gpu, seed) == {KERNEL}
        reference.check(c, reference.matmul(a, b), reference.bound(a, b, dtype), f"{M} x {N} x {K}, {layouts}")


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_epilogues(gpu: EmulatedDriver, activation: str | None) -> None:
    """Tiles with steps, and a C without a descriptor, are stored by pointers."""
    (a, b), steps = operands(200, 520, 72, torch.bfloat16, 1, LAYOUTS[0]), torch.randn(201, 520)
    bias, residual = steps[0].bfloat16(), steps[1:].bfloat16()
    function = torch.nn.functional.__dict__[activation] if activation else lambda y: y
    for epilogue in (Epilogue(bias=bias, residual=residual, activation=activation), None):
        c = (
            torch.full((520, 200), 7.0, dtype=torch.bfloat16).t()
            if epilogue is None
            else torch.empty(200, 520).bfloat16()
        )
        given = (epilogue,) if epilogue else ()
        matmul(a, b, c, epilogue_of(given, [c]), config=config())
        assert run(gpu, 1) == {KERNEL}
        exact, allowed = reference.matmul(a, b), reference.bound(a, b, torch.bfloat16)
        if epilogue is not None:
            exact = function(exact + bias.double() + residual.double())
            # Slopes of these functions are at most 1.13; addends are rounded with the sum.
            allowed = 1.13 * allowed + 2.0**-7 * (bias.abs() + residual.abs()).double()
        reference.check(c, exact, allowed, f"{activation}, {epilogue is not None}")


def test_a_call_like_an_earlier_one(gpu: EmulatedDriver) -> None:
    """A prepared launch has descriptors of its own operands."""
    for seed in range(3):
        a, b = operands(136, 264, 128, torch.bfloat16, seed, LAYOUTS[0])
        c = torch.empty(136, 264, dtype=torch.bfloat16)
        matmul(a, b, c, epilogue_of(()), config=config())
        assert run(gpu, seed) == {KERNEL}
        reference.check(c, reference.matmul(a, b), reference.bound(a, b, torch.bfloat16), f"call {seed}")
    assert gpu.num_prepared == 2


REFUSED = {
    "strided": ((200, 264, 72), torch.bfloat16, {"a": "strided"}, "reads by descriptors alone"),
    "odd rows": ((200, 264, 70), torch.bfloat16, {}, "reads by descriptors alone"),
    "float32": ((96, 80, 64), torch.float32, {}, "descriptors alone"),
    "warps": ((200, 264, 64), torch.bfloat16, {"num_warps": 4}, "a warpgroup of four warps has 64 rows"),
    "two terms": ((200, 264, 64), torch.bfloat16, {"terms": 2}, "adds one product, not 2"),
    "leaves": ((64, 64, 128), torch.bfloat16, {"leaves": 2}, "adds no products in leaves"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_launch_that_is_not_served_has_the_loop(gpu: EmulatedDriver, what: str) -> None:
    (M, N, K), dtype, options, said = REFUSED[what]
    terms = [operands(M, N, K, dtype, seed, (str(options.get("a", "rows")), "columns"))
             for seed in range(int(options.get("terms", 1)))]  # fmt: skip
    c = torch.empty(M, N, dtype=dtype)
    tile = replace(config(itemsize=dtype.itemsize), num_warps=int(options.get("num_warps", 8)))
    launch = partial(
        matmul, *terms[0], c, epilogue_of(()), config=tile, more=terms[1:], leaves=int(options.get("leaves", 0))
    )
    with pytest.warns(UserWarning, match=f"core is not used: .*{said}"):
        launch()
    # A second time too: it is an error where warnings are errors.
    with pytest.raises(UserWarning, match=said):
        launch()
    assert run(gpu, 1) == {"_matmul_kernel"}
    exact = sum(reference.matmul(a, b) for a, b in terms)
    reference.check(c, exact, sum(reference.bound(a, b, dtype) for a, b in terms), what)


@pytest.fixture
def ops(gpu: EmulatedDriver) -> Iterator[EmulatedDriver]:
    """Let every op of 16 bits or of float8 on sm_90 choose this core."""
    with contextlib.ExitStack() as stack:
        for table in (configs.TABLE, configs._FLOAT8):
            rows = {shape: replace(each, core=cores.WARP_SPECIALISED) for shape, each in table["sm_90"].items()}
            stack.enter_context(mock.patch.dict(table, {"sm_90": rows}))
        yield gpu


def hostile(seed: int) -> Schedule:
    return Schedule(
        seed, stale=(0.5, 1.0, 0.8)[seed % 3], drain=(0.05, 0.005, 0.02, 0.3)[seed % 4], tick=0.001,
        residents=(64, 1, 3, 2)[seed % 4],
    )  # fmt: skip


# Uneven shards of rows end inside a tile; shards of the contraction have whole blocks of K.
UNEVEN, WHOLE = Shape(176, 272, 144, "uneven"), Shape(176, 272, 384, "even")
# Five or more blocks of K, an odd number of them and the last in part, or shards of whole blocks, in float8.
UNEVEN8, WHOLE8 = Shape(176, 272, 560, "uneven"), Shape(176, 272, 768, "even")
CASES = {
    "gather rows": (UNEVEN, GATHER), "gather rows split": (UNEVEN, GATHER), "gather rows joined": (UNEVEN, GATHER),
    "gather rows transposed": (UNEVEN, GATHER), "gather rows and keep": (UNEVEN, GATHER),
    "gather contraction": (WHOLE, GATHER), "gather contraction split": (WHOLE, GATHER),
    "scatter rows": (UNEVEN, SCATTER), "scatter columns": (UNEVEN, SCATTER), "matmul two_shot split": (UNEVEN, SCATTER),
}  # fmt: skip
CASES8 = {
    "gather rows": (UNEVEN8, GATHER), "gather rows split": (UNEVEN8, GATHER), "gather rows joined": (UNEVEN8, GATHER),
    "gather rows transposed": (UNEVEN8, GATHER), "gather rows and keep": (UNEVEN8, GATHER),
    "gather rows several": (UNEVEN8, GATHER), "gather rows swiglu": (UNEVEN8, GATHER),
    "gather rows swiglu kept": (UNEVEN8, GATHER),
    "gather contraction": (WHOLE8, GATHER), "gather contraction split": (WHOLE8, GATHER),
    "scatter rows": (UNEVEN8, SCATTER), "scatter columns": (UNEVEN8, SCATTER),
}  # fmt: skip


def dtypes_of(op: str) -> list[str]:
    return ["bfloat16", "float16"] * (op in CASES) + ["float8_e4m3fn", "float8_e5m2"] * (op in CASES8)


# Every op with every dtype; of a sample, with one dtype in turn.
OPS = [
    (op, dtype) for i, op in enumerate(dict.fromkeys([*CASES, *CASES8]))
    for at, dtype in enumerate(dtypes_of(op)) if not FEW or at == i % len(dtypes_of(op))
]  # fmt: skip


@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_ops(ops: EmulatedDriver, op: str, dtype: str) -> None:
    """Two epochs on two to four ranks, under schedules that let each role run late, with and without an epilogue."""
    shape, kernel = (CASES if dtype in cases.DTYPES else CASES8)[op]
    for seed in range(SEEDS):
        world_size = (2, 3, 4)[seed % 3] if op != "gather rows joined" or shape.split == "even" else 2
        how = replace(shape, bias=seed % 2 == 0)
        if world_size == 4 and shape.split == "even":
            how = replace(how, K=shape.K * 4 // 3)
        assert cases.run(ops, [op, op], world_size, (cases.DTYPES | cases.FLOAT8)[dtype], how, hostile(seed)).executed
    assert kernel in {program.name for program in ops.programs.values()}
    assert not {"_gather_matmul_kernel", "_matmul_scatter_kernel"} & {each.name for each in ops.programs.values()}
    # ptxas ignores a limit above 255.
    assert not any(".maxnreg 256" in text for text in ops.programs)


@pytest.mark.parametrize(
    ("op", "dtype"), spread(["gather rows", "gather rows split"], ["bfloat16", "float8_e4m3fn"], large=not FEW)
)
def test_empty_shards(ops: EmulatedDriver, op: str, dtype: str) -> None:
    shape = replace(UNEVEN8 if dtype in cases.FLOAT8 else UNEVEN, split="empty")
    for seed in range(SEEDS):
        assert cases.run(ops, [op], 3, (cases.DTYPES | cases.FLOAT8)[dtype], shape, hostile(seed)).executed
    assert CASES[op][1] in {program.name for program in ops.programs.values()}


@pytest.mark.parametrize("op", ["gather rows", "scatter rows"])
def test_float32_results_of_float8(ops: EmulatedDriver, op: str) -> None:
    """A gather stores float32 by pointers; tiles of float32 that travel have the loop."""
    refused = op == "scatter rows"
    warned = pytest.warns(UserWarning, match="it sends tiles of 16 bits, not float32")
    with mock.patch.object(float8, "OUT", torch.float32), warned if refused else contextlib.nullcontext():
        assert cases.run(ops, [op], 2, torch.float8_e4m3fn, UNEVEN8, hostile(0)).executed
    found = {program.name for program in ops.programs.values()}
    assert ("_matmul_scatter_kernel" if refused else GATHER) in found


@pytest.mark.parametrize("op", ["gather rows", "gather rows split", "gather contraction", "scatter rows"])
def test_a_missing_rank_is_reported_and_its_rows_are_nan(ops: EmulatedDriver, op: str) -> None:
    """The warp that loads gives up, and tells the warps that store."""
    shape, gave_up = CASES[op][0], 0
    for seed in range(2, 3 + SEEDS):
        how = Schedule(seed, drain=(0.02, 0.2)[seed % 2])
        giveups.missing(ops, op, 3, torch.bfloat16, shape, how)
        gave_up += giveups.late(ops, op, 3, torch.bfloat16, shape, how, seed - 1)
        giveups.stopped(ops, op, 3, torch.bfloat16, shape, how)
    # A scatter waits in the sum behind it.
    assert gave_up or op == "scatter rows"
    assert CASES[op][1] in {program.name for program in ops.programs.values()}


# Faults, each put into every place of a kernel that the pattern matches and the functions contain, one place at a time.
NOTE = mutants.Kind("", r"(st\.shared(?:::cta)?\.b32\s+\[ %r\d+ \+ )(\d+) ",
                    lambda m: f"{m[1]}{int(m[2]) + 4} ", inside="^_load_tiles")  # fmt: skip
# The note that an op does not read.
UNREAD = {"gather rows": "ring.chunks", "scatter rows": "ring.packed"}
FAULTS = {
    "no proxy fence behind the wait for a peer": (
        "gather rows", mutants.Kind("", r"fence\.proxy\.async\.global;", ";", inside="before_descriptor")),
    "no proxy fence before TMA stores": (
        "gather rows", mutants.Kind("", r"fence\.proxy\.async\.shared::cta;", ";", inside="_store_half")),
    "no proxy fence before the first TMA load": (
        "gather rows", mutants.Kind("", r"fence\.proxy\.async\.shared::cta;", ";", inside="^_run")),
    "phase of a full stage": (
        "gather rows", mutants.Kind("", r"(try_wait\.parity[^;]*\]), %r\d+;", r"\1, 1;", inside="^_product")),
    "phase of an empty stage": (
        "gather rows", mutants.Kind("", r"(try_wait\.parity[^;]*\]), %r\d+;", r"\1, 1;", inside="^_load_tiles")),
    "stage reused before it is multiplied": (
        "gather rows", mutants.Kind("", r"@!complete bra\.uni waitLoop;", "", inside="^_load_tiles")),
    "stage given back while it is multiplied": (
        "gather rows", mutants.Kind("", r"(wgmma\.wait_group\.sync\.aligned )1;", r"\g<1>2;", inside="_multiply")),
    "another stage given back": (
        "gather rows", mutants.Kind("", r"(mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+)\]", r"\1+8]")),
    "note of another stage": ("gather rows", NOTE),
    "note of another stage, for an owner": ("scatter rows", NOTE),
    "tile overwritten while TMA reads it": (
        "gather rows", mutants.Kind("", r"cp\.async\.bulk\.wait_group\.read\s+0;", ";", inside="_store_half")),
    "no barrier of a role": ("gather rows", mutants.Kind("", r"bar\.sync\s+0, 256;", ";", inside="^_store_half")),
    "signal before the store has ended": (
        "scatter rows", mutants.Kind("", r"(cp\.async\.bulk\.wait_group) 0;", r"\1.read 0;",
                                     inside="^_stored < _multiply_tiles")),
    "signal that releases nothing": (
        "scatter rows", mutants.Kind("", r"(sys)\.release(\.exch)", r"\1.relaxed\2",
                                     inside="^_raise_to_all < _warp_specialised_scatter")),
    "float8: scales of another stage": (
        "gather rows", mutants.Kind("", r"(st\.shared\.v4\.b32 \[ %r\d+ \+ )0 ", r"\g<1>512 ",
                                    inside="^_load_tiles")),
    "float8: scales that another lane has not stored": (
        # Not the one before each load by TMA.
        "gather rows", mutants.Kind("", r"bar\.warp\.sync\s+-1;(?!\s*elect)", ";", inside="^_load_tiles")),
    "float8: products added before they are there": (
        "gather rows", mutants.Kind("", r"(wgmma\.wait_group\.sync\.aligned )(\d);",
                                    lambda m: f"{m[1]}{int(m[2]) + 1};", inside="^_add_scaled")),
    "float8: stage reused while it is multiplied": (
        "gather rows", mutants.Kind("", r"@!complete bra\.uni waitLoop;", "", inside="^_load_tiles")),
    "float8: scales of another lane behind the rows' signal": (
        "gather rows", mutants.Kind("", r"bar\.warp\.sync\s+-1;", ";", inside="^raise_signal < _push_pieces")),
    "push: signal before the store has ended": (
        "gather rows", mutants.Kind("", r"(cp\.async\.bulk\.wait_group) 0;", r"\1.read 0;", inside="^_stored < _push")),
    "push: signal that releases nothing": (
        "gather rows", mutants.Kind("", r"(sys)\.release(\.exch)", r"\1.relaxed\2", inside="raise_signal < _push")),
    "push: box loaded while TMA stores it": (
        "gather rows", mutants.Kind("", r"cp\.async\.bulk\.wait_group\.read\s+1;", ";", inside="^_push_pieces")),
    "push: box stored before it is loaded": (
        "gather rows", mutants.Kind("", r"@!complete bra\.uni waitLoop;", "", inside="^_push_pieces")),
    "push: phase of a box": (
        "gather rows", mutants.Kind("", r"(try_wait\.parity[^;]*\]), %r\d+;", r"\1, 0;", inside="^_push_pieces")),
    "push: pieces are counted on": (
        "gather rows", mutants.Kind("", r"@%p\d+ st\.global\.b32[^;]*;", ";", inside="^_push_pieces")),
    "push: the other half of an arena": (
        "gather rows", mutants.Kind("", r"(tensor\.3d\.global[^{]*\{[^,]*,[^,]*, )%r\d+\}", r"\g<1>1}",
                                    inside="^_push_pieces")),
}  # fmt: skip


# A sample has a fault of the loads and one of the pushes.
@pytest.mark.parametrize("fault", list(FAULTS)[8::16] if FEW else FAULTS)
def test_faults_are_found(ops: EmulatedDriver, fault: str) -> None:
    op, kind = FAULTS[fault]
    texts: dict[str, str] = {}
    dtype = torch.float8_e4m3fn if fault.startswith("float8") else torch.bfloat16
    # Several tiles for a program, with more blocks of K than there are stages, or with one.
    shapes = [Shape(176, 528, K * 2 // dtype.itemsize, "even", bias=False) for K in (448, 64)]

    def run_with(change: Callable[[str, str], str | None], seed: int) -> None:
        ops.rewrite = lambda name, text: change(name, text) or text
        try:
            # One rank comes late, so that the other waits for its last tile; turns are short.
            late = {}
            if seed % 4 > 1:
                late = {"held": seed // 4 % 2, "held_until": 40, "held_after": 1, "tick": 0.01, "quantum": 3}
            how = replace(hostile(seed), idle_limit=300_000, **late)
            cases.run(ops, [op] * 2, 2, dtype, shapes[seed % 2], how, programs=1)
        finally:
            ops.rewrite = None
            ops.machine.waiting.clear()

    # Without a fault every kind of schedule is right.
    for seed in range(4):
        run_with(texts.setdefault, seed)
    lines = Path(cores.__file__).with_name("warp_specialised.py").read_text().splitlines()
    found = [each for name, text in texts.items() if "warp_specialised" in name
             for each in mutants.mutants(name, text, (kind,))]  # fmt: skip
    at = {each: int(re.findall(r":(\d+)", each.where)[0]) - 1 for each in found}
    planted = [each for each in found if kind is not NOTE or UNREAD[op] not in lines[at[each]]]
    assert planted
    for each in planted:
        said = ""
        for seed in range(16):
            try:
                run_with(each.applied, seed)
            except (Failed, AssertionError) as error:
                said = str(error)
                break
        assert said, each


@pytest.mark.parametrize(("count", "activation"), [(2, ""), (3, ""), (2, "swiglu")])
def test_several_weights(ops: EmulatedDriver, count: int, activation: str) -> None:
    """Weights side by side at one gather, each with its bias; a gate and up have one result, stored by pointers."""
    widths = (264, 264, 48)[:count] if activation else (264, 96, 48)[:count]
    for seed in range(SEEDS):
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(176, 144, generator=random).bfloat16()
        ws = [torch.randn(144, n, generator=random).bfloat16().t().contiguous().t() / 8 for n in widths]
        sizes = (96, 80)
        with cases.virtual_ranks(2) as ranks:
            phases = [
                launches_of(
                    "all_gather_matmul", each, x.split(sizes)[each.rank].clone(), ws[0], None, None,
                    *(operand for w in ws[1:] for operand in (w, None)), sizes=sizes, dim=0, activation=activation,
                ) for each in ranks
            ]  # fmt: skip
            outs = cases.issue(ops, ranks, phases)
            ops.run(ranks, hostile(seed))
            products = [reference.matmul(x, w) for w in ws]
            for each in ranks:
                each.check()
                found = list(outs[each.rank]) if isinstance(outs[each.rank], tuple) else [outs[each.rank]]
                if activation:
                    exact = [torch.nn.functional.silu(products[0]) * products[1]]
                    bounds = [reference.bound(x, ws[0], x.dtype) * 1.1 * products[1].abs()]
                    # The gate is rounded before its activation.
                    bounds[0] += (
                        reference.bound(x, ws[1], x.dtype) * products[0].abs() + 2.0**-7 * exact[0].abs() + 1e-3
                    )
                else:
                    exact, bounds = products, [reference.bound(x, w, x.dtype) for w in ws]
                for got, ref, allowed in zip(found, exact, bounds, strict=True):
                    reference.check(got, ref, allowed, f"{count} weights, {activation}, rank {each.rank}")
    assert {program.name for program in ops.programs.values()} == {GATHER}
