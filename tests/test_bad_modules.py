"""Bad calls of layers and of styles for parallelize_module, one a row: see test_bad_input.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations, parametrize

from fusedtp import (
    ColumnParallelLinear,
    FSDPLinear,
    FusedColwiseParallel,
    FusedEmbeddingParallel,
    FusedGroup,
    FusedNormParallel,
    FusedRowwiseParallel,
    ParallelMLP,
    all_reduce,
)  # fmt: skip
from fusedtp import RowParallelLinear as RowLinear

WORLD_SIZE = 4
X = (8, 6)
HUGE = 2**70


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


def replaced(module: nn.Module) -> nn.Module:
    """Give the module another forward, as accelerate's hooks do."""
    module.forward = module.forward  # type: ignore[method-assign]
    return module


def quantized(by_torchao: bool = False) -> nn.Module:
    """Return a linear with an int8 weight."""
    linear = nn.Linear(8, 8, bias=False)
    if by_torchao:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    else:
        linear.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    return linear


class Here:
    """One rank: its meshes, layers whose default arguments are valid, and styled linears."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
        self.wide = DeviceMesh("cpu", torch.arange(WORLD_SIZE).view(2, 2), mesh_dim_names=("X", "Y"))
        alone = [DeviceMesh("cpu", [rank], mesh_dim_names=("X",)) for rank in (0, 1)]
        self.foreign = alone[int(group.rank() == 0)]
        # A style sends a module's parameters, so styles are applied before any call is watched.
        self.columnwise, self.rowwise = self.styled(FusedColwiseParallel()), self.styled(FusedRowwiseParallel())
        self.theirs = self.styled(ColwiseParallel())
        together = parallelize_module(nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)}), self.mesh,
                                      FusedGroup("q", "k"))  # fmt: skip
        self.normed = self.styled(FusedNormParallel(), module=nn.RMSNorm(8))
        made = (
            self.columnwise, self.rowwise, together["q"],
            self.styled(FusedEmbeddingParallel(), module=nn.Embedding(8, 8)),
            self.styled(FusedNormParallel(), module=nn.RMSNorm(8)),
            self.styled(FusedNormParallel(), module=nn.Dropout()),
        )  # fmt: skip
        self.styles = {type(each).__name__: each for each in made}
        self.odd_input = self.styled(FusedColwiseParallel(input_layouts=Shard(5)))
        self.odd_output = self.styled(FusedRowwiseParallel(output_layouts=Shard(-7)))
        self.odd_embedding = self.styled(FusedEmbeddingParallel(output_layouts=Shard(2)), module=nn.Embedding(8, 2))
        self.cut = nn.Linear(8, 8)
        self.cut.weight = nn.Parameter(distribute_tensor(self.cut.weight.data, self.mesh, [Shard(1)]))

    def column(self, *sizes: Any, **options: Any) -> ColumnParallelLinear:
        return ColumnParallelLinear(*(sizes or (6, 8)), **{"group": self.group, **options})

    def row(self, *sizes: Any, **options: Any) -> RowLinear:
        return RowLinear(*(sizes or (6, 8)), **{"group": self.group, **options})

    def mlp(self, *sizes: Any, **options: Any) -> ParallelMLP:
        return ParallelMLP(*(sizes or (6, 8)), **{"group": self.group, **options})

    def styled(self, style: Any, mesh: Any = None, module: Any = None) -> Any:
        return style._apply(nn.Linear(8, 8) if module is None else module, self.mesh if mesh is None else mesh)

    def close(self) -> None:
        pass


def mixed(here: Here) -> list[nn.Parameter]:
    made = [*nn.LayerNorm(8).parameters(), *here.rowwise.parameters()]
    for each in made:
        each.grad = torch.ones_like(each)
    return made


def changed(here: Here) -> object:
    layer = here.column()
    layer.sequence_sizes = (1, 2)
    return layer(ones(*X))


def grouped(here: Here, name: str, rows: int = 8, **options: Any) -> None:
    """Check that a refused style changes nothing."""
    module = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, rows)})
    try:
        FusedGroup("q", name, **options)._apply(module, here.mesh)
    finally:
        assert type(module["q"]) is nn.Linear
        assert not isinstance(module["q"].weight, DTensor)


DTYPES = "must be one of torch.float32, torch.bfloat16, torch.float16, torch.float64, got"
SCHEDULES = "schedule must be one of auto, fused, decomposed, unfused, got"
# Inputs that no module takes, and their messages; the modules that styles make, by class.
NOT_DENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [1], "tensor, got list"),
    "nested": (lambda: torch.nested.nested_tensor([ones(2, 8), ones(3, 8)]), "dense tensor, got a nested one: use tor"),
    "jagged": (lambda: torch.nested.nested_tensor([ones(2, 8)], layout=torch.jagged), "dense tensor, got a nested one"),
    "sparse": (lambda: ones(4, 8).to_sparse(), "dense tensor, got one of layout torch.sparse_coo: use input.to_dense"),
    "quantized": (
        lambda: torch.quantize_per_tensor(ones(4, 8), 1.0, 0, torch.qint8),
        "dense tensor, got a quantized one, torch.qint8: use input.dequantize()",
    ),
}
STYLED = (
    "FusedColwiseLinear", "FusedRowwiseLinear", "FusedGroupedLinear", "FusedEmbedding", "FusedRMSNorm", "FusedDropout",
)  # fmt: skip
NO_GROUP = "group must be a ProcessGroup, its name, a 1-D DeviceMesh or None, got"

# A name, the call, the kind of the error, and its text.
# fmt: off
BAD: list[tuple[str, Callable[[Here], object], type[Exception], str]] = [
    # Layers.
    ("in_features is a float", lambda h: h.column(6.0, 8), TypeError, "in_features must be an int, got 6.0"),
    ("out_features is a flag", lambda h: FSDPLinear(6, True, group=h.group),
     TypeError, "out_features must be an int, got True"),
    ("negative in_features", lambda h: h.row(-6, 8),
     ValueError, "in_features must be 0 or more and below 2**63, got -6"),
    ("huge out_features", lambda h: h.column(6, HUGE),
     ValueError, f"out_features must be 0 or more and below 2**63, got {HUGE}"),
    ("negative intermediate_size", lambda h: h.mlp(6, -8),
     ValueError, "intermediate_size must be 0 or more and below 2**63, got -8"),
    ("bias is text", lambda h: h.column(bias="no"), TypeError, "bias must be True or False, got 'no'"),
    ("bias is None, fsdp", lambda h: FSDPLinear(6, 8, None, group=h.group),
     TypeError, "bias must be True or False, got None"),
    ("integer parameters", lambda h: h.column(dtype=torch.int32), ValueError, f"dtype {DTYPES} torch.int32"),
    ("dtype is a name", lambda h: h.row(dtype="float32"), TypeError, "dtype must be a torch.dtype, got 'float32'"),
    ("unknown device", lambda h: h.column(device="tpu"),
     ValueError, "device must be a torch.device, its name or its number, got 'tpu'"),
    ("device of another maker", lambda h: h.column(device="xpu"),
     ValueError, "device must be one of cpu, cuda, meta, got 'xpu'"),
    ("a layer's unknown schedule", lambda h: h.column(schedule="fast"), ValueError, f"{SCHEDULES} 'fast'"),
    ("sequence_parallel is a number", lambda h: h.mlp(sequence_parallel=1),
     TypeError, "sequence_parallel must be True or False, got 1"),
    ("a layer's gather_dim", lambda h: h.column(gather_dim=2),
     ValueError, "gather_dim must be 0, for [sequence, batch, features], or 1, for [batch, ...], got 2"),
    ("a layer's scatter_dim is a float", lambda h: h.row(scatter_dim=0.0), ValueError, "scatter_dim must be 0, for"),
    ("sequence_dim", lambda h: h.mlp(sequence_dim=-1),
     ValueError, "sequence_dim must be 0, for [sequence, batch, features], or 1, for [batch, ...], got -1"),
    ("feature_sizes do not add up", lambda h: h.column(feature_sizes=(1, 2, 0, 0)),
     ValueError, "feature_sizes must add up to 8, got 3: (1, 2, 0, 0)"),
    ("sequence_sizes of another world", lambda h: h.mlp(sequence_sizes=(8,)),
     ValueError, "sequence_sizes must have one entry per rank, 4, got 1: (8,)"),
    ("sequence_sizes set too few", changed, ValueError, "sizes must have one entry per rank, 4, got 2: (1, 2)"),
    ("unknown activation", lambda h: h.mlp(activation="relu"),
     ValueError, "activation must be gelu or swiglu, got 'relu'"),
    ("a layer's recipe", lambda h: h.row(float8="row-wise"), ValueError, "float8 must be None or one of"),
    ("a layer of a tree, of other lengths", lambda h: h.row(9, 4, order="tree"),
     ValueError, "needs feature_sizes that are as long on every rank"),
    *[(f"{name} of a tree in float64", lambda h, name=name: getattr(h, name)(8, 16, order="tree", dtype=torch.float64),
     ValueError, "order 'tree' is for torch.") for name in ("row", "mlp")],
    *[(f"{name}'s producer {producer}",
       lambda h, make=make, producer=producer, schedule=schedule: make(h, producer=producer, schedule=schedule),
       ValueError, text)
      for name, make in (("column", Here.column), ("mlp", Here.mlp),
                         ("fsdp", lambda h, **more: FSDPLinear(6, 8, group=h.group, **more)),
                         ("style", lambda h, **more: FusedRowwiseParallel(**more)))
      for producer, schedule, text in (
          ("pull", "fused", "must be one of auto, push, copy"), ("copy", "unfused", "is for"))],
    ("a layer called with a list", lambda h: h.column()([1.0]), TypeError, "x must be a tensor, got list"),
    ("a layer's features", lambda h: h.column()(ones(8, 7)),
     ValueError, "x has 7 features, and weight of shape (2, 6) takes 6: give x all features, [.., K]"),
    *[(f"a layer's whole x, {name}", lambda h, more=more: h.row(12, 8, bias=False, **more)(ones(8, 12)),
     ValueError, "x has 12 features, and weight of shape (8, 3) takes 3: give x this rank's shard of the features")
      for name, more in (("scattered", {}), ("summed", {"sequence_parallel": False}),
                         ("padded", {"feature_sizes": (3, 3, 3, 3)}))],
    ("a shard of features, fsdp", lambda h: FSDPLinear(12, 8, bias=False, group=h.group)(ones(8, 3)),
     ValueError, "x has 3 features, and weight_shard of shape (2, 12) takes 12: give x all features, [.., K]"),
    ("a layer moved to bfloat16", lambda h: h.column().bfloat16()(ones(*X)),
     ValueError, "weight must have x's dtype, torch.float32, got torch.bfloat16"),
    ("a layer on meta", lambda h: h.column(device="meta")(ones(*X)),
     ValueError, "weight must be on x's device, cpu, got meta"),
    # Styles of parallelize_module.
    ("layout is a name", lambda h: FusedColwiseParallel(input_layouts="Shard(0)"),
     ValueError, "input_layouts must be Shard(dim) or Replicate(), got 'Shard(0)'"),
    ("layout is a list", lambda h: FusedRowwiseParallel(output_layouts=[Shard(0)]),
     ValueError, "output_layouts must be Shard(dim) or Replicate(), got [Shard(dim=0)]"),
    ("layout is partial", lambda h: FusedRowwiseParallel(output_layouts=Partial()),
     ValueError, "output_layouts must be Shard(dim) or Replicate(), got Partial("),
    *[(f"{style.__name__}'s use_local_output", lambda h, style=style: style(use_local_output="no"),
     TypeError, "use_local_output must be True or False, got 'no'")
      for style in (FusedColwiseParallel, FusedEmbeddingParallel)],
    *[(f"{style.__name__}'s schedule", lambda h, style=style: style(schedule="fast"), ValueError, f"{SCHEDULES} 'fast'")
      for style in (FusedRowwiseParallel, FusedNormParallel)],
    *[(f"a style on {name}'s replaced forward",
       lambda h, style=style, module=module: h.styled(style, None, replaced(module())),
     NotImplementedError, f"got a {name} whose forward was replaced on the instance") for name, style, module in (
        ("Linear", FusedRowwiseParallel(), lambda: nn.Linear(8, 8)),
        ("RMSNorm", FusedNormParallel(), lambda: nn.RMSNorm(8)),
        ("Embedding", FusedEmbeddingParallel(), lambda: nn.Embedding(8, 8)))],
    *[(f"a style twice on {name}", lambda h, style=style, name=name: h.styled(style, module=h.styles[name]),
     NotImplementedError, "has a style already") for name, style in (
        ("FusedRowwiseLinear", FusedRowwiseParallel()), ("FusedRMSNorm", FusedNormParallel()),
        ("FusedEmbedding", FusedEmbeddingParallel()))],
    ("a norm's style on no mesh", lambda h: FusedNormParallel()._apply(nn.LayerNorm(4), None),
     TypeError, "device_mesh must be a DeviceMesh, got"),
    ("a style on an embedding", lambda h: parallelize_module(nn.Embedding(4, 4), h.mesh, FusedColwiseParallel()),
     NotImplementedError, "FusedColwiseParallel is for nn.Linear, got Embedding: in the place of torch's Rowwise"),
    ("clipping beside a plain norm", lambda h: nn.utils.clip_grad_norm_(mixed(h), 1.0),
     RuntimeError, "some of these tensors are DTensors, as split parameters and their gradients are, and others are"),
    ("an optimizer beside a plain norm", lambda h: torch.optim.AdamW(mixed(h), foreach=True).step(),
     RuntimeError, "some of these tensors are DTensors, as split parameters and their gradients are, and others are"),
    ("a style on a subclass", lambda h: h.styled(FusedColwiseParallel(), module=NonDynamicallyQuantizableLinear(4, 4)),
     NotImplementedError, "got NonDynamicallyQuantizableLinear, a subclass that may compute something else"),
    ("a parametrization on a norm with a style",
     lambda h: parametrize.register_parametrization(h.normed, "weight", nn.Tanh()),
     NotImplementedError, "the weight of this ParametrizedFusedRMSNorm cannot be computed before each call"),
    ("a style on a parametrized weight",
     lambda h: h.styled(FusedColwiseParallel(), module=parametrizations.weight_norm(nn.Linear(4, 4))),
     NotImplementedError, "got one with a parametrization: remove_parametrizations first"),
    ("a style on a computed weight",
     lambda h: h.styled(FusedColwiseParallel(), module=nn.utils.spectral_norm(nn.Linear(4, 4))),
     NotImplementedError, "got one whose weight is computed before each call"),
    ("a style after torch's", lambda h: h.styled(FusedColwiseParallel(), module=h.theirs),
     NotImplementedError, "got a Linear that has one of torch's styles already"),
    ("torch's style after ours", lambda h: h.styled(ColwiseParallel(), module=h.columnwise),
     RuntimeError, "distribute_module should only be called once on a module"),
    ("a style on a quantized weight", lambda h: h.styled(FusedColwiseParallel(), module=quantized()),
     NotImplementedError, "got one whose weight is quantized, Parameter of torch.int8"),
    ("a style on torchao's", lambda h: h.styled(FusedColwiseParallel(), module=quantized(by_torchao=True)),
     NotImplementedError, "got one whose weight is quantized, "),
    ("a layer that torch.jit traces", lambda h: torch.jit.trace(h.column(), ones(*X), check_trace=False),
     NotImplementedError, "torch.jit.trace does not trace fusedtp's ops: use torch.compile or torch.export"),
    ("a collective that torch.jit traces",
     lambda h: torch.jit.trace(lambda x: all_reduce(x, group=h.group), ones(*X), check_trace=False),
     NotImplementedError, "torch.jit.trace does not trace fusedtp's ops: use torch.compile or torch.export"),
    ("a style on two axes", lambda h: parallelize_module(nn.Linear(8, 8), h.wide, FusedColwiseParallel()),
     ValueError, "device_mesh must have one dimension, got 2, ('X', 'Y')"),
    ("a style on a name", lambda h: h.styled(FusedRowwiseParallel(), "cpu"),
     TypeError, "device_mesh must be a DeviceMesh, got str"),
    ("a style on a mesh without this rank", lambda h: h.styled(FusedRowwiseParallel(), h.foreign),
     ValueError, "device_mesh must have this rank"),
    ("a style on a sharded weight", lambda h: h.styled(FusedColwiseParallel(), module=h.cut),
     ValueError, "placements (Shard(dim=1),)"),
    ("input layout out of range", lambda h: h.odd_input(ones(4, 8)),
     ValueError, "input_layouts must shard one of 2 dimensions, got Shard(dim=5)"),
    ("output layout out of range", lambda h: h.odd_output(ones(4, 2)),
     ValueError, "output_layouts must shard one of 2 dimensions, got Shard(dim=-7)"),
    *[(f"{what} for a {name}", lambda h, name=name, x=x: h.styles[name](x()), TypeError, f"input must be a {text}")
      for what, (x, text) in NOT_DENSE.items() for name in STYLED],
    ("a norm's dim", lambda h: FusedNormParallel(sequence_dim="1"), TypeError, "sequence_dim must be an int, got '1'"),
    ("a norm of split features", lambda h: h.styles["FusedRMSNorm"](ones(2, 8)),
     ValueError, "must not be sharded along its last dim"),
    *[(f"a norm's style on {name}", lambda h, module=module: h.styled(FusedNormParallel(), module=module),
     NotImplementedError, f"is for nn.Dropout and for a norm with no modules in it, got {name}")
      for name, module in (("AlphaDropout", nn.AlphaDropout()), ("Sequential", nn.Sequential(nn.LayerNorm(4))))],
    ("an embedding's style on a linear", lambda h: h.styled(FusedEmbeddingParallel()),
     NotImplementedError, "is for nn.Embedding with a weight of its own, got Linear"),
    *[(f"an embedding's {option}",
       lambda h, option=option: h.styled(FusedEmbeddingParallel(), module=nn.Embedding(9, 6, **{option: 1})),
     NotImplementedError, f"nn.Embedding's {option}") for option in ("max_norm", "sparse", "scale_grad_by_freq")],
    ("an embedding's layout", lambda h: FusedEmbeddingParallel(output_layouts="whole"),
     ValueError, "must be Shard(dim) or Replicate(), got 'whole'"),
    ("an embedding's layout out of range", lambda h: h.odd_embedding(ones(4, dtype=torch.long)),
     ValueError, "output_layouts must shard one of 2 dimensions"),
    # The rank without that row refuses it too; else it would look up nothing and wait.
    *[(f"row {row} of an embedding of 8", lambda h, row=row: h.styles["FusedEmbedding"](torch.tensor([0, row])),
     IndexError, f"from 0 to 7, got {text}") for row, text in ((8, "0 to 8"), (-1, "-1 to 0"))],
    *[(f"a group of {names}", lambda h, names=names: FusedGroup(*names), kind, text) for names, kind, text in (
        (("q",), ValueError, "two linears or more"), (("q", "q"), ValueError, "two linears or more"),
        (("q", 3), TypeError, "takes the linears' names, got 3"))],
    ("a group of a name that is not there", lambda h: grouped(h, "z"), ValueError, "ModuleDict has no 'z'"),
    ("a group with itself in it", lambda h: grouped(h, ""), NotImplementedError, "is for nn.Linear, got ModuleDict"),
    *[(f"a group of {count} pieces of {rows} rows{of}",
       lambda h, rows=rows, count=count, options=options: grouped(h, "k", rows, pieces={"k": count}, **options),
       ValueError, f"pieces of 'k'{text}")
      for count, rows, of, options, text in (
        (0, 8, "", {}, " must be an int of at least 1, got 0"), (2.0, 8, "", {}, " must be an int of at least 1"),
        (3, 12, "", {}, ": 3 pieces and 4 ranks, neither is a multiple"),
        (6, 12, "", {}, ": 6 pieces and 4 ranks, neither is a multiple"),
        (2, 9, "", {}, ": 9 rows cannot be cut"), (8, 12, "", {}, ": 12 rows cannot be cut"),
        (2, 8, ", gathered", {"output_layouts": Replicate()}, ": 2, fewer than 4 ranks, need"),
        (2, 8, ", DTensors", {"use_local_output": False}, ": 2, fewer than 4 ranks, need output_layouts"))],
    ("floats for an embedding", lambda h: h.styles["FusedEmbedding"](ones(2)),
     TypeError, "input must be indices in torch.int64 or torch.int32, got torch.float32"),
    ("a styled linear's features", lambda h: h.rowwise(ones(4, 5)),
     ValueError, "x has 5 features, and weight of shape (8, 2) takes 2: give x this rank's shard of the features, "
     "[.., K_X]; a style cuts a whole x with input_layouts=Replicate()"),
    ("a styled linear on another mesh",
     lambda h: h.columnwise(DTensor.from_local(ones(4, 8), h.wide, [Replicate(), Replicate()])),
     ValueError, "input must be on the module's mesh, DeviceMesh((X=4)"),
]
# fmt: on


@pytest.mark.parametrize(("name", "kind", "text"), [(name, kind, text) for name, _, kind, text in BAD])
def test_bad_call(refusals: dict[str, list[tuple[str, str]]], name: str, kind: type[Exception], text: str) -> None:
    for got_kind, got_text in refusals[name]:
        assert (got_kind, text in got_text) == (kind.__name__, True), got_text
    # The mesh that leaves a rank out differs between ranks.
    assert len({re.sub(r"rank, \d,|DeviceMesh\(\(X=1\).*", "", text) for _, text in refusals[name]}) == 1
