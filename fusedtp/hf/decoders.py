"""Split a Hugging Face decoder over the ranks of a mesh: choose the style of each module.

    fusedtp.parallelize(model, mesh["tp"])

The choice follows from the model itself:

- layers: the modules of the class in `_no_split_modules`
- linears: those in the layers that the model's own tensor-parallel plan splits by columns or by rows
- last norm: the module beside the layers that has parameters and is no embedding

With sequence parallelism hidden states are DTensors, Shard(1), between the linears. Each rank normalizes and adds its
own tokens, but the code of attention and MLP reads the shape of the whole. The first linears gather the tokens, the
last ones scatter their sums.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.utils.parametrize import is_parametrized

from .. import groups
from ..calls import arguments
from ..calls.parameters import same_as
from ..choose import dispatch
from ..op import ANY_ORDER, RANK_ORDER, Options, Order
from ..scaled import Float8
from ..shards import chunk_sizes
from ..styles.embeddings import FusedEmbeddingParallel
from ..styles.grouped import FusedGroup, Unpack, features, is_conv1d, joined
from ..styles.linears import (
    TOKENS,
    FusedColwiseParallel,
    FusedRowwiseParallel,
    Tokens,
    check_mesh,
    held_by_others,
    unfit,
)
from ..styles.norms import AsGiven, FusedNormParallel
from . import lora, meta
from .inputs import CompareInputs, compare_given
from .stack import (
    OWN_PLAN,
    PLANS,
    QKV,
    Decoder,
    check_alike,
    check_own,
    check_split_tokens,
    decoder_of,
    has_own,
    is_norm,
)
from .tokens import (
    DrawWhole,
    Heads,
    Hooks,
    KeptLogits,
    SplitFeatures,
    SplitTokens,
    TiedHead,
    WholeOutput,
    WholeTokens,
)

# What `save_pretrained` writes into a config, perhaps on one rank.
_WRITTEN = ("architectures", "transformers_version")


def model_given(model: nn.Module) -> dict[str, str]:
    """Return the values that all ranks must share: dtype and shape of every parameter, and the values of `config`."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return {
        name: f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}{' on meta' * each.is_meta}"
        for name, each in model.named_parameters(remove_duplicate=False)
    } | {f"config.{name}": repr(value) for name, value in values.items() if name[:1] != "_" and name not in _WRITTEN}


# `parallelize` warns if a larger share of the bytes stays whole.
_TOLD = 0.1


