"""Parts that launchers share: the channel to the peers, and the tile configuration for this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton.language as tl

from . import INTERPRETED
from .choices import applied, of_config
from .configs import INTERPRETER, compiled_config, nearest_target, shape_class
from .configs import Config as Config
from .signal import RankGroup

_MANY = 1 << 30
# Let the compiler fuse a multiply and an add. Every launch says so: Triton's default is on up to 3.9, off from 3.10.
FP_FUSION = {"enable_fp_fusion": True}
# Layouts of operands for which a memo caches launch parameters.
_MOST_KNOWN = 1024


@dataclass
class Channel:
    """One rank's end of a workspace, as kernels see it.

    - `peers`: device table (int64, world_size + 2) of addresses: each arena's, the host block's, all arenas' or 0.
    - `data`: both halves of the own arena (uint8).
    - `half_bytes`, `data_offset`: bytes of a half, and bytes in an arena before its halves.
    - `fingerprint`: int64, of the current op; see `signal`.
    - `arenas`: both halves of every rank's arena (uint8), for launches that describe them.
    """

    peers: torch.Tensor
    data: torch.Tensor
    rank: int
    world_size: int
    half_bytes: int
    data_offset: int
    fingerprint: int = 0
    arenas: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        self.groups: dict[int, RankGroup] = {}

    def group(self, op: int) -> RankGroup:
        """Return the arenas as a launch of op number `op` passes them."""
        group = self.groups.get(op)
        if group is None:
            constants = tl.constexpr(self.world_size), tl.constexpr(op)
            group = self.groups[op] = RankGroup(self.peers, self.half_bytes, self.data_offset, *constants)
        return group


class Memo(dict[tuple[object, ...], Any]):
    """Launch parameters, by operands' dtype, shapes, strides and alignments."""

    def keep(self, key: tuple[object, ...], found: Any) -> Any:
        """Cache and return launch parameters."""
        if len(self) >= _MOST_KNOWN:
            self.clear()
        self[key] = found
        return found


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _target(device: torch.device) -> str:
    return nearest_target(None if torch.version.hip else torch.cuda.get_device_capability(device)[0])


def config_for(
    device: torch.device, dtype: torch.dtype, rows: int = _MANY, cols: int = 0, *, chunks: int = 1,
    blocks: bool = False, tree: bool = False,
) -> Config:  # fmt: skip
    """Return the configuration for a device, with the number of programs filled in.

    - `rows`: most rows of a chunk of a matmul, the same on all ranks. Kernels that only move rows omit it.
    - `cols`: columns of C of a matmul, the same on all ranks if they exchange tiles of C.
    - `chunks`: number of chunks of rows.
    - `blocks`, `tree`: as in `compiled_config`.
    """
    if INTERPRETED:
        return INTERPRETER
    programs = _num_multiprocessors(device)
    shape = shape_class(rows, cols, chunks=chunks, programs=programs)
    config = compiled_config(_target(device), dtype.itemsize, shape, blocks=blocks, tree=tree)
    tiles = chunks * -(-rows // config.block_m) * -(-cols // config.block_n)
    if shape == "few rows" and config.num_warps == 4 and dtype.itemsize == 2 and not tree and 0 < 2 * tiles <= programs:
        # Halve the columns of a tile, so that twice as many programs read the weight.
        config = applied(config, of_config(config)._replace(block_n=config.block_n // 2))
    return replace(config, programs=programs)


def in_16_bytes(*matrices: torch.Tensor) -> bool:
    """Return whether kernels read and store these matrices 16 bytes at a time."""
    # A compiled kernel knows only whether lengths, strides and pointers are multiples of 16.
    return all(
        x.data_ptr() % 16 == 0 and 1 in x.stride() and not any(n % 16 for n in (*x.shape, *x.stride()) if n != 1)
        for x in matrices
    )


def fitted(config: Config, *, stored: bool, read: bool) -> Config:
    """Return the configuration of a kernel, fitted to the alignment of its matrices as `Config` says.

    stored: the result is stored 16 bytes at a time. read: operands read by pointers are read 16 bytes at a time.
    """
    if not stored:
        config = replace(config, block_n=min(config.block_n, config.loose_cols))
    if not read:
        block_k, warps = min(config.block_k, config.loose_block_k), max(8, config.pointer_warps)
        config = replace(config, block_k=block_k, pointer_warps=warps)
    return config


def flattened(config: Config, a_by: str, b_by: str) -> bool:
    """Return whether tiles and contraction become one loop: not with pointers, which would live from tile to tile."""
    return config.flatten and "pointers" not in (a_by, b_by)


def _options(warps: int, stages: int, registers: int) -> dict[str, int]:
    # A multiprocessor has 64 Ki registers (CUDA C++ programming guide, technical specifications).
    limit = {"maxnreg": min(registers, (64 << 10) // (32 * warps))} if registers else {}
    return {"num_warps": warps, "num_stages": stages, **limit, **FP_FUSION}


def options(config: Config, a_by: str, b_by: str) -> dict[str, int]:
    """Return the compiler's options for a kernel that multiplies, as launch arguments; a_by, b_by: how it reads."""
    if "pointers" not in (a_by, b_by):
        return _options(config.num_warps, config.num_stages, config.registers)
    return _options(config.pointer_warps, config.pointer_stages or config.num_stages, config.registers)


def copy_rows_of(config: Config, x: torch.Tensor, pitch: int) -> int:
    """Return how many rows of x a producer has in registers at a time."""
    # Any number of rows will do: they are masked whole.
    loose = any(n % 16 for n in (pitch, x.shape[1], x.data_ptr(), *x.stride()) if n != 1)
    return min(config.copy_rows, config.loose_copy_rows) if loose else config.copy_rows


def strip_of(config: Config, tensors: int = 1) -> int:
    """Return how many rows of a tile a kernel that moves or adds `tensors` has in registers at a time."""
    return min(config.strip_rows // tensors, config.block_m)


def moving_options(config: Config) -> dict[str, int]:
    """Return the compiler's options for a kernel that moves or adds whole tiles."""
    return _options(config.moving_warps, config.num_stages, config.moving_registers)
