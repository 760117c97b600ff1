"""When a prepared call is reused, and when it must not be."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import groups
from fusedtp.bench.ranks import RankPool
from fusedtp.calls import call
from fusedtp.calls.problems import Settings
from fusedtp.epilogue import Epilogue
from fusedtp.op import Options

ASKED = Options("unfused")


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def near_misses(group: ProcessGroup) -> list[str]:
    """Return the bad calls that pass as a good call made before."""
    x, weight, bias = ones(5, 1, 3), ones(4, 3), ones(4)
    good: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "gather_dim": 1, "sizes": (1, 1), "group": group}
    taken, good = [], good | {"schedule": "decomposed"}
    for name, changed in {
        "another x": {"x": ones(5, 2, 3)},
        "another dtype of x": {"x": ones(5, 1, 3).double()},
        "a sparse x": {"x": ones(5, 1, 3).to_sparse()},
        "a nested x": {"x": torch.nested.nested_tensor([ones(1, 3)] * 5)},
        "x without dimensions": {"x": ones(3)},
        "another weight": {"weight": ones(4, 2)},
        "another dtype of the weight": {"weight": weight.double()},
        "a sparse weight": {"weight": weight.to_sparse()},
        "another bias": {"bias": ones(3)},
        "another dtype of the bias": {"bias": bias.double()},
        "a flag for a dim": {"gather_dim": True},
        "a float for a dim": {"gather_dim": 1.0},
        "floats for sizes": {"sizes": (1.0, 1.0)},
        "flags for sizes": {"sizes": (True, True)},
        "other sizes": {"sizes": (2, 0)},
        "sizes of another group": {"sizes": (1, 1, 0)},
        "another schedule": {"schedule": "Decomposed"},
    }.items():
        assert fusedtp.all_gather_linear(**good).shape == (5, 2, 4)
        try:
            fusedtp.all_gather_linear(**{**good, **changed})
            taken.append(name)
        except (TypeError, ValueError):
            pass
    return taken


def test_a_repeated_call_is_told_from_one_that_looks_like_it(pool: RankPool) -> None:
    assert pool.run(near_misses, world_size=2) == [[], []]


def through_new_memory(group: ProcessGroup) -> None:
    """Run a repeated backward pass after its forward pass's memory was given back."""
    x, weight = ones(2, 3).requires_grad_(), ones(4, 3).requires_grad_()
    # The first pass makes the memory, and all calls are prepared again.
    for destroyed in (False, False, True):
        x.grad = weight.grad = None
        y = fusedtp.all_gather_linear(x, weight, group=group, schedule="decomposed")
        if destroyed:
            fusedtp.destroy(group)
        y.sum().backward()
        assert torch.equal(x.grad, ones(2, 3) * 8)
        assert torch.equal(weight.grad, ones(4, 3) * 4)


def test_a_call_kept_by_a_graph_runs_in_new_memory(pool: RankPool) -> None:
    pool.run(through_new_memory, world_size=2)


class Named:
    """A stand-in for a group: its name, size and rank."""

    def __init__(self, name: str, size: int = 2, rank: int = 0) -> None:
        self.group_name, self._size, self._rank = name, size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Named]:
    """Replace the lookup of groups by name."""
    groups_: dict[str, Named] = {}
    monkeypatch.setattr(groups, "named", lambda name: groups_[name])
    return groups_


def settings_of(group: Any, asked: Options = ASKED) -> Settings:
    return Settings("[M_X, K] @ [K, N] -> [M, N]", (group.group_name,), (group.rank(),), asked)


def found_on(group: Named, kind: str = "cpu") -> call.Call:
    return call.of(settings_of(group), (4, 3, 4, 0, 0, 0), torch.float32, torch.device(kind))


def test_a_call_on_another_device_is_another(known: dict[str, Named]) -> None:
    group = known["1"] = Named("1")
    assert found_on(group, "cpu") is not found_on(group, "meta")
    assert found_on(group, "cpu") is found_on(group, "cpu")


def test_a_group_made_anew_is_another(known: dict[str, Named]) -> None:
    """Also if the new group has the name, or the address, of the old one."""
    prepared: list[str] = []

    def prepare(
        x: Tensor, weight: Tensor, group: Any, asked: Options, *, epilogue: Epilogue
    ) -> tuple[Settings, tuple[int, ...]]:
        prepared.append(group.group_name)
        return settings_of(group, asked), (2 * group.size(), 3, 4, 0, 0, 0)

    def found(name: str) -> tuple[call.Call, call.Call]:
        x, w, group = ones(2, 3), ones(4, 3), known[name]
        by_group = call.find(prepare, {"x": x, "w": w}, group, Options("unfused"))  # type: ignore[arg-type]
        return by_group, call.of(by_group.settings, by_group.numbers, x.dtype, x.device)

    known["1"] = Named("1")
    first, again = found("1"), found("1")
    assert {id(each) for each in first + again} == {id(first[0])}
    known["2"] = Named("2")
    assert found("2")[0] is not first[0]
    assert prepared == ["1", "2"]
    for other in (Named("1"), Named("1", size=3), Named("1", rank=1)):
        before = found("1")
        known["1"] = other
        assert found("1")[0] is found("1")[1]
        assert all(each not in before for each in found("1"))
    # A new group at the same address: prepared calls are dropped with their group.
    before = found("1")
    prepared.clear()
    del known["1"], other
    known["1"] = Named("1", rank=1)
    assert all(each not in before for each in found("1"))
    assert prepared == ["1"]


def test_a_group_that_ends_amid_an_interruption_is_gone(known: dict[str, Named]) -> None:
    """An exception in the callback of a group's end is lost, and so is the rest of the callback."""

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    known["1"] = Named("1")
    before = found_on(known["1"])
    assert found_on(known["1"]) is before
    sys.settrace(strike)
    try:
        del known["1"]
    finally:
        sys.settrace(None)
    known["1"] = Named("1")
    after = found_on(known["1"])
    assert after is not before
    assert after.version > before.version
