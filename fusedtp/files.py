"""Reading of text files that others may have written, regular ones of a limited size; replacement of whole files.

This package unpickles none of its files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def read_text(path: Path, *, max_bytes: int) -> str:
    """Return the UTF-8 text of a regular file of at most `max_bytes`.

    Raises ValueError for a larger file, for a pipe or a device, and for text that is not UTF-8; OSError as `open` does.
    """
    # Do not wait for the writer of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = b""
        if about.st_size <= max_bytes:
            with open(descriptor, "rb", closefd=False) as file:
                # Read one byte more: the file may grow meanwhile.
                content = file.read(max_bytes + 1)
        if max(about.st_size, len(content)) > max_bytes:
            raise ValueError(f"{path} is larger than the {max_bytes} bytes that are read of such a file")
    finally:
        os.close(descriptor)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise ValueError(f"line {line} is not UTF-8: {error}") from error


def replace(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader sees the old file or the new one, never half of it.

    Folders are made as needed. An existing file keeps its mode, and a link still leads to the file. A file that may not
    be written is left alone: OSError, and nothing has changed.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        mode = 0o666 & ~umask
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are private.
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
