"""What a call of a linear op asks for beside its tensors: one value, from the public function down to the kernels."""

from __future__ import annotations

from typing import NamedTuple

from .op import RANK_ORDER


class Options(NamedTuple):
    """The keywords of the public functions, as `all_gather_linear` describes them; every rank gives the same."""

    schedule: str = "auto"
    algorithm: str = "auto"
    producer: str = "auto"
    float8: str | None = None
    order: str = RANK_ORDER
    activation: str | None = None


def without_producer(asked: Options) -> Options:
    """The same of a call that gathers nothing. The code is such that a compiler can trace it."""
    return Options(asked.schedule, asked.algorithm, "auto", asked.float8, asked.order, asked.activation)
