"""Arenas for processes of one machine: anonymous files in memory, opened by the peers through /proc.

`memfd_create` makes a file without a name, sealed against resizing. A peer opens it as /proc/<pid>/fd/<fd>, which the
kernel allows only to a process that may inspect this one. The mappings keep copies of the descriptors and close them
when they end. So there is nothing in /dev/shm, nothing to unlink, and nothing left when every process is killed. (man 2
memfd_create, man 5 proc.)

A mapping is never closed explicitly, as torch would not notice: it ends with the last tensor that uses it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import Arena, Exchange, Unreachable, differing

# Reasons why ranks cannot map each other's memory, with remedies; the same text on every rank.
# Codes beside the system's error numbers, which are positive.
OTHER_MACHINE, OTHER_NAMESPACE, OTHER_FILE, DIFFERS = -1, -2, -3, -4


class Endpoint(NamedTuple):
    """A rank's arena for its peers; `owner` owns its files in /proc, `code` says why there is no arena, or is 0."""

    pid: int
    fd: int
    inode: int
    boot: int
    namespace: int
    user: int
    owner: int
    code: int
    num_bytes: int
    epoch: int

    @property
    def asked(self) -> tuple[int, int]:
        """Return the values that the ranks must agree on."""
        return self.num_bytes, self.epoch


_REMEDIES = {
    errno.EMFILE: "its process has no file descriptor left: raise the limit, ulimit -n",
    errno.ENFILE: "the machine has no file descriptor left: raise fs.file-max",
    errno.ENOMEM: "no memory or address space is left: raise the limit, ulimit -v or a container's, or use fewer ranks",
    errno.EFBIG: "its files may not be that large: raise the limit, ulimit -f",
    errno.ENOENT: "that process or its file is not in this one's /proc: it has ended, or /proc is mounted with hidepid",
}


def cause(rank: int, peer: int, code: int, rows: list[Endpoint]) -> str:
    """Return why rank `rank` could not map rank `peer`'s memory, why `peer` has none, or how the ranks disagree."""
    there, here = rows[peer], rows[rank]
    if code == DIFFERS:
        return differing([row.asked for row in rows])
    if there.code:
        text = f"rank {peer} cannot make an arena of {there.num_bytes} bytes"
    else:
        text = f"rank {rank} cannot map the memory of rank {peer}"
    return f"{text}: {_why(rank, peer, code, here, there)}"


def _why(rank: int, peer: int, code: int, here: Endpoint, there: Endpoint) -> str:
    if code == OTHER_MACHINE:
        return "they are on different machines: use schedule 'unfused' between machines"
    if code == OTHER_NAMESPACE:
        return (
            "they are in different pid namespaces: if they run on one machine, start them in one pid namespace, as "
            "docker run --pid=host does; use schedule 'unfused' between machines"
        )
    if code == OTHER_FILE:
        return "what it found there is not the file that was announced"
    said = os.strerror(code)
    if code in (errno.EACCES, errno.EPERM) and not there.code:
        if here.user != there.user:
            why = f"they run as users {here.user} and {there.user}: start all ranks as one user"
        elif there.owner != there.user:
            why = (
                f"rank {peer} has changed its user since it started, and the kernel keeps what it has open from others "
                "(man 2 prctl, PR_SET_DUMPABLE): start the ranks as the user that they are to run as"
            )
        else:
            why = (
                "the kernel keeps it from processes of the same user: see kernel.yama.ptrace_scope, and what the "
                "container or a security module allows"
            )
        return f"{said}: {why}"
    return f"{said}: {_REMEDIES[code]}" if code in _REMEDIES else said


# linux/fcntl.h; the fcntl module has F_ADD_SEALS but names it only on some builds.
_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4


def _machine() -> tuple[int, int]:
    # Ids of boot and pid namespace: processes that agree on both see each other in /proc under the same number.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return zlib.crc32(boot.encode()), zlib.crc32(os.readlink("/proc/self/ns/pid").encode())


