"""Every function with every option, schedule and dtype: results and gradients equal one process in float64.

Hypothesis draws the calls. PINNED has calls that once were wrong, and one of each kind that a draw may omit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp.activations import ACTIVATIONS, GATED, OF_RESULT
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels.blocks import MOST_UNROLLED
from fusedtp.norms import NORMS
from fusedtp.schedules import decomposed

from .harness import LARGE, spread
from .oracle import Case, Operands, check_norm, whole
from .soak.layouts import EXPANDED, LAYOUTS
from .test_counting import counting
from .test_ops import bounded

SCHEDULES = ("unfused", "decomposed", "fused")
HOW = ("even", "lopsided", "on the last")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
# Functions with an option each; every one is drawn for every schedule and number of ranks.
KINDS = (
    *(("gather", {"activation": name}) for name in ACTIVATIONS),
    ("gather", {"count": 1}), ("gather", {"count": 8}), ("gather", {"count": 3}),
    ("fsdp", {"activation": "gelu"}), ("fsdp", {"activation": "silu"}), ("fsdp", {}),
    *((kind, {"residual": residual}) for kind in ("scatter", "all_reduce") for residual in (True, False)),
    *((kind, {"norm": norm}) for kind in ("scatter", "all_reduce") for norm in NORMS),
)  # fmt: skip
# Operands besides x, weights and biases.
OTHERS = ("residual", "norm_weight", "norm_bias", "dy")


@st.composite
def cases(draw: st.DrawFn, schedule: str, kind: str, options: dict[str, Any], turn: int) -> Case:
    """Draw a call of one kind, with sizes beyond a tile of 64 columns, and a layout of each operand."""
    activation, count = options.get("activation", ""), options.get("count", 0)
    dtype = draw(st.sampled_from([BF16, FP32, torch.float16, *([FP64] if schedule != "fused" else [])]))
    # A layer norm of one feature is rounding errors alone.
    width = st.sampled_from((70, 5, 37, 16, 1)[: 4 if options.get("norm") == "layer_norm" else 5])
    if kind == "gather" and not count:
        count = draw(st.sampled_from((1, 2, 5)))
    elif count > MOST_UNROLLED.value:
        count = draw(st.integers(MOST_UNROLLED.value + 1, count))
    widths = (draw(width),) * 2 if activation in GATED else tuple(draw(width) for _ in range(max(1, count)))
    names = ["x", *(f"w{i}" for i in range(len(widths)))]
    norm, dims = options.get("norm", ""), (0, 1) if options.get("norm") else (0, 1, -1, -2)
    unused = st.lists(st.integers(0, len(widths) - 1), max_size=len(widths) - 1, unique=True)
    shapes = st.sampled_from(((7, 5), (9, 4), (16, 2), (1, 66), (2, 7, 3)))
    # The simplest draw has every layout too, each of another operand in each turn.
    operands = (*(f"b{i}" for i in range(len(widths))), *names, *OTHERS)
    layouts = {name: LAYOUTS[(draw(st.integers(0, 9)) + i + turn) % 10] for i, name in enumerate(operands)}
    if norm == "layer_norm" and layouts["w0"] in EXPANDED:
        # A layer norm of equal columns is rounding errors alone.
        layouts["w0"] = "stepped"
    return Case(
        kind, dtype, shape=draw(shapes), dim=draw(st.sampled_from(dims)),
        how=draw(st.sampled_from(HOW)), k_how=draw(st.sampled_from(HOW)), widths=widths,
        biased=tuple(not draw(st.booleans()) for _ in widths), activation=activation,
        residual=options.get("residual", False) or (bool(norm) and draw(st.booleans())), norm=norm,
        algorithm="auto" if kind != "all_reduce" else draw(st.sampled_from(("one_shot", "two_shot", "auto"))),
        frozen=() if norm else tuple(draw(st.lists(st.sampled_from(names), max_size=1))),
        unused=tuple(draw(unused)) if not activation and not norm else (), layouts=tuple(layouts.items()),
    )  # fmt: skip


# Only kernels have a table of their operands; of other schedules, eight weights are drawn.
MANY = "many weights"
PINNED = {
    # Two tiles of columns: one program has several pairs of gate and up, and must compute up after its gate.
    "pairs of tiles": Case("gather", BF16, (9, 4), 1, "lopsided", widths=(70, 70), biased=(False,) * 2,
                           activation="swiglu"),
    "a gate of nothing": Case("gather", FP32, (9, 4), 0, "on the last", widths=(70, 70), biased=(True,) * 2,
                              activation="geglu"),
    # Errors in a formula's digits are smaller than bfloat16's precision.
    **{f"{name} in float32": Case("gather", FP32, widths=(5,) * (1 + (name in GATED)),
                                  biased=(True,) * (1 + (name in GATED)), activation=name) for name in ACTIVATIONS},
    # Only dw needs x.
    "frozen x": Case("gather", FP32, (8,), frozen=("x",)),
    # dx sums over all weights; one weight has no gradient, and one result is unused.
    "frozen and unused": Case("gather", FP32, (8,), widths=(16, 7, 1), biased=(True, False, True), frozen=("w0",),
                              unused=(1,)),
    "features of the last rank": Case("gather", BF16, (7, 4), -1, "on the last", widths=(5, 40), biased=(False,) * 2),
    "fsdp on the last": Case("fsdp", FP32, (3, 5), how="on the last", activation="relu"),
    "columns with a residual": Case("scatter", FP32, dim=-1, how="on the last", widths=(24,), residual=True),
    "nothing to contract": Case("all_reduce", FP32, k_how="on the last", widths=(24,), residual=True),
    "a norm of no rows": Case("scatter", FP32, dim=1, how="on the last", widths=(24,), norm="layer_norm", unused=(0,)),
    "a norm without y": Case("scatter", FP32, dim=0, how="lopsided", widths=(24,), norm="rms_norm", unused=(0,)),
    # Gate and up of one interleaved table.
    "interleaved biases": Case("gather", BF16, (8,), widths=(16, 16), biased=(True,) * 2, activation="swiglu",
                               layouts=(("b0", "stepped"), ("b1", "stepped"), ("w0", "stepped"), ("w1", "stepped"))),
    "one of several biases is a column": Case("gather", FP32, (8,), widths=(16, 7, 1), biased=(True, False, True),
                                              layouts=(("b0", "transposed"), ("b2", "transposed"))),
    "gathered features and an expanded bias": Case("gather", FP32, (7, 4), -1, layouts=(("b0", "one value"),)),
    # Operands are in a table in memory, and more than one kernel writes it.
    MANY: Case("gather", FP32, (9, 4), 1, "lopsided", widths=(70, 5, 37, 16, 1, 129, 64, 0) * (8 if LARGE else 5),
               biased=(True, False, True, False) * (16 if LARGE else 10), frozen=("w9",), unused=(3, 38)),
    "an activation of five": Case("gather", BF16, (8,), widths=(16, 7, 1, 70, 5), biased=(False,) * 4 + (True,),
                                  activation="gelu"),
    # The bias has an element for each row of the kernel's result.
    "fsdp with a diagonal": Case("fsdp", FP32, (3, 5), layouts=(("b0", "diagonal"), ("dy", "one value"))),
    "scattered columns of a column": Case("scatter", FP32, dim=-1, how="lopsided", widths=(24,), residual=True,
                                          layouts=(("b0", "transposed"), ("residual", "diagonal"))),
    "scattered rows of a step": Case("scatter", BF16, (9, 4), dim=1, how="lopsided", residual=True,
                                     layouts=(("b0", "stepped"), ("residual", "one row"), ("dy", "one value"))),
    # One kernel for few rows, two kernels for many.
    **{f"{algorithm} of {rows} rows": Case("all_reduce", FP32, (rows,), algorithm=algorithm, features=5,
                                           layouts=(("b0", "transposed"), ("residual", "transposed")), residual=True)
       for algorithm in ("one_shot", "two_shot") for rows in (8, 300)},
}  # fmt: skip


def checked(group: ProcessGroup, schedule: str, all_of: Sequence[Case], by_chunk: bool) -> None:
    """Check all cases; with `by_chunk`, few rows are multiplied as they arrive, like many rows."""
    with mock.patch.object(decomposed, "AT_ONCE_ROWS", 0 if by_chunk else decomposed.AT_ONCE_ROWS):
        if by_chunk:
            # Prepared calls go with the memory.
            fusedtp.destroy(group)
        for case in all_of:
            Operands(case, group).check(schedule, f"{schedule}, rank {group.rank()} of {group.size()}, {case}")
    if by_chunk:
        fusedtp.destroy(group)


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [4 if LARGE else 2, 3, 2]))
def test_pinned(pool: RankPool, schedule: str, world_size: int) -> None:
    some = [case for name, case in PINNED.items() if LARGE or schedule == "fused" or name != MANY]
    pool.run(checked, schedule, some, schedule == "decomposed", world_size=world_size)


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    dict.fromkeys(spread(SCHEDULES, [2, 4, 3]) + spread(SCHEDULES, [3, 1, 2, *([4] if LARGE else [])])),
)
@bounded(8 if LARGE else 1)
@given(data=st.data())
def test_results_and_gradients_are_right(
    pool: RankPool, schedule: str, world_size: int, data: st.DataObject
) -> None:  # fmt: skip
    # Interpreted kernels are slow: each number of ranks has half of the kinds.
    kinds = KINDS[world_size % 2 :: 2] if schedule == "fused" and not LARGE else KINDS
    kinds = data.draw(st.permutations(kinds))
    drawn = [data.draw(cases(schedule, *kind, turn)) for turn, kind in enumerate(kinds)]
    by_chunk = schedule == "decomposed" and world_size > 1
    for each in (False, True) if by_chunk else (False,):
        pool.run(checked, schedule, drawn, each, world_size=world_size, timeout=400.0)


def sent_and_kept(group: ProcessGroup, schedule: str) -> None:
    """Check that an option sends nothing more, and that products are kept only for gradients."""
    for kind, options in KINDS[::3] if schedule == "fused" else KINDS:
        widths = (16,) * (2 if options.get("activation") in GATED else options.get("count", 1))
        how = {name: each for name, each in options.items() if name != "count"}
        found = []
        for given_ in (how, {}):
            operands = Operands(Case(kind, FP32, (8,), widths=widths, biased=(False,) * len(widths), **given_), group)
            leaves = operands.leaves(dense=True)
            with counting() as forward:
                outs = operands.call(schedule, leaves)
            with counting() as backward:
                outs[0].sum().backward()
            name = options.get("activation", "") if given_ else ""
            made = mock.patch.object(torch, "empty_like", side_effect=AssertionError("a product is made"))
            with counting() as frozen, torch.no_grad(), made if name else contextlib.nullcontext():
                operands.call(schedule, leaves)
            assert not backward.saved
            assert not frozen.saved
            own = {each.data_ptr() for each in leaves.values()}
            kept = [each for each in forward.saved if each.data_ptr() not in own]
            if kind == "gather":
                assert len(kept) == (len(widths) if name else 0), f"{kind}, {options}: a copy is kept"
                # relu keeps its result; other activations keep the products.
                results = {each.data_ptr() for each in outs}
                assert all((each.data_ptr() in results) == (name in OF_RESULT) for each in kept)
            found.append((forward.calls, backward.calls))
        (calls, back), (plain, plain_back) = found
        assert calls == plain, f"{kind}, {options}"
        assert back[: len(plain_back)] == plain_back or options.get("norm"), f"{kind}, {options}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_options_send_nothing_more(pool: RankPool, schedule: str) -> None:
    pool.run(sent_and_kept, schedule, world_size=2)


ELSEWHERE = {
    "relu": Case("gather", FP64, (9, 4), widths=(16,), activation="relu"),
    "swiglu": Case("gather", FP64, (9, 4), widths=(16, 16), biased=(True,) * 2, activation="swiglu",
                   layouts=(("b0", "stepped"), ("b1", "one value"), ("x", "transposed"), ("w1", "diagonal"))),
    "several": Case("gather", FP64, (8,), widths=(16, 7), biased=(True, False)),
    "residual": Case("scatter", FP64, (8,), widths=(24,), residual=True),
    "rms_norm": Case("scatter", FP64, (8,), widths=(24,), norm="rms_norm", residual=True),
    "layer_norm": Case("all_reduce", FP64, (8,), widths=(24,), norm="layer_norm",
                       layouts=(("b0", "transposed"), ("norm_weight", "stepped"), ("norm_bias", "one value"))),
}  # fmt: skip


def elsewhere(group: ProcessGroup, case: Case) -> None:
    """Check compiled, torch.func, autocast, checkpointed, inference, meta and create_graph calls."""
    operands = Operands(case, group)
    names, leaves = list(operands.given), list(operands.leaves().values())
    places = tuple(range(len(leaves)))

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(operands.call("auto", dict(zip(names, leaves, strict=True))))

    def loss(*leaves: Tensor) -> Tensor:
        # All ranks have the same results of an all-reduce, so they have the same loss.
        return torch.stack([out.square().sum() for out in call(*leaves)]).sum()

    expected, grads = call(*leaves), torch.autograd.grad(loss(*leaves), leaves)

    def compare(found: Sequence[Tensor], others: Sequence[Tensor] = grads) -> None:
        for one, other in zip(found, others, strict=True):
            torch.testing.assert_close(one, other)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    compare(compiled, expected)
    compare(torch.autograd.grad(torch.stack([out.square().sum() for out in compiled]).sum(), leaves))
    again = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
    compare(torch.autograd.grad(again, leaves))
    compare(torch.func.grad(loss, argnums=places)(*(each.detach() for each in leaves)))
    twice = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    compare(twice)
    with pytest.raises(NotImplementedError):
        twice[0].sum().backward()
    ones = [torch.ones_like(out)[None] for out in expected]
    if case.norm or case.activation:
        with pytest.raises(NotImplementedError):
            torch.autograd.grad(call(*leaves), leaves, ones, is_grads_batched=True)
    with torch.inference_mode():
        compare(call(*(each.clone() for each in leaves)), expected)
    assert [out.shape for out in call(*(each.to("meta") for each in leaves))] == [out.shape for out in expected]
    with torch.autocast("cpu", BF16):
        floats = [each.detach().float().requires_grad_() for each in leaves]
        made = call(*floats)
        assert {each.dtype for each in made} == {BF16}
        made[0].sum().backward()
        assert {each.grad.dtype for each in floats if each.grad is not None} == {FP32}


# Compiling is slow; `rms_norm` includes a residual, and `swiglu` several weights.
@pytest.mark.parametrize("name", ELSEWHERE if LARGE else ("swiglu", "layer_norm"))
def test_elsewhere(pool: RankPool, name: str) -> None:
    pool.run(elsewhere, ELSEWHERE[name], world_size=2)


def summed_alike(group: ProcessGroup, schedule: str) -> None:
    """Check that a row has the same bits one-shot, two-shot and scattered, normed too. A residual is rounded once: 1 +
    2**-8 - 1 in bfloat16 is 0 if the sum was rounded first.
    """
    found = []
    for kind, algorithm in (("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("scatter", "auto")):
        operands = Operands(Case(kind, FP32, (33,), widths=(24,), norm="rms_norm", algorithm=algorithm), group)
        given = operands.given
        if schedule == "decomposed":
            # A library promises no bits: only sums of whole numbers are the same in any order.
            given = {name: (4 * each).round() for name, each in given.items()}
        found.append(operands.call(schedule, given))
    *reduced, scattered = found
    rows = [each.split(operands.sizes)[group.rank()] for each in reduced[0]]
    assert all(map(torch.equal, *reduced))
    assert all(map(torch.equal, rows, scattered))
    x = torch.tensor([[(1.0, 2.0**-8, 0.0)[group.rank()]]], dtype=BF16)
    one, residual = torch.ones(1, 1, dtype=BF16), -torch.ones(1, 1, dtype=BF16)
    y = fusedtp.linear_all_reduce(x, one, group=group, schedule=schedule, residual=residual)
    assert y.item() == 2.0**-8


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_rows_have_their_bits_wherever_they_are_made(pool: RankPool, schedule: str) -> None:
    pool.run(summed_alike, schedule, world_size=3)


def layers(group: ProcessGroup) -> None:
    """Check that a layer with an activation, residual or norm equals the plain layer followed by it."""

    def made(kind: Any, *features: int, **more: Any) -> Any:
        torch.manual_seed(3)
        return kind(*features, group=group, **more)

    rank = group.rank()
    for sequence_parallel, sizes in itertools.product((True, False), (None, (5, 3))):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "feature_sizes": sizes}
        x, found = whole((4, 6), FP32, rank * sequence_parallel), []
        for more in ({"activation": "silu"}, {}):
            layer = made(fusedtp.ColumnParallelLinear, 6, 8, **options, **more)
            y = layer(x) if more else F.silu(layer(x))
            y.sum().backward()
            found.append((y.detach(), layer.weight.grad.to_local()))
            assert ("activation='silu'" in repr(layer)) == bool(more)
        torch.testing.assert_close(*found)
        norm = "rms_norm" if sequence_parallel else "layer_norm"
        layer = made(fusedtp.RowParallelLinear, 8, 8, **options, norm=norm, dtype=FP64)
        plain = made(fusedtp.RowParallelLinear, 8, 8, **options, dtype=FP64)
        mine = whole((4, 8), FP64, 1).split(layer.feature_sizes, -1)[rank]
        residual = whole((4, 8), FP64, 2)[slice(2 * rank, 2 * rank + 2) if sequence_parallel else slice(None)]
        normed, y = layer(mine, residual)
        torch.testing.assert_close(y, plain(mine) + residual)
        given = {"norm": norm, "norm_eps": 1e-6, "norm_weight": torch.ones(8, dtype=FP64)}
        given |= {} if sequence_parallel else {"norm_bias": torch.zeros(8, dtype=FP64)}
        check_norm(normed.detach(), y.detach(), given)
        normed.square().sum().backward()
        # 2 normed^2, summed over all rows.
        total = 2 * normed.detach().square().sum(0)
        total = fusedtp.all_reduce(total, group=group) if sequence_parallel else total
        torch.testing.assert_close(layer.norm_weight.grad.full_tensor(), total)
        names = {"norm_weight"} if sequence_parallel else {"norm_weight", "norm_bias"}
        assert {name for name in layer.state_dict() if "norm" in name} == names
    one, other = (made(fusedtp.FSDPLinear, 6, 8, activation=name) for name in ("relu", None))
    torch.testing.assert_close(one(x), F.relu(other(x)))


def test_layers(pool: RankPool) -> None:
    pool.run(layers, world_size=2)


def of_float8(group: ProcessGroup) -> None:
    """Check a norm after a sum of `Scaled` operands and after a float8 recipe; y is as without the norm."""
    operands = Operands(Case("scatter", FP32, (8,), widths=(24,), norm="rms_norm", residual=True), group)
    given, norm = operands.given, {**operands.norm, "norm_weight": operands.given["norm_weight"]}
    cast = fusedtp.linear_reduce_scatter(given["x"], given["w0"], group=group, float8="rowwise", **norm)
    check_norm(*cast, norm)
    narrow: Any = {key: each.bfloat16() if isinstance(each, Tensor) else each for key, each in norm.items()}
    scaled = [fusedtp.scaled(given[name], "rowwise") for name in ("x", "w0")]
    call: Any = partial(fusedtp.linear_reduce_scatter, *scaled, group=group, residual=given["residual"].bfloat16())
    normed, y = call(**narrow)
    check_norm(normed, y, narrow)
    assert torch.equal(y, call())
    assert torch.equal(torch.compile(lambda: call(**narrow), fullgraph=True, backend="aot_eager")()[1], y)


def test_a_norm_after_float8(pool: RankPool) -> None:
    pool.run(of_float8, world_size=2)
