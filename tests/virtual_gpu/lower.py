"""Lower statements of PTX to instructions of the machine: an operation, its operands' places, an immediate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arithmetic import arithmetic
from .ptx import CannotExecute, Source, Statement, address, parse, vector

FIELDS = ("op", "pred", "neg", "width", "vec", "flags", "ops", "unused")
INSTRUCTION = np.dtype([(name, "i4") for name in FIELDS] + [("imm", "i8")])
SHARED_BASE = 1024
# The size of a tensor map as a parameter; the key of a launch's constant with the address of its parameters.
MAP_BYTES, PARAMETERS = 128, "parameters"
RELEASE, ACQUIRE, AT_SYS, AT_GPU, TRANSPOSED, BF16, TRANSPOSED_A = (1 << i for i in range(7))
# Types of wgmma operands, two bits of the flags for each; and the flag for A in registers.
_TYPES, _TYPES_AT, A_IN_REGISTERS = ("f16", "bf16", "e4m3", "e5m2"), 7, 1 << 11
# Flags for a load of a narrower value into 64-bit registers, and of a signed one.
WIDENED, SIGNED = 1 << 12, 1 << 13
_SUMS = ("f32", "bf16x2", "f16x2")
_SPECIAL = ("%tid.x", "%ctaid.x", "%nctaid.x")

# Operations on several small numbers in one register. For an absent number the compiler passes a register that nothing
# writes, and drops that part of the result: the value is arbitrary.
_OF_PARTS, _ANYTHING = ("prmt", "cvt_e4m3x2_f32", "cvt_e5m2x2_f32"), "0x9e3779b9"

# A constant operand: a value, or a parameter's name.
Key = int | str


@dataclass
class Lowered:
    """State of lowering: registers and constants by kind, and the pool of operands."""

    source: Source
    op_of: Callable[[str], int]
    registers: dict[str, dict[str, int]] = field(default_factory=lambda: {"w": {}, "d": {}, "p": {}})
    constants: dict[str, dict[Key, int]] = field(default_factory=lambda: {"w": {}, "d": {}, "p": {}})
    pool: list[int] = field(default_factory=list)
    written: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.registers["w"] = {name: i for i, name in enumerate(_SPECIAL)}

    def holds(self, text: str) -> bool:
        """Return whether an operand is a number, or a register that some statement writes."""
        if not self.written:
            self.written.update(each for s in self.source.statements if s.operands for each in vector(s.operands[0]))
        return not text.startswith("%") or text in self.written

    def constant(self, kind: str, key: Key) -> int:
        return ~self.constants[kind].setdefault(key, len(self.constants[kind]))

    def operand(self, text: str, kind: str, bits: int) -> int:
        """Return the place of an operand of `kind`: a register, or a constant (below 0)."""
        if text in self.registers[kind] or text in _SPECIAL:
            return self.registers[kind][text]
        if text == "_":
            # A sink; PTX, mov: values written to it are dropped.
            return self.registers[kind].setdefault(text, len(self.registers[kind]))
        if text.startswith("%") or self.source.declared(text):
            if self.source.kind(text) != kind:
                raise CannotExecute(f"{text} is no operand of kind {kind}")
            return self.registers[kind].setdefault(text, len(self.registers[kind]))
        if text in dict(self.source.params):
            # PTX, Kernel Function Parameter Attributes: the address in the parameter space; only tensor maps may be
            # taken.
            if dict(self.source.params)[text] != MAP_BYTES:
                raise CannotExecute(f"the address of {text}")
            return self.constant(kind, text)
        if text == "global_smem":
            return self.constant(kind, SHARED_BASE)
        try:
            value = int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.removesuffix("U"), 0)
        except ValueError:
            raise CannotExecute(f"operand {text}") from None
        return self.constant(kind, value & ((1 << bits) - 1))

    def make(self, op: str, operands: Sequence[tuple[str, str]], bits: int = 32, **more: int) -> dict[str, Any]:
        """Return an instruction's fields; operands: (text, kind)."""
        number = self.op_of(op)
        if number < 0:
            raise CannotExecute(f"no operation {op}")
        places = [self.operand(text, kind, 64 if kind == "d" else bits) for text, kind in operands]
        row = {"op": number, "ops": len(self.pool), **more}
        self.pool += [*places, *[0] * max(0, 4 - len(places))]
        return row


