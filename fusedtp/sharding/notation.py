"""Sharding notation: `[M_X, K] @ [K, N_X] -> [M, N_X]`.

A tensor is a list of dims. `M` is whole on every rank. `M_X` is split over mesh axis X, `M_XY` over X and then, inside
each part, over Y (major to minor). `[M, N]{U_X}` holds partial sums that are not yet added up over X. Axes after an
underscore are single capital letters, each the name of a mesh axis; `M_{tp}` and `M_{dp,tp}` take any names. The first
operand may have leading batch dims, which the result repeats; the second is a matrix.

    spec     tensor "@" tensor "->" tensor
    tensor   "[" dim ("," dim)* "]" [ "{U_" axes "}" ]
    dim      NAME [ "_" axes ]                              NAME: a capital letter, then letters and digits
    axes     CAPITAL+  |  "{" AXIS ("," AXIS)* "}"          AXIS: a letter, then letters, digits and underscores

The notation is that of "How to Scale Your Model", chapter "Sharded Matrices and How to Multiply Them".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import NamedTuple, NoReturn

from ..errors import NotationError

MAX_LENGTH = 1000

_NAME = re.compile(r"[A-Z][A-Za-z0-9]*", re.ASCII)
_AXIS = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_LETTERS = re.compile(r"[A-Z]+", re.ASCII)


@dataclass(frozen=True, order=True)
class Dim:
    """One dim of a tensor and the mesh axes that split it, major to minor."""

    name: str
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + (f"_{_axes_text(self.axes)}" if self.axes else "")


@dataclass(frozen=True, order=True)
class Tensor:
    """Dims of a tensor with their shardings, and the axes over which it holds partial sums (sorted)."""

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    @cached_property
    def used(self) -> tuple[str, ...]:
        """Return every axis that this tensor is split or partial over, in order of appearance."""
        return tuple(axis for dim in self.dims for axis in dim.axes) + self.partial

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the axes that split dim `name`, major to minor; KeyError if the tensor has no such dim."""
        for dim in self.dims:
            if dim.name == name:
                return dim.axes
        raise KeyError(name)

    def split(self, name: str, axes: tuple[str, ...]) -> Tensor:
        """Return the tensor with dim `name` split over exactly `axes`."""
        return Tensor(tuple(Dim(name, axes) if dim.name == name else dim for dim in self.dims), self.partial)

    def __str__(self) -> str:
        text = f"[{', '.join(map(str, self.dims))}]"
        return text + (f"{{U_{_axes_text(self.partial)}}}" if self.partial else "")


