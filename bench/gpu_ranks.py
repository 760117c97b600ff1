"""What ranks check when they share a GPU: layers and gradients, collectives, captured graphs, against float64.

Each function is run by every rank of a `RankPool` (`tests/test_gpu.py`, stages 4 and 5 of `bench.gpu`), where there is
no GPU on the CPU, with the kernels interpreted. Ranks that share a GPU are time-sliced, so nothing is timed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference
from fusedtp.workspaces import registry

from .mixed import ALGORITHMS, COLLECTIVES, Call, Operands
from .operands import device_here

DTYPES = ("bfloat16", "float16", "float32")
# M, N, K: one tile and less; tiles that do not divide; several waves of tiles.
SIZES = ((64, 48, 40), (300, 264, 200), (1024, 1536, 512))
TINY = ((21, 18, 14),)
# Of each wait in a kernel: far under what a check may take.
WAIT_SECONDS = 100


def prepare() -> torch.device:
    """What every check begins with. The derived bound is one of float32 accumulation, which cuBLAS may leave unless it
    is told; fresh memory is NaN, so that what nothing wrote fails.
    """
    matmuls = torch.backends.cuda.matmul
    matmuls.allow_bf16_reduced_precision_reduction = False
    matmuls.allow_fp16_reduced_precision_reduction = False
    matmuls.allow_tf32 = False
    # Deterministic mode is what makes the allocator fill; its own refusals are turned into warnings.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    registry.set_timeout(WAIT_SECONDS)
    return device_here()


def poisoned(group: ProcessGroup) -> bool:
    """Whether fresh memory is NaN on this rank."""
    device = prepare()
    # Twice: the second takes what the first gives back.
    for _ in range(2):
        fresh = torch.empty(1 << 12, device=device)
        if not bool(fresh.isnan().all()):
            return False
        fresh.zero_()
        del fresh
    return True


def cut(length: int, world_size: int) -> tuple[int, ...]:
    """Uneven on purpose, rank 1 empty where there are more than two."""
    sizes = [length // world_size] * world_size
    sizes[0] += length - sum(sizes)
    if world_size > 2:
        sizes[0] += sizes[1]
        sizes[1] = 0
    return tuple(sizes)


def _leaf(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().clone().to(device).requires_grad_()


def _layers(
    group: ProcessGroup, M: int, N: int, K: int, dtype: str, schedule: str, seed: int, producer: str = "auto"
) -> None:
    # Column- and row-parallel with split rows, forward and all gradients; the all-reduce by both algorithms.
    m, n, k = (cut(length, group.size()) for length in (M, N, K))
    for op in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"):
        for algorithm in ALGORITHMS.get(op, {}).get(schedule, ("auto",)):
            call = Call(op, schedule, algorithm, dtype, 0, (m, n, k), False, op != "linear_all_reduce", seed)
            operands = Operands(call, group.rank(), device_here())
            operands.check(operands.run(group, producer=producer))


def layers(group: ProcessGroup, schedule: str, dtype: str, tiny: bool = False) -> int:
    """Both linear layers and the all-reduce at every size, twice in a row on one workspace; how many that were."""
    device, count = prepare(), 0
    for (M, N, K), again in itertools.product(TINY if tiny else SIZES, range(2)):
        _layers(group, M, N, K, dtype, schedule, seed=count + again)
        count += 1
    registry.get(group, device).check()
    fusedtp.destroy()
    return count


def collectives(group: ProcessGroup, dtype: str, tiny: bool = False) -> None:
    """Every collective by every algorithm: bit for bit, or within the bound and alike in two runs."""
    device = prepare()
    for R, C in ((7, 5), (260, 300))[: 1 if tiny else 2]:
        m, n = cut(R, group.size()), cut(C, group.size())
        for op in COLLECTIVES:
            for algorithm in ALGORITHMS[op]["fused"]:
                call = Call(op, "fused", algorithm, dtype, 0, (m, n, n), False, False, R)
                operands = Operands(call, group.rank(), device)
                (first,), (again,) = operands.run(group), operands.run(group)
                operands.check([first])
                assert torch.equal(first, again), f"{op} {algorithm}: other bits in a second run"
    fusedtp.destroy()


def trees(group: ProcessGroup, dtype: str, tiny: bool = False) -> int:
    """Sums in the order of a tree: the bits of one rank, forward and backward; how many results were compared."""
    device, count, n, rank = prepare(), 0, group.size(), group.rank()
    alone, _ = dist.new_subgroups(1)
    for M, N, K in ((19, 24, 40),) if tiny else ((64, 48, 40), (300, 264, 1000), (129, 1536, 2048)):
        x, w, b, dy = (
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, getattr(torch, dtype))
            for seed, shape in enumerate(((M, K), (N, K), (N,), (M, N)))
        )
        m_sizes = cut(M, n)
        for name, more in (
            ("all_gather_linear", {"sizes": m_sizes}), ("linear_reduce_scatter", {"sizes": m_sizes}),
            ("linear_all_reduce", {"algorithm": "one_shot"}), ("linear_all_reduce", {"algorithm": "two_shot"}),
        ):  # fmt: skip
            gathers, scatters = name == "all_gather_linear", name == "linear_reduce_scatter"
            # Where this rank's part of x, w, bias and y lies in the whole.
            of_m = slice(sum(m_sizes[:rank]), sum(m_sizes[: rank + 1]))
            of_n, of_k = (slice(rank * length // n, (rank + 1) * length // n) for length in (N, K))
            parts = {
                "x": (of_m,) if gathers else (slice(None), of_k), "w": (of_n,) if gathers else (slice(None), of_k),
                "b": (of_n,) if gathers else (slice(None),),
                "y": (slice(None), of_n) if gathers else (of_m if scatters else slice(None),),
            }  # fmt: skip
            found = []
            for on, given, of in ((group, more, parts), (alone, {}, dict.fromkeys(parts, (slice(None),)))):
                leaves = [_leaf(each[of[part]], device) for part, each in (("x", x), ("w", w), ("b", b))]
                y = getattr(fusedtp, name)(*leaves, group=on, order="tree", **given)
                y.backward(dy[of["y"]])
                found.append([y.detach(), *(each.grad for each in leaves)])
            for what, mine, whole in zip(("y", "x", "w", "b"), *found, strict=True):
                assert torch.equal(mine, whole[parts[what]]), f"{name} {more}: other bits of {what} on {n} ranks"
                count += 1
    dist.destroy_process_group(alone)
    fusedtp.destroy()
    return count


def switch(group: ProcessGroup, dtype: str, tiny: bool = False) -> str:
    """Sums that the switch makes, by the kernel of one launch, by three and alone: right, and the same on every rank;
    and rows that are stored once, to all ranks: the bits of those that are pushed. How sums were made.
    """
    device, made, rank = prepare(), set(), group.rank()
    for M, N, K in ((19, 24, 40),) if tiny else ((1, 64, 512), (200, 264, 1000), (1030, 1536, 2048)):
        generators = [torch.Generator().manual_seed(seed) for seed in range(group.size())]
        parts = [
            [torch.randn(shape, generator=each).to(device, getattr(torch, dtype)) for shape in ((M, K), (N, K), (M, N))]
            for each in generators
        ]
        x, w, mine = (_leaf(each, device) for each in parts[rank])
        # The same on every rank.
        residual = parts[0][2]
        left, right = (torch.cat([part[i] for part in parts], 1) for i in range(2))
        y = fusedtp.linear_all_reduce(
            x, w, group=group, schedule="fused", algorithm="two_shot", order="any", residual=residual
        )
        made.add(_path().sums)
        exact, eps = reference.matmul(left, right.t()), torch.finfo(y.dtype).eps
        exact += residual.double()
        allowed = reference.bound(left, right.t(), y.dtype, k_sizes=(K,) * group.size()) + 3 * eps * exact.abs()
        reference.check(y.detach(), exact, allowed + eps * residual.double().abs(), f"sum of {M} x {N}")
        terms = [part[2] for part in parts]
        both = fusedtp.all_reduce(mine.detach(), group=group, schedule="fused", algorithm="two_shot", order="any")
        made.add(_path().sums)
        reference.check(
            both, reference.total(terms), reference.total_bound(terms, y.dtype, sum_dtype=y.dtype), "all_reduce"
        )
        for each in (y.detach(), both):
            everyone = [torch.empty_like(each) for _ in range(group.size())]
            dist.all_gather(everyone, each.contiguous(), group=group)
            assert all(torch.equal(other, each) for other in everyone), f"ranks have other sums of {M} x {N}"
        found = []
        for producer in ("push", "multicast"):
            gathered = fusedtp.all_gather_linear(
                x.detach(), w.detach(), group=group, schedule="fused", producer=producer
            )
            whole = fusedtp.all_gather(x.detach(), group=group, schedule="fused", producer=producer)
            found.append((gathered, whole))
        assert all(torch.equal(pushed, once) for pushed, once in zip(*found, strict=True)), "other rows at once"
    fusedtp.destroy()
    return ", ".join(sorted(made))


def _path() -> fusedtp.Path:
    path = fusedtp.last_path()
    assert path is not None
    return path


def captured(step: Callable[[], list[Tensor]], device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """What replays `step`, and the tensors that a replay fills. A CPU has no graphs: there the step runs again."""
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        return graph.replay, found
    found = step()

    def again() -> None:
        for old, new in zip(found, step(), strict=True):
            old.detach().copy_(new.detach())

    return again, found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replays(group: ProcessGroup, times: int, tiny: bool = False) -> None:
    """One captured op advances the device's epoch at every replay, so halves alternate though addresses do not."""
    device, M, K, N = prepare(), *((9, 8, 7) if tiny else (96, 64, 80))
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((M, K), (N, K)))

    def once(schedule: str = "fused") -> Tensor:
        return fusedtp.linear_all_reduce(x, weight, group=group, schedule=schedule)

    with torch.no_grad():
        once()
        _synchronize(device)
        replay, (y,) = captured(lambda: [once()], device)
        for i in range(times):
            x.copy_(torch.randn(M, K, generator=torch.Generator().manual_seed(i * 100 + group.rank())))
            replay()
            expected = once("unfused")
            _synchronize(device)
            torch.testing.assert_close(y, expected, rtol=0.05, atol=0.5)
            # An op that the host drives must know how far the replays have come.
            torch.testing.assert_close(once("decomposed"), expected, rtol=0.05, atol=0.5)
    fusedtp.destroy()


