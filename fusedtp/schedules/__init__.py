"""Three ways to run a task, with the same verbs, operands and results.

    unfused       the collective, then the matmul, through the process group's backend: the baseline and the fallback
    decomposed    library matmuls by chunk, the next chunk in flight while one is multiplied
    fused         persistent Triton kernels: one for a gather, two for a sum

The ops are rows of the table in `op`; `verbs` defines what a schedule provides for them. Operands are 2-D with any
strides, and any size may be 0. `sizes` is the same tuple on every rank. Results are fresh and contiguous.
"""

from __future__ import annotations

NAMES = ("fused", "decomposed", "unfused")
