"""Tensor descriptors: how a matmul's operand is read, decided on the host for each launch.

A descriptor lets the copy engine of an SM (TMA; sm_90 and later) fetch a whole tile into shared memory: no pointers in
registers, no masks, zeros past the end. It needs a base and strides that are multiples of 16 bytes and one dimension
whose elements are adjacent; any other operand is read by masked pointers. "rows" reads an [R, C] whose columns are
adjacent, "columns" one whose rows are adjacent, in transposed tiles.

Descriptors are made on the host and travel as kernel arguments, by value: there is no scratch memory to allocate, no
fence at a program's start, and nothing that could be stale, also in a captured graph. Chunks of rows that end inside a
tile need no descriptor of their own: what is read beyond their end is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Channel, Config, fitted, in_16_bytes

_ALIGNMENT_BYTES = 16
# Coordinates are int32.
_MAX_LENGTH = 2**31


def _describable(rows: int, cols: int, itemsize: int, config: Config) -> bool:
    # float32 is multiplied in full precision, not by tensor cores: its tiles need not be in shared memory.
    return config.descriptors and itemsize <= 2 and 0 < min(rows, cols) and max(rows, cols) < _MAX_LENGTH


def read_by(x: torch.Tensor, config: Config) -> str:
    """How a kernel reads the matrix x [R, C]: "rows" or "columns" by a descriptor, or "pointers"."""
    (rows, cols), (stride_r, stride_c), per_unit = x.shape, x.stride(), _ALIGNMENT_BYTES // x.element_size()
    if not _describable(rows, cols, x.element_size(), config) or x.data_ptr() % _ALIGNMENT_BYTES:
        return "pointers"
    if stride_c == 1 and stride_r >= cols and stride_r % per_unit == 0:
        return "rows"
    if stride_r == 1 and stride_c >= rows and stride_c % per_unit == 0:
        return "columns"
    return "pointers"


def read_by_all(matrices: Sequence[torch.Tensor], config: Config) -> str:
    """How a kernel reads one of these, which it chooses itself: all alike."""
    ways = {read_by(x, config) for x in matrices}
    return ways.pop() if len(ways) == 1 else "pointers"


def whole_leaves(config: Config, lengths: Sequence[int], leaves: int) -> Config:
    """The configuration for contractions in leaves: descriptors would read blocks of K on into the next leaf."""
    cut = bool(leaves) and any(K % (leaves * config.block_k) for K in lengths)
    return replace(config, descriptors=False) if cut else config


def fitted_to(config: Config, *operands: torch.Tensor, results: Sequence[torch.Tensor] = ()) -> Config:
    """The configuration of a kernel that reads these operands and stores these results (none: tiles to arenas)."""
    by_pointers = [x for x in operands if read_by(x, config) == "pointers"]
    return fitted(config, stored=in_16_bytes(*results), read=in_16_bytes(*by_pointers))


def read_gathered_by(a: torch.Tensor, rows: int, cols: int, config: Config) -> str:
    """How the gathered A [rows, cols] is read; `a` is the own shard of it. One loop reads the own shard and the own
    arena, so either both are read by descriptors, "rows", or both by "pointers".
    """
    if not _describable(rows, cols, a.element_size(), config):
        return "pointers"
    return "rows" if a.numel() == 0 or a.stride(1) != 1 or read_by(a, config) == "rows" else "pointers"


def of_left(a: torch.Tensor, by: str, config: Config) -> TensorDescriptor | None:
    """A [M, K] as [1, M, K] or [1, K, M]; None where it is read by pointers."""
    if by == "pointers":
        return None
    M, K = a.shape
    if by == "rows":
        return TensorDescriptor(a, [1, M, K], [M * a.stride(0), a.stride(0), 1], [1, config.block_m, config.block_k])
    return TensorDescriptor(a, [1, K, M], [K * a.stride(1), a.stride(1), 1], [1, config.block_k, config.block_m])


def of_right(b: torch.Tensor, by: str, config: Config) -> TensorDescriptor | None:
    """B [K, N] as it is or as [N, K]; None where it is read by pointers."""
    if by == "pointers":
        return None
    K, N = b.shape
    if by == "rows":
        return TensorDescriptor(b, [K, N], [b.stride(0), 1], [config.block_k, config.block_n])
    return TensorDescriptor(b, [N, K], [b.stride(1), 1], [config.block_n, config.block_k])


def of_arena(
    channel: Channel, dtype: torch.dtype, rows: int, cols: int, pitch: int, config: Config
) -> TensorDescriptor:
    """The own arena as [2, rows, cols]: the halves of even and of odd epochs."""
    # Pitch, halves and the address of an arena are multiples of 16 bytes.
    half, block = channel.half_bytes // dtype.itemsize, [1, config.block_m, config.block_k]
    return TensorDescriptor(channel.data.view(dtype), [2, rows, cols], [half, pitch, 1], block)
