"""Costs of a sharding in words: steps, bytes and FLOPs of a matmul and its gradients, and the table of layers.

Everything is read from the plans. Bytes are those that one rank sends, FLOPs those that one rank computes; a multiply
and an add count as two. Without sizes both are formulas, in which an axis stands for its number of ranks. With hardware
the cost model predicts a time for every step.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from .cost.hardware import Hardware, find
from .cost.model import Prediction, estimate
from .cost.work import Work
from .sharding.notation import Spec, Tensor, parse
from .sharding.plan import FLOPS_PER_BYTE, START_BYTES, MatmulPlan, Plan, is_float8, made_of, measure, plan
from .sharding.routes import Sizes, Step, flops, quantity

NAMED = {
    "column-parallel, x split by rows": "[M_X, K] @ [K, N_X] -> [M, N_X]",
    "column-parallel, x whole": "[M, K] @ [K, N_X] -> [M, N_X]",
    "row-parallel, y split by rows": "[M, K_X] @ [K_X, N] -> [M_X, N]",
    "row-parallel, y whole": "[M, K_X] @ [K_X, N] -> [M, N]",
    "features split": "[B, D_X] @ [D, F_X] -> [B, F_X]",
    "features split, out": "[B, F_X] @ [F_X, D] -> [B, D_X]",
    "FSDP": "[M_X, K] @ [K_X, N] -> [M_X, N]",
    "data-parallel": "[M_X, K] @ [K, N] -> [M_X, N]",
}

_WORDS = (
    "over: the mesh axis whose ranks communicate; along: the dim that is gathered or split; one op: the collective and "
    "its matmul run as one, by any schedule"
)
_FORMULAS = {"y": "y = x @ w", "dx": "dx = dy @ w.T", "dw": "dw = x.T @ dy"}


@dataclass(frozen=True)
class Line:
    """One step of a plan.

    - `amount`: formula of the elements that a rank sends, or of the matmul's FLOPs.
    - `sent`, `flops`: bytes and FLOPs of one rank; None without sizes.
    - `predicted`: the cost model's times; needs hardware too. For a fused matmul, those of both steps together.
    """

    step: Step
    amount: str
    sent: int | None
    flops: int | None
    predicted: Prediction | None = None
    # True for a step of dw that dx has done.
    done: bool = False

    def __str__(self) -> str:
        return f"{self.step}{', one op' * self.step.fused}{', done for dx' * self.done}"

    @property
    def us(self) -> float | None:
        """Return the predicted microseconds of this step alone."""
        if self.predicted is None:
            return None
        return self.predicted.comm_us if self.step.is_collective else self.predicted.matmul_us


@dataclass(frozen=True)
class Phase:
    """One matmul: its formula, its notation, its steps in the order in which they run, and why these were chosen."""

    formula: str
    notation: str
    lines: tuple[Line, ...]
    reason: str

    @property
    def sent(self) -> int | None:
        """Return the bytes that a rank sends, None without sizes."""
        return _total([line.sent for line in self.lines])

    @property
    def flops(self) -> int | None:
        return _total([line.flops for line in self.lines])

    @property
    def together(self) -> str:
        """Return the predicted times of the fused matmul with its collective, by schedule."""
        for line in self.lines:
            if line.predicted is not None and line.step.fused and not line.step.is_collective:
                times = ", ".join(f"{us:.1f} us {schedule}" for schedule, us in line.predicted.times.items())
                return f"The one op takes {times}."
        return ""

    def __str__(self) -> str:
        width = max(len(str(line)) for line in self.lines)
        if self.sent is None or self.flops is None:
            rows = [f"{line!s:<{width}}  {line.amount}" for line in self.lines]
        else:
            times = [line.us for line in self.lines if line.us is not None]
            cells = [("each rank", "sends", "computes", "us alone" * bool(times))]
            cells += [(str(line), *_amounts(line.sent, line.flops, line.us)) for line in self.lines]
            cells += [("total", *_amounts(self.sent, self.flops, sum(times) or None))]
            rows = [f"{name:<{width}}{sent:>11}{num_flops:>13}{us:>10}" for name, sent, num_flops, us in cells]
        lines = [f"{self.formula}: {self.notation}", *(f"  {row}".rstrip() for row in rows), _wrapped(self.reason)]
        return "\n".join(lines + [self.together] * bool(self.together))


@dataclass(frozen=True)
class Explanation:
    """The three matmuls of a spec, as `str` prints them; `given` repeats sizes, mesh, dtype and hardware."""

    spec: Spec
    given: str
    phases: tuple[Phase, Phase, Phase]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        parts = ["\n".join(map(_wrapped, filter(None, (str(self.spec), self.given, _WORDS)))), *map(str, self.phases)]
        sent, num_flops = (_total([getattr(phase, name) for phase in self.phases]) for name in ("sent", "flops"))
        if sent is not None and num_flops is not None:
            amounts = f"sends {quantity(sent, 'B')} and computes {quantity(num_flops, 'FLOP')}"
            parts.append(_wrapped(f"In all, each rank {amounts}."))
        return "\n\n".join([*parts, *map(_wrapped, self.notes)])


@dataclass(frozen=True)
class CommunicationRow:
    """Row of the communication table: the collectives of each of the three matmuls of `notation`."""

    name: str
    notation: str
    forward: str
    dx: str
    dw: str


def explain(
    spec: str | Spec,
    *,
    sizes: Mapping[str, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    dtype: object = "bfloat16",
    hardware: str | Hardware | None = None,
    flops_per_byte: float | None = None,
    start_bytes: int | None = None,
) -> Explanation:
    """Explain a spec, or a layer by its name in `fusedtp explain --table`; `str` of the result is the text.

    `hardware` is a name of `fusedtp.cost.hardware.HARDWARE`. If given, steps have predicted times, and the plan weighs
    bytes against FLOPs by that machine unless told otherwise. The other arguments and errors are those of `plan`.

    Raises ValueError for an unknown hardware name, and for hardware without sizes.
    """
    spec = parse(str(spec) if isinstance(spec, Spec) else NAMED.get(spec, spec) if isinstance(spec, str) else spec)
    machine = None if hardware is None else find(hardware)
    if machine is not None and sizes is None:
        raise ValueError(f"times on {machine.name} need sizes and mesh")
    if flops_per_byte is None:
        flops_per_byte = FLOPS_PER_BYTE if machine is None else machine.flops_per_byte
    if start_bytes is None:
        start_bytes = START_BYTES if machine is None else machine.start_bytes
    plans = plan(spec, sizes=sizes, mesh=mesh, dtype=dtype, flops_per_byte=flops_per_byte, start_bytes=start_bytes)
    measured = measure(spec, sizes, mesh, dtype)
    given, name = "", str(dtype).removeprefix("torch.")
    if sizes is not None and mesh is not None:
        lengths = " ".join(f"{dim}={sizes[dim]}" for dim in spec.dim_names)
        ranks = " ".join(f"{axis}={mesh[axis]}" for axis in spec.mesh_axes)
        given = f"{lengths}, mesh {ranks or 'of one rank'}, {name}"
        given += f", sums in {made_of(name)}, scales not counted" if is_float8(name) else ""
        given += f", times predicted for {machine.title}, not measured" if machine is not None else ""
    forward, dx, dw = (
        _phase(matmul, measured, machine, name, plans.shared if matmul is plans.dw else ()) for matmul in plans.matmuls
    )
    return Explanation(spec, given, (forward, dx, dw), _notes(plans))


def table(specs: Mapping[str, str] = NAMED) -> list[CommunicationRow]:
    """Return the communication table of named specs, planned without sizes."""
    rows = []
    for name, notation in specs.items():
        plans = plan(notation)
        forward, dx, dw = (_cell(plans, matmul) for matmul in plans.matmuls)
        rows.append(CommunicationRow(name, str(plans.spec), forward, dx, dw))
    return rows


def table_markdown(specs: Mapping[str, str] = NAMED) -> str:
    lines = ["| name | forward | dx | dw |", "|---|---|---|---|"]
    lines += [f"| {row.name} `{row.notation}` | {row.forward} | {row.dx} | {row.dw} |" for row in table(specs)]
    return "\n".join(lines) + "\n"


def _phase(
    matmul: MatmulPlan, sizes: Sizes | None, machine: Hardware | None, dtype: str, done: Sequence[Step]
) -> Phase:
    notation = f"{matmul.a} @ {matmul.b} -> {matmul.c}"
    lines = _lines(matmul, sizes, machine, dtype, done)
    return Phase(_FORMULAS[matmul.names[2]], notation, lines, _reason(matmul, sizes, dtype))


def _reason(matmul: MatmulPlan, sizes: Sizes | None, dtype: str) -> str:
    """Return by what the steps were chosen, and the way that they were compared with."""
    steps = ", ".join(map(str, matmul.rejected))
    if not matmul.rejected:
        return "These steps are the only way."
    if sizes is None:
        return f"Chosen: fewest collectives, as sizes are unknown. Next: {steps}."
    result = matmul.names[2]
    before = [step for step in matmul.rejected if step.tensor != result]
    after = [step for step in matmul.rejected if step.tensor == result]
    other = replace(matmul, steps=(*before, Step("matmul", result), *after))
    lines = _lines(other, sizes, None, dtype)
    sent, num_flops = (sum(getattr(line, name) for line in lines) for name in ("sent", "flops"))
    num = len(other.collectives)
    price = f"{quantity(sent, 'B')} in {num} collective{'s' * (num != 1)} and {quantity(num_flops, 'FLOP')}"
    return f"Chosen: cheapest in bytes, collectives and FLOPs. Compared with {steps}: {price}."


def _lines(
    matmul: MatmulPlan, sizes: Sizes | None, machine: Hardware | None, dtype: str, done: Sequence[Step] = ()
) -> tuple[Line, ...]:
    lines = []
    is_done = matmul.fused is not None and replace(matmul.fused, fused=False) in done
    for step, before, after in matmul.walked:
        # Without its collective the matmul is alone.
        step = replace(step, fused=False) if is_done else step
        if step in done:
            lines.append(Line(step, "", 0 if sizes else None, 0 if sizes else None, done=True))
            continue
        predicted = _predicted(matmul, step, before, sizes, machine, dtype) if sizes and machine else None
        if step.kind == "matmul":
            split = {dim.name: dim.axes for tensor in before for dim in tensor.dims}
            amount = " * ".join(["2", *(_length(name, axes) for name, axes in split.items())])
            num_flops = flops(before[0], before[1], sizes) if sizes else None
            lines.append(Line(step, f"{amount} FLOP", 0 if sizes else None, num_flops, predicted))
        else:
            sent = sizes.sent(step, before[0]) if sizes else None
            lines.append(Line(step, _elements(step, before[0], after), sent, 0 if sizes else None, predicted))
    return tuple(lines)


def _predicted(
    matmul: MatmulPlan, step: Step, before: tuple[Tensor, ...], sizes: Sizes, machine: Hardware, dtype: str
) -> Prediction | None:
    """Return the cost model's times of a collective alone, or of a matmul with the collective that is fused with it."""
    if step.kind == "slice":
        return None
    kinds: dict[str, Literal["gather", "scatter", "all_reduce"]] = {
        "all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "all_reduce"
    }  # fmt: skip
    if step.kind != "matmul":
        n = sizes.ranks(step.axis)
        moved = sizes.numel(before[0]) * (n if step.kind == "all_gather" else 1)
        return estimate(str(step), Work(kinds[step.kind], 0, 0, 0, moved, n, dtype), machine)
    names = [tuple(name for name in tensor.names if name not in matmul.contraction) for tensor in before]
    lengths = {dim.name: sizes.shard(dim.name, dim.axes) for tensor in before for dim in tensor.dims}
    rows, cols = (prod(lengths[name] for name in group) for group in names)
    depth = prod(lengths[name] for name in matmul.contraction)
    fused = matmul.fused if step.fused else None
    if fused is None:
        return estimate("matmul", Work("gather", rows, cols, depth, 0, 1, dtype), machine)
    n = sizes.ranks(fused.axis)
    if fused.kind != "all_gather":
        return estimate(str(fused), Work(kinds[fused.kind], rows, cols, depth, rows * cols, n, dtype), machine)
    if fused.tensor == matmul.names[1]:
        rows, cols = cols, rows
    by_depth = fused.dim in matmul.contraction
    return estimate(str(fused), Work("gather", rows, cols, depth, rows * depth, n, dtype, by_depth), machine)


