"""torch features around the layers: compile, opcheck, activation checkpointing, hooks, autocast, dry runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, library, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.calls import autograd
from fusedtp.calls.problems import Settings
from fusedtp.op import Options

from .harness import few_kernels, mesh_of, spread

HIDDEN, INTERMEDIATE, LENGTH, BATCH = 8, 12, 6, 2


def model(group: ProcessGroup, **options: Any) -> fusedtp.ParallelMLP:
    torch.manual_seed(2)
    return fusedtp.ParallelMLP(HIDDEN, INTERMEDIATE, activation="swiglu", group=group, **options)


def inputs(group: ProcessGroup, dim: int = 0) -> Tensor:
    torch.manual_seed(20 + group.rank())
    shape = (LENGTH, BATCH) if dim == 0 else (BATCH, LENGTH)
    return torch.randn(*shape, HIDDEN, requires_grad=True)


def local(value: Tensor | None) -> Tensor:
    """Return this rank's part: torch.equal of DTensors needs all ranks of the world, and some are not here."""
    assert isinstance(value, DTensor)
    return value.to_local()


def results(call: Callable[[Tensor], Tensor], layer: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return y, dx and parameter gradients of one forward and backward, with a loss that depends on each element."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    grads = {f"d {name}": local(p.grad) for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


def equal(got: dict[str, Tensor], expected: dict[str, Tensor], rounding: float = 0.0) -> None:
    """Compare bit by bit, or within `rounding` of the largest element."""
    assert got.keys() == expected.keys()
    for name, ref in expected.items():
        assert got[name].dtype == ref.dtype, name
        most = rounding * float(ref.abs().max())
        torch.testing.assert_close(got[name], ref, rtol=0, atol=most, msg=lambda text, name=name: f"{name}: {text}")


def seen_by(backend: str) -> tuple[Callable[..., Any], list[list[str]]]:
    """Return a backend of torch.compile, and a list of our operators in each graph that the backend gets."""
    graphs: list[list[str]] = []

    def seen(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "fusedtp" in str(node.target)])
        return torch._dynamo.lookup_backend(backend)(graph, example)

    return seen, graphs


def compiled(group: ProcessGroup, backend: str, dim: int, sequence_parallel: bool) -> list[list[str]]:
    layer = model(group, sequence_dim=dim, sequence_parallel=sequence_parallel)
    torch.manual_seed(4)
    x = inputs(group, dim) if sequence_parallel else torch.randn(LENGTH, BATCH, HIDDEN, requires_grad=True)
    torch._dynamo.reset()
    seen, graphs = seen_by(backend)
    call = torch.compile(layer, fullgraph=True, backend=seen)
    expected = results(layer, layer, x)
    # A generated kernel rounds silu's multiplications in its own order: a few roundings, through one matmul each way.
    rounding = 0.0 if backend == "aot_eager" else 64 * torch.finfo(x.dtype).eps
    with few_kernels():
        for _ in range(2):
            equal(results(call, layer, x), expected, rounding)
    torch._dynamo.reset()
    return graphs


@pytest.mark.parametrize(
    ("backend", "dim", "sequence_parallel"),
    [*((*each, True) for each in spread(["inductor", "aot_eager"], [0, 1])), ("aot_eager", 0, False)],
)
def test_compiled_without_a_graph_break(pool: RankPool, backend: str, dim: int, sequence_parallel: bool) -> None:
    """Also batch first, where a layer's result is a transposed view, and with a whole sequence."""
    for graphs in pool.run(compiled, backend, dim, sequence_parallel, world_size=2, timeout=120):
        assert graphs == [["fusedtp.matmul.default"] * 2]


def compiled_in_turn(group: ProcessGroup) -> None:
    """Compile on one rank at a time; the second rank finds the first rank's graph in the cache on disk."""
    torch.manual_seed(5)
    layer = fusedtp.FSDPLinear(4, 5, bias=False, group=group)
    x = torch.randn(3, 4, requires_grad=True)
    expected = results(layer, layer, x)
    with few_kernels():
        for rank in range(group.size()):
            torch._dynamo.reset()
            equal(results(torch.compile(layer) if rank == group.rank() else layer, layer, x), expected)
    torch._dynamo.reset()


def test_a_rank_does_not_take_the_graph_that_another_has_compiled(pool: RankPool) -> None:
    """Rank 0 holds three of five rows, rank 1 two: their graphs differ only in the rank."""
    pool.run(compiled_in_turn, world_size=2, timeout=120)


