"""Checks of a compiled kernel. Each raises AssertionError; `mutants` shows that each check can fail."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from . import float8
from .assembly import Code, sources
from .blocks import loops
from .build import Built
from .cases import TARGETS, VARIANTS
from .launched import config_of

# Scalars on gfx942, of which there are no more than 106. These may be kept in lanes of vector registers: some of a
# kernel whose programs have roles, a producer's masks, what is chosen among several weights, and where scales lie.
ROLE_LANES = 5
LANES = 24
FLOAT8_LANES = 40
# More of them with another Triton than the pinned one, and limit of scales in blocks with a newer one, from 3.9 on.
MORE_LANES, BLOCKS_LANES_OF_NEWER, BLOCKS_LANES_OF_3_9 = 4, 100, 101
# Bytes of a thread's stack where not all is aligned, or with another Triton; with a newer one than is pinned, from 3.9
# on, and with newer ones in a float32 tree of any lengths.
STACK, STACK_OF_NEWER, STACK_OF_3_9, STACK_OF_NEWER_TREE = 64, 80, 104, 240
# In a loop of blocks, copies of their scales: those of A's rows and of B's columns.
_SCALE_COPIES = 2
# What one loop of tiles and contraction adds, once: no wait is made for a tile after the last.
GUARD = Counter({"setp.ge.s32": 1, "or.pred": 1})


def _is_ptx(built: Built) -> bool:
    return TARGETS[built.case.target].backend[0] == "cuda"


@functools.cache
def as_pinned() -> bool:
    """Return whether this is the Triton that constraints.txt pins."""
    return versions()[0] == versions()[1]


def is_newer() -> bool:
    """Return whether this Triton is newer than the pinned one."""
    return versions()[0] > versions()[1]


def is_3_9() -> bool:
    """Return whether this is Triton 3.9, or a newer one."""
    return versions()[0] >= (3, 9)


@functools.cache
def versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    # Of this Triton, and of the pinned one.
    import triton

    pins = (Path(__file__).parent.parent.parent / "constraints.txt").read_text()
    found = triton.__version__, re.findall(r"(?m)^triton==(.*)$", pins)[0]
    return tuple(map(int, found[0].split("."))), tuple(map(int, found[1].split(".")))


def resources(built: Built) -> None:
    """Nothing of a program lives in local memory, and its shared memory is there.

    With another Triton than the pinned one, and on NVIDIA's GPUs where nothing is aligned, up to STACK bytes a thread
    may on sm_80, sm_90 and gfx942, with a newer one STACK_OF_NEWER, from 3.9 on STACK_OF_3_9; nothing with an
    activation unless it is newer, and nothing in an inner loop, but from 3.9 on a word of a one-kernel all-reduce
    where nothing is aligned.
    """
    assert built.shared_bytes <= TARGETS[built.case.target].shared_bytes, "more shared memory than there is"
    ends_with = built.case.flags.get("ACTIVATION")
    joined = built.case.flags.get("JOINED")
    chooses = VARIANTS[built.case.variant].more or ends_with or built.case.is_float8 or joined
    chooses = chooses or VARIANTS[built.case.variant].module == "push"
    roles = VARIANTS[built.case.variant].module in ("gather_matmul", "matmul_all_reduce")
    most = ROLE_LANES * roles if not chooses else FLOAT8_LANES if built.case.is_float8 else LANES
    if VARIANTS[built.case.variant].module == "blocks":
        # All words of a table are scalars, of two registers each.
        most = 2 * built.case.flags["COUNT"]
    newer = is_newer()
    of_blocks = BLOCKS_LANES_OF_3_9 if is_3_9() else BLOCKS_LANES_OF_NEWER
    most = of_blocks if newer and built.case.blocks else most + MORE_LANES * (not as_pinned())
    assert built.lanes <= most, f"{built.lanes} scalars in lanes"
    aligned = not built.case.loose or built.case.target == "gfx942"
    strict = (ends_with and not newer) or (as_pinned() and aligned)
    if strict:
        assert (built.spill_bytes, built.stack_bytes) == (0, 0), "spills or stack"
    elif built.case.target in ("sm_80", "sm_90", "gfx942"):
        is_wide_tree = built.case.loose and built.case.is_tree and built.case.dtype == torch.float32
        of_newer = STACK_OF_NEWER_TREE if is_wide_tree else STACK_OF_3_9 if is_3_9() else STACK_OF_NEWER
        assert built.spill_bytes + built.stack_bytes <= (of_newer if newer else STACK), (
            f"{built.stack_bytes} bytes of stack: spills"
        )
    kept = r"\b(LDL|STL)\b|^scratch_" + ("" if chooses else r"|^v_(read|write)lane_")
    spilled = [line for line in built.inner_loop if re.search(kept, line)]
    words = is_3_9() and built.case.loose and built.case.variant == "all-reduce in one, to all"
    assert len(spilled) <= words, f"spills in the inner loop: {spilled}"


def multiplication(built: Built) -> None:
    """16-bit and float8 operands go to tensor cores, in a loop that loads ahead: by TMA what is described, else 16
    bytes.
    """
    case, target, config = built.case, TARGETS[built.case.target], config_of(built.case)
    if not VARIANTS[case.variant].multiplies or case.dtype == torch.float32:
        return
    loop = built.code.inner_loop(target.multiplies)
    assert loop, "no tensor core instruction in a loop"
    described = (case.a_by != "pointers") + (case.b_by != "pointers")
    assert sum("UTMALDG" in line for line in loop) == described, "operands loaded by TMA in the loop"
    if case.loose and described < 2:
        # What is read element by element does not go to shared memory behind the program's back.
        return
    # Two stages have one buffer where registers hold the other; a descriptor's loads have a buffer a stage, but where
    # scales are multiplied too.
    buffers = config.num_stages if described == 2 and not config.scaled_dot else config.num_stages - 1
    if built.num_stages == 1:
        # With a Triton that has no fence for copies under way, so there are none.
        assert described < 2, "one stage"
        assert not [line for line in loop if "LDGSTS" in line], "a copy that no fence follows"
        return
    block_m, block_n, block_k = built.tile
    tiles = (block_m + block_n) * block_k * case.dtype.itemsize
    assert built.shared_bytes >= buffers * tiles, "the loop is not pipelined"
    if described < 2 and _is_ptx(built) and not case.loose:
        copies = [line for line in loop if "LDGSTS" in line]
        assert copies, "no asynchronous copy in the loop"
        # Of rows of scales there are four bytes for a block of K.
        # What is made 16-bit in registers is copied for these, 8 bytes at a time.
        wide = (".128", ".64") if case.blocks and not config.scaled_dot else (".128",)
        narrow = [line for line in copies if not any(each in line for each in wide)]
        assert len(narrow) <= (_SCALE_COPIES if case.blocks else 0), f"{len(narrow)} copies of less than 16 bytes"


def _next_atomic(code: Code, i: int) -> str:
    return next((line for line in code.lines[i:] if line.startswith("global_atomic")), "")


def atomics(built: Built) -> None:
    """Every wait and signal of the source is there, at system scope; what has device scope stays on the device."""
    variant, code = VARIANTS[built.case.variant], built.ordered
    # An op's last kernel counts arrivals, and may report a peer that means another op, and again that the op is over.
    ends = 1 if variant.flags.get("LAST") or variant.flags.get("STEP") == "leave" else 0
    ends += variant.name.startswith(("collect", "ring"))
    # As do the programs of a kernel that signals at its end, and those that share a tile.
    shares = variant.flags.get("SPLITS", 1) > 1
    arrivals = ends + shares + (variant.module == "matmul_scatter" or variant.flags.get("BROADCAST", False))
    ends += shares
    # A wait looks once, then in a loop, there at the entry too; it may take the entry back and report, both released
    # too. The compiler makes copies of it, each with a report of its own, which has two compare-and-swaps.
    swaps = code.count(r"^(?:@!?%p\d+ )?(atom\.\S*\.cas|global_atomic_cmpswap)")
    copies = max(variant.waits, swaps // 2 - ends)
    looks, releases = 3 * copies if variant.waits else 0, variant.raises + 2 * variant.waits
    if _is_ptx(built):
        acquired = code.count(r"\bld\.global\.sys\.acquire")
        released = code.count(r"\batom\.global\.sys\.release\.exch")
        ordered = set(re.findall(r"(?:atom|ld|red)\.global\.\S*(?:acq|rel(?!axed))\S*", "\n".join(code.lines)))
        system = {each for each in ordered if ".sys." in each}
        narrow = [i for each in ordered - system for i in code.matching(re.escape(each))]
        assert all("gpu.acq_rel.add" in code.lines[i] for i in narrow), "a signal for the own device only"
    else:
        # Triton before 2026-07 puts the fences of a buffer atomic on the wrong sides (triton 11081).
        assert not code.matching(r"^buffer_atomic"), "a buffer atomic, whose fences may be exchanged"
        acquired, released = code.count(r"^buffer_inv sc0 sc1"), code.count(r"^buffer_wbl2 sc0 sc1")
        narrow = code.matching(r"^buffer_wbl2 sc1")
        assert code.count(r"^buffer_inv sc1") == len(narrow), "a signal for the own device only"
        # Triton 3.6 orders a compare-and-swap that is to be relaxed, that of the flag of a wait which was given up.
        narrow = [i for i in narrow if not _next_atomic(code, i).startswith("global_atomic_cmpswap")]
    assert len(narrow) == arrivals, "arrivals lost, or a signal for the own device only"
    assert acquired >= looks, f"{acquired} acquires for {copies} waits"
    assert released >= releases, f"{released} releases for {variant.raises} signals and {variant.waits} waits"
    assert (acquired > 0, released > 0) == (looks > 0, releases > 0), "ordered atomics that the source has not"


def releases(built: Built) -> None:
    """Between a program's last store of data and the signal that releases it lies a barrier of all its threads."""
    if not VARIANTS[built.case.variant].raises or VARIANTS[built.case.variant].module == "steps":
        return
    # Where nothing waits, single words are scales.
    single = built.case.is_float8 and not built.case.blocks and not VARIANTS[built.case.variant].multiplies
    if _is_ptx(built):
        store, release = r"\bst\.global\.(v\d|b16)|\bmultimem\.st", r"\.release\.exch"
        barrier = r"\bbar\.sync|\bbarrier\.sync"
        store += r"|\bst\.global\.b32" if single else ""
    else:
        store, barrier, release = r"^global_store_(dwordx|short)", r"^s_barrier", r"^buffer_wbl2 sc0 sc1"
        store += r"|^global_store_dword\b" if single else ""
    if single:
        scales = built.ordered.matching(store.rpartition("|")[2])
        assert scales, "no store of scales"
        assert float8.precedes(built.ordered, scales, built.ordered.matching(release)), "scales behind the signal"
    assert built.ordered.matching(store), "no store of data"
    assert built.ordered.matching(release), "no release"
    assert not built.ordered.reaches(store, release, without=barrier), "a release that does not follow a barrier"


