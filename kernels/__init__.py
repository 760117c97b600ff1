"""Triton kernels that fuse a matmul with its collective, and the signals that order them.

Without a GPU, kernels run in Triton's interpreter. That must be chosen before the first kernel is defined: importing
this package does so, unless TRITON_INTERPRET is already set. This package imports only torch and triton.
"""

from __future__ import annotations

import os

if __name__ != "fusedtp.kernels":
    raise ImportError(
        "this folder is installed as fusedtp.kernels; `import kernels` would hide another package of that name"
    )

import torch

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    from .interpreter import prepare

    prepare()
