"""What an op means to a rank: what all ranks of its group must have in common, and a fingerprint of that.

Each rank takes lengths from its own tensors. Ranks that take different ones would read and write at different places of
shared memory, and take garbage for a result. So every op there carries its fingerprint beside its epoch
(`kernels.signal`), and ranks compare them where they wait for each other anyway. What else they must have in common,
values that all hold, a bias that is added once, a fingerprint does not tell: `debug=True` does (`agreement`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

# Shapes may never repeat. What is forgotten is worked out anew.
_MAX_KEPT = 4096

# Inside a backward pass there is a graph task; there is no public way to ask.
_graph_task = torch._C._current_graph_task_id


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
    return bool(_graph_task() != -1)


def of(op: str, schedule: str, x: Tensor, operands: Sequence[Tensor | None], options: Mapping[str, Any]) -> Meaning:
    """The meaning of `op` on x and `operands`, here and now."""
    values = {
        "op": op,
        "pass": "backward" if in_backward() else "forward",
        "device": x.device.type,
        "dtype": x.dtype,
        "schedule": schedule,
        **options,
        **_lengths(op, x, *operands, **options),
    }
    return Meaning({name: str(value) for name, value in values.items()})


def key(op: str, schedule: str, x: Tensor, operands: Sequence[Tensor | None], options: Mapping[str, Any]) -> Any:
    """What `of` looks at: calls on one device with the same key have the same meaning."""
    shapes = [None if each is None else each.shape for each in operands]
    return (op, schedule, _graph_task() == -1, x.dtype, x.shape, *shapes, *options.values())


class Meanings:
    """What one rank means by its ops of one group."""

    def __init__(self) -> None:
        self.now = Meaning({})  # by the op at hand
        self._of_calls: dict[Any, Meaning] = {}
        self._by_fingerprint: dict[int, Meaning] = {}

    def take(
        self,
        op: str,
        schedule: str,
        x: Tensor,
        operands: Sequence[Tensor | None],
        options: Mapping[str, Any],
        known: dict[Any, Meaning] | None,
    ) -> None:
        """Before an op: what it means. known: the meanings of calls that differ from this one in no length."""
        call: Any
        if known is None:
            known, call = self._of_calls, key(op, schedule, x, operands, options)
        else:
            call = schedule, _graph_task() == -1, x.dtype
        made = known.get(call)
        if made is None:
            if len(known) >= _MAX_KEPT:
                known.clear()
            made = known[call] = of(op, schedule, x, operands, options)
        if self.now is not made:
            if len(self._by_fingerprint) >= _MAX_KEPT:
                self._by_fingerprint.clear()
            self.now = self._by_fingerprint[made.fingerprint] = made

    def by_fingerprint(self, fingerprint: int) -> Meaning:
        """What was meant by an op that has that fingerprint; by the op at hand where that is forgotten."""
        return self._by_fingerprint.get(fingerprint, self.now)


def difference(op: str, everyone: Sequence[Mapping[str, str] | None], call: str = "") -> str:
    """What the ranks do not agree on, as a message; empty where they do. None: that rank has not said.

    call: what the op was, where its name is what differs.
    """
    for name in dict.fromkeys(name for each in everyone if each is not None for name in each):
        values = ["an unknown one" if each is None else each.get(name, "not given") for each in everyone]
        if len({value for value, each in zip(values, everyone, strict=True) if each is not None}) > 1:
            who, what = (call or op, "the op") if name == "op" else (op, name)
            each_rank = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            return f"{who}: the ranks do not agree on {what}: {each_rank}{_odd_one_out(values)}"
    silent = [rank for rank, each in enumerate(everyone) if each is None]
    if not silent:
        return ""
    return f"{op}: the ranks do not agree: rank {silent[0]} means another op, or other tensors, and has not said which"


def _odd_one_out(values: list[str]) -> str:
    usual, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != usual]
    if count <= len(values) / 2 or len(values) < 3:
        return ""
    return f": {'rank' if len(odd) == 1 else 'ranks'} {', '.join(map(str, odd))} against {count} that agree"


def _lengths(op: str, x: Tensor, *operands: Tensor | None, **options: Any) -> dict[str, Any]:
    # What is neither a rank's own nor one of `sizes`.
    if op in ("all_gather", "reduce_scatter", "all_gather_two_matmuls"):
        return {"columns": x.shape[1]}
    if op == "all_gather_matmul":
        return {"K": x.shape[1]} if options["gather_dim"] == 0 else {"M": x.shape[0]}
    if op == "all_reduce":
        return {"M": x.shape[0], "N": x.shape[1]}
    b, *rest = operands
    assert b is not None
    if op == "matmul_scatter_and_gather":
        gathered = rest[1].shape[1] if rest[1] is not None else 0
        return {"M": x.shape[0], "N": b.shape[1], "columns gathered": gathered}
    return {"M": x.shape[0], "N": b.shape[1], "bias": "none" if rest[0] is None else "given"}
