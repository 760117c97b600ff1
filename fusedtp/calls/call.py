"""A call: a sharded matmul on one rank, prepared once for all tensors of the same kind.

    y[M.., N] = x[M.., K] @ w[K, N]     forward   plan.forward, with the call's epilogue
    dx = dy @ w.T                       backward  plan.dx, if x needs a gradient
    dw = x.T @ dy                                 plan.dw, if w needs one
    db = sum of dy over its rows                  then over the ranks that hold other rows, if the bias needs one
    dresidual = dy                                the caller returns it

Forward and backward are programs (`program`). `BoundTask` binds a program's tasks to the group, the
schedule and its kernels in the first run.

A layer makes the same call at every step. Argument checks, planning and dispatch take longer than a small matmul, so
calls are cached in one table. The cache key is everything that was checked. An entry is valid until
`generation.version` changes.

Numbers of rows are no part of what a call is: serving and routed experts have new ones at every step. Calls that differ
in their rows alone share the checks, the plan and the programs of the first of them, and its schedule too unless `auto`
chooses another one for their size. Each takes its own lengths (`Call.at`), and the last `MAX_ROWS` of them are cached.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from .. import float8, groups
from ..choose import paths
from ..choose.dispatch import check_units
from ..epilogue import FIRST_OPTION, NO_EPILOGUE, Epilogue, numbered
from ..op import Options, Task
from ..schedules.local import reads_beside
from ..sharding.notation import Spec, parse
from ..sharding.plan import Partition, Plan, plan
from ..shards import even_sizes, offsets
from ..workspaces import generation
from .arguments import MANY, refuse_tracing
from .bound import MAX_ROWS, BoundTask
from .problems import MAX_CALLS, Described, Settings, flat
from .program import Named, Program, ProgramStep


class Call:
    """A call with these settings and lengths, in a dtype, on a device.

    `numbers` is a list of:

    - the global length of each dim, in the spec's order;
    - for each dim, the number of its explicit lengths, then those lengths;
    - with several weights, this rank's columns of each weight.
    """

    def __init__(
        self, settings: Settings, numbers: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        self.settings, self._dtype, self._device = settings, dtype, device
        self._formats = float8.native(device)
        spec = self._spec = parse(settings.spec)
        lengths, splits, self.widths = _read(spec, numbers)
        # Names: of the weights; of each w and its bias; of the products' gradients; of the products.
        count = max(1, len(self.widths))
        self.weights, self._biases = numbered("w", count), numbered("bias", count)
        self.parameters = tuple(name for pair in zip(self.weights, self._biases, strict=True) for name in pair)
        self.dys, self.products = numbered("dy", count), numbered("z", count)
        # The operands have their names in a program's key.
        epilogue = self.epilogue = settings.epilogue
        self.num_results, self.keeps = epilogue.num_results(count), epilogue.needs_products
        members = [groups.named(name) for name in settings.group_names]
        self.groups = {axis: generation.watch(group) for axis, group in zip(spec.mesh_axes, members, strict=True)}
        places = {
            axis: (rank, group.size())
            for axis, rank, group in zip(spec.mesh_axes, settings.ranks, members, strict=True)
        }
        self.partition = Partition(lengths, places, splits)
        self.version = generation.version
        w = (spec.n, spec.k) if settings.w_transposed else (spec.k, spec.n)
        self._dims = {"x": spec.a.names, "w": w, "y": spec.c.names}
        # True if F.linear computes the call: one rank, one weight, no epilogue, and a matmul that reads only its
        # operands (`reads_beside`).
        alone = all(size == 1 for _, size in places.values())
        is_plain = epilogue == NO_EPILOGUE and not (settings.dtypes or settings.options.float8 or settings.leaves > 0)
        is_plain = is_plain and settings.w_transposed and not self.widths
        self.is_linear = alone and is_plain and not reads_beside(dtype, device)
        if settings.blocks:
            self._check_blocks()
        # Programs that serve all calls that differ in their rows alone, and others. Their keys: forward by `keeps`,
        # `whole` and the names of the given tensors, backward by which gradients are needed.
        self._of_any_rows: dict[tuple[Any, ...], Program] = {}
        self._programs: dict[tuple[Any, ...], Program] = {}
        # The bound tasks of their steps. Then, for all calls that differ in their rows alone, a bound task with some
        # numbers of rows for each axis and task of the first call's steps.
        self._readies: dict[ProgramStep, BoundTask] = {}
        self._bound: dict[tuple[str, Task], BoundTask] = {}
        # The first call that differs in its rows alone, and keys in `_calls` of the last ones.
        self.first, self.has_rows = self, False
        self.recent: deque[list[Any]] = deque()
        self._num_ranks = math.prod(size for _, size in places.values())
        self._text, self._whole_rows = self._agreement()
        self._rows = tuple([name for name in spec.a.names if name != spec.k])
        # The row dim that is split, by its index, and whether x is split along it: otherwise the result alone is.
        split = [i for i, name in enumerate(self._rows) if spec.a.axes(name) or spec.c.axes(name)]
        self._split = (split[0], bool(spec.a.axes(self._rows[split[0]]))) if split else None
        # The kind of device whose autocast `run` turns off.
        self._casts_on = device.type if device.type in ("cpu", "cuda") else ""
        self._has_limit = settings.options.schedule == "fused" or (
            settings.options.schedule == "auto" and device.type == "cuda"
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        lengths, splits = self.partition.lengths, self.partition.splits
        return (*lengths.values(), *flat([splits.get(name, ()) for name in lengths]), *self.widths)

    def at(self, lengths: Mapping[str, int], splits: Mapping[str, tuple[int, ...]]) -> Call:
        """Return the call with other lengths of its row dims. None of them may be 0, here or there."""
        made, first = object.__new__(Call), self.first
        # Copying attributes takes a third of the time of setting them.
        made.__dict__ = vars(first).copy()
        made.partition, made._programs, made._readies = Partition(lengths, first.partition.place, splits), {}, {}
        return made

    def at_rows(
        self, rows: Sequence[int], sizes: tuple[int, ...] | None, residual: Tensor | None
    ) -> Call | None:  # fmt: skip
        """Return the call on an x with these lengths of its row dims, or None if they need a closer look.

        - `sizes`: every rank's length of the dim that is gathered or scattered, if given.
        - `residual`: has the rows of the result.
        """
        partition, whole, made = self.partition, [*rows], rows
        splits, lengths = partition.splits, {**partition.lengths}
        if self._split is not None:
            at, of_x = self._split
            ((rank, num_ranks),) = partition.place.values()
            local = rows[at]
            if sizes is None:
                sizes = (local,) * num_ranks if of_x else even_sizes(local, num_ranks)
            elif len(sizes) != num_ranks or min(sizes) < 0 or (sizes[rank] if of_x else sum(sizes)) != local:
                return None
            whole[at] = sum(sizes)
            splits = {**splits, self._rows[at]: sizes}
            if not of_x:
                made = [*rows]
                made[at] = sizes[rank]
        if residual is not None and [*residual.shape[:-1]] != [*made]:
            return None
        if 0 in whole or (self._has_limit and self._num_ranks * math.prod(whole) >= MANY):
            return None
        for name, length in zip(self._rows, whole, strict=True):
            lengths[name] = length
        return self.at(lengths, splits)

    def plan(self) -> Plan:
        """Return the plan, which is the same on every rank."""
        if not self.settings.by_size:
            return plan(self._spec)
        sizes = {axis: size for axis, (_, size) in self.partition.place.items()}
        return plan(self._spec, sizes=self.partition.lengths, mesh=sizes, dtype=self._dtype)

    def _agreement(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        # For `agreement`, of properties that a task's matrices do not show: a text of the spec and a float8 recipe, and
        # unsplit row dims with their lengths, unless each rank has its own rows, as in a fully sharded layer.
        spec, recipe, text = self._spec, self.settings.options.float8, self.settings.spec
        rows = [name for name in spec.a.names if name != spec.k]
        if recipe:
            text += f", float8={recipe}{' in fnuz' * (self._formats == float8.FNUZ)}"
        if any(spec.a.axes(name) and spec.a.axes(name) == spec.c.axes(name) for name in rows):
            return text, ()
        whole = [name for name in rows if not spec.a.axes(name) and not spec.c.axes(name)]
        return text, tuple([(name, self.partition.lengths[name]) for name in whole])

    def _check_blocks(self) -> None:
        # Parts of one operand's contraction are multiplied with slices of the other one, which must be whole blocks.
        spec = self._spec
        if spec.a.axes(spec.k) == spec.b.axes(spec.k):
            return
        (axis,) = spec.a.axes(spec.k) or spec.b.axes(spec.k)
        sizes = self.partition.sizes(spec.k, (), axis)
        if any(size and begin % float8.BLOCK for begin, size in zip(offsets(sizes), sizes, strict=False)):
            raise ValueError(
                f"with a scale for each {float8.BLOCK} elements, parts of the gathered features must begin at "
                f"multiples of {float8.BLOCK}, got sizes {tuple(sizes)}"
            )

    def _named(self, like: str, name: str = "") -> Named:
        # Return this rank's shard of x, w or y, or of a tensor `name` with the same dims. Several weights count as one.
        spec, dims = self._spec, self._dims[like]
        sharding = {"x": spec.a, "w": spec.b, "y": spec.c}[like]
        return Named(name or like, dims, tuple(self.partition.named(dim, sharding.axes(dim)) for dim in dims))

    def _blocks(self, name: str, names: Sequence[str]) -> list[Named]:
        whole, n = self._named(name), self._spec.n
        if not self.widths:
            return [replace(whole, name=names[0])]
        return [
            Named(each, whole.dims, tuple(width if dim == n else whole.length(dim) for dim in whole.dims))
            for each, width in zip(names, self.widths, strict=True)
        ]

    def _program(self, key: tuple[Any, ...]) -> Program:
        program = self._programs.get(key)
        if program is None and self.first is not self:
            like = self.first._of_any_rows.get(key) or self.first._program(key)
            if not like.is_fixed:
                program = self._programs[key] = like.at(self.partition)
        return program or self._written(key)

    def _written(self, key: tuple[Any, ...]) -> Program:
        program = Program(self.partition, self._dtype, self.settings, self._formats)
        x, w, plans = self._named("x"), self._blocks("w", self.weights), self.plan()
        if "x" in key:
            keeps, whole, *names = key
            epilogue = self.epilogue.named(names, len(w))._replace(keeps=keeps, whole=whole)
            outs = [(out, self._dims["y"]) for out in program.matmul(plans.forward, [x], w, epilogue)]
            program.finish([*outs[:-1], (outs[-1][0], self._dims["x"])] if whole else outs)
        else:
            grads = program.gradients(plans, self._blocks("y", self.dys), x, w, key)
            dims = self._dims["x"], *(self._dims["w"], self._dims["y"][-1:]) * len(self.weights)
            program.finish([(each, order) for each, order in zip(grads, dims, strict=True) if each is not None])
        for step in program.steps:
            if step.task is not None:
                # Before the first task runs: otherwise peers would run the tasks before the refused one.
                check_units(step.task, self.settings.options.schedule, self._group(step.axis), self._device)
        shared = self.first is self and not program.has_shapes and not program.is_fixed
        (self._of_any_rows if shared else self._programs)[key] = program
        return program

    def _group(self, axis: str) -> ProcessGroup:
        group: ProcessGroup | None = self.groups[axis]()
        if group is None:
            raise RuntimeError("the process group of this call has been destroyed")
        return group

    def _ready(self, step: ProgramStep, operands: Mapping[str, Any]) -> BoundTask:
        ready = self._readies.get(step)
        if ready is not None and not ready.is_stale():
            return ready
        assert step.task is not None
        key = step.axis, step.task
        task = step.task if self.first is self else step.task_at(operands, self.partition)
        known, rows = self._bound.get(key), self._whole_rows
        if rows:
            rows = tuple([(name, self.partition.lengths[name]) for name, _ in rows])
        if known is not None and not known.is_stale():
            ready = known.at(task, rows)
        else:
            options = self.settings.options
            ready = self._bound[key] = BoundTask(
                task, options.schedule, self._group(step.axis), self._device, producer=options.producer,
                call=self._text, rows=rows,
            )  # fmt: skip
        self._readies[step] = ready
        return ready

    def run(
        self, tensors: dict[str, Any], needs: tuple[bool, ...] = (), *, keeps: bool = False, whole: bool = False,
        fake: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """Run forward, or backward if `needs` are given, on tensors by name, without a gradient.

        Forward takes x, the weights, and operands of the epilogue. It returns y of each weight, or y and its norm. With
        `keeps`, the products before the activation follow. With `whole`, of a call that gathers x and has no
        activation, the gathered x follows.

        Backward: `needs` tells which gradients are needed: of x, then of `parameters`. It takes `dys`, the gradients of
        the products before an activation, and those of x and the weights that the needed gradients read. It returns
        the needed gradients.

        With `fake`, the results are empty tensors of the same shapes, and nothing is sent.
        """
        if self._casts_on and torch.is_autocast_enabled(self._casts_on):
            # Operands are in the call's dtype, which tasks share memory in: torch.autocast must not change it again.
            try:
                torch.set_autocast_enabled(self._casts_on, False)
                return self.run(tensors, needs, keeps=keeps, whole=whole, fake=fake)
            finally:
                torch.set_autocast_enabled(self._casts_on, True)
        # Every call runs this: few Python functions are called besides that of the task.
        key: tuple[Any, ...] = needs or (keeps, whole, *tensors)
        program = self._of_any_rows.get(key) or self._program(key)
        tensors, readies = {**tensors}, self._readies
        for step in program.steps:
            outs: list[Tensor]
            if step.local is not None:
                outs = [*step.local(tensors)]
            else:
                operands: dict[str, Any] = {}
                for name, each in step.operands.items():
                    if each.__class__ is str:
                        operands[name] = tensors[each]
                        continue
                    tensor, how = tensors[each.name], each.how  # type: ignore[union-attr]
                    if how == "transposed":
                        tensor = tensor.t()
                    elif how == "viewed":
                        tensor = each.view(tensor)  # type: ignore[union-attr]
                    operands[name] = tensor
                if fake:
                    task = step.task if self.first is self else step.task_at(operands, self.partition)
                    assert task is not None
                    shapes = task.results(self.partition.place[step.axis][0])
                    outs = [operands["a"].new_empty(shape) for shape in shapes]
                else:
                    ready = readies.get(step)
                    # `is_stale`, except that a GPU's capture is checked in `_ready`.
                    if ready is None or ready.version != generation.version or ready.on_gpu or generation.gone:
                        ready = self._ready(step, operands)
                    outs = ready.run(operands)
            for i, shape in step.shapes:
                outs[i] = outs[i].view(shape)
            for name, out in zip(step.made, outs, strict=True):
                tensors[name] = out
            for name in step.frees:
                del tensors[name]
        return [tensors[name] if order is None else tensors[name].permute(order) for name, order in program.results]

    def linear(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return y of a call that `is_linear`, with autograd's own gradients.

        Gradients of a program take as long as the matmuls of a small layer.
        """
        key = (False, False, *tensors)
        # A program has no task if no number of ranks sends anything.
        for step in (self._of_any_rows.get(key) or self._program(key)).steps:
            if step.local is None:
                ready = self._readies.get(step)
                # As in `run`.
                if ready is None or ready.version != generation.version or ready.on_gpu or generation.gone:
                    operands = {
                        name: tensors[each] if isinstance(each, str) else each.view(tensors[each.name])
                        for name, each in step.operands.items()
                    }
                    ready = self._ready(step, operands)
                paths.record(ready.path, ready.task, ready.num_ranks)
        return F.linear(tensors["x"], tensors["w"], tensors.get("bias"))


