"""Every way to run one sharded matmul, and the choice between them.

A way is a sharding for each operand whose local product is part of the answer, with the cheapest routes to these
shardings and from the product to the wanted result. Two shardings fit if both operands split the contraction alike and
no axis splits another dim of each: an axis on the rows of one and the columns of the other would leave only the
diagonal blocks of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import TypeAlias

from .notation import Dim, Tensor
from .redistribute import Route, Sizes, Step, moved, operand_routes, result_routes

_Axes: TypeAlias = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Matmul:
    """Matmul of tensors `names` with shardings a and b to c. A dim that both operands name is contracted."""

    names: tuple[str, str, str]
    a: Tensor
    b: Tensor
    c: Tensor

    @cached_property
    def contraction(self) -> tuple[str, ...]:
        return tuple(name for name in self.a.names if name in self.b.names)


@dataclass(frozen=True)
class Way:
    """Routes of both operands and of the result, and the FLOPs of one rank."""

    a: Route
    b: Route
    c: Route
    flops: int

    @property
    def routes(self) -> tuple[Route, Route, Route]:
        return self.a, self.b, self.c

    @property
    def cost(self) -> int:
        return self.a.cost + self.b.cost + self.c.cost

    @property
    def sent(self) -> int:
        return sum(route.sent for route in self.routes)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all steps but the matmul, the operands' before the result's."""
        return self.a.steps + self.b.steps + self.c.steps

    @property
    def collectives(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.is_collective)

    @property
    def ties(self) -> tuple[object, ...]:
        """Return the key that orders ways of equal cost: few sums, few bytes outside the fused step, few steps."""
        exposed = self.sent - max(route.fusable for route in self.routes)
        return sum(route.reduces for route in self.routes), exposed, len(self.steps), self.steps

    def sequence(self, result: str) -> tuple[Step, ...]:
        """Return all steps in the order in which they run; `result` is the product's name.

        Among the collectives next to the matmul, the one that sends the most is fused with it. The operand whose gather
        is fused moves last.
        """
        a, b, c = self.a.steps, self.b.steps, self.c.steps
        gathers = [(route.fusable, route.steps[-1]) for route in (self.a, self.b) if _gathers_last(route)]
        reduces = [(self.c.fusable, step) for step in c[:1] if step.reduces]
        fused = max(gathers + reduces, key=lambda pair: pair[0], default=(0, None))[1]
        operands = b + a if fused in a else a + b
        matmul = Step("matmul", result, fused=fused is not None)
        return tuple(replace(step, fused=True) if step == fused else step for step in (*operands, matmul, *c))


def product(a: Tensor, b: Tensor, names: tuple[str, ...]) -> Tensor:
    """Return the sharding of the local product, dims in the order of `names`: partial over the contraction's axes."""
    split = {dim.name: dim.axes for dim in (*a.dims, *b.dims)}
    partial = [axis for dim in a.dims if dim.name not in names for axis in dim.axes]
    return Tensor(tuple(Dim(name, split[name]) for name in names), tuple(sorted(partial)))


def flops(a: Tensor, b: Tensor, sizes: Sizes) -> int:
    """Return the FLOPs of the local product of shards a and b, a multiply and an add counting as two."""
    return 2 * prod(sizes.shard(dim.name, dim.axes) for dim in {*a.dims, *b.dims})


def choose(
    matmul: Matmul, axes: tuple[str, ...], usual: Sizes, sizes: Sizes | None, flops_per_byte: float
) -> tuple[Way, str, tuple[Step, ...]]:
    """Return the best way, the reason, and the steps of the way that it was compared with.

    For `usual`, stand-in sizes, the cost in bytes decides, then FLOPs. With `sizes`, bytes * flops_per_byte plus FLOPs
    decides, and the usual way wins ties.
    """
    ways = _in_order(_ways(matmul, axes, usual), lambda way: (way.cost, way.flops))
    best = next(ways)
    if sizes is None:
        if other := _runner_up(best, ways):
            return best, f"the usual way, sizes being unknown; the next is {_text(other)}", other.steps
        return best, "the only way", ()
    # Its routes may differ from the cheapest for these sizes: price it as it stands.
    usual_way = _priced(matmul, best, sizes)

    def cost(way: Way) -> tuple[float, bool]:
        return way.cost * flops_per_byte + way.flops, way.steps != usual_way.steps

    ways = _in_order([usual_way, *_ways(matmul, axes, sizes)], cost)
    best = next(ways)
    if best.steps != usual_way.steps:
        return best, f"cheaper than the usual way: {_against(best, usual_way)}", usual_way.steps
    if other := _runner_up(best, ways):
        return best, f"the usual way: {_against(best, other)}", other.steps
    return best, "the only way", ()


