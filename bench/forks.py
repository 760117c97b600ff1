"""Ranks that are forked from one process which has imported torch, the most of what starting an interpreter takes.

The server (`rank_main.serve`) forks before anything of torch has run, so a rank has all of its own: threads, CUDA,
process groups.

multiprocessing's forkserver was tried: it has one environment for all that it forks, runs the body of the parent's
`__main__` in every child, and leaves its socket's folder behind where the parent is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class Forked:
    """A forked process, with what is needed of subprocess.Popen. Its exit status comes through a pipe."""

    def __init__(self, pid: int, pidfd: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd, self._status_fd = pidfd, status_fd

    def poll(self) -> int | None:
        """Its exit status if it has ended: negative for a signal."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status_fd], [], [], timeout)[0]:
            # Nothing where the server has ended, which all that it has forked end with.
            self.returncode = int(os.read(self._status_fd, 16) or -signal.SIGKILL)
            os.close(self._status_fd)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        # A process may end behind `poll`, and before its status has come.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Forks processes with the environment `env`; they end at the latest with the thread that has made this."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env, self.num_pools = dict(env), 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable, "-P", str(Path(__file__).with_name("rank_main.py")), str(theirs.fileno()), str(os.getpid()),
        ]  # fmt: skip
        try:
            # Its own session: Ctrl-C reaches the parent only, which then ends the ranks.
            self.process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether it goes on, and gives what it forks this environment."""
        return self.env == env and self.process.poll() is None

    def fork(self, fds: Sequence[int]) -> Forked:
        """Return a process that serves as a rank over `fds`, a pipe and a file for stacks.

        ConnectionError where the server has ended.
        """
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [b"fork"], [*fds, theirs])
            message, (pidfd, *_), _, _ = socket.recv_fds(self._socket, 16, 1)
        except (OSError, ValueError) as error:
            os.close(status)
            raise ConnectionError("the process that ranks are forked from has ended") from error
        finally:
            os.close(theirs)
        return Forked(int(message), pidfd, status)

    def release(self) -> None:
        """Close it, as a pool needs it no longer, unless it is kept."""
        self.num_pools -= 1
        if _kept is None or self not in _kept:
            self.close()

    def close(self) -> None:
        """End the server, and what it has forked."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


# Servers that stay when nobody uses them, while `kept` is entered, and how many may.
_kept: list[ForkServer] | None = None
_MOST_KEPT = 3


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep servers for the next pool with the same environment, for a process that makes many pools.

    Only servers of the main thread are kept, as others would end with their thread.
    """
    global _kept
    before, _kept = _kept, []
    try:
        yield
    finally:
        for server in _kept:
            server.close()
        _kept = before


def server_for(env: Mapping[str, str]) -> ForkServer:
    """One that gives what it forks this environment, until it is released."""
    server = None
    if _kept is not None and threading.current_thread() is threading.main_thread():
        server = next((each for each in _kept if each.serves(env)), None)
        if server is None:
            server = ForkServer(env)
            unused = [each for each in _kept if not each.num_pools]
            for each in unused[: max(0, len(_kept) + 1 - _MOST_KEPT)]:
                _kept.remove(each)
                each.close()
            _kept.append(server)
    server = server or ForkServer(env)
    server.num_pools += 1
    return server
