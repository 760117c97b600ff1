"""Kernels broken on purpose: edits of a copy of the package's source, each of which one check must find."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent, indent

import fusedtp.kernels

from . import checks, float8
from .build import Built
from .cases import FLOAT8, Case

_numbers = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """A planted bug, the check that finds it, the kernels that have it, and its edits (module, old, new)."""

    bug: str
    check: Callable[..., None]
    cases: tuple[Case, ...]
    edits: tuple[tuple[str, str, str], ...]


def load(edits: tuple[tuple[str, str, str], ...], folder: Path) -> str:
    """The name of a package with the kernels' modules, `edits` made in them. What is replaced must be there."""
    source = Path(inspect.getfile(fusedtp.kernels)).parent
    for path in source.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    # The package's own refuses another name than its own.
    (folder / "__init__.py").write_text("INTERPRETED = False\n")
    for module, old, new in edits:
        path = folder / f"{module}.py"
        text = path.read_text()
        assert old in text, f"{module} has no {old!r}"
        path.write_text(text.replace(old, new))
    name = f"mutated_kernels_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module_of = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_of)
    return name


def _by(variant: str, target: str, shape: str = "many") -> Case:
    if target in ("sm_90", "sm_100"):
        return Case(variant, target, shape=shape, a_by="rows", b_by="columns")
    return Case(variant, target, shape=shape)


def _float8_by(variant: str, target: str, shape: str = "many") -> Case:
    return replace(_by(variant, target, shape), dtype=FLOAT8[target])


_WAITS = (
    _by("gather rows, split", "sm_90"), Case("collect pieces", "sm_80"), Case("collect pieces", "gfx942"),
    _by("gather rows, split", "gfx942"),
)  # fmt: skip
_ENTERS = (_by("scatter", "sm_90"), Case("push", "sm_80"), Case("push", "gfx942"))
_SPLIT = tuple(_by("gather rows, split", target) for target in ("sm_80", "sm_90", "gfx942"))
_SCATTER = tuple(_by("scatter", target) for target in ("sm_90", "gfx942"))
_TURNED = tuple(_by("gather rows transposed", target) for target in ("sm_80", "sm_90"))
_PARTS = "        ok = wait_for_parts(link, FIRST_SLOT, False)\n"
_PUSHES = (Case("push", "sm_90"), Case("push", "gfx942"))
_IN_SWITCH = (
    _by("all-reduce in one, in the switch", "sm_90", "few columns"),
    Case("reduce in the switch, and broadcast", "sm_100", shape="few columns"),
)  # fmt: skip
_DOT = "            acc = dot(a_block, b_block, acc)\n"
_ROWS = "                ok = wait_for_rows(link, src, row - first, end_row, first_slot, one, 1, PIECE)\n"
_STORE = "    store_tile(\n"
_WAIT = """\
            packed = wait_for_rows(
                ctx.link, src, tile.row, end_row, FIRST_SLOT, packed, ctx.tiles.BLOCK_M, ctx.chunks.PIECE
            )
"""
_WAIT_LATE = indent(dedent(_WAIT.replace("src", "tile.chunk").replace("end_row", "tile.row + 1")), "    ")
_REPORT = "        tl.atomic_xchg(host + REPORT, src + 1,"
_PROMOTED = "        return acc + tl.dot(a, b)\n"
_SCALES = """\
        elif src.scale is not None:
            _send_scales(link, src.scale + first + row, dst, dst_row + row, pitch, rows, BLOCK_R)
"""
_BLOCK_SCALES = """\
        if src.scale is not None and src.scale.dtype.element_ty == tl.uint8:
            _send_block_scales(link, src, first + row, dst, dst_row + row, pitch, rows)
"""
_SIGNAL = "        raise_signal(link, dst, piece + first_slot)\n"

