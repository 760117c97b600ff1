"""What an op means to a rank: what all ranks of its group must have in common, and a fingerprint of that.

Each rank takes lengths from its own tensors. Ranks that take different ones would read and write at different places of
shared memory, and take garbage for a result. So every op there carries its fingerprint beside its epoch
(`kernels.signal`), and ranks compare them where they wait for each other anyway. A fingerprint does not cover values
that all ranks must hold alike, such as a bias that is added once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ..op import Task
from ..torch_private import graph_task

# Shapes may never repeat. What is forgotten is worked out anew.
_MAX_KEPT = 4096


@dataclass(frozen=True)
class Meaning:
    """What one rank means: names and values, as text, and 64 bits of a hash of them."""

    values: Mapping[str, str]
    fingerprint: int = field(init=False)

    def __post_init__(self) -> None:
        digest = blake2b(json.dumps(self.values).encode(), digest_size=8).digest()
        object.__setattr__(self, "fingerprint", int.from_bytes(digest, "little", signed=True))


def in_backward() -> bool:
    """Whether this is a backward pass."""
    return bool(graph_task() != -1)


def of(task: Task, schedule: str, device: str, call: str = "") -> Meaning:
    """The meaning of a task here and now, on that kind of device. call: what it is part of, as far as matrices do not
    show that.
    """
    values = {
        "op": task.op.name,
        "pass": "backward" if in_backward() else "forward",
        "device": device,
        "dtype": task.dtype,
        "order": f"a tree of {task.leaves} leaves" if task.leaves else "any" if task.any_order else "that of ranks",
        "schedule": schedule,
        **task.agreed,
        "call": call,
    }
    return Meaning({name: str(value) for name, value in values.items()})


class Meanings:
    """What one rank means by its ops of one group."""

    def __init__(self) -> None:
        self.now = Meaning({})  # by the current op
        self._by_fingerprint: dict[int, Meaning] = {}

    def take(self, meant: Meaning) -> None:
        """To be called before an op, with what it means."""
        if self.now is not meant:
            if len(self._by_fingerprint) >= _MAX_KEPT:
                self._by_fingerprint.clear()
            self.now = self._by_fingerprint[meant.fingerprint] = meant

    def by_fingerprint(self, fingerprint: int) -> Meaning:
        """What was meant by the op with that fingerprint; where that is forgotten, by the current op."""
        return self._by_fingerprint.get(fingerprint, self.now)


def difference(op: str, everyone: Sequence[Mapping[str, str] | None]) -> str:
    """What the ranks do not agree on, as a message; empty where they do. None: that rank has not said."""
    for name in dict.fromkeys(name for each in everyone if each is not None for name in each):
        values = ["an unknown one" if each is None else each.get(name, "not given") for each in everyone]
        if len({value for value, each in zip(values, everyone, strict=True) if each is not None}) > 1:
            what = "the op" if name == "op" else name
            text = f"{op}: the ranks do not agree on {what}: {_by_rank(values)}{_odd_one_out(values)}"
            calls = ["" if each is None else each.get("call", "") for each in everyone]
            # One op may be a step of another call.
            return f"{text}, in {_by_rank(calls)}" if name == "op" and all(calls) and len(set(calls)) > 1 else text
    silent = [rank for rank, each in enumerate(everyone) if each is None]
    if not silent:
        return ""
    return f"{op}: the ranks do not agree: rank {silent[0]} means another op, or other tensors, and has not said which"


def _by_rank(values: list[str]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def _odd_one_out(values: list[str]) -> str:
    usual, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != usual]
    if count <= len(values) / 2 or len(values) < 3:
        return ""
    return f": {'rank' if len(odd) == 1 else 'ranks'} {', '.join(map(str, odd))} against {count} that agree"
