"""Device code: Triton kernels that join a matmul to its collective, and the signals they are ordered by.

Where no GPU is present the kernels run in Triton's interpreter, which must be chosen before the first kernel is
defined; importing this package makes that choice unless TRITON_INTERPRET is already set. Only torch, triton and this
package are imported here.
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
