"""torch's compiler for the few small kernels of a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def few_kernels() -> AbstractContextManager[Any]:
    """Meanwhile it has no pool of processes, reads torch's headers once for all kernels, and takes the processor's word
    for its vectors: to compile a program with each kind of them takes longer than the kernels.
    """
    from torch._inductor import config

    return config.patch(  # type: ignore[no-any-return]
        {"compile_threads": 1, "cpp_cache_precompile_headers": True, "cpp.vec_isa_ok": True}
    )
