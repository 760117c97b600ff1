"""The command line, as a user runs it."""

from __future__ import annotations

from typer.testing import CliRunner

from fusedtp.bench.cli import app


def command(*arguments: object, code: int | None = 0, columns: int = 200) -> str:
    """Return what a command says that must end with this exit code, or, of None, succeed or refuse.

    A question is answered with yes.
    """
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(map(str, arguments)), input="y\n")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in ((0, 2) if code is None else (code,)), done.output
    return done.output


def folded(output: str) -> str:
    """Return it in one line, without the frames and folds of a terminal."""
    return " ".join(output.replace("\u2502", " ").split())
