"""Registry of the cases that are checked and timed: `fusedtp sweep --suite ops,block`, on CPUs and GPUs alike.

A suite says how a case is set up on a rank, which variants run, which of them bound the others, and its sizes by
default. The gate, the clock, the rows, the tables and the pictures are the same for all suites.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from . import providers
from .cases import (
    ALONE,
    COLLECTIVES,
    DIRECTIONS,
    OPS,
    OWN,
    SCHEDULES,
    BlockSizes,
    Case,
    block,
    flops,
    sizes_of,
    traffic,
)

if TYPE_CHECKING:
    from torch import device as Device
    from torch.distributed import ProcessGroup

    from .operands import Workload

Size: TypeAlias = tuple[int, ...]
# A case with more arithmetic than this, forward and backward on a CPU, takes seconds a call: each variant runs once for
# the gate.
LONG_FLOPS = 1e11


def _problem(case: Case, group: ProcessGroup, device: Device) -> Workload:
    # Imported late: what plans cases needs no torch.
    from .problem import Problem

    return Problem(case, group, device)


def _layered(case: Case, group: ProcessGroup, device: Device) -> Workload:
    from .layers import SETUPS

    return SETUPS[case.op](case, group, device)


def _kernels(case: Case, group: ProcessGroup, device: Device) -> Workload:
    from .gpu_kernels import Kernels

    return Kernels(case, group, device)


def _checks(case: Case, group: ProcessGroup, device: Device) -> Workload:
    from .checks import Checks

    return Checks(case, group, device)


@dataclass(frozen=True)
class Suite:
    """Cases of one kind.

    - setup: (case, group, device) -> the case on this rank of the group; collective.
    - lengths: names of a size's numbers; the last takes the rest. split: indices of those that ranks share evenly.
    - bounds: variants that bound the others. others: implementations by others, beside the providers of `ops`.
    - schedules: those that are timed by default. directions: by default.
    - make: (size, dtype, world size) -> the cases of a size.
    - on_cpu, on_gpu: sizes by default. of_model: (sizes of a model, tokens) -> sizes by layer.
    - most_ranks: on CPUs, by default. seconds: for the rounds of a case, by default.
    - calls: calls in a row that are timed together, from a barrier on, as a decoder makes them.
    - once: the gate runs each variant once.
    """

    about: str
    ops: tuple[str, ...]
    make: Callable[..., list[Case]] = lambda *_: []
    setup: Callable[[Case, ProcessGroup, Device], Workload] = _layered
    lengths: tuple[str, ...] = ("M", "N", "K")
    split: tuple[int, ...] = ()
    bounds: tuple[str, ...] = ("local", "comm")
    others: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ("unfused", "auto")
    directions: tuple[str, ...] = ("forward", "both")
    on_cpu: tuple[Size, ...] = ()
    on_gpu: tuple[Size, ...] = ()
    of_model: Callable[[BlockSizes, int], Mapping[str, Size]] | None = None
    tokens: tuple[int, ...] = tuple(2**i for i in range(4, 15))
    most_ranks: int = 2
    seconds: float = 5.0
    calls: int = 1
    once: bool = False

    def sized(self, size: Size, dtype: str, world_size: int) -> list[Case]:
        """Return the cases of a size; ValueError for lengths that ranks cannot share evenly, as torch's styles do."""
        told = ",".join(map(str, size))
        if len(size) < len(self.lengths) or (len(size) > len(self.lengths) and self.lengths[-1] != "widths"):
            names = ",".join(self.lengths).replace("widths", "N1,N2,..")
            raise ValueError(f"a size is {names}, got {told}")
        split = (*self.split, *range(len(self.lengths) - 1, len(size))) if self.lengths[-1] == "widths" else self.split
        if any(size[place] % world_size for place in split):
            raise ValueError(f"lengths that are split must be multiples of the {world_size} ranks, got {told}")
        return self.make(size, dtype, world_size)

    def of(self, model: str, tokens: int, dtype: str, world_size: int) -> list[Case]:
        """Return the cases of a model at a number of tokens; ValueError for a model that ranks cannot share."""
        assert self.of_model is not None
        name, sizes = sizes_of(model)
        block(name, tokens, world_size, dtype, sizes)
        if self.ops in (("block",), ("grouped",)) and world_size > sizes.kv_heads:
            raise ValueError(f"{name} has {sizes.kv_heads} key-value heads, which {world_size} ranks cannot share")
        found = [
            replace(case, model=name, tokens=tokens, layer=layer)
            for layer, size in self.of_model(sizes, tokens).items() for case in self.sized(size, dtype, world_size)
        ]  # fmt: skip
        return [replace(case, sizes=sizes) for case in found] if self.ops == ("block",) else found

    def variants(self, num_gpus: int, schedules: Sequence[str] | None) -> tuple[str, ...]:
        """Return the variants of a timed case. schedules: those asked for, or None for the default."""
        if schedules is None:
            schedules = (*SCHEDULES, "auto") if num_gpus else self.schedules
        ours = [name for name in ("unfused", *schedules) if name != "fused" or num_gpus]
        return tuple(dict.fromkeys((*self.bounds, *ours, *self.others)))


