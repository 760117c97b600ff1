"""The fused ops on compiled code, executed by a machine with weak memory and hostile schedules; the code broken on
purpose.

Runs in a process without Triton's interpreter: `nox -s emulate` for all of it, with FUSEDTP_EMULATION=write to write
docs/emulation.md; a sample in `test_emulated.py`.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("Triton's interpreter is chosen for this process; nox -s emulate", allow_module_level=True)

from .harness import spread
from .virtual_gpu import evidence, float8, giveups, layers, mutants, report, trees
from .virtual_gpu.cases import DTYPES, FLOAT8, in_phases, issue, problem, run, small, virtual_ranks
from .virtual_gpu.driver import device
from .virtual_gpu.machine import Schedule

# A torch with CUDA looks for GPUs when a backward pass begins; the emulated driver has none for it.
pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore:CUDA initialization:UserWarning")]

ALL = os.environ.get("FUSEDTP_EMULATION") in ("all", "write")
# Every fourth of each sample, under one schedule, for the ordinary tests.
FEW = os.environ.get("FUSEDTP_EMULATION") == "few"
EVERY = 4 if FEW else 1
whole = pytest.mark.skipif(not ALL, reason="takes minutes; nox -s emulate")
# A sample of `test_all`: every kernel on some target, every dtype on some kernel. float8 on sm_90 only, as sm_80 has no
# matrix instruction for it.
SPREAD = (
    (80, "bfloat16", "gather rows"), (90, "bfloat16", "gather rows"), (90, "float16", "matmul two_shot"),
    (80, "float32", "all_reduce ring"), (80, "bfloat16", "matmul two_shot in parts"),
    (90, "float16", "matmul one_shot in parts"), (90, "bfloat16", "matmul two_shot switch"),
    (90, "float16", "all_reduce two_shot switch"), (80, "float16", "gather rows of five"),
    (90, "bfloat16", "gather contraction of five"), (90, "float16", "scatter rows of five"),
    (90, "float8_e4m3fn", "gather rows"), (90, "float8_e5m2", "gather contraction"),
    (90, "float8_e4m3fn", "gather rows swiglu"), (90, "float8_e5m2", "scatter several"),
    (90, "float8_e4m3fn", "matmul one_shot"), (90, "mxfp8", "gather contraction"),
)  # fmt: skip
TREES_ALL = list(itertools.product(trees.OPS, DTYPES, evidence.TARGETS))
TREES = TREES_ALL[:: 19 * EVERY]


@pytest.mark.parametrize(("target", "dtype", "op"), SPREAD[::EVERY], ids=str)
def test_right_under_hostile_schedules(target: int, dtype: str, op: str) -> None:
    """Shards of multiples of 16 on two ranks; for float8 also odd and empty shards, on three ranks."""
    of = (DTYPES | FLOAT8)[dtype]
    with device(target) as found:
        for seed in (1,) if FEW else range(2):
            how = Schedule(seed, drain=(0.02, 0.2)[seed % 2], residents=(64, 1)[seed % 2], tick=0.001)
            odd = seed == 1 and dtype in FLOAT8
            shape = small(target, of, "empty" if odd else "uneven")
            assert run(found, [op, op], 3 if odd else 2, of, shape, how).executed
        giveups.missing(found, op, 2, of, small(target, of), Schedule(1))


@pytest.mark.parametrize(("name", "dtype"), spread(layers.FUNCTIONS, list(FLOAT8), large=ALL)[::EVERY])
def test_functions_of_float8(name: str, dtype: str) -> None:
    with device(90) as found:
        for seed in (1,) if FEW else range(6 if ALL else 2):
            world_size = 2 + seed % 2
            assert layers.check_scaled(found, name, world_size, FLOAT8[dtype], seed) == world_size


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"][::EVERY])
def test_what_is_not_finite_in_blocks(dtype: str) -> None:
    with device(90) as found:
        layers.check_not_finite(found, FLOAT8[dtype])


@pytest.mark.parametrize("op", ["gather rows", "gather contraction"][::EVERY])
def test_float8_rows_that_the_host_copies(op: str) -> None:
    dtype = FLOAT8["float8_e4m3fn"]
    with device(90) as found:
        assert in_phases(found, op, 2, dtype, small(90, dtype), Schedule(1), "copy").executed


# A sample of the mutants of `test_all`.
MUTANTS = [
    *((target, "bfloat16", "gather rows", "release at gpu scope") for target in evidence.TARGETS),
    *((target, "bfloat16", "gather rows", "acquire made relaxed") for target in evidence.TARGETS),
    (90, "bfloat16", "scatter rows", "arrival without release"),
    (80, "bfloat16", "scatter rows", "arrival without acquire"),
    (90, "bfloat16", "gather rows", "no proxy fence, global"),
    (80, "bfloat16", "gather rows", "cp.async waited for too late"),
    (90, "bfloat16", "matmul two_shot switch", "no proxy fence, aliases"),
    (90, "bfloat16", "gather rows", "mbarrier not waited for"),
    (80, "bfloat16", "gather rows", "operand of ldmatrix"),
    *((90, "float8_e4m3fn", "gather rows", kind.name) for kind in mutants.SCALES),
    *((90, "mxfp8", "gather rows", kind.name) for kind in mutants.BLOCK_SCALES),
]


@pytest.mark.parametrize(("target", "dtype", "op", "kind"), MUTANTS[::EVERY])
def test_mutants_are_found(target: int, dtype: str, op: str, kind: str) -> None:
    of = (DTYPES | FLOAT8)[dtype]
    with device(target) as found:
        planted = [
            each for name, text in mutants.sources(found, op, of).items()
            for each in mutants.mutants(name, text, mutants.kinds_of(of))
            if each.kind == kind and not mutants.reason(each)
        ]  # fmt: skip
        assert planted
        assert mutants.find(found, op, of, planted[0], 8)


@pytest.mark.parametrize(("name", "target"), spread(layers.FUNCTIONS, evidence.TARGETS, large=ALL)[::EVERY])
def test_forward_and_every_gradient(name: str, target: int) -> None:
    """The functions of layers, between torch's own operations: threads of virtual ranks meet at every fused op."""
    with device(target) as found:
        assert layers.check(found, name, 2, DTYPES["bfloat16"], 0) == ["y", "dx", "dw"] * 2


