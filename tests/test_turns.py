"""A turn of whoever is gone is given back: interrupted at any line, in any thread."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

from fusedtp import turns
from fusedtp.workspaces import registry

from .beside import InThread, until
from .soak import interruptions


def interrupted(number: int, call: Callable[[], None]) -> BaseException | None:
    """What `call` raises where a KeyboardInterrupt is raised before its line `number`, those of `turns` included."""

    def counts(frame: FrameType) -> bool:
        return frame.f_code.co_filename == turns.__file__ or frame.f_code is call.__code__

    return interruptions.struck(number, call, counts)[1]


def taken() -> None:
    with turns.Turn("group", "one", "op"):
        assert ("group", "one") in turns._taken


@pytest.fixture(autouse=True)
def _nothing_is_taken() -> Iterator[None]:
    assert not turns._taken
    yield
    turns._taken.clear()


def test_a_turn_is_free_after_an_interruption_at_any_line() -> None:
    # A traceback keeps the frames, and in them the turn, for as long as somebody holds the exception.
    kept = []
    while (error := interrupted(len(kept) + 1, taken)) is not None:
        kept.append(error)
        taken()
        assert not turns._taken
    # The innermost frame is the one that interrupts.
    struck = {list(traceback.walk_tb(error.__traceback__))[-2][0].f_code.co_name for error in kept}
    assert struck == {"taken", "__init__", "__enter__", "__exit__"}


def test_a_turn_of_a_thread_that_has_ended_is_free() -> None:
    InThread(lambda: turns.Turn("group", "one", "op").__enter__()).result()
    assert turns._taken
    taken()


def test_a_turn_that_is_held_is_not_free() -> None:
    with turns.Turn("group", "one", "first"), pytest.raises(RuntimeError, match=r"^op: first is under way in thread"):
        taken()
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.Turn("group", "one", "first"):
            entered.set()
            until(done.is_set)

    there = InThread(hold)
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
