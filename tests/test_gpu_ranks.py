"""What ranks check on a GPU (`fusedtp.bench.gpu_ranks`, tests/test_gpu.py), as far as ranks on a CPU can tell: fresh
memory is poisoned, the library multiplies as the bound assumes, what is wrong is found, and every wait is bounded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fusedtp.bench import gpu, gpu_checks, gpu_ranks
from fusedtp.bench.ranks import RankError, RankPool
from torch.distributed import ProcessGroup

from .planted import wrong

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def two() -> Any:
    with RankPool(2, env={"TRITON_INTERPRET": "1", "FUSEDTP_TUNING": "off"}, timeout=120) as pool:
        yield pool


def test_fresh_memory_is_poisoned_on_ranks(two: RankPool) -> None:
    assert two.run(gpu_ranks.poisoned) == [True, True]


def flags(group: ProcessGroup) -> tuple[bool, ...]:
    matmuls = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = tuple(getattr(matmuls, name) for name in names)
    gpu_ranks.prepare()
    return (*before, *(getattr(matmuls, name) for name in names))


def test_the_librarys_reductions_are_in_full_precision_where_a_bound_is_derived() -> None:
    with RankPool(1, timeout=60) as fresh:
        (found,) = fresh.run(flags)
    assert found[:2] == (True, True), "what torch does by itself"
    assert found[3:] == (False, False, False)


def planted(group: ProcessGroup, check: str, arguments: tuple[object, ...]) -> None:
    """A check whose fused sums, or whose gathers, are off by one part in a hundred on rank 1."""
    with wrong("fused", lambda out: out * 1.01 if group.rank() == 1 else out):
        getattr(gpu_ranks, check)(group, *arguments)


@pytest.mark.parametrize(
    "name", [name for name in gpu_checks.checks(2, tiny=True) if name.startswith(("layers fused", "collec", "switch"))]
)
def test_a_check_of_ranks_finds_what_is_wrong(two: RankPool, name: str) -> None:
    function, arguments = gpu_checks.checks(2, tiny=True)[name]
    # Ranks that fail alone leave the others waiting: they are shown, and the next call has new ones.
    with pytest.raises(RankError, match=r"elements are wrong|all_gather|other sums"):
        two.run(planted, function, arguments)


def test_every_wait_is_bounded() -> None:
    text = (ROOT / "tests" / "test_gpu.py").read_text()
    (limit,) = re.findall(r"^LIMIT = ([\d.]+)$", text, re.MULTILINE)
    assert float(limit) < 400
    assert "timeout=" not in text.replace("timeout=LIMIT", ""), "another bound than LIMIT"
    assert gpu_ranks.WAIT_SECONDS < gpu_checks.CHECK_SECONDS < 400
    assert gpu.STAGE_SECONDS + gpu.END_SECONDS < 480
