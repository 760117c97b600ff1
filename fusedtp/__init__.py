"""Tensor-parallel matmuls fused with their collectives.

`import fusedtp` loads torch and nothing heavier: schedules, Triton and the benchmark's libraries load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .choose.paths import Path, last_path, paths, require
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
    from .hf.decoders import decoder_plan, parallelize
    from .hf.in_transformers import use_in_transformers
    from .hf.pretrained import from_pretrained
    from .hf.trainer import trainer_class
    from .styles.embeddings import FusedEmbeddingParallel
    from .styles.grouped import FusedGroup
    from .styles.linears import FusedColwiseParallel, FusedRowwiseParallel
    from .styles.norms import FusedNormParallel
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


_WITH_DTENSOR = {
    "FusedColwiseParallel": "styles.linears",
    "FusedEmbeddingParallel": "styles.embeddings",
    "FusedGroup": "styles.grouped",
    "FusedNormParallel": "styles.norms",
    "FusedRowwiseParallel": "styles.linears",
    "decoder_plan": "hf.decoders",
    "from_pretrained": "hf.pretrained",
    "parallelize": "hf.decoders",
    "trainer_class": "hf.trainer",
    "use_in_transformers": "hf.in_transformers",
}


def __getattr__(name: str) -> Any:
    # The workspace imports Triton, which importing the package must not.
    if name in ("check", "destroy", "set_timeout"):
        from .workspaces import registry

        return getattr(registry, name)
    # These import DTensor.
    if name == "fsdp":
        return import_module(f".{name}", __name__)
    if name in _WITH_DTENSOR:
        return getattr(import_module(f".{_WITH_DTENSOR[name]}", __name__), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("fusedtp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if_asked()
del if_asked


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