def acquires(built: Built) -> None:
    """Nothing that arrives is loaded before the acquire of the signal for it. Of variants where every tile waits."""
    case, code = built.case, built.ordered
    if not case.variant.startswith(("gather rows, split", "gather contraction, split", "collect pieces")) and (
        case.variant != "reduce"
    ):
        return
    if case.a_by != "pointers":
        # TMA reads past the acquire: each row that it reads from is a number that comes out of a proxy fence, and
        # no fence comes without an acquire of its own.
        fence, look = r"\bfence\.proxy\.async\.global", r"\bld\.global\.sys\.acquire"
        loads = code.matching(r"\bcp\.async\.bulk\.tensor\.3d\S*global\.")
        assert loads, "no load by a descriptor"
        for i in loads:
            (row,) = re.findall(r"\{%\w+, (%\w+), %\w+\}", code.lines[i])
            # The 0 that it begins with is for a program without a tile, which loads nothing.
            others = {
                each for each in sources(code, row, through=fence) if not re.search(r"^mov\.b32\s+%\w+, 0$", each)
            }
            assert not others, f"a load from a row that no fence has given: {others}"
        assert not code.reaches(None, fence, without=look), "the first fence without an acquire"
        assert not code.reaches(fence, fence, without=look), "a fence without an acquire"
        if case.blocks and config_of(case).scaled_dot:
            # Scales, which no descriptor reads.
            assert code.matching(r"\bcp\.async\.c[ag]"), "no copy of scales"
            assert not code.reaches(None, r"\bcp\.async\.c[ag]", without=look), "scales before the first acquire"
        return
    if _is_ptx(built):
        look, load, store = r"\.sys\.acquire", r"\bcp\.async\.c[ag]|\bld\.global\.v", r"\bst\.global\.(v\d|b16)"
    else:
        look, load, store = r"^buffer_inv sc0 sc1", r"^(global|buffer)_load_dwordx4", r"^global_store_(dwordx|short)"
    assert code.matching(load), "no load"
    assert not code.reaches(None, load, without=look), "a load before the first acquire"
    if case.variant.startswith("gather"):
        assert not code.reaches(store, load, without=look), "the next tile's load before its acquire"
        return
    if case.variant == "reduce":
        # One wait for all tiles.
        return
    # Strips of a tile are loaded without a further wait.
    loads, looks, turns = set(code.matching(load)), set(code.matching(look)), 0
    for head, body in loops(code):
        if body & loads and body & looks:
            assert not code.leads([head], load, look), "the next tile's load before its acquire"
        turns += bool(body & loads) and not body & looks
    assert turns <= 1, "tiles that do not wait"


