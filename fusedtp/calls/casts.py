"""Steps of a program that make its tensors float8, by a recipe (`recipes`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from ..float8 import largest_finite
from ..op import ALL_GATHER, Task
from ..recipes import Cast
from ..sharding import notation
from ..sharding.partition import Partition
from .matrices import Matrix, Named

# A tensor, how it lies, how it is cast (None: it is not) and the dims of it that are contracted.
Use: TypeAlias = tuple[Named, notation.Tensor, "Cast | None", Sequence[str]]


class Builder(Protocol):
    """What is asked of a `Program`."""

    partition: Partition

    def add(self, run: Any, reads: Sequence[str], *made: Any) -> tuple[Named, ...]: ...

    def task(self, task: Task, axis: str, operands: Sequence[Any], *made: Any) -> tuple[Named, ...]: ...


def cast(program: Builder, given: Sequence[Use]) -> list[Named]:
    """Adds the steps that make these tensors float8, each once; those without a cast stay as they are.

    What has one scale has it on all ranks with a part of it, which tell each other the largest magnitude: one number,
    or those of several tensors at once.
    """
    # By name: lengths that a compiler leaves open cannot be hashed.
    agreed: dict[str, tuple[str, int]] = {}
    whole = [(x, lies.used) for x, lies, its, _ in given if its is not None and its.whole]
    for axes in dict.fromkeys(axes for _, axes in whole):
        alike = list({x.name: x for x, its in whole if its == axes}.values())
        largest = _largest(program, alike, axes)
        agreed |= {x.name: (largest.name, i) for i, x in enumerate(alike)}
    made: dict[Any, Named] = {}
    found = []
    for x, _, its, contracted in given:
        if its is None:
            found.append(x)
            continue
        key = x.name, its, tuple(contracted)
        if key not in made:
            step = _casting(its, x, contracted, agreed.get(x.name))
            made[key] = program.add(step.run, step.reads, (x.dims, x.lengths))[0]
        found.append(made[key])
    return found


def _largest(program: Builder, xs: Sequence[Named], axes: Sequence[str]) -> Named:
    # [1, len(xs)]: each one's largest magnitude on any rank of these axes.
    dims, made = (".one", ".each"), _measuring(xs)
    found = program.add(made.run, made.reads, (dims, (1, len(xs))))[0]
    for axis in axes:
        num_ranks = program.partition.place[axis][1]
        if num_ranks > 1:
            task = Task(ALL_GATHER, ((1, len(xs)),), torch.float32, (1,) * num_ranks)
            matrix = Matrix.of(found, dims[:1], dims[1:])
            everyone = program.task(task, axis, (matrix,), (dims, (num_ranks, len(xs))))[0]
            made = _largest_of(everyone)
            found = program.add(made.run, made.reads, (dims, (1, len(xs))))[0]
    return found


class _Made(NamedTuple):
    """What a step runs, from all tensors by name, and the names of those that it reads."""

    run: Callable[[dict[str, Any], Any], list[Any]]
    reads: tuple[str, ...]


def _casting(its: Cast, x: Named, contracted: Sequence[str], largest: tuple[str, int] | None) -> _Made:
    """x in float8. largest: for one scale, the name of the tensor [1, ..] that has the magnitude, and where."""
    dims = tuple(i for i, name in enumerate(x.dims) if name in contracted)
    if largest is None:
        return _Made(lambda tensors, runs: [its(tensors[x.name], dims)], (x.name,))
    name, i = largest
    return _Made(lambda tensors, runs: [its(tensors[x.name], dims, tensors[name][0, i])], (x.name, name))


def _measuring(xs: Sequence[Named]) -> _Made:
    """[1, len(xs)]: the largest magnitude of each on this rank."""
    names = tuple(x.name for x in xs)
    return _Made(lambda tensors, runs: [torch.stack([largest_finite(tensors[name]) for name in names])[None]], names)


def _largest_of(everyone: Named) -> _Made:
    """[1, ..]: that of all ranks."""
    return _Made(lambda tensors, runs: [tensors[everyone.name].amax(0, keepdim=True)], (everyone.name,))
