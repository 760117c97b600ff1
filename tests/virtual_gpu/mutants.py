"""Compiled kernels broken on purpose, one statement of PTX at a time: some run must find each."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fusedtp.kernels
from fusedtp import PeerTimeout

from . import float8, giveups
from .cases import FLOAT8, run, small
from .driver import EmulatedDriver
from .machine import Failed, Schedule
from .ptx import parse, without_contraction

Change = str | Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Kind:
    """A kind of mutant: a change of every place that `pattern` matches, one place a mutant."""

    name: str
    pattern: str
    change: Change
    # Take the first of several places in one line of the source, instead of the last.
    first: bool = False
    # A pattern for the functions of the source.
    inside: str = ""


@dataclass(frozen=True)
class Mutant:
    """A place of a kind in a kernel. `where`: its source line and its callers' lines; `inside`: their functions."""

    kind: str
    kernel: str
    where: str
    inside: str
    begin: int
    end: int
    instead: str
    # The PTX of this place: a kernel may be compiled in several ways.
    digest: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.kernel} ({self.where}: {self.inside})"

    def applied(self, name: str, text: str) -> str:
        """Return the kernel's PTX with this place broken, and other kernels unchanged."""
        if name != self.kernel or _digest(text) != self.digest:
            return text
        return text[: self.begin] + self.instead + text[self.end :]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _more(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1};"


def _beside(match: re.Match[str]) -> str:
    return f"{match[1]}+{int(match[2] or 0) + 16}]"


def _next_word(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 4} "


def _next_bytes(match: re.Match[str]) -> str:
    # As many bytes as the load reads.
    return f"{match[1]}{match[2]}{match[3]}{int(match[4]) + int(match[2]) // 8} "


def _next_row(match: re.Match[str]) -> str:
    # For contractions of up to 512, rows of block scales have 16 bytes.
    return f"{match[1]}{int(match[2]) + 16} "


def _stored_late(match: re.Match[str]) -> str:
    # Move a loop's store, with the code right before it, behind the signal; the loop in place loses the store.
    signal, between, before, label, first, store, rest = match.groups()
    late = f"{before}{label}_late:{first}{store}{rest.replace(label, label + '_late')}"
    return f"{signal}{late}{between}{before}{label}:{first}{rest}"


def _turned(match: re.Match[str]) -> str:
    return "{" + ", ".join(re.findall(r"%\w+", match[1])[::-1]) + "}], ["


_FRAMES = 4
# Why a mutant may be equivalent: kinds, where, the reason.
EQUIVALENT = (
    (r"release", r"raise_to_all < enter\b", "before an entry a fingerprint is stored, by strong stores, and those of "
     "the machine are seen at once: it cannot show what this one is for; what kernels before it did is there for all "
     "when they have ended"),
    (r"no barrier", r"raise_to_all < finish\b", "the last arrival is told to all threads behind a barrier, and nothing "
     "is stored since"),
    (r"no barrier", r"raise_to_all < enter\b", "before an entry a fingerprint is stored, by the same thread"),
    (r"release", r"(_give_up|_report)\b", "nothing is stored before an entry that is taken back, and here the host "
     "reads a report when the kernel has ended"),
    (r"arrival", r"arrives_last < leave\b", "what the last arrival is followed by touches the rank's own header only; "
     "all else is there for who comes next as the kernel has ended"),
    (r"acquire", r"leave\b|^_entered_otherwise\b", "behind an entry fingerprints are read, by strong loads, and "
     "those of the machine read the newest value: it cannot show what this one is for"),
    (r"mask of a store", r"^(wait|arrives_last|leave|turn|_give_up)\b", "every thread would store the same value"),
    (r"wgmma waited", r"^matmul_tiles\b", "behind the loop over tiles none is under way: each tile's are waited for "
     "before it is rounded"),
    (r"mask of a load", r"", "what is read beyond the mask is in the same operand or arena, and is never stored"),
    (r"no barrier", r"^(?!raise_signal|raise_to_all|arrives_last)", "between it and the barriers beside it no two "
     "warps touch the same shared memory, and nothing is released: the checks see every access"),
)  # fmt: skip