def aliases(built: Built) -> None:
    """Check multicast accesses: a proxy fence stands between them and the signals.

    A load follows an acquire and a fence. A release follows a fence and a barrier. Every access is 16 bytes wide.
    """
    code, fence = built.ordered, r"\bfence\.proxy\.alias"
    if not built.case.flags.get("SWITCH"):
        assert not code.matching(r"\bmultimem\."), "what other kernels have no use for"
        return
    loads, stores, release = r"\bmultimem\.ld_reduce", r"\bmultimem\.st", r"\.release\.exch"
    flags, name = built.case.flags, built.case.variant
    sums = flags.get("BROADCAST") or name.startswith("all-reduce")
    assert bool(code.matching(loads)) == bool(sums), "sums are not the switch's"
    assert bool(code.matching(stores)) == bool(sums or name.endswith("at once")), "stores are not to all at once"
    assert all(".v4." in code.lines[i] for i in code.matching(r"\bmultimem\.")), "less than 16 bytes at a time"
    if not code.matching(stores):
        return
    assert not code.reaches(stores, release, without=fence), "a release that no fence is before"
    assert not code.reaches(fence, release, without=r"\bbar\.sync|\bbarrier\.sync"), "a release without a barrier"
    if sums:
        assert not code.reaches(None, loads, without=fence), "a sum before the first fence"
        assert not code.reaches(r"\.sys\.acquire", loads, without=fence), "a sum that no fence is before"


