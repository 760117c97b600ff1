"""Small kernels in hand-written PTX: what the memory model allows, and what the machine refuses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .lower import Program
from .machine import Machine, Memory, Ran, Schedule, Waiting, op_of
from .stub import MAP

Array = np.ndarray[Any, Any]

_REGISTERS = """
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<40>;
	.reg .b64 %rd<12>;
"""
# Every kernel has three addresses, %rd1 to %rd3, a tensor map of the first one's 16 words, %rd10, and its thread's
# number, %r1; %p1 is true in lane 0 of warp 0.
_BEGIN = """	ld.param.b64 %rd1, [k_param_0];
	ld.param.b64 %rd2, [k_param_1];
	ld.param.b64 %rd3, [k_param_2];
	mov.b64 %rd9, k_param_3;
	cvta.param.u64 %rd10, %rd9;
	mov.u32 %r1, %tid.x;
	setp.eq.b32 %p1, %r1, 0;
	setp.eq.b32 %p2, %r1, 32;
	mov.b32 %r2, 1;
"""

POLL = """$L__poll:
	mov.u32 %r3, 0;
	@%p1 ld.global.sys.acquire.b32 %r3, [ %rd2 + 0 ];
	setp.eq.b32 %p3, %r3, 0;
	and.pred %p4, %p1, %p3;
	@%p4 bra $L__poll;
"""


@functools.cache
def kernel(body: str, registers: int = 0) -> Program:
    """Return a program of the statements in `body`, made once; registers: of a thread at its start, if declared."""
    params = ",\n".join(f"\t.param .u64 .ptr .global .align 1 k_param_{i}" for i in range(3))
    params += ",\n\t.param .align 64 .b8 k_param_3[128]"
    cap = f".maxnreg {registers}\n" if registers else ""
    text = f".visible .entry k(\n{params}\n)\n{cap}{{{_REGISTERS}{_BEGIN}{body}\tret;\n}}\n"
    return Program("k", text, op_of)


def run(
    bodies: Sequence[str], places: Sequence[Array], schedule: Schedule, warps: int = 1, shared: int = 1024,
    writable: bool = True, owner: int = 1, registers: int = 0,
) -> Ran:  # fmt: skip
    """Run one CTA of each body on its own rank; all memory belongs to rank `owner`."""
    maps = np.zeros(1, MAP)
    maps[0]["ndim"], maps[0]["base"], maps[0]["size"] = 2, places[0].ctypes.data, 4
    maps[0]["dim"][:2], maps[0]["stride"][:2], maps[0]["box"][:2] = (16, 1), (4, 64), (16, 1)
    machine = Machine()
    for rank, body in enumerate(bodies):
        touches = [Memory(x.ctypes.data, x.ctypes.data + x.nbytes, owner, writable) for x in places]
        values = {f"k_param_{i}": x.ctypes.data for i, x in enumerate(places)} | {"k_param_3": 0}
        machine.launch(Waiting("k", kernel(body, registers), values, touches, rank, 1, warps, shared, maps))
    return machine.run(schedule)


def aligned(words: int) -> Array:
    """Return int32 zeros at a multiple of 16 bytes."""
    raw = np.zeros(4 * words + 16, np.uint8)
    begin = -raw.ctypes.data % 16
    return raw[begin : begin + 4 * words].view(np.int32)


def message(producer: str, consumer: str, seeds: int, warps: int = 1) -> set[int]:
    """Return the values that the consumer read where the producer stored 1, over many schedules."""
    seen = set()
    for seed in range(seeds):
        data, flag, out = (aligned(16) for _ in range(3))
        run([producer, consumer], [data, flag, out], Schedule(seed, stale=0.8, drain=0.01, quantum=4), warps)
        seen.add(int(out[0]))
    return seen
