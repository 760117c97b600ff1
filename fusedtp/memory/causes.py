"""Reasons why the ranks of a group cannot map each other's memory, with remedies; the same text on every rank."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

# Codes beside the system's error numbers, which are positive.
OTHER_MACHINE, OTHER_NAMESPACE, OTHER_FILE, DIFFERS = -1, -2, -3, -4


class Row(NamedTuple):
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


def cause(rank: int, peer: int, code: int, rows: list[Row]) -> str:
    """Return why rank `rank` could not map rank `peer`'s memory, why `peer` has none, or how the ranks disagree."""
    there, here = rows[peer], rows[rank]
    if code == DIFFERS:
        each = ", ".join(f"{row.num_bytes} from epoch {row.epoch} on rank {i}" for i, row in enumerate(rows))
        return (
            f"the ranks do not agree on the bytes of an arena: {each}: they make different calls, "
            "or not all of them have called fusedtp.destroy"
        )
    if there.code:
        text = f"rank {peer} cannot make an arena of {there.num_bytes} bytes"
    else:
        text = f"rank {rank} cannot map the memory of rank {peer}"
    return f"{text}: {_why(rank, peer, code, here, there)}"


def _why(rank: int, peer: int, code: int, here: Row, there: Row) -> str:
    if code == OTHER_MACHINE:
        return "they are on different machines: use schedule 'unfused' between machines"
    if code == OTHER_NAMESPACE:
        return "they are in different pid namespaces: start the ranks of a machine in one container"
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
