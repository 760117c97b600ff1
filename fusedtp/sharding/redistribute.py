"""Steps from one sharding of a tensor to another: what each sends, and the cheapest sequences.

Every sharding of a tensor is a state; every collective or slice over one mesh axis is a move between two states. An
all-gather removes the minor axis of a dim, a slice adds one. A reduce-scatter turns a partial axis into the minor axis
of a dim, an all-reduce drops it. Only the minor axis of a dim is removed, so that parts are contiguous.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, TypeAlias

from .notation import Tensor

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
    - `reduces`: number of steps that add up.
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


_Moves: TypeAlias = Callable[[Tensor], Iterator[tuple[Step, Tensor, int]]]


@lru_cache(maxsize=4096)
def operand_routes(start: Tensor, name: str, axes: tuple[str, ...], sizes: Sizes) -> dict[Tensor, Route]:
    """Return the routes from operand `start` to its shardings over `axes`; a last step that gathers is fusable."""

    def moves(tensor: Tensor) -> Iterator[tuple[Step, Tensor, int]]:
        for step in _gathers_and_slices(tensor, name, axes):
            yield step, moved(tensor, step), sizes.sent(step, tensor)

    return _shortest(start, moves, sizes.start_bytes, backward=False)


@lru_cache(maxsize=4096)
def result_routes(wanted: Tensor, name: str, axes: tuple[str, ...], sizes: Sizes) -> dict[Tensor, Route]:
    """Return the routes to result `wanted` from all shardings that lead to it; a first step that reduces is fusable."""

    def moves(tensor: Tensor) -> Iterator[tuple[Step, Tensor, int]]:
        for before, step in _before(tensor, name, axes):
            yield step, before, sizes.sent(step, before)

    return _shortest(wanted, moves, sizes.start_bytes, backward=True)


def _gathers_and_slices(tensor: Tensor, name: str, axes: tuple[str, ...]) -> Iterator[Step]:
    for dim in tensor.dims:
        if dim.axes:
            yield Step("all_gather", name, dim.axes[-1], dim.name)
        for axis in axes:
            if axis not in tensor.used:
                yield Step("slice", name, axis, dim.name)


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


def _shortest(start: Tensor, moves: _Moves, start_bytes: int, *, backward: bool) -> dict[Tensor, Route]:
    """Run Dijkstra's algorithm; with `backward` routes lead to `start`: moves name the state a step starts from."""
    found: dict[Tensor, Route] = {}
    heap = [(Route(), start)]
    while heap:
        route, tensor = heapq.heappop(heap)
        if tensor in found:
            continue
        found[tensor] = route
        for step, other, sent in moves(tensor):
            if other in found:
                continue
            # The step just added is nearest to the matmul: an operand's last step, the result's first.
            fusable = step.reduces if backward else step.kind == "all_gather"
            longer = Route(
                cost=route.cost + sent + start_bytes * step.is_collective,
                reduces=route.reduces + step.reduces,
                num_steps=route.num_steps + 1,
                exposed=route.sent + (0 if fusable else sent),
                sent=route.sent + sent,
                steps=(step, *route.steps) if backward else (*route.steps, step),
            )
            heapq.heappush(heap, (longer, other))
    return found
