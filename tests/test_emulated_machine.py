"""The machine that executes PTX: what its memory model allows and forbids, and statements that it refuses.

The ops check its arithmetic: their results are compared with those of torch (`test_emulated_ops.py`).

Runs in a process without Triton's interpreter: `nox -s emulate`, and `test_emulated.py` in the ordinary tests.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("Triton's interpreter is chosen for this process; nox -s emulate", allow_module_level=True)

import re
from collections.abc import Sequence

import fusedtp.kernels

from .virtual_gpu import compiler, litmus
from .virtual_gpu.lower import INSTRUCTION
from .virtual_gpu.machine import Failed, Schedule, core
from .virtual_gpu.ptx import CannotExecute

pytestmark = pytest.mark.emulated

STORE = "	@%p1 st.global.b32 [ %rd1 + 0 ], { %r2 };\n"
RELEASE = "	@%p1 atom.global.sys.release.exch.b32 %r4, [ %rd2 + 0 ], %r2;\n"
READ = "	@%p1 ld.global.b32 { %r5 }, [ %rd1 + 0 ];\n	@%p1 st.global.b32 [ %rd3 + 0 ], { %r5 };\n"
OTHER_WARP = STORE.replace("%p1", "%p2")
BARRIER = "	bar.sync 0;\n"


def test_what_is_released_is_seen_by_who_acquires_it() -> None:
    assert litmus.message(STORE + RELEASE, litmus.POLL + READ, 150) == {1}


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (STORE + RELEASE.replace("release", "relaxed"), litmus.POLL + READ),
        (STORE + RELEASE.replace("sys", "gpu"), litmus.POLL + READ),
        (STORE + RELEASE, litmus.POLL.replace("acquire", "relaxed") + READ),
        (STORE + RELEASE, litmus.POLL.replace("sys", "gpu") + READ),
        (RELEASE + STORE, litmus.POLL + READ),
    ],
    ids=["no release", "release at gpu scope", "no acquire", "acquire at gpu scope", "store behind the release"],
)
def test_what_is_not_ordered_is_seen_or_not(producer: str, consumer: str) -> None:
    assert litmus.message(producer, consumer, 150) == {0, 1}


def test_a_release_brings_out_what_other_warps_stored_before_a_barrier() -> None:
    assert litmus.message(OTHER_WARP + BARRIER + RELEASE, litmus.POLL + BARRIER + READ, 100, warps=2) == {1}
    assert litmus.message(OTHER_WARP + RELEASE, litmus.POLL + BARRIER + READ, 100, warps=2) == {0, 1}


def test_a_seed_replays_a_run() -> None:
    def ran(seed: int) -> tuple[int, ...]:
        places = [litmus.aligned(16) for _ in range(3)]
        done = litmus.run([STORE + RELEASE, litmus.POLL + READ], places, Schedule(seed, drain=0.01))
        return done.executed, done.stale, done.late

    assert [ran(seed) for seed in range(8)] == [ran(seed) for seed in range(8)]
    assert len({ran(seed) for seed in range(8)}) > 1


SHARED = "	mov.b32 %r6, global_smem;\n	shl.b32 %r7, %r1, 2;\n	add.s32 %r8, %r6, %r7;\n"
# Refused statements, the number of warps, and the message.
REFUSED = {
    "out of bounds": ("	ld.global.b32 { %r5 }, [ %rd1 + 64 ];\n", 1, "out of bounds"),
    "before the bounds": ("	st.global.b32 [ %rd1 + -4 ], { %r2 };\n", 1, "out of bounds"),
    "misaligned": ("	ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd1 + 8 ];\n", 1, "misaligned load of 16 bytes"),
    "shared memory out of bounds": (SHARED + "	st.shared.b32 [ %r8 + 1000 ], %r2;\n", 1, "out of bounds"),
    "shared memory misaligned": (SHARED + "	ld.shared.v2.b32 {%r5, %r9}, [%r6+4];\n", 1, "misaligned"),
    "uninitialised register": ("	add.s32 %r5, %r2, %r9;\n", 1, "register %r9 is read and holds nothing"),
    "register of other lanes": (
        "	@%p1 mov.b32 %r9, 1;\n	add.s32 %r5, %r2, %r9;\n", 1, "register %r9 is read and holds nothing"
    ),
    "uninitialised shared memory": (SHARED + "	ld.shared.b32 %r5, [%r8];\n", 1, "uninitialised shared memory"),
    "uninitialised part of a vector": (
        SHARED + "	@%p1 st.shared.b32 [ %r6 + 0 ], %r1;\n	bar.warp.sync -1;\n"
        "	ld.shared.v2.b32 {%r5, %r9}, [%r6];\n	add.s32 %r5, %r2, %r9;\n",
        1, "register %r9 is read and holds nothing",
    ),
    "race": (
        SHARED + "	st.shared.b32 [ %r8 + 0 ], %r1;\n	xor.b32 %r9, %r7, 128;\n	add.s32 %r9, %r6, %r9;\n"
        "	ld.shared.b32 %r5, [%r9];\n", 2, "race|uninitialised",
    ),
    "byte beside another's": (
        "	mov.b32 %r6, global_smem;\n	add.s32 %r8, %r6, %r1;\n	mov.b16 %rs1, 1;\n"
        "	st.shared.b8 [ %r8 + 0 ], %rs1;\n	ld.shared.b16 %rs2, [%r6];\n", 1, "is read by warp 0",
    ),
    "write over what others read": (
        SHARED + "	st.shared.b32 [ %r8 + 0 ], %r1;\n" + BARRIER + "	xor.b32 %r9, %r7, 128;\n"
        "	add.s32 %r9, %r6, %r9;\n	ld.shared.b32 %r5, [%r9];\n	st.shared.b32 [ %r8 + 0 ], %r5;\n", 2, "race",
    ),
    "divergent barrier": ("	@%p1 bra $L__end;\n" + BARRIER + "$L__end:\n", 1, "barrier reached by lanes"),
    "barrier left alone": (
        "	setp.lt.s32 %p5, %r1, 32;\n	@%p5 bra $L__end;\n" + BARRIER + "$L__end:\n", 2, "barrier"
    ),
    "copy not waited for": (
        SHARED + "	shl.b32 %r7, %r1, 4;\n	add.s32 %r8, %r6, %r7;\n	@%p1 cp.async.cg.shared.global [ %r8 + 0 ], "
        "[ %rd1 + 0 ], 0x10;\n	cp.async.commit_group;\n	@%p1 ld.shared.b32 %r5, [%r8];\n", 1,
        "a copy to it is under way",
    ),
    "copy left under way": (
        SHARED + "	@%p1 cp.async.cg.shared.global [ %r6 + 0 ], [ %rd1 + 0 ], 0x10;\n", 1, "while its copies",
    ),
    "no mbarrier": (SHARED + "	@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 16;\n", 1, "no mbarrier"),
    "arrivals": (
        SHARED + "	@%p1 mbarrier.init.shared::cta.b64 [%r6], 1;\n" + BARRIER
        + "	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 16;\n", 1, "more arrivals",
    ),
    "mbarrier left": (SHARED + "	@%p1 mbarrier.init.shared::cta.b64 [%r6], 1;\n", 1, "never invalidated"),
    "deadlock": (litmus.POLL, 1, "deadlock"),
    "wgmma without fence": (
        "	mov.b32 %r9, 0;\n	mov.b64 %rd4, 4611686293305294848;\n"
        "	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r9,%r10,%r11,%r12}, %rd4, %rd4, 0, 1, 1, 0, 0;\n", 4,
        "wgmma without wgmma.fence",
    ),
    "half number that bfloat16 has not": (
        "	mov.b16 %rs1, 0x3c01;\n	cvt.bf16.f16 %rs2, %rs1;\n", 1, "no number of bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    body, warps, said = REFUSED[what]
    with pytest.raises(Failed, match=said):
        litmus.run([body], [litmus.aligned(16) for _ in range(3)], Schedule(1, idle_limit=100_000), warps)


# A of 64 x 16 in registers times B of 16 x 8 in shared memory: fragments, fence and B; product; wait; store.
WGMMA = (
    "	shl.b32 %r7, %r1, 4;\n	cvt.u64.u32 %rd4, %r7;\n	add.s64 %rd5, %rd1, %rd4;\n"
    "	ld.global.v4.b32 { %r20, %r21, %r22, %r23 }, [ %rd5 + 0 ];\n"
    "	shl.b32 %r7, %r1, 3;\n	cvt.u64.u32 %rd6, %r7;\n	add.s64 %rd7, %rd2, %rd6;\n"
    "	ld.global.v2.b32 { %r24, %r25 }, [ %rd7 + 0 ];\n	mov.b32 %r6, global_smem;\n	add.s32 %r8, %r6, %r7;\n"
    "	st.shared.v2.b32 [ %r8 + 0 ], { %r24, %r25 };\n	fence.proxy.async.shared::cta;\n" + BARRIER
    # The descriptor begins at 1024, with rows of 128 bytes, swizzled.
    + f"	mov.b64 %rd8, {1 << 62 | 64 << 32 | 1 << 16 | 64};\n	wgmma.fence.sync.aligned;\n",
    "	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r9, %r10, %r11, %r12}, {%r20, %r21, %r22, %r23}, %rd8, "
    "0, 1, 1, 0;\n	wgmma.commit_group.sync.aligned;\n",
    "	wgmma.wait_group.sync.aligned 0;\n",
    "	add.s64 %rd5, %rd3, %rd4;\n	st.global.v4.b32 [ %rd5 + 0 ], { %r9, %r10, %r11, %r12 };\n",
)  # fmt: skip


@pytest.mark.parametrize(
    ("before", "amid", "said"),
    [
        ("	mov.b32 %r20, 0;\n", "", "was written after the last wgmma.fence"),
        ("", "	add.s32 %r5, %r20, 1;\n", "register %r20 is read and holds nothing"),
        ("", "	mov.b32 %r20, 0;\n", "is written while a wgmma reads it"),
    ],
    ids=["written behind the fence", "read before the wait", "written before the wait"],
)
def test_fragments_are_held_until_wgmma_is_waited_for(before: str, amid: str, said: str) -> None:
    load, product, wait, store = WGMMA
    with pytest.raises(Failed, match=said):
        litmus.run(
            [load + before + product + amid + wait + store], [litmus.aligned(512) for _ in range(3)], Schedule(1), 4
        )


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (WGMMA[1].replace("k16.f32.bf16.bf16", "k32.f32.e4m3.e4m3").replace("1, 1, 0;", "1, 1;"), "A in registers"),
        # One name must have one type.
        ("	{.reg .b32 a;\n	}\n	{.reg .b64 a;\n	}\n", r"\.reg \.b64 a"),
        ("	vote.sync.all.pred %p5, %p1, -1;\n", r"vote\.sync\.all\.pred %p5, %p1, -1"),
    ],
)
def test_what_the_machine_does_not_know_is_named(statements: str, said: str) -> None:
    with pytest.raises(CannotExecute, match=said):
        litmus.kernel(statements)


def outcome(body: str, schedule: Schedule, warps: int, places: Sequence[litmus.Array] = (), registers: int = 0) -> str:
    """Run a kernel on its own, and return why it failed, or ""."""
    try:
        litmus.run(
            [body], places or [litmus.aligned(16) for _ in range(3)], schedule, warps, registers=registers
        )  # fmt: skip
    except Failed as error:
        return str(error)
    return ""


def assert_outcomes(found: Sequence[str], said: str) -> None:
    """Assert that runs never failed, or that some did, and none for another reason than `said`."""
    failed = [each for each in found if each]
    assert bool(failed) == bool(said), failed[:1]
    assert all(re.search(said, each) for each in failed), [each for each in failed if not re.search(said, each)][:1]


OWN_WORD = SHARED + "	st.shared.b32 [ %r8 + 0 ], %r1;\n"
# The other warp's word.
OTHER_WORD = "	xor.b32 %r9, %r7, 128;\n	add.s32 %r9, %r6, %r9;\n	ld.shared.b32 %r5, [%r9];\n"
# Warps 0 and 1, of three.
TWO = "	setp.ge.s32 %p5, %r1, 64;\n	@%p5 bra $L__end;\n"
END = "$L__end:\n"


# Warps 0 and 1 here; the last warp, or the last two of four, elsewhere.
MEET, REPLACE = "	bar.sync 1, 64;\n", "	st.shared.b32 [ %r8 + 0 ], %r5;\n"
LOW = "	setp.lt.s32 %p6, %r1, {threads};\n	@%p6 bra $L__low;\n{others}	ret;\n$L__low:\n{these}"
APART = "	xor.b32 %r9, %r7, 256;\n	add.s32 %r9, %r6, %r9;\n	ld.shared.b32 %r5, [%r9];\n"


@pytest.mark.parametrize(
    ("body", "warps", "said"),
    [
        (TWO + OWN_WORD + MEET + OTHER_WORD + END, 3, ""),
        (TWO + OWN_WORD + MEET + OTHER_WORD + "	barrier.sync 2, 64;\n" + REPLACE + END, 3, ""),
        (TWO + OWN_WORD + MEET + OTHER_WORD + REPLACE + END, 3, "was read by warps|is read by warp"),
        (OWN_WORD + LOW.format(threads=64, others="	bar.sync 2, 64;\n" + APART, these=MEET + APART), 4,
         "race: shared memory|uninitialised"),
        (OWN_WORD + LOW.format(threads=32, others=MEET + OTHER_WORD, these="	bar.arrive 1, 64;\n"), 2, ""),
        (OWN_WORD + LOW.format(threads=32, others=MEET, these="	bar.arrive 1, 64;\n" + OTHER_WORD), 2,
         "race: shared memory|uninitialised"),
        (LOW.format(threads=32, others=MEET, these="	bar.sync 1, 96;\n"), 3,
         "is for (64|96) threads here and for (96|64) elsewhere|deadlock"),
        (MEET, 1, "barrier 1 for 64 threads of 32"),
    ],
    ids=["two of three", "in turn", "write over a read", "others' barrier", "arrival", "arrival waits for nothing",
         "two counts", "too many"],
)  # fmt: skip
def test_barriers_of_some_warps(body: str, warps: int, said: str) -> None:
    assert_outcomes([outcome(body, Schedule(seed), warps) for seed in range(24)], said)


@pytest.mark.parametrize("said", ["", "race: shared memory"])
def test_lanes_meet_at_their_warps_barrier(said: str) -> None:
    sync = "" if said else "	bar.warp.sync -1;\n"
    body = SHARED + "	@%p1 st.shared.b32 [ %r6 + 0 ], %r2;\n" + sync + "	ld.shared.b32 %r5, [%r6];\n"
    assert_outcomes([outcome(body, Schedule(1), 1)], said)


TABLE = """	and.b32 %r3, %r1, 3;
	$L_brx_0: .branchtargets
		$L__a,
		$L__b,
		$L__c;
	brx.idx %r3, $L_brx_0;
