"""docs/sharding.md: its table is generated, its claims are counted and compared on four ranks, its code runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.explain import NAMED, CommunicationRow, explain, table, table_markdown
from fusedtp.sharding.notation import Dim, parse

from . import generated

DOCUMENT = Path(__file__).parent.parent / "docs" / "sharding.md"
TEXT = DOCUMENT.read_text()
LENGTHS = (24, 8, 16)  # rows, contraction and columns; all divide by four ranks
WORLD_SIZE = 4
# Sums of at most 24 products of normal numbers, |a| < 5, with one rounding for each addition.
BOUND = 24 * 24 * 25 * torch.finfo(torch.float64).eps


def test_the_table_is_generated() -> None:
    generated.as_written(DOCUMENT, "table", table_markdown(), "FUSEDTP_README")


def test_the_steps_shown_are_those_planned_and_the_code_of_the_wrong_claims_runs() -> None:
    shown, code = (re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) for kind in ("text", "python"))
    assert shown == [f"{explain('FSDP')}\n"]
    assert code[-1].count("assert not") == 2
    exec(compile(code[-1], str(DOCUMENT), "exec"), {})


def operands() -> dict[str, Tensor]:
    """Return the whole tensors of y = x @ w and of its gradients, in float64."""
    m, k, n = LENGTHS
    random = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((m, k), (k, n), (m, n)))
    return {"x": x, "w": w, "dy": dy, "y": x @ w, "dx": dy @ w.t(), "dw": x.t() @ dy}


def shard(whole: Tensor, dims: tuple[Dim, ...], group: ProcessGroup) -> Tensor:
    for i, dim in enumerate(dims):
        whole = whole.chunk(group.size(), i)[group.rank()] if dim.axes else whole
    return whole.clone()


@contextlib.contextmanager
def telling(held: Mapping[str, Tensor], before: Collection[str]) -> Iterator[list[str]]:
    """Collect sent collectives in the table's words. The shape of its shard identifies a gathered tensor; `again` if
    `before` has the same gather.
    """
    told: list[str] = []
    run = BoundTask.run

    def told_run(ready: BoundTask, given: Mapping[str, Any]) -> list[Tensor]:
        task, x = ready.task, given["a"]
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        words = next(kind for kind in kinds if kind in task.op.name).replace("_", "-")
        if words == "all-gather":
            (name,) = (name for name, tensor in held.items() if sorted(tensor.shape) == sorted(x.shape))
            again = any(each.startswith(f"all-gather {name}") for each in before)
            words += f" {name}" + " again" * again + " along the contraction" * (task.dim == 1)
        told.append(words)
        return run(ready, given)

    with mock.patch.object(BoundTask, "run", told_run):
        yield told


def run_row(group: ProcessGroup, name: str) -> CommunicationRow:
    """Return the table's row as it was sent, and check that each of the three results is the unsharded one's shard."""
    spec, whole = parse(NAMED[name]), operands()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    dims = {"x": spec.a.dims, "w": spec.b.dims, "dy": spec.c.dims}
    held = {each: shard(whole[each], dims[each], group) for each in dims}
    cells = {}
    for result, result_dims in (("y", spec.c.dims), ("dx", spec.a.dims), ("dw", spec.b.dims)):
        x, w = held["x"].clone().requires_grad_(result == "dx"), held["w"].clone().requires_grad_(result == "dw")
        with telling(held, ()) as forward:
            y = fusedtp.sharded_matmul(x, w, str(spec), mesh, schedule="decomposed")
        with telling(held, forward) as backward:
            found = y if result == "y" else torch.autograd.grad(y, x if result == "dx" else w, held["dy"])[0]
        last = ", last dim" if result_dims[-1].axes else ""
        told = [each + last * (each == "reduce-scatter") for each in (forward if result == "y" else backward)]
        cells[result] = "; ".join(told) or "none"
        torch.testing.assert_close(found, shard(whole[result], result_dims, group), rtol=0, atol=BOUND)
    return CommunicationRow(name, str(spec), forward=cells["y"], dx=cells["dx"], dw=cells["dw"])


@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
def test_every_row_is_what_is_sent(pool: RankPool, row: CommunicationRow) -> None:
    assert pool.run(run_row, row.name, world_size=WORLD_SIZE) == [row] * WORLD_SIZE
