"""Common reasons why a provider cannot run a case, and a runner that is closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cases import DTYPES, FLOAT8, Case
from ..operands import Results, Runner


def limits(
    case: Case,
    direction: str,
    num_gpus: int,
    *,
    kinds: tuple[str, ...] = ("gather", "scatter"),
    dtypes: tuple[str, ...] = DTYPES,
    has_gradient: bool = False,
    needs_cuda: bool = True,
) -> str:
    """Return the first of the common reasons that applies, or ""."""
    if case.kind not in kinds:
        return {
            "gather": "it has no all-gather + matmul",
            "scatter": "it has no matmul + reduce-scatter",
            "all_reduce": "it has no matmul + all-reduce of its own kind",
        }[case.kind]
    if case.world_size == 1:
        return "one rank has nothing to send"
    if needs_cuda and not num_gpus:
        return "its fused ops need CUDA"
    if direction != "forward" and not has_gradient:
        return "its fused ops have no gradient"
    if not case.even:
        return "it splits uneven lengths otherwise than torch.tensor_split"
    if case.dtype not in dtypes:
        if case.is_float8 and FLOAT8 not in dtypes:
            return "it takes no float8 operands with scales"
        return f"it takes no {case.dtype}"
    return ""


@dataclass
class Closing:
    """A runner that releases resources after its last call."""

    run: Runner
    close: Callable[[], object]

    def __call__(self) -> Results:
        return self.run()