def _map(fd: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


class _Descriptor(list[int]):
    # At most one open descriptor, closed with the last reference to this list. Interruptions leak nothing: no line lies
    # between opening and storing the descriptor, nor between removing and closing it.
    @property
    def number(self) -> int:
        return self[0]

    def close(self) -> None:
        if self:
            os.close(self.pop())

    __del__ = close


def _file(num_bytes: int) -> _Descriptor:
    file = _Descriptor([os.memfd_create("fusedtp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)])
    # memfd_create grants all permissions. /proc already keeps out processes of other users, and this mode does too.
    os.fchmod(file.number, 0o600)
    os.ftruncate(file.number, num_bytes)
    fcntl.fcntl(file.number, _F_ADD_SEALS, _SEALS)
    return file


def _map_of(peer: Endpoint, mine: Endpoint) -> Tensor:
    # Raises OSError with one of the codes of `_REMEDIES`, or the system's own.
    if (peer.boot, peer.namespace) != (mine.boot, mine.namespace):
        raise OSError(OTHER_MACHINE if peer.boot != mine.boot else OTHER_NAMESPACE, "")
    file = _Descriptor([os.open(f"/proc/{peer.pid}/fd/{peer.fd}", os.O_RDWR | os.O_CLOEXEC)])
    try:
        if os.fstat(file.number).st_ino != peer.inode:
            raise OSError(OTHER_FILE, "")
        return _map(file.number, peer.num_bytes)
    finally:
        file.close()


class PosixMemory:
    """Arenas shared by the processes of a group, in which this process is rank `rank`."""

    exchanges = True

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """Allocate as `Memory.allocate` does.

        Raises on every rank: `Unreachable` if any two cannot map each other's memory or any has no descriptor or memory
        left, ValueError if the ranks ask for different arenas. Raises MemoryError for more than the machine has, and
        the errors of the exchange.
        """
        assert exchange is not None
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        there = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        # A file in memory may be larger than the memory: the ranks would be killed when they fill it.
        if num_bytes > there:
            raise MemoryError(f"an arena of {num_bytes} bytes a rank is more than this machine's memory, {there} bytes")
        own, file, mine = self._own(num_bytes, header)
        try:
            while True:
                rows = [Endpoint(*row) for row in exchange.rows(list(mine))]
                tensors, outcome = self._map_all(own, rows)
                # Every rank learns of every failure.
                if (outcomes := exchange.outcomes(outcome)) is not None:
                    break
        finally:
            # Not before every rank has opened the file.
            if file is not None:
                file.close()
        failed = [(rank, peer - 1, code) for rank, (peer, code) in enumerate(outcomes) if peer]
        if failed and failed[0][2] == DIFFERS:
            raise ValueError(cause(*failed[0], rows))
        if failed:
            raise Unreachable(cause(*failed[0], rows))
        return Arena(tensors, tensors.clear)

    def _own(self, num_bytes: int, header: Tensor) -> tuple[Tensor, _Descriptor | None, Endpoint]:
        # Return the own arena, its file, and its row for the peers. Without room the arena is empty, and the row has
        # the reason.
        own, file, inode, code, machine = torch.empty(0, dtype=torch.uint8, device="cpu"), None, 0, 0, (0, 0)
        try:
            machine = _machine()
            file = _file(num_bytes)
            own, inode = _map(file.number, num_bytes), os.fstat(file.number).st_ino
            own[: header.numel() * 4].view(torch.int32).copy_(header)
        except OSError as error:
            # The peers must not wait for an arena that never comes.
            code = error.errno or errno.EIO
        except MemoryError:
            code = errno.ENOMEM
        users = os.geteuid(), os.stat("/proc/self").st_uid
        fd = -1 if file is None else file.number
        return own, file, Endpoint(os.getpid(), fd, inode, *machine, *users, code, num_bytes, int(header[0]))

    def _map_all(self, own: Tensor, rows: list[Endpoint]) -> tuple[list[Tensor], list[int]]:
        # Return all arenas and [0, 0]; or some arenas and [1 + the peer that cannot be mapped, code].
        tensors: list[Tensor] = []
        for peer, row in enumerate(rows):
            try:
                if row.code:
                    raise OSError(row.code, "")
                if row.asked != rows[0].asked:
                    raise OSError(DIFFERS, "")
                tensors.append(own if peer == self.rank else _map_of(row, rows[self.rank]))
            except OSError as error:
                return tensors, [peer + 1, error.errno or errno.EIO]
            except MemoryError:
                return tensors, [peer + 1, errno.ENOMEM]
        return tensors, [0, 0]