def decisions(built: Built) -> None:
    """No branch that threads may take apart has a barrier on one of its ways only."""
    assert not built.parted, f"threads may part: {built.parted}"


def widths(built: Built) -> None:
    """16-bit data and float8 are stored and loaded 16 bytes at a time; on AMD, whose matrix instructions leave fours, 8
    or 16. Scales are words: a thread has one, or two for neighbours.
    """
    case, code, variant = built.case, built.ordered, VARIANTS[built.case.variant]
    if case.dtype == torch.float32:
        return
    text = "\n".join(code.lines)
    if _is_ptx(built):
        # The protocol's words are single, the table of addresses 8 bytes.
        stores = set(re.findall(r"\bst\.global\.(\S+)", text)) - {"b32"}
        loads = set(re.findall(r"\bld\.global\.((?!sys|gpu|cv|relaxed)\S+)", text)) - {"b32", "b64"}
        wide = {"v4.b32"}
    else:
        stores = set(re.findall(r"^global_store_(\S+)", text, re.MULTILINE)) - {"dword"}
        loads = set(re.findall(r"^(?:global|buffer)_load_(\S+)", text, re.MULTILINE)) - {"dword", "dwordx2"}
        wide = {"dwordx2", "dwordx4"} & (stores or {"dwordx4"})
        if case.flags.get("JOINED") and variant.module == "matmul_scatter":
            # Where the owners' rows begin: all words but the first, at once.
            assert code.count(r"^global_load_dwordx3") <= 1, "loads of 12 bytes"
            loads -= {"dwordx3"}
        if variant.multiplies and variant.transposed:
            # The fours lie along the rows, so a result with contiguous columns gets them one by one: it is local.
            wide |= {"short"}
    if "PER_ROW" in variant.flags:
        # A bias is local, and a number a thread where the tile's layout has it so.
        loads -= {"b16", "ushort"}
    if case.is_float8:
        loads -= {"v2.b32"}
        if case.blocks and (not config_of(case).scaled_dot or "pointers" in (case.a_by, case.b_by)):
            # A thread has one or two scales of a block of K.
            loads -= {"b8", "b16", "ubyte", "ushort"}
        if case.flags.get("PUSHERS") and not case.flags["IN_PLACE"]:
            # A shard with contiguous columns is pushed by rows.
            loads -= {"b8", "ubyte"}
    # What goes to all ranks at once is none of these.
    assert stores == wide or (not stores and code.matching(r"\bmultimem\.st")), f"stores: {stores}"
    assert loads <= {"v4.b32", "dwordx4"}, f"loads: {loads}"


