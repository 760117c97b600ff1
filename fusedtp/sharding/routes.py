"""Routes from one sharding of a tensor to another, every way to run one sharded matmul, and the choice between them.

Every sharding of a tensor is a state; every collective or slice over one mesh axis is a move between two states. An
all-gather removes the minor axis of a dim, a slice adds one. A reduce-scatter turns a partial axis into the minor axis
of a dim, an all-reduce drops it. Only the minor axis of a dim is removed, so that parts are contiguous.

A way is a sharding for each operand whose local product is part of the answer, with the cheapest routes to these
shardings and from the product to the wanted result. Two shardings fit if both operands split the contraction alike and
no axis splits another dim of each: an axis on the rows of one and the columns of the other would leave only the
diagonal blocks of the result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Literal, TypeAlias

from .notation import Dim, Tensor

Kind: TypeAlias = Literal["all_gather", "slice", "matmul", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, order=True)
class Step:
    """One step of a plan on `tensor` (x, w, y, dy, dx or dw) over mesh axis `axis`.

    `dim` is the dim that is gathered, sliced or scattered, "" for all_reduce and matmul. `fused` marks a collective
    that runs inside the matmul, and that matmul. A step over an axis joins the ranks that differ on that axis only.
    """

    kind: Kind
    tensor: str
    axis: str = ""
    dim: str = ""
    fused: bool = False

    @property
    def is_collective(self) -> bool:
        return self.kind == "all_gather" or self.reduces

    @property
    def reduces(self) -> bool:
        return self.kind in ("reduce_scatter", "all_reduce")

    def __str__(self) -> str:
        over = f" over {self.axis}" if self.axis else ""
        along = f" along {self.dim}" if self.dim else ""
        return f"{self.kind.replace('_', '-')} {self.tensor}{over}{along}"


@dataclass(frozen=True)
class Sizes:
    """Global dim lengths, ranks along each mesh axis, bytes per element, and the start of a collective in bytes.

    If a dim does not divide, every shard counts as the largest. `sum_itemsize` is the bytes of a term of a sum.
    """

    lengths: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    itemsize: int
    start_bytes: int
    sum_itemsize: int

    @classmethod
    def of(
        cls, lengths: Mapping[str, int], mesh: Mapping[str, int], itemsize: int, start_bytes: int,
        sum_itemsize: int | None = None,
    ) -> Sizes:  # fmt: skip
        by_name = tuple(sorted(lengths.items())), tuple(sorted(mesh.items()))
        return cls(*by_name, itemsize, start_bytes, sum_itemsize or itemsize)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return dict(self.mesh)

    @cached_property
    def _shards(self) -> dict[tuple[str, tuple[str, ...]], int]:
        # Planning asks for the same few lengths thousands of times.
        return {(name, ()): length for name, length in self.lengths}

    def ranks(self, axis: str) -> int:
        return self._ranks[axis]

    def shard(self, name: str, axes: tuple[str, ...]) -> int:
        """Return the largest length of dim `name` on a rank when `axes` split it in turn, like torch.tensor_split."""
        length = self._shards.get((name, axes))
        if length is None:
            length = self._shards[name, axes] = -(-self.shard(name, axes[:-1]) // self._ranks[axes[-1]])
        return length

    def numel(self, tensor: Tensor) -> int:
        """Return the largest number of elements on a rank."""
        return prod(self.shard(dim.name, dim.axes) for dim in tensor.dims)

    def sent(self, step: Step, before: Tensor) -> int:
        """Return the bytes that a rank sends in `step` on `before`, with n ranks along its axis.

        All-gather and reduce-scatter: n-1 shards, ring or direct alike. All-reduce: 2 (n-1) shards, ring or two-shot.
        """
        if not step.is_collective:
            return 0
        n = self.ranks(step.axis)
        if step.kind == "all_gather":
            elements = (n - 1) * self.numel(before)
        elif step.kind == "reduce_scatter":
            elements = (n - 1) * self.numel(moved(before, step))
        else:
            elements = 2 * (n - 1) * -(-self.numel(before) // n)
        return elements * (self.sum_itemsize if step.reduces else self.itemsize)


def moved(tensor: Tensor, step: Step) -> Tensor:
    """Return the sharding of `tensor` after `step`; ValueError if the step does not apply to it."""
    axes = tensor.axes(step.dim) if step.dim else ()
    free = step.axis not in tensor.used
    if step.kind == "all_gather" and axes[-1:] == (step.axis,):
        return tensor.split(step.dim, axes[:-1])
    if step.kind == "slice" and free:
        return tensor.split(step.dim, (*axes, step.axis))
    if step.reduces and step.axis in tensor.partial:
        rest = Tensor(tensor.dims, tuple(axis for axis in tensor.partial if axis != step.axis))
        return rest.split(step.dim, (*axes, step.axis)) if step.kind == "reduce_scatter" else rest
    raise ValueError(f"{step.kind} over {step.axis or 'no axis'} on dim {step.dim or '-'} does not apply to {tensor}")


@dataclass(frozen=True, order=True)
class Route:
    """Cheapest steps between two shardings, compared field by field.

    - `cost`: bytes sent and the start of every collective, in bytes.
    - `reduces`: number of steps that reduce.
    - `num_steps`: number of all steps.
    - `exposed`: bytes sent outside the step that could be fused with the matmul next to it.
    - `sent`: bytes that a rank sends.
    """

    cost: int = 0
    reduces: int = 0
    num_steps: int = 0
    exposed: int = 0
    sent: int = 0
    steps: tuple[Step, ...] = ()

    @property
    def fusable(self) -> int:
        """Return the bytes of the step that could be fused with the matmul."""
        return self.sent - self.exposed


@lru_cache(maxsize=128)
def routes(start: Tensor, name: str, axes: tuple[str, ...], sizes: Sizes, *, to: bool) -> dict[Tensor, Route]:
    """Return the cheapest routes from operand `start` to its shardings, or `to` result `start` from those before it.

    The step next to the matmul is fusable: an operand's last step if it gathers, a result's first if it reduces.
    """
    # Dijkstra's algorithm.
    found: dict[Tensor, Route] = {}
    heap = [(Route(), start)]
    while heap:
        route, tensor = heapq.heappop(heap)
        if tensor in found:
            continue
        found[tensor] = route
        for other, step in (_before if to else _after)(tensor, name, axes):
            if other in found:
                continue
            sent = sizes.sent(step, other if to else tensor)
            fusable = step.reduces if to else step.kind == "all_gather"
            longer = Route(
                cost=route.cost + sent + sizes.start_bytes * step.is_collective,
                reduces=route.reduces + step.reduces,
                num_steps=route.num_steps + 1,
                exposed=route.sent + (0 if fusable else sent),
                sent=route.sent + sent,
                steps=(step, *route.steps) if to else (*route.steps, step),
            )
            heapq.heappush(heap, (longer, other))
    return found


def _after(tensor: Tensor, name: str, axes: tuple[str, ...]) -> Iterator[tuple[Tensor, Step]]:
    """Yield every step of an operand, with the sharding that it makes."""
    for dim in tensor.dims:
        steps = [Step("slice", name, axis, dim.name) for axis in axes if axis not in tensor.used]
        if dim.axes:
            steps.append(Step("all_gather", name, dim.axes[-1], dim.name))
        for step in steps:
            yield moved(tensor, step), step


def _before(tensor: Tensor, name: str, axes: tuple[str, ...]) -> Iterator[tuple[Tensor, Step]]:
    """Yield every step that ends in `tensor`, with the sharding that it starts from."""
    free = [axis for axis in axes if axis not in tensor.used]
    for dim in tensor.dims:
        for axis in free:
            yield tensor.split(dim.name, (*dim.axes, axis)), Step("all_gather", name, axis, dim.name)
        if dim.axes:
            axis, whole = dim.axes[-1], tensor.split(dim.name, dim.axes[:-1])
            yield whole, Step("slice", name, axis, dim.name)
            yield _partial_over(whole, axis), Step("reduce_scatter", name, axis, dim.name)
    for axis in free:
        yield _partial_over(tensor, axis), Step("all_reduce", name, axis)


def _partial_over(tensor: Tensor, axis: str) -> Tensor:
    return Tensor(tensor.dims, tuple(sorted((*tensor.partial, axis))))


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
    def cost(self) -> int:
        return self.a.cost + self.b.cost + self.c.cost

    @property
    def sent(self) -> int:
        return self.a.sent + self.b.sent + self.c.sent

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
        exposed = self.sent - max(self.a.fusable, self.b.fusable, self.c.fusable)
        return self.a.reduces + self.b.reduces + self.c.reduces, exposed, len(self.steps), self.steps

    def sequence(self, result: str) -> tuple[Step, ...]:
        """Return all steps in the order in which they run; `result` is the product's name.

        Among the collectives next to the matmul, the one that sends the most is fused with it. The operand whose gather
        is fused moves last.
        """
        a, b, c = self.a.steps, self.b.steps, self.c.steps
        nearest = [(self.a.fusable, a[-1:]), (self.b.fusable, b[-1:])]
        gathers = [(sent, step) for sent, last in nearest for step in last if step.kind == "all_gather"]
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
    if sizes is not None:
        # The usual way's routes may not be the cheapest for these sizes: price these routes.
        usual_way = _priced(matmul, best, sizes)

        def cost(way: Way) -> tuple[float, bool]:
            return way.cost * flops_per_byte + way.flops, way.steps != usual_way.steps

        ways = _in_order([usual_way, *_ways(matmul, axes, sizes)], cost)
        best = next(ways)
        if best.steps != usual_way.steps:
            return best, f"cheaper than the usual way: {_against(best, usual_way)}", usual_way.steps
    # The next way that communicates differently, rather than slices elsewhere.
    other = next((way for way in ways if way.collectives != best.collectives), None)
    if other is None:
        return best, "the only way", ()
    if sizes is None:
        return best, f"the usual way, sizes being unknown; the next is {_text(other)}", other.steps
    return best, f"the usual way: {_against(best, other)}", other.steps


def quantity(value: float, unit: str) -> str:
    """Format a number with a decimal prefix: 1500000 B is 1.5 MB."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 1000 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.4g} {prefixes[0]}{unit}"