def _called(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    # The children that a layer calls. A list is not called itself: its members count instead.
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


class _Planner:
    # Writes the plan of a decoder: styles by module name, to be applied in order.
    # linears: options for the linears of attention and MLPs.
    def __init__(
        self, decoder: Decoder, num_ranks: int, split_tokens: bool, split_logits: bool, linears: dict[str, Any]
    ) -> None:
        self._of, self._ranks, self._linears = decoder, num_ranks, linears
        self._schedule, self._order = linears["schedule"], linears["order"]
        self._split_tokens, self._split_logits = split_tokens, split_logits
        self._tokens: Placement = TOKENS if split_tokens else Replicate()
        # True if the modules after the layers need whole hidden states, as in one process.
        self._ends_whole = split_tokens and (decoder.kind in PLANS or bool(decoder.beside()))
        self.plan: dict[str, list[ParallelStyle]] = {}

    def _add(self, name: str, *styles: ParallelStyle) -> None:
        self.plan.setdefault(name, []).extend(styles)

    def _norm(self, use_local_output: bool = False) -> ParallelStyle:
        return FusedNormParallel(use_local_output=use_local_output, schedule=self._schedule)

    def write(self) -> dict[str, list[ParallelStyle]]:
        """Write the whole plan."""
        of = self._of
        check_alike(of)
        self._embedding()
        every = f"{of.layers}.*"
        for name, child in _called(of.stack[0]):
            if any(True for _ in child.parameters()):
                self._child(f"{every}.{name}", name, child)
        if self._split_tokens:
            for name, module in of.stack[0].named_modules():
                if type(module) is nn.Dropout:
                    self._add(f"{every}.{name}", AsGiven())
            # The last check: its remedy, sequence_parallel=False, helps only if the other checks pass.
            check_split_tokens(of)
            self._add(f"{of.layers}.0", SplitTokens())
            self._add(every, DrawWhole())
            if of.head is not None and not self._ends_whole:
                self._add("", KeptLogits())
            self._last_norm()
        self._head()
        return self.plan

    def _child(self, path: str, name: str, child: nn.Module) -> None:
        # child: an attention, an MLP, a norm, or a module that is not split.
        of = self._of

        def own(names: Sequence[str]) -> list[str]:
            inside = [each for each, _ in child.named_modules(prefix=name)]
            matched = [each for full in names for each in inside if fnmatch.fnmatchcase(each, full)]
            return [each.removeprefix(f"{name}.") for each in matched]

        columns, rows = own(of.columns), own(of.rows)
        if is_norm(child):
            if self._split_tokens:
                self._add(path, self._norm())
        elif columns and rows and not own(of.latent):
            self._check_linears(name, (*columns, *rows))
            self._block(path, child, columns, rows)
        elif self._split_tokens:
            self._add(path, WholeTokens())

    def _check_linears(self, child: str, names: Sequence[str]) -> None:
        for i, layer in enumerate(self._of.stack):
            if getattr(layer.get_submodule(child), "activation_sparsity", 0) > 0:
                # Gemma3n: features below a quantile of all are dropped.
                raise NotImplementedError(
                    f"parallelize splits the features of {self._of.layers}.{i}.{child}, and its activation_sparsity "
                    "needs all of them"
                )
            for name in names:
                linear = layer.get_submodule(f"{child}.{name}")
                if reason := "" if is_conv1d(linear) and not is_parametrized(linear) else unfit(linear):
                    raise NotImplementedError(
                        f"parallelize splits nn.Linear, and {self._of.layers}.{i}.{child}.{name} is {reason}"
                    )

    def _check_even(self, path: str, length: int) -> None:
        # A tree's leaves are alike on every rank.
        if arguments.leaves_in(self._order) > 0:
            sizes = chunk_sizes(length, self._ranks)
            arguments.check_even(self._order, sizes, f"parts of the {length} features of {path}")

    def _block(self, path: str, child: nn.Module, columns: list[str], rows: list[str]) -> None:
        # Split a block's linears: first ones by columns, last ones by rows.
        heads = self._heads(path, child)
        widths = {features(child.get_submodule(name)) for name in columns}
        check_own(path, child, {*widths, *(heads or ())})
        column = {"input_layouts": self._tokens, **self._linears}
        row = {"output_layouts": self._tokens, "use_local_output": not self._split_tokens, **self._linears}
        parts: list[str] = []
        pieces: dict[str, int] = {}
        for name in columns:
            lengths, counts = self._parts(f"{path}.{name}", child.get_submodule(name), child, heads)
            for length in lengths:
                self._check_even(f"{path}.{name}", length)
            names = [name]
            if len(lengths) > 1 or is_conv1d(child.get_submodule(name)):
                self._add(f"{path}.{name}", Unpack(lengths))
                names = [f"{name}.parts.{i}" for i in range(len(lengths))]
            parts += names
            pieces |= {each: count for each, count in zip(names, counts, strict=True) if count < self._ranks}
        if len(parts) > 1:
            self._add(path, FusedGroup(*parts, pieces=pieces, **column))
        else:
            self._add(f"{path}.{parts[0]}", FusedColwiseParallel(**column))
        for name in rows:
            linear = child.get_submodule(name)
            if is_conv1d(linear):
                self._add(f"{path}.{name}", Unpack([features(linear)]))
                name = f"{name}.parts.0"
            self._add(f"{path}.{name}", FusedRowwiseParallel(**row))
        if heads is not None:
            queries, keys = heads
            self._add(path, Heads(queries // self._ranks, max(1, keys // self._ranks)))
        known = {*columns, *rows}
        for name, module in child.named_modules():
            if name and name not in known and has_own(module):
                self._add(f"{path}.{name}", self._inner(f"{path}.{name}", module, child, pieces))

    def _parts(
        self, path: str, linear: nn.Module, child: nn.Module, heads: tuple[int, int] | None
    ) -> tuple[list[int], list[int]]:
        # The features of each part that is packed in a linear, and how many pieces each part may be cut into.
        name, whole, many = path.rpartition(".")[2], features(linear), self._ranks
        if heads is None:
            return ([whole // 2] * 2, [many] * 2) if name == "gate_up_proj" else ([whole], [many])
        queries, keys = heads
        per_head: int = getattr(child, "head_dim", 0) or getattr(child, "head_size", 0)
        if name in ("qkv_proj", "c_attn"):
            lengths = [queries * per_head, keys * per_head, keys * per_head]
            if self._of.kind not in QKV or sum(lengths) != whole:
                raise NotImplementedError(f"parallelize does not know what the {whole} features of {path} are")
            return lengths, [queries, keys, keys]
        return [whole], [keys if name in ("k_proj", "v_proj") else queries]

    def _inner(self, path: str, module: nn.Module, child: nn.Module, pieces: Mapping[str, int]) -> ParallelStyle:
        # Style of a norm of queries or keys: over one head's features, with one weight for all heads or one for each,
        # or over all features of its linear.
        config: Any = getattr(child, "config", None)
        head = getattr(child, "head_dim", None)
        shapes = {tuple(parameter.shape) for parameter in module.parameters()}
        lengths = {parameter.numel() for parameter in module.parameters()}
        known = is_norm(module)
        if known and lengths == {head}:
            return self._norm(use_local_output=True)
        linear = path.rpartition(".")[2].replace("_norm", "_proj")
        whole = getattr(getattr(child, linear, None), "out_features", None)
        if known and config is not None and lengths == {whole}:
            if linear in pieces:
                raise NotImplementedError(
                    f"parallelize splits {path} with the heads of {linear}, of which there are {pieces[linear]}, fewer "
                    f"than {self._ranks} ranks"
                )
            if self._order not in (RANK_ORDER, ANY_ORDER):
                raise NotImplementedError(
                    f"parallelize: order {self._order!r} is not kept by {path}, a norm over features that "
                    "ranks share, whose sums are added in the order of ranks"
                )
            if shapes == {(whole,)}:
                return SplitFeatures()
            if head is not None and shapes == {(min(lengths) // head, head)}:
                return SplitFeatures(-2)
        raise NotImplementedError(
            f"parallelize does not know what to do with {path}, {type(module).__name__} with parameters of "
            f"{sorted(lengths)} elements, which stands in one module with linears that are split. {OWN_PLAN}"
        )

    def _heads(self, path: str, child: nn.Module) -> tuple[int, int] | None:
        # The number of query heads, and of key and value heads, which are not cut; None for an MLP.
        config: Any = getattr(child, "config", None)
        queries, kind = getattr(config, "num_attention_heads", None), type(child).__name__
        if (is_attention := hasattr(child, "scaling")) != ("attention" in kind.lower()):
            raise NotImplementedError(
                f"parallelize does not know whether {path}, {kind}, is an attention: it has "
                f"{'a' if is_attention else 'no'} scaling. {OWN_PLAN}"
            )
        if not is_attention:
            return None
        if queries is None:
            raise NotImplementedError(f"parallelize finds no num_attention_heads in the config of {path}, {kind}")
        if queries % self._ranks:
            raise ValueError(f"{path}: {queries} attention heads cannot be shared out evenly over {self._ranks} ranks")
        keys = getattr(config, "num_key_value_heads", None) or queries
        if keys % self._ranks and self._ranks % keys:
            raise ValueError(f"{path}: {keys} key and value heads and {self._ranks} ranks, neither is a multiple")
        return queries, keys

    def _last_norm(self) -> None:
        of = self._of
        candidates = {
            name: child for name, child in of.base.named_children()
            if not isinstance(child, nn.Embedding | nn.ModuleList) and any(True for _ in child.parameters())
        }  # fmt: skip
        if len(candidates) != 1 or not all(map(is_norm, candidates.values())):
            raise NotImplementedError(
                f"parallelize looks for one norm with parameters beside the layers of {type(of.base).__name__}, it has "
                f"{', '.join(candidates) or 'none'}: pass sequence_parallel=False"
            )
        (name,) = map(of.named, candidates)
        self._add(name, self._norm())
        if self._ends_whole:
            self._add(name, WholeOutput())

    def _embedding(self) -> None:
        model: Any = self._of.model
        embedding = model.get_input_embeddings()
        (name,) = [name for name, each in model.named_modules() if each is embedding]
        self._add(name, FusedEmbeddingParallel(schedule=self._schedule))

    def _head(self) -> None:
        model: Any = self._of.model
        head: Any = self._of.head
        if head is None:
            return
        (name,) = [name for name, each in model.named_modules() if each is head]
        if reason := unfit(head):
            raise NotImplementedError(f"parallelize splits an nn.Linear, and {name} is {reason}")
        self._check_even(name, head.out_features)
        embedding = model.get_input_embeddings()
        output: dict[str, Any] = {"output_layouts": Replicate()}
        if self._split_logits:
            output = {"output_layouts": Shard(-1), "use_local_output": False}
        tokens = Replicate() if self._ends_whole else self._tokens
        style = FusedColwiseParallel(input_layouts=tokens, **output, schedule=self._schedule, order=self._order)
        tied = embedding is not None and embedding.weight is head.weight
        self._add(name, TiedHead(style, embedding) if tied else style)


def decoder_plan(
    model: nn.Module, num_ranks: int, *, sequence_parallel: bool = True, loss_parallel: bool = False,
    schedule: str = "auto", float8: Float8 | None = None, order: Order = RANK_ORDER,
) -> dict[str, list[ParallelStyle]]:  # fmt: skip
    """Return the plan that `parallelize` applies: styles by module name, in which * stands for any one name.

    Names are those in the model without adapters. The options are those of `parallelize`. Raises NotImplementedError
    for a model that is no decoder as described above, and ValueError if its heads cannot be divided over the ranks, or
    with order "tree" its features into equal parts. Both name the module.
    """
    split = arguments.flag("sequence_parallel", sequence_parallel)
    dispatch.check_schedule(schedule)
    split_logits = arguments.flag("loss_parallel", loss_parallel)
    decoder = lora.model_of(model)
    dtype = next((each.dtype for each in decoder.parameters()), None)
    recipe = arguments.float8_of(float8, dtype, "parameters")
    arguments.leaves_of(Options(schedule, float8=recipe, order=order), num_ranks, dtype)
    if dtensor := next((name for name, each in decoder.named_parameters() if isinstance(each, DTensor)), None):
        raise NotImplementedError(
            f"parallelize splits a model that every rank has whole, and {dtensor} of this {type(decoder).__name__} is "
            "a DTensor: it has been split before, by parallelize, by transformers (tp_plan, distributed_config), by "
            "parallelize_module or by fully_shard. Load the model without that, and call parallelize first"
        )
    linears = {"schedule": schedule, "float8": recipe, "order": order}
    with lora.taken_off(decoder) as adapted:
        plan = _Planner(decoder_of(decoder), num_ranks, split, split_logits, linears).write()
        _check_ties(decoder, plan)
        lora.check(model, adapted, styled(decoder, plan))
    return plan


def _check_ties(model: nn.Module, plan: Mapping[str, Sequence[ParallelStyle]]) -> None:
    # A parameter with several names can stay one only if it is laid out alike under each name. The plan tells.
    ties = meta.ties(model)
    lies: dict[int, list[str]] = {}
    for pattern, styles in plan.items():
        for style in styles:
            by_pattern: dict[str, tuple[ParallelStyle, int | None]] = {pattern: (style, None)}
            if isinstance(style, FusedGroup):
                by_pattern = {f"{pattern}.{name}": (style.style, style.pieces.get(name)) for name in style.names}
            for name, (of, pieces) in by_pattern.items():
                of = of.style if isinstance(of, TiedHead) else of
                kind = "rows" if isinstance(of, FusedEmbeddingParallel | FusedColwiseParallel) else type(of).__name__
                for _, module in () if isinstance(of, Hooks | Heads) else matching(model, name):
                    lies.setdefault(id(module), []).append(f"{kind} {pieces}")
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name in module._parameters if id(module) in lies else ():
            parameter = module._parameters[name]
            if parameter is not None and held_by_others(parameter, modules.values()):
                raise NotImplementedError(
                    f"parallelize splits {path}.{name}, which a module outside this {type(model).__name__} has too and "
                    "would keep whole, as a parameter of its own: give parallelize the model that has both"
                )
    for names in ties:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        layouts = {(own, *lies.get(id(module), [])) for module, own in owners}
        if len(layouts) > 1 or f"{Unpack.__name__} None" in next(iter(layouts)):
            raise NotImplementedError(
                f"parallelize keeps a parameter that several modules share where all of them are split alike, and "
                f"{', '.join(names)}, one parameter, are not: give each its own"
            )


def parallelize(
    model: nn.Module, device_mesh: DeviceMesh, *, sequence_parallel: bool = True, loss_parallel: bool = False,
    schedule: str = "auto", float8: Float8 | None = None, order: Order = RANK_ORDER,
    src_data_rank: int | None = 0, compare_inputs: bool = True,
) -> nn.Module:  # fmt: skip
    """Split a Hugging Face decoder over a 1-D mesh, in place.

    Attention is split by heads, MLPs by features, embedding and head by vocabulary.

    - `sequence_parallel`: split tokens between the linears. The matmuls then gather and reduce-scatter in place of
      all-reduces. Any number of tokens works. A call without gradients that has fewer tokens than ranks splits none.
    - `loss_parallel`: logits stay DTensors split by vocabulary, for torch.distributed.tensor.parallel.loss_parallel.
    - `schedule`: of every matmul, as in the functions.
    - `float8`: recipe for the linears of attention and MLPs. Embedding and head are not cast.
    - `order`: rank, any or tree. any: NVLink's switch adds if it can (docs/guide/switch.md). tree: results of linears
      have the same bits on any number of ranks, and so have logits, as far as the model's own code between linears
      works by element or by row (exceptions on CPUs: docs/guide/order.md). Gradients have the same bits too, with two
      exceptions that are added in rank order: those of norms, and, if ranks share key and value heads, those before
      such heads.
    - `src_data_rank`: rank whose parameters and buffers all ranks get. None: all ranks have the same.
    - `compare_inputs`: compare the ranks' tokens, masks and labels in the first two calls and every 64th, and raise
      RanksDisagree on every rank if they differ. Calls under torch.compile or in a CUDA graph are not compared.

    Call the model as before, with the same inputs on every rank. By default it returns whole logits. Split parameters
    become DTensors and keep their names, except packed ones: each of their parts has its own name. If more than a tenth
    of the bytes stays whole on every rank, the first rank warns and names the modules.

    Raises, before anything is changed, the errors of `decoder_plan`; RanksDisagree, on every rank, if ranks have
    different models or options; PeerTimeout if a rank does not come within the group's timeout or the time that
    `set_timeout` allows the group.
    """
    check_mesh(device_mesh)
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel, "schedule": schedule,
        "float8": float8, "order": order,
    }  # fmt: skip
    compares = arguments.flag("compare_inputs", compare_inputs)
    others = {"src_data_rank": src_data_rank, "compare_inputs": compares}
    compared = {name: repr(value) for name, value in {**options, **others}.items()}
    compared = {"model": type(model).__name__, **compared}
    try:
        plan = decoder_plan(model, device_mesh.size(), **options)
        lasting = meta.rebuilt(model)
    except Exception as error:
        # Tell the other ranks, which would wait for this one.
        compare_given(device_mesh.get_group(), {**compared, "plan": f"refused, {error}"}, "parallelize")
        raise
    planned = {f"the plan of {pattern}": repr(styles) for pattern, styles in plan.items()}
    # Without this, a style's first scatter of parameters would wait for the group's timeout if a rank has other
    # parameters, or none.
    compared = {**compared, "plan": "made", **planned, **model_given(model)}
    compare_given(device_mesh.get_group(), compared, "parallelize")
    if meta.is_on_meta(model):
        meta.keep(model, lasting, device_mesh.device_type)
    decoder = lora.model_of(model)
    with lora.taken_off(decoder) as adapted:
        left = whole(decoder, plan)
        if sum(left.values()) > _TOLD and device_mesh.size() > 1 and device_mesh.get_local_rank() == 0:
            advice = "fusedtp.use_in_transformers() splits experts and latent attention (docs/guide/transformers.md)"
            warnings.warn(f"parallelize leaves {told(left)}. {advice}", stacklevel=2)
        tied, tokens = meta.ties(decoder), Tokens() if sequence_parallel else None
        for pattern, styles in plan.items():
            for name, module in list(matching(decoder, pattern)):
                for each in (module, *lora.copies(adapted.get(name))):
                    for style in styles:
                        attributes = {"src_data_rank": src_data_rank, "keeps_ties": True, "tokens": tokens}
                        vars(style).update(attributes)
                        style._apply(each, device_mesh)
        meta.tie(decoder, tied)
    for module in adapted.values():
        lora.split(module, device_mesh, src_data_rank)
    for module in model.modules():
        for name, instead in {**_REPLACED, **({"generate": _generate} if loss_parallel else {})}.items():
            if hasattr(type(module), name):
                setattr(module, name, partial(instead, module))
    group = device_mesh.get_group()
    if compares and group.size() > 1 and not groups.is_fake(group):
        decoder.register_forward_pre_hook(CompareInputs(device_mesh, schedule), with_kwargs=True, prepend=True)
    model._ddp_params_and_buffers_to_ignore = _RefuseDDP()  # type: ignore[assignment]
    if src_data_rank is not None:
        # Tensors that no style has made DTensors: every rank gets those of `src_data_rank`.
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor):
                same_as(src_data_rank, tensor, device_mesh)
    return model


class _RefuseDDP:
    # DistributedDataParallel reads the names of a model's parameters that it leaves alone before it does anything.

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError(
            "DistributedDataParallel takes no model that fusedtp.parallelize has split: it would average the parts of "
            "different ranks. Ranks of the mesh need no wrapper, their gradients are whole. For more data-parallel "
            "ranks, give parallelize one dim of a 2-D mesh, and fully_shard the other (docs/guide/training.md)"
        )


def _save(model: Any, *args: Any, state_dict: Mapping[str, Any] | None = None, **options: Any) -> Any:
    # With this rank's shards, transformers would write a configuration and fail at the weights.
    if state_dict is None or any(isinstance(each, DTensor) for each in state_dict.values()):
        raise NotImplementedError(
            f"save_pretrained of this {type(model).__name__}, which parallelize has split, takes the whole state: on "
            "every rank, with torch.distributed.checkpoint.state_dict, state = get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), then on one rank "
            "model.save_pretrained(folder, state_dict=state)"
        )
    with lora.only_asked():
        return type(model).save_pretrained(model, *args, state_dict=joined(model, state_dict), **options)


def _resize(model: Any, *args: Any, **options: Any) -> Any:
    name = type(model).__name__
    raise NotImplementedError(f"parallelize has split the embeddings of this {name}: resize them before parallelize")


def _generate(model: Any, *args: Any, **options: Any) -> Any:
    raise NotImplementedError(
        f"generate of this {type(model).__name__} needs whole logits: call parallelize without loss_parallel"
    )


# Methods of transformers and peft, and the functions that replace them on a split model.
_REPLACED: Mapping[str, Callable[..., Any]] = {
    "save_pretrained": _save, "resize_token_embeddings": _resize,
    **{name: partial(lora.unload, name) for name in ("unload", "merge_and_unload")},
    "_enable_peft_forward_hooks": lora.with_adapter_names,
    "add_weighted_adapter": lora.add_weighted_adapter,
}  # fmt: skip


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a plan's pattern matches, with their names."""
    depth = pattern.count(".")
    for name, module in model.named_modules():
        if name.count(".") == depth and fnmatch.fnmatchcase(name, pattern):
            yield name, module


def styled(model: nn.Module, plan: Mapping[str, Sequence[ParallelStyle]]) -> dict[str, list[ParallelStyle]]:
    """Return a plan's styles by the name of the module that they apply to."""
    by_name: dict[str, list[ParallelStyle]] = {}
    for pattern, styles in plan.items():
        for style in styles:
            names = [f"{pattern}.{name}" for name in style.names] if isinstance(style, FusedGroup) else [pattern]
            for each in names:
                for name, _ in matching(model, each):
                    by_name.setdefault(name, []).append(style)
    return by_name


def whole(model: nn.Module, plan: Mapping[str, Sequence[ParallelStyle]]) -> dict[str, float]:
    """Return the modules that keep whole parameters of their own under a plan, and their share of the model's bytes.

    Linears with fewer pieces than ranks, such as key and value heads, are among them. The same module of all layers has
    one entry, with * for the layer's number.
    """
    planned = styled(model, plan)
    layers = decoder_of(model).layers
    total, left = sum(each.nbytes for each in model.parameters()), dict[str, float]()
    for name, module in model.named_modules():
        if name not in planned and has_own(module):
            pattern = re.sub(rf"^{re.escape(layers)}\.\d+\.", f"{layers}.*.", name)
            bytes_of = sum(each.nbytes for each in module.parameters(recurse=False))
            left[pattern] = left.get(pattern, 0) + bytes_of / total
    for pattern, styles in plan.items():
        for name in (each for style in styles if isinstance(style, FusedGroup) for each in style.pieces):
            # A part of a packed linear is not made yet.
            linear, _, part = name.partition(".parts.")
            path = f"{pattern}.{linear}"
            lengths = [each.lengths for each in plan.get(path, ()) if part and isinstance(each, Unpack)]
            share = lengths[0][int(part)] / sum(lengths[0]) if lengths else 1.0
            bytes_of = sum(each.nbytes for _, module in matching(model, path) for each in module.parameters())
            left[f"{pattern}.{name}"] = share * bytes_of / total
    return left


def told(left: Mapping[str, float]) -> str:
    """Return in words which modules stay whole on every rank."""
    return f"whole on every rank, {sum(left.values()):.0%} of the bytes: {', '.join(left)}"
