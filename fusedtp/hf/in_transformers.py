"""Tensor parallelism of transformers, `from_pretrained` with a plan, over this package's ops. All else is its own.

transformers keeps its styles by name in a registry. Each of ours is its style, with another forward or other
collectives; W is the number of ranks:

    colwise, packed_colwise      x whole -> this rank's columns                              backward: dx all-reduced
    colwise_gather_output        the same, then all columns gathered                         backward: own columns of dy
    rowwise, rowwise_split_input own columns of x -> the sum over ranks, all-reduced with the matmul
    embedding_rowwise            indices -> rows from all ranks, all-reduced
    moe_tp_experts, all_reduce   the module's result, all-reduced
      and mla_kv_a_proj          what the ranks share going in: gradients all-reduced
    replicated_with_grad_allreduce    gradients of the module's parameters, all-reduced

Only this module knows what is private in transformers, read in 5.23 and 5.24. `_check` compares it by name.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import collectives
from ..calls import autograd, operators, problems
from ..choose import dispatch
from ..shards import offsets
from ..styles.embeddings import look_up
from ..styles.linears import FusedColwiseParallel, FusedRowwiseParallel
from ..switch import Switch

_MODULE = "transformers.distributed.tensor_parallel"
_VERSIONS = "5.23 and later"

_on: list[Switch[str]] = []
_undo: list[Callable[[], object]] = []

Forward = Callable[[Tensor], Tensor]


def use_in_transformers(schedule: str = "auto") -> Switch[str]:
    """Let transformers' own tensor parallelism run over this package, until `undo()` or the end of a `with` block.

    Models that `from_pretrained` splits while the switch is on, with `DistributedConfig(tp_size=...)` or `tp_plan`, use
    the ops of this package, also after it is off: every model for which transformers has a plan. Results and gradients
    are those of transformers' own styles. Loading, `save_pretrained` and `generate` are unchanged.

    - `schedule`: as in `all_gather_linear`. While several switches are on, the last one's.

    Call it on every rank, before the model is loaded. Quantized linears, subclasses of nn.Linear and nn.Embedding, and
    styles that are not listed in docs/guide/transformers.md remain transformers' own.

    Raises ValueError for an unknown schedule, and RuntimeError if transformers is missing, too old, or other than what
    is known here.
    """
    dispatch.check_schedule(schedule)
    return Switch(schedule, _on, _install, _undo)


def _install() -> None:
    registry, own = _check()
    for name, style in own.items():
        made = copy.copy(style)
        kind = type(style)
        made.__class__ = type(f"Fused{kind.__name__}", (_SERVED[kind.__name__], kind), {"__module__": __name__})
        registry.register(name, made)
        _undo.append(functools.partial(registry.register, name, style))


def _check() -> tuple[Any, dict[str, Any]]:
    """Return transformers' registry and those of its styles that ours replace, by name.

    Raises RuntimeError unless all that is used here is there.
    """
    try:
        of, transformers = importlib.import_module(_MODULE), importlib.import_module("transformers")
    except ImportError as error:
        raise RuntimeError(f"fusedtp.use_in_transformers needs transformers {_VERSIONS}: {error}") from error
    missing: list[str] = []
    for kind in _SERVED:
        for method, known in _METHODS.items():
            function = getattr(getattr(of, kind, None), method, None)
            if function is None or [*inspect.signature(function).parameters] != ["self", *known]:
                missing.append(f"{kind}.{method}(self, {', '.join(known)})")
    registry: Any = getattr(of, "ALL_PARALLEL_STYLES", {})
    if not callable(getattr(registry, "register", None)):
        missing.append("ALL_PARALLEL_STYLES.register")
    for name, (kind, attributes) in _NAMES.items():
        style = registry.get(name)
        if type(style).__name__ != kind or not all(hasattr(style, each) for each in attributes):
            missing.append(f"style {name!r} of {kind}({', '.join(attributes)})")
    if missing:
        raise RuntimeError(
            f"transformers {transformers.__version__} is not as fusedtp.use_in_transformers knows it, {_VERSIONS}: "
            f"{_MODULE} has no {', no '.join(missing)}"
        )
    # Two names may have one style, and a program may have registered styles of its own.
    return registry, {name: style for name, style in registry.items() if type(style) in map(of.__dict__.get, _SERVED)}


class _Style:
    # Base of our styles, to stand before the class of transformers' own. It reads the schedule when a model is split.

    @property
    def _schedule(self) -> str:
        return _on[-1].value if _on else "auto"

    def _forward(self, module: Any, mesh: DeviceMesh) -> Forward | None:
        """Return the forward that serves the module, or None."""
        raise NotImplementedError

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        own: Any = super()
        made = own.install_forward(module, mesh)
        theirs, ours = module.forward, self._forward(module, _of_tp(mesh))
        if ours is not None:
            # Weights are loaded later, and with them it is known whether they are quantized.
            module.forward = lambda input: theirs(input) if _is_quantized(module) else ours(input)
        return made


def _of_tp(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh["tp"]


def _is_quantized(module: Any) -> bool:
    return getattr(module, "_hf_quantized_needs_local_tp", False)


class _Linear(_Style):
    input_layouts: Any
    output_layouts: Any
    use_local_output: bool

    def _layouts(self, kind: type[FusedColwiseParallel | FusedRowwiseParallel], mesh: DeviceMesh) -> Any:
        options = {name: getattr(self, name) for name in ("input_layouts", "output_layouts", "use_local_output")}
        return kind(**options, schedule=self._schedule).layouts_on(mesh)


class _Columns(_Linear):
    def _forward(self, module: Any, mesh: DeviceMesh) -> Forward | None:
        if type(module) is not nn.Linear:
            return None
        to, gathers = self._layouts(FusedColwiseParallel, mesh), self.output_layouts == Replicate()

        def forward(input: Tensor) -> Tensor:
            x, placement, sizes = to.receive(input)
            parameters = module.weight, {"bias": module.bias}, to.group, to.options
            if isinstance(placement, Shard):
                y = autograd.apply(problems.all_gather_problem, x, *parameters, (placement.dim, sizes), of_layer=True)
            else:
                y = autograd.apply(problems.replicated_problem, x, *parameters, of_layer=True)
            if gathers:
                widths = to.sizes(module.out_features)
                whole = _Gathered.apply(y, widths, to.group, to.options.schedule)  # type: ignore[no-untyped-call]
                return to.hand_out(whole, Replicate(), tuple(whole.shape))  # type: ignore[no-any-return]
            return to.hand_out(y, Shard(-1), (*y.shape[:-1], module.out_features))  # type: ignore[no-any-return]

        return forward


class _Gathered(torch.autograd.Function):
    """Gather every rank's columns. All ranks compute the same from the result, so backward takes a rank's own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, widths: tuple[int, ...], group: ProcessGroup, schedule: str) -> Tensor:
        ctx.own = offsets(widths)[group.rank()], y.shape[-1]
        whole = collectives.all_gather(y, gather_dim=-1, sizes=widths, group=group, schedule=schedule)
        # Laid out as transformers' own: matmuls of another layout have other bits.
        return whole.contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy.narrow(-1, *ctx.own), None, None, None


