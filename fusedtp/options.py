"""Options of a call: one value, passed from the public function to the preparation of the call."""

from __future__ import annotations

from typing import NamedTuple

from .op import RANK_ORDER


class Options(NamedTuple):
    """Options of a call, equal on all ranks. `all_gather_linear` documents them."""

    schedule: str = "auto"
    algorithm: str = "auto"
    producer: str = "auto"
    float8: str | None = None
    order: str = RANK_ORDER
    activation: str | None = None


def without_producer(asked: Options) -> Options:
    """Return the options with the default producer, for a call without a gather. A compiler can trace the code."""
    return Options(asked.schedule, asked.algorithm, "auto", asked.float8, asked.order, asked.activation)
