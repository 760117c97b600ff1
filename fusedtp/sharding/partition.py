"""Length of every dim on every rank: global lengths, uneven splits, and this rank's place on the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..shards import even_sizes
from .notation import Tensor


@dataclass(frozen=True)
class Partition:
    """Shards of every dim of a spec as one rank sees them.

    `lengths` has the global length of each dim, `place` this rank's index on each axis and the axis's number of ranks.
    `splits` has the ranks' lengths of dims that the first axis does not split like `torch.tensor_split`.
    """

    lengths: Mapping[str, int]
    place: Mapping[str, tuple[int, int]]
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(self.length(dim.name, dim.axes) for dim in tensor.dims)
