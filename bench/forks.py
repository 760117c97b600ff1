"""Fork ranks from one server process that has imported torch, as that import dominates an interpreter's start.

The server (`rank_main.serve`) forks before any of torch's code runs, so a rank has its own threads, CUDA context and
process groups.

multiprocessing's forkserver has one environment for all children, runs the body of the parent's `__main__` in every
child, and leaves its socket's folder behind if the parent is killed.
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
    """A forked process, with the methods of subprocess.Popen that ranks need. Its exit status comes through a pipe."""

    def __init__(self, pid: int, pidfd: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd, self._status_fd = pidfd, status_fd

    def poll(self) -> int | None:
        """Return the exit status if the process has ended: negative for a signal."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status_fd], [], [], timeout)[0]:
            # The pipe is empty if the server has ended, and its children with it.
            self.returncode = int(os.read(self._status_fd, 16) or -signal.SIGKILL)
            os.close(self._status_fd)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        # The process may end after `poll`, before its status arrives.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Forks processes with the environment `env`, which end at the latest with the thread that made the server."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env, self.num_pools = dict(env), 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable, "-P", str(Path(__file__).with_name("rank_main.py")), str(theirs.fileno()), str(os.getpid()),
        ]  # fmt: skip
        try:
            # In a session of its own, as Ctrl-C must reach only the parent, which then ends the ranks.
            self.process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def serves(self, env: Mapping[str, str]) -> bool:
        """Return whether the server runs and forks processes with this environment."""
        return self.env == env and self.process.poll() is None

    def fork(self, fds: Sequence[int]) -> Forked:
        """Return a process that serves as a rank over `fds`, a pipe and a file for stacks.

        ConnectionError if the server has ended.
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
        """Release the server from one pool; close it unless it is kept."""
        self.num_pools -= 1
        if _kept is None or self not in _kept:
            self.close()

    def close(self) -> None:
        """End the server and the processes that it forked."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


# Servers that stay while unused, inside `kept`, and the largest number of them.
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
    """Return a server that forks processes with this environment, to be released after use."""
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
