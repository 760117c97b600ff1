"""Bad calls of functions, one a row: every rank gets the same error, with the argument and its value, before anything
is sent, and the next good call works. Layers and styles: test_bad_modules.py; cases that need no ranks:
test_bad_files.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fusedtp
from fusedtp.scaled import RECIPES

WORLD_SIZE = 4
X, W = (8, 6), (5, 6)  # this rank's rows and a weight that fit
SPEC = "[M_X, K] @ [K, N] -> [M, N]"
HUGE = 2**70


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


class Here:
    """One rank: its groups and meshes, and functions whose default arguments are valid."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
        self.wide = DeviceMesh("cpu", torch.arange(WORLD_SIZE).view(2, 2), mesh_dim_names=("X", "Y"))
        self.closed, self.on_gpus = dist.new_group(), dist.new_group(backend="cuda:gloo")
        dist.destroy_process_group(self.closed)
        alone = [DeviceMesh("cpu", [rank], mesh_dim_names=("X",)) for rank in (0, 1)]
        self.foreign = alone[int(group.rank() == 0)]
        self.parameter = fusedtp.ColumnParallelLinear(6, 20, bias=False, group=group).weight

    def linear(self, linear: Callable[..., Tensor], x: Any, weight: Any, *bias: Any, **options: Any) -> object:
        x, weight = ones(*X) if x is None else x, ones(*W) if weight is None else weight
        return linear(x, weight, *bias, **{"group": self.group, **options})

    def gather(self, x: Any = None, weight: Any = None, bias: Any = None, **options: Any) -> object:
        return self.linear(fusedtp.all_gather_linear, x, weight, bias, **options)

    def scatter(self, x: Any = None, weight: Any = None, bias: Any = None, **options: Any) -> object:
        return self.linear(fusedtp.linear_reduce_scatter, x, weight, bias, **options)

    def reduce(self, x: Any = None, weight: Any = None, bias: Any = None, **options: Any) -> object:
        return self.linear(fusedtp.linear_all_reduce, x, weight, bias, **options)

    def fsdp(self, x: Any = None, weight: Any = None, bias: Any = None, **options: Any) -> object:
        return self.linear(fusedtp.fsdp_linear, x, weight, bias, **options)

    def sharded(self, a: Any = None, b: Any = None, spec: Any = SPEC, mesh: Any = None, **options: Any) -> object:
        a, b = ones(*X) if a is None else a, ones(6, 5) if b is None else b
        return fusedtp.sharded_matmul(a, b, spec, self.mesh if mesh is None else mesh, **options)

    def all_reduce(self, x: Any = None, **options: Any) -> object:
        return fusedtp.all_reduce(ones(*X) if x is None else x, **{"group": self.group, **options})

    def all_gather(self, x: Any = None, **options: Any) -> object:
        return fusedtp.all_gather(ones(*X) if x is None else x, **{"group": self.group, **options})

    def close(self) -> None:
        dist.destroy_process_group(self.on_gpus)


def q(*shape: int, recipe: Any = "rowwise", **options: Any) -> fusedtp.Scaled:
    return fusedtp.scaled(ones(*shape), recipe, **options)


def scales(x: Any, scale: Any) -> fusedtp.Scaled:
    return fusedtp.Scaled(x.data, scale)


def made_in_inference() -> Tensor:
    with torch.inference_mode():
        return ones(*X)


NO_DENSE = "must be a dense tensor, got"
DTYPES = "must be one of torch.float32, torch.bfloat16, torch.float16, torch.float64, got"
SCHEDULES = "schedule must be one of auto, fused, decomposed, unfused, got"
NO_GROUP = "group must be a ProcessGroup, its name, a 1-D DeviceMesh or None, got"
E5M2, FNUZ, E8M0 = torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu
GONE = "is not the name of a process group of this process"
FP64 = "schedule 'fused' multiplies torch.float32, torch.bfloat16, torch.float16, got torch.float64"

