"""Errors for ranks that cannot map each other's memory: the cause and the remedy, the same on every rank."""

from __future__ import annotations

import errno
import os
import resource
import sys

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import PRELOAD, RankPool
from fusedtp.memory import Unreachable, posix

pytestmark = pytest.mark.usefixtures("destroyed_on_all_ranks")

HERE = posix.Endpoint(10, 3, 77, 1, 2, 1000, 1000, 0, 4096, 0)
# (difference on rank 1, the error code on rank 0, the message)
TOLD = [
    ({"boot": 9}, posix.OTHER_MACHINE, "on different machines: use schedule 'unfused'"),
    ({"namespace": 9}, posix.OTHER_NAMESPACE, "in different pid namespaces"),
    ({}, posix.OTHER_FILE, "not the file that was announced"),
    ({"user": 0}, errno.EACCES, "Permission denied: they run as users 1000 and 0: start all ranks as one user"),
    ({"owner": 0}, errno.EACCES, "rank 1 has changed its user since it started"),
    ({}, errno.EPERM, "kernel.yama.ptrace_scope"),
    ({}, errno.ENOENT, "it has ended, or /proc is mounted with hidepid"),
    ({}, errno.EMFILE, "ulimit -n"),
    ({}, errno.ENOMEM, "ulimit -v"),
    ({"code": errno.EFBIG}, errno.EFBIG, "rank 1 cannot make an arena of 4096 bytes: File too large: "),
    ({}, errno.EIO, "rank 0 cannot map the memory of rank 1: Input/output error"),
]


@pytest.mark.parametrize(("differs", "code", "told"), TOLD)
def test_a_cause_is_told(differs: dict[str, int], code: int, told: str) -> None:
    assert told in posix.cause(0, 1, code, [HERE, HERE._replace(**differs)])


def limited(group: ProcessGroup, limit: str, growing: bool) -> str:
    """Use up a limit on rank 1, in its first op or when its workspace must grow."""
    fusedtp.destroy(group)
    kind, small, large = getattr(resource, limit), torch.ones(2, 2), torch.ones(600, 1000)
    if growing:
        fusedtp.all_gather(small, group=group, schedule="decomposed")
    before = resource.getrlimit(kind)
    if group.rank() == 1:
        # RLIMIT_NOFILE bounds descriptor numbers, and the next descriptor gets the lowest free number.
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(kind, ({"RLIMIT_NOFILE": free, "RLIMIT_FSIZE": 4096}[limit], before[1]))
    try:
        fusedtp.all_gather(large, group=group, schedule="decomposed")
        said = ""
    except Unreachable as error:
        said = str(error)
    resource.setrlimit(kind, before)
    if growing:
        # The group goes on with its old memory, and grows once it can.
        assert fusedtp.all_gather(small, group=group, schedule="decomposed").shape == (2 * group.size(), 2)
    else:
        fusedtp.destroy(group)
    assert fusedtp.all_gather(large, group=group, schedule="decomposed").shape == (600 * group.size(), 1000)
    return said


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("RLIMIT_NOFILE", "Too many open files: its process has no file descriptor left: raise the limit, ulimit -n"),
        ("RLIMIT_FSIZE", "File too large: its files may not be that large: raise the limit, ulimit -f"),
    ],
)
def test_a_limit_is_told_on_every_rank(pool: RankPool, limit: str, told: str, growing: bool) -> None:
    first, *others = pool.run(limited, limit, growing, world_size=3)
    assert others == [first] * 2
    assert first.startswith("the workspace cannot grow: rank " if growing else "rank ")
    assert told in first


def another_user(group: ProcessGroup) -> str:
    """Pretend that rank 1 runs as another user."""
    fusedtp.destroy(group)
    effective, opened = os.geteuid, posix._map_of

    def denied(*_: object) -> torch.Tensor:
        raise PermissionError(errno.EACCES, "")

    if group.rank() == 1:
        os.geteuid = lambda: 4242
        posix._map_of = denied
    try:
        fusedtp.all_reduce(torch.ones(2, 2), group=group, schedule="decomposed")
        said = ""
    except Unreachable as error:
        said = str(error)
    os.geteuid, posix._map_of = effective, opened
    fusedtp.destroy(group)
    return said


def test_another_user_is_told_on_every_rank(pool: RankPool) -> None:
    first, second = pool.run(another_user, world_size=2)
    assert first == second
    assert first.startswith("rank 1 cannot map the memory of rank 0: Permission denied: they run as users 4242 and ")


def without_interpreter(group: ProcessGroup, off: tuple[int, ...]) -> list[str]:
    """Return the errors of two calls by kernels, with a right one in between. TRITON_INTERPRET is 0 on ranks `off`."""
    assert "fusedtp.kernels" not in sys.modules
    os.environ["TRITON_INTERPRET"] = str(int(group.rank() not in off))
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            fusedtp.all_gather_linear(torch.ones(2, 2), torch.ones(2, 2), schedule="fused", group=group)
        said.append(str(caught.value))
        whole = fusedtp.all_reduce(torch.ones(2, 2), schedule="decomposed", group=group)
        assert torch.equal(whole, torch.full((2, 2), float(group.size())))
    return said


@pytest.mark.parametrize(("world_size", "off", "told"), [(1, (0,), "0"), (2, (0, 1), "0, 1"), (2, (1,), "1")])
def test_fused_without_the_interpreter_says_so_on_every_rank(
    world_size: int, off: tuple[int, ...], told: str
) -> None:  # fmt: skip
    # In a server of its own, as the others have imported kernels.
    env = {PRELOAD: "zipapp"} | ({"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {})
    with RankPool(world_size, env=env, timeout=60) as ranks:
        for said in ranks.run(without_interpreter, off):
            for each in said:
                assert each.startswith(
                    "all_gather_matmul: on a CPU schedule 'fused' needs Triton's interpreter, which is off on rank "
                    f"{told}: on every rank set TRITON_INTERPRET to 1 before"
                )
