"""Tensor-parallel styles for existing models: torch's ColwiseParallel and RowwiseParallel with fused matmuls.

    parallelize_module(model, mesh["tp"], {"*.w1": FusedColwiseParallel(input_layouts=Shard(1)), ...})

Arguments and layouts are torch's, so changing class names changes a plan. Parameters become DTensors under their old
names: Shard(0) for column weights and biases, Shard(1) for row weights, Replicate for row biases. Checkpoints, FSDP and
optimizers treat them like torch's. The matmul includes the collectives of the layouts below; any other layout costs a
separate redistribution before or after it.

    FusedColwiseParallel   input Shard(d): gathered; Replicate: nothing to send    output Shard(-1)
    FusedRowwiseParallel   input Shard(-1)              output Shard(d): reduce-scattered; Replicate: all-reduced

The op returns whole gradients: that of a row bias is summed over all rows, not partial.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.utils.parametrize import is_parametrized

from .. import collectives, groups
from ..calls import arguments, autograd, operators, problems
from ..calls.parameters import TrackedModule, as_dtensor, local, own_parts
from ..choose import dispatch
from ..op import RANK_ORDER, Options, Order
from ..scaled import Float8, check_dense
from ..shards import chunk_sizes

TOKENS = Shard(1)
"""Tokens are the second dim of hidden states, [batch, tokens, features]."""


class Tokens:
    """State that the styles of a decoder share: whether the tokens of the running call are whole on every rank.

    `SplitTokens` leaves them whole in a call without gradients that has fewer tokens than ranks.
    """

    # True if the call has fewer tokens than ranks.
    short = False
    # True if the call selects logits by a tensor, which is a DTensor where hidden states are.
    selects = False

    @property
    def are_whole(self) -> bool:
        """Return whether hidden states are whole now."""
        # With gradients, it is the backward pass of an earlier call that repeats a layer.
        return self.short and not torch.is_grad_enabled()


@dataclass(frozen=True)
class _Layouts:
    # Layouts and options that a style gives the linear that it converts.
    # of_whole: the layouts of calls in which `tokens` are whole.
    mesh: DeviceMesh
    input: Placement
    output: Placement
    use_local_output: bool
    options: Options
    tokens: Tokens | None = None
    of_whole: _Layouts | None = None

    def now(self) -> _Layouts:
        """Return the layouts of the running call."""
        return self if self.of_whole is None or self.tokens is None or not self.tokens.are_whole else self.of_whole

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group()

    def sizes(self, length: int) -> tuple[int, ...]:
        """Return how DTensor splits a dim of this length."""
        return chunk_sizes(length, self.mesh.size())

    def receive(self, x: Tensor, wanted: Placement | None = None) -> tuple[Tensor, Placement, tuple[int, ...] | None]:
        """Return x's local part, its layout (`wanted` if given), and every rank's length if x is a DTensor."""
        check_dense("input", x)
        placement = positive(self.input, x.ndim, "input_layouts")
        # The result has as many dims as x. Check its layout before anything is sent.
        positive(self.output, x.ndim, "output_layouts")
        if isinstance(x, DTensor):
            if x.device_mesh != self.mesh:
                raise ValueError(f"input must be on the module's mesh, {self.mesh}, got a DTensor on {x.device_mesh}")
            (placement,) = x.placements
        wanted = None if wanted is None else positive(wanted, x.ndim)
        if wanted is None and placement.is_partial():
            wanted = positive(self.input, x.ndim)
        if wanted is not None and placement != wanted:
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, self.mesh, [placement], run_check=False)
            x, placement = x.redistribute(placements=[wanted]), wanted
        if not isinstance(x, DTensor):
            return x, placement, None
        sizes = self.sizes(x.shape[placement.dim]) if isinstance(placement, Shard) else None
        return local(x, x.ndim), placement, sizes

    def hand_out(self, y: Tensor, made: Placement, shape: tuple[int, ...]) -> Tensor:
        """Return y, with placement `made` in a whole tensor of `shape`, in the layout and kind that the style asks for.

        The kind is a DTensor or this rank's tensor.
        """
        made, output = positive(made, y.ndim), positive(self.output, y.ndim)
        if isinstance(made, Shard) and output.is_replicate() and not torch.is_grad_enabled():
            # DTensor would send by torch.distributed. With gradients it must, as its gradient is whole on every rank.
            sizes, schedule = self.sizes(shape[made.dim]), self.options.schedule
            y = collectives.all_gather(y, gather_dim=made.dim, sizes=sizes, group=self.group, schedule=schedule)
            y, made = y.contiguous(), output
        if made == output and self.use_local_output:
            return y
        out = as_dtensor(y, self.mesh, made, shape)
        if made != output:
            out = out.redistribute(placements=[output])
        return out.to_local() if self.use_local_output else out


def positive(placement: Placement, ndim: int, name: str = "layout") -> Placement:
    """Return the placement with its dim counted from the front; ValueError if there is no such dim."""
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise ValueError(f"{name} must shard one of {ndim} dimensions, got {placement!r}")
    return Shard(placement.dim % ndim)


class FusedLinear(TrackedModule, nn.Linear):
    """Base class of an nn.Linear whose parameters its style has laid out."""

    layouts: _Layouts
    # True if `parallelize` has split the adapters around it.
    has_adapters = False

    @property
    def base_layer(self) -> nn.Module:
        """Refuse adapters: peft asks for this attribute before it puts an adapter around a linear.

        Raises NotImplementedError, because the adapter would see this rank's part of the weight, and nothing would add
        up the ranks' results. Raises AttributeError, as an nn.Linear does, if `parallelize` has split the adapters.
        """
        if self.has_adapters:
            raise AttributeError("base_layer")
        raise NotImplementedError(
            f"an adapter cannot be put around this {type(self).__name__}, which is split over ranks: put adapters on "
            "first, peft.get_peft_model or add_adapter, and then call fusedtp.parallelize, which splits LoRA"
        )


class FusedColwiseLinear(FusedLinear):
    """Class that FusedColwiseParallel gives an nn.Linear: `[.., R_X, .., K] @ [K, N_X] -> [.., N_X]`, or R whole."""

    def forward(self, input: Tensor) -> Tensor:
        (y,) = columns([self], input)
        return y

    def own(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the parts of the linear's weight and bias that this rank uses."""
        return weight, bias