def with_styles(group: ProcessGroup) -> nn.Module:
    linears = nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HIDDEN))
    plan = {"0": fusedtp.FusedColwiseParallel(input_layouts=Shard(0)),
            "2": fusedtp.FusedRowwiseParallel(output_layouts=Shard(0))}  # fmt: skip
    return parallelize_module(linears, mesh_of(group), plan)


def compiled_for_any_length(group: ProcessGroup, of_styles: bool) -> int:
    torch._dynamo.reset()
    layer, (seen, graphs) = with_styles(group) if of_styles else model(group), seen_by("aot_eager")
    call = torch.compile(layer, fullgraph=True, backend=seen)
    for length in (6, 6, 4, 10):
        x = torch.randn(length, BATCH, HIDDEN, requires_grad=True)
        equal(results(call, layer, x), results(layer, layer, x))
    torch._dynamo.reset()
    return len(graphs)


@pytest.mark.parametrize("of_styles", [False, True])
def test_compiled_once_for_all_lengths(pool: RankPool, of_styles: bool) -> None:
    """One graph serves the first length, twice, and a second graph all other lengths."""
    assert pool.run(compiled_for_any_length, of_styles, world_size=2) == [2, 2]


TESTS = ("test_schema", "test_faketensor")


def opchecked(group: ProcessGroup) -> None:
    rank, name, parts = group.rank(), group.group_name, (3, 1)
    torch.manual_seed(rank)
    mine = parts[rank]
    w, bias = torch.randn(5, 6, requires_grad=True), torch.randn(5, requires_grad=True)
    for shape, b, spec, numbers in (
        ((mine, 6), bias, "[R0_X, K] @ [K, N_X] -> [R0, N_X]", (4, 6, 10, 2, *parts, 0, 0)),
        ((2, mine, 6), bias, "[R0, R1_X, K] @ [K, N_X] -> [R0, R1, N_X]", (2, 4, 6, 10, 0, 2, *parts, 0, 0)),
        ((4, 6), bias, "[R0, K_X] @ [K_X, N] -> [R0_X, N]", (4, 12, 5, 2, *parts, 0, 0)),
        ((4, 6), bias, "[R0, K_X] @ [K_X, N] -> [R0, N_X]", (4, 12, 5, 0, 0, 2, 0, 5)),
        ((4, 6), None, "[R0, K_X] @ [K_X, N] -> [R0, N]", (4, 12, 5, 0, 0, 0)),
        ((4, 6), None, "[R0, K] @ [K, N_X] -> [R0, N_X]", (4, 6, 10, 0, 0, 0)),
        ((4, 6), None, "[R0_X, K] @ [K, N_X] -> [R0_X, N]", (8, 6, 10, 0, 0, 0)),
    ):
        x = torch.randn(shape, requires_grad=True)
        call = (Settings(spec, (name,), (rank,), Options("decomposed")).to_handle(), numbers)
        given = ([x, w], "x w") if b is None else ([x, w, b], "x w bias")
        library.opcheck(torch.ops.fusedtp.matmul, (*given, False, *call))
        y = autograd.matmul(*given, False, *call)[0].detach()
        backward = ([y, x.detach(), w.detach()], "dy x w", [True, True, b is not None], *call)
        library.opcheck(torch.ops.fusedtp.matmul_backward, backward, test_utils=TESTS)
    a = torch.randn(4, 6, requires_grad=True)
    for x, op, sizes, schedule, algorithm, leaves in (
        (a[:mine], "all_gather", parts, "decomposed", "auto", 0),
        (a.t().contiguous().t(), "reduce_scatter", parts, "unfused", "auto", 0),
        (a.t(), "all_reduce", (), "unfused", "auto", 0),
        (a, "reduce_scatter", parts, "fused", "auto", 8),
        (a, "all_reduce", (), "fused", "two_shot", 8),
    ):
        arguments = (x.detach().requires_grad_(), op, sizes, rank, name, schedule, algorithm, "auto", "", leaves)
        library.opcheck(torch.ops.fusedtp.collective, arguments, **({"test_utils": TESTS} if leaves else {}))
    library.opcheck(torch.ops.fusedtp.as_it_is, (a.t().detach(), name, "unfused"), test_utils=TESTS)


def test_operators_are_registered_as_torch_wants_it(pool: RankPool) -> None:
    """Checks schema, autograd registration, fakes, and ahead-of-time dispatch with forward and backward traced."""
    pool.run(opchecked, world_size=2)


