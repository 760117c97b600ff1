"""What one op has no other gets, in any thread, until that op ends or raises."""

from __future__ import annotations

import threading

import pytest
import torch

from fusedtp import locks
from fusedtp.workspaces import registry

from .beside import InThread, until

KEY = ("group", "one")


def taken(op: str = "op") -> None:
    locks.alone(KEY, op, lambda: None)
    assert KEY not in locks._taken


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_turn_is_free_after_an_exception(error: type[BaseException]) -> None:
    def strike() -> None:
        raise error

    with pytest.raises(error):
        locks.alone(KEY, "op", strike)
    taken()


def test_a_turn_that_is_held_is_not_free() -> None:
    with pytest.raises(RuntimeError, match=r"^op: first is under way in thread"):
        locks.alone(KEY, "first", taken)
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        until(done.is_set)

    there = InThread(lambda: locks.alone(KEY, "first", hold))
    entered.wait(60)
    with pytest.raises(RuntimeError, match="'the other thread'"):
        taken()
    done.set()
    there.result()
    taken()


def test_destroy_holds_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op of another thread meets none of a workspace that is being given back."""
    key = ("one", torch.device("cpu"))
    monkeypatch.setattr(registry, "_made_for", {key: None})
    refused: list[str] = []

    def forget(_: object) -> None:
        try:
            InThread(taken).result()
        except RuntimeError as error:
            refused.append(str(error))

    monkeypatch.setattr(registry, "_forget", forget)
    registry.destroy()
    assert refused[0].startswith("op: destroy is under way in thread 'MainThread'")
    taken()