class _PackedColumns(_Style):
    use_local_output: bool

    def _forward(self, module: Any, mesh: DeviceMesh) -> Forward | None:
        # Packed columns are not those of Shard(-1), so no DTensor is made of them.
        if type(module) is not nn.Linear or not self.use_local_output:
            return None
        to = FusedColwiseParallel(schedule=self._schedule).layouts_on(mesh)

        def forward(input: Tensor) -> Tensor:
            x, _, _ = to.receive(input, Replicate())
            parameters = module.weight, {"bias": module.bias}, to.group, to.options
            return autograd.apply(problems.replicated_problem, x, *parameters, of_layer=True)  # type: ignore[no-any-return]

        return forward


class _Rows(_Linear):
    def _forward(self, module: Any, mesh: DeviceMesh) -> Forward | None:
        if type(module) is not nn.Linear or self.output_layouts != Replicate():
            return None
        to = self._layouts(FusedRowwiseParallel, mesh)

        def forward(input: Tensor) -> Tensor:
            x, _, _ = to.receive(input, Shard(-1))
            parameters = module.weight, {"bias": module.bias}, to.group, to.options
            y = autograd.apply(problems.all_reduce_problem, x, *parameters, of_layer=True)
            return to.hand_out(y, Replicate(), tuple(y.shape))  # type: ignore[no-any-return]

        return forward


class _Embedding(_Style):
    shard_dim: int
    use_local_output: bool

    def _forward(self, module: Any, mesh: DeviceMesh) -> Forward | None:
        plain = type(module) is nn.Embedding and self.shard_dim == 0 and self.use_local_output
        if not plain or module.max_norm or module.scale_grad_by_freq or module.sparse:
            return None
        schedule = self._schedule
        return lambda input: look_up(module, module.weight, input, mesh, Replicate(), schedule)[0]