# The call, the kind of the error, and its text.
# fmt: off
CALLS: list[tuple[Callable[[Here], object], type[Exception], str]] = [
    # Tensors.
    (lambda h: h.gather([1.0]), TypeError, "x must be a tensor, got list"),
    (lambda h: h.gather(bias=False), TypeError, "bias must be a tensor, got bool"),
    (lambda h: h.fsdp(weight=[1]), TypeError, "weight_shard must be a tensor, got list"),
    (lambda h: fusedtp.sharded_matmul(None, ones(6, 5), SPEC, h.mesh), TypeError, "a must be a tensor, got NoneType"),
    (lambda h: h.sharded(b=2.0), TypeError, "b must be a tensor, got float"),
    (lambda h: h.gather(ones(*X).to_sparse()), TypeError, f"x {NO_DENSE} one of layout torch.sparse_coo"),
    (lambda h: h.gather(fusedtp.Scaled(ones(*X).to_sparse(), ones()), fusedtp.scaled(ones(*W))),
     TypeError, f"x.data {NO_DENSE} one of layout torch.sparse_coo"),
    (lambda h: h.all_reduce(ones(*X).to_mkldnn()), TypeError, f"x {NO_DENSE} one of layout torch._mkldnn"),
    (lambda h: h.gather(torch.nested.nested_tensor([ones(2, 6), ones(3, 6)], layout=torch.jagged)),
     TypeError, f"x {NO_DENSE} a nested one: use torch.nested.to_padded_tensor(x, 0.0)"),
    (lambda h: h.gather(DTensor.from_local(ones(*X), h.mesh, [Shard(0)])),
     TypeError, "x must be this rank's own tensor, got a DTensor of placements (Shard(dim=0),)"),
    (lambda h: h.gather(weight=nn.LazyLinear(5).weight),
     ValueError, "weight must have values, got an UninitializedParameter"),
    (lambda h: h.all_reduce(ones(3, dtype=torch.int64)), ValueError, f"x {DTYPES} torch.int64"),
    (lambda h: h.gather(ones(*X, dtype=torch.complex64).conj()), ValueError, f"x {DTYPES} torch.complex64"),
    (lambda h: h.gather(ones(*X).to(torch.float8_e4m3fn)), ValueError, f"x {DTYPES} torch.float8_e4m3fn"),
    (lambda h: h.gather(torch.quantize_per_tensor(ones(*X), 1.0, 0, torch.qint8)),
     TypeError, f"x {NO_DENSE} a quantized one, torch.qint8: use x.dequantize()"),
    (lambda h: h.reduce(weight=ones(*W).bfloat16()),
     ValueError, "weight must have x's dtype, torch.float32, got torch.bfloat16"),
    (lambda h: h.reduce(bias=ones(5).double()),
     ValueError, "bias must have x's dtype, torch.float32, got torch.float64"),
    (lambda h: h.sharded(b=ones(6, 5).half()), ValueError, "b must have a's dtype, torch.float32, got torch.float16"),
    (lambda h: h.gather(weight=ones(*W, device="meta")), ValueError, "weight must be on x's device, cpu, got meta"),
    (lambda h: h.gather(made_in_inference(), ones(*W, requires_grad=True)),
     ValueError, "the first operand was made in torch.inference_mode"),
    # Shapes.
    (lambda h: h.gather(ones(6)), ValueError, "x must have at least 2 dimensions, [..., K], got shape (6,)"),
    (lambda h: h.scatter(weight=ones(1, *W)), ValueError, "weight must have 2 dimensions, [N, K], got shape (1, 5, 6)"),
    (lambda h: h.gather(bias=ones(6)), ValueError, "bias must have shape (5,), weight's rows, got (6,)"),
    (lambda h: h.fsdp(bias=ones(5)), ValueError, "bias must have shape (20,), weight_shard's rows, got (5,)"),
    (lambda h: h.gather(weight=ones(5, 7)),
     ValueError, "x has 6 features, and weight of shape (5, 7) takes 7: give x all features, [.., K]"),
    (lambda h: h.scatter(weight=ones(5, 7)),
     ValueError, "x has 6 features, and weight of shape (5, 7) takes 7: give x this rank's shard of the features"),
    (lambda h: h.gather(gather_dim=-1),
     ValueError, "x has in all 24 features, and weight of shape (5, 6) takes 6: give x this rank's shard of the"),
    (lambda h: h.all_gather(torch.empty(2**31, 0), schedule="fused"),
     ValueError, "less than 2**31 rows or columns on all ranks together, got lengths (8589934592, 0, 0) on 4 ranks"),
    # Options.
    *((lambda h, each=each: h.gather(activation=each), ValueError, "activation must be None or")
      for each in ("no_such", 1, "", ["relu"], torch.relu)),
    (lambda h: h.gather(activation="swiglu"), ValueError, "activation 'swiglu' is of two weights, gate and up, got 1"),
    (lambda h: h.gather(weight=(ones(3, 6), ones(2, 6)), activation="swiglu"),
     ValueError, "with as many rows, got 3 and 2"),
    (lambda h: h.fsdp(activation="geglu"), ValueError, "'geglu' is of two weights"),
    (lambda h: h.gather(weight=()), ValueError, "weight must be a tensor or some"),
    (lambda h: h.gather(weight=(ones(*W), 3.0)), TypeError, "weight[1] must be a tensor, got float"),
    (lambda h: h.gather(weight=(ones(*W), ones(5, 7))), ValueError, "x has 6 features, and weight[1] of shape (5, 7)"),
    (lambda h: h.gather(weight=(ones(*W), ones(*W).half())), ValueError, "weight[1] must have"),
    (lambda h: h.gather(weight=(ones(*W),) * 2, bias=ones(5)), TypeError, "as many tensors as weight"),
    (lambda h: h.gather(weight=(ones(*W),) * 2, bias=(ones(5),)), ValueError, "as many tensors as weight, 2"),
    (lambda h: h.gather(weight=(ones(*W),) * 2, bias=(None, ones(2))), ValueError, "bias[1] must have shape (5,)"),
    (lambda h: h.gather(bias=(ones(5),)), TypeError, "bias must be a tensor, got tuple"),
    (lambda h: h.scatter(residual=1.0), TypeError, "residual must be a tensor, got float"),
    (lambda h: h.scatter(residual=ones(8, 5)), ValueError, "shape, (2, 5), got (8, 5)"),
    (lambda h: h.reduce(residual=ones(8, 5).half()), ValueError, "residual must have x's dtype"),
    (lambda h: h.reduce(norm="norm", norm_weight=ones(5)), ValueError, "norm must be one of"),
    *((lambda h, each=each: h.reduce(norm_eps=each, norm_weight=ones(5)),
       ValueError, f"norm_eps must be a number, 0 or greater and finite, got {each}") for each in (-1.0, float("nan"))),
    (lambda h: h.scatter(norm="layer_norm"), ValueError, "takes a norm_weight"),
    (lambda h: h.reduce(norm_weight=ones(5), norm_bias=ones(5)), ValueError, "norm_bias is for norm='layer_norm'"),
    (lambda h: h.scatter(norm_weight=ones(4)), ValueError, "norm_weight must be [5]"),
    (lambda h: h.reduce(norm_weight=ones(5).double()), ValueError, "norm_weight must have"),
    (lambda h: h.scatter(scatter_dim=-1, norm_weight=ones(5)), ValueError, "of whole rows"),
    # Dims and sizes.
    (lambda h: h.gather(gather_dim=2), ValueError, "gather_dim must be in [-2, 1] for x of shape (8, 6), got 2"),
    (lambda h: h.scatter(scatter_dim=-3), ValueError, "scatter_dim must be in [-2, 1] for x of shape (8, 6), got -3"),
    (lambda h: h.all_gather(gather_dim="rows"), TypeError, "gather_dim must be an int, got 'rows'"),
    (lambda h: h.gather(gather_dim=True), TypeError, "gather_dim must be an int, got True"),
    (lambda h: h.gather(sizes=(8, 8, 8)), ValueError, "sizes must have one entry per rank, 4, got 3: (8, 8, 8)"),
    (lambda h: h.scatter(sizes=(1, 2, 0, 0)), ValueError, "sizes must add up to 8, got 3: (1, 2, 0, 0)"),
    (lambda h: h.gather(sizes=(7, 7, 7, 7)), ValueError, "must be this rank's own length, 8, got 7: (7, 7, 7, 7)"),
    (lambda h: h.scatter(sizes=(9, -1, 0, 0)), ValueError, "sizes[1] must not be negative, got -1 in (9, -1, 0, 0)"),
    (lambda h: h.scatter(sizes=(2.0, 2.0, 2.0, 2.0)), ValueError, "sizes[0] must be an int, got 2.0 in"),
    (lambda h: h.scatter(sizes=(True, 7, 0, 0)), ValueError, "sizes[0] must be an int, got True in"),
    (lambda h: h.gather(sizes=8), ValueError, "sizes must be one length per rank, in their order, got 8"),
    (lambda h: h.gather(sizes="8888"), ValueError, "in their order, got '8888'"),
    (lambda h: h.scatter(sizes={1, 2, 5, 0}), ValueError, "sizes must be one length per rank, in their order, got {"),
    # float8.
    (lambda h: h.gather(q(*X).data, q(*W).data), ValueError, "float8 takes scales, fusedtp.Scaled"),
    (lambda h: h.scatter(q(*X)), TypeError, "x and weight must both be Scaled or neither"),
    (lambda h: h.reduce(weight=q(*W)), TypeError, "weight must be a tensor here, got Scaled"),
    (lambda h: h.gather(q(*X), fusedtp.scaled(h.parameter)),
     TypeError, "weight.data must be this rank's own tensor, got a DTensor"),
    (lambda h: h.gather(q(*X), scales(q(*W), ones(2, 1))), ValueError, "weight.scale must be"),
    (lambda h: h.reduce(scales(q(*X), 1.0), q(*W)), TypeError, "x.scale must be a tensor"),
    (lambda h: h.gather(q(*X), q(4, 7)), ValueError, "x has 6 features, and weight"),
    (lambda h: h.reduce(q(*X, recipe="mxfp8"), q(*W)),
     ValueError, f"got x.scale in {E8M0} and weight.scale in torch.float32: make both by fusedtp.scaled"),
    (lambda h: h.gather(q(8, 40, recipe="mxfp8"), q(4, 160, recipe="mxfp8"), gather_dim=-1),
     ValueError, "must begin at multiples of 32, got sizes (40, 40, 40, 40)"),
    (lambda h: h.gather(q(*X), q(*W), ones(5)),
     ValueError, "bias must be in out_dtype, torch.bfloat16, got torch.float32"),
    (lambda h: h.gather(q(*X), q(*W), ones(5).bfloat16().requires_grad_()),
     ValueError, "have no gradient, but a bias, a residual or"),
    (lambda h: h.gather(q(*X), q(*W), q(*W)), TypeError, "bias must be a tensor here, got Scaled"),
    (lambda h: h.gather(q(*X), q(*W), out_dtype=torch.float64), ValueError, "out_dtype must be None or one of"),
    (lambda h: h.gather(out_dtype=torch.bfloat16), ValueError, "out_dtype must be None or x's"),
    (lambda h: h.gather(q(*X), q(*W), float8="rowwise"), ValueError, "Scaled operands are"),
    *((lambda h, recipe=recipe: h.gather(float8=recipe),
       ValueError, f"float8 must be None or one of {', '.join(RECIPES)}, got") for recipe in ("row-wise", 1, True)),
    (lambda h: h.reduce(ones(*X).double(), ones(*W).double(), float8="rowwise"), ValueError, "float8 is for x in"),
    (lambda h: h.gather(q(*X), (q(*W), q(*W, dtype=E5M2))),
     ValueError, "got weight[0] in torch.float8_e4m3fn, weight[1] in torch.float8_e5m2"),
    (lambda h: h.reduce(q(*X, dtype=FNUZ), q(*W)), ValueError, "must be of one kind of float8, "),
    (lambda h: h.gather(q(*X, dtype=FNUZ), q(*W, dtype=FNUZ), schedule="fused"),
     RuntimeError, "cannot multiply torch.float8_e4m3fnuz here: Triton's interp"),
    # Orders of sums, and who sends.
    *((lambda h, order=order: h.scatter(order=order),
       ValueError, f"'rank', 'any', 'tree', of 8 leaves, or tree-N of N, a power of two up to 64, got {order!r}")
      for order in ("tree-3", "tree-128", "tree-x", 8, "switch")),
    (lambda h: h.scatter(order="tree", schedule="unfused"),
     ValueError, "is kept by schedule 'fused' alone, got schedule 'unfused'"),
    (lambda h: h.scatter(order="tree", float8="rowwise"),
     ValueError, "operands that are not cast, got float8='rowwise'"),
    (lambda h: h.reduce(q(*X), q(*W), order="tree"), ValueError, "operands that are not float8"),
    (lambda h: h.scatter(order="tree-2"), ValueError, "ranks that divide its 2 leaves, got 4 ranks"),
    (lambda h: h.scatter(order="tree", norm_weight=ones(5)), ValueError, "norm whose rows ranks"),
    (lambda h: h.reduce(ones(*X).double(), ones(*W).double(), order="tree"), ValueError, "order 'tree' is for torch."),
    (lambda h: h.all_reduce(ones(*X).bfloat16(), order="tree"),
     ValueError, "subtrees, which are torch.float32, got torch.bfloat16"),
    (lambda h: fusedtp.reduce_scatter(ones(*X), group=h.group, order="tree", algorithm="ring", schedule="fused"),
     ValueError, "not that of algorithm 'ring'"),
    (lambda h: h.gather(producer="once"),
     ValueError, "producer must be one of auto, push, copy, multicast, got 'once'"),
    (lambda h: h.gather(producer="copy", schedule="unfused"), ValueError, "is for"),
    # Schedules, algorithms, flags.
    (lambda h: h.reduce(schedule="fast"), ValueError, f"{SCHEDULES} 'fast'"),
    (lambda h: h.all_reduce(schedule=["fused"]), ValueError, f"{SCHEDULES} ['fused']"),
    (lambda h: h.reduce(ones(*X).double(), ones(*W).double(), schedule="fused"), ValueError, FP64),
    (lambda h: h.sharded(ones(*X).double(), ones(6, 5).double(), "[M_X, K] @ [K, N] -> [M_X, N]", schedule="fused"),
     ValueError, FP64),
    (lambda h: h.reduce(algorithm="tree"), ValueError, "algorithm must be one of auto, one_shot, two_shot, got 'tree'"),
    (lambda h: h.all_gather(algorithm="two_shot"),
     ValueError, "algorithm must be one of auto, direct, ring, got 'two_shot'"),
    (lambda h: h.all_reduce(schedule="unfused", algorithm="ring"),
     ValueError, "schedule 'unfused' has no algorithm 'ring'"),
    (lambda h: h.all_gather(schedule="decomposed", algorithm="ring"),
     ValueError, "schedule 'decomposed' has no algorithm 'ring'"),
    (lambda h: h.all_reduce(algorithm="ring"), ValueError, "schedule 'auto' has no algorithm 'ring'"),
    (lambda h: h.gather(debug=True), TypeError, "unexpected keyword argument 'debug'"),
    # Groups and meshes.
    (lambda h: h.all_reduce(group="nobody"), ValueError, f"group 'nobody' {GONE}"),
    (lambda h: h.all_reduce(group=[0, 1]), TypeError, f"{NO_GROUP} list"),
    (lambda h: h.gather(group=dist.GroupMember.NON_GROUP_MEMBER),
     ValueError, "group must have this rank in it, got -100"),
    (lambda h: h.gather(group=h.closed), ValueError, f"{GONE}: it may have been destroyed"),
    (lambda h: h.gather(group=h.on_gpus), ValueError, "group must carry cpu tensors, got one of cuda only"),
    (lambda h: h.gather(group=h.wide), ValueError, "group must be a 1-D mesh, got 2 dimensions ('X', 'Y')"),
    (lambda h: h.gather(group=h.foreign), ValueError, "in it, got DeviceMesh("),
    (lambda h: h.sharded(mesh=h.foreign), ValueError, "mesh must have this rank"),
    (lambda h: h.sharded(mesh=h.group), TypeError, "mesh must be a DeviceMesh, got ProcessGroup"),
    (lambda h: h.sharded(spec="[M_{tp}, K] @ [K, N] -> [M, N]"), ValueError, "mesh must have the dimensions tp of"),
    (lambda h: h.sharded(mesh=DeviceMesh.from_group(h.group, "cpu")), ValueError, "mesh must have the dimensions X of"),
    (lambda h: fusedtp.destroy(5), TypeError, f"{NO_GROUP} int"),
    *((lambda h, wrong=wrong: fusedtp.set_timeout(wrong),
       ValueError, f"seconds must be above 0 and at most 2,000,000, got {wrong!r}")
      for wrong in (0, -1, float("nan"), float("inf"), 3e6)),
    *((lambda h, wrong=wrong: fusedtp.set_timeout(wrong), TypeError, f"seconds must be a number, got {wrong!r}")
      for wrong in ("30", None, True, [1], 1j, torch.tensor(3.0))),
    # Notation on shards.
    (lambda h: h.sharded(spec=None), TypeError, "spec must be a notation string, not NoneType: got None"),
    (lambda h: h.sharded(spec="[\u041c_X, K] @ [K, N] -> [\u041c, N]"),
     fusedtp.NotationError, "expected a dim: a capital letter"),
    (lambda h: h.sharded(spec="[" * 5000), fusedtp.NotationError, "a spec has at most 1000 characters, got 5000: '[[["),
    (lambda h: h.sharded(ones(1, *X)), ValueError, "a must have 2 dimensions, [M_X, K], got (1, 8, 6)"),
    (lambda h: h.sharded(ones(8, 7)),
     ValueError, "a must have this rank's shape (8, 6) as [M_X, K], of {'M': 32, 'K': 6, 'N': 5} in all, got (8, 7)"),
    (lambda h: h.sharded(sizes={"Q": 1}), ValueError, "sizes names Q, which [M_X, K] @ [K, N] -> [M, N] does not have"),
    (lambda h: h.sharded(sizes={"K": 7}), ValueError, "a must have this rank's shape (8, 7) as [M_X, K]"),
    (lambda h: h.sharded(sizes={"M": HUGE}), ValueError, f"sizes['M'] must be 0 or more and below 2**63, got {HUGE}"),
    (lambda h: h.sharded(sizes={"M": 32.0}), TypeError, "sizes['M'] must be an int, got 32.0"),
    (lambda h: h.sharded(sizes={"M": True}), TypeError, "sizes['M'] must be an int, got True"),
    (lambda h: h.sharded(sizes={"M": (16, 16)}),
     ValueError, "sizes['M'] must have one entry per rank, 4, got 2: (16, 16)"),
    (lambda h: h.sharded(sizes={"K": (3, 3)}), ValueError, "sizes['K'] must be one length"),
    (lambda h: h.sharded(sizes=[32, 6, 5]), TypeError, "sizes must map dims to lengths, got [32, 6, 5]"),
]
# fmt: on
# Rows need unique names, and texts are not unique.
BAD = [(f"{i} {text}", call, kind, text) for i, (call, kind, text) in enumerate(CALLS)]


@pytest.mark.parametrize(("name", "kind", "text"), [(name, kind, text) for name, _, kind, text in BAD])
def test_bad_call(refusals: dict[str, list[tuple[str, str]]], name: str, kind: type[Exception], text: str) -> None:
    for got_kind, got_text in refusals[name]:
        assert (got_kind, text in got_text) == (kind.__name__, True), got_text
    # The rank's number and the mesh that leaves it out differ between ranks.
    assert len({re.sub(r"sizes\[\d\]|rank, \d,|DeviceMesh\(\(X=1\).*", "", text) for _, text in refusals[name]}) == 1
