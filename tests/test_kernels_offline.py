"""Every kernel compiled for every target without a GPU, and what the compiler made of it: resources, instructions,
order.

Runs in a process of its own, without the interpreter (`nox -s kernels`): the interpreter is chosen when kernels are
imported. `compiled.checks` says what must hold, `compiled.mutants` breaks it; FUSEDTP_KERNELS=write writes what was
found to results/kernels/offline.csv and to the table of docs/kernels.md, which are compared otherwise.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusedtp.kernels import choices
from fusedtp.kernels.configs import compiled_config

from .compiled import checks, table
from .compiled.build import build, build_all, examine
from .compiled.cases import TARGETS, VARIANTS, Case, cases, loose_cases, plain
from .compiled.launched import launched
from .compiled.mutants import MUTANTS, Mutant, found, load

pytestmark = pytest.mark.offline

E4M3, E5M2 = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
CASES, LOOSE = cases(), loose_cases()


@pytest.fixture(scope="module", autouse=True)
def compiled_beforehand(request: pytest.FixtureRequest) -> None:
    """By as many processes as there are cores, what the chosen tests ask for."""
    given = [getattr(item, "callspec", None) for item in request.session.items if item.module is request.module]
    wanted = [spec.params["case"] for spec in given if spec is not None and "case" in spec.params]
    wanted += [plain(case) for case in wanted if not case.loose]
    if any(item.name == "test_what_was_found_is_what_is_written" for item in request.session.items):
        wanted += [*CASES, *LOOSE]
    build_all(wanted)


def test_kernels_are_compiled_not_interpreted() -> None:
    from fusedtp.kernels import INTERPRETED

    assert os.environ.get("TRITON_INTERPRET") == "0"
    assert not INTERPRETED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled(case: Case) -> None:
    built = build(case)
    for check in checks.CHECKS:
        check(built)
    if checks.compares(built):
        checks.against_plain(built, build(plain(case)))


@pytest.mark.parametrize("case", LOOSE, ids=str)
def test_compiled_for_any_lengths(case: Case) -> None:
    built = build(case)
    for check in checks.LOOSE_CHECKS:
        check(built)


@pytest.mark.parametrize("variant", ["matmul", "gather rows", "gather rows, swiglu", "gather contraction", "scatter"])
@pytest.mark.parametrize(("a", "b"), [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
def test_gradients_are_multiplied_as_they_are_on_gfx942(variant: str, a: torch.dtype, b: torch.dtype) -> None:
    """In e5m2 of its own, alone and beside e4m3, and nothing is made wider before."""
    built = build(Case(variant, "gfx942", a, b_dtype=b))
    for check in checks.CHECKS:
        check(built)


def chosen() -> list[Case]:
    """Tiles that `fusedtp tune --kernels` may try: the nearest to the table's, and those that take the most memory."""
    found = []
    for target, its in TARGETS.items():
        config = compiled_config(target, 2, "many")
        rows = 64 if its.described else 32
        room = {"shared_bytes": its.shared_bytes, "lanes": its.backend[2], "least_rows": rows}
        tried = choices.tiles(config, 1024, 3584, 2, **room)
        largest = sorted(tried, key=lambda each: choices.shared_memory_of(each, 2))[-2:]
        by = ("rows", "columns") if its.described else ("pointers", "pointers")
        for choice, variant in itertools.product(dict.fromkeys((*tried[:2], *largest)), ("gather rows", "scatter")):
            found.append(Case(variant, target, torch.bfloat16, "many", *by, choice=tuple(choice)))
        # Few rows with less than half a wave of tiles.
        low = choices.of_config(compiled_config(target, 2, "few rows"))
        if low.num_warps == 4:
            half = tuple(low._replace(block_n=low.block_n // 2))
            found += [
                Case(variant, target, torch.bfloat16, "few rows", *by, choice=half)
                for variant in ("matmul", "gather rows", "gather rows, joined", "gather rows, swiglu", "scatter")
            ]
    return found


@pytest.mark.parametrize("case", chosen(), ids=str)
def test_a_choice_has_room(case: Case) -> None:
    """A choice compiles, fits the shared memory, and multiplies in a pipelined loop."""
    built = build(case)
    assert built.shared_bytes <= choices.shared_memory_of(choices.Choice(*case.choice), 2)
    assert built.tile == case.choice[:3]
    assert built.inner_loop


@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if target.described])
@pytest.mark.parametrize("variant", ["matmul", "gather rows", "gather rows transposed"])
def test_one_loop_adds_nothing_as_two(variant: str, target: str) -> None:
    """Gathering adds to the inner loop only if tiles and contraction are one loop."""
    case = Case(variant, target, a_by="rows", b_by="columns", flatten=False)
    built, beside = build(case), build(plain(case))
    assert not built.flattened
    checks.multiplication(built)
    assert not built.loop_as_asked() - beside.loop_as_asked()


