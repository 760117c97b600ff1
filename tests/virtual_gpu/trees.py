"""Sums in leaves on compiled code: the same bits on any number of virtual ranks, and close to the exact result."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedtp import reference
from fusedtp.workspaces.workspace import Workspace

from .cases import issue, virtual_ranks
from .driver import EmulatedDriver
from .machine import Schedule
from .shapes import Phases, laid_out, launches_of, split

OPS = ("gather", "gather contraction", "scatter", "scatter columns", "one_shot", "two_shot", "two terms")
LEAVES = 8


@dataclass(frozen=True)
class Problem:
    """a [M, K] @ b [K, N] + bias, and the memory layout of b."""

    a: Tensor
    b: Tensor
    bias: Tensor
    how: str

    @classmethod
    def drawn(cls, seed: int, dtype: torch.dtype, *, blocks: int = 0) -> Problem:
        """Draw random lengths. blocks: number of blocks of 64 of K in every leaf, for descriptors; with 0 any K that
        divides by the number of leaves.
        """
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        M, N = chance.randrange(9, 90), 8 * chance.randrange(2, 12)
        K = 64 * blocks * LEAVES if blocks else LEAVES * chance.randrange(1, 30)
        a, b, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((M, K), (K, N), (N,)))
        return cls(a, b, bias, chance.choice(("rows", "columns")))

    def phases(self, op: str, ws: Workspace, leaves: int) -> Phases:
        """Return the launches of a rank's part: columns for a gather, the contraction for a sum."""
        M, N, n, rank = self.a.shape[0], self.b.shape[1], ws.world_size, ws.rank
        m_sizes, n_sizes = split(M, n, "uneven" if n > 1 else "even"), split(N, n, "even")
        k_part = slice(rank * len(self.b) // n, (rank + 1) * len(self.b) // n)
        if op.startswith("gather"):
            on_rows = op == "gather"
            k_sizes = (len(self.b) // n,) * n
            a = self.a.split(m_sizes)[rank] if on_rows else self.a[:, k_part]
            b, bias = self.b.split(n_sizes, 1)[rank], self.bias.split(n_sizes)[rank]
            return launches_of(
                "all_gather_matmul", ws, a.contiguous(), laid_out(b, self.how), bias.clone(),
                sizes=m_sizes if on_rows else k_sizes, dim=int(not on_rows), leaves=leaves,
            )  # fmt: skip
        a, b = self.a[:, k_part].contiguous(), laid_out(self.b[k_part], self.how)
        if op == "two terms":
            return launches_of(
                "matmul_reduce_scatter", ws, a, b, None, None, None, None, a * 0.5, b, None, sizes=m_sizes,
                leaves=leaves,
            )  # fmt: skip
        if op.startswith("scatter"):
            along, sizes = (1, n_sizes) if op == "scatter columns" else (0, m_sizes)
            return launches_of(
                "matmul_reduce_scatter", ws, a, b, self.bias, sizes=sizes, dim=along, leaves=leaves
            )  # fmt: skip
        return launches_of("matmul_all_reduce", ws, a, b, self.bias, algorithm=op, leaves=leaves)

    def exact(self, op: str) -> tuple[Tensor, Tensor]:
        """Return the exact result, and the allowed error."""
        if op != "two terms":
            return reference.matmul(self.a, self.b, self.bias), reference.bound(
                self.a, self.b, self.a.dtype, bias=self.bias
            )
        return 1.5 * reference.matmul(self.a, self.b), 1.5 * reference.bound(self.a, self.b, self.a.dtype)


def whole(
    driver: EmulatedDriver, problem: Problem, op: str, world_size: int, seed: int, leaves: int = LEAVES
) -> Tensor:
    """Return the joined result of all ranks; replicated results must be equal."""
    schedule = Schedule(seed, tick=0.001)
    with virtual_ranks(world_size) as ranks:
        if world_size == 1:
            # The host's next step reads a kernel's results.
            driver.launched = lambda: driver.run(ranks, schedule)
        try:
            outs = issue(driver, ranks, [problem.phases(op, ws, leaves) for ws in ranks])
        finally:
            driver.launched = None
        if world_size > 1:
            driver.run(ranks, schedule)
        for ws in ranks:
            ws.check()
    if op in ("one_shot", "two_shot"):
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0]
    return torch.cat(outs, int(op.startswith("gather") or op == "scatter columns"))


def check(driver: EmulatedDriver, op: str, dtype: torch.dtype, world_sizes: tuple[int, ...], seed: int) -> None:
    """Check that the bits of one rank are those of all these numbers of ranks, and of some rows alone, but not those of
    the usual order.
    """
    problem = Problem.drawn(seed, dtype, blocks=seed % 2)
    expected = whole(driver, problem, op, 1, seed)
    reference.check(expected, *problem.exact(op), f"{op} of {dtype}, one rank, seed {seed}")
    for world_size in world_sizes:
        found = whole(driver, problem, op, world_size, seed)
        assert torch.equal(found, expected), f"{op} of {dtype}, {world_size} ranks, seed {seed}"
    if op == "gather":
        few = replace(problem, a=problem.a[5:8])
        assert torch.equal(whole(driver, few, op, 1, seed), expected[5:8]), f"rows alone, {dtype}, seed {seed}"
    if op != "gather" and dtype == torch.float32:
        assert not torch.equal(whole(driver, problem, op, 2, seed, leaves=0), expected)
