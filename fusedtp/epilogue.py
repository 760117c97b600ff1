"""Epilogue: the steps between a product, or a sum of products over ranks, and the results of an op.

    y = x @ w + bias                              a product, before its activation
    y = activation(y)                             or activation(gate) * up, of two products
    y = sum over ranks of x @ w, + bias + residual
    normed = norm(y)                              of the rows of a sum

An `Epilogue` goes from a public function to the kernel. Its options are there from the start. Its operands travel
beside it by name, until a program names them in it, and a schedule puts the tensors in their place. The steps are
applied in three places: here for the library's matmuls, in `kernels.epilogue` for ours, and in `calls.autograd` for
gradients.

To add an operand, add a field to `Epilogue` and its kind to `OPERANDS`, and use it in `addend`, `add_to` and `end`, and
in the kernels' `apply`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import activations, norms
from .activations import GATED, OF_RESULT

# Kinds of operands. EACH: one for each weight, with an element for each column of its result. RESULT: like this rank's
# part of the result. NORM: one for a norm, with an element for each column.
EACH, RESULT, NORM = "each", "result", "norm"
# Operands by name: the first fields of `Epilogue`, in its order.
OPERANDS: Mapping[str, str] = {"bias": EACH, "residual": RESULT, "norm_weight": NORM, "norm_bias": NORM}
FIRST_OPTION = len(OPERANDS)

T = TypeVar("T")


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Return a name for each of several: b, b1, b2. A compiler can trace the code."""
    return tuple([f"{name}{i or ''}" for i in range(count)])


class Epilogue(NamedTuple):
    """Steps between a product, or a sum over ranks, and the results of an op: operands first, then options.

    Operands are None, tensors, or names. With several weights, operands of kind EACH are tuples, until `of`.

    - `bias`: [N], added.
    - `residual`: added to a sum, of the shape of this rank's part.
    - `norm_weight`, `norm_bias`: [N], of the norm.
    - `activation`: one of `ACTIVATIONS`, of each product. A gated one is of two products and has one result.
    - `norm`: one of `NORMS`, of the rows of a sum. The normed sum is a result after the sum.
    - `eps`: of the norm.
    - `keeps`: whether the products are results too, after the activation's.
    - `whole`: whether the gathered operand is a result too, the last one.
    """

    bias: Any = None
    residual: Any = None
    norm_weight: Any = None
    norm_bias: Any = None
    activation: str | None = None
    norm: str | None = None
    eps: float = 0  # A compiler would hold 0.0 for a symbol, and compile twice.
    keeps: bool = False
    whole: bool = False

    # Options.

    @property
    def options(self) -> tuple[Any, ...]:
        return self[FIRST_OPTION:]

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def function(self) -> str:
        """Return the activation without its gate, "" for none."""
        return "" if self.activation is None else GATED.get(self.activation, self.activation)

    @property
    def needs_products(self) -> bool:
        """Return whether the activation's gradient is computed from the products; otherwise from the results."""
        return self.activation is not None and self.activation not in OF_RESULT

    def num_results(self, num_products: int) -> int:
        """Return the number of results without those that `keeps`, `norm` and `whole` add."""
        return 1 if self.is_gated else num_products

    def results(self, products: Sequence[T]) -> list[T]:
        """Return the results' shapes, given the products': then the products if kept, or the normed sum."""
        return [*products[: self.num_results(len(products))], *(products if self.keeps or self.norm else ())]

    def agreed(self, *, of_sum: bool) -> dict[str, str]:
        """Return what all ranks must agree on, by name. A rank's operands of a gather are its own."""
        if not of_sum:
            return {"activation": self.activation or "none"}
        given = {
            name: "none" if each is None else "given"
            for (name, kind), each in zip(OPERANDS.items(), self, strict=False) if kind != NORM
        }  # fmt: skip
        biased = " and a bias" * (self.norm_bias is not None)
        return given | {"norm": f"{self.norm} with eps {self.eps!r}{biased}" if self.norm else "none"}

    def text(self, where: str) -> str:
        """Return the text of `Path.epilogue`. `where`: the place of the steps before a norm."""
        steps = [f"{self.activation} {where}"] if self.activation else []
        steps += [f"residual {where}"] if self.residual is not None else []
        return ", ".join([*steps, f"{self.norm} after it"] if self.norm else steps)

    # Operands of a call, and their names.

    @property
    def operands(self) -> tuple[Any, ...]:
        return self[:FIRST_OPTION]

    def of_operands(self, operands: Iterable[Any]) -> Epilogue:
        """Return the epilogue with other operands."""
        return Epilogue(*operands, *self.options)

    def given(self, kind: str = "") -> dict[str, Any]:
        """Return the operands (of one kind) by name, without those that are None."""
        return {
            name: each
            for (name, its), each in zip(OPERANDS.items(), self, strict=False)
            if each is not None and kind in ("", its)
        }

    def filled(self, tensors: Mapping[str, Any], count: int) -> Epilogue:
        """Return the epilogue with those tensors that are given, for a call with `count` weights."""
        return self.of_operands(
            tuple([tensors.get(each) for each in numbered(name, count)]) if count > 1 and kind == EACH
            else tensors.get(name)
            for name, kind in OPERANDS.items()
        )  # fmt: skip

    def named(self, names: Container[str], count: int) -> Epilogue:
        """Return the epilogue of `count` weights with these operands: for each weight its operand's name, or None."""
        slots = [
            tuple([each if each in names else None for each in numbered(name, count if kind == EACH else 1)])
            for name, kind in OPERANDS.items()
        ]
        return self.of_operands(slot if any(slot) else None for slot in slots)

    def names(self) -> Iterator[tuple[str, int, str]]:
        """Yield the kind, the weight's index and the name of each operand of `named`."""
        for kind, slot in zip(OPERANDS.values(), self.operands, strict=True):
            for i, name in enumerate(slot or ()):
                if name is not None:
                    yield kind, i, name

    def of(self, i: int) -> Epilogue:
        """Return the epilogue of the i-th product of `named`."""
        return self.of_operands(slot and slot[i] for slot in self.operands)

    def bind(self, tensors: Mapping[str, Any]) -> Epilogue:
        """Return the epilogue of one product with its tensors in place of their names."""
        # An option is no operand's name, and stays.
        return Epilogue._make(map(tensors.get, self, self))

    # Operands of one product or sum, as tensors.

    def columns(self, part: slice) -> Epilogue:
        """Return the epilogue of some columns of the result."""
        return self._cut(EACH, part)

    def rows(self, part: slice) -> Epilogue:
        """Return the epilogue of some rows of the result."""
        return self._cut(RESULT, part)

    def _cut(self, kind: str, part: slice) -> Epilogue:
        return self.of_operands(
            each[part] if each is not None and its == kind else each
            for its, each in zip(OPERANDS.values(), self.operands, strict=True)
        )

    @property
    def addend(self) -> Tensor | None:
        """Return the bias if a matmul may add it, as no step comes before it."""
        return self.bias  # type: ignore[no-any-return]

    @property
    def ends(self) -> bool:
        """Return whether steps are left of a product when a matmul has added the `addend`."""
        return self.activation is not None

    def add_to(self, total: Tensor, addend: Tensor | None = None) -> None:
        """Add to a sum in place. Columns of the bias are the sum's. `addend`: what a matmul has added already."""
        if self.bias is not None and addend is None:
            total.add_(self.bias)
        if self.residual is not None:
            total.add_(self.residual)

    def with_norm(self, y: Tensor) -> list[Tensor]:
        """Return a sum, and its norm if it has one."""
        if self.norm is None:
            return [y]
        return [y, norms.apply(self.norm, y, self.norm_weight, self.norm_bias, self.eps)]

    def finish(self, total: Tensor, addend: Tensor | None = None) -> list[Tensor]:
        """Apply the steps to a sum in place, as `add_to`. Return it, and its norm if it has one."""
        self.add_to(total, addend)
        return [total] if self.norm is None else self.with_norm(total)


