"""Loaded by every Python process under build.py's environment: Triton's kernels and torch's own run on the host."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = str(Path(__file__).parents[2])


def _after(name: str) -> None:
    sys.path.append(TESTS)
    if name == "torch":
        from virtual_gpu import torch_kernels

        torch_kernels.install()
    else:
        from virtual_gpu import cuda

        # For as long as the process lives.
        sys.modules[__name__].stub = cuda.listen()  # type: ignore[attr-defined]
    sys.path.remove(TESTS)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch and Triton as the others do, and has more done once they are imported."""

    looking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in ("torch", "triton") or self.looking:
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
                _after(name)

            spec.loader.exec_module = load_and_go_on  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
