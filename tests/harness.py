"""The harness: spreads of combinations, messages of disagreeing ranks, wrong schedules, a faster compiler."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import fusedtp
from fusedtp.bench.ranks import RankPool

# `nox -s soak` takes all combinations.
LARGE = os.environ.get("FUSEDTP_SOAK") == "large"


def spread(*values: Sequence[Any], large: bool = LARGE) -> list[tuple[Any, ...]]:
    """Return combinations that use every value of each list at least once; all combinations if `large`.

    A value may stand in a list several times, so that it meets more of the others; `large` takes it once.
    """
    if large:
        return list(product(*map(dict.fromkeys, values)))
    return [tuple(each[i % len(each)] for each in values) for i in range(max(map(len, values)))]


def mesh_of(group: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def told(group: ProcessGroup, call: Callable[[], object]) -> str:
    """Return the message of RanksDisagree, which the call must raise on every rank. Destroy only this group: other
    groups have ranks that are not here.
    """
    try:
        call()
    except fusedtp.RanksDisagree as error:
        return str(error)
    finally:
        fusedtp.destroy(group)
    return "nothing was said"


@contextlib.contextmanager
def wrong(schedule: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change every result of a schedule's tasks, to test that a check finds the change."""
    from fusedtp.schedules.forms import Prepared

    run = Prepared.go

    def go(self: Prepared, operands: Any) -> list[Tensor]:
        outs = run(self, operands)
        return [change(out) for out in outs] if self.schedule == schedule else outs

    with mock.patch.object(Prepared, "go", go):
        yield


def few_kernels() -> AbstractContextManager[Any]:
    """Make torch's compiler start fast: no pool of processes, precompiled headers, no test of vector instructions."""
    from torch._inductor import config

    return config.patch(  # type: ignore[no-any-return]
        {"compile_threads": 1, "cpp_cache_precompile_headers": True, "cpp.vec_isa_ok": True}
    )


def last_path() -> fusedtp.Path:
    """Return how the last call ran."""
    path = fusedtp.last_path()
    assert path is not None
    return path


@contextlib.contextmanager
def on_gfx942(here: bool = True) -> Iterator[None]:
    """Pretend that this rank's device is AMD's, with its own float8 format. Prepared calls are dropped."""
    from fusedtp import float8
    from fusedtp.workspaces import generation

    generation.changed()
    with mock.patch.object(float8, "native", return_value=float8.FNUZ if here else float8.OCP):
        yield
    generation.changed()


def by_torchao(model: nn.Module, recipe: Any, under: str = "") -> nn.Module:
    """Put torchao's Float8Linear in place of the linears whose names begin with `under`."""
    with warnings.catch_warnings():
        # torchao's sources trigger warnings of newer Pythons and torch.
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # A CPU has no matrix unit for float8: operands are cast to float8, then multiplied in a wider dtype.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    made: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name.startswith(under)
    )
    return made


def on_ranks(world_size: int | None = None, timeout: float | None = None) -> Callable[[Callable[..., None]], Any]:
    """Make a test that runs `body` on every rank; the first argument is the rank's group, the others are the test's
    own.

    `world_size`: number of ranks, unless the test has an argument of that name; None for all.
    """

    def made(body: Callable[..., None]) -> Any:
        own = list(inspect.signature(body).parameters.values())[1:]

        def test(pool: RankPool, **given: Any) -> None:
            pool.run(body, *given.values(), world_size=given.get("world_size", world_size), timeout=timeout)

        pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(body, name))
        test.__signature__ = inspect.Signature([pool, *own])  # type: ignore[attr-defined]
        # Ranks find the body by its qualified name.
        test.body, body.__qualname__ = body, f"{body.__qualname__}.body"  # type: ignore[attr-defined]
        return test

    return made