def _read(
    spec: Spec, numbers: Sequence[int]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]], tuple[int, ...]]:  # fmt: skip
    # Return the lengths, the explicit splits and the widths in the numbers of a call.
    lengths, rest = dict(zip(spec.dim_names, numbers, strict=False)), list(numbers[len(spec.dim_names) :])
    splits: dict[str, tuple[int, ...]] = {}
    for name in spec.dim_names:
        count, rest = rest[0], rest[1:]
        if count:
            splits[name], rest = tuple(rest[:count]), rest[count:]
    return lengths, splits, tuple(rest)


_calls: dict[Any, Call] = generation.table({})
# The first of the calls that differ in their rows alone.
_firsts: dict[Any, Call] = generation.table({})


def _keep(key: Any, call: Call, *, again: bool = False) -> Call:
    # `again`: `of` may have kept the call by what describes it. Both keys are one entry of `recent`.
    if len(_calls) >= MAX_CALLS:
        _calls.clear()
    recent = call.first.recent
    if again and recent and _calls.get(recent[-1][0]) is call:
        recent[-1].append(key)
    else:
        recent.append([key])
    _calls[key] = call
    if len(recent) > MAX_ROWS:
        for each in recent.popleft():
            _calls.pop(each, None)
    return call


def _as_first(key: Any, call: Call) -> None:
    if len(_firsts) >= MAX_CALLS:
        _firsts.clear()
    _firsts[key] = call.first


