"""Prepared launches: a call like an earlier one starts the same compiled kernel, without Triton's lookup.

For each launch Triton derives the type and the alignment of some 60 fields, and looks up a compiled kernel by them.
Here the cache key is the launcher's arguments: tensors by dtype, shape, strides and alignment, everything else by
value. They decide all that Triton looks at. Calls with one key differ only in addresses and in the fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from triton import knobs
from triton.language import constexpr

from . import INTERPRETED
from .blocks import ZERO, Written, encoded, room
from .launch import Channel, Memo
from .loading import Started, check_device, is_only_loading

P = ParamSpec("P")
_BY_VALUE = frozenset((int, bool, str, type(None)))


def _described(called: object, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor], int]:
    # Return the key of a call, its tensors, and its channel's fingerprint. Every launch runs this.
    key: list[Any] = [called, *kwargs]
    operands: list[Tensor] = []
    fingerprint = 0
    values = [*args, *kwargs.values()]
    for x in values:
        kind = type(x)
        if kind in _BY_VALUE:
            key.append(x)
        elif kind is Tensor or isinstance(x, Tensor):
            operands.append(x)
            key += x.dtype, x.shape, x.stride(), x.data_ptr() % 16
        elif kind is list or isinstance(x, tuple):
            key.append(len(x))
            values += x
        elif kind is constexpr:
            key.append(x.value)
        elif kind is Channel:
            operands += x.peers, x.data
            key += x.rank, x.world_size, x.half_bytes, x.data_offset
            fingerprint = x.fingerprint
        else:
            key.append(x)
    # Two operands that are the same tensor here may be different tensors in the next call.
    ids = [*map(id, operands)]
    key += map(ids.index, ids)
    key += operands[0].get_device(), knobs.runtime.debug, knobs.compilation.instrumentation_mode
    return tuple(key), operands, fingerprint


class PreparedLaunch:
    """A launch that was made, to be made again with other operands. It keeps no operand alive."""

    def __init__(self, started: Started, operands: list[Tensor]) -> None:
        self.hooks, self._run, self._scratch = started.hooks, started.run, 0
        self._table = None if started.written is None else _PreparedTable(started.written, operands)
        if started.written is not None:
            operands = [*operands, started.written.blocks]
        if started.scratch is not None:
            self._scratch = started.scratch.numel()
            operands = [*operands, started.scratch]
        self._params: list[Any] = [*started.params]
        # Indices of a parameter and of its operand, and a descriptor's class and other fields.
        self._places: list[tuple[int, int, tuple[type, dict[str, Any]] | None]] = []
        for at, x in enumerate(started.params):
            if hasattr(x, "block_shape"):
                # A descriptor, of Triton or of Gluon.
                self._places.append((at, _index_of(x.base, operands), (type(x), vars(x) | {"base": None})))
            elif isinstance(x, Tensor):
                self._places.append((at, _index_of(x, operands), None))
            else:
                continue
            self._params[at] = None
        self._fingerprint = started.names.index("fingerprint") if "fingerprint" in started.names else None

    def params(self, operands: list[Tensor], fingerprint: int) -> list[Any]:
        """Return the flat parameters of a call, with scratch memory and a table of its own, which has been written."""
        if self._table is not None:
            operands.append(self._table.write(operands))
        if self._scratch:
            operands.append(torch.empty(self._scratch, dtype=torch.float32, device=operands[0].device))
        params = self._params.copy()
        for at, i, described in self._places:
            params[at] = operands[i]
            if described is not None:
                # Skip the constructor, as the key already implies its checks.
                kind, fields = described
                made: Any = object.__new__(kind)
                params[at] = made
                made.__dict__.update(fields, base=operands[i])
        if self._fingerprint is not None:
            params[self._fingerprint] = fingerprint
        return params

    def start(self, operands: list[Tensor], fingerprint: int) -> None:
        """Start the kernel on the current stream. Raises ValueError as `loading.launch` does."""
        check_device(operands[self._places[0][1]])
        self._run(*self.params(operands, fingerprint))


class _PreparedTable:
    """The kernels that write a launch's table of blocks, to be started again with other operands."""

    def __init__(self, written: Written, operands: list[Tensor]) -> None:
        self._writes, self._words = written.writes, [*map(encoded, written.words)]
        self._places = [(at, _index_of(x, operands)) for at, x in enumerate(written.words) if isinstance(x, Tensor)]

    def write(self, operands: list[Tensor]) -> Tensor:
        """Write the table of these operands into new memory, on the current stream, and return that."""
        words = self._words.copy()
        blocks = room(len(words), operands[0].device)
        for at, i in self._places:
            # As `encoded`, inlined because this runs for each operand of each launch.
            words[at] = ZERO + 2 * operands[i].data_ptr()
        for run, part in self._writes:
            run(blocks, part.start, *words[part])
        return blocks


def _index_of(x: Tensor, operands: list[Tensor]) -> int:
    # A launcher passes its arguments unchanged, except that its channel's data may have another dtype.
    found = [i for i, each in enumerate(operands) if each is x] or [
        i for i, each in enumerate(operands) if each.dtype == torch.uint8 and each.data_ptr() == x.data_ptr()
    ]
    return found[0]


# Cache of the calls of all launchers.
_known = Memo()


def prepares(launcher: Callable[P, Started | None]) -> Callable[P, object]:
    """Decorate a launcher: a call like an earlier one starts the same compiled kernel.

    The launcher starts one kernel as its last step, after writing the kernel's table of blocks, if any, and returns the
    launch's result. The kernel's tensors are arguments of the launcher, or `scratch`, or that table. The launcher reads
    only layouts and alignments of tensors, and addresses into the table.
    """
    if INTERPRETED:
        return launcher

    @wraps(launcher)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        key, operands, fingerprint = _described(launcher, args, kwargs)
        known = _known.get(key)
        if known is None or known.hooks:
            started = launcher(*args, **kwargs)
            if started is not None:
                _known.keep(key, PreparedLaunch(started, operands))
        elif not is_only_loading():
            known.start(operands, fingerprint)

    return call