def _ways(matmul: Matmul, axes: tuple[str, ...], sizes: Sizes) -> Iterator[Way]:
    # Pair every sharding of a with every sharding of b that splits the contraction alike and no other dim over the same
    # axes: their product is a shard of the whole.
    a_name, b_name, c_name = matmul.names

    def parted(tensor: Tensor) -> tuple[tuple[tuple[str, ...], ...], set[str]]:
        contracted = tuple([tensor.axes(name) for name in matmul.contraction])
        return contracted, set(tensor.used).difference(*contracted)

    results = routes(matmul.c, c_name, axes, sizes, to=True)
    alike: dict[tuple[tuple[str, ...], ...], list[tuple[Tensor, set[str], Route]]] = {}
    for b, b_route in routes(matmul.b, b_name, axes, sizes, to=False).items():
        contracted, others = parted(b)
        alike.setdefault(contracted, []).append((b, others, b_route))
    for a, a_route in routes(matmul.a, a_name, axes, sizes, to=False).items():
        contracted, own = parted(a)
        for b, others, b_route in alike.get(contracted, ()):
            if own.isdisjoint(others) and (c_route := results.get(product(a, b, matmul.c.names))):
                yield Way(a_route, b_route, c_route, flops(a, b, sizes))


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


def _against(best: Way, other: Way) -> str:
    return f"{_price(best)} against {_price(other)} for {_text(other)}"


def _text(way: Way) -> str:
    return ", ".join(map(str, way.steps)) or "no steps"


def _price(way: Way) -> str:
    num = len(way.collectives)
    return f"{quantity(way.sent, 'B')} in {num} collective{'s' * (num != 1)} and {quantity(way.flops, 'FLOP')}"
