"""Tensor-parallel matmuls fused with their collectives.

`import fusedtp` loads torch and nothing heavier: schedules, Triton and the benchmark's libraries come on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .dispatch import Path, last_path
from .errors import NotationError, PeerTimeout
from .functional import (
    all_gather,
    all_gather_linear,
    all_reduce,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_scatter,
)

if TYPE_CHECKING:
    from .workspace import destroy, set_timeout

__all__ = [
    "NotationError",
    "Path",
    "PeerTimeout",
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "destroy",
    "last_path",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "reduce_scatter",
    "set_timeout",
]


def __getattr__(name: str) -> Any:
    # The workspace brings Triton in, which an import of the package must not.
    if name in ("destroy", "set_timeout"):
        from . import workspace

        return getattr(workspace, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