def _bytes(modifier: str) -> int:
    return int(re.sub(r"\D", "", modifier)) // 8


def _kind(width: int) -> str:
    return "d" if width == 8 else "w"


def _flags(modifiers: Sequence[str]) -> int:
    flags = 0
    if "release" in modifiers or "acq_rel" in modifiers:
        flags |= RELEASE
    if "acquire" in modifiers or "acq_rel" in modifiers:
        flags |= ACQUIRE
    # PTX, atom and ld: the default scope is .gpu, and the default semantics of atom is .relaxed.
    return flags | (AT_SYS if "sys" in modifiers else AT_GPU)


def _load_or_store(low: Lowered, s: Statement) -> dict[str, Any]:
    mods = s.modifiers
    space, width = mods[0].split("::")[0], _bytes(mods[-1])
    if s.name == "ld" and space == "param":
        bits = 64 if low.source.kind(s.operands[0]) == "d" else 32
        name, offset = address(s.operands[1])
        if offset or name not in dict(low.source.params):
            raise CannotExecute("a part of a parameter")
        signed = "s32" in mods and bits == 64
        kind = "w" if bits == 32 or signed else "d"
        op = "sext64" if signed else f"mov_{bits}"
        row = low.make(op, [(s.operands[0], "d" if bits == 64 else "w")], bits)
        low.pool[row["ops"] + 1] = low.constant(kind, name)
        return row
    known = {"global", "shared", "b8", "b16", "b32", "b64", "v2", "v4", "s32"} | {
        f"{t}{b}" for t in "uf" for b in (16, 32, 64)
    }
    weak = set(mods) - {mods[0]} <= known
    if space not in ("global", "shared"):
        raise CannotExecute("state space")
    value, place = s.operands if s.name == "ld" else s.operands[::-1]
    values, (base, offset) = vector(value), address(place)
    kind = _kind(width)
    if not weak:
        if (
            s.name != "ld"
            or space != "global"
            or len(values) != 1
            or not {"acquire", "relaxed"} & set(mods)
            or width not in (4, 8)
        ):
            raise CannotExecute("a strong access of this kind")
        return low.make("ld_strong", [(values[0], kind), (base, "d")], width=width, imm=offset, flags=_flags(mods))
    flags = 0
    if values[0].startswith("%") and low.source.kind(values[0]) != kind:
        # PTX, Operand Size Exceeding Instruction-Type Size: the loaded value is zero-extended.
        if s.name != "ld" or kind != "w":
            raise CannotExecute("a register of another width than what is stored")
        kind, flags = "d", WIDENED | SIGNED * (mods[-1] == "s32")
    listed = [(each, kind) for each in values]
    at = (base, "d" if space == "global" else "w")
    operands = [*listed, at] if s.name == "ld" else [at, *listed]
    return low.make(f"{s.name}_{space}", operands, 8 * width, width=width, vec=len(values), imm=offset, flags=flags)


def _atom(low: Lowered, s: Statement) -> dict[str, Any]:
    mods = s.modifiers
    if mods[0] != "global":
        raise CannotExecute("state space")
    width, what = _bytes(mods[-1]), mods[-2]
    if what not in ("exch", "cas", "add") or width not in (4, 8):
        raise CannotExecute("atomic operation")
    base, offset = address(s.operands[1])
    operands = [(s.operands[0], _kind(width)), (base, "d"), *((each, _kind(width)) for each in s.operands[2:])]
    return low.make(f"atom_{what}", operands, 8 * width, width=width, imm=offset, flags=_flags(mods))


