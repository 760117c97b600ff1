"""Compare what an op means to each rank, and say which rank differs.

Each rank takes lengths from its own tensors. Ranks that take different ones would access different places of shared
memory, and return garbage. So every op carries a fingerprint of its meaning beside its epoch (`kernels.signal`), and
ranks compare fingerprints when they wait for each other. A fingerprint does not cover values that all ranks must hold
alike, such as a bias that is added once.

A rank that finds a difference writes its meaning, as text, into its own arena. Then it waits for the texts of all ranks
that have entered the same epoch: they find the difference too, at the latest when they leave. No text is written
twice, as the workspace is not used again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

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


def meaning_of(task: Task, schedule: str, device: str, call: str = "") -> Meaning:
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


# At the end of a header: the text's length as an int32, 0 before there is one, then the text.
TEXT_BYTES = 1024
_LENGTH_BYTES = 4
GRACE_SECONDS = 1.0
# At most so many characters of each value, so that all values fit together, even with long lists of sizes.
_MOST_CHARACTERS = 96


def _shortened(value: str) -> str:
    return value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}.."


def say(place: Tensor, values: Mapping[str, str]) -> None:
    """Write what this rank meant to its `place`, uint8 [TEXT_BYTES]."""
    short = {name: _shortened(value) for name, value in values.items()}
    text = json.dumps(short).encode()[: TEXT_BYTES - _LENGTH_BYTES]
    place[_LENGTH_BYTES : _LENGTH_BYTES + len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    # The length after the text: on x86, and on a GPU's stream, stores are seen in the order in which they were made.
    place[:_LENGTH_BYTES].view(torch.int32).fill_(len(text))


def heard(place: Tensor) -> dict[str, str] | None:
    """What a rank has said, or None."""
    raw = bytes(place.cpu().numpy())
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little", signed=True)
    if not 0 < length <= TEXT_BYTES - _LENGTH_BYTES:
        return None
    try:
        values = json.loads(raw[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except ValueError:
        return None
    return {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else None


def everyone(
    places: Callable[[int], Tensor], world_size: int, entered: Callable[[int], bool], seconds: float
) -> tuple[dict[str, str] | None, ...]:
    """What every rank has said. Waits at most `seconds` for ranks that have entered, and GRACE_SECONDS for others,
    which may be gone: so a rank that is merely slower is in every rank's message.
    """
    begin = time.monotonic()
    while True:
        said = tuple(heard(places(peer)) for peer in range(world_size))
        waited, silent = time.monotonic() - begin, [peer for peer in range(world_size) if said[peer] is None]
        if not silent or waited > (seconds if any(map(entered, silent)) else min(seconds, GRACE_SECONDS)):
            return said
        time.sleep(0.002)
