"""Settings of a call, without its tensors and lengths, as one string for a registered operator.

The string has one line for each of: activation, spec, this rank's numbers, flags, schedule, algorithm, producer,
float8, norm, leaves. The groups' names follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..op import Options
from ..scaled import RECIPES

# Size of the cache of calls.
MAX_CALLS = 4096
# Line numbers of float8, norm and leaves. `_BLOCKS` follows float8's dtypes if scales are block scales.
_FLOAT8, _NORM, _LEAVES = 7, 8, 9
_BLOCKS = " blocks"
_NOTHING = Options()


def described(
    spec: str, group_names: Sequence[str], ranks: Sequence[int], asked: Options = _NOTHING, *,
    w_transposed: bool = True, by_size: bool = False, norm: str = "", leaves: int = 0,
) -> str:  # fmt: skip
    """Return settings as one string. A compiler can trace the code."""
    flags = "".join(["1" if flag else "0" for flag in (w_transposed, by_size)])
    numbers = " ".join([str(rank) for rank in ranks])
    lines = asked.schedule, asked.algorithm, asked.producer, asked.float8 or "", norm, str(leaves)
    return "\n".join([asked.activation or "", spec, numbers, flags, *lines, *group_names])


def with_float8(text: str, x: torch.dtype, w: torch.dtype, out: torch.dtype, *, blocks: bool) -> str:
    """Return the settings for float8 operands x and w with scales, which are block scales if `blocks`."""
    # Replaces the line that otherwise has the recipe.
    before, (_, *names) = text.split("\n")[:_FLOAT8], text.split("\n")[_FLOAT8:]
    return "\n".join([*before, f"{x} {w} {out}{_BLOCKS * blocks}".replace("torch.", ""), *names])


def without_norm(text: str) -> str:
    """Return the settings without the norm."""
    before, (_, *names) = text.split("\n")[:_NORM], text.split("\n")[_NORM:]
    return "\n".join([*before, "", *names])


def normed(text: str) -> tuple[bool, str, str]:
    """Return, for a call with a norm, whether each rank norms rows of its own, the group's name and the schedule.

    A compiler can trace the code.
    """
    _, spec, _, _, schedule, *_ = lines = text.split("\n")
    return "_X" in spec.split("->")[1], lines[_LEAVES + 1], schedule


@dataclass(frozen=True)
class Settings:
    """Settings of a call: everything except its tensors and lengths.

    - `text`: the settings as one string.
    - `spec`: the call in the notation of `sharding.notation`.
    - `group_names`: one for each mesh axis, in the spec's order.
    - `ranks`: this rank's number in each group. Uneven shapes depend on it, and it keeps a rank from using another
      rank's compiled graph from a cache.
    - `w_transposed`: whether w is stored [N, K].
    - `by_size`: whether the plan depends on bytes and FLOPs.
    - `schedule`, `algorithm`, `producer`, `activation`: as in `Options`, "" for no activation.
    - `float8`: dtypes of x and w, if they are float8 with scales.
    - `out_dtype`: dtype of the results, if x and w are float8 with scales.
    - `recipe`: name of the recipe that casts x, w and dy to float8, "" for none.
    - `blocks`: whether scales are block scales.
    - `norm`: its name, "" for none, and eps.
    - `leaves`: leaves of the tree order of contractions, 0 for rank order, `op.AS_ANY` for any order.
    """

    text: str
    spec: str
    group_names: tuple[str, ...]
    ranks: tuple[int, ...]
    w_transposed: bool
    by_size: bool
    schedule: str
    algorithm: str
    producer: str
    activation: str
    float8: tuple[torch.dtype, ...]
    out_dtype: torch.dtype | None
    recipe: str
    blocks: bool
    norm: tuple[str, float]
    leaves: int

    @staticmethod
    @lru_cache(maxsize=MAX_CALLS)
    def of(text: str) -> Settings:
        """Parse a string that `described` made."""
        activation, spec, numbers, flags, schedule, algorithm, producer, float8, norm, leaves, *names = text.split("\n")
        ranks = tuple(map(int, numbers.split()))
        w_transposed, by_size = (flag == "1" for flag in flags)
        recipe = float8 if float8 in RECIPES else ""
        name, _, eps = norm.partition(" ")
        dtypes = () if recipe else tuple(getattr(torch, name) for name in float8.removesuffix(_BLOCKS).split())
        return Settings(
            text, spec, tuple(names), ranks, w_transposed, by_size, schedule, algorithm, producer, activation,
            dtypes[:2], dtypes[2] if dtypes else None, recipe, float8.endswith(_BLOCKS), (name, float(eps or 0)),
            int(leaves),
        )  # fmt: skip
