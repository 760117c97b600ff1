"""The machine that executes PTX: what its memory model allows and forbids, and statements that it refuses.

The ops check its arithmetic: their results are compared with those of torch (`test_emulated_ops.py`).

Runs in a process without Triton's interpreter: `nox -s emulate`, and `test_emulated.py` in the ordinary tests.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("Triton's interpreter is chosen for this process; nox -s emulate", allow_module_level=True)

import subprocess
import sys
from pathlib import Path

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
    code = "import fusedtp.kernels as k; raise SystemExit(k.INTERPRETED)"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=Path(__file__).parent, check=False).returncode == 0