def columns(linears: Sequence[FusedColwiseLinear], input: Tensor, read: Sequence[Sequence[Any]] = ()) -> list[Tensor]:
    """Return the result of every one of these linears for one input, with one gather.

    `read`: each linear's weight and bias, if they have been read.
    """
    to = linears[0].layouts.now()
    read = read or [each.read("weight", "bias") for each in linears]
    own: Any = [each.own(*pair) for each, pair in zip(linears, read, strict=True)]
    weight, bias = own[0] if len(own) == 1 else zip(*own, strict=True)
    x, placement, sizes = to.receive(input)
    # A gradient is laid out like its parameter: whole if the parameter is replicated, as backward has reduced it.
    ours = weight, {"bias": bias}, to.group, to.options
    if isinstance(placement, Shard):
        ys = autograd.apply(problems.all_gather_problem, x, *ours, (placement.dim, sizes), of_layer=True)
    else:
        ys = autograd.apply(problems.replicated_problem, x, *ours, of_layer=True)
    outs = ys if isinstance(ys, tuple) else (ys,)
    return [
        each.layouts.now().hand_out(y, Shard(-1), (*y.shape[:-1], each.out_features))
        for each, y in zip(linears, outs, strict=True)
    ]


class FusedRowwiseLinear(FusedLinear):
    """Class that FusedRowwiseParallel gives an nn.Linear: `[.., K_X] @ [K_X, N] -> [.., R_X, .., N]`, or R whole."""

    def forward(self, input: Tensor) -> Tensor:
        to, (weight, bias) = self.layouts.now(), self.read("weight", "bias")
        x, _, _ = to.receive(input, wanted=Shard(-1))
        ours = weight, {"bias": bias}, to.group, to.options
        shape = (*x.shape[:-1], self.out_features)
        made = positive(to.output, x.ndim)
        if isinstance(made, Shard):
            scatter = made.dim, to.sizes(shape[made.dim])
            y = autograd.apply(problems.reduce_scatter_problem, x, *ours, scatter, of_layer=True)
        else:
            y = autograd.apply(problems.all_reduce_problem, x, *ours, of_layer=True)
        return to.hand_out(y, made, shape)