def replays_of_a_layer(group: ProcessGroup, times: int, tiny: bool = False) -> None:
    """An MLP's forward and backward in one graph: both gathers and both scatters, new inputs at every replay."""
    device, rank, world_size = prepare(), group.rank(), group.size()
    random = torch.Generator().manual_seed(rank)
    rows, features, hidden = (8, 6, 5) if tiny else (64, 48, 40)
    up, down = (
        _leaf(torch.randn(shape, generator=random).bfloat16(), device)
        for shape in ((hidden, features), (features, hidden))
    )
    x = _leaf(torch.randn(rows, features, generator=random).bfloat16(), device)
    dy = torch.zeros(rows, features, dtype=torch.bfloat16, device=device)

    def step(schedule: str = "fused") -> list[Tensor]:
        h = fusedtp.all_gather_linear(x, up, group=group, schedule=schedule)
        y = fusedtp.linear_reduce_scatter(torch.relu(h), down, group=group, schedule=schedule)
        return [y, *torch.autograd.grad(y, (x, up, down), dy)]

    _warm_up(step, device)
    # Twice, on one stream: the second begins with an op that leaves alone the side stream that the first has used.
    for _ in range(2):
        replay, found = captured(step, device)
    for i in range(times):
        random.manual_seed(i * world_size + rank)
        with torch.no_grad():
            x.copy_(torch.randn(rows, features, generator=random))
            dy.copy_(torch.randn(rows, features, generator=random))
        replay()
        for got, want, what in zip(found, step("unfused"), ("y", "dx", "dup", "ddown"), strict=True):
            torch.testing.assert_close(got, want, rtol=0.05, atol=1.0, msg=functools.partial("{}: {}".format, what))
    fusedtp.destroy()


def _warm_up(step: Callable[[], object], device: torch.device) -> None:
    if device.type != "cuda":
        step()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def copies(group: ProcessGroup, tiny: bool = False) -> list[str]:
    """Layers whose gathers are copied, on rank 0 only and on all; what each said it took."""
    device, seen = prepare(), []
    ws = registry.get(group, device)
    for everybody in (False, True):
        producer = "copy" if everybody or group.rank() == 0 else "push"
        for seed, (M, N, K) in enumerate(TINY if tiny else SIZES):
            _layers(group, M, N, K, "bfloat16", "fused", seed, producer)
        fusedtp.all_gather(torch.ones(4, 8, device=device), group=group, schedule="fused", producer=producer)
        path = fusedtp.last_path()
        assert path is not None
        seen.append(path.producer)
    ws.check()
    fusedtp.destroy()
    want = ["copy" if group.rank() == 0 else "push", "copy"]
    assert seen == want, f"rank {group.rank()}: gathered by {seen}, not by {want}"
    return seen