def _first(key: Any) -> Call | None:
    call = _firsts.get(key)
    return call if call is not None and call.version == generation.version else None


def _made(settings: Settings, numbers: tuple[int, ...], *others: Any) -> Call:
    # Make a call, if possible from one that differs in its rows alone.
    spec = parse(settings.spec)
    lengths, splits, widths = _read(spec, numbers)
    rows = {name: lengths[name] for name in spec.a.names if name != spec.k}
    if 0 in rows.values():
        return Call(settings, numbers, *others[:2])
    fixed = tuple([(lengths[name], splits.get(name)) for name in lengths if name not in rows])
    key = (settings, fixed, tuple([name in splits for name in rows]), widths, *others)
    first = _first(key)
    if first is not None and first.has_rows:
        return first.at(lengths, splits)
    call = Call(settings, numbers, *others[:2])
    if first is not None:
        call.recent = first.recent
        return call
    _as_first(key, call)
    # By bytes, rows decide the plan. A tree has other steps for uneven rows. Such calls share nothing.
    call.has_rows = not settings.by_size and settings.leaves <= 0 and len(settings.group_names) == 1
    return call


def of(settings: Settings, numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Call:
    """Return the call with these settings and numbers, see `Call`, for operands in this dtype."""
    dtype = settings.out_dtype or dtype
    try:
        # A new group may have the name of a destroyed one.
        members = tuple(id(groups.named(name)) for name in settings.group_names)
        key = (settings, tuple(numbers), dtype, device, members)
        if generation.gone:
            generation.changed()
        call = _calls.get(key)
        if call is None or call.version != generation.version:
            call = _keep(key, _made(settings, tuple(numbers), dtype, device, members))
        return call
    except TypeError as error:
        # Symbolic lengths of torch.compile cannot be hashed. Such a call is made once a graph and not cached.
        if "SymInt" not in str(error):
            raise
        return Call(settings, numbers, dtype, device)


# A function of `problems`: takes (x, weight, group, options, *dims, epilogue), checks them, and returns the settings
# and numbers for `of`.
ProblemFunction: TypeAlias = Callable[..., Described]


def named(x: Any, w: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a call by name, without those that are None. A compiler can trace the code.

    `w`, and the epilogue's operands: tensors, or tuples for several weights.
    """
    if type(w) is not tuple:
        return {"x": x, "w": w} | {name: each for name, each in operands.items() if each is not None}
    tensors: dict[str, Any] = {"x": x}
    for i, each in enumerate(w):
        tensors[f"w{i or ''}"] = each
        for name, several in operands.items():
            if several[i] is not None:
                tensors[f"{name}{i or ''}"] = several[i]
    return tensors


def describe(
    problem: ProblemFunction, tensors: Mapping[str, Any], group: ProcessGroup, options: Options, dims: tuple[Any, ...],
    epilogue: Epilogue,
) -> Described:  # fmt: skip
    """Call `problem` with the tensors that `named` has returned. A compiler can trace the code."""
    ws = tuple([each for name, each in tensors.items() if name[0] == "w"])
    w = ws if len(ws) > 1 else ws[0]
    return problem(tensors["x"], w, group, options, *dims, epilogue=epilogue.filled(tensors, len(ws)))


_OPTIONS = frozenset((int, bool, str, float, type(None)))


def _is_hashed_alike(option: Any) -> bool:
    # True if an option's value and type distinguish it from every other option.
    kind = type(option)
    return kind in _OPTIONS or (kind is tuple and all(type(each) is int for each in option))


def find(
    problem: ProblemFunction, tensors: Mapping[str, Any], group: ProcessGroup, options: Options,
    dims: tuple[Any, ...] = (), epilogue: Epilogue = NO_EPILOGUE,
) -> Call:  # fmt: skip
    """Return the call that `problem` checks and describes, of tensors that `named` has returned.

    Equal calls are prepared once. Options of other types are checked at every call, because a dictionary takes
    (True, 2.0) for (1, 2).
    """
    # One function, because every call runs it.
    values = (*options, *dims)
    if epilogue is not NO_EPILOGUE:
        # Activation, norm and eps; the others are of a run.
        values += epilogue[FIRST_OPTION:-2]
    kinds = tuple(map(type, values))
    key: list[Any] | None = [problem, id(group), values, kinds, *tensors]
    if not _OPTIONS.issuperset(kinds) and not all(map(_is_hashed_alike, values)):
        key = None
    for each in tensors.values():
        if key is None or each.is_nested:
            key = None
            break
        key += each.shape, each.dtype, each.device, each.layout
    x: Tensor = tensors["x"]
    if key is None:
        refuse_tracing()
        return of(*describe(problem, tensors, group, options, dims, epilogue), x.dtype, x.device)
    whole_key = tuple(key)
    if generation.gone:
        generation.changed()
    call = _calls.get(whole_key)
    if call is None or call.version != generation.version:
        # The key of calls that differ in their rows alone. Sizes of features are no rows.
        sizes, shape = None, x.shape
        if len(dims) == 2 and dims[0] not in (-1, len(shape) - 1):
            sizes, key[2] = dims[1], (*options, dims[0], *values[len(options) + 2 :])
        # Shapes follow the names: that of x is the first.
        begin = 4 + len(tensors)
        key[begin] = len(shape), shape[-1:]
        residual = tensors.get("residual")
        if residual is not None:
            key[begin + 4 * [*tensors].index("residual")] = residual.shape[-1:]
        like = tuple(key)
        first = _firsts.get(like)
        if first is not None and first.version == generation.version:
            call = first.at_rows(shape[:-1], sizes, residual)
            if call is not None:
                return _keep(whole_key, call)
        # A shape that torch.jit traces is made of tensors, so no earlier call is like it.
        refuse_tracing()
        call = of(*describe(problem, tensors, group, options, dims, epilogue), x.dtype, x.device)
        _keep(whole_key, call, again=True)
        if call.first.has_rows:
            _as_first(like, call)
    return call