def _ops(size: Size, dtype: str, world_size: int) -> list[Case]:
    M, N, K = size
    return [Case(op, M, N, K, dtype, world_size) for op in OPS]


def _mlp(size: Size, dtype: str, world_size: int) -> list[Case]:
    M, num_in, hidden = size
    return [Case("mlp", M, hidden, num_in, dtype, world_size)]


def _grouped(size: Size, dtype: str, world_size: int) -> list[Case]:
    M, num_in, *widths = size
    return [Case("grouped", M, sum(widths), num_in, dtype, world_size, widths=tuple(widths))]


def _of(op: str, size: Size, dtype: str, world_size: int) -> list[Case]:
    M, N, K = size
    return [Case(op, M, N, K, dtype, world_size)]


def _collectives(size: Size, dtype: str, world_size: int) -> list[Case]:
    return [Case(op, size[0], size[1], size[1], dtype, world_size) for op in COLLECTIVES]


def _bytes(most: int, itemsize: int) -> tuple[Size, ...]:
    # Whole tensors of 16 KB, four times as much, and so on, in rows of 4 KB.
    return tuple((num_bytes >> 12, 4096 // itemsize) for num_bytes in (4**i for i in range(7, 16)) if num_bytes <= most)


SUITES: Mapping[str, Suite] = {
    "ops": Suite(
        "each matmul with its collective", OPS, _ops,
        setup=_problem, bounds=("matmul", "comm"), schedules=(*SCHEDULES, "auto"), directions=DIRECTIONS, most_ranks=4,
        seconds=1.0,
    ),
    # Two large sizes, and two small ones that show the host's share.
    "mlp": Suite(
        "an MLP, GELU, no bias, split by sequence", ("mlp",), _mlp, lengths=("M", "D", "F"), split=(0, 2),
        others=("dtensor",), directions=("both",), seconds=10.0,
        on_cpu=((2048, 1024, 4096), (4096, 2048, 1024), (256, 512, 2048), (16, 512, 2048)),
        of_model=lambda sizes, tokens: {"mlp": (tokens, sizes.hidden, sizes.intermediate)},
    ),
    # Equal numbers of heads, and grouped queries.
    "grouped": Suite(
        "q, k and v at one gather", ("grouped",), _grouped, lengths=("M", "H", "widths"), split=(0,),
        others=("dtensor", "dtensor_once", "concatenated"), directions=("both",), seconds=20.0,
        on_cpu=((2048, 512, 512, 512, 512), (2048, 512, 512, 128, 128), (4096, 1024, 1024, 1024, 1024),
                (4096, 1024, 1024, 256, 256)),
        of_model=lambda sizes, tokens: {
            "attention qkv": (tokens, sizes.hidden, *(heads * sizes.head_dim for heads in
                                                      (sizes.heads, sizes.kv_heads, sizes.kv_heads)))},
    ),
    # N, K: an output projection, and the second linear of an MLP.
    "decode": Suite(
        "a decoder's all-reduce of few tokens, with residual and RMSNorm", ("decode",), partial(_of, "decode"),
        split=(2,), others=("torch", "dtensor"), directions=("forward",), most_ranks=4, seconds=6.0, calls=8,
        on_cpu=tuple((M, N, K) for N, K in ((1024, 1024), (1024, 2816), (2048, 2048)) for M in (1, 4, 16, 64)),
        of_model=lambda sizes, tokens: {
            "attention out": (tokens, sizes.hidden, sizes.heads * sizes.head_dim),
            "mlp down": (tokens, sizes.hidden, sizes.intermediate)},
        tokens=(1, 4, 16, 64, 128),
    ),
    "block": Suite(
        "a whole transformer block, forward, and a step: forward and backward", ("block",), partial(_of, "block"),
        lengths=("tokens", "intermediate", "hidden"), others=("dtensor",),
        of_model=lambda sizes, tokens: {"": (tokens, sizes.intermediate, sizes.hidden)},
    ),
    "collectives": Suite(
        "collectives alone, against their bytes", COLLECTIVES, _collectives, lengths=("M", "N"), bounds=(),
        schedules=("unfused", "decomposed"), others=("one_shot", "two_shot", "multimem"), directions=("forward",),
        on_cpu=_bytes(1 << 24, 4), on_gpu=_bytes(1 << 30, 2), seconds=1.0,
        of_model=lambda sizes, tokens: {"": (tokens, sizes.hidden)},
    ),
}  # fmt: skip
# Cases of the ten-minute command (`gpu`), which gives them a budget.
ON_ONE_GPU = (
    Suite("a kernel with all signals raised beforehand", ("kernel",), setup=_kernels, bounds=()),
    Suite("a check without a time", ("check",), setup=_checks, bounds=(), once=True),
)
# The suite of every op.
SUITE_OF: Mapping[str, Suite] = {op: suite for suite in (*SUITES.values(), *ON_ONE_GPU) for op in suite.ops}


def is_long(case: Case, num_gpus: int) -> bool:
    """Return whether one call takes seconds on a CPU."""
    return not num_gpus and flops(case, "both") > LONG_FLOPS


def missing(variant: str, case: Case, direction: str, num_gpus: int) -> str:
    """Return why a variant cannot run this case here, or "" if it can."""
    if variant == "comm" and not traffic(case, direction):
        return f"{direction} of {case.op} sends nothing"
    if variant == "own_matmul" and case.is_float8:
        return "our kernels with preset flags are given no scales here"
    if case.world_size == 1:
        if variant == "comm" or variant not in (*ALONE, "unfused", "auto"):
            return "one rank has nothing to send"
        if variant == "auto" and is_long(case, num_gpus):
            return "on one rank it is the library's matmul, as unfused is: left out where a call takes seconds"
    if variant in OWN or case.op not in OPS:
        if variant in SUITES["collectives"].others:
            return "of torch's symmetric memory the all-reduces alone are timed" if case.op != "all_reduce" else (
                "" if num_gpus else "torch's symmetric memory needs CUDA"
            )  # fmt: skip
        return ""
    return providers.named(variant).reason(case, direction, num_gpus)


def cases_of(
    suite: Suite, sizes: Sequence[Size], models: Sequence[str], tokens: Sequence[int] | None, dtypes: Sequence[str],
    world_size: int, num_gpus: int,
) -> Iterator[Case]:  # fmt: skip
    """Yield the cases of a suite but `ops`: of these sizes, or of these models, or those by default."""
    if not sizes and not models:
        # Tokens alone are those of the models that are taken by default.
        sizes = () if tokens else suite.on_gpu if num_gpus else suite.on_cpu
        models = () if sizes else ("llama3-8b", "llama3-70b") if num_gpus else ("small",)
        tokens = tokens or (suite.tokens if num_gpus else (64, 256, 1024))
    for dtype in dtypes:
        for size in sizes:
            yield from suite.sized(size, dtype, world_size)
        for model, count in itertools.product(models, tokens or (2048,)):
            yield from suite.of(model, count, dtype, world_size)
