"""Digest of the code that runs inside the clock: rows of one digest timed the same code.

The digest covers the modules that a timed call enters after its first calls, and those that hold the clock. A CPU never
times kernels, so its digest leaves them out. A module counts by its syntax tree, without what takes no time: comments,
docstrings, annotations, imports at the top, and messages of errors.

`tests/test_digest.py` watches timed calls, and fails if they enter a module that is not listed here.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
if not (ROOT / "schedules").exists():
    # In a checkout this folder is beside the package, which has a link to it.
    ROOT = ROOT / "fusedtp"

CLOCK = ("bench/timing.py", "bench/operands.py")
CPU = (
    "bench/peers.py", "calls/arguments.py", "calls/autograd.py", "calls/bound.py",
    "calls/call.py", "calls/operators.py", "calls/parameters.py", "calls/program.py", "choose/dispatch.py",
    "choose/paths.py", "collectives.py", "epilogue.py", "float8.py", "functional.py", "groups.py", "locks.py",
    "scaled.py", "schedules/__init__.py", "schedules/decomposed.py", "schedules/forms.py", "schedules/local.py",
    "schedules/transport.py", "schedules/unfused.py", "schedules/verbs.py", "shards.py", "torch_private.py",
    "trace.py",
    "workspaces/clock.py", "workspaces/failures.py", "workspaces/steps.py", "workspaces/words.py",
    "workspaces/workspace.py",
)  # fmt: skip
# Folders stand for all their modules.
GPU = (
    "bench/gpu_kernels.py", "kernels", "schedules/fused.py", "schedules/preset.py", "schedules/producer.py",
    "workspaces/agreement.py",
)  # fmt: skip
# Tables of properties that calls read, and the closure that all variants share.
READ = ("bench/cases.py", "bench/problem.py", "op.py")
# Modules that timed calls of layers enter besides.
LAYERS = {
    "decode": ("bench/layers.py", "norms.py"),
    "mlp": ("bench/layers.py", "activations.py", "layers.py"),
    "grouped": ("bench/layers.py", "styles/grouped.py", "styles/linears.py"),
    "block": ("bench/layers.py", "styles/linears.py"),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), ("bench/layers.py",)),
}

_IGNORED = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx", "msg")


def modules(num_gpus: int, layer: str = "") -> list[str]:
    """Return the timed modules, as paths in the package. layer: one of `LAYERS`."""
    names = [*CLOCK, *CPU, *(GPU if num_gpus else ()), *LAYERS.get(layer, ())]
    found = set[str]()
    for path in (ROOT / name for name in names):
        found |= {str(each.relative_to(ROOT)) for each in (path.rglob("*.py") if path.is_dir() else [path])}
    return sorted(found)


@functools.cache
def digest(num_gpus: int, layer: str = "") -> str:
    """Return the digest of the timed code in this package, 12 hexadecimal digits."""
    return of_sources({name: (ROOT / name).read_text() for name in modules(num_gpus, layer)})


def of_sources(sources: dict[str, str]) -> str:
    """Return the digest of sources by name."""
    trees = ", ".join(f"{name!r}: {_tree(text)}" for name, text in sorted(sources.items()))
    return hashlib.sha256(f"{{{trees}}}".encode()).hexdigest()[:12]


@functools.cache
def _tree(text: str) -> str:
    return repr(_plain(ast.parse(text), top=True))


def _plain(node: Any, top: bool = False) -> Any:
    # Return a syntax tree as lists. ast.dump differs from one version of Python to the next.
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return ["Raise", _plain(node.exc.func)]
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _IGNORED}
    if isinstance(body := fields.get("body"), list):
        fields["body"] = [each for each in body if not _takes_no_time(each, top)]
    return [type(node).__name__, *((name, _plain(value)) for name, value in fields.items() if value not in (None, []))]


def _takes_no_time(statement: ast.stmt, top: bool) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (top and isinstance(statement, (ast.Import, ast.ImportFrom)))