def _cp(low: Lowered, s: Statement) -> dict[str, Any]:
    if s.opcode == "cp.async.commit_group":
        return low.make("cp_async_commit", [])
    if s.opcode == "cp.async.bulk.commit_group":
        return low.make("bulk_commit", [])
    if s.opcode in ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"):
        return low.make("bulk_wait", [], imm=int(s.operands[0], 0), width=s.opcode.endswith(".read"))
    if s.opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        return low.make("cp_async_wait", [], imm=int(s.operands[0], 0) if s.operands else 0)
    if s.opcode.startswith("cp.async.bulk.tensor"):
        known = re.fullmatch(
            r"cp\.async\.bulk\.tensor\.[1-5]d\.(?:(shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes)"
            r"|global\.shared::cta(?:\.tile)?\.bulk_group)",
            s.opcode,
        )
        if not known:
            raise CannotExecute("bulk copy")
        tile, tensor, *bars = s.operands if known[1] else s.operands[::-1]
        found = re.fullmatch(r"\[\s*(%\w+)\s*,\s*\{([^}]*)\}\s*\]", tensor)
        if not found or any(address(each)[1] for each in (tile, *bars)):
            raise CannotExecute("tensor coordinates")
        at = vector(found[2])
        words = [(each, "w") for each in (*(address(bar)[0] for bar in bars), *at)]
        op = "tma_load" if known[1] else "tma_store"
        return low.make(op, [(address(tile)[0], "w"), (found[1], "d"), *words], vec=len(at))
    if not re.fullmatch(r"cp\.async\.c[ag]\.shared(::cta)?\.global", s.opcode):
        raise CannotExecute("copy")
    (dst, offset), (src, also) = address(s.operands[0]), address(s.operands[1])
    if also:
        raise CannotExecute("an offset of the source")
    given = s.operands[3] if len(s.operands) > 3 else s.operands[2]
    return low.make("cp_async", [(dst, "w"), (src, "d"), (given, "w")], width=int(s.operands[2], 0), imm=offset)


def _mbarrier(low: Lowered, s: Statement) -> dict[str, Any]:
    what = s.modifiers[0]
    if what == "try_wait" and s.modifiers[1] == "parity":
        base, offset = address(s.operands[1])
        return low.make("mbarrier_try_wait", [(s.operands[0], "p"), (base, "w"), (s.operands[2], "w")], imm=offset)
    at = 1 if what == "arrive" else 0
    base, offset = address(s.operands[at])
    value = int(s.operands[at + 1], 0) if len(s.operands) > at + 1 else 0
    if what == "arrive" and s.operands[0] == "_" and not {"release", "relaxed", "cluster"} & set(s.modifiers):
        if s.modifiers[1] == "expect_tx":
            return low.make("mbarrier_arrive", [(base, "w")], imm=offset, vec=1, width=value)
        return low.make("mbarrier_arrive", [(base, "w")], imm=offset, vec=value or 1)
    if what not in ("init", "inval"):
        raise CannotExecute("mbarrier")
    return low.make(f"mbarrier_{what}", [(base, "w")], imm=offset, width=value)


def _multimem(low: Lowered, s: Statement) -> dict[str, Any]:
    found = re.fullmatch(
        r"multimem\.(?:ld_reduce\.relaxed\.sys\.global\.add\.(v4\.f32|acc::f32\.v4\.(?:bf16|f16)x2)"
        r"|(st)\.relaxed\.sys\.global\.v4\.f32)",
        s.opcode,
    )
    if not found:
        raise CannotExecute("multimem")
    place, value = s.operands if found[2] else s.operands[::-1]
    (base, offset), words = address(place), [(each, "w") for each in vector(value)]
    if found[2]:
        return low.make("multimem_st", [(base, "d"), *words], imm=offset)
    return low.make("multimem_ld", [*words, (base, "d")], imm=offset, vec=_SUMS.index(found[1].split(".")[-1]))