MUTANTS = (
    Mutant(
        "what is the same for all tiles is kept in registers", checks.resources,
        (_float8_by("scatter, three weights", "gfx942"),),
        (("matmul", "disable_licm=True", "disable_licm=False"),),
    ),
    Mutant(
        "an activation of half a tile at once", checks.resources,
        (_by("gather rows, gelu, kept", "sm_90"),),
        (("epilogue", "COLS * 4 <=", "COLS * 2 <="),),
    ),
    Mutant(
        "no barrier before the release", checks.releases, _PUSHES,
        (("signal", "    tl.debug_barrier()\n    signal =", "    signal ="),),
    ),
    Mutant(
        "no signal at the end", checks.atomics, _SCATTER,
        (("signal", "    if arrives_last(link, num_programs):\n        raise_to_all(link, slot)", "    pass"),),
    ),
    Mutant(
        "the barrier before the stores", checks.releases, _PUSHES,
        (
            ("signal", "    tl.debug_barrier()\n    signal =", "    signal ="),
            ("push", "        row = piece * PIECE\n", "        row = piece * PIECE\n        tl.debug_barrier()\n"),
        ),
    ),
    Mutant(
        "a signal for the own device only", checks.atomics, _SCATTER,
        (("signal", 'tl.atomic_xchg(signals, link.epoch, mask=mask, sem="release", scope="sys")',
            'tl.atomic_xchg(signals, link.epoch, mask=mask, sem="release", scope="gpu")'),),
    ),
    Mutant(
        "a poll on the own device only", checks.atomics, _SPLIT,
        (("signal", 'tl.atomic_add(signal, 0, sem="acquire", scope="sys")',
            'tl.atomic_add(signal, 0, sem="acquire", scope="gpu")'),),
    ),
    Mutant(
        "a relaxed poll", checks.atomics, _SPLIT,
        (("signal", 'tl.atomic_add(signal, 0, sem="acquire", scope="sys")',
            'tl.atomic_add(signal, 0, sem="relaxed", scope="sys")'),),
    ),
    Mutant(
        "no signal", checks.atomics, _PUSHES,
        (("signal", '    tl.atomic_xchg(signal, link.epoch, sem="release", scope="sys")', "    pass"),),
    ),
    Mutant(
        "the wait after the multiplication", checks.acquires, _SPLIT,
        (
            ("gather_matmul", _WAIT, "            pass\n"),
            ("gather_matmul", _STORE, f"{_WAIT_LATE}{_STORE}"),
        ),
    ),
    Mutant(
        "the wait after the load", checks.acquires, (Case("reduce", "sm_90"), Case("reduce", "gfx942")),
        (
            ("reduce", _PARTS, "        ok = 1\n"),
            ("reduce", "            result = apply(", f"    {_PARTS}            result = apply("),
        ),
    ),
    Mutant(
        "a wait for the first tile only", checks.acquires,
        (Case("collect pieces", "sm_90"), Case("collect pieces", "gfx942")),
        (("push", _ROWS, f"                ok = one\n                if index == pid:\n    {_ROWS}"),),
    ),
    Mutant(
        "a wait that may be passed by", checks.acquires,
        (_by("gather rows, split, in pieces", "sm_90"), Case("collect pieces of a quarter", "gfx942")),
        (("push", "    more = 1\n", "    more = (begin_row < end_row).to(tl.int32)\n"),),
    ),
    Mutant(
        "no proxy fence", checks.acquires,
        (_by("gather rows, split", "sm_90"), _by("gather contraction, split", "sm_100")),
        (("gather_matmul", "row = before_descriptor(arena_row, packed)", "row = arena_row"),),
    ),
    # Loaded with one modifier, another and none: to be found whichever instruction the compiler makes of it.
    Mutant(
        "a clock that every thread loads", checks.decisions, _WAITS,
        (("signal", "now = read(host + CLOCK_MS)", 'now = tl.load(host + CLOCK_MS, cache_modifier=".cv")'),),
    ),
    Mutant(
        "a budget that every thread loads", checks.decisions, _WAITS,
        (("signal", "budget = read(words + BUDGET_MS)", "budget = tl.load(words + BUDGET_MS)"),),
    ),
    Mutant(
        "a wait given up that every thread loads", checks.decisions, _WAITS,
        (("signal", "given_up = read(words + GIVEN_UP)", "given_up = tl.load(words + GIVEN_UP, volatile=True)"),),
    ),
    Mutant(
        "an entry that every thread decides", checks.decisions, _ENTERS,
        (("signal", "    if read(header(link.group, link.rank) + GIVEN_UP) == 0",
            "    if tl.load(header(link.group, link.rank) + GIVEN_UP) == 0"),),
    ),
    Mutant(
        "the scales after the signal", checks.releases,
        tuple(_float8_by("push", target, "few columns") for target in FLOAT8),
        (("push", _SCALES + _SIGNAL, _SIGNAL + _SCALES.replace("elif", "if")),),
    ),
    Mutant(
        "no scales", checks.releases, tuple(_float8_by("push", target, "few columns") for target in FLOAT8),
        (("push", _SCALES, ""),),
    ),
    Mutant(
        "scales of blocks sent byte by byte", checks.widths,
        tuple(replace(_float8_by("push", target, "few columns"), blocks=True) for target in ("sm_90", "sm_100")),
        (("push", "SCALE_ROWS, 16)", "16, 16)"),),
    ),
    Mutant(
        "scales of blocks of unknown alignment", checks.widths,
        (replace(_float8_by("gather rows", "sm_100", "few columns"), blocks=True),),
        (("scales", "return cdiv(K, 512) * 16", "return cdiv(K, 32)"),),
    ),
    Mutant(
        "blocks made wider where a unit takes their scales", float8.multiplied,
        (replace(_float8_by("scatter", "sm_100", "few columns"), blocks=True),),
        (("scales", "    if tiles.SCALED_DOT:", "    if False:"),),
    ),
    Mutant(
        "float8 summed by the matrix unit", float8.multiplied,
        (_float8_by("gather rows", "sm_90"), _float8_by("scatter", "sm_90"), _float8_by("gather contraction", "sm_90")),
        (("contraction", _PROMOTED, "        return tl.dot(a, b, acc)\n"),),
    ),
    Mutant(
        "sums of two blocks", float8.multiplied, (_float8_by("gather rows", "sm_90"),),
        (
            ("contraction", "    for k in range(0, cdiv(a.k_len, BLOCK_K)):\n",
                "    part = tl.full((BLOCK_M, tiles.BLOCK_N), 0.0, tl.float32)\n"
                "    for k in range(0, cdiv(a.k_len, BLOCK_K)):\n"),
            ("contraction", _DOT, "            part = tl.dot(a_block, b_block, part)\n"
                "            acc += tl.where(k % 2 == 1, part, 0.0)\n"
                "            part = tl.where(k % 2 == 1, 0.0, part)\n"),
        ),
    ),
    Mutant(
        "a sum read before the wait for it", float8.multiplied,
        (_float8_by("gather rows", "sm_90"), _float8_by("scatter", "sm_90")),
        (("contraction", _PROMOTED, "        return tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])\n"),),
    ),
    Mutant(
        "float8 multiplied as float16", float8.multiplied, tuple(_float8_by("scatter", target) for target in FLOAT8),
        (("contraction", _PROMOTED, "        return acc + tl.dot(a.to(tl.float16), b.to(tl.float16))\n"),),
    ),
    Mutant(
        "a bound checked in the inner loop of float8", checks.against_plain,
        (_float8_by("gather rows", "sm_90"), _float8_by("scatter", "gfx942")),
        (("contraction", _DOT, f"{_DOT}            acc = tl.where(k < a.k_len - tile.row, acc, acc + 1.0)\n"),),
    ),
    Mutant(
        "an address of unknown alignment", checks.widths, (_by("scatter", "sm_80"), _by("scatter", "sm_90")),
        (("signal", "tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)", "address.to(tl.pointer_type(dtype))"),),
    ),
    Mutant(
        "a weight of unknown alignment, from a table", checks.multiplication,
        (Case("gather rows, five weights", "sm_80"), Case("gather rows, five weights", "sm_90", a_by="rows")),
        (("blocks", "tl.multiple_of(word.to(column.first.dtype), column.MULTIPLE)", "word.to(column.first.dtype)"),),
    ),
    Mutant(
        "a row of unknown alignment", checks.widths, _TURNED,
        (("gather_matmul", "        row = tl.multiple_of(row, 16)\n", "        pass\n"),),
    ),
    Mutant(
        "rows of unknown number", checks.widths, _TURNED,
        (
            ("matmul", "        rows = tl.multiple_of(rows, 16)\n", "        pass\n"),
            ("gather_matmul", "        left = left // 16 * 16\n", "        pass\n"),
        ),
    ),
    Mutant(
        "a sum's rows of unknown number", checks.widths,
        (Case("reduce transposed", "sm_90"), Case("reduce transposed", "gfx942")),
        (("reduce", "            left = tl.multiple_of(left, 16)\n", "            pass\n"),),
    ),
    Mutant(
        "no fence before a sum of all", checks.aliases, _IN_SWITCH,
        (("multicast", 'return fenced("fence.proxy.alias", index, ok)', "return index"),),
    ),
    Mutant(
        "no fence behind what is stored to all", checks.aliases,
        (*_IN_SWITCH, Case("push, to all at once", "sm_90", shape="few columns")),
        (("multicast", '    fenced("fence.proxy.alias", nothing, nothing)', "    pass"),),
    ),
    Mutant(
        "a sum whose place does not pass the fence", checks.aliases, _IN_SWITCH[1:],
        (("reduce", "            summed_col = behind_wait(col, ok)\n", "            summed_col = col\n"),),
    ),
    Mutant(
        "a bound checked in the inner loop", checks.against_plain,
        (_by("gather rows", "sm_90"), _by("scatter", "sm_90")),
        (("contraction", _DOT, f"{_DOT}            acc = tl.where(k < a.k_len - tile.row, acc, acc + 1.0)\n"),),
    ),
    Mutant(
        "a barrier in a loop made one", checks.multiplication, (_by("gather rows, split", "sm_90"),),
        (("gather_matmul", _STORE, f"    tl.debug_barrier()\n{_STORE}"),),
    ),
    Mutant(
        "a barrier where a wait is given up", checks.multiplication, (_by("gather rows, split", "sm_90"),),
        (("signal", _REPORT, f"        tl.debug_barrier()\n{_REPORT}"),),
    ),
    Mutant(
        "pointers instead of descriptors", checks.multiplication, (_by("gather rows", "sm_90", "few columns"),),
        (("contraction", 'if B_BY == "pointers":\n        offs_n', "if True:\n        offs_n"),
         ("contraction", 'if B_BY == "pointers":\n            b_block', "if True:\n            b_block"),
         ("operands", 'if ctx.b.BY == "pointers":\n        source', "if True:\n        source")),
    ),
)  # fmt: skip


def found(mutant: Mutant, built: Built, plain: Built) -> str:
    """Return the message of the mutant's check of a kernel, or ""."""
    try:
        if mutant.check is checks.against_plain:
            mutant.check(built, plain)
        else:
            mutant.check(built)
    except AssertionError as error:
        return str(error)
    return ""
