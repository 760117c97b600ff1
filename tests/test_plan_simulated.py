"""Plans run on simulated ranks: every sharding over one axis and over two, forward and both gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.errors import NotationError
from fusedtp.sharding.notation import Tensor
from fusedtp.sharding.plan import MatmulPlan, Plan, plan

from .harness import LARGE

Array = npt.NDArray[np.float64]
Coord = tuple[int, ...]
Shards = dict[Coord, Array]

# With two axes, every subset in every order.
ONE, TWO = ("", "_X"), ("", "_X", "_Y", "_XY", "_YX")


class Mesh:
    """All ranks of a mesh in one process; a tensor is a dict from a rank's coordinates to its shard."""

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self.ranks = dict(ranks)
        self.coords = list(product(*(range(n) for n in self.ranks.values())))

    def peers(self, coord: Coord, axis: str) -> list[Coord]:
        at = list(self.ranks).index(axis)
        return [(*coord[:at], i, *coord[at + 1 :]) for i in range(self.ranks[axis])]

    def part(self, array: Array, dim: int, axis: str, coord: Coord) -> Array:
        return np.array_split(array, self.ranks[axis], axis=dim)[coord[list(self.ranks).index(axis)]]

    def cut(self, dense: Array, tensor: Tensor) -> Shards:
        """Return the shards of a whole array by the notation's definition, ignoring partial axes."""
        shards = {}
        for coord in self.coords:
            shard = dense
            for i, dim in enumerate(tensor.dims):
                for axis in dim.axes:
                    shard = self.part(shard, i, axis, coord)
            shards[coord] = shard
        return shards

    def summed(self, shards: Shards, axes: tuple[str, ...]) -> Shards:
        for axis in axes:
            shards = {coord: sum(shards[peer] for peer in self.peers(coord, axis)) for coord in self.coords}
        return shards

    def run(self, matmul: MatmulPlan, a: Array, b: Array) -> Shards:
        """Run a plan's steps on shards of its whole operands, with dims in the plan's order."""
        names = dict(zip(matmul.names, (matmul.a.names, matmul.b.names, matmul.c.names), strict=True))
        held = {matmul.names[0]: self.cut(a, matmul.a), matmul.names[1]: self.cut(b, matmul.b)}
        for step in matmul.steps:
            if step.kind == "matmul":
                left, right = held[matmul.names[0]], held[matmul.names[1]]
                contraction = matmul.contraction
                dims = [matmul.a.names.index(k) for k in contraction], [matmul.b.names.index(k) for k in contraction]
                held[step.tensor] = {coord: np.tensordot(left[coord], right[coord], dims) for coord in self.coords}
                continue
            old, dim = held[step.tensor], names[step.tensor].index(step.dim) if step.dim else -1
            if step.reduces:
                old = self.summed(old, (step.axis,))
            if step.kind == "all_gather":
                parts = {coord: [old[peer] for peer in self.peers(coord, step.axis)] for coord in self.coords}
                old = {coord: np.concatenate(each, axis=dim) for coord, each in parts.items()}
            elif step.kind != "all_reduce":
                old = {coord: self.part(old[coord], dim, step.axis, coord) for coord in self.coords}
            held[step.tensor] = old
        return held[matmul.names[2]]


