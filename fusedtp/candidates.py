"""Every way to run one sharded matmul, and the choice between them.

A way is a sharding for each operand whose local product is part of the answer, with the cheapest routes there and from
the product to the wanted result. Two shardings fit when both operands split the contraction alike and no axis splits a
dim of each: an axis on the rows of one and the columns of the other would leave the diagonal blocks of the result only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from .notation import Dim, Tensor
from .redistribute import Route, Sizes, Step, moved, operand_routes, result_routes


@dataclass(frozen=True)
class Problem:
    """A matmul of tensors `names` with shardings a and b to c. A dim that both operands name is contracted."""

    names: tuple[str, str, str]
    a: Tensor
    b: Tensor
    c: Tensor

    @cached_property
    def contraction(self) -> tuple[str, ...]:
        return tuple(name for name in self.a.names if name in self.b.names)


@dataclass(frozen=True)
class Way:
    """The routes of both operands and of the result, and the FLOPs of one rank."""

    a: Route
    b: Route
    c: Route
    flops: int

    @property
    def routes(self) -> tuple[Route, Route, Route]:
        return self.a, self.b, self.c

    @property
    def cost(self) -> int:
        return sum(route.cost for route in self.routes)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends."""
        return sum(route.sent for route in self.routes)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps but the matmul, the operands' before the result's."""
        return self.a.steps + self.b.steps + self.c.steps

    @property
    def collectives(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.is_collective)

    @property
    def ties(self) -> tuple[object, ...]:
        """What decides between ways of one cost: few sums, few bytes outside the fused step, few steps."""
        exposed = self.sent - max(route.fusable for route in self.routes)
        return sum(route.reduces for route in self.routes), exposed, len(self.steps), self.steps

    def sequence(self, result: str) -> tuple[Step, ...]:
        """All steps in the order in which they run; `result` is the product's name.

        Of the collectives next to the matmul the one that sends the most is fused with it. The operand whose gather is
        fused is moved last.
        """
        a, b, c = self.a.steps, self.b.steps, self.c.steps
        gathers = [(route.fusable, route.steps[-1]) for route in (self.a, self.b) if _gathers_last(route)]
        reduces = [(self.c.fusable, step) for step in c[:1] if step.reduces]
        fused = max(gathers + reduces, key=lambda pair: pair[0], default=(0, None))[1]
        operands = b + a if fused in a else a + b
        matmul = Step("matmul", result, fused=fused is not None)
        return tuple(replace(step, fused=True) if step == fused else step for step in (*operands, matmul, *c))


def product(a: Tensor, b: Tensor, names: tuple[str, ...]) -> Tensor:
    """The sharding of the local product, its dims in the order of `names`: partial over the axes of the contraction."""
    split = {dim.name: dim.axes for dim in (*a.dims, *b.dims)}
    partial = [axis for dim in a.dims if dim.name not in names for axis in dim.axes]
    return Tensor(tuple(Dim(name, split[name]) for name in names), tuple(sorted(partial)))


def flops(a: Tensor, b: Tensor, sizes: Sizes) -> int:
    """FLOPs of the local product of shards a and b, a multiply and an add counting as two."""
    return 2 * prod(sizes.shard(dim.name, dim.axes) for dim in {*a.dims, *b.dims})


def choose(
    problem: Problem, axes: tuple[str, ...], usual: Sizes, sizes: Sizes | None, flops_per_byte: float
) -> tuple[Way, str, tuple[Step, ...]]:
    """The best way, why it is, and the steps of the way that it was compared with.

    For `usual`, stand-in sizes, the cost in bytes decides, then FLOPs. With `sizes` it is bytes * flops_per_byte plus
    FLOPs, and the usual way wins where nothing is cheaper.
    """
    ways = sorted(_ways(problem, axes, usual), key=lambda way: (way.cost, way.flops, way.ties))
    if sizes is None:
        if other := _runner_up(ways):
            return ways[0], f"the usual way, sizes being unknown; the next is {_text(other)}", other.steps
        return ways[0], "the only way", ()
    # Its routes can differ from the cheapest ones for these sizes: it is priced as it stands.
    usual_way = _priced(problem, ways[0], sizes)

    def cost(way: Way) -> tuple[object, ...]:
        return way.cost * flops_per_byte + way.flops, way.steps != usual_way.steps, way.ties

    ways = sorted([usual_way, *_ways(problem, axes, sizes)], key=cost)
    if ways[0].steps != usual_way.steps:
        return ways[0], f"cheaper than the usual way: {_against(ways[0], usual_way)}", usual_way.steps
    if other := _runner_up(ways):
        return ways[0], f"the usual way: {_against(ways[0], other)}", other.steps
    return ways[0], "the only way", ()


def quantity(value: float, unit: str) -> str:
    """A number with a decimal prefix: 1500000 B is 1.5 MB."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 1000 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.4g} {prefixes[0]}{unit}"


def _gathers_last(route: Route) -> bool:
    return bool(route.steps) and route.steps[-1].kind == "all_gather"


def _ways(problem: Problem, axes: tuple[str, ...], sizes: Sizes) -> Iterator[Way]:
    a_name, b_name, c_name = problem.names
    contraction = problem.contraction
    results = result_routes(problem.c, c_name, axes, sizes)
    by_contraction: dict[tuple[tuple[str, ...], ...], list[tuple[Tensor, Route]]] = {}
    for b, route in operand_routes(problem.b, b_name, axes, sizes).items():
        by_contraction.setdefault(tuple(b.axes(name) for name in contraction), []).append((b, route))
    for a, a_route in operand_routes(problem.a, a_name, axes, sizes).items():
        split = tuple(a.axes(name) for name in contraction)
        for b, b_route in by_contraction.get(split, ()):
            result = product(a, b, problem.c.names)
            # An axis on the rows of one and the columns of the other makes a product that no route starts from.
            if result in results:
                yield Way(a_route, b_route, results[result], flops(a, b, sizes))


def _priced(problem: Problem, way: Way, sizes: Sizes) -> Way:
    """The same steps with what they cost for other sizes."""

    def priced(tensor: Tensor, route: Route, fusable: int) -> tuple[Route, Tensor]:
        sent = []
        for step in route.steps:
            sent.append(sizes.sent(step, tensor))
            tensor = moved(tensor, step)
        total, starts = sum(sent), sum(step.is_collective for step in route.steps)
        hidden = sent[fusable] if route.fusable else 0
        return replace(route, cost=total + starts * sizes.start_bytes, sent=total, exposed=total - hidden), tensor

    a_route, a = priced(problem.a, way.a, -1)
    b_route, b = priced(problem.b, way.b, -1)
    c_route, _ = priced(product(a, b, problem.c.names), way.c, 0)
    return Way(a_route, b_route, c_route, flops(a, b, sizes))


def _runner_up(ways: list[Way]) -> Way | None:
    """The next way that communicates differently, not merely slices elsewhere."""
    return next((way for way in ways if way.collectives != ways[0].collectives), None)


def _against(best: Way, other: Way) -> str:
    return f"{_price(best)} against {_price(other)} for {_text(other)}"


def _text(way: Way) -> str:
    return ", ".join(map(str, way.steps)) or "no steps"


def _price(way: Way) -> str:
    num = len(way.collectives)
    return f"{quantity(way.sent, 'B')} in {num} collective{'s' * (num != 1)} and {quantity(way.flops, 'FLOP')}"