@dataclass(frozen=True, order=True)
class Spec:
    """Spec `a @ b -> c` of a [batch..., M, K], b [K, N], c [batch..., M, N]; `parse` makes it, `str` normalizes it."""

    a: Tensor
    b: Tensor
    c: Tensor

    @property
    def batch(self) -> tuple[str, ...]:
        return self.a.names[:-2]

    @property
    def m(self) -> str:
        return self.a.names[-2]

    @property
    def k(self) -> str:
        return self.a.names[-1]

    @property
    def n(self) -> str:
        return self.b.names[-1]

    @property
    def dim_names(self) -> tuple[str, ...]:
        return (*self.a.names, self.n)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Return the mesh axes in use, in order of appearance."""
        return tuple(dict.fromkeys(self.a.used + self.b.used + self.c.used))

    def __str__(self) -> str:
        return f"{self.a} @ {self.b} -> {self.c}"


def parse(text: str) -> Spec:
    """Parse a spec such as `"[B, S_X, K] @ [K, N_X] -> [B, S, N_X]"`; whitespace between tokens is ignored.

    NotationError shows the string with a caret below the wrong character, and the valid alternatives.
    """
    if not isinstance(text, str):
        raise TypeError(f"spec must be a notation string, not {type(text).__name__}: got {text!r:.80}")
    if len(text) > MAX_LENGTH:
        raise NotationError(f"a spec has at most {MAX_LENGTH} characters, got {len(text)}: {text[:40]!r}...")
    return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Spec:
    return _Parser(text).spec()


def _axes_text(axes: tuple[str, ...]) -> str:
    short = all(len(axis) == 1 and axis.isupper() for axis in axes)
    return "".join(axes) if short else "{" + ",".join(axes) + "}"


class _Places(NamedTuple):
    """Positions in the string of a tensor's dims, its end, its partial marker (0 for none) and the marker's axes."""

    dims: list[int]
    end: int
    marker: int
    partial: dict[str, int]


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, at: int, what: str) -> NoReturn:
        shown = re.sub(r"\s", " ", self.text)
        raise NotationError(f"{what}\n    {shown}\n    {' ' * at}^")

    def spec(self) -> Spec:
        a, at_a = self.tensor()
        self.expect("@", "'@' between the two operands")
        b, at_b = self.tensor()
        self.expect("->", "'->' before the result")
        c, at_c = self.tensor()
        self.skip()
        if self.at != len(self.text):
            self.fail(self.at, "the notation ends after the result; only a partial marker such as {U_X} may follow ']'")
        self.check_operands(a, at_a, b, at_b)
        self.check_result(a, b, c, at_c)
        return Spec(a, b, c)

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def expect(self, sign: str, what: str) -> int:
        self.skip()
        if not self.text.startswith(sign, self.at):
            self.fail(self.at, f"expected {what}")
        self.at += len(sign)
        return self.at - len(sign)

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            self.fail(self.at, f"expected {what}")
        self.at = found.end()
        return found.group()

    def accept(self, sign: str) -> bool:
        self.skip()
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def tensor(self) -> tuple[Tensor, _Places]:
        self.expect("[", "'[' and a tensor's dims, such as [M_X, K]")
        dims: dict[str, Dim] = {}
        at_dims = []
        # The role of every axis in this tensor.
        roles: dict[str, str] = {}
        while True:
            self.skip()
            at_dims.append(self.at)
            name = self.match(_NAME, "a dim: a capital letter, then letters or digits, such as M or Seq")
            if name in dims:
                self.fail(
                    at_dims[-1], f"dim {name} stands twice in one tensor; every dim of a tensor needs its own name"
                )
            axes = self.axes(roles, f"splits {name}", "an axis may split one dim, once")
            dims[name] = Dim(name, tuple(axes))
            if self.accept("]"):
                break
            self.expect(",", "',' and the next dim, '_' and the axes that split this one, or ']'")
        end, marker, partial = self.at - 1, 0, dict[str, int]()
        if self.accept("{"):
            marker = self.at - 1
            self.expect("U", "the partial marker {U_X}: sums not yet reduced over axis X")
            partial = self.axes(roles, "stands in this marker", "a tensor is either split or partial over an axis")
            if not partial:
                self.fail(self.at, "expected '_' and the axes the sums are partial over, such as {U_X}")
            self.expect("}", "'}' after the partial marker")
        return Tensor(tuple(dims.values()), tuple(sorted(partial))), _Places(at_dims, end, marker, partial)

    def axes(self, roles: dict[str, str], role: str, rule: str) -> dict[str, int]:
        """Parse the axes after an underscore, if any; return their positions, and note their `role` in `roles`."""
        if not self.text.startswith("_", self.at):
            return {}
        self.at += 1
        found = self.names() if self.text.startswith("{", self.at) else self.letters()
        for axis, at in found:
            if axis in roles:
                self.fail(at, f"axis {axis} is used twice in one tensor: it already {roles[axis]}; {rule}")
            roles[axis] = role
        return dict(found)

    def names(self) -> list[tuple[str, int]]:
        self.at += 1
        found = []
        while True:
            self.skip()
            start = self.at
            found.append((self.match(_AXIS, "the name of a mesh axis, such as tp"), start))
            if self.accept("}"):
                return found
            self.expect(",", "',' and the next axis, or '}'")

    def letters(self) -> list[tuple[str, int]]:
        start = self.at
        letters = self.match(_LETTERS, "mesh axes: capital letters such as X or XY, or names in braces such as {tp}")
        if self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] == "_"):
            self.fail(
                self.at, "axes without braces are one capital letter each; write longer names in braces, such as M_{tp}"
            )
        return [(letter, start + i) for i, letter in enumerate(letters)]

    def check_operands(self, a: Tensor, at_a: _Places, b: Tensor, at_b: _Places) -> None:
        for tensor, places in ((a, at_a), (b, at_b)):
            if tensor.partial:
                reason = "an operand is never partial: its gradient takes its sharding, and a gradient is never partial"
                self.fail(places.marker, f"{reason}; reduce it first, only the result may carry a marker")
        if len(a.dims) < 2:
            self.fail(at_a.end, "the first operand needs at least two dims, rows and contraction, such as [M, K]")
        if len(b.dims) != 2:
            at = at_b.dims[0] if len(b.dims) > 2 else at_b.end
            self.fail(at, "the second operand is a matrix such as [K, N]; batch dims belong to the first one")
        k, n = a.names[-1], b.names[-1]
        if b.names[0] != k:
            self.fail(
                at_b.dims[0],
                f"the second operand must start with {k}, the first operand's last dim, not with {b.names[0]}",
            )
        if n in a.names:
            self.fail(
                at_b.dims[1],
                f"{n} is a dim of the first operand; the second operand's columns need a name of their own",
            )

    def check_result(self, a: Tensor, b: Tensor, c: Tensor, at_c: _Places) -> None:
        names = (*a.names[:-1], b.names[-1])
        if c.names != names:
            # A dim too many differs from no dim; one too few is missing at the end.
            wrong = [at for at, name, found in zip_longest(at_c.dims, names, c.names) if name != found]
            at = at_c.end if wrong[0] is None else wrong[0]
            self.fail(at, f"the result's dims must be [{', '.join(names)}], in this order")
        contraction = a.axes(a.names[-1]) + b.axes(a.names[-1])
        for axis, at in at_c.partial.items():
            if axis not in contraction:
                reason = (
                    f"nothing splits the contraction {a.names[-1]} over {axis}, so there are no partial sums to keep"
                )
                self.fail(at, f"{reason}; split {a.names[-1]} over {axis} on an operand, or drop {axis} here")
