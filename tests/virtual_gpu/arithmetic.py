"""Arithmetic, comparisons, conversions and moves of PTX: the machine's operation and the kinds of its operands."""

from __future__ import annotations

import re

from .ptx import CannotExecute, Statement, vector

# Opcodes whose operation does not follow from the name: the operation, and the kinds of its result and operands.
_BY_NAME = {
    "cvt.f32.bf16": ("cvt_f32_bf16", "ww"), "cvt.rn.bf16.f32": ("cvt_bf16_f32", "ww"),
    "cvt.rn.bf16x2.f32": ("cvt_bf16x2_f32", "www"), "cvt.f32.f16": ("cvt_f32_f16", "ww"),
    "cvt.rn.f16.f32": ("cvt_f16_f32", "ww"), "cvt.rn.f16x2.f32": ("cvt_f16x2_f32", "www"),
    "cvt.rn.satfinite.e4m3x2.f32": ("cvt_e4m3x2_f32", "www"), "cvt.rn.satfinite.e5m2x2.f32": ("cvt_e5m2x2_f32", "www"),
    "cvt.rn.f16x2.e4m3x2": ("cvt_f16x2_e4m3x2", "ww"), "cvt.rn.f16x2.e5m2x2": ("cvt_f16x2_e5m2x2", "ww"),
    "cvt.bf16.f16": ("cvt_bf16_f16", "ww"), "cvt.rn.bf16.f16": ("cvt_rn_bf16_f16", "ww"),
    # Both are approximate in PTX.
    "div.full.f32": ("div_f32", "www"), "ex2.approx.f32": ("ex2_f32", "ww"),
    "cvt.s16.s8": ("sext8_16", "ww"), "cvt.s32.s8": ("sext8_32", "ww"), "cvt.s32.s16": ("sext16_32", "ww"),
    "cvt.u16.u32": ("low16", "ww"), "cvt.u32.u16": ("mov_32", "ww"), "cvt.u32.u64": ("low32", "wd"),
    "cvt.u64.u32": ("zext64", "dw"), "cvt.s64.s32": ("sext64", "dw"), "cvt.u16.u8": ("low8", "ww"),
    "cvt.u32.u8": ("low8", "ww"), "cvta.to.global.u64": ("mov_64", "dd"),
    "fma.rn.f32": ("fma_f32", "wwww"), "fma.rn.bf16x2": ("fma_bf16x2", "wwww"), "fma.rn.bf16": ("fma_bf16", "wwww"),
    "neg.s32": ("neg_32", "ww"), "neg.s64": ("neg_64", "dd"), "abs.s32": ("abs_32", "ww"),
    "neg.f32": ("neg_f32", "ww"), "abs.f32": ("abs_f32", "ww"),
    "mul.hi.u32": ("mulhi_u32", "www"), "mul.hi.s32": ("mulhi_s32", "www"),
    "prmt.b32": ("prmt", "wwww"),
    "bfe.u32": ("bfe_u32", "wwww"), "bfe.s32": ("bfe_s32", "wwww"),
    "bfe.s64": ("bfe_s64", "ddww"), "bfe.u64": ("bfe_u64", "ddww"),
}  # fmt: skip
_FLOATS = ("f32", "bf16", "f16", "bf16x2", "f16x2")


def arithmetic(s: Statement) -> tuple[str, str, list[str], int]:
    """Return (operation, kinds, operands, bits of an immediate)."""
    if s.opcode in _BY_NAME:
        op, kinds = _BY_NAME[s.opcode]
        return op, kinds, list(s.operands), 32
    name, mods = s.name, s.modifiers
    last = mods[-1] if mods else ""
    bits = 1 if last == "pred" else int(re.sub(r"\D", "", last.removesuffix("x2")) or 0)
    kind = {1: "p", 64: "d"}.get(bits, "w")
    wide = max(bits, 32) if bits > 1 else 1
    operands = list(s.operands)
    if name == "mov" and operands[0].startswith("{"):
        halves = vector(operands[0])
        if len(halves) == 2 and bits in (32, 64):
            return f"unpack_{bits}", "ww" + kind, [*halves, operands[1]], bits
    elif name == "mov" and operands[1].startswith("{"):
        halves = vector(operands[1])
        if len(halves) == 2 and bits in (32, 64):
            return f"pack_{bits}", kind + "ww", [operands[0], *halves], bits
    elif name == "mov" and len(mods) == 1:
        return f"mov_{wide}", 2 * kind, operands, bits
    elif name == "selp":
        return f"selp_{wide}", 3 * kind + "p", operands, bits
    elif name in ("and", "or", "xor"):
        return f"{name}_{wide}", 3 * kind, operands, bits
    elif name == "not":
        return f"not_{bits}", 2 * kind, operands, bits
    elif name in ("add", "sub", "mul", "fma") and last in _FLOATS and set(mods) <= {"rn", last}:
        return f"{name}_{last}", 3 * kind, operands, 32
    elif name in ("add", "sub") and len(mods) == 1:
        return f"{name}_{bits}", 3 * kind, operands, bits
    elif name in ("mul", "mad") and mods[0] in ("lo", "wide"):
        if mods[0] == "lo":
            return f"{name}_{bits}", (3 if name == "mul" else 4) * kind, operands, bits
        return f"{name}wide_{last}", "dww" + "d" * (name == "mad") if bits == 32 else "www", operands, bits
    elif name == "shl":
        return f"shl_{bits}", 2 * kind + "w", operands, bits
    elif name == "shr":
        signed = "s" if last[0] == "s" else "u"
        return f"shr_{signed}{bits}", 2 * kind + "w", operands, bits
    elif name in ("min", "max", "div", "rem") and len(mods) == 1 and bits > 16:
        return f"{name}_{last}", 3 * kind, operands, bits
    elif name == "setp" and len(mods) == 2 and len(operands) == 3:
        if mods[0] in ("eq", "ne") and last not in _FLOATS:
            return f"{mods[0]}_{wide}", "p" + 2 * kind, operands, bits
        if mods[0] in ("lt", "le", "gt", "ge") and last == "u16":
            return f"{mods[0]}_u32", "p" + 2 * kind, operands, bits
        if mods[0] in ("lt", "le", "gt", "ge") and bits > 16 and (last[0] in "su" or last == "f32"):
            return f"{mods[0]}_{last}", "p" + 2 * kind, operands, bits
    raise CannotExecute("arithmetic")
