"""Parse PTX as Triton emits it into statements: opcode, guard, operands, labels, and the line of the source."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The machine's register file by declared type: a predicate, up to 32 bits, 64 bits.
_KINDS = {"pred": "p", "b8": "w", "b16": "w", "b32": "w", "b64": "d", "f16": "w", "f16x2": "w", "f32": "w", "f64": "d"}
_KINDS |= {f"{sign}{bits}": "d" if bits == 64 else "w" for sign in "su" for bits in (8, 16, 32, 64)}
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[(?:[^\[\]{}]|\{[^}]*\})*\]|[^,\s]+")


class CannotExecute(NotImplementedError):
    """The machine does not know a statement, which the message quotes."""


@dataclass(frozen=True)
class Statement:
    """An instruction. `guard` is its predicate, if any; `negated`: it executes if the predicate is false."""

    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    where: str
    # For a branch: the label, or that of a list of labels, with its scope.
    label: tuple[int, str] | None = None
    line: int = 0

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]


@dataclass(frozen=True)
class Source:
    """A kernel: statements, places of labels, parameters as (name, bytes), and the kind of each register.

    tables: the labels of each list of branch targets. registers: of a thread at its start, if declared, or 0.
    """

    statements: list[Statement]
    labels: dict[tuple[int, str], int]
    params: list[tuple[str, int]]
    kinds: dict[str, str]
    tables: dict[tuple[int, str], list[tuple[int, str]]]
    registers: int

    def declared(self, text: str) -> bool:
        """Return whether a name is declared as a register, alone or in a range; inline assembly has names without %."""
        return text in self.kinds or text.rstrip("0123456789") in self.kinds

    def kind(self, register: str) -> str:
        """Return a register's file in the machine: "p", "w" or "d"."""
        stem = register.rstrip("0123456789")
        if register in self.kinds:
            return self.kinds[register]
        if stem not in self.kinds:
            raise CannotExecute(f"{register} is not declared")
        return self.kinds[stem]


def vector(operand: str) -> list[str]:
    """Return the elements of {a, b}, or the operand itself."""
    return re.findall(r"[^{},\s]+", operand)


def address(operand: str) -> tuple[str, int]:
    """Return the register and offset of [register + offset], or of [register]."""
    found = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if not found:
        raise CannotExecute(f"address {operand}")
    return found[1], int(found[2] or "0", 0)


def _params(text: str) -> list[tuple[str, int]]:
    head = text[text.index(".entry") : text.index("\n{")]
    found = re.findall(r"\.param\s+([^,\n]*?)(\w+_param_\d+)(?:\[(\d+)\])?", head)
    sizes = {"64": 8, "32": 4, "16": 2, "8": 1}
    return [
        (name, int(length) if length else sizes[re.search(r"\.[usbf](\d+)", what)[1]])  # type: ignore[index]
        for what, name, length in found
    ]


def parse(text: str) -> Source:
    """Parse one kernel's PTX."""
    files = {number: name.rsplit("/")[-1] for number, name in re.findall(r'\.file\s+(\d+) "([^"]+)"', text)}
    statements: list[Statement] = []
    labels: dict[tuple[int, str], int] = {}
    kinds: dict[str, str] = {}
    tables: dict[tuple[int, str], list[tuple[int, str]]] = {}
    # Labels of inline assembly are local to its braces.
    scopes, last, where = [0], 0, ""
    begin = text.index("\n{")
    cap = re.search(r"\.maxnreg (\d+)", text[:begin])
    # The lines so far of a statement of several lines, and the line before it, which may be its label.
    table = before = ""
    for number, line in enumerate(text[begin + 2 :].split("\n"), text[: begin + 2].count("\n")):
        line = line.split("//")[0].strip()
        if found := re.match(r"\.loc\s+(\d+) (\d+)", line):
            where = f"{files.get(found[1], found[1])}:{found[2]}"
            continue
        if table or ".branchtargets" in line:
            table += line
            if line.endswith(";"):
                name, targets = (before * table.startswith(".") + table[:-1]).replace(" ", "").split(":.branchtargets")
                tables[_scoped(name, scopes[-1])] = [_scoped(each.strip(), scopes[-1]) for each in targets.split(",")]
                table = ""
            continue
        before = line
        if line.startswith("{") and (rest := line[1:].strip()) is not None and not line.endswith("},"):
            last += 1
            scopes.append(last)
            line = rest
        if line.startswith("}"):
            scopes.pop()
            # The kernel's own brace. A `ret` may be anywhere before it.
            if not scopes:
                break
            line = line[1:].strip()
        for part in filter(None, (each.strip() for each in line.split(";"))):
            if part == "}":
                # The end of inline assembly in one line.
                scopes.pop()
                continue
            if found := re.match(r"\.reg\s+\.(\w+)\s+(.*)", part):
                # Separate braces may declare a name again; here only with the same kind.
                for name in re.findall(r"(%?\w+)(?:<\d+>)?", found[2]):
                    if found[1] not in _KINDS or kinds.setdefault(name, _KINDS[found[1]]) != _KINDS[found[1]]:
                        raise CannotExecute(part)
                continue
            if part.startswith("."):
                continue
            if found := re.match(r"(\$?\w+):(?!:)\s*(.*)", part):
                labels[_scoped(found[1], scopes[-1])] = len(statements)
                part = found[2]
            if part:
                statements.append(_statement(part, where, scopes[-1], number))
    last_one = statements[-1]
    assert last_one.name in ("ret", "bra"), last_one.text
    assert last_one.guard is None, last_one.text
    return Source(statements, labels, _params(text), kinds, tables, int(cap[1]) if cap else 0)


def _scoped(label: str, scope: int) -> tuple[int, str]:
    return 0 if label[0] == "$" else scope, label


def without_contraction(source: Source) -> set[int]:
    """Return the statements of a kernel that only an empty contraction executes.

    No launch with descriptors has an empty contraction, as it has no tensor map (`descriptors`), but the compiler emits
    a path around the loop.
    """
    found: set[int] = set()
    if not any(size == 128 for _, size in source.params):
        return found
    tests: dict[str, Statement] = {}
    for i, s in enumerate(source.statements):
        if s.opcode.startswith("setp."):
            tests[s.operands[0]] = s
        elif s.label and s.guard in tests and not s.negated:
            test, target = tests[s.guard], source.labels[s.label]
            # k + 63 + 63 > 126, unsigned: one step of 64 at least.
            if re.fullmatch(r"setp\.gt\.u32 %p\d+, %r\d+, 126", test.text) and test.where == s.where and target > i:
                found.update(range(i + 1, target))
    return found


def _statement(part: str, where: str, scope: int, line: int) -> Statement:
    found = _STATEMENT.fullmatch(part)
    if not found:
        raise CannotExecute(part)
    operands = tuple(_OPERAND.findall(found[4]))
    label = None
    if found[3].split(".")[0] in ("bra", "brx"):
        label = _scoped(operands[-1], scope)
    return Statement(" ".join(part.split()), found[3], operands, found[2], found[1] == "!", where, label, line)
