"""Check the arguments of the linear functions and layers, and describe each call by settings and numbers for `call`.

Each function has one check, which runs once for equal calls, and when a compiler traces a graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..epilogue import NO_EPILOGUE, NORM, OPERANDS, Epilogue
from ..op import ANY_ORDER, MATMUL_ALL_REDUCE, RANK_ORDER, Options
from ..torch_private import constant_in_graphs
from . import arguments
from .arguments import Weights

# Size of the cache of calls.
MAX_CALLS = 4096


class Settings(NamedTuple):
    """Settings of a call: everything except its tensors and lengths. A compiler can trace all but `of`.

    - `spec`: the call in the notation of `sharding.notation`.
    - `group_names`: one for each mesh axis, in the spec's order.
    - `ranks`: this rank's number in each group. Uneven shapes depend on it, and it keeps a rank from using another
      rank's compiled graph from a cache.
    - `w_transposed`: whether w is stored [N, K].
    - `by_size`: whether the plan depends on bytes and FLOPs.
    - `epilogue`: without operands, which have their names among the call's tensors.
    - `leaves`: leaves of the tree order of contractions, 0 for rank order, `op.AS_ANY` for any order.
    - `dtypes`: names of the dtypes of x, w and the results, if x and w are float8 with scales.
    - `blocks`: whether scales are block scales.
    """

    spec: str
    group_names: tuple[str, ...]
    ranks: tuple[int, ...]
    options: Options = Options()
    w_transposed: bool = True
    by_size: bool = False
    epilogue: Epilogue = NO_EPILOGUE
    leaves: int = 0
    dtypes: tuple[str, ...] = ()
    blocks: bool = False

    @property
    def out_dtype(self) -> torch.dtype | None:
        """Return the dtype of the results of float8 operands with scales."""
        return getattr(torch, self.dtypes[2]) if self.dtypes else None

    @property
    def splits_rows(self) -> bool:
        """Return whether a layer's result is split over the ranks; with a norm only its rows can be."""
        return "_X" in self.spec.split("->")[1]

    def to_handle(self) -> int:
        """Return the settings as an integer, for a registered operator: a hash, the same in every process.

        It registers the settings in this process, where `of` returns them. A graph that was compiled in another process
        comes from a cache only after the compiler has traced the call, and so registered the settings, in this one.
        """
        # The compiler runs `_registered` itself, with constants. It would give it empty named tuples.
        plain: Any = {"options": (*self.options,), "epilogue": (*self.epilogue,)}
        handle: int = _registered(*self._replace(**plain))
        return handle

    @staticmethod
    def of(handle: int) -> Settings:
        """Return the settings with this handle; RuntimeError if this process has not registered them."""
        settings = _known.get(handle)
        if settings is None:
            raise RuntimeError(
                f"a graph has a fusedtp call with the settings {handle}, which this process does not know: the graph "
                "was made in another process. Compile or export it in this one"
            )
        return settings


# Settings by handle. They stay as long as the process, because a graph may hold a handle.
_known: dict[int, Settings] = {}


@constant_in_graphs
def _registered(*fields: Any) -> int:
    settings = Settings(*fields)
    epilogue = Epilogue(*settings.epilogue)
    # Equal settings have one text: eps may be 0 or 0.0.
    settings = settings._replace(
        options=Options(*settings.options), epilogue=epilogue._replace(eps=float(epilogue.eps))
    )
    # An operator's integer has 64 bits and a sign.
    handle = int.from_bytes(hashlib.sha256(repr(settings).encode()).digest()[:8], "big") >> 1
    if _known.setdefault(handle, settings) != settings:
        raise RuntimeError(f"{settings} and {_known[handle]} have one hash: change an option of one of them")
    return handle


# The first arguments of `call.of`.
Described: TypeAlias = tuple[Settings, Sequence[int]]

# Features that x should have, for errors.
_ALL = "all features, [.., K]; a style gathers them from shards with input_layouts=Shard(-1)"
_OWN = "this rank's shard of the features, [.., K_X]; a style cuts a whole x with input_layouts=Replicate()"


