"""Table of blocks: the operands and results of a launch, block by block.

A block is a weight with its result, beside others at one gather, or a term of a sum. Most launches have one. A column
of the table has an entry for each block: an address, a length or a stride. A program takes its tile's entries by `pick`
and `stride_of`, which cost nothing with one block.

Up to MOST_UNROLLED blocks are arguments of the launch: a column is a tuple, and `pick` selects. More blocks lie in
device memory, so that the code does not grow with their number: a column is a `Column`, and `pick` loads. A kernel that
is issued just before writes the table from its own arguments, into memory of this launch alone. So no address can be
stale, nothing waits for the host or keeps its memory alive, and a captured graph holds its table's words by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import INTERPRETED
from .launch import FP_FUSION
from .loading import launch

# Most blocks that are arguments of a launch.
MOST_UNROLLED = tl.constexpr(3)
# Most columns of a table: addresses and strides of B and C, lengths, first tiles and their number, bias, z, scales.
_MOST_COLUMNS = 12
# Words that one kernel writes: arguments of 2 KiB at most, as drivers before CUDA 12.1 allow 4 KiB.
_FEW_WORDS, _MOST_WORDS = 64, 256
# Words travel as odd numbers from here on: the compiler specializes on smaller numbers and on multiples of 16.
_BASE = tl.constexpr(1 << 61)
ZERO = _BASE.value + 1
_ALIGNMENT = 16
# Kinds of columns. Triton 3.6 cannot compare a tuple with text in it.
_ADDRESS, _LENGTH, _STRIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Column(NamedTuple):
    """Column of a table in device memory, from word AT on.

    - `first`: an entry, for its type. Entry 0 of lengths, which stands for all entries if they are equal.
    - `blocks`: the table, int64.
    - `KIND`: addresses, lengths (int32) or strides.
    - `MULTIPLE`: 16 if it divides all entries and matters, else 1. An entry from memory does not show it to the
      compiler.
    """

    first: tl.tensor
    blocks: tl.tensor
    KIND: tl.constexpr
    AT: tl.constexpr
    MULTIPLE: tl.constexpr


@triton.jit
def entry(column, j):
    """Return the j-th entry of a `Column`."""
    word = tl.load(column.blocks + (column.AT + j))
    if column.KIND == _ADDRESS:
        # The hint belongs to the pointer: a number's is lost when it becomes a pointer.
        return tl.multiple_of(word.to(column.first.dtype), column.MULTIPLE)
    elif column.KIND == _STRIDE:
        return tl.multiple_of(word, column.MULTIPLE)
    else:
        return tl.multiple_of(word.to(tl.int32), column.MULTIPLE)


@triton.jit
def pick(column, j, COUNT: tl.constexpr, UNROLLED: tl.constexpr = MOST_UNROLLED):
    """Return the j-th of COUNT entries of a column, which is a tuple if they are UNROLLED or fewer."""
    if COUNT == 1:
        return column[0]
    elif COUNT > UNROLLED:
        return entry(column, j)
    else:
        found = column[0]
        for i in tl.static_range(1, COUNT):
            if j == i:
                found = column[i]
        return found


@triton.jit
def stride_of(column, j, COUNT: tl.constexpr, IS_ONE: tl.constexpr):
    """Return the j-th of COUNT strides, or the constant 1 if all are known to be 1."""
    if COUNT == 1:
        return column[0]
    elif IS_ONE:
        return 1
    elif COUNT > MOST_UNROLLED:
        return entry(column, j)
    else:
        # A stride of 1 is a constant to the compiler, which has no type to choose by.
        found = tl.cast(column[0], tl.int64)
        for i in tl.static_range(1, COUNT):
            if j == i:
                found = tl.cast(column[i], tl.int64)
        return found


@triton.jit
def block_at(firsts, tile, COUNT: tl.constexpr):
    """Return the last of COUNT blocks whose first tile, in the column `firsts`, is at most `tile`."""
    low = 0
    high = COUNT
    while high - low > 1:
        middle = (low + high) // 2
        is_here = entry(firsts, middle) <= tile
        low = tl.where(is_here, middle, low)
        high = tl.where(is_here, high, middle)
    return low


@triton.jit
def _write_blocks_kernel(blocks, words, COUNT: tl.constexpr):
    """Write COUNT words of a table, blocks[0], from its word blocks[1] on. Waits for nothing; signals nothing."""
    for i in tl.static_range(COUNT):
        tl.store(blocks[0] + blocks[1] + i, (words[i] - _BASE) >> 1)


class Written(NamedTuple):
    """A table that was written: its words, where a tensor stands for its address, and the kernels that write them.

    writes: by kernel, the function that starts it again with flat parameters, and its part of the words.
    """

    words: list[int | torch.Tensor]
    blocks: torch.Tensor
    writes: list[tuple[Callable[..., Any], slice]]


class Blocks:
    """Table of a launch with more than MOST_UNROLLED blocks, filled column by column."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.words: list[int | torch.Tensor] = []
        self._num_words = _MOST_COLUMNS * count
        self.blocks = room(self._num_words, device)

    def _column(
        self, first: Any, kind: tl.constexpr, words: Sequence[int | torch.Tensor], *, hints: bool = True
    ) -> Column:
        at = len(self.words)
        self.words += words
        assert len(self.words) <= self._num_words, "a table with more columns needs a larger _MOST_COLUMNS"
        multiple = _ALIGNMENT if hints and not any(map(_past_multiple, words)) else 1
        return Column(first, self.blocks, kind, tl.constexpr(at), tl.constexpr(multiple))

    def addresses(self, tensors: Sequence[torch.Tensor | None] | None) -> Any:
        """Return a column of tensors; 0 for None."""
        if tensors is None:
            return None
        first = next(x for x in tensors if x is not None)
        return self._column(first, _ADDRESS, [0 if x is None else x for x in tensors])

    def lengths(self, lengths: Sequence[int]) -> Any:
        """Return a column of lengths."""
        return self._column(lengths[0], _LENGTH, lengths)

    def indices(self, indices: Sequence[int]) -> Any:
        """Return a column of numbers that count something."""
        return self._column(indices[0], _LENGTH, indices, hints=False)

    def strides(self, matrices: Sequence[torch.Tensor], unit: int) -> tuple[Any, Any]:
        """Return the two columns of strides, or 1 instead of that of the dim `unit`, which has strides of 1."""
        constant, (rows, cols) = tl.constexpr(1), zip(*(x.stride() for x in matrices), strict=True)
        return (
            constant if unit == 0 else self._column(constant, _STRIDE, rows),
            constant if unit == 1 else self._column(constant, _STRIDE, cols),
        )

    def write(self) -> Written | None:
        """Write the table on the current stream, or only load the kernels that do, as `loading.launch` does."""
        if INTERPRETED:
            found = torch.tensor(list(map(_word, self.words)), dtype=torch.int64, device=self.blocks.device)
            self.blocks[: len(found)] = found
            return None
        size = _FEW_WORDS if len(self.words) <= _FEW_WORDS else _MOST_WORDS
        words, writes = [*self.words, *[0] * (-len(self.words) % size)], []
        for begin in range(0, len(words), size):
            part, start = slice(begin, begin + size), launch(_write_blocks_kernel, (1,))
            started = start(
                (self.blocks, begin), tuple(map(encoded, words[part])), size, num_warps=1, **FP_FUSION
            )  # fmt: skip
            if started is not None:
                writes.append((started.run, part))
        return Written(words, self.blocks, writes)


def _word(x: int | torch.Tensor) -> int:
    return x if isinstance(x, int) else x.data_ptr()


def _past_multiple(x: int | torch.Tensor) -> int:
    return _word(x) % _ALIGNMENT


def encoded(word: int | torch.Tensor) -> int:
    """Return a word as an argument of the kernel that writes it; a tensor is its address."""
    return ZERO + 2 * _word(word)


def room(num_words: int, device: torch.device) -> torch.Tensor:
    """Return undefined memory for the words of a table, and for zeros behind them."""
    return torch.empty(num_words + _MOST_WORDS, dtype=torch.int64, device=device)
