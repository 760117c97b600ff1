"""Group of linears that take the same input, with one gather for all of them; the module's own code does not change."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..scaled import check_dense
from .linears import FusedColwiseLinear, FusedColwiseParallel, columns, warn_of_ties
from .shared import FusedSharedLinear, replicate, share


class _Together:
    # The linears of a FusedGroup, and the last input's results for linears that have not been called with it yet.
    def __init__(self) -> None:
        self.linears: list[FusedGroupedLinear] = []
        self.clear()

    def clear(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._outs: dict[FusedGroupedLinear, Tensor] = {}

    def take(self, linear: FusedGroupedLinear, input: Tensor) -> Tensor:
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and input.is_inference():
            # A tensor of inference mode counts no changes, so it may have changed since.
            (out,) = columns([linear], input)
            return out
        # Results are kept for the same tensors, with the same versions, used in the same way; a compiler knows no
        # versions. The objects are held, as their ids could be reused otherwise.
        held = [input, *(each for linear in self.linears for each in (linear.weight, linear.bias) if each is not None)]
        device = input.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        how: list[Any] = [torch.is_grad_enabled(), autocast]
        if not is_compiling:
            how += torch.is_inference_mode_enabled(), *map(_state, held)
        known = self._key is not None and self._key[0][0] is input and self._key[1] == how
        if not known or linear not in self._outs:
            self._key, self._outs = (held, how), dict(zip(self.linears, columns(self.linears, input), strict=True))
        out = self._outs.pop(linear)
        if not self._outs:
            self.clear()
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> _Together:
        made = memo[id(self)] = _Together()
        made.linears = copy.deepcopy(self.linears, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"linears": self.linears, "_key": None, "_outs": {}}


def _state(tensor: Tensor) -> tuple[Any, ...]:
    # A DTensor's local part may be changed without the DTensor.
    mine = getattr(tensor, "_local_tensor", tensor)
    changes = tuple(-1 if each.is_inference() else each._version for each in (tensor, mine))
    return id(tensor), id(mine), tensor.requires_grad, changes


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
    - `options`: those of FusedColwiseParallel.

    The module's code is unchanged and sees its input as given: x.shape of a plain shard is this rank's part, of a
    DTensor the whole. The first linear that the module calls with an input computes all of them, the others take their
    results. Calls with different inputs, or of only some linears, are right too, but compute more than is used. In
    backward the gradients of the input are added before they are scattered, once.

    Under torch.compile an input must not be changed in place between the calls of a group. Tensors made under
    torch.inference_mode count no changes, so each linear gathers them for itself. torch.no_grad has one gather for all.
    """

    keeps_ties = False

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

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears: list[Any] = []
        for name in self.names:
            try:
                linears.append(module.get_submodule(name))
            except AttributeError as error:
                raise ValueError(f"{type(module).__name__} has no {name!r}, which is to be in a {self!r}") from error
        if len({id(each) for each in linears}) < len(linears):
            raise ValueError(f"a FusedGroup is of different linears: {', '.join(self.names)} are not")
        self.style.src_data_rank = self.src_data_rank
        together = _Together()
        for linear in linears:
            self.style.check(linear, device_mesh)
        # Parameters that several linears share stay one. Ties to other modules are looked for before `given` refers to
        # the parameters: what nobody else refers to needs no search.
        ids = Counter(id(each) for linear in linears for each in linear.parameters())
        if not self.keeps_ties:
            for linear in linears:
                if all(ids[id(each)] == 1 for each in linear.parameters()):
                    warn_of_ties(linear, type(self.style).__name__)
        self.style.keeps_ties = True
        given = [dict(linear.named_parameters()) for linear in linears]
        made: dict[tuple[int, bool], nn.Parameter] = {}
        for name, linear, own in zip(self.names, linears, given, strict=True):
            pieces, num_ranks = self.pieces.get(name, device_mesh.size()), device_mesh.size()
            if pieces < num_ranks:
                replicate(linear, device_mesh, self.src_data_rank)
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
        module.register_forward_hook(_Clear(together), always_call=True)
        return module

    def __repr__(self) -> str:
        pieces = f"pieces={self.pieces}, " if self.pieces else ""
        return f"FusedGroup({', '.join(map(repr, self.names))}, {pieces}style={self.style!r})"


class _Clear:
    def __init__(self, together: _Together) -> None:
        self._together = together

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._together.clear()
