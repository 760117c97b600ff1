"""A pool of rank processes: the one harness that the sweep and the tests share.

    with RankPool(4) as pool:
        results = pool.run(fn, *args)            # [fn(group, *args) on rank 0, ..., rank 3]

Ranks are processes of one thread each, forked from an interpreter that has imported torch but not this process's
modules: a server, which forks before any of torch's code runs, so a rank has its own threads, CUDA context and process
groups. (multiprocessing's forkserver has one environment for all children, runs the body of the parent's `__main__` in
every child, and leaves its socket's folder behind if the parent is killed.) They join a gloo process group, plus NCCL
if every rank has a GPU, through a store that this process hosts on loopback. Functions are sent by name, arguments and
results by value over a private pipe, so nothing has a name in the file system. A rank that raises, dies or is late
never hangs the caller: `RankError` names the rank, with its traceback or a dump of its stacks, and the next call starts
fresh ranks if the old ones may be out of step. The ranks die with the thread that started them (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

START_SECONDS = 180.0
# After a first failure the other ranks get this long to report theirs, as they may hang in a collective.
GRACE_SECONDS = 3.0
STACKS_SECONDS = 1.0


# Also in `rank_main`, which imports nothing of the package.
NOTE_FD, NOTE_BYTES = "FUSEDTP_NOTE_FD", 256

last_note = ""


def tell(text: str) -> None:
    """Replace this rank's note, at most 256 bytes, about what it is doing.

    The parent of a `RankPool` reads the note from an anonymous file if the rank hangs or dies. Under a launcher nobody
    reads notes, and a late rank prints its own (`sweep.bounded`).
    """
    global last_note
    last_note = text
    if fd := os.environ.get(NOTE_FD):
        os.pwrite(int(fd), text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES), 0)


class RankError(RuntimeError):
    """Ranks failed. `failures` maps rank -> traceback, exit status, or stacks of a late rank.

    notes: last notes (`tell`) of the ranks that failed by themselves, or else of the late ranks.
    """

    def __init__(self, failures: Mapping[int, str], notes: Mapping[int, str] | None = None) -> None:
        self.failures, self.notes = dict(failures), dict(notes or {})
        parts = [f"rank {rank} {text.rstrip()}" for rank, text in sorted(self.failures.items())]
        super().__init__("\n\n".join(parts))

    def __reduce__(self) -> tuple[type, tuple[dict[int, str], dict[int, str]]]:
        return type(self), (self.failures, self.notes)


class NotJoined(RuntimeError):
    """Ranks cannot come together, by what is around them: the text is for the user, who needs no traceback."""


class Reply(NamedTuple):
    """One rank's result, or its failure if `text` is not empty, with the rank's last note."""

    value: Any
    text: str = ""
    note: str = ""
    is_late: bool = False


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
# Modules that a server imports beside those that every rank needs, separated by blanks.
PRELOAD = "FUSEDTP_PRELOAD"
_preload = ""


@contextlib.contextmanager
def kept(preload: str = "") -> Iterator[None]:
    """Keep servers for the next pool with the same environment, for a process that makes many pools.

    Only servers of the main thread are kept, as others would end with their thread.

    preload: names of modules that servers import once for all their ranks, separated by blanks, unless the pool's
    environment has FUSEDTP_PRELOAD.
    """
    global _kept, _preload
    before = _kept, _preload
    _kept, _preload = [], preload
    try:
        yield
    finally:
        for server in _kept:
            server.close()
        _kept, _preload = before


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


class RankProcess:
    """One rank: its interpreter, the pipe to it, and the anonymous file of its note and its stack dumps."""

    def __init__(self, rank: int, server: ForkServer) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe(duplex=True)
        self.stacks_fd = os.memfd_create(f"stacks of rank {rank}")
        os.fchmod(self.stacks_fd, 0o600)
        # The rank shares the file's offset.
        os.truncate(self.stacks_fd, NOTE_BYTES)
        os.lseek(self.stacks_fd, NOTE_BYTES, os.SEEK_SET)
        try:
            self.process = server.fork((theirs.fileno(), self.stacks_fd))
        except BaseException:
            self.pipe.close()
            os.close(self.stacks_fd)
            raise
        finally:
            theirs.close()

    def receive(self) -> Reply:
        """Return the next reply: a result, or the exception raised there, or a RankError when the process is gone."""
        try:
            ok, pickled, text = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return self.died()
        try:
            value = None if pickled is None else pickle.loads(pickled)
        except Exception as error:
            ok, text = False, text or f"sent a reply that cannot be unpickled here: {error!r}"
            value = None
        if ok:
            return Reply(value)
        raised = value if isinstance(value, BaseException) else RankError({self.rank: f"raised\n{text}"})
        raised.add_note(f"rank {self.rank} raised\n{text}")
        return Reply(raised, f"raised\n{text}", self.note())

    def died(self) -> Reply:
        try:
            code = self.process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return self._failed("closed its pipe but goes on running")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return self._failed(f"died: {how}\n{self.stacks()}")

    def late(self, seconds: float) -> Reply:
        """Ask the process for its stacks (a C signal handler answers even when Python code cannot run)."""
        before = os.fstat(self.stacks_fd).st_size
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        seen, deadline = before, time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            size = os.fstat(self.stacks_fd).st_size
            if size == seen and size > before:
                break
            seen = size
        return self._failed(f"gave no answer within {seconds:g} s\n{self.stacks(before)}", is_late=True)

    def _failed(self, text: str, *, is_late: bool = False) -> Reply:
        return Reply(RankError({self.rank: text}), text, self.note(), is_late)

    def note(self) -> str:
        return os.pread(self.stacks_fd, NOTE_BYTES, 0).decode(errors="replace").strip("\0 ")

    def stacks(self, start: int = NOTE_BYTES) -> str:
        return os.pread(self.stacks_fd, 1 << 20, start).decode(errors="replace")


def _listener() -> socket.socket:
    """Return a socket that listens on loopback, by IPv4, or by IPv6 alone. NotJoined if there is no loopback."""
    reasons = []
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.create_server((host, 0), family=family) as listener:
                # An interface that is down has its address all the same.
                socket.create_connection(listener.getsockname()[:2], timeout=START_SECONDS).close()
                return listener.dup()
        except OSError as error:
            reasons.append(f"{host}: {os.strerror(error.errno) if error.errno else error}")
    raise NotJoined(
        f"ranks meet on the loopback interface, which does not answer ({'; '.join(reasons)}): `ip link set lo up`"
    )


class Ranks:
    """One generation of processes with their store; `stop` leaves no process and no descriptor."""

    def __init__(self, world_size: int, seconds: float, server: ForkServer, gloo_workers: int | None = None) -> None:
        import torch.distributed as dist

        # TCPStore by itself would listen on every interface.
        listener = _listener()
        host, port = listener.getsockname()[:2]
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.processes: list[RankProcess] = []
        try:
            for rank in range(world_size):
                self.processes.append(RankProcess(rank, server))
            for process in self.processes:
                with contextlib.suppress(OSError):
                    process.pipe.send_bytes(pickle.dumps((process.rank, world_size, host, port, seconds, gloo_workers)))
            failed = failures(collect(self.processes, START_SECONDS, grace=GRACE_SECONDS))
            if failed:
                raise RankError({rank: f"(starting) {text}" for rank, text in failed.items()})
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        return all(process.process.poll() is None for process in self.processes)

    def stop(self) -> None:
        """Close the pipes, which ends idle ranks, and kill the others."""
        for process in self.processes:
            process.pipe.close()
        deadline = time.monotonic() + 1.0
        for process in self.processes:
            try:
                process.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.process.kill()
                process.process.wait()
            os.close(process.stacks_fd)
        self.processes = []
        self.store = None


def collect(processes: Sequence[RankProcess], seconds: float, grace: float | None) -> list[Reply]:
    """Return one reply per process. Ranks without an answer after `seconds`, or `grace` after a failure, are late."""
    replies: dict[int, Reply] = {}
    started = time.monotonic()
    deadline = started + seconds
    while len(replies) < len(processes):
        waiting = [process for process in processes if process.rank not in replies]
        # A dead process closes its end of the pipe, so its pipe is ready too.
        ready = wait([process.pipe for process in waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not ready and time.monotonic() >= deadline:
            for process in waiting:
                replies[process.rank] = process.late(time.monotonic() - started)
            break
        for process in waiting:
            if process.pipe in ready:
                replies[process.rank] = process.receive()
                if grace is not None and replies[process.rank].text:
                    deadline = min(deadline, time.monotonic() + grace)
    return [replies[process.rank] for process in processes]


def failures(replies: Sequence[Reply]) -> dict[int, str]:
    return {rank: reply.text for rank, reply in enumerate(replies) if reply.text}


def last_notes(replies: Sequence[Reply]) -> dict[int, str]:
    """Return the notes of the ranks that failed by themselves; if none did, of the late ranks."""
    failed = {rank: reply for rank, reply in enumerate(replies) if reply.text}
    all_late = all(reply.is_late for reply in failed.values())
    return {rank: reply.note for rank, reply in failed.items() if all_late or not reply.is_late}


class StartedCall:
    """A call under way; `wait` once."""

    def __init__(self, pool: RankPool, processes: Sequence[RankProcess]) -> None:
        self._pool, self._processes = pool, processes

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Return each rank's result, or the exception it raised (RankError for a rank that died or is late)."""
        return [reply.value for reply in self._replies(timeout, grace=None)]

    def _replies(self, timeout: float | None, grace: float | None) -> list[Reply]:
        if self._pool._pending is not self:
            raise RuntimeError("this call was waited for already, or its pool was closed")
        in_step = False
        try:
            replies = collect(self._processes, self._pool.timeout if timeout is None else timeout, grace)
            # Ranks that all failed alike (refused arguments) ran the same collectives; others may not have.
            kinds = {type(reply.value) if reply.text else None for reply in replies}
            in_step = len(kinds) == 1 and RankError not in kinds
            return replies
        finally:
            self._pool._pending = None
            if not in_step:
                self._pool._end_ranks()


