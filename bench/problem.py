"""Closures that run each variant of a case on one rank, and the check of their results.

A closure returns a tuple whose parts are named by `Problem.parts`: y, dx, dw are this rank's shards of the results;
y_partial, dx_partial are its terms of a sum over ranks; x, dy are results of a gather alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import collectives, reference
from fusedtp.scaled import Quantized, unpacked
from fusedtp.schedules import SCHEDULES as TABLE

from . import providers
from .cases import ALONE, BOUNDS, OWN, SCHEDULES, SEQUENTIAL, Case, check_direction
from .operands import Operands, Results, Runner, is_unfinished, passes, sequential

# Rows of each result that `glance` checks.
GLANCED = 8
# Parts returned by (matmuls alone, collectives alone) for each kind of op.
_FORWARD = {
    "gather": (("y",), ("x",)),
    "scatter": (("y_partial",), ("y",)),
    "all_reduce": (("y_partial",), ("y",)),
}
_BACKWARD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gather": (("dx_partial", "dw"), ("dx", "x")),
    "scatter": (("dx", "dw"), ("dy",)),
    "all_reduce": (("dx", "dw"), ()),
}


class Problem(Operands):
    """The operands of `case` on this rank of `group`, with their variants. `runner` and `check` are collective."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(case, group.rank(), device)
        self.group = group
        # Buffers that an all-reduce overwrites, and what a turn puts into them.
        self._summed: list[tuple[Tensor, Tensor]] = []

    def parts(self, variant: str, direction: str = "forward") -> tuple[str, ...]:
        """Return the names of a variant's results."""
        check_direction(direction)
        if variant in ALONE:
            which = int(variant == "comm")
            forward, backward = _FORWARD[self.case.kind][which], _BACKWARD[self.case.kind][which]
        else:
            forward, backward = ("y",), ("dx", "dw")
        return {"forward": forward, "backward": backward, "both": (*forward, *backward)}[direction]

    def _runner(self, variant: str, direction: str) -> Runner:
        if variant == "own_matmul":
            # Imported late, as kernels must not be imported before the interpreter is chosen.
            from .gpu_kernels import own_matmul

            return own_matmul(self, self.parts(variant, direction))
        if variant in BOUNDS:
            # The library's matmuls, or the backend's collectives, on inputs prepared in advance.
            alone = self._matmul if variant == "matmul" else self._collective
            steps = [alone(name) for name in self.parts(variant, direction)]
            return lambda: tuple([step() for step in steps])
        if variant not in OWN:
            return providers.named(variant).runner(self, self.group, direction)
        if variant == SEQUENTIAL:
            return passes(sequential(self, self.group), self.x, self.w, self, direction)
        assert variant in (*SCHEDULES, "auto"), variant
        return passes(self.linear(self.group, schedule=variant), self.x, self.w, self, direction)

    def _matmul(self, name: str) -> Callable[[], Tensor]:
        return self.multiply(name.removesuffix("_partial"))

    def _collective(self, name: str) -> Callable[[], Tensor]:
        if name in ("y", "dx"):
            term = self._matmul(name)()
            self.follows(term, name)
            if name == "y" and self.case.kind == "all_reduce":
                return self._all_reduce(term)
            return partial(self._sum, term, name)
        shard, _ = self.travelling(name)
        if self.case.is_float8:
            like = Quantized.of(self.x, self.dtype)
            scale = unpacked(shard.view(torch.uint8), like.shape[1], like).scale
            self.follows(scale[:, :1] if like.blocks is None else scale, name)
        return partial(collectives.all_gather, shard, group=self.group, sizes=self.m_sizes, schedule="unfused")

    def _all_reduce(self, term: Tensor) -> Callable[[], Tensor]:
        # The backend sums in place, as `unfused` lets it: a copy of the term would be timed with it.
        summed = term.clone()
        self._summed.append((summed, term))

        def run() -> Tensor:
            dist.all_reduce(summed, group=self.group)
            return summed

        return run

    def turn(self, direction: str) -> None:
        """Change the inputs, and put this rank's terms back where sums were made of them."""
        super().turn(direction)
        for summed, term in self._summed:
            summed.copy_(term)

    def restore(self) -> None:
        """Undo all turns, and forget what runners have computed."""
        super().restore()
        self._summed = []

    def _sum(self, term: Tensor, name: str) -> Tensor:
        # Sum every rank's term of y or dx by the backend.
        if name == "y" and self.case.kind == "all_reduce":
            return collectives.all_reduce(term, group=self.group, schedule="unfused")
        return collectives.reduce_scatter(term, group=self.group, sizes=self.m_sizes, schedule="unfused")

    def check(self, variant: str, results: Results, direction: str = "forward") -> tuple[float, float]:
        """Return (largest error, largest error / allowed error) on this rank; AssertionError if a part is wrong.

        Collective if a part is a term of a sum: the sum over ranks is checked.
        """
        names, own_part = self._named(variant, results, direction)
        # A backend may sum in the input's dtype, and so may every variant that uses a backend.
        taken = fusedtp.last_path()
        by_backend = variant == "auto" and taken is not None and taken.schedule == "unfused"
        over_memory = variant in ("auto", SEQUENTIAL) or (variant in SCHEDULES and TABLE[variant].shares_memory)
        lenient = by_backend or not over_memory
        # All sums come before the first check: a rank that finds a wrong part must not leave the others waiting.
        whole_results = [torch.cat(out) if isinstance(out, list) else out for out in results]
        summed = [
            self._sum(out, name.removesuffix("_partial")) if name.endswith("_partial") else out
            for name, out in zip(names, whole_results, strict=True)
        ]
        largest = ratio = 0.0
        for name, out in zip(names, summed, strict=True):
            what = f"{own_part}: {name}"
            if name in ("x", "dy"):
                _, sent = self.travelling(name)
                if self.case.is_float8:
                    assert torch.equal(out.view(torch.uint8), sent.view(torch.uint8)), f"{what}: other bytes"
                elif not torch.equal(out, sent):
                    reference.check(out, sent.double(), torch.zeros_like(sent, dtype=torch.float64), what)
                continue
            product = self.product(name.removesuffix("_partial"))
            sum_dtype = self.dtype if lenient else torch.float32
            error, share = product.check(out, sum_dtype, what, scale=self.scale_of(name))
            largest, ratio = max(largest, error), max(ratio, share)
        return largest, ratio

    def glance(self, variant: str, results: Results, direction: str, place: float) -> None:
        """Check a few rows of each result, at `place` from 0 to 1; AssertionError if one is wrong.

        Takes little time and no communication. So terms of a sum over ranks, which `ALONE` return, are not looked at.
        """
        if variant in ALONE:
            return
        names, own_part = self._named(variant, results, direction)
        for name, out in zip(names, results, strict=True):
            product, whole = self.product(name), torch.cat(out) if isinstance(out, list) else out
            begin = int(place * max(0, product.expected.shape[0] - GLANCED))
            rows, scale = slice(begin, begin + GLANCED), self.scale_of(name)
            product.check(whole, self.dtype, f"{own_part}: {name}", scale=scale, only=rows)

    def _named(self, variant: str, results: Results, direction: str) -> tuple[tuple[str, ...], str]:
        # Return the results' names and where they are from. AssertionError unless all are finished tensors.
        names = self.parts(variant, direction)
        own_part = f"{self.case}, {direction}, {variant}, rank {self.rank}"
        assert isinstance(results, tuple), f"{own_part}: a {type(results).__name__}, expected a tuple"
        assert len(results) == len(names), f"{own_part}: {len(results)} results, expected {', '.join(names)}"
        for name, out in zip(names, results, strict=True):
            for part in out if isinstance(out, list) else [out]:
                kind = type(part).__name__
                assert isinstance(part, Tensor), f"{own_part}: {name} is a {kind}, expected a tensor"
                assert not is_unfinished(part), f"{own_part}: {name} is an unfinished {kind}: nobody waited for it"
        return names, own_part
