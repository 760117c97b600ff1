"""The command line, as a user runs it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

from fusedtp.bench.cli import app
from fusedtp.bench.ranks import PRELOAD, RankPool

from .fork_servers import forked
from .harness import LARGE


def command(*arguments: object, code: int | None = 0, columns: int = 200) -> str:
    """Run a command, answer questions with yes, and return its output.
    The exit code must be `code`; with None, 0 or 2.
    """
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(map(str, arguments)), input="y\n")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in ((0, 2) if code is None else (code,)), done.output
    return done.output


def folded(output: str) -> str:
    """Return the output as one line, without the frames and line breaks of a terminal."""
    return " ".join(output.replace("\u2502", " ").split())


def as_python(name: str, given: Sequence[str], folder: str, env: Mapping[str, str], said: str) -> int:
    """Run a module as `python -P -m` does, with stdout and stderr in the file `said`; return the exit code."""
    # Ranks that it starts are forked like those of tests.
    servers = forked(os.environ.get(PRELOAD, ""))
    for each in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
        del sys.modules[each]
    fd = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env)
    del os.environ["FUSEDTP_NOTE_FD"]
    os.chdir(folder)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = given
    try:
        with servers:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def in_a_rank(group: ProcessGroup, *what: Any) -> int:
    dist.destroy_process_group()
    return as_python(*what)


def module(name: str, *given: str, folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Run `python -P -m name *given` in `folder`; return the exit code and the output. `env` is added to its variables.

    The process is forked from one that has imported torch, which takes Python seconds; `nox -s soak` starts Python.
    """
    if LARGE:
        command = [sys.executable, "-P", "-m", name, *given]
        done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr
    with RankPool(1, timeout=100) as ranks, tempfile.NamedTemporaryFile("r") as said:
        (code,) = ranks.run(in_a_rank, name, given, str(folder), dict(env), said.name)
        return code, said.read()
