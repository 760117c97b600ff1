"""Imports only go down, and loading the package stays light."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fusedtp
from fusedtp.bench.cli import app

from . import generated

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs/architecture.md"
FOLDERS = {"fusedtp": ROOT / "fusedtp", "fusedtp.kernels": ROOT / "kernels", "fusedtp.bench": ROOT / "bench"}

# Lowest first: a module imports from lower floors, or from its own folder. A folder counts as one unit.
FLOORS = (
    ("torch_private",),
    ("errors", "shards", "files", "trace", "groups", "locks", "switch", "machine"),
    ("lanes",),
    ("activations", "norms"),
    ("epilogue",),
    ("op",),
    ("sharding", "reference", "float8"),
    ("scaled",),
    ("cost",),
    ("explain", "kernels", "memory"),
    ("workspaces",),
    ("schedules",),
    ("choose",),
    ("calls",),
    ("functional", "collectives", "fsdp", "doctor"),
    ("drop_in",),
    ("layers",),
    ("styles",),
    ("hf",),
    ("",),  # the package itself
    ("bench",),
    ("__main__",),
)
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}
# Floors of a folder's modules, lowest first: here a module imports only from lower floors, for types too.
INNER_FLOORS = {
    "workspaces": (
        ("agreement", "clock", "decisions", "generation", "streams", "words"),
        ("failures", "timeouts"),
        ("steps",),
        ("rendezvous", "stream_steps"),
        ("workspace",),
        ("registry",),
    ),
    "choose": (("paths", "tuning"), ("dispatch",)),
    # A program does not know how its tasks are run.
    "calls": (
        ("parameters",),
        ("arguments",),
        ("problems",),
        ("program", "bound"),
        ("call", "operators"),
        ("autograd",),
    ),
}
PURE = ("sharding", "cost", "explain")
HEAVY = ("triton", "matplotlib", "pandas", "scipy", "jinja2", "typer", "rich")


def modules() -> dict[str, Path]:
    """Return every module of the package by its installed name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = modules()


def unit(name: str) -> str:
    """Return the unit of FLOORS that a module belongs to."""
    return name.split(".")[1] if "." in name else ""


@functools.cache
def imported(name: str, path: Path, *, for_types: bool = False) -> set[str]:
    """Return the absolute names of all imports that a module runs, down to modules of ours.

    for_types: also those that only a type checker sees.
    """
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    if not for_types:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


def test_imports_go_down() -> None:
    for name in MODULES:
        goes_down(name)


def goes_down(name: str) -> None:
    here = unit(name)
    assert here in FLOOR, f"{name} is on no floor: give it one in this file"
    for other in imported(name, MODULES[name]):
        top = other.partition(".")[0]
        assert top not in ("kernels", "bench", "tests"), f"{name} imports {other} under its folder's name"
        if top != "fusedtp":
            if here in PURE:
                assert top in sys.stdlib_module_names, f"{name} is pure Python and imports {other}"
            if here == "kernels":
                allowed = {"torch", "triton", *sys.stdlib_module_names}
                assert top in allowed, f"{name} is device code and imports {other}"
            continue
        below = unit(other)
        assert below in FLOOR, f"{name} imports {other}, which is on no floor"
        assert below == here or FLOOR[below] < FLOOR[here], f"{name} imports {other}, which is not below it"
        if here == "kernels":
            assert below == "kernels", f"{name} is device code and imports {other}"
        if below == "reference":
            assert here in ("reference", "bench"), f"{name} imports {other}, which is for tests and the benchmark"


@pytest.mark.parametrize("here", INNER_FLOORS)
def test_modules_of_a_folder_know_only_those_below(here: str) -> None:
    folder = f"fusedtp.{here}"
    floor = {f"{folder}.{module}": number for number, modules in enumerate(INNER_FLOORS[here]) for module in modules}
    assert {*floor, folder} == {name for name in MODULES if unit(name) == here}
    for name, number in floor.items():
        for other in imported(name, MODULES[name], for_types=True):
            if other.startswith("fusedtp."):
                is_below = floor[other] < number if other in floor else FLOOR[unit(other)] < FLOOR[here]
                assert is_below, f"{name} imports {other}, which is not below it"


def test_private_torch_is_called_in_one_module() -> None:
    """`kernels.interpreter` patches Triton's interpreter."""
    found = {name: private_names(name) for name in MODULES if unit(name) not in ("bench", "torch_private")}
    assert {name: names for name, names in found.items() if names} == {}


def private_names(name: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(MODULES[name].read_text())))
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    used |= {f"{node.module}.{each.name}" for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names}
    # Both are public, but only the private module has their types.
    used -= {"torch._C._distributed_c10d.PrefixStore", "torch._C._distributed_c10d.Store"}
    private = r"(torch|dist|forward_ad)(\.\w+)*\._[a-zA-Z]\w*|.*\._(local_tensor|get_backend|device_types)"
    return [each for each in used if re.fullmatch(private, each)]


