"""docs/security.md: a test of each promise."""

from __future__ import annotations

import ast
import csv
import fcntl
import gc
import os
import re
import stat
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench import store
from fusedtp.bench.ranks import RankPool
from fusedtp.memory.posix import PosixMemory
from fusedtp.workspaces.rendezvous import StoreExchange

from .beside import arenas

ROOT = Path(__file__).parent.parent
NOBODY = 65534
GET_SEALS, SEALED = 1034, 0x1 | 0x2 | 0x4  # linux/fcntl.h: no more seals, no shrinking, no growing


class TrackedModule(StoreExchange):
    """An exchange that checks the arenas' files while their descriptors are open, until all ranks have mapped them."""

    num_seen = 0

    def rows(self, mine: list[int]) -> list[list[int]]:
        for fd in arenas():
            look(fd)
            self.num_seen += 1
        return super().rows(mine)


def look(fd: int) -> None:
    about, path = os.fstat(fd), f"/proc/{os.getpid()}/fd/{fd}"
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert about.st_nlink == 0
    assert fcntl.fcntl(fd, GET_SEALS) == SEALED
    assert not os.get_inheritable(fd)
    if os.getuid() == 0:
        other: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        read = subprocess.run(["head", "-c", "1", path], capture_output=True, text=True, check=False, **other)
        assert read.returncode != 0
        assert "Permission denied" in read.stderr


def made(group: ProcessGroup) -> int:
    # All groups, so on all ranks of the pool: a rank that keeps its end would wait for the others' later.
    fusedtp.destroy()
    # Exceptions of other tests keep memory mapped in reference cycles until a collection.
    gc.collect()
    exchange = TrackedModule(group)
    memory = PosixMemory(group.rank(), group.size())
    arena = memory.allocate(1 << 16, torch.zeros(64, dtype=torch.int32), exchange)
    exchange.ended()
    assert not any(os.get_inheritable(fd) for fd in arenas())
    arena.release()
    assert arenas() == []
    return exchange.num_seen


# It destroys every group on all ranks of the pool.
@pytest.mark.usefixtures("destroyed_on_all_ranks")
def test_arenas_have_no_name_and_one_user(pool: RankPool) -> None:
    before = sorted(os.listdir("/dev/shm"))
    assert all(pool.run(made))
    assert sorted(os.listdir("/dev/shm")) == before


def sockets() -> list[str]:
    """Return the inodes of this process's sockets."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.islink(link)]
    return [target.removeprefix("socket:[").removesuffix("]") for target in targets if target.startswith("socket:[")]


def listening() -> list[str]:
    """Return the addresses, in the kernel's hexadecimal, that this process listens on over TCP."""
    own, found = set(sockets()), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in own:
                found.append(local.partition(":")[0])
    return found


def listens(group: ProcessGroup) -> list[str]:
    fusedtp.all_reduce(torch.ones(2), group=group, schedule="unfused")
    return listening()


def is_loopback(address: str) -> bool:
    # 127.x.x.x, ::1, and ::ffff:127.x.x.x, in the byte order of the machine
    return address.endswith("7F") or address in ("0" * 24 + "01000000", "0" * 31 + "1")


def test_ranks_and_their_store_listen_on_loopback_alone() -> None:
    with RankPool(2, timeout=60) as ranks:
        addresses = [address for each in ranks.run(listens) for address in each]
        own = listening()
    assert own, "the store listens in this process"
    for address in [*own, *addresses]:
        assert is_loopback(address), address


def modules() -> list[Path]:
    return [path for folder in ("fusedtp", "kernels", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]


UNPICKLING = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
# Their pipe has no name, and connects processes of one parent.
PRIVATE_PIPE = {"bench/ranks.py", "bench/rank_main.py"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_unpickled_or_run(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if str(path.relative_to(ROOT)) not in PRIVATE_PIPE:
            assert not UNPICKLING & {name.partition(".")[0] for name in names}, names
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "torch.save", "np.load", "pd.read_pickle"), called
            assert not called.startswith(("os.system", "os.popen")), called
            assert not any(keyword.arg == "shell" for keyword in node.keywords), called


def test_a_private_pipe_is_inherited_by_its_rank_alone() -> None:
    with RankPool(1, timeout=60) as ranks:
        (pid,) = ranks.pids
        assert ranks._ranks is not None
        (process,) = ranks._ranks.processes
        for fd in (process.pipe.fileno(), process.stacks_fd):
            assert not os.get_inheritable(fd)
        assert stat.S_IMODE(os.fstat(process.stacks_fd).st_mode) == 0o600
        assert os.stat(f"/proc/{pid}").st_uid == os.getuid()


DANGEROUS = ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\t=1", "../../etc/passwd", 'a,b"c', "x\r\n=1"]


@pytest.mark.parametrize("text", DANGEROUS)
def test_a_cell_is_no_formula_and_no_second_cell(text: str, tmp_path: Path) -> None:
    values = {
        "int": 1,
        "float | None": None,
        "tuple[float, ...]": (),
        "tuple[int, ...]": (),
        "bool": False,
        "str": text,
    }
    known = {"op": "all_gather_matmul", "direction": "forward", "dtype": "float32"}
    row = store.Measurement(**{field.name: values[str(field.type)] for field in fields(store.Measurement)} | known)
    path = tmp_path / "sweep.csv"
    store.write(path, [row])
    with path.open(newline="") as file:
        (cells,) = csv.DictReader(file)
    assert not cells["gpu"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert None not in cells
    assert store.read(path)[0].gpu == text.replace("\r\n", "\n")


def test_a_machines_name_is_one_folder() -> None:
    from fusedtp.machine import slug

    for name in ("../../etc", "/etc/passwd", "..", "a/b\0c", "C:\\x"):
        assert set(slug(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-"), slug(name)


@pytest.mark.parametrize(("name", "number"), [("security.md", 15), ("processes.md", 13)])
def test_every_promise_has_its_test(name: str, number: int) -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / name).read_text())
    assert len(named) >= number
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for test in named:
        assert f"def {test}(" in tests, test