def quantity(value: float, unit: str) -> str:
    """Format a number with a decimal prefix: 1500000 B is 1.5 MB."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 1000 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.4g} {prefixes[0]}{unit}"


def _gathers_last(route: Route) -> bool:
    return bool(route.steps) and route.steps[-1].kind == "all_gather"


def _ways(matmul: Matmul, axes: tuple[str, ...], sizes: Sizes) -> Iterator[Way]:
    # Pair every sharding of a with every sharding of b that splits the contraction alike. Work out beforehand what
    # depends on one operand alone, or three axes would take a second.
    a_name, b_name, c_name = matmul.names
    contraction = matmul.contraction
    places = [_places(operand, matmul.c.names) for operand in (matmul.a, matmul.b)]
    contracted = [_places(operand, contraction) for operand in (matmul.a, matmul.b)]
    # True for each dim of the result that comes from b; the others come from a.
    from_b = [place >= 0 for place in places[1]]
    results = {
        (tuple(dim.axes for dim in c.dims), c.partial): route
        for c, route in result_routes(matmul.c, c_name, axes, sizes).items()
    }
    by_contraction: dict[tuple[tuple[str, ...], ...], list[tuple[_Axes, int, Route]]] = {}
    for b, route in operand_routes(matmul.b, b_name, axes, sizes).items():
        split = _axes_at(b, contracted[1])
        columns = prod(sizes.shard(dim.name, dim.axes) for dim in b.dims if dim.name not in contraction)
        by_contraction.setdefault(split, []).append((_axes_at(b, places[1]), columns, route))
    for a, a_route in operand_routes(matmul.a, a_name, axes, sizes).items():
        split = _axes_at(a, contracted[0])
        partial = tuple(sorted(axis for each in split for axis in each))
        a_axes, a_numel = _axes_at(a, places[0]), sizes.numel(a)
        for b_axes, columns, b_route in by_contraction.get(split, ()):
            shards = tuple([b if second else a for a, b, second in zip(a_axes, b_axes, from_b, strict=True)])
            # An axis on the rows of one and the columns of the other makes a product that no route starts from.
            if c_route := results.get((shards, partial)):
                yield Way(a_route, b_route, c_route, 2 * a_numel * columns)


def _places(operand: Tensor, names: tuple[str, ...]) -> list[int]:
    # The operand's dim for each name; -1 for none.
    return [operand.names.index(name) if name in operand.names else -1 for name in names]


def _axes_at(operand: Tensor, places: list[int]) -> _Axes:
    return tuple([operand.dims[place].axes if place >= 0 else () for place in places])


def _in_order(ways: Iterable[Way], price: Callable[[Way], tuple[float, ...]]) -> Iterator[Way]:
    """Yield the ways, cheapest first; `Way.ties` orders those of equal price."""
    priced = sorted(((price(way), way) for way in ways), key=itemgetter(0))
    for _, alike in groupby(priced, key=itemgetter(0)):
        yield from sorted((way for _, way in alike), key=lambda way: way.ties)


def _priced(matmul: Matmul, way: Way, sizes: Sizes) -> Way:
    """Return the way with the same steps, priced for other sizes."""

    def priced(tensor: Tensor, route: Route, fusable: int) -> tuple[Route, Tensor]:
        sent = []
        for step in route.steps:
            sent.append(sizes.sent(step, tensor))
            tensor = moved(tensor, step)
        total, starts = sum(sent), sum(step.is_collective for step in route.steps)
        hidden = sent[fusable] if route.fusable else 0
        return replace(route, cost=total + starts * sizes.start_bytes, sent=total, exposed=total - hidden), tensor

    a_route, a = priced(matmul.a, way.a, -1)
    b_route, b = priced(matmul.b, way.b, -1)
    c_route, _ = priced(product(a, b, matmul.c.names), way.c, 0)
    return Way(a_route, b_route, c_route, flops(a, b, sizes))


def _runner_up(best: Way, others: Iterable[Way]) -> Way | None:
    """Return the next way that communicates differently, rather than slices elsewhere."""
    return next((way for way in others if way.collectives != best.collectives), None)


def _against(best: Way, other: Way) -> str:
    return f"{_price(best)} against {_price(other)} for {_text(other)}"


def _text(way: Way) -> str:
    return ", ".join(map(str, way.steps)) or "no steps"


def _price(way: Way) -> str:
    num = len(way.collectives)
    return f"{quantity(way.sent, 'B')} in {num} collective{'s' * (num != 1)} and {quantity(way.flops, 'FLOP')}"
