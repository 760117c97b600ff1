"""Schedules whose results are wrong, as a test of what must find it out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from fusedtp.schedules.forms import Prepared


@contextlib.contextmanager
def wrong(schedule: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, every result of a schedule's tasks is changed."""
    run = Prepared.go

    def go(self: Prepared, operands: Any) -> list[Tensor]:
        outs = run(self, operands)
        return [change(out) for out in outs] if self.schedule == schedule else outs

    with mock.patch.object(Prepared, "go", go):
        yield