def _matrix(low: Lowered, s: Statement) -> dict[str, Any]:
    words = lambda texts: [(each, "w") for each in texts]  # noqa: E731
    if s.name in ("ldmatrix", "stmatrix"):
        if "m8n8" not in s.modifiers or s.modifiers[-1] != "b16":
            raise CannotExecute("matrix")
        value, place = s.operands if s.name == "ldmatrix" else s.operands[::-1]
        base, offset = address(place)
        operands = words([*vector(value), base] if s.name == "ldmatrix" else [base, *vector(value)])
        flags = TRANSPOSED if "trans" in s.modifiers else 0
        return low.make(s.name, operands, imm=offset, vec=len(vector(value)), flags=flags)
    if s.name == "mma":
        found = re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", s.opcode)
        if not found:
            raise CannotExecute("matrix multiplication")
        return low.make(
            "mma", words(each for group in s.operands for each in vector(group)), flags=BF16 * (found[1] == "bf16")
        )
    if s.modifiers[0] == "mma_async":
        found = re.fullmatch(
            r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)"
            r"(?:k16\.f32\.(bf16|f16)\.\2|k32\.f32\.(e4m3|e5m2)\.(e4m3|e5m2))",
            s.opcode,
        )
        d = vector(s.operands[0])
        if not found or s.operands[4:6] != ("1", "1") or len(d) != int(found[1]) // 2:
            raise CannotExecute("matrix multiplication")
        a = vector(s.operands[1])
        in_registers = s.operands[1].startswith("{")
        # 8-bit operands, and A in registers, are contiguous along K.
        across = [int(each) for each in s.operands[6:]]
        if len(across) != (0 if found[3] else 2 - in_registers):
            raise CannotExecute("matrix multiplication")
        if in_registers and (found[3] or len(a) != 4 or not all(each.startswith("%") for each in a)):
            raise CannotExecute("A in registers")
        types = [_TYPES.index(found[3] or found[2]), _TYPES.index(found[4] or found[2])]
        flags = types[0] << _TYPES_AT | types[1] << _TYPES_AT + 2
        if across:
            flags |= TRANSPOSED_A * (across[0] and not in_registers) | TRANSPOSED * across[-1]
        flags |= A_IN_REGISTERS * in_registers
        left = words(a) if in_registers else [(a[0], "d")]
        operands = [*words(d), *left, (s.operands[2], "d"), (s.operands[3], "p")]
        return low.make("wgmma", operands, bits=1, vec=len(d), flags=flags)
    ops = {"fence": "wgmma_fence", "commit_group": "wgmma_commit", "wait_group": "wgmma_wait"}
    return low.make(ops[s.modifiers[0]], [], imm=int(s.operands[-1], 0) if s.operands else 0)


