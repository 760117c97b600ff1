"""What ranks tell each other once their fingerprints differ: what each of them meant, as text in its own arena.

A rank that finds a difference writes its text, then waits for those of all that have entered the same epoch: they find
it too, at the latest where they leave. Nobody says anything twice, as the workspace is not used again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..kernels import signal
from .steps import fingerprint_place, raised

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


def has_entered(header: Sequence[int], peer: int, world_size: int, epoch: int) -> bool:
    """Whether rank `peer` has entered `epoch`, according to a header in which it says so."""
    return raised(header[signal.SIGNALS.value + signal.ENTRY_SLOT.value * world_size + peer], epoch)


def differing(header: Sequence[int], rank: int, world_size: int, epoch: int) -> list[int]:
    """The ranks that have entered `epoch` with another fingerprint than `rank`, whose header this is."""

    def fingerprint(source: int) -> Sequence[int]:
        begin = fingerprint_place(epoch, source, world_size)
        return header[begin : begin + 2]

    return [
        peer
        for peer in range(world_size)
        if peer != rank and has_entered(header, peer, world_size, epoch) and fingerprint(peer) != fingerprint(rank)
    ]


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