def against_plain(built: Built, plain: Built) -> None:
    """A kernel that gathers or scatters rows multiplies as the plain one does: the same inner loop.

    Made one loop, it looks whether there is a next tile before it waits for that, which is all that it may add.
    """
    added = built.loop_as_asked() - plain.loop_as_asked()
    # Padding between instructions that must be some cycles apart; terms with scales are waited for where they are read,
    # with a newer Triton all terms.
    waits = built.case.is_float8 or (is_newer() and VARIANTS[built.case.variant].more)
    for name in ("s_nop", *(("s_waitcnt",) if waits else ())):
        added.pop(name, None)
    if built.num_stages == 1:
        # One buffer: a barrier before it is stored to again.
        added -= Counter(("bar.sync",))
    case = built.case
    if case.blocks:
        # Scales of A and of B are in arenas and at home, each with an address of its own.
        added -= Counter(("add.s64", "cvt.u32.u64", "s_add_u32", "s_addc_u32"))
        # Of as many that are made two at a time.
        added -= Counter({"v_mul_f32": 4})
        if is_newer():
            # A few of their addresses lie in lanes.
            moved = 8 if is_3_9() else 4
            added -= Counter({"v_writelane_b32": moved, "v_readlane_b32": moved})
            added -= Counter(("s_movk_i32", "s_mov_b32", "s_lshl_b32"))
    if case.flags.get("ACTIVATION") and is_3_9():
        added -= Counter({"s_waitcnt": 5})
    if case.is_tree and VARIANTS[case.variant].more:
        # Terms may be of other lengths.
        added -= Counter(("mov.b32", "s_sub_i32", "v_cmp_gt_i32"))
    if VARIANTS[case.variant].more > 2:
        # So may those in a table, on AMD in vector registers; Triton 3.6 has an address of such a weight there.
        added -= Counter(("v_subrev_u32", "v_cmp_lt_i32"))
        added -= Counter() if as_pinned() or is_newer() else Counter(("cvt.u32.u64",))
    assert not added - (GUARD if built.flattened else Counter()), f"the inner loop has more than the plain one: {added}"


CHECKS: tuple[Callable[[Built], None], ...] = (
    resources, multiplication, atomics, releases, acquires, aliases, decisions, widths, float8.multiplied,
)  # fmt: skip
# Where nothing is aligned, and elements are read and stored one by one.
LOOSE_CHECKS: tuple[Callable[[Built], None], ...] = (
    resources, multiplication, atomics, aliases, decisions, float8.multiplied,
)  # fmt: skip


def products_as_asked(built: Built) -> tuple[str, float]:
    """Return the instruction that multiplies leaves, and how many of it there are for an element of a block of K.

    A kernel's inner loop has one such instruction, and adds nothing else to a sum.
    """
    pattern = r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\S*" if _is_ptx(built) else r"\bv_mfma\w+"
    loop = built.ordered.inner_loop(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)" if _is_ptx(built) else "mfma")
    sums = r"\b(?:add|fma)\.(?:\w+\.)*f32\b|\bv_(?:pk_)?(?:add|fma|fmac)_f32"
    added = [line for line in loop if re.search(sums, line)]
    assert not added, f"added to a sum beside products: {added[:3]}"
    found = Counter(each for line in loop for each in re.findall(pattern, line))
    assert len(found) == 1, f"products by {sorted(found)}"
    ((name, count),) = found.items()
    return name, count / built.tile[2]


def compares(built: Built) -> bool:
    """Return whether a kernel is compared with the plain one: its inner loop uses tensor cores."""
    case = built.case
    return case.variant.startswith(("gather rows", "scatter")) and case.dtype != torch.float32
