"""A process or a test run ends, in any order, or is killed: no output, no process and no file is left.

Under `python -W error`: any output of a destructor or a thread on stderr at the end fails the test.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import LARGE

ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FUSEDTP_TUNING": "off"}

# Runs once; every process of every scenario is forked from it before there is any group.
SCENARIOS = """
import atexit, gc, json, os, sys
import torch, torch.distributed as dist
import fusedtp
from fusedtp.schedules import decomposed, fused, unfused
from fusedtp.workspaces import registry

folder, CPU = sys.argv[1], torch.device("cpu")
x = torch.ones(3, 3, requires_grad=True)

def init(name, rank):
    store = dist.FileStore(f"{folder}/{name}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

def use(schedules=("decomposed", "unfused")):
    for schedule in schedules:
        out = fusedtp.linear_all_reduce(x, torch.eye(3), schedule=schedule)
        assert (out == 2).all()
    return out

def ours_first(rank):
    use()
    fusedtp.destroy()
    dist.destroy_process_group()

def theirs_first(rank):
    use()
    dist.destroy_process_group()
    fusedtp.destroy()

def theirs_alone(rank):
    use()
    dist.destroy_process_group()

def at_exit(rank):
    atexit.register(dist.destroy_process_group)
    atexit.register(fusedtp.destroy)
    use()

def graph_alive(rank):
    global y
    weight = torch.ones(2, 3, requires_grad=True)
    y = fusedtp.all_gather_linear(x, weight, schedule="decomposed")
    fusedtp.destroy()

class Last:
    def __del__(self, op=fusedtp.all_reduce, ones=torch.ones(2, 2), write=os.write):
        try:
            op(ones)
        except (RuntimeError, AttributeError) as error:
            # The names of modules may be gone already.
            if "the interpreter is ending" not in str(error) and "'NoneType' object" not in str(error):
                write(2, str(error).encode())

def in_del(rank):
    global last
    use()
    last = Last()

def raised(rank):
    use()
    raise ValueError("planted")

def again(rank):
    use()
    first = registry.get(dist.group.WORLD, CPU)
    names = [dist.group.WORLD.group_name]
    dist.destroy_process_group()
    # Ranks have changed places; the name of the group has not.
    init("again, the second time", 1 - rank)
    names.append(dist.group.WORLD.group_name)
    assert names[0] == names[1]
    here = torch.full((1, 1), float(dist.get_rank()))
    out = fusedtp.all_gather_linear(here, torch.ones(1, 1), schedule="decomposed")
    assert out.flatten().tolist() == [0, 1]
    assert registry.get(dist.group.WORLD, CPU) is not first
    assert registry.get(dist.group.WORLD, CPU).rank == 1 - rank

def live(rank):
    use(("fused", "decomposed"))
    if os.fork() == 0:
        # As a child of multiprocessing ends, and what atexit has registered besides. (To go on to the interpreter's own
        # end hangs in gloo, which waits for threads that a child does not have.)
        atexit._run_exitfuncs()
        os._exit(0)
    pid, status = os.wait()
    assert status == 0, status
    use()

def gather(value):
    import fusedtp.fsdp
    own = torch.full((4,), value)
    out = torch.empty(8)
    return out, fusedtp.fsdp._AllGather("auto")(out, own, dist.group.WORLD, async_op=True)

def nobody_waits(rank):
    # Both ranks make the op, and it ends while the processes do.
    out, work = gather(1.0)

def in_flight(rank):
    out, work = gather(1.0)
    work.wait()
    assert (out == 1).all()
    if rank == 0:
        gather(2.0)

def failed(rank):
    gather(1.0)[1].wait()
    fusedtp.set_timeout(0.2)
    if rank == 0:
        out, work = gather(2.0)
        while not work.is_completed():
            pass

# What is imported stays, and need not be visited when each process ends.
gc.freeze()
started = {}
for scenario in map(globals().__getitem__, sys.argv[2:]):
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            fd = os.open(f"{folder}/{scenario.__name__}.{rank}.stderr", os.O_CREAT | os.O_WRONLY)
            os.dup2(fd, 2)
            os.close(fd)
            started = None
            break
        started[pid] = (scenario.__name__, rank)
    if started is None:
        break
    # One after another: there are more scenarios than cores.
    for _ in range(2):
        pid, status = os.wait()
        name, rank = started.pop(pid)
        with open(f"{folder}/{name}.{rank}.stderr") as said:
            print(json.dumps([name, rank, os.waitstatus_to_exitcode(status), said.read()]), flush=True)
if started is None:
    init(scenario.__name__, rank)
    scenario(rank)
"""
ENDS = [
    "live", "theirs_first", "at_exit", "graph_alive", "in_del", "raised", "again", "in_flight", "failed",
    *(["ours_first", "theirs_alone", "nobody_waits"] if LARGE else []),
]  # fmt: skip
# What rank 0 says of an op that is lost.
LOST = {
    "in_flight": "fusedtp: all_gather in lane 1, FSDP2's gathers: the process ends while the op is in flight",
    "failed": "fusedtp: all_gather: rank 0 waited 0.2",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[int, str]]:
    folder = tmp_path_factory.mktemp("ends")
    script = folder / "scenarios.py"
    script.write_text(SCENARIOS)
    command = [sys.executable, "-W", "error", "-P", str(script), str(folder), *ENDS]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((name, rank) for name, rank, *_ in rows) == sorted(itertools.product(ENDS, range(2)))
    return {(name, rank): (status, said) for name, rank, status, said in rows}


@pytest.mark.parametrize("name", ENDS)
def test_a_process_ends_without_a_word(ends: dict[tuple[str, int], tuple[int, str]], name: str) -> None:
    for rank in range(2):
        status, said = ends[name, rank]
        if name == "raised":
            assert status == 1, said
            # torch prefixes every line with the rank.
            lines = said.replace(f"[rank{rank}]: ", "").splitlines()
            assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: planted"), said
            assert said.count("Traceback") == 1, said
        elif name in LOST and rank == 0:
            assert status == 1, said
            assert said.startswith(LOST[name])
            assert "wait()" in said
            assert said.count("\n") == 1
        else:
            assert (status, said) == (0, "")


# Adopts orphans (PR_SET_CHILD_SUBREAPER), so it sees every process that outlives the run.
SUPERVISOR = """
import ctypes, json, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
log, *command = sys.argv[1:]
with open(log, "w") as out:
    run = subprocess.Popen(command, stdout=out, stderr=out)
def running():
    # The ranks that are in the middle of a call say so.
    with open(log) as text:
        return text.read().count("in the middle")
deadline = time.monotonic() + 120
while running() < 2 and run.poll() is None and time.monotonic() < deadline:
    time.sleep(0.02)
run.send_signal(signal.SIGKILL)
status, orphans = run.wait(timeout=120), {}
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    try:
        pid, ended = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        break
    if pid:
        orphans[pid] = os.waitstatus_to_exitcode(ended)
    else:
        time.sleep(0.02)
left = []
for folder in os.listdir("/proc"):
    if folder.isdigit():
        try:
            with open(f"/proc/{folder}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            left.append([int(folder), fields[0]])
print(json.dumps({"status": status, "orphans": list(orphans.values()), "left": left}))
"""

SMALL_RUN = """
import os, sys, time
import pytest, torch
import fusedtp
from fusedtp.bench.ranks import RankPool

@pytest.fixture(scope="module")
def two():
    with RankPool(2, timeout=60) as ranks:
        yield ranks

def use(group, schedule):
    # No operator of the dispatcher, with whose first call torch imports its compiler.
    fusedtp.linear_all_reduce(torch.ones(3, 3), torch.eye(3), group=group, schedule=schedule)

def never_ends(group):
    for schedule in ("decomposed", "fused", "unfused"):
        use(group, schedule)
    os.write(2, b"in the middle\\n")
    while True:
        time.sleep(0.1)

def test_that_is_killed(two):
    two.run(never_ends)
"""


def test_a_test_run_leaves_nothing(tmp_path: Path) -> None:
    """The run is killed while its ranks are in a call. A run that ends closes its pools (`test_ranks`)."""
    test, temporary, log = tmp_path / "test_small.py", tmp_path / "tmp", tmp_path / "log"
    test.write_text(SMALL_RUN)
    temporary.mkdir()
    shared = sorted(os.listdir("/dev/shm"))
    command = [sys.executable, "-W", "error", "-P", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(test)]
    env = {**os.environ, **ENV, "TMPDIR": str(temporary)}
    supervisor = [sys.executable, "-c", SUPERVISOR, str(log), *command]
    done = subprocess.run(supervisor, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report, said = json.loads(done.stdout), log.read_text()
    assert report["status"] == -9, said
    # Both ranks and their fork server were orphaned, and were killed with their parent.
    assert report["orphans"] == [-9, -9, -9], said
    assert report["left"] == []
    assert list(temporary.rglob("*")) == []
    assert sorted(os.listdir("/dev/shm")) == shared