class _Summing(_Style):
    # Styles whose ranks compute different values from one tensor, and add up what they compute.

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        own: Any = super(_Style, self)
        module.fusedtp_schedule = self._schedule
        return own.install_forward(module, mesh)


def _shared(x: Tensor, module: Any, mesh: DeviceMesh) -> Tensor:
    """Return x [.., C], of which every rank computes other values; backward adds up the ranks' gradients."""
    if isinstance(x, DTensor):
        x = x.to_local()
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    matrix = x.reshape(-1, x.shape[-1])
    return operators.as_it_is(matrix, _of_tp(mesh).get_group().group_name, module.fusedtp_schedule).view(x.shape)


def _summed(y: Tensor, module: Any, mesh: DeviceMesh) -> Tensor:
    return collectives.all_reduce(y, group=_of_tp(mesh).get_group(), schedule=module.fusedtp_schedule)


class _Experts(_Summing):
    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        # Hidden states; or these, indices of experts, weights of experts and others.
        shared = [_shared(x, module, mesh) if i in (0, 2) else x for i, x in enumerate(args)]
        return tuple(shared), kwargs

    def transform_output_post_forward(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return None if output is None else _summed(output, module, mesh)


class _AllReduce(_Summing):
    def transform_output_post_forward(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        own: Any = super()
        if not isinstance(output, Tensor) or isinstance(output, DTensor):
            return own.transform_output_post_forward(module, output, mesh)
        return _summed(output, module, mesh)


class _Latent(_Summing):
    # The last features, the keys' rotary part, bypass the next linear, which adds up the gradients of the others.
    def transform_output_post_forward(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        own: Any = super()
        rotary = getattr(module.config, "qk_rope_head_dim", None)
        if rotary is None:
            return own.transform_output_post_forward(module, output, mesh)
        latent, keys = output.split([output.shape[-1] - rotary, rotary], dim=-1)
        return torch.cat([latent, _shared(keys, module, mesh)], dim=-1)


class _OwnHeads(_Style):
    # A norm's parameters, whole on every rank, which are used for this rank's heads.

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        theirs, group, schedule = module.forward, _of_tp(mesh).get_group(), self._schedule
        hooked: dict[str, Tensor] = {}

        def add_up(grad: Tensor) -> Tensor:
            return collectives.all_reduce(grad, group=group, schedule=schedule)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Parameters are replaced when weights are loaded.
            for name, each in module.named_parameters(recurse=False) if torch.is_grad_enabled() else ():
                if each.requires_grad and hooked.get(name) is not each:
                    # Of one backward's gradient, before it is added to those of earlier ones.
                    each.register_hook(add_up)
                    hooked[name] = each
            return theirs(*args, **kwargs)

        module.forward = forward
        return module


# Our style for each class of transformers.
_SERVED: dict[str, type[_Style]] = {
    "ColwiseParallel": _Columns,
    "RowwiseParallel": _Rows,
    "PackedColwiseParallel": _PackedColumns,
    "EmbeddingParallel": _Embedding,
    "MoeExpertsParallel": _Experts,
    "AllReduceParallel": _AllReduce,
    "MlaKvAProjParallel": _Latent,
    "ReplicatedWithGradAllReduce": _OwnHeads,
}
# Names in transformers' registry, with the class and the attributes of each style.
_LAYOUTS = ("input_layouts", "output_layouts", "use_local_output")
_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "colwise": ("ColwiseParallel", _LAYOUTS),
    "colwise_gather_output": ("ColwiseParallel", _LAYOUTS),
    "rowwise": ("RowwiseParallel", _LAYOUTS),
    "rowwise_split_input": ("RowwiseParallel", _LAYOUTS),
    "packed_colwise": ("PackedColwiseParallel", ("use_local_output",)),
    "embedding_rowwise": ("EmbeddingParallel", ("shard_dim", "use_local_output")),
    "moe_tp_experts": ("MoeExpertsParallel", ()),
    "all_reduce": ("AllReduceParallel", ()),
    "mla_kv_a_proj": ("MlaKvAProjParallel", ()),
    "replicated_with_grad_allreduce": ("ReplicatedWithGradAllReduce", ()),
}
# Methods that ours replace or call, with their parameters.
_METHODS = {
    "install_forward": ("module", "mesh"),
    "transform_inputs_pre_forward": ("module", "args", "kwargs", "mesh"),
    "transform_output_post_forward": ("module", "output", "mesh"),
}