NO_EPILOGUE = Epilogue()


def of_norm(norm: object, norm_weight: Any, norm_bias: Any, norm_eps: object) -> Epilogue:
    """Return the epilogue of the norm that a function's arguments ask for; ValueError if they do not fit."""
    name, eps = norms.check(norm, norm_weight, norm_bias, norm_eps)
    return Epilogue(norm=name, eps=eps)


# Products of a library's matmuls, side by side. They have one activation, and a bias each.


def ended(epilogues: Sequence[Epilogue], zs: list[Tensor], given: Sequence[Tensor | None] = ()) -> list[Tensor]:
    """Apply the steps after the matmuls to their products, in place, or beside them if they are kept, as in `into`."""
    if not any([each.ends for each in epilogues]):
        return zs
    ys = into(epilogues[0], zs, given)
    end(epilogues, zs, ys)
    return [*ys, *zs] if epilogues[0].keeps else ys


def into(epilogue: Epilogue, zs: list[Tensor], given: Sequence[Tensor | None] = ()) -> list[Tensor]:
    """Return the tensors for the results: the products (gated: the gate), or if those are kept, `given` or new ones."""
    first = zs[:1] if epilogue.activation in GATED else zs
    if not epilogue.keeps:
        return first
    outs = given or [None] * len(first)
    return [torch.empty_like(z) if out is None else out for z, out in zip(first, outs, strict=False)]


def end(epilogues: Sequence[Epilogue], zs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Apply the steps after the matmuls to their products, or parts of them, into ys."""
    name = epilogues[0].activation
    assert name is not None
    if name in GATED:
        activations.apply(name, zs, ys[0])
        return
    for z, y in zip(zs, ys, strict=True):
        activations.apply(name, (z,), y)
