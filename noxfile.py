"""The one entry point for every check: `nox -s tests`, `nox -l` for the list. Environments are reused between runs.

Each session installs the package as a user would, with the versions of constraints.txt, so what is tested is what is
installed and not the folders beside this file.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "types"]

FOLDERS = ("fusedtp", "kernels", "bench", "tests", "docs", "noxfile.py")
# Ranks are processes: more threads each would only take the cores from one another.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

# Freed memory stays with its process, as touching new pages takes time, much on some virtual machines.
KEEPING = {**ONE_THREAD, "MALLOC_MMAP_THRESHOLD_": str(2**28), "MALLOC_TRIM_THRESHOLD_": str(2**28)}

# Three processes, each with its own pool of ranks: on two cores one runs while another waits. Files are taken in the
# order of tests/conftest.py, the longest first. Timings are not for such a run.
IN_THREE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
TESTS = (*IN_THREE, "--benchmark-disable", "-m", "not offline")

# What constraints.txt pins, and the oldest and the newest Triton that the tests know.
PINNED = dict(re.findall(r"(?m)^(torch|triton)==(.*)$", Path("constraints.txt").read_text()))
OLDEST, NEWEST = "3.6.0", "3.9.0"
# The oldest transformers that `use_in_transformers` knows.
OLDEST_TRANSFORMERS = "5.23.0"
# CUDA builds of torch, each with its Triton: the oldest that is supported, and a newer one.
CUDA_BUILDS = {"2.11.0": "3.6.0", "2.14.1": "3.8.0"}


def constraints(session: nox.Session, **versions: str) -> str:
    """Write the versions of constraints.txt, but these, and return the file's name; "" is any version."""
    text = Path("constraints.txt").read_text()
    if versions.get("torch", PINNED["torch"]) != PINNED["torch"]:
        # torch 2.11 needs setuptools below 82.
        text = re.sub(r"(?m)^setuptools==.*$", "", text)
    for name, version in versions.items():
        text = re.sub(rf"(?m)^{name}==.*$", f"{name}=={version}" if version else "", text)
    path = Path(session.create_tmp()) / "constraints.txt"
    path.write_text(text)
    return str(path)


def install(session: nox.Session, *more: str, **versions: str) -> None:
    # pytest and torch's compiler keep what they write there: in .nox, not in the machine's folder.
    session.create_tmp()
    # A wheel is built from build/, where a module that is gone from the sources would live on.
    shutil.rmtree("build", ignore_errors=True)
    pins = constraints(session, **versions)
    session.install("-c", pins, "torch", *more)
    session.install("-c", pins, ".[test]")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that runs without a GPU: real ranks, real shared memory, kernels in Triton's interpreter."""
    install(session)
    session.run("pytest", *TESTS, *session.posargs, env=KEEPING)


@nox.session
def tests_oldest(session: nox.Session) -> None:
    """The same with the oldest torch, its Triton, and the oldest transformers that are supported: 5 GB of CUDA."""
    torch, triton = next(iter(CUDA_BUILDS.items()))
    install(session, torch=torch, triton=triton, transformers=OLDEST_TRANSFORMERS)
    session.run("pytest", *TESTS, *session.posargs, env=KEEPING)


@nox.session
def tests_newest(session: nox.Session) -> None:
    """The same with the newest torch, its Triton, transformers and peft. Such a torch may be 5 GB of CUDA."""
    newest = ("triton", "transformers", "peft")
    install(session, *newest, "--upgrade", torch="", **dict.fromkeys(newest, ""))
    session.run("pytest", *TESTS, *session.posargs, env=KEEPING)