@pytest.mark.parametrize(("op", "dtype", "target"), TREES_ALL if ALL else TREES)
def test_sums_in_leaves_have_the_same_bits_on_all_ranks(op: str, dtype: str, target: int) -> None:
    with device(target) as found:
        for seed in range(3 if ALL else 2):
            trees.check(found, op, DTYPES[dtype], (2, 4, 8) if ALL or seed == 0 else (4,), seed)


# A float8 matrix instruction takes operands contiguous along the contraction; others are transposed byte by byte.
FLOAT8_LAYOUTS = ("columns", "rows"), ("strided", "strided")
LAYOUTS = ("rows", "rows"), ("columns", "columns"), ("strided", "columns"), ("rows", "strided")


@pytest.mark.parametrize(
    ("target", "dtype", "layouts", "ops"),
    [
        *((each, "bfloat16", LAYOUTS, ("gather rows", "scatter rows")) for each in (evidence.TARGETS if ALL else [90])),
        (90, "float8_e4m3fn", FLOAT8_LAYOUTS, float8.ONE_OF_EACH_KERNEL[: 4 if ALL else 1]),
    ],
)
def test_operands_in_every_layout(
    target: int, dtype: str, layouts: tuple[tuple[str, str], ...], ops: tuple[str, ...]
) -> None:
    """Operands are loaded by descriptors of rows, by descriptors of columns, and by pointers."""
    of = (DTYPES | FLOAT8)[dtype]
    with device(target) as found:
        for (a, b), op in spread(layouts, ops, large=ALL):
            run(found, [op], 2, of, replace(small(target, of), a=a, b=b), Schedule(layouts.index((a, b))))


def test_what_is_executed_does_not_depend_on_which_rank_launched_first() -> None:
    """Threads of virtual ranks launch in the order in which they wake."""
    dtype, shape, ran = torch.bfloat16, small(80, torch.bfloat16), []
    with device(80) as found:
        for step in (1, -1):
            with virtual_ranks(3) as ranks:
                start, _, _ = problem("gather rows", 3, dtype, 1, shape)
                order = ranks[::step]
                issue(found, order, [start(ws, ws.rank) for ws in order])
                ran.append(found.run(ranks, Schedule(1)))
                for ws in ranks:
                    ws.check()
    assert ran[0] == ran[1]


def test_a_kernel_is_the_same_wherever_its_sources_lie() -> None:
    """Copies of the package share Triton's cache, so counts by path would depend on earlier runs."""
    with device(80) as found:
        run(found, ["all_gather direct"], 2, torch.bfloat16, small(80, torch.bfloat16), Schedule(1))
        texts = list(found.programs)
    assert texts
    for text in texts:
        folder = re.findall(r'^\t\.file\t1 "(.*)/', text, re.MULTILINE)[0]
        elsewhere = text.replace(folder, "/elsewhere")
        assert elsewhere != text
        assert evidence.code_of(elsewhere) == evidence.code_of(text)
        assert evidence.code_of(text.replace("\tret;", "\ttrap;")) != evidence.code_of(text)


@whole
def test_all() -> None:
    # The longest first, so that all processors end at about the same time.
    units = [*evidence.layer_units(), *evidence.mutated_units(32), *evidence.units()]
    done = evidence.in_processes(units)
    assert not [each.failure for each in done if each.failure]
    assert {each.unit for each in done} == set(units)
    assert all(each.runs >= evidence.SEEDS for each in done if not each.unit.mutated)
    # Waits that timed out, and late ranks that were waited for.
    assert sum(each.gave_up for each in done) > 20
    unexecuted = {key: (ran, total) for key, (_, total, ran) in evidence.shares(done).items() if ran < 0.95 * total}
    assert not unexecuted
    planted = report.planted(done)
    missed = [str(mutant) for mutant, how, _ in planted if not how and not mutants.reason(mutant)]
    assert not missed
    found = [mutant for mutant, how, _ in planted if how]
    assert len(found) >= 60
    # Only some mutants may have a reason.
    assert len(found) >= 0.45 * len(planted)
    # Every kind is found somewhere, except kinds whose every place has a reason.
    never = {mutant.kind for mutant, _, _ in planted} - {mutant.kind for mutant in found}
    assert never <= {"arrival without release", "arrival without acquire"}
    report.compare_or_write(done)