def test_no_import_cycles() -> None:
    graph = {name: {o for o in imported(name, path) if o in MODULES} - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            # The package's __init__ runs before any import, so that edge cannot be avoided.
            for other in sorted(graph[name] - {"fusedtp"}):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def drawn() -> str:
    """Return the imports between folders and the modules above them as Mermaid, without transitive edges."""
    small = {*FLOORS[0], *FLOORS[1], "op", "reference"}
    edges = {
        (unit(name), unit(other))
        for name, path in MODULES.items()
        for other in imported(name, path)
        if other.partition(".")[0] == "fusedtp" and unit(name) != unit(other)
    }
    edges = {(a, b) for a, b in edges if not {a, b} & small}
    below = {a: {b for each, b in edges if each == a} for a, _ in edges}

    def reached(start: str) -> set[str]:
        return {start}.union(*(reached(b) for b in below.get(start, ())))

    kept = [(a, b) for a, b in edges if not any(b in reached(c) for c in below[a] - {b})]
    folders = {unit(name) for name, path in MODULES.items() if path.name == "__init__.py"} - {""}

    def node(each: str) -> str:
        return f'{each}["{each}/"]' if each in folders else each or "fusedtp"

    lines = [f"    {node(a)} --> {node(b)}" for a, b in sorted(kept, key=lambda edge: (-FLOOR[edge[0]], edge))]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


# The nouns on the path of an op, top down: at most 60.
NOUNS = (
    "ColumnParallelLinear", "RowParallelLinear", "FSDPLinear", "ParallelMLP", "FusedColwiseParallel",
    "FusedRowwiseParallel", "FusedNormParallel", "FusedEmbeddingParallel", "FusedGroup", "Options", "Scaled",
    "Epilogue", "Spec", "Tensor", "Dim", "Partition", "Matmul", "Plan", "Step", "Route", "Call", "Settings", "Program",
    "Named", "MatrixView", "DTensorRecord", "Op", "Task", "Quantized", "Cast", "Formats", "BoundTask", "Path", "Work",
    "Hardware", "Model", "Prepared", "ScheduleImpl", "Gather", "Pending", "Scatter", "Product", "Workspace",
    "HostSteps", "DeviceSteps", "Fingerprint",
    "Stopwatch", "Memory", "Arena", "Exchange", "Layout", "Region", "Channel", "Config", "GatherMatmul",
    "MatmulScatter", "MatmulAllReduce",
)  # fmt: skip


@functools.cache
def classes() -> dict[str, list[tuple[str, str]]]:
    """Return, for each name of a class, the modules that define it, with the first line of its docstring."""
    found: dict[str, list[tuple[str, str]]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                line = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
                found.setdefault(node.name, []).append((module, line))
    return found


def test_a_type_name_is_defined_once() -> None:
    assert {name: modules for name, modules in classes().items() if len(modules) > 1} == {}


def glossary() -> str:
    """Return the table of `NOUNS`: module and first line of the docstring."""
    assert len(NOUNS) <= 60
    rows = [(noun, *classes()[noun][0]) for noun in NOUNS]
    assert all(line for *_, line in rows), rows
    lines = [f"| `{noun}` | `{module.removeprefix('fusedtp.')}` | {line} |" for noun, module, line in rows]
    return "\n".join(["| noun | module | what it is |", "|---|---|---|", *lines])


@pytest.mark.parametrize(("part", "made"), [("imports", drawn), ("glossary", glossary)])
def test_the_picture_of_the_imports_and_the_glossary_are_made_of_the_code(part: str, made: Callable[[], str]) -> None:
    generated.as_written(ARCHITECTURE, part, made(), "FUSEDTP_ARCHITECTURE")


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    # In the checkout's folder, as a user might.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_importing_the_package_and_a_first_call_are_light() -> None:
    """The compiler takes as long to load as the rest of torch, on every rank. Layers load it by making DTensors."""
    code = f"""
import sys, torch, torch.distributed as dist, fusedtp
print([name for name in {HEAVY} if name in sys.modules])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2, 2, requires_grad=True)
fusedtp.all_gather_linear(fusedtp.all_gather(x), torch.ones(2, 2, requires_grad=True)).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    done = run(code, "-P")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "False"]


def test_a_folder_refuses_its_short_name() -> None:
    done = run("import bench")
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert "fusedtp.bench" in done.stderr


def test_the_name_kernels_is_left_to_the_hubs_package(tmp_path: Path) -> None:
    """transformers imports a folder named kernels, but ignores a package without a version."""
    done = run("import kernels; print(hasattr(kernels, '__version__')); import kernels.signal")
    assert (done.stdout, done.stderr.splitlines()[-1]) == (
        "False\n", "ModuleNotFoundError: No module named 'kernels.signal'",
    )  # fmt: skip
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("from .layer import theirs")
    (tmp_path / "kernels/layer.py").write_text("theirs = 1")
    done = run(f"import sys; sys.path.append({str(tmp_path)!r}); import kernels.layer; print(kernels.theirs)")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_checkout_is_imported_as_it_lies() -> None:
    done = run("import fusedtp.kernels, fusedtp.bench; print(fusedtp.kernels.__file__)")
    assert (done.returncode, done.stdout.strip()) == (0, str(ROOT / "fusedtp/kernels/__init__.py")), done.stderr


def test_every_public_name_is_there() -> None:
    for name in fusedtp.__all__:
        assert getattr(fusedtp, name) is not None
    assert sorted(fusedtp.__all__) == fusedtp.__all__
    assert {*fusedtp.__all__, "__version__"} <= set(dir(fusedtp))
    with pytest.raises(AttributeError, match="no attribute 'all_gather_matmul'"):
        _ = fusedtp.all_gather_matmul


def test_the_version_is_that_of_the_package_installed() -> None:
    assert fusedtp.__version__ == version("fusedtp")
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fusedtp {version('fusedtp')}\n")
