"""Several linears: those that take the same input share one gather, and packed ones are taken apart to be split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..calls.parameters import part_of, watch
from ..scaled import check_dense
from ..torch_private import is_wrapped
from .linears import (
    FusedColwiseLinear,
    FusedColwiseParallel,
    FusedSharedLinear,
    Tokens,
    columns,
    distribute,
    share,
    warn_of_ties,
)


class _Together:
    # The linears of a FusedGroup, and the last input's results for linears that have not been called with it yet.
    def __init__(self) -> None:
        self.linears: list[FusedGroupedLinear] = []
        self.clear()

    def clear(self) -> None:
        self._of: _Seen | None = None
        self._outs: dict[FusedGroupedLinear, tuple[Tensor, _Seen]] = {}

    def take(self, linear: FusedGroupedLinear, input: Tensor) -> Tensor:
        # A computed weight is computed when its linear is called. A tensor of inference mode counts no changes.
        is_compiling = torch.compiler.is_compiling()
        if linear.computes("weight", "bias") or (not is_compiling and input.is_inference()):
            (out,) = columns([linear], input)
            return out
        device, own = input.device.type, linear.read("weight", "bias")
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        of, mine = _Seen([input], torch.is_grad_enabled(), autocast), _Seen(own)
        if self._of is None or not self._of.equals(of) or linear not in self._outs:
            shared = [each for each in self.linears if not each.computes("weight", "bias")]
            read = [own if each is linear else each.read("weight", "bias") for each in shared]
            outs = zip(columns(shared, input, read), map(_Seen, read), strict=True)
            self._of, self._outs = of, dict(zip(shared, outs, strict=True))
        out, seen = self._outs.pop(linear)
        if not seen.equals(mine):
            # Its weight has changed since; the others' results are right.
            (out,) = columns([linear], input, [own])
        if not self._outs:
            self.clear()
        return out

    def __getstate__(self) -> dict[str, Any]:
        # Results are neither copied nor saved.
        return {"linears": self.linears, "_of": None, "_outs": {}}


class _Seen:
    # Tensors as they are, with values: objects, memory and versions. A compiler knows only the objects.
    def __init__(self, tensors: Sequence[Tensor | None], *values: object) -> None:
        # The objects are held, as their ids and their memory could be used again otherwise.
        self._held: list[Any] = [*tensors]
        self._is: list[object] = [*values]
        if torch.compiler.is_compiling():
            return
        self._is.append(torch.is_inference_mode_enabled())
        for each in tensors:
            if each is None:
                continue
            # A DTensor's local part may be changed without the DTensor.
            mine = getattr(each, "_local_tensor", each)
            if each is not mine:
                watch(each)
            self._held.append(mine)
            self._is += each.requires_grad, *(-1 if one.is_inference() else one._version for one in (each, mine))
            # torch.func's wrappers have no memory of their own.
            if not is_wrapped(mine):
                # `x.data = y` gives x other memory and counts no change.
                self._held.append(mine.untyped_storage())
                self._is += mine.storage_offset(), mine.shape, mine.stride()

    def equals(self, other: _Seen) -> bool:
        same = len(self._held) == len(other._held) and self._is == other._is
        return same and all([one is two for one, two in zip(self._held, other._held, strict=True)])


class FusedGroupedLinear(FusedColwiseLinear):
    """The class that FusedGroup gives each nn.Linear: the first one called with an input computes the whole group."""

    together: _Together

    def forward(self, input: Tensor) -> Tensor:
        check_dense("input", input)
        return self.together.take(self, input)


class FusedGroupedSharedLinear(FusedSharedLinear, FusedGroupedLinear):
    """The class of a linear in a FusedGroup that has fewer pieces than there are ranks."""


class FusedGroup(ParallelStyle):
    """Style for several nn.Linear of one module that take the same input: FusedColwiseParallel each, with one gather.

    - `names`: of the linears in the module that the style is for: FusedGroup("q_proj", "k_proj", "v_proj").
    - `pieces`: by name, the number of pieces that a linear's rows have, such as key and value heads, if that may be
      fewer than the ranks. Several ranks then use the same piece, and each has the whole weight.
    - `options`: those of FusedColwiseParallel. With fewer pieces than ranks, `output_layouts` must be Shard(-1) and
      `use_local_output` True.

    Applying the style raises what FusedColwiseParallel raises, and ValueError if a linear is not there, or if its rows
    or its pieces cannot be shared out evenly: of pieces and ranks, one must be a multiple of the other. Nothing is
    changed then.

    The module's code is unchanged and sees its input as given: x.shape of a plain shard is this rank's part, of a
    DTensor the whole. The first linear that the module calls with an input computes the results of all. Calls with
    different inputs, or of only some linears, are right too, but compute unused results. In backward the gradients of
    the input are added before they are scattered, once.

    Under torch.compile an input must not be changed in place between the calls of a group. Tensors made under
    torch.inference_mode count no changes, so each linear gathers them for itself. torch.no_grad has one gather for all.
    """

    keeps_ties = False
    tokens: Tokens | None = None

    def __init__(self, *names: str, pieces: Mapping[str, int] | None = None, **options: Any) -> None:
        super().__init__()
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"a FusedGroup is of two linears or more, by different names, got {names}")
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"a FusedGroup takes the linears' names, got {wrong[0]!r}")
        self.names, self.style = names, FusedColwiseParallel(**options)
        self.pieces = dict(pieces or {})
        if unknown := [name for name in self.pieces if name not in names]:
            raise ValueError(f"pieces must be of {', '.join(names)}, got {unknown[0]!r}")
        for name, count in self.pieces.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"pieces of {name!r} must be an int of at least 1, got {count!r}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears: list[Any] = []
        for name in self.names:
            try:
                linears.append(module.get_submodule(name))
            except AttributeError as error:
                raise ValueError(f"{type(module).__name__} has no {name!r}, which is to be in a {self!r}") from error
        if len({id(each) for each in linears}) < len(linears):
            raise ValueError(f"a FusedGroup is of different linears: {', '.join(self.names)} are not")
        self.style.src_data_rank, self.style.tokens = self.src_data_rank, self.tokens
        together = _Together()
        for name, linear in zip(self.names, linears, strict=True):
            self.style.check(linear, device_mesh)
            if name in self.pieces:
                self._check_pieces(name, linear.out_features, device_mesh.size())
        # Parameters that several linears share stay one. Ties to other modules are searched before `parameters` refers
        # to them: a parameter without other references needs no search.
        ids = Counter(id(each) for linear in linears for each in linear.parameters())
        if not self.keeps_ties:
            for linear in linears:
                if all(ids[id(each)] == 1 for each in linear.parameters()):
                    warn_of_ties(linear, type(self.style).__name__)
        self.style.keeps_ties = True
        parameters = [dict(linear.named_parameters()) for linear in linears]
        made: dict[tuple[int, bool], nn.Parameter] = {}
        for name, linear, own in zip(self.names, linears, parameters, strict=True):
            pieces, num_ranks = self.pieces.get(name, device_mesh.size()), device_mesh.size()
            if pieces < num_ranks:
                distribute(linear, device_mesh, self.src_data_rank)
                length = linear.out_features // pieces
                piece = device_mesh.get_local_rank() * pieces // num_ranks
                share(self.style, linear, device_mesh, slice(piece * length, (piece + 1) * length))
                linear.__class__ = FusedGroupedSharedLinear
            else:
                self.style._apply(linear, device_mesh)
                linear.__class__ = FusedGroupedLinear
            for key, each in own.items():
                setattr(linear, key, made.setdefault((id(each), pieces < num_ranks), getattr(linear, key)))
            linear.together = together
            together.linears.append(linear)
        # After a call that uses only some linears, drop the results of the others.
        module.register_forward_hook(partial(_clear, together), always_call=True)
        return module

    def _check_pieces(self, name: str, rows: int, num_ranks: int) -> None:
        count, output, is_local = self.pieces[name], self.style.output_layouts, self.style.use_local_output
        if num_ranks % count and count % num_ranks:
            raise ValueError(f"pieces of {name!r}: {count} pieces and {num_ranks} ranks, neither is a multiple")
        if rows % count:
            raise ValueError(f"pieces of {name!r}: {rows} rows cannot be cut into {count} pieces of one length")
        if count < num_ranks and not (is_local and output == Shard(-1)):
            # DTensor has no layout in which several ranks have the same piece.
            raise ValueError(
                f"pieces of {name!r}: {count}, fewer than {num_ranks} ranks, need output_layouts Shard(-1) and "
                f"use_local_output True, got {output!r} and {is_local}"
            )

    def __repr__(self) -> str:
        pieces = f"pieces={self.pieces}, " if self.pieces else ""
        return f"FusedGroup({', '.join(map(repr, self.names))}, {pieces}style={self.style!r})"


def _clear(together: _Together, module: nn.Module, args: Any, output: Any) -> None:
    together.clear()


def is_conv1d(module: nn.Module) -> bool:
    """Return whether the module is Hugging Face's Conv1D, a linear with the weight [in, out]."""
    return type(module).__name__ == "Conv1D" and {"nf", "nx"} <= vars(module).keys()


