"""Print text of any origin: control characters are shown, not obeyed, and output that cannot be written ends in a line.

`streams` replaces the standard streams of a command, for everything that is printed without a console. `Console` does
the same for text that rich styles: of what reaches a terminal, only rich's own escape sequences are obeyed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TextIO, cast

import rich.console
from rich.segment import Segment
from rich.text import Text

from fusedtp.files import visible

# Options of rich's live displays. By default they read escape sequences of text that is printed meanwhile.
LIVE: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}


class _Stream:
    """One standard stream of a command, which ends the command if it cannot be written.

    Standard error never ends it: nothing is left to say why.
    """

    # click would write bytes to this.
    buffer = None

    def __init__(self, file: TextIO, is_error: bool = False) -> None:
        self._file, self._is_error = file, is_error
        # Exit status, once writing has failed. A thread that draws may be the first to notice.
        self._status: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        return self.put(visible(text))

    def put(self, text: str) -> int:
        """Write text with escape sequences of ours."""
        encoding = self._file.encoding or "utf-8"
        with self._or_end():
            self._file.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._or_end():
            self._file.flush()

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        if self._status is not None:
            raise SystemExit(self._status)
        try:
            yield
        except OSError as error:
            # What is left in a buffer is flushed at exit, and would fail again.
            with contextlib.suppress(OSError):
                _discard(self._file.fileno())
            if self._is_error:
                return
            if isinstance(error, BrokenPipeError):
                # The reader has what it wanted. End like a program that the signal kills.
                self._status = 128 + signal.SIGPIPE
                raise SystemExit(self._status) from None
            self._status = 1
            _cannot_write(error.strerror or str(error))


class _Styled:
    """File of a console: it passes rich's escape sequences on, and no blanks at ends of lines unless to a terminal."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.put(text if self._stream.isatty() else re.sub(r" +\n", "\n", text))


class Console(rich.console.Console):
    """Console that prints text unchanged, [bold] as six letters, except that control characters are shown."""

    def __init__(self, *, quiet: bool = False) -> None:
        stream = sys.stdout if isinstance(sys.stdout, _Stream) else _Stream(sys.stdout)
        file = cast(TextIO, _Styled(stream))
        super().__init__(file=file, quiet=quiet, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before the layout, which counts characters.
        return super().render_str(visible(text), **options)

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        # After the layout, for text of other renderables.
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Replace the standard streams of a command while it runs, the traceback of an exception included.

    If standard output is closed or cannot be written, says so in one line and raises SystemExit(1). If its reader has
    gone, raises SystemExit(141) in silence. Standard error may be closed.
    """
    for descriptor in (0, 1, 2):
        # A file that is opened later would take the place, and get what libraries print.
        try:
            os.fstat(descriptor)
        except OSError:
            _discard(descriptor)
    before: Any = sys.stdout, sys.stderr
    # Either is None if it was closed when the interpreter started.
    out, error = (None if stream is None or stream.closed else stream for stream in before)
    with open(os.devnull, "w") as nowhere:
        sys.stderr = cast(TextIO, _Stream(error or nowhere, is_error=True))
        try:
            if out is None:
                _cannot_write("it is closed")
            sys.stdout = cast(TextIO, _Stream(out))
            try:
                yield
            except Exception:
                traceback.print_exc()
                raise SystemExit(1) from None
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = before


def _cannot_write(why: str) -> NoReturn:
    print(f"cannot write to standard output: {why}", file=sys.stderr, flush=True)
    raise SystemExit(1) from None


def _discard(descriptor: int) -> None:
    # Let what is written to the descriptor go nowhere.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.set_inheritable(descriptor, True)
    if null != descriptor:
        os.close(null)