def _lower(low: Lowered, s: Statement) -> dict[str, Any]:
    if s.name in ("ld", "st"):
        return _load_or_store(low, s)
    families = {"atom": _atom, "cp": _cp, "mbarrier": _mbarrier, "multimem": _multimem} | dict.fromkeys(
        ("ldmatrix", "stmatrix", "mma", "wgmma"), _matrix
    )
    if s.name in families:
        return families[s.name](low, s)
    if s.opcode == "cvta.param.u64":
        row = low.make("add_64", [(each, "d") for each in s.operands])
        low.pool[row["ops"] + 2] = low.constant("d", PARAMETERS)
        return row
    if s.opcode in ("bra", "bra.uni"):
        return low.make("bra", [])
    if s.opcode == "brx.idx":
        assert s.label is not None
        targets = [low.source.labels[each] for each in low.source.tables[s.label]]
        row = low.make("brx", [(s.operands[0], "w")], vec=len(targets))
        low.pool[row["ops"] + 1 :] = [*targets, 0, 0, 0]
        return row
    if s.opcode == "ret":
        return low.make("ret", [])
    found = re.fullmatch(r"(?:bar|barrier)\.(?:cta\.)?(sync|arrive)(?:\.aligned)?", s.opcode)
    if found and all(each.isdigit() for each in s.operands):
        number, threads = (*map(int, s.operands), 0)[:2]
        return low.make("barrier", [], imm=number, vec=threads, width=found[1] == "sync")
    if s.opcode == "bar.warp.sync":
        return low.make("warp_sync", [(s.operands[0], "w")])
    if found := re.fullmatch(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", s.opcode):
        return low.make("setmaxnreg", [], imm=int(s.operands[0]), width=found[1] == "inc")
    if s.opcode == "fence.proxy.async.global":
        return low.make("fence_proxy_global", [])
    if re.fullmatch(r"fence\.proxy\.async\.shared(::cta)?", s.opcode):
        return low.make("fence_proxy_shared", [])
    if s.opcode == "fence.proxy.alias":
        return low.make("fence_proxy_alias", [])
    if s.opcode == "elect.sync":
        to, won = s.operands[0].split("|")
        return low.make("elect", [(to, "w"), (won, "p")])
    if s.opcode == "shfl.sync.idx.b32" and s.operands[3:] == ("31", "-1") and "|" not in s.operands[0]:
        return low.make("shfl_idx", [(each, "w") for each in s.operands[:3]])
    if s.opcode == "cvt.s64.s32" and low.source.kind(s.operands[1]) == "d":
        # PTX, Operand Size Exceeding Instruction-Type Size: the low bits of a wider register are converted.
        return low.make("sext64_low", [(each, "d") for each in s.operands])
    if s.opcode == "lop3.b32":
        return low.make("lop3", [(each, "w") for each in s.operands[:4]], imm=int(s.operands[4], 0))
    op, kinds, operands, bits = arithmetic(s)
    if op in _OF_PARTS:
        operands[1:] = [each if low.holds(each) else _ANYTHING for each in operands[1:]]
    return low.make(op, list(zip(operands, kinds, strict=True)), bits)


class Program:
    """A kernel in the machine's form."""

    def __init__(self, name: str, text: str, op_of: Callable[[str], int]) -> None:
        self.name, self.source = name, parse(text)
        low = Lowered(self.source, op_of)
        self.instructions = np.zeros(len(self.source.statements), INSTRUCTION)
        for i, s in enumerate(self.source.statements):
            try:
                row = _lower(low, s)
                row["pred"] = low.operand(s.guard, "p", 1) if s.guard else -1
                if s.label and s.name == "bra":
                    row["imm"] = self.source.labels[s.label]
            except CannotExecute as error:
                raise CannotExecute(f"{s.text} ({error}), {s.where}") from None
            for name, value in row.items():
                self.instructions[i][name] = value
            self.instructions[i]["neg"] = s.negated
        self.pool = np.array(low.pool + [0] * 4, np.int32)
        self.count = np.zeros(len(self.instructions), np.uint64)
        # True once a rank with elements of every operand has launched this program.
        self.whole = False
        self.sizes = [len(low.registers[kind]) for kind in "wdp"]
        self.names = {kind: {place: name for name, place in low.registers[kind].items()} for kind in "wdp"}
        self.keys = {kind: list(low.constants[kind]) for kind in "wdp"}

    def constants(self, values: dict[str, int]) -> list[np.ndarray[Any, Any]]:
        """Return a launch's constants, words and doubles repeated for every lane; values: of parameters, by name."""
        made = []
        for kind, dtype in (("w", np.uint32), ("d", np.uint64), ("p", np.uint32)):
            keys = self.keys[kind]
            found = [values[key] if isinstance(key, str) else key for key in keys] or [0]
            mask = (1 << 64) - 1 if kind == "d" else (1 << 32) - 1
            column = np.array([each & mask for each in found], dtype)
            made.append(
                column * np.uint32(mask)
                if kind == "p"
                else np.ascontiguousarray(np.repeat(column[:, None], 32, axis=1))
            )
        return made
