"""Loaded by every Python process in build.py's environment. Once torch is imported, Triton's kernels and torch's own
run on the host.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that finds torch as usual, and calls `_begin` once torch is imported."""

    looking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_go_on(module: ModuleType) -> None:
                load(module)
                _begin()

            spec.loader.exec_module = load_and_go_on  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    sys.path.append(str(Path(__file__).parents[2]))
    from virtual_gpu import cuda, torch_kernels

    torch_kernels.install()
    # Keep the stub as long as the process lives.
    sys.modules[__name__].stub = cuda.listen()  # type: ignore[attr-defined]
    sys.path.pop()


sys.meta_path.insert(0, _Finder())
