"""What every launcher shares: the channel to the peers, and the tile configuration for the machine at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from . import INTERPRETED


@dataclass(frozen=True)
class Channel:
    """One rank's end of a workspace, as kernels see it.

    `peers` is the device table of arena addresses (int64, world_size + 1, the last one the clock's); data starts
    `data_offset` bytes into an arena, in two halves of `half_bytes`. With `count_bytes` the kernels add up what they
    store into peers' arenas.
    """

    peers: torch.Tensor
    rank: int
    world_size: int
    half_bytes: int
    data_offset: int
    count_bytes: bool = False


@dataclass(frozen=True)
class Config:
    """Tile shape and launch shape of a kernel. `programs` and `pushers` of 0 mean: as many as the device wants."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    programs: int = 0
    pushers: int = 16
    copy_rows: int = 8
    copy_cols: int = 512


# Few large tiles: the interpreter's cost is per operation, not per element. Two programs, so that their order matters.
INTERPRETER = Config(block_m=64, block_n=64, block_k=64, group_m=2, programs=2, pushers=2, copy_rows=64, copy_cols=128)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def compiled_config(dtype: torch.dtype) -> Config:
    """The configuration of a compiled kernel; the device adds the number of programs."""
    if dtype == torch.float32:
        # No tensor cores, and twice the bytes a tile: smaller tiles keep it out of local memory.
        return Config(block_m=64, block_n=64, block_k=32, num_warps=8)
    return Config()


def config_for(device: torch.device, dtype: torch.dtype) -> Config:
    """The configuration for a device, with the number of programs filled in."""
    if INTERPRETED:
        return INTERPRETER
    return replace(compiled_config(dtype), programs=_num_multiprocessors(device))


def pitch_of(cols: int, dtype: torch.dtype) -> int:
    """Elements from one arena row to the next: `cols` rounded up to 16 bytes, so that every row starts aligned."""
    per_16_bytes = 16 // dtype.itemsize
    return -(-cols // per_16_bytes) * per_16_bytes


def options(config: Config) -> dict[str, int]:
    """The compiler's options as launch arguments."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}