def check_mesh(device_mesh: object) -> None:
    """Raise TypeError or ValueError unless a style can split over the mesh: one dimension, with this rank."""
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a DeviceMesh, got {type(device_mesh).__name__}")
    groups.check_mesh("device_mesh", device_mesh)
    if device_mesh.ndim != 1:
        raise ValueError(
            f"device_mesh must have one dimension, got {device_mesh.ndim}, {device_mesh.mesh_dim_names}: "
            "pick one, mesh['name']"
        )


def unfit(module: nn.Module) -> str:
    """Return why a style cannot take the module; "" for an nn.Linear with parameters of its own."""
    if is_parametrized(module):
        return "one with a parametrization: remove_parametrizations first, or register it on what the style has made"
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return (
            f"{kind}: in the place of torch's RowwiseParallel, fusedtp.FusedEmbeddingParallel(output_layouts=...) "
            "splits it by vocabulary; torch.distributed.tensor.parallel.ColwiseParallel splits it by features"
        )
    if not isinstance(module, nn.Linear):
        return f"{kind}, which torch's styles do not take either"
    if isinstance(module, FusedLinear):
        return f"{kind}: it has a style already"
    if type(module) is not nn.Linear:
        return (
            f"{kind}, a subclass that may compute something else: torch's styles leave its code as it is. Where that "
            "is nn.Linear's, put an nn.Linear in its place"
        )
    if reason := met_before(module):
        return reason
    weight: Any = module._parameters.get("weight")
    if weight is not None and not (weight.is_floating_point() and not type(weight).__module__.startswith("torchao")):
        return (
            f"one whose weight is quantized, {type(weight).__name__} of {weight.dtype}: split it first, then quantize"
        )
    computed = [name for name in ("weight", "bias") if name not in module._parameters]
    if computed:
        # The older torch.nn.utils.weight_norm and spectral_norm.
        return f"one whose {computed[0]} is computed before each call: remove_weight_norm first, or what does so"
    return ""


def met_before(module: nn.Module) -> str:
    """Return why no style can be applied: an earlier style or patch of this module; "" if there is none."""
    if "forward" in vars(module):
        return (
            f"a {type(module).__name__} whose forward was replaced on the instance, by code for the whole weight: "
            "take it off, as accelerate.hooks.remove_hook_from_module does, and replace it after the style is applied"
        )
    if getattr(module, "_distribute_module_applied", False):
        return f"a {type(module).__name__} that has one of torch's styles already"
    return ""


def warn_of_ties(module: nn.Linear, style: str) -> None:
    """Warn of parameters of the linear that other modules have too."""
    for name in ("weight", "bias"):
        parameter = module._parameters[name]
        if parameter is not None and not isinstance(parameter, DTensor) and held_by_others(parameter, [module]):
            warnings.warn(
                f"{style}: the {name} of this nn.Linear is tied to another module's, which keeps it whole: they are "
                "two from now on, as with torch's styles. Give the other module the same layout and tie them again",
                stacklevel=2,
            )


def held_by_others(parameter: nn.Parameter, modules: Iterable[nn.Module]) -> bool:
    """Return whether a module other than these has the parameter too."""
    # The search takes long. Most parameters have four references: the module's, the caller's, this and getrefcount's.
    if sys.getrefcount(parameter) <= 4:
        return False
    known = {id(each._parameters) for each in modules}
    holders = [each for each in gc.get_referrers(parameter) if type(each) is dict and id(each) not in known]
    return any(_is_of_a_module(each) for each in holders)


