"""What every launcher shares: the channel to the peers, and the tile configuration for the machine at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton.language as tl

from . import INTERPRETED
from .configs import INTERPRETER, compiled_config, nearest_target, shape_class
from .configs import Config as Config
from .signal import Group

_MANY = 1 << 30
# Layouts of operands that a kernel of one op remembers what it comes to for.
MOST_KNOWN = 64


@dataclass
class Channel:
    """One rank's end of a workspace, as kernels see it.

    `peers` is the device table of arena addresses (int64, world_size + 1, the last one the clock's); data starts
    `data_offset` bytes into an arena, in two halves of `half_bytes`; `data` is both halves of the own arena (uint8).
    `fingerprint` (int64) is the op's at hand: see `signal`.
    """

    peers: torch.Tensor
    data: torch.Tensor
    rank: int
    world_size: int
    half_bytes: int
    data_offset: int
    fingerprint: int = 0

    def __post_init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def group(self, op: int) -> Group:
        """The same for a launch of the op of that number."""
        group = self.groups.get(op)
        if group is None:
            constants = tl.constexpr(self.world_size), tl.constexpr(op)
            group = self.groups[op] = Group(self.peers, self.half_bytes, self.data_offset, *constants)
        return group


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _target(device: torch.device) -> str:
    return nearest_target(None if torch.version.hip else torch.cuda.get_device_capability(device)[0])


def config_for(device: torch.device, dtype: torch.dtype, rows: int = _MANY, cols: int = 0) -> Config:
    """The configuration for a device, with the number of programs filled in.

    For a matmul, `rows` is the largest number of rows of a chunk, on which the ranks must agree, and `cols` the columns
    of C, on which they must where they exchange its tiles. What only moves rows has neither.
    """
    if INTERPRETED:
        return INTERPRETER
    config = compiled_config(_target(device), dtype.itemsize, shape_class(rows, cols))
    return replace(config, programs=_num_multiprocessors(device))


def in_16_bytes(*matrices: torch.Tensor) -> bool:
    """Whether kernels read and store these matrices 16 bytes at a time. What they know of lengths and strides is
    whether those are multiples of 16, and of pointers the same.
    """
    return all(
        x.data_ptr() % 16 == 0 and 1 in x.stride() and not any(n % 16 for n in (*x.shape, *x.stride()) if n != 1)
        for x in matrices
    )


def fitted(config: Config, *, stored: bool, read: bool) -> Config:
    """The configuration of a kernel that stores its result, and reads what it reads by pointers, 16 bytes at a time, or
    not: `Config` says what that takes.
    """
    if not stored:
        config = replace(config, block_n=min(config.block_n, config.loose_cols))
    if not read:
        block_k, warps = min(config.block_k, config.loose_block_k), max(8, config.pointer_warps)
        config = replace(config, block_k=block_k, pointer_warps=warps)
    return config


def flattened(config: Config, a_by: str, b_by: str) -> bool:
    """Whether tiles and contraction become one loop: pointers would have to live from one tile to the next."""
    return config.flatten and "pointers" not in (a_by, b_by)


def _limit(config: Config, warps: int) -> dict[str, int]:
    # A multiprocessor has 64 Ki registers (CUDA C++ programming guide, technical specifications).
    most = config.registers.get("")
    return {} if most is None else {"maxnreg": min(most, (64 << 10) // (32 * warps))}


def options(config: Config, a_by: str, b_by: str, *, limit: str = "") -> dict[str, int]:
    """The compiler's options of a kernel that multiplies, as launch arguments: by how it reads A and B.

    limit: which of the configuration's limits of registers holds instead of that for all kernels, "" for none. Read
    otherwise than the target mainly does, a kernel has the one for all.
    """
    by_pointers = "pointers" in (a_by, b_by)
    mainly = by_pointers != config.descriptors
    warps = config.pointer_warps if by_pointers else config.num_warps
    found = _limit(config, warps)
    if limit and mainly and limit in config.registers:
        found = {"maxnreg": config.registers[limit]} if config.registers[limit] else {}
    return {"num_warps": warps, "num_stages": config.num_stages, **found}


def strip_of(config: Config, tensors: int = 1) -> int:
    """The rows of a tile that a kernel which moves or adds tiles has in its registers at a time: the fewer the more
    tensors have addresses there.
    """
    return min(config.strip_rows // tensors, config.block_m)


def moving_options(config: Config) -> dict[str, int]:
    """The compiler's options of a kernel that moves or adds whole tiles."""
    return {"num_warps": config.moving_warps, "num_stages": config.num_stages, **_limit(config, config.moving_warps)}
