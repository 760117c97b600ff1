"""Tensors that are kept for later calls are made outside of torch.inference_mode, whatever mode the first call that
needs them is in: an op in training may neither write nor view an inference tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ..torch_private import InferenceMode

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function runs outside of inference mode.

    Not by torch's own context manager: if that is interrupted as it begins or ends, the mode is only reset when the
    exception is released, wherever the program is then, and a program that trains loses its gradients.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        guard = None
        try:
            try:
                guard = InferenceMode(False)
                return function(*args, **kwargs)
            finally:
                if guard is not None:
                    guard.__exit__(None, None, None)
        finally:
            # In case an interruption came before the line above; otherwise this does nothing.
            if guard is not None:
                guard.__exit__(None, None, None)

    return outside
