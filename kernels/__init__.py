"""Triton kernels that fuse a matmul with its collective, and the signals that order them.

Without a GPU, kernels run in Triton's interpreter. That must be chosen before the first kernel is defined: importing
this package does so, unless TRITON_INTERPRET is already set. This package imports only torch and triton.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

if __name__ != "fusedtp.kernels":
    # Imported as `kernels` from a clone's root: transformers means the hub's package of that name, so load that if any.
    __path__ = []
    _root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _other = PathFinder.find_spec(__name__, [each for each in sys.path if os.path.abspath(each) != _root])
    if _other is not None and _other.loader is not None:
        sys.modules[__name__] = module_from_spec(_other)
        _other.loader.exec_module(sys.modules[__name__])
else:
    import torch

    if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

    import triton

    INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

    if INTERPRETED:
        from .interpreter import prepare

        prepare()
