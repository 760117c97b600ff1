"""The machine that executes PTX: what its memory allows and forbids, and what it refuses.

In a process without Triton's interpreter: `nox -s emulate`, and `test_emulated.py` in the ordinary tests.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("Triton's interpreter is chosen for this process; nox -s emulate", allow_module_level=True)

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .virtual_gpu import compiler, litmus
from .virtual_gpu.lower import INSTRUCTION
from .virtual_gpu.machine import Failed, Schedule, core
from .virtual_gpu.ptx import CannotExecute

Array = np.ndarray[Any, Any]
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


def test_a_load_into_a_wider_register_is_extended_by_zeros() -> None:
    places = [litmus.aligned(16) for _ in range(3)]
    places[0][0] = -2
    body = "\t@%p1 ld.global.b32 %rd4, [ %rd1 + 0 ];\n\t@%p1 st.global.b64 [ %rd3 + 0 ], { %rd4 };\n"
    litmus.run([body], places, Schedule())
    assert places[2][:2].tolist() == [-2, 0]


def test_a_seed_replays_a_run() -> None:
    def ran(seed: int) -> tuple[int, ...]:
        places = [litmus.aligned(16) for _ in range(3)]
        done = litmus.run([STORE + RELEASE, litmus.POLL + READ], places, Schedule(seed, drain=0.01))
        return done.executed, done.stale, done.late

    assert [ran(seed) for seed in range(8)] == [ran(seed) for seed in range(8)]
    assert len({ran(seed) for seed in range(8)}) > 1


SHARED = "	mov.b32 %r6, global_smem;\n	shl.b32 %r7, %r1, 2;\n	add.s32 %r8, %r6, %r7;\n"
# What is refused, how many warps it takes, and with which words.
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


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        # Bytes 2, 3, 6, 7 of b:a; then the sign of byte 3 in place of the lowest.
        ("mov.b32 %r6, 0x83112233; mov.b32 %r7, 0x44556677; prmt.b32 %r5, %r6, %r7, 0x7632U;", 0x44558311),
        ("mov.b32 %r6, 0x83112233; mov.b32 %r7, 0x44556677; prmt.b32 %r5, %r6, %r7, 0x763b;", 0x445583FF),
        # Of a wider register the low bits are converted.
        (
            "mov.b64 %rd4, 0x7ffffffff; cvt.s64.s32 %rd5, %rd4; shr.s64 %rd6, %rd5, 32; cvt.u32.u64 %r5, %rd6;",
            2**32 - 1,
        ),
        # The first is the upper one. To nearest even: 1.0625 is between 1 and 1.125; the smallest number is 2**-9; no
        # further than 448, and NaN.
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, 0f3F880000, 0f3B000000; mov.b32 %r5, {%rs1, %rs1};", 0x38013801),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, 0fC47A0000, 0f7FC00000; mov.b32 %r5, {%rs1, %rs1};", 0xFE7FFE7F),
        ("cvt.rn.satfinite.e5m2x2.f32 %rs1, 0f3FA00000, 0f7F800000; mov.b32 %r5, {%rs1, %rs1};", 0x3D7B3D7B),
        # As it is compiled for a pair: the lower byte is the lower one of the result.
        (
            "mov.b16 %rs1, 0x8138; {.reg .b32 a; .reg .f16 a<2>; .reg .b16 b<2>; cvt.rn.f16x2.e4m3x2 a, %rs1; "
            "mov.b32 {a0, a1}, a; cvt.bf16.f16 b0, a0; cvt.bf16.f16 b1, a1; mov.b32 %r5, {b0, b1}; }",
            0xBB003F80,
        ),
        # a & b; a | b & c; c where a is 0 and b is 1.
        ("mov.b32 %r6, 0x0f0f00ff; lop3.b32 %r5, %r6, 0x3333ffff, 0, 0xc0;", 0x030300FF),
        ("mov.b32 %r6, 0x0f0f00ff; lop3.b32 %r5, %r6, 0x3333ffff, 0x55550000, 0xf8;", 0x1F1F00FF),
        ("mov.b32 %r6, 0x0f0f00ff; lop3.b32 %r5, %r6, 0x3333ffff, 0x55555555, 0x08;", 0x10105500),
        # Two names declared at once.
        ("{.reg .b32 a<2>, b; mov.u32 a1, 5; mov.u32 b, 7; add.s32 %r5, a1, b; }", 12),
        # Of 16 bits what is shifted out is lost.
        (
            "mov.b16 %rs1, 3; mov.b16 %rs2, 5; setp.lt.s32 %p5, %r1, 0; selp.b16 %rs3, %rs1, %rs2, %p5; "
            "shl.b16 %rs4, %rs3, 13; mov.b32 %r5, {%rs3, %rs4};",
            0xA0000005,
        ),
        # Of a register that nothing writes the bytes that are not taken may be anything.
        ("mov.b32 %r6, 0x11223344; prmt.b32 %r5, %r6, %r7, 0x1010U;", 0x33443344),
    ],
)
def test_arithmetic(statements: str, expected: int) -> None:
    places = [litmus.aligned(16) for _ in range(3)]
    litmus.run([statements.replace("; ", ";\n") + "\n" + STORE.replace("%r2", "%r5")], places, Schedule())
    assert int(places[0][0]) % 2**32 == expected


def of_each(statements: str, x: Array, y: Array) -> Array:
    """What the statements make %r5, of %r10 and %r11, a pair a thread."""
    places = [litmus.aligned(len(x)) for _ in range(3)]
    places[0][:], places[1][:] = x.view(np.int32), y.view(np.int32)
    at = "".join(f"	add.s64 %rd{i + 4}, %rd{i}, %rd4;\n" for i in (1, 2, 3))
    body = (
        f"	shl.b32 %r7, %r1, 2;\n	cvt.u64.u32 %rd4, %r7;\n{at}	ld.global.b32 {{ %r10 }}, [ %rd5 + 0 ];\n"
        f"	ld.global.b32 {{ %r11 }}, [ %rd6 + 0 ];\n{statements}	st.global.b32 [ %rd7 + 0 ], {{ %r5 }};\n"
    )
    litmus.run([body], places, Schedule(), warps=len(x) // 32)
    return places[2].view(np.uint32)


@pytest.mark.parametrize(("name", "dtype"), [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)])
@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16])
def test_float8_is_widened(name: str, dtype: torch.dtype, wide: torch.dtype) -> None:
    """Every number, beside each another; of bfloat16 by way of float16. NaN is the canonical one."""
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    pairs = torch.stack([numbers, numbers.flip(0)], 1)
    expected = pairs.view(dtype).to(wide).view(torch.int16)
    expected[pairs.view(dtype).float().isnan()] = 0x7FFF
    statements = f"	cvt.u16.u32 %rs1, %r10;\n	cvt.rn.f16x2.{name} %r5, %rs1;\n"
    if wide == torch.bfloat16:
        statements += "	mov.b32 {%rs2, %rs3}, %r5;\n	cvt.bf16.f16 %rs4, %rs2;\n	cvt.bf16.f16 %rs5, %rs3;\n"
        statements += "	mov.b32 %r5, {%rs4, %rs5};\n"
    words = pairs.numpy().view(np.uint16).astype(np.uint32).reshape(-1)
    got = of_each(statements, words, np.zeros_like(words))
    assert np.array_equal(got, expected.numpy().view(np.uint32).reshape(-1))


def test_products_of_bfloat16_are_rounded_once() -> None:
    """Of numbers of every size, down to what is smaller than the normal ones, and special ones."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 1 << 16, (2, 2, 1024), np.uint16)
    # Products about the smallest normal number.
    sizes = random.integers(40, 88, 1024).astype(np.uint16)
    x[0] = x[0] & 0x807F | sizes << 7
    y[0] = y[0] & 0x807F | (129 - sizes - random.integers(0, 10, 1024).astype(np.uint16)) << 7
    # Infinities, NaN, zeros, the largest numbers.
    x[1, :8] = [0x7F80, 0x7F80, 0x7FC1, 0, 0x8000, 0x7F7F, 0xFF7F, 0xFF80]
    y[1, :8] = [0, 0x8000, 1, 1, 1, 0x7F7F, 0x4000, 0x4000]
    with np.errstate(all="ignore"):
        exact = np.prod([(each.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for each in (x, y)], 0)
        # The last bit of the result is worth this: 8 bits of it, or what subnormal numbers have.
        unit = 2.0 ** (np.maximum(np.frexp(exact)[1] - 1, -126) - 7)
        rounded = np.where(np.isfinite(exact), np.rint(exact / unit) * unit, exact).astype(np.float32)
    expected = np.where(np.isnan(exact), 0x7FFF, rounded.view(np.uint32) >> 16)
    packed = [each[0].astype(np.uint32) | each[1].astype(np.uint32) << 16 for each in (x, y)]
    both = of_each("	mul.bf16x2 %r5, %r10, %r11;\n", *packed)
    assert np.array_equal(both, expected[0] | expected[1] << 16)
    one = "	cvt.u16.u32 %rs1, %r10;\n	cvt.u16.u32 %rs2, %r11;\n	mul.bf16 %rs3, %rs1, %rs2;\n"
    assert np.array_equal(of_each(one + "	cvt.u32.u16 %r5, %rs3;\n", *packed), expected[0])
    # Some of these are subnormal, and rounded.
    small = expected[0] & 0x7FFF
    assert ((small > 0) & (small < 0x80) & (rounded[0] != exact[0])).sum() > 100


# A of 64 x 16 in registers times B of 16 x 8 in shared memory: fragments, fence and B; the product; the wait.
WGMMA = (
    "	shl.b32 %r7, %r1, 4;\n	cvt.u64.u32 %rd4, %r7;\n	add.s64 %rd5, %rd1, %rd4;\n"
    "	ld.global.v4.b32 { %r20, %r21, %r22, %r23 }, [ %rd5 + 0 ];\n"
    "	shl.b32 %r7, %r1, 3;\n	cvt.u64.u32 %rd6, %r7;\n	add.s64 %rd7, %rd2, %rd6;\n"
    "	ld.global.v2.b32 { %r24, %r25 }, [ %rd7 + 0 ];\n	mov.b32 %r6, global_smem;\n	add.s32 %r8, %r6, %r7;\n"
    "	st.shared.v2.b32 [ %r8 + 0 ], { %r24, %r25 };\n	fence.proxy.async.shared::cta;\n" + BARRIER
    # Begins at 1024; rows of 128 bytes, swizzled.
    + f"	mov.b64 %rd8, {1 << 62 | 64 << 32 | 1 << 16 | 64};\n	wgmma.fence.sync.aligned;\n",
    "	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r9, %r10, %r11, %r12}, {%r20, %r21, %r22, %r23}, %rd8, "
    "0, 1, 1, 0;\n	wgmma.commit_group.sync.aligned;\n",
    "	wgmma.wait_group.sync.aligned 0;\n",
    "	add.s64 %rd5, %rd3, %rd4;\n	st.global.v4.b32 [ %rd5 + 0 ], { %r9, %r10, %r11, %r12 };\n",
)  # fmt: skip


def test_wgmma_of_registers() -> None:
    a, b = (torch.randint(-8, 9, size, generator=torch.Generator().manual_seed(0)) for size in ((64, 16), (16, 8)))
    # PTX, Register Fragments for wgmma.mma_async.m64nNk16: by thread, register, half of it.
    thread, register, half = np.ogrid[:128, :4, :2]
    row, lane = thread // 32 * 16 + thread % 32 // 4, thread % 4
    fragments = a[row + register % 2 * 8, lane * 2 + register // 2 * 8 + half]
    # B's columns, in pieces of 16 bytes that change places.
    lies = torch.zeros(8, 8, 8)
    for n in range(8):
        for piece in range(2):
            lies[n, piece ^ n] = b[piece * 8 : piece * 8 + 8, n]
    places = [litmus.aligned(512) for _ in range(3)]
    for place, values in zip(places, (fragments, lies), strict=False):
        words = values.to(torch.bfloat16).contiguous().view(torch.int32).flatten().numpy()
        place[: len(words)] = words
    litmus.run(["".join(WGMMA)], places, Schedule(1), warps=4)
    register = register[..., 0]
    expected = (a @ b)[row[..., 0] + register // 2 * 8, lane[..., 0] * 2 + register % 2]
    assert np.array_equal(places[2].view(np.float32).reshape(128, 4), expected.numpy())


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


def test_a_of_bytes_in_registers_is_not_known() -> None:
    statement = WGMMA[1].replace("k16.f32.bf16.bf16", "k32.f32.e4m3.e4m3").replace("1, 1, 0;", "1, 1;")
    with pytest.raises(CannotExecute, match="A in registers"):
        litmus.kernel(statement)


def test_a_name_is_of_one_kind() -> None:
    with pytest.raises(CannotExecute, match=r"\.reg \.b64 a"):
        litmus.kernel("	{.reg .b32 a;\n	}\n	{.reg .b64 a;\n	}\n")


def test_stores_to_what_may_only_be_read_are_refused() -> None:
    with pytest.raises(Failed, match="store of 4 bytes out of bounds"):
        litmus.run([STORE], [litmus.aligned(16) for _ in range(3)], Schedule(), writable=False)


def test_a_statement_that_the_machine_does_not_know_is_named() -> None:
    with pytest.raises(CannotExecute, match=r"vote\.sync\.all\.pred %p5, %p1, -1"):
        litmus.kernel("	vote.sync.all.pred %p5, %p1, -1;\n")


def test_the_core_and_what_calls_it_agree() -> None:
    """How an instruction is laid out, in C and in NumPy."""
    assert core().size_of_instruction() == INSTRUCTION.itemsize


@pytest.mark.skipif(not os.environ.get("FUSEDTP_EMULATION"), reason="takes a while; nox -s emulate")
def test_the_compiler_may_be_ziglang() -> None:
    pytest.importorskip("ziglang")
    assert compiler.shared_object(compiler.PACKAGED).exists()


def test_files_of_the_core_are_short() -> None:
    for path in compiler.CORE.iterdir():
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path.name
        assert all(len(line) <= 120 and line.isascii() for line in lines), path.name


def test_the_interpreter_is_not_chosen() -> None:
    """What is imported first decides for a whole process."""
    code = "import fusedtp.kernels as k; raise SystemExit(k.INTERPRETED)"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=Path(__file__).parent, check=False).returncode == 0
