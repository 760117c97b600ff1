"""Three ways to run one task; the same verbs, operands and results by each.

`unfused`     the collective, then the matmul, through the process group's backend: the baseline and the fallback
`decomposed`  library matmuls by chunk, the next chunk on its way while one is multiplied
`fused`       one persistent Triton kernel

The ops are rows of the table in `op`; what a schedule gives for one is told in `verbs`. Operands are 2-D with any
strides, any size may be 0, `sizes` is the same tuple on every rank, results are fresh and contiguous.
"""

from __future__ import annotations

NAMES = ("fused", "decomposed", "unfused")
