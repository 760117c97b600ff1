"""Main loop of a rank process of a `RankPool`: join the group, then serve calls until the parent closes the pipe.

A rank is forked from a server, the script `python -P rank_main.py <socket fd> <parent pid>`, which has imported torch.
So the parent's `__main__` does not run again, and a broken import of the package shows as that rank's traceback. A call
is (module, file, qualified name, pickled arguments, group size). The module is loaded before the arguments are
unpickled, as they may be instances of its classes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent's spawning thread ends; exit at once if the parent is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def load_module(name: str, file: str) -> ModuleType:
    """Return the module `name` if importing it here gives `file`, else `file` run under that name (importlib mode)."""
    # A script's functions must not find this process's __main__, nor run the script's guarded part.
    name = "fusedtp_parent_main" if name == "__main__" else name
    if name in sys.modules:
        module = sys.modules[name]
        if module.__file__ is None or os.path.realpath(module.__file__) != os.path.realpath(file):
            raise ImportError(f"{name} is already loaded from {module.__file__}, not from {file}")
        return module
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file} as a module")
    module = importlib.util.module_from_spec(spec)
    # Unpickling a class of "tests.test_x" imports "tests" first, which is a folder without a package.
    parent, folder = name.rpartition(".")[0], os.path.dirname(file)
    while parent and parent not in sys.modules:
        package = ModuleType(parent)
        # The module may import its neighbours.
        package.__path__ = [folder]
        sys.modules[parent] = package
        parent, folder = parent.rpartition(".")[0], os.path.dirname(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def resolve(name: str, file: str, qualname: str) -> Callable[..., Any]:
    target: Any = load_module(name, file)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]


def failure(error: BaseException) -> bytes:
    """Return the reply (False, pickled exception or None if it cannot be pickled, traceback text)."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    return pickle.dumps((False, pickled, text))


def call(groups: dict[int, Any], request: bytes) -> bytes:
    """Run one request; the reply is (True, pickled result, "") or a failure. Tensors are pickled by value."""
    try:
        name, file, qualname, arguments, size = pickle.loads(request)
        fn = resolve(name, file, qualname)
        return pickle.dumps((True, pickle.dumps(fn(groups[size], *pickle.loads(arguments))), ""))
    except BaseException as error:  # SystemExit of a called function is a result to report, not a reason to leave
        return failure(error)


def gloo_of(num_workers: int) -> str:
    """Register a gloo backend with `num_workers` threads for each group, and return the backend's name.

    torch gives a gloo group two threads and has no option for it. At the end of a collective each thread assigns its
    name to a std::string of the group, without a lock (ProcessGroupGloo::runLoop, torch 2.11 to 2.15). Two threads may
    then free the string's memory twice, if the name exceeds the 15 characters of an inline string, like DTensor's
    ALLGATHER_COALESCED: one in many thousand collectives kills the process. One thread runs the collectives in the
    order of their start.
    """
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    # A device has a thread that wakes up 100 times a second, also while its group is idle: all groups share one.
    device = functools.cache(lambda interface: gloo.create_device(interface=interface))

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = gloo._Options()
        options._devices = [device(os.environ["GLOO_SOCKET_IFNAME"])]
        options._threads, options._timeout = num_workers, timeout
        return gloo(store, rank, size, options)

    name = f"gloo{num_workers}"
    dist.Backend.register_backend(name, make, devices=["cpu", "cuda"])
    return name


def join(
    rank: int, world_size: int, host: str, port: int, seconds: float, gloo_workers: int | None
) -> dict[int, Any]:  # fmt: skip
    """Return a process group of every size 1..world_size over the first ranks; collective over all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = gloo = "gloo" if gloo_workers is None else gloo_of(gloo_workers)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # NCCL refuses ranks that share a GPU.
        if torch.cuda.device_count() >= world_size and dist.is_nccl_available():
            backend = f"cpu:{gloo},cuda:nccl"
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in range(1, world_size)}
    return {**groups, world_size: dist.group.WORLD}


def main(server: int, pipe_fd: int, stacks_fd: int) -> None:
    die_with_parent(server)
    # C-level handlers answer even when Python code cannot run.
    faulthandler.enable(file=stacks_fd)
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
    # `ranks.tell` writes to this file descriptor.
    os.environ["FUSEDTP_NOTE_FD"] = str(stacks_fd)
    pipe = Connection(pipe_fd)
    try:
        request = pipe.recv_bytes()
        try:
            groups = join(*pickle.loads(request))
        except Exception as error:
            pipe.send_bytes(failure(error))
            return
        pipe.send_bytes(pickle.dumps((True, pickle.dumps(None), "")))
        while True:
            pipe.send_bytes(call(groups, pipe.recv_bytes()))
            sys.stdout.flush()
            sys.stderr.flush()
    except (EOFError, OSError):
        # The parent closed the pipe. Skip destructors, as those of a group without its peers may block.
        return
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def serve(requests: socket.socket) -> None:
    """Fork a rank for each request, and write its exit status to the requester."""
    # Import once for all ranks. If an import is broken, each rank reports it.
    more = os.environ.get("FUSEDTP_PRELOAD", "").split()
    for name in ("torch", "triton", "numpy", "fusedtp", "torch.distributed.tensor.parallel", *more):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Imported objects stay: a rank's garbage collector must not visit them, which would copy their pages.
    gc.freeze()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    server, statuses = os.getpid(), dict[int, int]()
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            for pid in list(statuses):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    place = statuses.pop(pid)
                    with contextlib.suppress(BrokenPipeError):
                        os.write(place, str(os.waitstatus_to_exitcode(status)).encode())
                    os.close(place)
        if requests.fileno() in ready:
            message, given, _, _ = socket.recv_fds(requests, 16, 8)
            if not message:
                return
            *fds, place = given
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                for fd in (woken, wake, place, *statuses.values()):
                    os.close(fd)
                os.setsid()
                main(server, *fds)
            for fd in fds:
                os.close(fd)
            statuses[pid] = place
            pidfd = os.pidfd_open(pid)
            socket.send_fds(requests, [str(pid).encode()], [pidfd])
            os.close(pidfd)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))
