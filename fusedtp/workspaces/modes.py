"""What is kept for later calls is made outside of torch.inference_mode, whatever mode the call that needs it first is
in: a tensor of that mode may be neither written nor viewed by an op that is trained with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function runs outside of inference mode.

    Not by torch's own context: where that is interrupted as it begins or ends, the mode goes back to what it was when
    the exception is let go of, then and there, and a program that trains has no gradients any more.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        guard = None
        try:
            try:
                # Once it is made it holds.
                guard = torch._C._InferenceMode(False)
                return function(*args, **kwargs)
            finally:
                if guard is not None:
                    guard.__exit__(None, None, None)
        finally:
            # Once more, which does nothing, for an interruption before the line above.
            if guard is not None:
                guard.__exit__(None, None, None)

    return outside
