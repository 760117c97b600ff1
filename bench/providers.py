"""Providers: other implementations of the ops, checked by the same gate and timed in the same rounds.

A provider is an entry point of the group `fusedtp.providers`, with the provider's name:

    [project.entry-points."fusedtp.providers"]
    mine = "my_package.bench:PROVIDER"

`PROVIDER` is a `Provider`, like those in `fusedtp.bench.peers`. Commands look up entry points on demand (`found`), and
so does each rank. So a plugin must be installed, or on PYTHONPATH, which ranks inherit. A plugin that does not load is
a missing provider, with the reason. A plugin whose name is taken is left out, with a warning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from .cases import OPS, OWN, Case

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .operands import Operands, Runner

GROUP = "fusedtp.providers"
# The bundled ones, in the order of timing, and their names in `peers`.
_PLACES = {
    "dtensor": "DTENSOR", "torch_symm_mem": "SYMM_MEM", "async_tp": "ASYNC_TP", "nccl_windows": "WINDOWS",
    "tree": "TREE", "switch": "SWITCH",
}  # fmt: skip
SHIPPED = tuple(_PLACES)
# Names that the command line can split at commas, and names that it reserves.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_RESERVED = (*OWN, "none")


class Missing(Exception):
    """Raised by a `runner` that cannot run after all, on all ranks alike. Gives a row with the reason, no failure."""


def _never(case: Case, direction: str, num_gpus: int) -> str:
    return ""


@dataclass(frozen=True)
class Provider:
    """One implementation of the ops to compare with.

    name      its variant's in rows and pictures, the entry point's: letters, digits, ".", "_" and "-"
    runner    (operands, group, direction) -> the closure to time. Collective over `group`, a torch process group.
              `operands` has this rank's `x`, `w` and `dy`, and `case`, `device`, `dtype`, `gathers`. The closure takes
              nothing and returns a tuple of this rank's shards: (y,) forward, (dx, dw) backward, (y, dx, dw) for both;
              y is the rank's part that `fusedtp.bench.cases` gives for the case's op.
              `fusedtp.bench.operands.passes` makes one of a function. Set-up belongs outside of it, but each call must
              read x, w and dy, which change in place between rounds. If it has an attribute `close`, that is called
              after the last call, on all ranks in the same order.
    missing   (case, direction, num_gpus) -> why it cannot run, or "". num_gpus is that of the machine, 0 on a CPU.
              Asked once, before ranks are started; only ranks that agree could go on
    about     a description, one line
    usual     whether a sweep takes it without being told
    """

    name: str
    runner: Callable[[Operands, ProcessGroup, str], Runner]
    missing: Callable[[Case, str, int], str] = _never
    about: str = ""
    usual: bool = True

    def reason(self, case: Case, direction: str, num_gpus: int) -> str:
        """Return why this provider cannot run the case here, or "". Raises nothing, whatever `missing` does."""
        try:
            text: object = self.missing(case, direction, num_gpus)
        except Exception as error:
            return f"its `missing` failed: {type(error).__name__}: {error}"
        return text if isinstance(text, str) else f"its `missing` gave {text!r} and no text"


@dataclass(frozen=True)
class ProvidersFound:
    """Providers by name, in the order of timing, and warnings about invalid entry points."""

    providers: Mapping[str, Provider]
    warnings: tuple[str, ...] = ()


@functools.cache
def found() -> ProvidersFound:
    """Return all providers of this process."""
    points = [EntryPoint(name, f"fusedtp.bench.peers:{place}", GROUP) for name, place in _PLACES.items()]
    warnings = []
    try:
        points += sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    except Exception as error:
        warnings.append(f"entry points cannot be read: {type(error).__name__}: {error}")
    providers: dict[str, Provider] = {}
    for point in points:
        if point.name in providers or point.name in _RESERVED:
            owner = "another provider" if point.name in providers else "this package"
            warnings.append(f"{point.value} is left out: its name, {point.name}, is taken by {owner}")
        elif not _NAME.fullmatch(point.name):
            warnings.append(f"{point.value} is left out: its name must match {_NAME.pattern}, got {point.name!r}")
        else:
            providers[point.name] = _load(point)
    return ProvidersFound(providers, tuple(warnings))


def _load(point: EntryPoint) -> Provider:
    try:
        provider = point.load()
        if not isinstance(provider, Provider):
            raise TypeError(f"{point.value} must be a Provider, got {type(provider).__name__}")
        if provider.name != point.name:
            raise ValueError(f"{point.value} must be named as its entry point, {point.name}, got {provider.name!r}")
    except (Exception, SystemExit) as error:
        return _broken(point.name, f"it does not load: {type(error).__name__}: {error}")
    return provider


def _broken(name: str, why: str) -> Provider:
    def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
        raise Missing(why)

    return Provider(name, runner, lambda case, direction, num_gpus: why)


def named(name: str) -> Provider:
    """Return the provider of that name. ValueError, with the known names, if there is none."""
    providers = found().providers
    if name not in providers:
        raise ValueError(f"there is no provider {name!r} in this process, only {', '.join(providers)}")
    return providers[name]


def usual() -> tuple[str, ...]:
    """Return the providers of a sweep by default."""
    return tuple(name for name, provider in found().providers.items() if provider.usual)


def listing(num_gpus: int) -> list[tuple[str, str]]:
    """Return (name, "runs" or why not) of every provider, for a plain bf16 case on two ranks; then warnings."""
    lines = []
    cases = [Case(op, 4096, 4096, 4096, "bfloat16", 2) for op in OPS]
    for name, provider in found().providers.items():
        reasons = [provider.reason(case, "forward", num_gpus) for case in cases]
        first = reasons[0] if all(reasons) else ""
        lines.append((name, f"does not run: {first}" if first else "runs"))
    return [*lines, *(("left out", text) for text in found().warnings)]
