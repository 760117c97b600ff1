"""Tensor-parallel matmuls fused with their collectives.

`import fusedtp` loads torch and nothing heavier: schedules, Triton and the benchmark's libraries load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .calls.paths import Path, last_path, paths, require
from .collectives import all_gather, all_reduce, reduce_scatter
from .drop_in import drop_in, if_asked
from .errors import NotationError, PeerTimeout, RanksDisagree
from .explain import explain
from .functional import all_gather_linear, fsdp_linear, linear_all_reduce, linear_reduce_scatter, sharded_matmul
from .layers import ColumnParallelLinear, FSDPLinear, ParallelMLP, RowParallelLinear
from .memory import Unreachable
from .scaled import Scaled, scaled
from .sharding.plan import plan

if TYPE_CHECKING:
    from . import fsdp

    __version__: str
    from .styles.decoders import decoder_plan, parallelize
    from .styles.embeddings import FusedEmbeddingParallel
    from .styles.grouped import FusedGroup
    from .styles.in_transformers import use_in_transformers
    from .styles.linears import FusedColwiseParallel, FusedRowwiseParallel
    from .styles.norms import FusedNormParallel
    from .styles.pretrained import from_pretrained
    from .styles.trainer import trainer_class
    from .workspaces.registry import check, destroy, set_timeout

__all__ = [
    "ColumnParallelLinear",
    "FSDPLinear",
    "FusedColwiseParallel",
    "FusedEmbeddingParallel",
    "FusedGroup",
    "FusedNormParallel",
    "FusedRowwiseParallel",
    "NotationError",
    "ParallelMLP",
    "Path",
    "PeerTimeout",
    "RanksDisagree",
    "RowParallelLinear",
    "Scaled",
    "Unreachable",
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "check",
    "cost",
    "decoder_plan",
    "destroy",
    "drop_in",
    "explain",
    "from_pretrained",
    "fsdp",
    "fsdp_linear",
    "last_path",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "parallelize",
    "paths",
    "plan",
    "reduce_scatter",
    "require",
    "scaled",
    "set_timeout",
    "sharded_matmul",
    "trainer_class",
    "use_in_transformers",
]


_STYLES = {
    "FusedColwiseParallel": "linears",
    "FusedEmbeddingParallel": "embeddings",
    "FusedGroup": "grouped",
    "FusedNormParallel": "norms",
    "FusedRowwiseParallel": "linears",
    "decoder_plan": "decoders",
    "from_pretrained": "pretrained",
    "parallelize": "decoders",
    "trainer_class": "trainer",
    "use_in_transformers": "in_transformers",
}


def __getattr__(name: str) -> Any:
    # The workspace imports Triton, which importing the package must not.
    if name in ("check", "destroy", "set_timeout"):
        from .workspaces import registry

        return getattr(registry, name)
    # These import DTensor.
    if name == "fsdp":
        return import_module(f".{name}", __name__)
    if name in _STYLES:
        return getattr(import_module(f".styles.{_STYLES[name]}", __name__), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("fusedtp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if_asked()
del if_asked


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
