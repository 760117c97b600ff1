"""Plan a notation string: the collectives of a matmul and its two gradients, and the one that each matmul fuses.

The backward pass has one rule: a gradient has the sharding of its tensor, and the gradient of a partial result is whole
over its partial axes. So dx = dy @ w.T and dw = x.T @ dy are matmuls of known shardings, planned like y = x @ w.

A plan moves both operands to shardings whose local product is part of the answer, multiplies, and moves the result to
the wanted sharding. All ways to do so are compared. Without sizes the fewest collectives win, then the fewest bytes
with rows, K and N of one length, then the fewest FLOPs. That gives the usual table: gather a split contraction, reduce
partial results, gather a result late, slice for free. With sizes the cheapest by bytes and FLOPs wins, and the usual
way wins ties; `reason` names the way that it was compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from ..errors import NotationError
from ..shards import check_count, check_number, even_sizes
from .notation import Dim, Spec, Tensor, parse
from .routes import Matmul, Sizes, Step, choose, moved, product


class Partition(NamedTuple):
    """Shards of every dim of a spec as one rank sees them.

    `lengths` has the global length of each dim, `place` this rank's index on each axis and the axis's number of ranks.
    `splits` has the ranks' lengths of dims that the first axis does not split like `torch.tensor_split`.
    """

    lengths: Mapping[str, int]
    place: Mapping[str, tuple[int, int]]
    splits: Mapping[str, tuple[int, ...]]

    def sizes(self, dim: str, outer: tuple[str, ...], axis: str) -> tuple[int, ...]:
        """Return the lengths into which `axis` splits this rank's part of `dim`, after `outer` axes have split it."""
        num_ranks = self.place[axis][1]
        if not outer and len(self.splits.get(dim, ())) == num_ranks:
            return self.splits[dim]
        return even_sizes(self.length(dim, outer), num_ranks)

    def length(self, dim: str, axes: tuple[str, ...]) -> int:
        """Return this rank's length of `dim` when `axes` split it, major to minor."""
        if not axes:
            return self.lengths[dim]
        return self.sizes(dim, axes[:-1], axes[-1])[self.place[axes[-1]][0]]

    def named(self, dim: str, axes: tuple[str, ...]) -> int:
        """Return `length` as a `Length`; beside a compiler's symbols as it is, because they multiply plain numbers."""
        length = self.length(dim, axes)
        if any(type(each) is not int for each in self.lengths.values()):
            return length
        found = Length(length)
        found.dim, found.axes = dim, axes
        return found

    def again(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return lengths of another partition of the spec as they are in this one."""
        return tuple([self.length(each.dim, each.axes) if type(each) is Length else each for each in lengths])

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(self.length(dim.name, dim.axes) for dim in tensor.dims)


class Length(int):
    """Length of a dim on this rank that names the dim and the axes that split it: with other rows it is another."""

    dim: str
    axes: tuple[str, ...]


# An H100 by its data sheet: 990 TFLOP/s of dense bf16 over 450 GB/s of NVLink one way.
FLOPS_PER_BYTE = 2200.0

# Bytes that a link carries in the time a copy takes to start: 2.7 us at 397 GB/s, measured on an H20's copy engine.
START_BYTES = 1_000_000

# All orders of splitting and gathering are compared: five axes on two dims take seconds, six take minutes.
MAX_AXES = 5

# Steps with the shardings that they start from: before the matmul, fused with it, after it.
Stages: TypeAlias = "tuple[tuple[Placed, ...], Placed | None, tuple[Placed, ...]]"
Placed: TypeAlias = tuple[Step, Tensor]

ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "mxfp8": 1,
}  # fmt: skip
# Dtype of a product of float8, unless a caller wants another. Terms of a sum travel in it.
MADE_OF_FLOAT8 = "bfloat16"


def is_float8(dtype: str) -> bool:
    """Return whether a known dtype is float8, which is multiplied with scales."""
    return ITEMSIZE[dtype] == 1


def made_of(dtype: str) -> str:
    """Return the dtype of a product of two operands in `dtype`."""
    return MADE_OF_FLOAT8 if is_float8(dtype) else dtype


@dataclass(frozen=True)
class MatmulPlan(Matmul):
    """Steps of one matmul, in the order in which they run, a fused one next to the matmul."""

    steps: tuple[Step, ...]
    reason: str
    rejected: tuple[Step, ...]  # the way that `reason` compares with; empty if there is no other

    @cached_property
    def collectives(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.is_collective)

    @cached_property
    def fused(self) -> Step | None:
        """Return the collective that runs inside the matmul."""
        return next((step for step in self.collectives if step.fused), None)

    def stages(self, done: tuple[Step, ...] = ()) -> Stages:
        """Return the steps before the matmul, the fused step, and the steps after it, without steps in `done`."""
        todo = [(step, prior[0]) for step, prior, _ in self.walked if replace(step, fused=False) not in done]
        at = next(i for i, (step, _) in enumerate(todo) if step.kind == "matmul")
        before, after = ([each for each in part if not each[0].fused] for part in (todo[:at], todo[at + 1 :]))
        fused = next((each for each in todo if each[0].fused and each[0].is_collective), None)
        return tuple(before), fused, tuple(after)

    @cached_property
    def walked(self) -> tuple[tuple[Step, tuple[Tensor, ...], Tensor], ...]:
        """Return each step with its input shardings (two for the matmul) and its output sharding."""
        now = dict(zip(self.names, (self.a, self.b), strict=False))
        walked = []
        for step in self.steps:
            before: tuple[Tensor, ...]
            if step.kind == "matmul":
                before = a, b = now[self.names[0]], now[self.names[1]]
                now[step.tensor] = product(a, b, self.c.names)
            else:
                before = (now[step.tensor],)
                now[step.tensor] = moved(before[0], step)
            walked.append((step, before, now[step.tensor]))
        return tuple(walked)


@dataclass(frozen=True)
class Plan:
    """Plans of y = x @ w, dx = dy @ w.T and dw = x.T @ dy for one spec."""

    spec: Spec
    forward: MatmulPlan
    dx: MatmulPlan
    dw: MatmulPlan

    @property
    def matmuls(self) -> tuple[MatmulPlan, MatmulPlan, MatmulPlan]:
        return self.forward, self.dx, self.dw

    @cached_property
    def shared(self) -> tuple[Step, ...]:
        """Return the steps on dy that dx and dw both begin with: done once, they serve both gradients."""
        steps = _plain_steps(self.dx, "dy")
        same = [one == other for one, other in zip(steps, _plain_steps(self.dw, "dy"), strict=False)]
        return steps[: same.index(False) if False in same else len(same)]

    @cached_property
    def pair(self) -> tuple[MatmulPlan, MatmulPlan] | None:
        """Return dx and dw if one task makes both, first the one whose gather or scatter splits its result; else None.

        The other gathers along its contraction: the same dy, or x or w while the first's terms are multiplied. That is
        x of a column-parallel layer with split rows (dx is scattered), or a fully sharded w (dw is scattered). Neither
        has any other step.
        """
        for first, second in ((self.dx, self.dw), (self.dw, self.dx)):
            one, other = first.fused, second.fused
            if one is None or other is None or not len(first.steps) == len(second.steps) == 2:
                return None
            if other.kind == "all_gather" and other.dim in second.contraction:
                scatter = replace(other, kind="reduce_scatter", tensor=one.tensor)
                return (first, second) if one in (other, scatter) else None
        return None

    @property
    def gathered_again(self) -> tuple[Step, ...]:
        """Return backward's gathers of x or w that forward did too: only shards are kept in between."""
        forward = _plain_steps(self.forward, "x") + _plain_steps(self.forward, "w")
        backward = _plain_steps(self.dx, "w") + _plain_steps(self.dw, "x")
        return tuple(step for step in backward if step.kind == "all_gather" and step in forward)


def plan(
    spec: str | Spec,
    *,
    sizes: Mapping[str, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    dtype: object = "bfloat16",
    flops_per_byte: float = FLOPS_PER_BYTE,
    start_bytes: int = START_BYTES,
) -> Plan:
    """Plan a spec and both its gradients.

    - `sizes`: the global length of every dim; with `mesh`, or neither for the usual way.
    - `mesh`: the number of ranks along every axis that the spec names; other axes are ignored.
    - `dtype`: of x and w.
    - `flops_per_byte`: the worth of a byte sent, in FLOPs on the machine.
    - `start_bytes`: the worth of the start of a collective, in bytes.

    The plan depends on the arguments alone, so all ranks agree. It has `forward`, `dx` and `dw`, each with `steps`,
    `collectives` and `reason`.

    Raises NotationError for a bad spec, ValueError or TypeError for other arguments that do not fit it.
    """
    spec = parse(str(spec) if isinstance(spec, Spec) else spec)
    if len(spec.mesh_axes) > MAX_AXES:
        raise NotationError(f"a spec is planned over at most {MAX_AXES} mesh axes, got {len(spec.mesh_axes)} in {spec}")
    check_number("flops_per_byte", flops_per_byte)
    if not 0 < flops_per_byte < math.inf:
        raise ValueError(f"flops_per_byte must be above 0 and finite, got {flops_per_byte!r}")
    start_bytes = check_count("start_bytes", start_bytes)
    return _plan(spec, measure(spec, sizes, mesh, dtype, start_bytes), flops_per_byte)


def measure(
    spec: Spec,
    sizes: Mapping[str, int] | None,
    mesh: Mapping[str, int] | None,
    dtype: object = "bfloat16",
    start_bytes: int = START_BYTES,
) -> Sizes | None:
    """Check sizes, mesh and dtype against the spec; return the `Sizes`, or None if sizes and mesh are unknown."""
    known = str(dtype).removeprefix("torch.")
    if known not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {known}")
    if sizes is None and mesh is None:
        return None
    if sizes is None or mesh is None:
        missing_one = "mesh too, such as X=2" if mesh is None else "sizes too, such as M=8192"
        raise ValueError(f"sizes and mesh go together: give {missing_one}")
    for name, given in (("sizes", sizes), ("mesh", mesh)):
        if not isinstance(given, Mapping):
            raise TypeError(f"{name} must map names to numbers, got {given!r}")
    if set(sizes) != set(spec.dim_names):
        raise ValueError(f"sizes must give the length of {', '.join(spec.dim_names)}, got {_listed(sizes)}")
    if missing := [axis for axis in spec.mesh_axes if axis not in mesh]:
        raise ValueError(f"mesh has no axis {', '.join(missing)}, which {spec} needs: got {_listed(mesh)}")
    sizes = {name: check_count(f"sizes[{name!r}]", length) for name, length in sizes.items()}
    mesh = {axis: check_count(f"mesh[{axis!r}]", mesh[axis], least=1) for axis in spec.mesh_axes}
    return Sizes.of(sizes, mesh, ITEMSIZE[known], start_bytes, ITEMSIZE[made_of(known)])


def _listed(given: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={number}" for name, number in given.items()) or "none"


@lru_cache(maxsize=128)
def _plan(spec: Spec, sizes: Sizes | None, flops_per_byte: float) -> Plan:
    dy = Tensor(spec.c.dims)
    # All rows together, K and N have one length, every axis four ranks; a collective's start outweighs all bytes.
    rows = (*spec.batch, spec.m)
    length = 4 ** (10 * len(rows))
    alike = dict.fromkeys(rows, 4**10) | {spec.k: length, spec.n: length}
    usual = Sizes.of(alike, dict.fromkeys(spec.mesh_axes, 4), 1, start_bytes=length**3)

    def matmul(names: tuple[str, str, str], a: Tensor, b: Tensor, c: Tensor) -> MatmulPlan:
        way, reason, rejected = choose(Matmul(names, a, b, c), spec.mesh_axes, usual, sizes, flops_per_byte)
        return MatmulPlan(names, a, b, c, way.sequence(names[2]), reason, rejected)

    return Plan(
        spec,
        matmul(("x", "w", "y"), spec.a, spec.b, spec.c),
        matmul(("dy", "w", "dx"), dy, _reorder(spec.b, (spec.n, spec.k)), spec.a),
        matmul(("x", "dy", "dw"), _reorder(spec.a, (spec.k, *rows)), dy, spec.b),
    )


def _plain_steps(matmul: MatmulPlan, name: str) -> tuple[Step, ...]:
    return tuple(replace(step, fused=False) for step in matmul.steps if step.tensor == name)


def _reorder(tensor: Tensor, names: tuple[str, ...]) -> Tensor:
    return Tensor(tuple(Dim(name, tensor.axes(name)) for name in names))