def _elements(step: Step, before: Tensor, after: Tensor) -> str:
    """Return the elements that a rank sends in `step`, as a formula: n-1 shards, twice that for an all-reduce."""
    if not step.is_collective:
        return ""
    shard = " * ".join(_length(dim.name, dim.axes) for dim in (before if step.kind == "all_gather" else after).dims)
    if step.kind == "all_reduce":
        return f"2 ({step.axis}-1)/{step.axis} * {shard} elements"
    return f"({step.axis}-1) * {shard} elements"


def _length(name: str, axes: tuple[str, ...]) -> str:
    return "/".join((name, *axes))


def _notes(plans: Plan) -> tuple[str, ...]:
    notes = []
    if plans.shared:
        notes.append(f"Backward does once for dx and dw: {', '.join(map(str, plans.shared))}")
    if plans.gathered_again:
        again = ", ".join(map(str, plans.gathered_again))
        notes.append(f"Backward gathers again, as only shards are kept: {again}")
    return tuple(notes)


def _cell(plans: Plan, matmul: MatmulPlan) -> str:
    texts = []
    for step in matmul.collectives:
        text = step.kind.replace("_", "-")
        if step.kind == "all_gather":
            again = matmul is not plans.forward and replace(step, fused=False) in plans.gathered_again
            text += f" {step.tensor}" + " again" * again
        if step.kind == "all_gather" and step.tensor != matmul.names[2] and step.dim in matmul.contraction:
            text += " along the contraction"
        if step.kind == "reduce_scatter" and step.dim == matmul.c.names[-1]:
            text += ", last dim"
        texts.append(f"{text} over {step.axis}" if len(plans.spec.mesh_axes) > 1 else text)
    return "; ".join(texts) or "none"


def _amounts(sent: int | None, num_flops: int | None, us: float | None) -> tuple[str, str, str]:
    return (
        quantity(sent, "B") if sent else "",
        quantity(num_flops, "FLOP") if num_flops else "",
        "" if us is None else f"{us:.1f}",
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False)


def _total(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