@pytest.mark.parametrize(
    "variant", ["gather rows, five weights", "gather contraction, five weights", "scatter, five terms"]
)
def test_code_does_not_grow_with_weights(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of 64 weights has the instructions of the kernel of five, so it compiles in the same time."""
    case = Case(variant, "sm_90", a_by="rows" if variant.startswith("gather") else "pointers")
    few = launched(case).compiled(case.target).asm["ptx"].count(";")
    monkeypatch.setitem(VARIANTS, variant, replace(VARIANTS[variant], more=63))
    many = launched(case).compiled(case.target).asm["ptx"].count(";")
    assert abs(many - few) <= few // 100


def trees(target: str, dtype: torch.dtype) -> list[Case]:
    """Every kernel that multiplies leaves, read in all ways, whether or not lengths are known to be multiples of 16."""
    ways = itertools.product(("rows", "pointers"), ("rows", "columns", "pointers"))
    by = list(ways) if TARGETS[target].described else [("pointers", "pointers")]
    names = [name for name, each in VARIANTS.items() if "LEAVES" in each.flags]
    every = itertools.product(names, by, (False, True))
    # More terms than have a place of their own in the kernel are read by a table of addresses.
    return [
        Case(name, target, dtype, a_by=a, b_by=b, loose=loose)
        for name, (a, b), loose in every
        if VARIANTS[name].more < 3 or a == b == "pointers"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", TARGETS)
def test_leaves_are_multiplied_by_one_instruction(target: str, dtype: torch.dtype) -> None:
    """Whatever a kernel is for, however it reads and whatever it knows of lengths: bits must not depend on it."""
    chosen = [case for case in trees(target, dtype) if not case.loose or target in ("sm_80", "sm_90")]
    chosen = chosen if dtype == torch.bfloat16 else chosen[::5]
    build_all(chosen)
    found = {case: checks.products_as_asked(build(case)) for case in chosen}
    assert len(set(found.values())) == 1, found


def test_another_way_to_multiply_leaves_is_found(tmp_path: Path) -> None:
    case = Case("matmul, tree", "sm_100", a_by="rows", b_by="columns")
    as_it_is = checks.products_as_asked(build(case))
    wide = examine(case, launched(case, num_warps=16))
    assert checks.products_as_asked(wide) != as_it_is
    beside = 'return acc + 2.0 * tl.dot(a, b, input_precision="ieee")'
    package = load((("contraction", 'return tl.dot(a, b, acc, input_precision="ieee")', beside),), tmp_path)
    for target in ("sm_80", "gfx942"):
        case = Case("scatter, tree", target)
        checks.products_as_asked(build(case))
        with pytest.raises(AssertionError, match="added to a sum beside products"):
            checks.products_as_asked(examine(case, launched(case, package)))


# A newer Triton than the pinned one keeps these in registers all the same.
HARMLESS = ("what is the same for all tiles is kept in registers", "an activation of half a tile at once")
# An older one copies nothing ahead where weights lie in a table.
HARMLESS_BEFORE = ("a weight of unknown alignment, from a table",)
OF_OTHERS = () if checks.as_pinned() else HARMLESS if checks.is_newer() else HARMLESS_BEFORE
# Triton 3.9 puts a barrier of its own before an exchange that releases.
OF_OTHERS += ("no barrier before the release", "the barrier before the stores") if checks.is_3_9() else ()
FOUND = [mutant for mutant in MUTANTS if mutant.bug not in OF_OTHERS]


@pytest.mark.parametrize("mutant", FOUND, ids=lambda mutant: mutant.bug)
def test_a_broken_kernel_is_found(mutant: Mutant, tmp_path: Path) -> None:
    package = load(mutant.edits, tmp_path)
    for case in mutant.cases:
        beside = build(plain(case)) if mutant.check is checks.against_plain else build(case)
        assert not found(mutant, build(case), beside), f"{case} is found broken as it is"
        assert found(mutant, examine(case, launched(case, package)), beside), f"{case}: not found"


def test_a_kernel_short_of_registers_is_found() -> None:
    case = Case("matmul", "sm_90")
    starved = examine(case, launched(case, pointer_warps=4))
    with pytest.raises(AssertionError, match=r"spills|stack"):
        checks.resources(starved)


def test_more_shared_memory_than_there_is_is_found() -> None:
    case = Case("matmul", "gfx942")
    large = examine(case, launched(case, num_stages=4))
    with pytest.raises(AssertionError, match="shared memory"):
        checks.resources(large)


def test_what_was_found_is_what_is_written() -> None:
    """Compare the rows of this Triton, if there are rows of it."""
    table.compare_or_write([build(case) for case in (*CASES, *LOOSE)])