$L__a:
	mov.b32 %r5, 100;
	bra $L__done;
$L__b:
	mov.b32 %r5, 200;
	bra $L__done;
$L__c:
	mov.b32 %r5, 300;
$L__done:
	shl.b32 %r7, %r1, 2;
	cvt.u64.u32 %rd4, %r7;
	add.s64 %rd5, %rd3, %rd4;
	st.global.b32 [ %rd5 + 0 ], { %r5 };
"""


def test_each_lane_branches_to_its_own_target() -> None:
    places = [litmus.aligned(32) for _ in range(3)]
    litmus.run([TABLE.replace("and.b32 %r3, %r1, 3", "rem.u32 %r3, %r1, 3")], places, Schedule(1))
    assert places[2].tolist() == [100 + 100 * (lane % 3) for lane in range(32)]
    with pytest.raises(Failed, match=r"brx\.idx by 3 in a list of 3"):
        litmus.run([TABLE], places, Schedule(1))


ROLES = """	setp.lt.s32 %p5, %r1, 128;
	@%p5 bra $L__low;
	setmaxnreg.inc.sync.aligned.u32 {more};
	bra $L__done;
$L__low:
	setmaxnreg.dec.sync.aligned.u32 {less};
$L__done:
"""


@pytest.mark.parametrize(
    ("more", "less", "registers", "said"),
    [
        (232, 24, 128, ""), (232, 32, 128, "deadlock"), (24, 24, 128, r"setmaxnreg\.inc from 128 to 24"),
        (232, 136, 128, r"setmaxnreg\.dec from 128 to 136"), (236, 24, 128, "setmaxnreg to 236 registers"),
        (232, 24, 0, "begins with any number"),
    ],
)  # fmt: skip
def test_registers_move_from_one_role_to_another(more: int, less: int, registers: int, said: str) -> None:
    body = ROLES.format(more=more, less=less)
    found = [outcome(body, Schedule(seed, idle_limit=100_000), 8, registers=registers) for seed in range(12)]
    assert_outcomes(found, said)


WAIT = """{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r6+BAR], PARITY;
	@!complete bra.uni waitLoop;
}
"""


def waits(bar: int, parity: int) -> str:
    return WAIT.replace("BAR", str(bar)).replace("PARITY", str(parity))


# Warp 0 writes a word twice. "full" at 512 and "empty" at 520 order it with warp 1, which reads; 528 is another one.
FULL, EMPTY, OTHER = 512, 520, 528
HANDSHAKE = (
    SHARED + "".join(f"	@%p1 mbarrier.init.shared::cta.b64 [%r6+{bar}], 1;\n" for bar in (FULL, EMPTY, OTHER)) + BARRIER
    + "	setp.ge.s32 %p5, %r1, 32;\n	@%p5 bra $L__reader;\n"
    "	@%p1 st.shared.b32 [ %r6 + 0 ], %r2;\n	bar.warp.sync -1;\n"
    f"	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6+{OTHER}];\n"
    f"	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6+{FULL}];\n"
    + waits(EMPTY, 0)
    + "	mov.b32 %r10, 2;\n	@%p1 st.shared.b32 [ %r6 + 0 ], %r10;\n	bar.warp.sync -1;\n"
    f"	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6+{FULL}];\n	bra $L__both;\n$L__reader:\n"
    + waits(FULL, 0)
    + "	ld.shared.b32 %r11, [%r6];\n	bar.warp.sync -1;\n"
    f"	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r6+{EMPTY}];\n"
    + waits(FULL, 1)
    + "	ld.shared.b32 %r12, [%r6];\n	@%p2 st.global.b32 [ %rd3 + 0 ], { %r11 };\n"
    "	@%p2 st.global.b32 [ %rd3 + 4 ], { %r12 };\n$L__both:\n" + BARRIER
    + "".join(f"	@%p1 mbarrier.inval.shared::cta.b64 [%r6+{bar}];\n" for bar in (FULL, EMPTY, OTHER))
)  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        # The phase before the first is complete.
        (waits(FULL, 0), waits(FULL, 1), "race: shared memory|uninitialised|deadlock"),
        (waits(FULL, 1), waits(FULL, 0), "race: shared memory|deadlock"),
        (waits(FULL, 0), waits(OTHER, 1), "race: shared memory|uninitialised|deadlock"),
        (waits(EMPTY, 0), "", "race: shared memory|more arrivals|deadlock"),
        (waits(EMPTY, 0), waits(EMPTY, 1), "race: shared memory|more arrivals|deadlock"),
        ("	bar.warp.sync -1;\n	@%p2", "	@%p2", "was read by warps"),
    ],
    ids=["right", "first phase", "second phase", "another mbarrier", "not waited for", "empty's phase", "lanes apart"],
)  # fmt: skip
def test_phases_of_mbarriers_order_roles(old: str, new: str, said: str) -> None:
    body, found = HANDSHAKE.replace(old, new), []
    assert (body != HANDSHAKE) == bool(old)
    for seed in range(60):
        places = [litmus.aligned(16) for _ in range(3)]
        found.append(outcome(body, Schedule(seed, quantum=5, idle_limit=100_000), 2, places))
        assert found[-1] or places[2][:2].tolist() == [1, 2]
    assert_outcomes(found, said)


# A tile of 16 words from shared memory to the first place.
FENCE = "	fence.proxy.async.shared::cta;\n"
STORE_TILE = (
    "	mov.b32 %r10, 0;\n	@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {%r10, %r10}], [%r6];\n"
    "	cp.async.bulk.commit_group;\n"
)
# The tile is what warp 1 wrote.
OTHERS_TILE = "	add.s32 %r13, %r6, 128;\n" + STORE_TILE.replace("[%r6]", "[%r13]")
READ_OUT, STORED = "	cp.async.bulk.wait_group.read 0;\n", "	cp.async.bulk.wait_group 0;\n"
TILE = SHARED + "	st.shared.b32 [ %r8 + 0 ], %r2;\n"


@pytest.mark.parametrize(
    ("waited", "seen"),
    [(STORED + RELEASE, {1}), (READ_OUT + RELEASE, {0, 1}), (RELEASE + STORED, {0, 1})],
    ids=["stored", "only read", "signal before the wait"],
)
def test_a_signal_stands_for_a_tma_store_that_was_waited_for(waited: str, seen: set[int]) -> None:
    """With a wait for the read alone, or a signal before the wait, the peer may see the past."""
    assert litmus.message(TILE + FENCE + BARRIER + STORE_TILE + waited + READ_OUT, litmus.POLL + READ, 150) == seen


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (TILE + BARRIER + STORE_TILE + READ_OUT, "a TMA store reads .* without fence.proxy.async"),
        (TILE + FENCE + OTHERS_TILE + READ_OUT, "is read by a TMA store"),
        (TILE + FENCE + BARRIER + STORE_TILE + TILE + READ_OUT, "is written while a TMA store|was read by a TMA store"),
        (TILE + FENCE + BARRIER + STORE_TILE + READ_OUT + TILE, "was read by a TMA store"),
        (TILE + FENCE + BARRIER + STORE_TILE + READ_OUT + BARRIER + TILE, ""),
        (TILE + FENCE + BARRIER + STORE_TILE, "its TMA stores read"),
        (TILE + FENCE + BARRIER + STORE_TILE.split("	cp.async.bulk.c")[0] + READ_OUT, "its TMA stores read"),
        (TILE + FENCE + BARRIER + STORE_TILE.replace("[%r6]", "[%r8]").replace("@%p1", "@%p2") + READ_OUT, ""),
    ],
    ids=["no proxy fence", "no barrier", "written before the wait", "written before a barrier", "written in turn",
         "not waited for", "not committed", "another warp's"],
)  # fmt: skip
def test_what_a_tma_store_reads(body: str, said: str) -> None:
    found = []
    for seed in range(24):
        places = [litmus.aligned(16) for _ in range(3)]
        found.append(outcome(body, Schedule(seed, quantum=4), 2, places))
        # Rows come out when the CTA ends at the latest.
        assert found[-1] or places[0].tolist() == [1] * 16
    assert_outcomes(found, said)


def test_a_tma_store_ends_where_its_tensor_does() -> None:
    """Columns past the tensor's last, and before its first, are not stored."""
    for first, expected in ((12, [0] * 12 + [1] * 4), (-12, [1] * 4 + [0] * 12)):
        places = [litmus.aligned(16) for _ in range(3)]
        store = STORE_TILE.replace("{%r10,", "{%r11,")
        body = TILE + FENCE + BARRIER + f"	mov.b32 %r11, {first};\n" + store + READ_OUT
        litmus.run([body], places, Schedule(1))
        assert places[0].tolist() == expected
    with pytest.raises(Failed, match="store of TMA of 16 bytes out of bounds"):
        litmus.run(
            [TILE + FENCE + BARRIER + STORE_TILE + STORED], [litmus.aligned(16) for _ in range(3)], Schedule(1),
            writable=False,
        )  # fmt: skip


def test_stores_to_what_may_only_be_read_are_refused() -> None:
    with pytest.raises(Failed, match="store of 4 bytes out of bounds"):
        litmus.run([STORE], [litmus.aligned(16) for _ in range(3)], Schedule(), writable=False)


def test_the_core_and_what_calls_it_agree() -> None:
    """C and NumPy have the same layout of an instruction."""
    assert core().size_of_instruction() == INSTRUCTION.itemsize


@pytest.mark.skipif(not os.environ.get("FUSEDTP_EMULATION"), reason="takes a while; nox -s emulate")
def test_the_compiler_may_be_ziglang() -> None:
    pytest.importorskip("ziglang")
    assert compiler.shared_object(compiler.PACKAGED).exists()


def test_the_interpreter_is_not_chosen() -> None:
    """The first import decides for the whole process."""
    assert not fusedtp.kernels.INTERPRETED
