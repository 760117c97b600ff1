"""One process that has imported what ranks need, and from which the fork servers of all test processes are forked.

Importing torch, its compiler and transformers takes a fork server seconds. The tests run in several processes, each
with a server, and a pool of ranks with an environment of its own needs one more.

As a script: `python -P fork_servers.py <listening socket's fd> <parent pid> <rank_main.py>`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

import pytest

# Its value is the folder of the socket on which the process listens, for this user alone.
ADDRESS = "FUSEDTP_TESTS_FORK_SERVERS"
KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET
# Ranks have one thread each.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# No import reads these variables: servers whose environments differ in nothing else have the same modules. A forked
# server searches the folders of its PYTHONPATH first.
READ_LATE = ("FUSEDTP_", "PYTEST_", "GLOO_", "COLUMNS", "CUBLAS_", "TORCH_SYMM_MEM_", "PYTHONPATH")


def imports_read(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(READ_LATE)}


@contextlib.contextmanager
def address(folder: str) -> Iterator[str]:
    """Return the socket's name by way of an open folder, as it may have 107 characters, and a folder more."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Start the process, and end it with the servers that were forked from it."""
    # Found without an import of the package, and so of torch.
    package = importlib.util.find_spec("fusedtp")
    assert package is not None
    assert package.submodule_search_locations
    rank_main = os.path.join(package.submodule_search_locations[0], "bench", "rank_main.py")
    with tempfile.TemporaryDirectory(prefix="fork_servers_") as folder, socket.socket(*KIND) as listener:
        os.environ[ADDRESS] = folder
        with address(folder) as name:
            listener.bind(name)
        listener.listen()
        command = [sys.executable, "-P", __file__, str(listener.fileno()), str(os.getpid()), rank_main]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(listener.fileno(),), start_new_session=True
        )
        # If the process ends, who asks it is told.
        listener.close()
        try:
            yield
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def forked(preload: str) -> Iterator[None]:
    """Fork the servers of pools from the process, unless their environment may give them other modules.

    preload: names of modules that the process imports before it forks the first server, separated by blanks.
    """
    from fusedtp.bench import ranks

    own, here = ranks.ForkServer, imports_read({**os.environ, **dict.fromkeys(THREADS, "1")})

    class Forked(own):
        def __init__(self, env: Mapping[str, str]) -> None:
            self.env, self.num_pools = dict(env), 0
            self._socket, theirs = socket.socketpair(*KIND)
            status, ended = os.pipe()
            with theirs, socket.socket(*KIND) as asking:
                with address(os.environ[ADDRESS]) as name:
                    asking.connect(name)
                message = json.dumps([self.env, os.getcwd(), preload]).encode()
                socket.send_fds(asking, [message], [theirs.fileno(), 1, 2, ended])
                os.close(ended)
                pid = int(asking.recv(16))
            self.process = ranks.Forked(pid, os.pidfd_open(pid), status)

    def server(env: Mapping[str, str]) -> ranks.ForkServer:
        more = set(env.get(ranks.PRELOAD, "").split()) - set(preload.split())
        return own(env) if more or imports_read(env) != here else Forked(env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "ForkServer", server)
        yield


def do_once() -> None:
    """Do what each rank would: rewrite kernels for Triton's interpreter, and hash what graphs in a cache depend on."""
    for name, module in list(sys.modules.items()):
        # A kernel that is rewritten adds names to its module.
        for each in [*vars(module).values()] if name.startswith("fusedtp.kernels.") else ():
            if type(each).__name__ == "InterpretedFunction":
                each.rewrite()
    if cache := sys.modules.get("torch._inductor.codecache"):
        cache.CacheBase.get_system()
        cache.torch_key()


def main(listener: socket.socket, parent: int, file: str) -> None:
    spec = importlib.util.spec_from_file_location("rank_main", file)
    assert spec is not None
    assert spec.loader is not None
    rank_main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rank_main)
    rank_main.die_with_parent(parent)
    os.environ.update(dict.fromkeys(THREADS, "1"))
    here, is_first, before = os.getpid(), True, dict(os.environ)
    # Servers that have ended are nobody's.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        client, _ = listener.accept()
        message, (requests, *outputs, ended), _, _ = socket.recv_fds(client, 1 << 20, 4)
        env, folder, preload = json.loads(message)
        # What is imported may print.
        for place, output in enumerate(outputs, 1):
            os.dup2(output, place)
        # If an import is broken, each rank reports it.
        for each in ("torch.distributed.tensor.parallel", "fusedtp", *preload.split()) if is_first else ():
            with contextlib.suppress(Exception):
                importlib.import_module(each)
        if is_first:
            do_once()
            # As in a server that imports by itself: TRITON_INTERPRET, for one.
            by_imports = {name: value for name, value in os.environ.items() if name not in before}
        is_first = False
        pid = os.fork()
        if pid == 0:
            listener.close()
            client.close()
            rank_main.die_with_parent(here)
            os.setsid()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update({**by_imports, **env})
            sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
            for output in outputs:
                os.close(output)
            rank_main.serve(socket.socket(fileno=requests))
            os._exit(0)
        for each in (requests, *outputs, ended):
            os.close(each)
        client.send(str(pid).encode())
        client.close()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), *sys.argv[3:])
