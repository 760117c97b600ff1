"""Agreement: compare the meaning of an op on each rank, and name the rank that differs.

Each rank takes lengths from its own tensors. Ranks with different lengths would access different places of shared
memory and return garbage. So every op carries a fingerprint of its meaning beside its epoch (`kernels.signal`). Ranks
compare fingerprints when they wait for each other. A fingerprint does not cover the values of tensors, such as a bias
that is added once.

The fingerprint is made of two: of the text, without numbers of rows, which is hashed once; and of those numbers, which
are hashed at every new call. The text with its numbers is only made for an error.

A rank that finds a difference writes its meaning, as text, into its own arena. Then it waits for the texts of all ranks
that have entered the same epoch. Those ranks find the difference too, at the latest in `leave`. The workspace is not
used again, so no text is written twice.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from ..op import Task

# Limit of cached fingerprints, because shapes may never repeat.
_MAX_KEPT = 4096


class Fingerprint:
    """Meaning of an op on one rank: names and values, as text, and a 64-bit hash of them.

    The text may be a function, which is called for an error.
    """

    def __init__(
        self, values: Mapping[str, str] | Callable[[], Mapping[str, str]], fingerprint: int | None = None
    ) -> None:  # fmt: skip
        self._values = values
        self.fingerprint = _hash_of(self.values) if fingerprint is None else fingerprint

    @property
    def values(self) -> Mapping[str, str]:
        return self._values() if callable(self._values) else self._values


def _hash_of(values: Mapping[str, str]) -> int:
    digest = blake2b(json.dumps(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# Values that `Task.sizes` and `Task.moved` decide. Other rows change no other values.
_OF_ROWS = frozenset(("sizes", "M", "N", "K", "columns"))


def _values_of(
    task: Task, schedule: str, device: str, call: str, rows: Sequence[tuple[str, int]], backward: bool
) -> dict[str, str]:  # fmt: skip
    values = {
        "op": task.op.name,
        "pass": "backward" if backward else "forward",
        "device": device,
        "dtype": task.dtype,
        "order": f"a tree of {task.leaves} leaves" if task.leaves else "any" if task.any_order else "that of ranks",
        "schedule": schedule,
        **task.agreed,
        "call": ", ".join((call, *(f"{name}={length}" for name, length in rows))),
    }
    return {name: str(value) for name, value in values.items()}


def fingerprint_of(
    task: Task, schedule: str, device: str, call: str = "", rows: Sequence[tuple[str, int]] = (),
    known: dict[bool, int] | None = None, backward: bool = False,
) -> Fingerprint:  # fmt: skip
    """Return the meaning of a task on a kind of device, in a backward pass or not.

    - `call`: text of the call that the task is part of, which matrices do not show.
    - `rows`: names and lengths of dims of that call.
    - `known`: hashes of the text without numbers, by whether a backward pass runs. Tasks that differ in their rows
      alone, and calls of them, share it.
    """
    text = partial(_values_of, task, schedule, device, call, rows, backward)
    fixed = None if known is None else known.get(backward)
    if fixed is None:
        values = text() | {"call": call}
        fixed = _hash_of({name: value for name, value in values.items() if name not in _OF_ROWS})
        if known is not None:
            known[backward] = fixed
    # Python hashes numbers alike in every process.
    return Fingerprint(text, hash((fixed, *task.sizes, *task.moved, *[length for _, length in rows])))


class Fingerprints:
    """Fingerprints of one rank's ops of one group. `now`: the current op's."""

    def __init__(self) -> None:
        self.now = Fingerprint({})
        self._by_fingerprint: dict[int, Fingerprint] = {}

    def keep(self) -> None:
        """Keep the current op's, which a GPU may report after the host has begun the next op."""
        if len(self._by_fingerprint) >= _MAX_KEPT:
            self._by_fingerprint.clear()
        self._by_fingerprint[self.now.fingerprint] = self.now

    def by_fingerprint(self, fingerprint: int) -> Fingerprint:
        """Return the meaning of the op with that fingerprint, or the current op's if it is no longer kept."""
        return self._by_fingerprint.get(fingerprint, self.now)


def difference(op: str, everyone: Sequence[Mapping[str, str] | None]) -> str:
    """Return a message about the first value that differs between ranks, "" if none does.

    `everyone` has each rank's values, None for a rank that has written none.
    """
    for name in dict.fromkeys(name for each in everyone if each is not None for name in each):
        values = ["an unknown one" if each is None else each.get(name, "not given") for each in everyone]
        if len({value for value, each in zip(values, everyone, strict=True) if each is not None}) > 1:
            what = "the op" if name == "op" else name
            if name == "op":
                # Backward passes run ops that the user has not called.
                backward = [each is not None and each.get("pass") == "backward" for each in everyone]
                values = [f"{each} (in backward)" if its else each for each, its in zip(values, backward, strict=True)]
            text = f"{op}: the ranks do not agree on {what}: {_by_rank(values)}{_odd_one_out(values)}"
            calls = ["" if each is None else each.get("call", "") for each in everyone]
            # Different ops may be steps of different calls: name the calls too.
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


# Bytes at the end of a header: the text's length as an int32, 0 before it is written, then the text.
TEXT_BYTES = 1024
_LENGTH_BYTES = 4
GRACE_SECONDS = 1.0
# Limit of each value's characters, so that all values fit, even with long lists of sizes.
_MOST_CHARACTERS = 96


def say(place: Tensor, values: Mapping[str, str]) -> None:
    """Write this rank's meaning to its `place`, uint8 [TEXT_BYTES]."""
    most = _MOST_CHARACTERS
    short = {name: value if len(value) <= most else f"{value[:most]}.." for name, value in values.items()}
    text = json.dumps(short).encode()[: TEXT_BYTES - _LENGTH_BYTES]
    place[_LENGTH_BYTES : _LENGTH_BYTES + len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    # The length is written last: on x86, and on a GPU's stream, stores become visible in order.
    place[:_LENGTH_BYTES].view(torch.int32).fill_(len(text))


def heard(place: Tensor) -> dict[str, str] | None:
    """Return the meaning that a rank has written to its `place`, or None."""
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
    """Return the meanings that all ranks have written, None for a rank that has not written one in time.

    Waits at most `seconds` for ranks that have entered the epoch, and at most GRACE_SECONDS for others, which may be
    gone. So every rank's message includes ranks that are merely slow.
    """
    begin = time.monotonic()
    while True:
        values = tuple(heard(places(peer)) for peer in range(world_size))
        waited, silent = time.monotonic() - begin, [peer for peer in range(world_size) if values[peer] is None]
        if not silent or waited > (seconds if any(map(entered, silent)) else min(seconds, GRACE_SECONDS)):
            return values
        time.sleep(0.002)
