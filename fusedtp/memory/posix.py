"""Arenas for processes of one machine: anonymous files in memory, opened by the peers through /proc.

`memfd_create` makes a file without a name, sealed against resizing; a peer opens it as /proc/<pid>/fd/<fd>, which the
kernel allows only to a process that may inspect this one. The descriptors go with the mappings, which keep copies.
So there is nothing in /dev/shm, nothing to unlink, and nothing left when every process is killed. (man 2 memfd_create,
man 5 proc.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from . import Arena, Unreachable

# linux/fcntl.h; the fcntl module has F_ADD_SEALS but names it only on some builds.
_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4


def _machine() -> int:
    # The boot's id and the pid namespace: processes that agree on both see each other in /proc under the same number.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return zlib.crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())


def _map(fd: int, num_bytes: int) -> tuple[mmap.mmap, Tensor]:
    mapping = mmap.mmap(fd, num_bytes)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def _file(stack: contextlib.ExitStack, num_bytes: int) -> int:
    # A new file in memory, open until `stack` ends.
    fd = os.memfd_create("fusedtp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    # Made with all permissions: /proc lets no other user's process reach it, and this would stop it once more.
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


class PosixMemory:
    """Arenas shared by the processes of `group`, whose backend must carry CPU tensors (gloo)."""

    waits = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()

    def _exchange(self, mine: list[int]) -> list[list[int]]:
        row = torch.tensor(mine, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row, group=self._group)
        return [each.tolist() for each in rows]

    def _check_alike(self, rows: list[list[int]]) -> None:
        # Ranks that make different calls meet here by chance: a rank that grows, say, and one that begins anew.
        if any(row != rows[0] for row in rows):
            each = ", ".join(f"{size} from epoch {epoch} on rank {rank}" for rank, (size, epoch) in enumerate(rows))
            raise ValueError(
                f"the ranks do not agree on the bytes of an arena: {each}: they make different calls, which debug=True "
                "compares, or not all of them have called fusedtp.destroy"
            )

    def allocate(self, num_bytes: int, header: Tensor) -> Arena:
        """See `Memory.allocate`. Raises `Unreachable` on every rank if any two are not on one machine or any
        has no descriptor or memory left, ValueError on every rank if they do not ask alike, MemoryError for more than
        the machine has."""
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        there = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        # A file in memory may be larger than the memory: the ranks would be killed when they fill it.
        if num_bytes > there:
            raise MemoryError(f"an arena of {num_bytes} bytes a rank is more than this machine's memory, {there} bytes")
        mappings: list[mmap.mmap | None] = [None] * self.world_size
        tensors: list[Tensor | None] = [None] * self.world_size
        with contextlib.ExitStack() as stack:
            mine = [os.getpid(), -1, 0, _machine(), 0, num_bytes, int(header[0])]
            try:
                fd = _file(stack, num_bytes)
                mappings[self.rank], own = _map(fd, num_bytes)
                own[: header.numel() * 4].view(torch.int32).copy_(header)
                tensors[self.rank] = own
                mine[1:3] = fd, os.fstat(fd).st_ino
            except OSError as error:
                # No descriptor or no memory left here: the peers must not wait for what will not come.
                mine[4] = error.errno or errno.EIO
            rows = self._exchange(mine)
            self._check_alike([row[5:] for row in rows])
            failed = next((peer + 1 for peer, row in enumerate(rows) if row[4]), 0)
            for peer, (pid, peer_fd, inode, machine, *_) in enumerate(rows):
                if peer == self.rank or failed:
                    continue
                try:
                    if machine != rows[self.rank][3]:
                        raise OSError("another machine or pid namespace")
                    opened = os.open(f"/proc/{pid}/fd/{peer_fd}", os.O_RDWR | os.O_CLOEXEC)
                    stack.callback(os.close, opened)
                    if os.fstat(opened).st_ino != inode:
                        raise OSError("not the file that the peer announced")
                    mappings[peer], tensors[peer] = _map(opened, num_bytes)
                except OSError:
                    failed = peer + 1
            # Every rank learns of every failure, and nobody closes a descriptor before all have opened it.
            failures = [(rank, row[0] - 1) for rank, row in enumerate(self._exchange([failed])) if row[0]]

        def release() -> None:
            tensors.clear()
            for mapping in mappings:
                # A tensor that still shows this memory keeps it mapped until it goes.
                with contextlib.suppress(BufferError):
                    if mapping is not None:
                        mapping.close()

        if failures:
            own = torch.empty(0)
            release()
            rank, peer = failures[0]
            if code := rows[peer][4]:
                raise Unreachable(f"rank {peer} cannot make an arena of {num_bytes} bytes: {os.strerror(code)}")
            raise Unreachable(
                f"rank {rank} cannot map the memory of rank {peer}: not the same machine and pid namespace"
            )
        return Arena([each for each in tensors if each is not None], release)
