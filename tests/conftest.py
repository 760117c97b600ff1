"""Settings of the whole run, read by every process of pytest. The fixtures are in `fixtures`, which imports torch."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

# The package and the tests are compiled to bytecode once, not by every rank and command: images may set the variable.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# This machine's tuning table must not choose the schedules of the tests.
os.environ["FUSEDTP_TUNING"] = "off"
# typer wraps error messages, and paths in them, to the width of the terminal.
os.environ["TERMINAL_WIDTH"] = "1000"
# Exceptions of torch.distributed carry C++ frames. Looking up their lines takes seconds, and there are many.
os.environ["TORCH_DISABLE_ADDR2LINE"] = "1"
# Only processes without Triton's interpreter compile kernels: `nox -s kernels`, `nox -s emulate`, `test_emulated.py`.
compiles = os.environ.get("TRITON_INTERPRET") == "0"
collect_ignore_glob = [] if compiles else ["test_emulated_*.py", "test_kernels_offline.py"]
# Run torch's CUDA code over the stub of a GPU: `nox -s virtual_gpu`.
collect_ignore = [] if "GPU_STUB_DEVICES" in os.environ else ["test_virtual_gpu.py"]

# The files that take longest begin first: a process has a whole file at a time, and none should end long after the
# others. Without Triton's cache, the emulated kernels take minutes.
LONGEST = (
    "test_emulated.py", "test_options.py", "test_trainer.py", "test_decoders.py", "test_drop_in.py",
    "test_float8_layers.py", "test_lora.py", "test_compile.py", "test_tree_order.py", "test_guide.py",
    "test_use_in_transformers.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that fork servers are forked from, once for all processes of the run."""
    from .fork_servers import listening

    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        there = contextlib.ExitStack()
        there.enter_context(listening())
        config.add_cleanup(there.close)
    # The process that only hands out tests need not import torch.
    if is_worker or not config.getoption("numprocesses", None):
        from . import fixtures

        config.pluginmanager.register(fixtures)