def _is_of_a_module(values: dict[str, Any]) -> bool:
    # Return whether these are the parameters of a module, which refers to them by itself or through its attributes.
    return any(
        (vars(each) if isinstance(each, nn.Module) else each).get("_parameters") is values
        for each in gc.get_referrers(values)
        if isinstance(each, nn.Module) or type(each) is dict
    )


class _FusedStyle(ParallelStyle):
    # Base of the two styles.
    _input: Placement
    _output: Placement
    _weight: Placement
    _bias: Placement
    _linear: type[nn.Linear]
    # True if the caller keeps a parameter one that several modules share.
    keeps_ties = False
    tokens: Tokens | None = None

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str = "auto",
        producer: str = "auto",
        float8: Float8 | None = None,
        order: Order = RANK_ORDER,
    ) -> None:
        super().__init__()
        self.input_layouts = self._input if input_layouts is None else input_layouts
        self.output_layouts = self._output if output_layouts is None else output_layouts
        self.use_local_output = arguments.flag("use_local_output", use_local_output)
        arguments.check_producer(producer, schedule)
        self.options = Options(schedule, "auto", producer, arguments.float8_of(float8), order)
        # The number of ranks is not known yet.
        arguments.leaves_of(self.options, 1)
        for name, placement in (("input_layouts", self.input_layouts), ("output_layouts", self.output_layouts)):
            if not isinstance(placement, Shard | Replicate):
                raise ValueError(f"{name} must be Shard(dim) or Replicate(), got {placement!r}")
        dispatch.check_schedule(schedule)

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Raise if the style cannot be applied, before anything is changed."""
        if reason := unfit(module):
            raise NotImplementedError(f"{type(self).__name__} is for nn.Linear, got {reason}")
        check_mesh(device_mesh)
        dtype = next(module.parameters()).dtype
        if arguments.leaves_of(self.options, device_mesh.size(), dtype) > 0:
            name = "out_features" if self._weight == Shard(0) else "in_features"
            sizes = chunk_sizes(getattr(module, name), device_mesh.size())
            arguments.check_even(self.options.order, sizes, f"parts of {name}")

    def layouts_on(self, device_mesh: DeviceMesh) -> _Layouts:
        """Return the layouts that a linear of this style gets."""
        taken, made, is_local = self.input_layouts, self.output_layouts, self.use_local_output
        of_whole = None
        if self.tokens is not None:
            into, out = (Replicate() if each == TOKENS else each for each in (taken, made))
            of_whole = _Layouts(device_mesh, into, out, is_local or made == TOKENS, self.options)
        return _Layouts(device_mesh, taken, made, is_local, self.options, self.tokens, of_whole)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        if not self.keeps_ties:
            warn_of_ties(module, type(self).__name__)  # type: ignore[arg-type]
        distribute(module, device_mesh, self.src_data_rank, weight=self._weight, bias=self._bias)
        return convert(module, self._linear, layouts=self.layouts_on(device_mesh))

    def __repr__(self) -> str:
        layouts = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        schedule, order = self.options.schedule, self.options.order
        order = f", order={order!r}" * (order != RANK_ORDER)
        return (
            f"{type(self).__name__}({layouts}, use_local_output={self.use_local_output}, schedule={schedule!r}{order})"
        )


class FusedColwiseParallel(_FusedStyle):
    """Style for an nn.Linear: split its output features over a 1-D mesh.

    - `input_layouts`: of a plain input, by default Replicate(). A DTensor's own layout wins.
    - `output_layouts`: by default Shard(-1).
    - `use_local_output`: return this rank's tensor rather than a DTensor.
    - `schedule`: of the matmul: auto, fused, decomposed or unfused.
    - `producer`: how `fused` sends the gathered input: auto, push, copy or multicast.
    - `float8`: tensorwise, rowwise or rowwise_with_gw_hp: operands are cast to float8 before they are sent.
    - `order`: rank, any (NVLink's switch adds if it can) or tree (the same bits on any number of ranks), as in
      `all_gather_linear`.

    A sharded plain input must have the same length on every rank. A DTensor knows its length.

    Applying the style raises NotImplementedError unless the module is a plain nn.Linear, and TypeError or ValueError
    unless the mesh is 1-D with this rank in it. Nothing is changed then.
    """

    _input, _output, _weight, _bias = Replicate(), Shard(-1), Shard(0), Shard(0)
    _linear = FusedColwiseLinear


class FusedRowwiseParallel(_FusedStyle):
    """Style for an nn.Linear: split its input features over a 1-D mesh.

    - `input_layouts`: of a plain input, by default Shard(-1). A DTensor's own layout wins.
    - `output_layouts`: by default Replicate().

    Other options and errors are those of `FusedColwiseParallel`.
    """

    _input, _output, _weight, _bias = Shard(-1), Replicate(), Shard(1), Replicate()
    _linear = FusedRowwiseLinear


# Parameters that are whole on every rank. A rank uses them for its own part of the work; gradients are added up over
# the ranks.


@dataclass(frozen=True)
class Sum:
    """The mesh and the schedule by which gradients are added up."""

    mesh: DeviceMesh
    schedule: str = "auto"

    def use(self, parameter: Tensor) -> Tensor:
        """Return the whole parameter for this rank's own use; backward adds up the ranks' gradients."""
        whole = local(parameter, parameter.ndim)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return whole
        group = self.mesh.get_group().group_name
        own = operators.as_it_is(whole.reshape(1, -1), group, self.schedule)
        return own.view(whole.shape)


class FusedSharedLinear(FusedColwiseLinear):
    """A FusedColwiseLinear whose weight and bias are whole on every rank; a rank uses its own rows of them."""

    gradients: Sum
    own_rows: slice

    def own(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return this rank's rows of weight and bias."""
        rows = self.gradients.use(weight)[self.own_rows]
        return rows, None if bias is None else self.gradients.use(bias)[self.own_rows]


def distribute(module: nn.Module, device_mesh: DeviceMesh, src_data_rank: int | None, **lie: Placement) -> None:
    """Make a module's own parameters DTensors: those named in `lie` with these placements, by default all whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = lie.get(name) if lie else Replicate()
        # A weight that is tied to a module with a style may be laid out so already.
        placed = isinstance(parameter, DTensor) and (parameter.device_mesh, parameter.placements)
        if placement is not None and placed != (device_mesh, (placement,)):
            value = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=src_data_rank)
            setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
    module.register_load_state_dict_pre_hook(own_parts)


def convert(module: nn.Module, kind: type[nn.Module], **attributes: object) -> nn.Module:
    """Change a module's class in place, so that its hooks and its parameters' names stay, and set attributes."""
    module.__class__ = kind
    # torch's own styles refuse such a module.
    for name, value in {"_distribute_module_applied": True, **attributes}.items():
        setattr(module, name, value)
    if isinstance(module, TrackedModule):
        module.keep_layout()
    return module


def share(style: FusedColwiseParallel, linear: nn.Linear, device_mesh: DeviceMesh, own_rows: slice) -> None:
    """Give an nn.Linear with whole parameters the style: this rank uses the rows `own_rows`."""
    style.check(linear, device_mesh)
    gradients = Sum(device_mesh, style.options.schedule)
    convert(linear, FusedSharedLinear, layouts=style.layouts_on(device_mesh), own_rows=own_rows, gradients=gradients)


class Derived(nn.Module):
    """Base of subclasses that are made at run time; their modules are pickled by the base class."""

    class_name = "Fused{}"
    # The arguments of `derived`.
    made_of: tuple[tuple[type[nn.Module], ...], tuple[tuple[str, Any], ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        _, _, *state = made
        return (_anew, self.made_of, *state)


@cache
def derived(bases: tuple[type[nn.Module], ...], values: tuple[tuple[str, Any], ...] = ()) -> type[nn.Module]:
    """Return a class with these bases, one of them a `Derived`, and these class attributes."""
    kind = next(each for each in bases if not issubclass(each, Derived))
    name = next(each.class_name for each in bases if issubclass(each, Derived)).format(kind.__name__)
    return type(name, bases, {**dict(values), "made_of": (bases, values)})


def _anew(bases: Any, values: Any) -> nn.Module:
    cls = derived(bases, values)
    return cls.__new__(cls)
