"""Tensor descriptors: decide on the host, for each launch, how a kernel reads a matmul's operand.

A descriptor lets the copy engine of an SM (TMA; sm_90 and later) load a whole tile into shared memory: no pointers in
registers, no masks, zeros past the end. It needs a base and strides that are multiples of 16 bytes, and one contiguous
dimension. Other operands are read by masked pointers. "rows" reads an [R, C] with contiguous rows, "columns" one with
contiguous columns, in transposed tiles.

The host passes descriptors to a kernel by value. So there is no scratch memory to allocate, no fence at a program's
start, and nothing that could be stale, even in a captured graph. A chunk of rows that ends inside a tile needs no
descriptor of its own: elements read past its end are never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .blocks import MOST_UNROLLED
from .launch import Channel, Config, fitted, in_16_bytes

_ALIGNMENT_BYTES = 16
# Coordinates are int32.
_MAX_LENGTH = 2**31


def _describable(rows: int, cols: int, itemsize: int, config: Config) -> bool:
    # float32 is multiplied in full precision, without tensor cores, so its tiles need not be in shared memory.
    return config.descriptors and itemsize <= 2 and 0 < min(rows, cols) and max(rows, cols) < _MAX_LENGTH


def read_by(x: torch.Tensor, config: Config) -> str:
    """Return how a kernel reads the matrix x [R, C]: "rows" or "columns" by a descriptor, or "pointers"."""
    (rows, cols), (stride_r, stride_c), per_unit = x.shape, x.stride(), _ALIGNMENT_BYTES // x.element_size()
    if not _describable(rows, cols, x.element_size(), config) or x.data_ptr() % _ALIGNMENT_BYTES:
        return "pointers"
    if stride_c == 1 and stride_r >= cols and stride_r % per_unit == 0:
        return "rows"
    if stride_r == 1 and stride_c >= rows and stride_c % per_unit == 0:
        return "columns"
    return "pointers"


def read_by_all(matrices: Sequence[torch.Tensor], config: Config) -> str:
    """Return the one way in which a kernel can read each of `matrices`.

    More than MOST_UNROLLED are read by pointers: Triton (3.6 to 3.9) cannot take a descriptor that the host made from
    memory, only from a launch's arguments.
    """
    if len(matrices) > MOST_UNROLLED.value:
        return "pointers"
    ways = {read_by(x, config) for x in matrices}
    return ways.pop() if len(ways) == 1 else "pointers"


def whole_leaves(config: Config, lengths: Sequence[int], leaves: int) -> Config:
    """Return the configuration for contractions in leaves; descriptors need leaves of whole blocks of K."""
    cut = bool(leaves) and any(K % (leaves * config.block_k) for K in lengths)
    return replace(config, descriptors=False) if cut else config


def fitted_to(config: Config, *operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor] = ()) -> Config:
    """Return the configuration of a kernel that reads `operands` and stores `results`, or tiles into arenas.

    Each of `operands` is that of all blocks.
    """
    by_pointers = [
        x for each in operands for x in each if len(each) > MOST_UNROLLED.value or read_by(x, config) == "pointers"
    ]
    return fitted(config, stored=in_16_bytes(*results), read=in_16_bytes(*by_pointers))


def read_gathered_by(a: torch.Tensor, rows: int, cols: int, config: Config) -> str:
    """Return how a kernel reads the gathered A [rows, cols], with own shard `a`: "rows" (descriptors) or "pointers"."""
    # One loop reads the own shard and the own arena, so both are read alike.
    if not _describable(rows, cols, a.element_size(), config):
        return "pointers"
    return "rows" if a.numel() == 0 or a.stride(1) != 1 or read_by(a, config) == "rows" else "pointers"


def of_left(a: torch.Tensor, by: str, config: Config) -> TensorDescriptor | None:
    """Return the descriptor of A [M, K] as [1, M, K] or [1, K, M]; None if A is read by pointers."""
    if by == "pointers":
        return None
    M, K = a.shape
    if by == "rows":
        return TensorDescriptor(a, [1, M, K], [M * a.stride(0), a.stride(0), 1], [1, config.block_m, config.block_k])
    return TensorDescriptor(a, [1, K, M], [K * a.stride(1), a.stride(1), 1], [1, config.block_k, config.block_m])


def of_right(b: torch.Tensor, by: str, config: Config) -> TensorDescriptor | None:
    """Return the descriptor of B [K, N], or of its transpose [N, K]; None if B is read by pointers."""
    if by == "pointers":
        return None
    K, N = b.shape
    if by == "rows":
        return TensorDescriptor(b, [K, N], [b.stride(0), 1], [config.block_k, config.block_n])
    return TensorDescriptor(b, [N, K], [b.stride(1), 1], [config.block_n, config.block_k])


def of_arena(
    channel: Channel, dtype: torch.dtype, rows: int, cols: int, pitch: int, config: Config
) -> TensorDescriptor:
    """Return the descriptor of the own arena as [2, rows, cols]: the halves of even and of odd epochs."""
    # The pitch, the halves and the address of an arena are multiples of 16 bytes.
    half, block = channel.half_bytes // dtype.itemsize, [1, config.block_m, config.block_k]
    return TensorDescriptor(channel.data.view(dtype), [2, rows, cols], [half, pitch, 1], block)
