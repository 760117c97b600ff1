"""The command line, as a user runs it."""

from __future__ import annotations

from typer.testing import CliRunner

from fusedtp.bench.cli import app


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
