"""Two nodes, made of network and pid namespaces: what runs between them has times, the rest a reason."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedtp.bench import store
from fusedtp.bench.ranks import RankPool

from .command import as_python

NAMES = ("fusedtp-node-0", "fusedtp-node-1")
HOST = "10.213.7.1"
# linux/sched.h; linux/mount.h: MS_REC | MS_PRIVATE
CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x20000000, 0x40000000
MS_PRIVATE = 0x4000 | 0x40000


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, ...]]:
    """Return two network namespaces with a link between them."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "fusedtp0", "netns", NAMES[0], "type", "veth", "peer", "name", "fusedtp1", "netns", NAMES[1])
        for i, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", f"fusedtp{i}")
            for device in ("lo", f"fusedtp{i}"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in NAMES:
            ip("netns", "del", name, check=False) if not isinstance(error, OSError) else None
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield NAMES
    for name in NAMES:
        ip("netns", "del", name)


def sweep_on_its_node(group: ProcessGroup, sweep: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run the sweep in a process of the rank's node, which sees no process of the other: ranks reach each other's
    memory through /proc. Return the exit code and the output.
    """
    rank, libc, said = group.rank(), ctypes.CDLL(None, use_errno=True), folder / f"said.{group.rank()}"
    # What a launcher tells each rank; `test_under_torchrun` tests torchrun itself.
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": HOST, "MASTER_PORT": "29612"}
    env = told | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": f"fusedtp{rank}", "OMP_NUM_THREADS": "1"}
    dist.destroy_process_group()
    said.touch()
    with open(f"/run/netns/{NAMES[rank]}") as net:
        entered = libc.setns(net.fileno(), CLONE_NEWNET), libc.unshare(CLONE_NEWPID | CLONE_NEWNS)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            mounted = libc.mount(None, b"/", None, MS_PRIVATE, None), libc.mount(b"proc", b"/proc", b"proc", 0, None)
            if (*entered, *mounted) == (0, 0, 0, 0):
                os._exit(as_python("fusedtp.bench.cli", [*sweep, "--out", NAMES[rank]], str(folder), env, str(said)))
        os._exit(100)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.read_text()


def test_two_nodes_time_what_reaches_over_them(nodes: tuple[str, ...], tmp_path: Path) -> None:
    sweep = ("sweep", "--op", "all_gather_matmul", "--shape", "24,20,16", "--rounds", "3", "--dtype", "float32",
             "--schedule", "decomposed,auto", "--baseline", "dtensor")  # fmt: skip
    with RankPool(2, timeout=200) as ranks:
        done = ranks.run(sweep_on_its_node, sweep, tmp_path)
    assert [code for code, _ in done] == [0, 0], done
    (path,) = (tmp_path / nodes[0]).glob("*/sweep.csv")
    rows = {(row.variant, row.world_size): row for row in store.read(path)}
    for variant in ("matmul", "comm", "unfused", "auto", "dtensor"):
        assert rows[variant, 2].median_ms, rows[variant, 2]
        assert rows[variant, 2].nodes == 2
    assert rows["auto", 2].path.startswith("unfused: ")
    assert rows["unfused", 1].nodes == 1
    for variant in ("sequential", "decomposed"):
        assert rows[variant, 2].gate.startswith("not run: ranks do not share memory: ")
