"""The soak with 150 calls; planted faults are found: wrong results, growth, open files, an epoch that does not wrap.

`nox -s soak` makes ten thousand calls.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusedtp
from fusedtp.bench.ranks import RankPool

from .command import module
from .soak.endurance import NOISE_BYTES, Sample, check_flat, check_wrapped, delay, growth
from .soak.layouts import LAYOUTS
from .soak.mixed import DTYPES, OPS, Operands, draw
from .soak.runs import soak

CALLS = [draw(random.Random(f"here/{number}"), 3) for number in range(200)]


def give_back(group: torch.distributed.ProcessGroup) -> None:
    fusedtp.destroy()
    fusedtp.set_timeout(110)


def test_150_mixed_calls(pool: RankPool) -> None:
    said: list[str] = []
    by_rank = soak(pool, 150, seed=20, say=said.append)
    pool.run(give_back)
    assert len(by_rank) == 4
    assert said[-1].startswith("   150 of 150 calls right")
    check_wrapped(by_rank)
    check_flat(by_rank)


def test_every_kind_of_call_is_drawn() -> None:
    assert {(call.op, call.schedule) for call in CALLS} == {(op, schedule) for op in OPS for schedule in DTYPES}
    assert {(call.schedule, call.dtype) for call in CALLS} == {
        (schedule, dtype) for schedule, dtypes in DTYPES.items() for dtype in dtypes
    }
    sizes = [each for call in CALLS for each in call.sizes]
    assert any(0 in each and sum(each) for each in sizes)
    assert any(not sum(each) for each in sizes)
    assert any(len(set(each)) == 3 for each in sizes)
    assert {call.algorithm for call in CALLS} == {"auto", "direct", "ring", "one_shot", "two_shot"}
    assert {(call.bias, call.backward) for call in CALLS} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {each for call in CALLS for each in call.layouts} == set(LAYOUTS)
    assert {(call.exact, call.residual) for call in CALLS} == {(a, b) for a in (False, True) for b in (False, True)}
    late = [delay(1, number, 0) for number in range(200)]
    assert late != [delay(1, number, 1) for number in range(200)]
    assert 0 in late
    assert max(late) < 0.006


def test_a_wrong_element_is_found_in_any_result() -> None:
    for call in CALLS:
        operands = Operands(call, 1)
        # y alone, or y and the gradient of each operand.
        names = [each.name for each in operands.expected]
        results = [
            (each.whole[0] if each.name == "db" else each.whole).to(operands.dtype) for each in operands.expected
        ]
        operands.check(results)
        for index, out in enumerate(results):
            if out.numel():
                wrong = out.clone()
                wrong[(-1,) * wrong.ndim] += 30
                with pytest.raises(AssertionError, match=f"{names[index]} of Call.* on rank 1: 1 of {out.numel()}"):
                    operands.check([*results[:index], wrong, *results[index + 1 :]])


def samples(resident: list[float], num_fds: list[int]) -> list[Sample]:
    return [Sample(int(mib * 2**20), fds, 1) for mib, fds in zip(resident, num_fds, strict=True)]


def test_growth_is_told_from_what_is_filled_once() -> None:
    # Caches fill in the first quarter; one sample is a peak.
    resident = [300 + min(number, 10) * 5 + (80 if number == 35 else 0) for number in range(40)]
    flat = samples(resident, [30] * 40)
    check_flat([flat])
    assert growth(flat) == (0, 0)
    noise = NOISE_BYTES / 2**20
    with pytest.raises(AssertionError, match=r"rank 1 has grown by .* MiB"):
        check_flat([flat, samples([300 + number * noise / 19 for number in range(40)], [30] * 40)])
    with pytest.raises(AssertionError, match=r"rank 0 has \+1 descriptors"):
        check_flat([samples([300] * 40, [30] * 20 + [31] * 20)])


def test_epochs_must_wrap_alike() -> None:
    wrapped = [Sample(0, 0, epoch) for epoch in (2**31 - 2, -(2**31), -(2**31) + 2)]
    check_wrapped([wrapped, wrapped])
    with pytest.raises(AssertionError, match="rank 0 did not wrap"):
        check_wrapped([wrapped[:1]])
    with pytest.raises(AssertionError, match="rank 1 has other epochs"):
        check_wrapped([wrapped, [*wrapped[:2], replace(wrapped[2], epoch=-(2**31) + 1)]])


def test_the_command_is_a_package_of_its_own() -> None:
    # As `nox -s soak` runs it: the checkout's other folders are not importable.
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    code, told = module("soak", "--calls", "2", "--world-size", "2", folder=Path("/"), env=env)
    assert code == 0, told
    assert "2 of 2 calls right" in told