# Descriptor constants of wgmma: a swizzle of 128 bytes, and the offset of the next 16 of k.
_SWIZZLED = 1 << 62
KINDS = (
    Kind("release made relaxed", r"(sys)\.release(\.exch)", r"\1.relaxed\2"),
    Kind("release at gpu scope", r"sys(\.release\.exch)", r"gpu\1"),
    Kind("acquire made relaxed", r"(ld\.global\.sys)\.acquire", r"\1.relaxed"),
    Kind("acquire at gpu scope", r"(ld\.global)\.sys(\.acquire)", r"\1.gpu\2"),
    Kind("arrival without release", r"(gpu)\.acq_rel(\.add)", r"\1.acquire\2"),
    Kind("arrival without acquire", r"(gpu)\.acq_rel(\.add)", r"\1.release\2"),
    Kind("no barrier", r"bar\.sync\s+0;", ";"),
    Kind("no proxy fence, global", r"fence\.proxy\.async\.global;", ";"),
    Kind("no proxy fence, shared", r"fence\.proxy\.async\.shared::cta;", ";"),
    Kind("cp.async waited for too late", r"(cp\.async\.wait_group\s+)(\d+);", _more),
    Kind("wgmma waited for too late", r"(wgmma\.wait_group\.sync\.aligned )(\d+);", _more),
    Kind("no proxy fence, aliases", r"fence\.proxy\.alias;", ";"),
    Kind("sum beside its place", r"(multimem\.ld_reduce[^;]*\[%rd\d+)\]", r"\1+16]"),
    Kind("stored to all beside its place", r"(multimem\.st[^;]*\[%rd\d+)\]", r"\1+16]"),
    Kind("mask of a store to all away", r"@there (multimem\.st)", r"\1"),
    Kind("mask of a sum turned", r"@there (multimem\.ld_reduce)", r"@!there \1"),
    Kind("no wgmma.fence", r"wgmma\.fence\.sync\.aligned;", ";"),
    Kind("too few bytes expected", r"(expect_tx[^;]*), (\d+);", lambda m: f"{m[1]}, {int(m[2]) // 2};"),
    Kind("too many bytes expected", r"(expect_tx[^;]*), (\d+);", lambda m: f"{m[1]}, {int(m[2]) * 2};"),
    Kind("two arrivals expected", r"(mbarrier\.init[^;]*), 1;", r"\1, 2;"),
    Kind("every thread arrives", r"@%p\d+ (mbarrier\.arrive)", r"\1"),
    Kind("mbarrier not waited for", r"@!complete bra\.uni waitLoop;", ""),
    Kind("parity stands still", r"(try_wait\.parity[^;]*\]), %r\d+;", r"\1, 0;"),
    Kind("coordinates of TMA turned", r"\{(%\w+(?:, %\w+)+)\}\], \[", _turned),
    Kind("swizzle of wgmma", r"(or\.b64[^;]*, )(4611686\d+);", lambda m: f"{m[1]}{int(m[2]) ^ 3 * _SWIZZLED};"),
    Kind("k step of wgmma", r"(add\.s64[^;]*, )(4611686\d+);", lambda m: f"{m[1]}{int(m[2]) + 2};"),
    Kind("operand of ldmatrix", r"(ldmatrix[^;]*\[%r\d+)(?:\+(\d+))?\]", _beside),
    Kind("place of stmatrix", r"(stmatrix[^;]*\[%r\d+)(?:\+(\d+))?\]", _beside),
    Kind("end of k not masked", r"(cp\.async\.cg[^;]*, 0x10), %r\d+;", r"\1, 0x10;"),
    Kind("mask of a store away", r"@!?%p\d+ (st\.global\.(?:v4\.)?b(?:16|32))", r"\1"),
    Kind("mask of a store turned", r"@(%p\d+) (st\.global\.(?:v4\.)?b(?:16|32))", r"@!\1 \2", first=True),
    Kind("mask of a load away", r"@!?%p\d+ (ld\.global\.(?:v4\.)?b(?:16|32))", r"\1"),
    Kind("hint of alignment", r"(ld\.global\.v4\.b32[^;]*\[ %rd\d+ \+ )(\d+) ", lambda m: f"{m[1]}{int(m[2]) + 8} "),
    Kind("swizzle of shared memory", r"(xor\.b32[^;]*, )(16|32|64);", lambda m: f"{m[1]}{int(m[2]) * 2};"),
    Kind("tile order", r"(rem\.s32\s+%r\d+), (%r\d+), (%r\d+);", r"\1, \3, \2;"),
    Kind("sum starts elsewhere", r"(mma\.sync[^;]*\{ %r\d+, %r\d+, %r\d+, )(%r\d+) (\};)", r"\g<1>0 \3"),
)
# Mutants for float8 with scales.
SCALES = (
    # The compiled signal is placed before the loop over rows, which jumps to it at the end.
    Kind("scale behind the signal", r"(?s)(@%p\d+ atom\.global\.sys\.release[^;]*;)"
         r"((?:(?!\.release).)*?bra\s+\$L__BB\w+;)((?:(?!bra\s|\.release).)*?)(\$L__BB\w+):((?:(?!\$L__BB\w+:).)*?)"
         r"(@!?%p\d+ st\.global\.b32[^;]*;)((?:(?!\$L__BB\w+:).)*?bra\s+\4;)",
         _stored_late, inside=r"^raise_signal < push_rows\b"),
    Kind("scale beside its place", r"(st\.global\.b32 \[ %rd\d+ \+ )(\d+) ", _next_word, inside=r"^_send_scales\b"),
    Kind("scale of another row", r"(ld\.global\.b32[^;]*\[ %rd\d+ \+ )(\d+) ", _next_word,
         inside=r"^(_send_scales|_scales_of|_scaled|scale_columns)\b"),
    Kind("scales of columns turned", r"(ld\.global\.v2\.b32) \{ (%r\d+), (%r\d+) \}", r"\1 { \3, \2 }",
         inside=r"^(scale_columns|scales\.py)\b"),  # Triton 3.8 gives these loads a line 0
)  # fmt: skip
# Mutants for block scales, which are bytes.
BLOCK_SCALES = (
    Kind("block scale of the next block", r"(ld\.global\.b)(8|16)( \{ %rs\d+ \}, \[ %rd\d+ \+ )(\d+) ", _next_bytes,
         inside=r"^multiply\b"),
    Kind("block scale of another row", r"(ld\.global\.b(?:8|16) \{ %rs\d+ \}, \[ %rd\d+ \+ )(\d+) ", _next_row,
         inside=r"^multiply\b"),
    Kind("block scale beside its place", r"(st\.global\.v4\.b32 \[ %rd\d+ \+ )(\d+) ", _next_row,
         first=True, inside=r"< _send_block_scales\b"),
)  # fmt: skip