class RankPool:
    """`world_size` rank processes, started at the first call. `timeout` in seconds is each call's, and the group's.

    `env` is added to the children's environment before they import torch (TRITON_INTERPRET, ...). One call at a time.
    `gloo_workers`: threads of a gloo group, if not torch's two; see `rank_main.gloo_of`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        gloo_workers: int | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, at least 1 is needed")
        self.world_size, self.timeout = world_size, timeout
        self.env, self.gloo_workers = dict(env or {}), gloo_workers
        # Ranks may be restarted more than once; their server ends with `close`.
        self._server: ForkServer | None = None
        self._ranks: Ranks | None = None
        self._finalizers: list[weakref.finalize[[], RankPool]] = []
        self._pending: StartedCall | None = None

    def _started(self) -> Ranks:
        if self._ranks is not None and not self._ranks.alive():
            self._end_ranks()
        if self._ranks is None:
            one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            # gloo would pick its interface by resolving the host's name.
            env = {PRELOAD: _preload, **os.environ, "GLOO_SOCKET_IFNAME": "lo", **one_thread, **self.env}
            # They differ between tests, which would prevent reuse of a server, and ranks do not read them.
            for name in ("PYTEST_CURRENT_TEST", "COLUMNS"):
                env.pop(name, None)
            if self._server is None or not self._server.serves(env):
                self.close()
                # Finalizers also run at interpreter exit, the last one first.
                self._server = server_for(env)
                self._finalizers = [weakref.finalize(self, self._server.release)]
            self._ranks = Ranks(self.world_size, self.timeout, self._server, self.gloo_workers)
            self._finalizers.append(weakref.finalize(self, self._ranks.stop))
        return self._ranks

    @property
    def pids(self) -> list[int]:
        """Return the process ids by rank; start the ranks if there are none."""
        return [process.process.pid for process in self._started().processes]

    def start(self, fn: Callable[..., Any], *args: Any, world_size: int | None = None) -> StartedCall:
        """Begin fn(group, *args) on the first `world_size` ranks (default all), the group being theirs.

        fn is a module-level function. ValueError for a function that cannot be sent, or a world_size above the pool's.
        """
        size = self.world_size if world_size is None else world_size
        if not 1 <= size <= self.world_size:
            raise ValueError(f"world_size is {size}, the pool has {self.world_size} ranks")
        if self._pending is not None:
            raise RuntimeError("a call is under way: wait for it first")
        name, qualname = fn.__module__, fn.__qualname__
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or "<" in qualname:
            raise ValueError(
                f"{name}.{qualname} cannot be shipped to the ranks: it is not a module-level function of a file"
            )
        request = pickle.dumps((name, file, qualname, pickle.dumps(args), size))
        processes = self._started().processes[:size]
        pending = StartedCall(self, processes)
        for process in processes:
            # `wait` reports a rank that died in between.
            with contextlib.suppress(OSError):
                process.pipe.send_bytes(request)
        self._pending = pending
        return pending

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, world_size: int | None = None
    ) -> list[Any]:
        """Return the results of fn(group, *args) by rank, on the first `world_size` ranks. RankError if any fails."""
        replies = self.start(fn, *args, world_size=world_size)._replies(timeout, grace=GRACE_SECONDS)
        failed = failures(replies)
        if failed:
            cause = next((reply.value for reply in replies if reply.text), None)
            raise RankError(failed, last_notes(replies)) from (None if isinstance(cause, RankError) else cause)
        return [reply.value for reply in replies]

    def run_again(
        self, fn: Callable[..., Any], *args: Any, told: Callable[[str], object] = print, tries: int = 3
    ) -> list[Any] | None:
        """Run `fn` as `run` does, and again on fresh ranks if one dies, for example by a fault in a baseline's library.

        Return None if a rank died each time. `told` gets a line for each death.
        """
        for i in range(1, tries + 1):
            try:
                return self.run(fn, *args)
            except RankError as error:
                died = [
                    f"rank {rank} {text.splitlines()[0]}" for rank, text in error.failures.items() if "died" in text
                ]
                if not died:
                    raise
                told(f"{died[0]}; {'ranks are started anew' if i < tries else f'given up after {tries} tries'}")
        return None

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to one rank. RuntimeError if no ranks are running."""
        if self._ranks is None:
            raise RuntimeError("the pool has no running ranks")
        self._ranks.processes[rank].process.send_signal(sig)

    def close(self) -> None:
        """End the ranks: no process, descriptor or file is left. The pool can be used again."""
        self._pending = None
        while self._finalizers:
            self._finalizers.pop()()
        self._ranks = self._server = None

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._finalizers.pop()()
            self._ranks = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