@cache
def operands(lengths: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Return small whole numbers x [batch..., M, K], w [K, N] and dy [batch..., M, N]: any order of sums is exact."""
    rng = np.random.default_rng(0)
    *rows, k, n = lengths
    x, w, dy = (rng.integers(-4, 5, shape).astype(np.float64) for shape in ((*rows, k), (k, n), (*rows, n)))
    return x, w, dy


def check(plans: Plan, mesh: Mesh, lengths: Mapping[str, int]) -> None:
    """Compare forward and both gradients of a plan with the dense result on every rank of `mesh`."""
    spec = plans.spec
    x, w, dy = operands(tuple(lengths[name] for name in spec.dim_names))
    rows = list(range(x.ndim - 1))
    dense = {"y": x @ w, "dx": dy @ w.T, "dw": np.tensordot(x, dy, (rows, rows))}
    given_to = {"y": (x, w), "dx": (dy, w.T), "dw": (np.moveaxis(x, -1, 0), dy)}
    for matmul in plans.matmuls:
        name = matmul.names[2]
        found = mesh.summed(mesh.run(matmul, *given_to[name]), matmul.c.partial)
        for coord, wanted in mesh.cut(dense[name], matmul.c).items():
            np.testing.assert_array_equal(found[coord], wanted, err_msg=f"{spec}: {name} on rank {coord}")
        check_steps(matmul)


def check_steps(matmul: MatmulPlan) -> None:
    """Check that the steps reach the wanted sharding, and that the matmul is fused with any adjacent collective."""
    *_, (_, _, last) = matmul.walked
    assert last == matmul.c
    kinds = [step.kind for step in matmul.steps]
    at = kinds.index("matmul")
    fused = [i for i, step in enumerate(matmul.steps) if step.fused]
    assert matmul.steps[at].fused == bool(fused)
    assert fused in ([], [at - 1, at], [at, at + 1])
    beside = [kinds[at - 1] if at else "", kinds[at + 1] if at + 1 < len(kinds) else ""]
    assert bool(fused) == (beside[0] == "all_gather" or beside[1] in ("all_reduce", "reduce_scatter")), matmul.steps


def texts(options: tuple[str, ...], partial: tuple[str, ...]) -> Iterator[str]:
    for m, k, k2, n, m2, n2 in product(options, repeat=6):
        for sums in partial:
            yield f"[M{m}, K{k}] @ [K{k2}, N{n}] -> [M{m2}, N{n2}]{sums}"


def is_valid(text: str) -> bool:
    """Return whether a spec is valid: no axis twice in a tensor, partial only over axes of the contraction."""
    a, b, c = (part.strip() for part in text.replace("@", "->").split("->"))
    used = [[letter for letter in tensor if letter in "XY"] for tensor in (a, b, c)]
    sums = c.partition("{U_")[2].rstrip("}")
    contraction = a.split("K")[1] + b.split(",")[0]
    return all(len(set(axes)) == len(axes) for axes in used) and all(axis in contraction for axis in sums)


def refusal(text: str) -> str:
    # pytest.raises is slower than the parser, and would run 60,000 times.
    try:
        plan(text)
    except NotationError as error:
        return str(error)
    return ""


def sort_out(texts_of: Iterator[str], every: int = 1) -> tuple[list[str], int]:
    """Return the valid specs and the number of others; every `every`-th of the others must be refused with a caret."""
    valid, num_others = [], 0
    for text in texts_of:
        if is_valid(text):
            valid.append(text)
        else:
            assert num_others % every or refusal(text).endswith("^"), f"{text} was not refused"
            num_others += 1
    return valid, num_others


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sharding_over_one_axis(world_size: int) -> None:
    valid, num_refused = sort_out(texts(ONE, ("", "{U_X}")))
    assert (len(valid), num_refused) == (32, 96)
    for text in valid:
        check(plan(text), Mesh({"X": world_size}), {"M": 5, "K": 7, "N": 4})


def test_every_sharding_over_two_axes() -> None:
    valid, num_refused = sort_out(texts(TWO, ("", "{U_X}", "{U_Y}", "{U_XY}")), 1 if LARGE else 7)
    # Eleven shardings of each matrix; {U_X} and {U_Y} with 72 pairs of operands each, which split K over the axis, and
    # three shardings of the result; {U_XY} with 48 pairs.
    assert (len(valid), num_refused) == (11**3 + 2 * 72 * 3 + 48, 60689)
    mesh = Mesh({"X": 2, "Y": 2})
    for text in valid if LARGE else valid[::5]:
        plans = plan(text)
        check(plans, mesh, {"M": 5, "K": 7, "N": 3})  # N over two axes leaves one rank without a column
        for matmul in plans.matmuls if "{" not in text else ():
            # A partial is not all-reduced if a scatter suffices. With sizes, an all-reduce of few bytes may be cheaper
            # than one more collective.
            reduced = {step.axis for step in matmul.steps if step.kind == "all_reduce"}
            assert not reduced & set(matmul.c.used), text


def test_every_way_over_one_axis_by_sizes() -> None:
    """Sizes favour each plan in turn; the selected plans run on small tensors."""
    valid, _ = sort_out(texts(ONE, ("", "{U_X}")))
    mesh, seen, num_other = Mesh({"X": 3}), set(), 0
    for text in valid:
        usual = plan(text)
        for lengths in product((16, 2048, 2**18), repeat=3):
            sizes = dict(zip("MKN", lengths, strict=True))
            # A time to start finds no plan that sizes alone do not.
            for start_bytes in (0, 2**20) if LARGE else (0,):
                found = plan(text, sizes=sizes, mesh={"X": 8}, start_bytes=start_bytes)
                steps = tuple(matmul.steps for matmul in found.matmuls)
                num_other += sum(one != other.steps for one, other in zip(steps, usual.matmuls, strict=True))
                if (text, steps) not in seen:
                    seen.add((text, steps))
                    check(found, mesh, {"M": 5, "K": 7, "N": 4})
    assert num_other > 100


@st.composite
def specs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw a spec over two axes with up to two batch dims, and the names of its dims."""
    rows = ["A", "B", "M"][draw(st.integers(0, 2)) :]

    def tensor(names: list[str], partial: str = "") -> str:
        owner = {axis: draw(st.sampled_from([*names, *("U" * (axis in partial)), ""])) for axis in "XY"}
        order = draw(st.sampled_from(["XY", "YX"]))
        split = {name: "".join(axis for axis in order if owner[axis] == name) for name in [*names, "U"]}
        dims = ", ".join(f"{name}_{split[name]}" if split[name] else name for name in names)
        return f"[{dims}]" + (f"{{U_{split['U']}}}" if split["U"] else "")

    a, b = tensor([*rows, "K"]), tensor(["K", "N"])
    return f"{a} @ {b} -> {tensor([*rows, 'N'], a.split('K')[1] + b.split(',')[0])}", [*rows, "K", "N"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, int], dict[str, int], bool]:
    """Draw a spec, uneven lengths down to 0, and a mesh."""
    text, names = draw(specs())
    lengths = {name: draw(st.integers(0, 6)) for name in names}
    return text, lengths, {axis: draw(st.integers(1, 3)) for axis in "XY"}, draw(st.booleans())


@settings(max_examples=400 if LARGE else 40, deadline=None)
@given(cases())
def test_random_specs_with_batch_dims_and_sizes(case: tuple[str, dict[str, int], dict[str, int], bool]) -> None:
    text, lengths, mesh, sized = case
    plans = plan(text, sizes=lengths, mesh=mesh, dtype="float32", start_bytes=0) if sized else plan(text)
    check(plans, Mesh(mesh), lengths)