def kinds_of(dtype: torch.dtype) -> tuple[Kind, ...]:
    """Return the kinds of mutants for operands of a dtype."""
    if dtype == float8.MXFP8:
        return BLOCK_SCALES
    return SCALES if dtype in FLOAT8.values() else KINDS


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    path = Path(inspect.getfile(fusedtp.kernels)).parent / file
    if not path.exists():
        return []
    defined = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [(node.lineno, node.end_lineno or 0, node.name) for node in defined]


def _inside(where: str) -> str:
    """Return the functions that contain the lines of a place."""
    found = []
    for file, line in re.findall(r"([\w.]+):(\d+)", where):
        names = [name for first, last, name in _functions(file) if first <= int(line) <= last]
        found.append(names[-1] if names else file)
    return " < ".join(found)


def _places(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset of each `.loc`, and its line with its callers' lines: code inlined twice is in two places.

    Up to Triton 3.7 the comment lists callers; 3.8 names the caller's own `.loc`, which comes first.
    """
    files = {number: name.rsplit("/")[-1] for number, name in re.findall(r'\.file\s+(\d+) "([^"]+)"', text)}
    callers: dict[tuple[str, ...], list[str]] = {}
    for match in re.finditer(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?[^\n]*//([^\n]*)", text):
        places = re.findall(r"(\w+\.py:\d+)", match[7])
        if match[4]:
            caller = match.group(4, 5, 6)
            places += callers.get(caller, [f"{files[match[4]]}:{match[5]}"])
        callers[match.group(1, 2, 3)] = places
        yield match.start(), " < ".join(places[:_FRAMES])


def mutants(name: str, text: str, kinds: Sequence[Kind] = KINDS) -> Iterator[Mutant]:
    """Yield one mutant for each kind and source line, with its callers' lines."""
    lines = list(_places(text))
    source = parse(text)
    # Lines that no launch executes.
    dead = {source.statements[i].line for i in without_contraction(source)}
    for kind in kinds:
        last: dict[str, re.Match[str]] = {}
        for match in re.finditer(kind.pattern, text):
            if text.count("\n", 0, match.start()) in dead:
                continue
            where = next((where for start, where in reversed(lines) if start < match.start()), "")
            if kind.inside and not re.search(kind.inside, _inside(where)):
                continue
            if not (kind.first and where in last):
                last[where] = match
        for where, match in last.items():
            instead = kind.change(match) if callable(kind.change) else match.expand(kind.change)
            yield Mutant(kind.name, name, where, _inside(where), match.start(), match.end(), instead, _digest(text))


def reason(mutant: Mutant) -> str:
    """Return why a mutant that no run finds is an equivalent kernel, or ""."""
    for kind, inside, why in EQUIVALENT:
        if re.search(kind, mutant.kind) and re.search(inside, mutant.inside):
            return why
    return ""


def sources(driver: EmulatedDriver, op: str, dtype: torch.dtype) -> dict[str, str]:
    """Return the kernels of an op by name, as launched for these cases."""
    found: dict[str, str] = {}

    def record(name: str, text: str) -> str:
        found[name] = text
        return text

    driver.rewrite = record
    try:
        # The mutants' number of ranks, which is a constant of the kernels.
        run(driver, [op], 2, dtype, small(driver.capability, dtype), Schedule())
    finally:
        driver.rewrite = None
    return found


def find(driver: EmulatedDriver, op: str, dtype: torch.dtype, mutant: Mutant, seeds: int) -> str:
    """Return how the first of `seeds` runs finds a mutant, or "". A mutant with a reason gets an eighth of the runs."""
    if reason(mutant):
        seeds = -(-seeds // 8)
    driver.rewrite = mutant.applied
    shape = small(driver.capability, dtype)
    # Also less than a step of k, more steps than are in flight, and whole tiles, where reads beyond the last are out of
    # bounds. All lengths are multiples of 16, so the compiled code is the same.
    shapes = (shape, replace(shape, K=48), replace(shape, K=4 * shape.K), replace(shape, M=256, N=256))
    try:
        for seed in range(seeds):
            # Vary the delay of stores, the share of stale loads, and the number of resident CTAs.
            how = Schedule(seed, stale=(0.5, 1.0, 0.9)[seed % 3], drain=(0.05, 0.002, 0.02)[seed % 3], tick=0.001,
                residents=(64, 64, 1)[seed % 3], limit=20_000_000, idle_limit=2_000_000)  # fmt: skip
            try:
                if seed % 4 == 3:
                    giveups.missing(driver, op, 2, dtype, shape, replace(how, tick=0.0003))
                run(driver, [op] * 2, 2, dtype, shapes[(seed + seed // 4) % 4], how)
            except (Failed, AssertionError, PeerTimeout) as error:
                return f"seed {seed}: {type(error).__name__}: {error}"
            except pytest.fail.Exception as error:
                return f"seed {seed}: {error}"
    finally:
        driver.rewrite = None
        driver.machine.waiting.clear()
    return ""