def checkpointed(group: ProcessGroup) -> list[str]:
    """Check that backward repeats forward: the same bits, one more gather."""
    # Not at the top: it imports the compiler, which the test processes do without.
    from torch.distributed.tensor.debug import CommDebugMode

    layer, x = model(group), inputs(group)
    expected = results(layer, layer, x)
    for reentrant in (False, True):
        equal(results(lambda x, reentrant=reentrant: checkpoint(layer, x, use_reentrant=reentrant), layer, x), expected)
    selective = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    for mode, options in (
        (contextlib.nullcontext(), {"context_fn": selective}),
        (contextlib.nullcontext(), {"debug": True}),
        (FlopCounterMode(display=False), {}),
        (CommDebugMode(), {}),
    ):
        with mode:
            call = partial(checkpoint, layer, use_reentrant=False, **options)
            # These modes run the operators, as a compiled graph does.
            equal(results(call, layer, x), expected, 1e-6)
        # Recomputation stops early, inside the layer's last call.
        equal(results(layer, layer, x), expected)
    return list(expected)


def test_activation_checkpointing(pool: RankPool) -> None:
    pool.run(checkpointed, world_size=2)


class Hook(TorchDispatchMode):
    """Hooks for saved tensors, or a mode, that raise after an op of ours."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fusedtp":
            raise self.error("of the mode")
        return out

    def pack(self, x: Tensor) -> Tensor:
        raise self.error("of the hook")


def hooks_that_raise(group: ProcessGroup) -> list[str]:
    """Raise in hooks after an op: after an Exception the group goes on; a KeyboardInterrupt is an interruption."""
    x, said = torch.ones(4, 8, requires_grad=True), []
    weight = torch.ones(3, 8, requires_grad=True)
    calls: list[Callable[[], Tensor]] = [
        lambda: fusedtp.all_gather_linear(x, weight, group=group),
        lambda: fusedtp.all_gather_linear(x, (weight, weight), activation="swiglu", group=group),
        lambda: fusedtp.linear_all_reduce(x, weight, norm_weight=torch.ones(3), group=group)[0],
        lambda: fusedtp.all_gather(x, group=group),
    ]
    for error in (ValueError, KeyboardInterrupt):
        for call in calls:
            hook = Hook(error)
            around: list[Any] = [hook, saved_tensors_hooks(hook.pack, lambda x: x)]
            for each in around if call is not calls[-1] else around[:1]:
                with pytest.raises(error, match="of the"), each:
                    call()
                try:
                    call().sum().backward()
                    said.append(error.__name__)
                except RuntimeError as after:
                    said.append(str(after)[-40:])
                    fusedtp.destroy(group)
    return said


def test_what_a_hook_raises_behind_an_op_is_no_interruption(pool: RankPool) -> None:
    for said in pool.run(hooks_that_raise, world_size=2):
        assert said[:7] == ["ValueError"] * 7
        assert all(each.endswith("(an interruption)") for each in said[7:])


def autocasted(group: ProcessGroup, sequence_parallel: bool) -> None:
    """Check that autocast of a float32 layer equals a bfloat16 layer, with float32 parameter gradients."""
    layer, x = model(group, sequence_parallel=sequence_parallel), inputs(group)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.square().sum().backward()
    narrow = model(group, sequence_parallel=sequence_parallel).bfloat16()
    x_narrow = x.detach().bfloat16().requires_grad_()
    y_narrow = narrow(x_narrow)
    assert torch.equal(y, y_narrow)
    y_narrow.square().sum().backward()
    pairs = [(x.grad, x_narrow.grad)]
    pairs += [
        (local(p.grad), local(q.grad)) for p, q in zip(layer.parameters(), narrow.parameters(), strict=True)
    ]  # fmt: skip
    for wide, ref in pairs:
        assert wide is not None
        assert ref is not None
        assert wide.dtype == torch.float32
        assert torch.equal(wide, ref.float())
    # float64 is never narrowed.
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.double()(x.detach().double()).dtype == torch.float64
    # Backward multiplies in forward's dtype, also inside autocast: tasks share memory in that dtype.
    layer, x = model(group, sequence_parallel=sequence_parallel), inputs(group)
    y = layer(x).square().sum()
    parameters = [x, *layer.parameters()]
    outside = torch.autograd.grad(y, parameters, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(y, parameters)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(outside[0], inside[0])
    assert all(torch.equal(local(one), local(other)) for one, other in zip(outside[1:], inside[1:], strict=True))
    # torch's own ops have the dtype of their operands in autocast too.
    with fusedtp.drop_in(), torch.autocast("cpu", torch.bfloat16):
        _, (z,) = torch.ops.symm_mem.fused_all_gather_matmul(torch.ones(4, 8), [torch.ones(8, 3)], 0, group.group_name)
    assert z.dtype == torch.float32


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_autocast(pool: RankPool, sequence_parallel: bool) -> None:
    pool.run(autocasted, sequence_parallel, world_size=2)


DRY_RUN = """
import contextlib, warnings
import torch, torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
import fusedtp

