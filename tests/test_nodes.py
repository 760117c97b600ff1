"""Two nodes, made of network and pid namespaces: what runs between them has times, the rest a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedtp.bench import store

NAMES = ("fusedtp-node-0", "fusedtp-node-1")
HOST = "10.213.7.1"


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


def test_two_nodes_time_what_reaches_over_them(nodes: tuple[str, ...], tmp_path: Path) -> None:
    # What a launcher tells each rank; `test_under_torchrun` tests torchrun itself.
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": HOST, "MASTER_PORT": "29612"}
    sweep = ["-m", "fusedtp.bench.cli", "sweep", "--op", "all_gather_matmul", "--shape", "24,20,16", "--rounds", "3",
             "--dtype", "float32", "--schedule", "decomposed,auto", "--baseline", "dtensor"]  # fmt: skip
    started = []
    for i, name in enumerate(nodes):
        env = {**os.environ, **told, "RANK": str(i), "GLOO_SOCKET_IFNAME": f"fusedtp{i}", "OMP_NUM_THREADS": "1"}
        # A node sees only its own processes: memory is not shared through those of the other.
        inside = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc"]
        command = [*inside, sys.executable, "-P", *sweep, "--out", str(tmp_path / name)]
        started.append(
            subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    said = [process.communicate(timeout=200)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    (path,) = (tmp_path / nodes[0]).glob("*/sweep.csv")
    rows = {(row.variant, row.world_size): row for row in store.read(path)}
    for variant in ("matmul", "comm", "unfused", "auto", "dtensor"):
        assert rows[variant, 2].median_ms, rows[variant, 2]
        assert rows[variant, 2].nodes == 2
    assert rows["auto", 2].path.startswith("unfused: ")
    assert rows["unfused", 1].nodes == 1
    for variant in ("sequential", "decomposed"):
        assert rows[variant, 2].gate.startswith("not run: ranks do not share memory: ")