def described(
    a: Tensor, b: Tensor, group: ProcessGroup, options: Options, settings: Settings, numbers: Sequence[int], *,
    epilogue: Epilogue,
) -> Described:  # fmt: skip
    """Return the settings and numbers of a call that the caller has checked."""
    return settings, numbers


def flat(splits: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return, for each dim, the number of its explicit lengths and then the lengths, in one tuple."""
    return tuple(number for split in splits for number in (len(split), *split))


def layer(
    x: Tensor, weight: Weights, spec: str, splits: Mapping[str, tuple[int, ...]], group: ProcessGroup, options: Options,
    epilogue: Epilogue,
) -> Described:  # fmt: skip
    """Return settings and numbers of a call with a spec over axis X, with the dims of `layer_spec`.

    `splits` has every rank's length of each split dim. Other dims have this rank's lengths.
    """
    # The spec is not parsed, because torch.compile cannot trace the parser.
    widths = [each.shape[0] for each in weight] if isinstance(weight, tuple) else []
    num_out = sum(widths) if isinstance(weight, tuple) else weight.shape[0]
    local = {f"R{i}": length for i, length in enumerate(x.shape[:-1])} | {"K": x.shape[-1], "N": num_out}
    lengths = [sum(splits[name]) if name in splits else local[name] for name in local]
    arguments.check_reach(options.schedule, x, [group], lengths)
    arguments.float8_of(options.float8, x.dtype, "x")
    leaves = arguments.leaves_of(options, group.size(), x.dtype)
    epilogue = epilogue.of_operands([None] * len(OPERANDS))
    settings = Settings(spec, (group.group_name,), (group.rank(),), options, epilogue=epilogue, leaves=leaves)
    return settings, (*lengths, *flat([splits.get(name, ()) for name in local]), *widths)


def layer_spec(x: Tensor, dim: int | None, contraction: str, weight: str, columns: str, *, x_split: bool) -> str:
    """Return a spec "[.., R1_X, .., K] @ .. -> ..", in which x (`x_split`) or the result is split along `dim`."""
    rows = [f"R{i}" for i in range(x.ndim - 1)]
    cut = [f"{name}_X" if i == dim else name for i, name in enumerate(rows)]
    before, after = (cut, rows) if x_split else (rows, cut)
    return f"[{', '.join((*before, contraction))}] @ [{weight}] -> [{', '.join((*after, columns))}]"


def _check_norm(epilogue: Epilogue, x: Tensor, length: int, *, dim: int | None = None) -> None:
    """Check a norm's parameters. A rank must have all columns of the result; `dim` is the scattered one."""
    if epilogue.norm is None:
        return
    if dim is not None and dim == x.ndim - 1:
        raise ValueError("a norm is of whole rows, of which a rank has a part with scatter_dim the last one")
    for name, each in epilogue.given(NORM).items():
        arguments.check_tensor(name, each, x)
        if tuple(each.shape) != (length,):
            raise ValueError(f"{name} must be [{length}], as many as weight has rows, got {tuple(each.shape)}")


def all_gather_problem(
    x: Tensor, weight: Weights, group: ProcessGroup, options: Options, gather_dim: int, sizes: Sequence[int] | None, *,
    epilogue: Epilogue,
) -> Described:  # fmt: skip
    """Check and describe a call of `all_gather_linear`."""
    arguments.check_linear(x, weight, epilogue, options)
    dim = arguments.dim("gather_dim", gather_dim, x)
    sizes = arguments.gather_sizes(sizes, group, x.shape[dim])
    on_features = dim == x.ndim - 1
    features = ("x has in all", sum(sizes)) if on_features else ("x has", x.shape[-1])
    num_out = arguments.check_features(*features, weight, _OWN if on_features else _ALL)
    arguments.check_activation(epilogue.activation, weight)
    splits = {"N": (num_out,) * group.size(), "K" if on_features else f"R{dim}": sizes}
    spec = layer_spec(x, None if on_features else dim, "K_X" if on_features else "K", "K, N_X", "N_X", x_split=True)
    return layer(x, weight, spec, splits, group, options, epilogue)


def reduce_scatter_problem(
    x: Tensor, weight: Tensor, group: ProcessGroup, options: Options, scatter_dim: int, sizes: Sequence[int] | None, *,
    epilogue: Epilogue,
) -> Described:  # fmt: skip
    """Check and describe a call of `linear_reduce_scatter`."""
    arguments.check_linear(x, weight, epilogue, options)
    arguments.check_features("x has", x.shape[-1], weight, _OWN)
    dim = arguments.dim("scatter_dim", scatter_dim, x)
    on_features = dim == x.ndim - 1
    sizes = arguments.scatter_sizes(sizes, group, weight.shape[0] if on_features else x.shape[dim])
    shape = [*x.shape[:-1], weight.shape[0]]
    shape[dim] = sizes[group.rank()]
    arguments.check_like_result(epilogue, x, shape)
    splits = {"K": (x.shape[-1],) * group.size(), "N" if on_features else f"R{dim}": sizes}
    spec = layer_spec(x, None if on_features else dim, "K_X", "K_X, N", "N_X" if on_features else "N", x_split=False)
    _check_norm(epilogue, x, weight.shape[0], dim=dim)
    if epilogue.norm is not None and options.order not in (RANK_ORDER, ANY_ORDER):
        raise ValueError(
            f"with order {options.order!r} the gradient of a norm whose rows ranks share would not be added up in that "
            "order: give no norm_weight, and norm the result"
        )
    return layer(x, weight, spec, splits, group, options, epilogue)


def all_reduce_problem(
    x: Tensor, weight: Tensor, group: ProcessGroup, options: Options, *, epilogue: Epilogue
) -> Described:
    """Check and describe a call of `linear_all_reduce`."""
    options = options._replace(producer="auto")
    arguments.check_linear(x, weight, epilogue, options)
    arguments.check_features("x has", x.shape[-1], weight, _OWN)
    arguments.check_algorithm(MATMUL_ALL_REDUCE, options, x)
    arguments.check_like_result(epilogue, x, [*x.shape[:-1], weight.shape[0]])
    splits = {"K": (x.shape[-1],) * group.size()}
    spec = layer_spec(x, None, "K_X", "K_X, N", "N", x_split=False)
    _check_norm(epilogue, x, weight.shape[0])
    return layer(x, weight, spec, splits, group, options, epilogue)


def fsdp_problem(
    x: Tensor, weight_shard: Tensor, group: ProcessGroup, options: Options, sizes: Sequence[int] | None, *,
    epilogue: Epilogue,
) -> Described:  # fmt: skip
    """Check and describe a call of `fsdp_linear`."""
    arguments.check_tensor("weight_shard", weight_shard)
    arguments.check_matrix(weight_shard, "weight_shard")
    sizes = arguments.gather_sizes(sizes, group, weight_shard.shape[0])
    arguments.check_linear(x, weight_shard, epilogue, options, num_out=sum(sizes), name="weight_shard")
    arguments.check_features("x has", x.shape[-1], weight_shard, "all features, [.., K]", "weight_shard")
    arguments.check_activation(epilogue.activation, weight_shard)
    splits = {"N": sizes, "R0": (x.shape[0],) * group.size()}
    spec = layer_spec(x, 0, "K", "K, N_X", "N", x_split=True).replace("-> [R0,", "-> [R0_X,")
    return layer(x, weight_shard, spec, splits, group, options, epilogue)


def replicated_problem(
    x: Tensor, weight: Weights, group: ProcessGroup, options: Options, *, epilogue: Epilogue
) -> Described:
    """Check and describe `F.linear` of an x that is whole on every rank and this rank's columns of a weight.

    x [..., K], weight [N_r, K], bias [N_r] -> [..., N_r]. Forward sends nothing. Backward all-reduces dx. Errors are
    those of `all_gather_linear`.
    """
    options = options._replace(producer="auto")
    arguments.check_linear(x, weight, epilogue, options)
    num_out = arguments.check_features("x has", x.shape[-1], weight, _ALL)
    arguments.check_activation(epilogue.activation, weight)
    splits = {"N": (num_out,) * group.size()}
    spec = layer_spec(x, None, "K", "K, N_X", "N_X", x_split=True)
    return layer(x, weight, spec, splits, group, options, epilogue)