def features(module: nn.Module) -> int:
    """Return the number of output features of a linear or a Conv1D."""
    made: Any = module.nf if is_conv1d(module) else module.out_features
    return int(made)


class Unpacked(nn.Module):
    """The class of a packed linear that was taken apart: its `parts` are nn.Linear, whose results are concatenated.

    In a state_dict the parts have entries of their own, such as `parts.0.weight`. Loading takes an entry under the
    linear's own name apart.
    """

    parts: nn.ModuleList
    # True if the packed linear was a Conv1D.
    transposed: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., features]: all parts' features that this rank has."""
        outs = [part(x) for part in self.parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            if (whole := state_dict.pop(f"{prefix}{name}", None)) is not None:
                rows = whole.t() if self.transposed and whole.ndim == 2 else whole
                for i, own in enumerate(rows.split([features(each) for each in self.parts])):
                    here: Any = self.parts[i]._parameters[name]
                    if isinstance(here, DTensor) and not isinstance(own, DTensor) and own.shape == here.shape:
                        own = part_of(own, here)
                    state_dict[f"{prefix}parts.{i}.{name}"] = own
        super()._load_from_state_dict(state_dict, prefix, *args)


def joined(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a whole state with the names and shapes that parameters had before `Unpack`."""
    state = dict(state)
    for name, module in model.named_modules():
        if isinstance(module, Unpacked):
            for of in ("weight", "bias"):
                keys = [f"{name}.parts.{i}.{of}" for i in range(len(module.parts))]
                if parts := [state.pop(key) for key in keys if key in state]:
                    whole = torch.cat(parts)
                    state[f"{name}.{of}"] = whole.t().contiguous() if module.transposed and whole.ndim == 2 else whole
    return state


class Unpack(ParallelStyle):
    """Style that takes an nn.Linear or a Conv1D apart into linears with these numbers of output features."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = tuple(lengths)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight, bias = module._parameters.pop("weight"), module._parameters.pop("bias")
        assert weight is not None
        rows, parts = weight.t() if is_conv1d(module) else weight, []
        begin = 0
        for length in self.lengths:
            part = nn.Linear(rows.shape[1], length, bias is not None, device="meta")
            for name, whole in (("weight", rows), ("bias", bias)):
                if whole is not None:
                    own = whole.detach()[begin : begin + length].clone(memory_format=torch.contiguous_format)
                    part._parameters[name] = nn.Parameter(own, requires_grad=whole.requires_grad)
            parts.append(part)
            begin += length
        made: Any = module
        made.transposed = is_conv1d(module)
        made.__class__ = Unpacked
        made.parts = nn.ModuleList(parts)
        return module

    def __repr__(self) -> str:
        return f"Unpack({', '.join(map(str, self.lengths))})"
