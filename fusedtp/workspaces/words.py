"""Words of an arena's header (`kernels.signal`), as the host loads and stores them: signals, epochs, fingerprints."""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache

import numpy as np
from triton._C.libtriton import interpreter

from ..kernels import signal

# On x86 aligned loads acquire and stores release, so plain accesses are enough. They take a tenth of the time.
PLAIN = platform.machine().lower() in ("x86_64", "amd64")

_SIGNALS: int = signal.SIGNALS.value
_FINGERPRINTS: int = signal.FINGERPRINT_SLOT.value

_TRUE = np.ones(1, dtype=bool)
_ZERO = np.zeros(1, dtype=np.int32)


@lru_cache(maxsize=1 << 14)
def _at(address: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([address], dtype=np.uint64)


@lru_cache(maxsize=1 << 14)
def int32_at(address: int) -> ctypes.c_int32:
    """Return the int32 at `address`, for plain loads and stores of its `value`."""
    return ctypes.c_int32.from_address(address)


@lru_cache(maxsize=1 << 14)
def int64_at(address: int) -> ctypes.c_int64:
    """Return the int64 at `address`, for plain loads and stores of its `value`."""
    return ctypes.c_int64.from_address(address)


def load_fingerprint(address: int) -> int:
    """Return the int64 at `address`, written by a rank whose entry has been seen."""
    return int64_at(address).value


def store_fingerprint(address: int, value: int) -> None:
    """Write the int64 at `address`, before an entry is raised."""
    int64_at(address).value = value


def fingerprint_place(epoch: int, source: int, world_size: int) -> int:
    """Return the index of the header word at which rank `source`'s fingerprint for an epoch begins."""
    return _SIGNALS + (_FINGERPRINTS + 2 * (epoch & 1)) * world_size + 2 * source


def load_acquire(address: int) -> int:
    """Return the int32 at `address`. Stores that its writer made before the release are visible afterwards."""
    if PLAIN:
        return int32_at(address).value
    at = _at(address)
    return int(interpreter.atomic_rmw(interpreter.RMW_OP.ADD, at, _ZERO, _TRUE, interpreter.MEM_SEMANTIC.ACQUIRE)[0])


def store_release(address: int, value: int) -> None:
    """Write the int32 at `address` after all earlier stores."""
    if PLAIN:
        int32_at(address).value = value
        return
    at = _at(address)
    word = np.array([value], dtype=np.int32)
    interpreter.atomic_rmw(interpreter.RMW_OP.XCHG, at, word, _TRUE, interpreter.MEM_SEMANTIC.RELEASE)


def wrapping_difference(a: int, b: int) -> int:
    """Return a - b as int32: negative if epoch a is before epoch b, also across the wrap."""
    return (a - b + 2**31) % 2**32 - 2**31


def raised(seen: int, epoch: int) -> bool:
    """Return whether a signal with the value `seen` is raised for `epoch`: see `kernels.signal.LEAD`."""
    lead: int = signal.LEAD.value
    return 0 <= wrapping_difference(seen, epoch) < lead
