"""All of a call but its tensors and lengths, as one string, which a registered operator takes.

A line each: the activation, the spec, this rank's numbers, flags, schedule, algorithm, producer, float8, norm and
leaves; then the groups' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .. import recipes
from ..options import Options

# How many calls are kept.
MAX_CALLS = 4096
# The places of float8, the norm and the leaves among the lines, and what stands behind float8's dtypes if scales are of
# blocks.
_FLOAT8, _NORM, _LEAVES = 7, 8, 9
_BLOCKS = " blocks"
_NOTHING = Options()


def described(
    spec: str, group_names: Sequence[str], ranks: Sequence[int], asked: Options = _NOTHING, *,
    w_transposed: bool = True, by_size: bool = False, norm: str = "", leaves: int = 0,
) -> str:  # fmt: skip
    """`Settings` as one string, which a registered operator takes. The code is such that a compiler can trace it."""
    flags = "".join(["1" if flag else "0" for flag in (w_transposed, by_size)])
    numbers = " ".join([str(rank) for rank in ranks])
    lines = asked.schedule, asked.algorithm, asked.producer, asked.float8 or "", norm, str(leaves)
    return "\n".join([asked.activation or "", spec, numbers, flags, *lines, *group_names])


def with_float8(text: str, x: torch.dtype, w: torch.dtype, *, blocks: bool) -> str:
    """The same settings, of a call on float8 operands with scales, or with those of blocks."""
    # The line of `described` that has a recipe where there is one.
    before, (_, *names) = text.split("\n")[:_FLOAT8], text.split("\n")[_FLOAT8:]
    return "\n".join([*before, f"{x} {w}{_BLOCKS * blocks}".replace("torch.", ""), *names])


def without_activation(text: str) -> str:
    """The same settings, of a call whose results are the products themselves."""
    return "\n" + text.partition("\n")[2]


def without_norm(text: str) -> str:
    """The same settings, of a call whose result is the sum alone."""
    before, (_, *names) = text.split("\n")[:_NORM], text.split("\n")[_NORM:]
    return "\n".join([*before, "", *names])


def normed(text: str) -> tuple[bool, str, str]:
    """Of a call that ends with a norm, whether each rank norms rows of its own, the group and the schedule.

    A compiler can trace the code.
    """
    _, spec, _, _, schedule, *_ = lines = text.split("\n")
    return "_X" in spec.split("->")[1], lines[_LEAVES + 1], schedule


@dataclass(frozen=True)
class Settings:
    """All of a call except its tensors and lengths.

    group_names: one a mesh axis, in the spec's order. ranks: this rank's number in each: uneven shapes depend on it,
    and a graph that a compiler has cached for one rank, on disk too, must not be used by another. w_transposed: w is
    stored [N, K]. by_size: plan by bytes and FLOPs, not the usual way. float8: the dtypes of x and w, if these are
    float8 with scales; the call's dtype is then that of its results. recipe: how x, w and dy become float8, if they do.
    blocks: whether scales are those of blocks. norm: its name, "" for none, and eps. leaves: of every contraction, if
    these are added up as trees, else 0.
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
    recipe: str
    blocks: bool
    norm: tuple[str, float]
    leaves: int

    @staticmethod
    @lru_cache(maxsize=MAX_CALLS)
    def of(text: str) -> Settings:
        """The settings that `described` made a string of."""
        activation, spec, numbers, flags, schedule, algorithm, producer, float8, norm, leaves, *names = text.split("\n")
        ranks = tuple(map(int, numbers.split()))
        w_transposed, by_size = (flag == "1" for flag in flags)
        recipe = float8 if float8 in recipes.NAMES else ""
        name, _, eps = norm.partition(" ")
        dtypes = () if recipe else tuple(getattr(torch, name) for name in float8.removesuffix(_BLOCKS).split())
        return Settings(
            text, spec, tuple(names), ranks, w_transposed, by_size, schedule, algorithm, producer, activation,
            dtypes, recipe, float8.endswith(_BLOCKS), (name, float(eps or 0)), int(leaves),
        )  # fmt: skip
