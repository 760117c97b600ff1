"""What is drawn from all combinations where time counts. `nox -s soak`, with FUSEDTP_SOAK=large, takes all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

LARGE = os.environ.get("FUSEDTP_SOAK") == "large"


def spread(*values: Sequence[Any], large: bool = LARGE) -> list[tuple[Any, ...]]:
    """Combinations of one value of each list in which every value has its turn; all of them if `large`."""
    if large:
        return list(product(*values))
    return [tuple(each[i % len(each)] for each in values) for i in range(max(map(len, values)))]