@nox.session
def faults(session: nox.Session) -> None:
    """Every fault between any two steps of every op; `nox -s tests` injects some of them. Up to an hour."""
    install(session)
    env = {**ONE_THREAD, "FUSEDTP_FAULTS": "all"}
    session.run("pytest", "tests/test_faults.py", "tests/test_lines.py", "-rP", *session.posargs, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting and lint."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "format", "--check", *FOLDERS)
    session.run("ruff", "check", *FOLDERS)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    install(session, "mypy", "pandas-stubs")
    session.run("mypy", "-p", "fusedtp")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the docs as a site, site/index.html; a link that leads nowhere, as any warning, is an error."""
    # The API page is in the repository: the package need not be installed.
    tools = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["docs"]
    session.install("-c", "constraints.txt", *tools)
    session.run("python", "docs/make_site.py", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Make dist/*.tar.gz and *.whl, check them, install the wheel alone and run README's example with it."""
    shutil.rmtree("dist", ignore_errors=True)
    shutil.rmtree("build", ignore_errors=True)
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", "dist", ".")
    made = sorted(map(str, Path("dist").iterdir()))
    session.run("twine", "check", "--strict", *made)
    (wheel,) = (name for name in made if name.endswith(".whl"))
    session.install("-c", constraints(session), wheel)
    (example,) = re.findall(r"(?ms)^```python\n(.*?)^```", Path("README.md").read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "example.py").write_text(example)
        session.chdir(folder)
        session.run("torchrun", "--nproc-per-node", "2", "example.py", env=ONE_THREAD)
        session.run("fusedtp", "--version")


@nox.session
def sweep(session: nox.Session) -> None:
    """Check and time every schedule on this machine: table, CSV, picture. Arguments after -- go to `fusedtp sweep`."""
    install(session)
    session.run("fusedtp", "sweep", *session.posargs, env=ONE_THREAD)


@nox.session
def report(session: nox.Session) -> None:
    """Tables, picture and page, results/<machine>/sweep.html, from rows that are there. Arguments after --: files."""
    install(session)
    session.run("fusedtp", "report", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("triton", [PINNED["triton"], OLDEST, "3.8.0", NEWEST])
def kernels(session: nox.Session, triton: str) -> None:
    """Compile every kernel for GPUs that need not be there, and assert what the compiler made of it."""
    install(session, triton=triton)
    # The interpreter replaces the compiler for the whole process.
    session.run("pytest", "-m", "offline", *session.posargs, env={**ONE_THREAD, "TRITON_INTERPRET": "0"})


@nox.session
def emulate(session: nox.Session) -> None:
    """Execute compiled kernels on a CPU, under a weak memory and hostile schedules; up to an hour on two cores."""
    install(session)
    env = {**ONE_THREAD, "TRITON_INTERPRET": "0", "FUSEDTP_EMULATION": os.environ.get("FUSEDTP_EMULATION", "all")}
    session.run("pytest", "-m", "emulated", *session.posargs, env=env)


@nox.session
@nox.parametrize("triton", [OLDEST, PINNED["triton"], "3.8.0", NEWEST])
def launches(session: nox.Session, triton: str) -> None:
    """Launch kernels through this Triton's own driver and launcher, and execute a spread of them on a CPU."""
    install(session, triton=triton)
    env = {**ONE_THREAD, "TRITON_INTERPRET": "0"}
    # Faults of the warp-specialised core are planted in the text of one Triton's PTX.
    chosen = () if triton == PINNED["triton"] else ("-k", "not test_faults_are_found")
    session.run("pytest", "-m", "emulated", *chosen, *session.posargs, env=env)


@nox.session
@nox.parametrize("torch", list(CUDA_BUILDS))
def virtual_gpu(session: nox.Session, torch: str) -> None:
    """Run torch's own CUDA code in two processes, over the stub of a GPU. Installs a CUDA build of torch, 6 GB."""
    install(session, torch=torch, triton=CUDA_BUILDS[torch])
    said = session.run("python", "-P", "tests/virtual_gpu/build.py", silent=True)
    env = dict(line.split("=", 1) for line in str(said).splitlines() if re.match(r"[A-Z_]+=", line))
    env |= {**ONE_THREAD, "GPU_STUB_DEVICES": "2", "GPU_STUB_SMS": "4", "GLOO_SOCKET_IFNAME": "lo"}
    session.run("pytest", "-m", "virtual_gpu", "tests/test_virtual_gpu.py", *session.posargs, env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """pytest-benchmark of ratios. Arguments after -- go to pytest: --benchmark-save=NAME, --benchmark-compare, -k."""
    install(session)
    # -P: the installed package, not this folder. Its name is the last word, behind any warning.
    name = session.run(
        "python", "-P", "-c", "from fusedtp.machine import describe; print(describe().name)", silent=True
    )
    folder = f"results/{str(name).split()[-1]}/benchmarks"
    options = (f"--benchmark-storage={folder}", "--benchmark-save-data")
    session.run("python", "-P", "-m", "fusedtp.bench.ratios", *options, *session.posargs, env=ONE_THREAD)


@nox.session
def regress(session: nox.Session) -> None:
    """Fail if a schedule is slower than this machine's baseline. Arguments after --: --save, --plant decomposed=1.1."""
    install(session)
    session.run("python", "-P", "-m", "fusedtp.bench.regress", *session.posargs, env=ONE_THREAD)


@nox.session
def soak(session: nox.Session) -> None:
    """Make 10,000 mixed calls on four ranks, 100,000 of random programs, and all cases that `tests` has a spread of.

    Among these cases are long sequences across two groups, every sharding over two axes, every decoder both ways on two
    and four ranks, and every dtype on every number of ranks. After --: --calls, --seed, --programs, ...
    """
    install(session)
    # A package of the tests, not of the installed one.
    env = {**ONE_THREAD, "PYTHONPATH": os.path.abspath("tests")}
    session.run("python", "-P", "-m", "soak", *session.posargs, env=env)
    # What was asked for may be the replay of a few calls.
    if not session.posargs:
        for size in (2, 4):
            options = ("--programs", "--calls", "50000", "--world-size", str(size))
            session.run("python", "-P", "-m", "soak", *options, env=env)
        # One after another: ranks that wait for a core could take longer than a case may.
        env = {**ONE_THREAD, "FUSEDTP_SOAK": "large"}
        session.run("pytest", "--benchmark-disable", "-m", "not offline", env=env)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Check and time the kernels on a CUDA GPU, with the torch and Triton of the interpreter: `fusedtp.bench.gpu`.

    Arguments after -- go to that: --list, --item matmul, --dry-run.
    """
    needed = "jinja2, matplotlib, numpy, pandas, pytest, rich, scipy, setuptools, torch, triton, typer"
    session.run("python", "-c", f"import {needed}")
    with tempfile.TemporaryDirectory() as site:
        # Beside the environment, not into it, and without the network: a GPU machine brings its own builds.
        flags = ("--quiet", "--no-deps", "--no-build-isolation", "--target", site)
        shutil.rmtree("build", ignore_errors=True)
        session.run("python", "-m", "pip", "install", *flags, ".")
        path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        # -P: what runs is the package that was just installed, not this folder.
        session.run("python", "-P", "-m", "fusedtp.bench.gpu", *session.posargs, env={**ONE_THREAD, "PYTHONPATH": path})
