"""One pool of rank processes for the whole run, with uninitialised memory that no test can mistake for a result."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.rank_main import load_module
from fusedtp.bench.ranks import PRELOAD, RankError, RankPool, StartedCall, kept
from fusedtp.bench.store import Measurement
from fusedtp.workspaces import clock


def poison(group: ProcessGroup | None = None, package: str = fusedtp.__file__) -> None:
    """Fill the memory that `empty` returns with NaN from now on: an element that nothing wrote fails every comparison.

    Deterministic mode makes the allocator fill memory; its own errors become warnings.
    (torch.use_deterministic_algorithms loads the compiler, which takes a rank longer than importing torch.)

    `package`: the file of the package that the parent tests.
    """
    # `python -m pytest` in a checkout imports that, and ranks the installed package: `pytest` imports one for all.
    assert fusedtp.__file__ == package, f"ranks would test {fusedtp.__file__}, and their parent {package}"
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    # What is imported by now stays: the garbage collector need not visit it again and again. It takes a twentieth of
    # the tests' time at Python's own threshold.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    if group is not None:
        # Four ranks interpret kernels on two cores: on a busy machine a peer may be late without a fault.
        fusedtp.set_timeout(110)
        # The clock of a rank with a workspace ticks also while it is idle: every 10 ms, twelve take a tenth of a core.
        clock.TICK_SECONDS = 0.05


class PoisonedPool(RankPool):
    """A pool that poisons its ranks before their first call, also after a restart."""

    shared: PoisonedPool | None = None
    is_used = False
    _poisoned: list[int] | None = None

    def start(self, fn: Callable[..., Any], *args: Any, world_size: int | None = None) -> StartedCall:
        self.is_used = True
        if self._poisoned != self.pids:
            self._poisoned = self.pids
            for reply in super().start(poison, fusedtp.__file__).wait():
                if isinstance(reply, BaseException):
                    raise reply
        return super().start(fn, *args, world_size=world_size)


# What tests import in every rank is imported once, by the process that forks the ranks.
IN_RANKS = (
    "pytest", "hypothesis", "torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx",
    "triton.experimental.gluon.nvidia.hopper", "transformers.models.llama.modeling_llama",
    "fusedtp.workspaces.registry", "fusedtp.schedules.fused", "fusedtp.bench.cli", "fusedtp.bench.train",
    "fusedtp.bench.overhead", "fusedtp.bench.timeline", "pandas",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _poisoned_parent() -> None:
    torch.set_num_threads(1)
    poison()


def preloaded() -> str:
    # Some of them initialise CUDA, which no forked process can do again.
    return os.environ.get(PRELOAD, "" if torch.cuda.is_available() else " ".join(IN_RANKS))


@pytest.fixture(scope="session", autouse=True)
def _fork_servers() -> Iterator[None]:
    """Keep fork servers that have imported torch; each environment has one server for all pools."""
    from .fork_servers import forked

    with forked(preloaded()), kept(preloaded()):
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Start four ranks for the first test that asks; `world_size=` of a call takes the first few ranks."""
    # DTensor makes thousands of all-gathers before the last test; two workers would not always survive them.
    with PoisonedPool(4, timeout=300, gloo_workers=1) as ranks:
        PoisonedPool.shared = ranks
        yield ranks
        PoisonedPool.shared = None


@pytest.fixture(scope="module", autouse=True)
def _timeouts_end_with_a_file() -> Iterator[None]:
    """Reset the ranks' timeout to that of `poison` after each test file, and collect what the file leaves."""
    yield
    if (shared := PoisonedPool.shared) is not None and shared.is_used:
        with contextlib.suppress(RankError):
            shared.run(patient)
        shared.is_used = False


def patient(group: ProcessGroup) -> None:
    fusedtp.set_timeout(110)
    # What a file leaves, such as compiled graphs, need not be visited again and again.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def within_bounds(pool: RankPool) -> Iterator[None]:
    """Check every address that a kernel touches on the pool's ranks; see `bounds`."""
    from .bounds import unwatch, watch

    pool.run(watch)
    yield
    pool.run(unwatch)


def destroy_all(group: ProcessGroup) -> None:
    fusedtp.destroy()


@pytest.fixture
def destroyed_on_all_ranks(pool: RankPool) -> Iterator[None]:
    """Call `destroy` on all ranks after a test that destroys every group on some ranks only."""
    yield
    pool.run(destroy_all)


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Measurement]:
    """Return a function that makes a row of a measured case; columns not given are empty, and `gate` is passed."""

    def make(**values: Any) -> Measurement:
        given = {"op": "all_gather_matmul", "variant": "unfused", "M": 1024, "N": 1024, "K": 1024, "dtype": "float32"}
        given |= {"world_size": 2, "direction": "forward", "gate": "passed", "machine": "cpu-some-2c"} | values
        if (median := given.get("median_ms")) is not None:
            given = {"p20_ms": 0.98 * median, "p80_ms": 1.02 * median, "rounds": 20} | given
        return Measurement(**given)

    return make


def started(group: ProcessGroup) -> tuple[int, dict[Any, int]]:
    """Return the counters that every collective of `group` and every op over shared memory increment."""
    from fusedtp.workspaces import registry

    # A group of a registered backend has no sequence number of its own.
    backend = group._get_backend(torch.device("cpu"))
    return backend._get_sequence_number_for_group(), {key: ws.epoch for key, ws in registry._workspaces.items()}


def good(group: ProcessGroup) -> None:
    """Make one call over shared memory and one over the backend."""
    for schedule in ("decomposed", "unfused"):
        out = fusedtp.all_gather(torch.full((1, 1), float(group.rank())), group=group, schedule=schedule)
        assert out.flatten().tolist() == [float(rank) for rank in range(group.size())]


def refuse(group: ProcessGroup, name: str, file: str) -> list[tuple[str, str]]:
    """Return the kind and text of the error of every call in a test file's table BAD; make good calls after each."""
    # torch warns that some kinds of tensors are prototypes, and that some are deprecated.
    warnings.simplefilter("ignore")
    module = load_module(name, file)
    here, errors = module.Here(group), []
    good(group)
    for what, call, _, _ in module.BAD:
        before = started(group)
        try:
            call(here)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
        else:
            errors.append(("", "nothing was raised"))
        assert started(group) == before, f"{what}: something was started before it was refused"
        good(group)
    here.close()
    return errors


@pytest.fixture(scope="module")
def refusals(pool: RankPool, request: pytest.FixtureRequest) -> dict[str, list[tuple[str, str]]]:
    """Return, for each row's name in this test file's table, the error's kind and text on each rank."""
    module = request.module
    names = [row[0] for row in module.BAD]
    assert len(set(names)) == len(names)
    by_rank = pool.run(refuse, module.__name__, module.__file__)
    return dict(zip(names, zip(*by_rank, strict=True), strict=True))
