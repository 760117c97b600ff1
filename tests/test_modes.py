"""An interruption while cached data is made leaves the autograd mode as it was."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import grad_mode
from torch.utils import _contextlib

from fusedtp import torch_private
from fusedtp.workspaces import workspace
from fusedtp.workspaces.workspace import Workspace

from .soak import interruptions
from .virtual_ranks import local_memories

CPU = torch.device("cpu")
# torch's own files too, as a signal may strike there.
FILES = (torch_private.__file__, workspace.__file__, grad_mode.__file__, _contextlib.__file__)


def struck(number: int, call: Callable[[], object]) -> KeyboardInterrupt | None:
    """Raise a KeyboardInterrupt before line `number` of `call`, and return what `call` raises."""
    return interruptions.struck(number, call, lambda frame: frame.f_code.co_filename in FILES)[1]


def mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("entered", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("what", ["view", "table"])
def test_an_interruption_leaves_the_mode_as_it_was(what: str, entered: Callable[[], Any]) -> None:
    (memory,) = local_memories(1, CPU)
    ws = Workspace(memory, CPU)
    make = {"view": lambda: ws.view(0, 1, 0, (2, 2), torch.float32), "table": lambda: ws.table((2,))}[what]
    # Keep existing objects out of the collections below, of which there is one for each line.
    gc.freeze()
    try:
        for number in itertools.count(1):
            ws.views.clear()
            ws._tables.clear()
            with entered():
                inside = mode()
                error = struck(number, make)
                assert mode() == inside, f"line {number}"
            assert mode() == (True, False), f"line {number}"
            if error is None:
                break
            # The frames and their locals go with the exception.
            del error
            gc.collect()
            assert mode() == (True, False), f"line {number}, when the exception is gone"
        assert number > 5
        assert not make().is_inference()
    finally:
        gc.unfreeze()
        ws.close()