warnings.simplefilter("ignore")

def run(backend, fake_tensors):
    if backend == "fake":
        W = 4
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=W)
    else:
        W = 1
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=W)
    mesh = init_device_mesh("cpu", (W,), mesh_dim_names=("tp",))["tp"]
    with FakeTensorMode() if fake_tensors else contextlib.nullcontext():
        shapes(W, mesh, fake_tensors)
    dist.destroy_process_group()

def shapes(W, mesh, fake_tensors):
    x, w, ids = torch.ones(4, 32, requires_grad=True), torch.ones(16, 32), torch.zeros(2, 3, dtype=torch.long)
    tokens = torch.ones(3, 8)

    def made(style, module):
        return parallelize_module(nn.Sequential(module), mesh, {"0": style})

    for name, y, shape in (
        ("gather", fusedtp.all_gather_linear(x, w), (4 * W, 16)),
        ("gate", fusedtp.all_gather_linear(x, (w, w), activation="swiglu"), (4 * W, 16)),
        ("norm", fusedtp.linear_reduce_scatter(x, w, norm_weight=w[:, 0])[0], (4 // W, 16)),
        ("float8", fusedtp.all_gather_linear(x, w, float8="rowwise"), (4 * W, 16)),
        ("mlp", fusedtp.ParallelMLP(8, 16, group=mesh)(tokens), (3, 8)),
        ("embedding", made(fusedtp.FusedEmbeddingParallel(), nn.Embedding(16, 8))(ids), (2, 3, 8)),
        ("style", made(fusedtp.FusedColwiseParallel(), nn.Linear(8, 16))(tokens), (3, 16 // W)),
    ):
        assert y.shape == shape, (name, y.shape)
        y.sum().backward()
    with torch.no_grad():
        scaled = [fusedtp.scaled(each, "rowwise") for each in (x, w)]
        assert fusedtp.all_gather_linear(*scaled).shape == (4 * W, 16)
    assert x.grad.shape == x.shape
    if not fake_tensors:
        for schedule in ("decomposed", "fused"):
            try:
                fusedtp.all_gather_linear(x, w, schedule=schedule)
            except RuntimeError as error:
                assert "no other ranks whose memory could be reached" in str(error), error
            else:
                raise AssertionError(schedule)

for how in (("fake", True), ("fake", False), ("gloo", True)):
    run(*how)
"""


def dry_run(group: ProcessGroup) -> None:
    """Run a script that makes its own process groups in this process, which is no rank any more."""
    dist.destroy_process_group()
    exec(compile(DRY_RUN, "dry run", "exec"), {"__name__": "dry_run"})


def test_a_dry_run_has_the_shapes() -> None:
    """One process acts as a rank of four with torch's backend "fake", or with fake tensors."""
    with RankPool(1, timeout=100) as ranks:
        ranks.run(dry_run)


def in_a_process(group: ProcessGroup, activations: Sequence[str], cache: str) -> int:
    """Compare the last call, compiled, with the eager one; return the number of graphs that the cache on disk had."""
    from torch._dynamo.utils import counters

    def of(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, w: fusedtp.all_gather_linear(x, w, activation=activation)

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.manual_seed(0)
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    *others, call = map(of, activations)
    for other in others:
        other(x, w)
    results = []
    with few_kernels():
        for each in (call, torch.compile(call, fullgraph=True)):
            y = each(x, w)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, w))))
    torch.testing.assert_close(*results)
    return counters["aot_autograd"]["autograd_cache_hit"]


def test_a_graph_from_the_cache_on_disk_has_the_settings_that_it_was_compiled_with(tmp_path: Path) -> None:
    """The second process has other settings first, and then makes the first one's call by its graph."""
    hits = []
    for activations in (["silu"], ["gelu", "silu"]):
        with RankPool(1, timeout=100) as ranks:
            hits += ranks.run(in_a_process, activations, str(tmp_path))
    assert hits == [0, 1]


def test_a_graph_with_settings_of_another_process_is_refused() -> None:
    settings = Settings("[R0, K_X] @ [K_X, N] -> [R0, N]", ("elsewhere",), (0,))
    handle = settings.to_handle()
    assert Settings.of(handle) == settings
    with pytest.raises(RuntimeError, match=f"settings {handle + 1}, which this process does not know"):
        autograd.matmul([torch.ones(2, 3), torch.ones(4, 3)], "x w", False, handle + 1, (2, 3, 4, 0, 0, 0))
