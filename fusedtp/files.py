"""Reading files that others may have written: regular ones of a limited size, as text. Nothing of ours is unpickled."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_text(path: Path, *, max_bytes: int) -> str:
    """The UTF-8 text of a regular file of at most `max_bytes`.

    ValueError for a larger one, for a pipe or a device, and for what is not UTF-8; OSError as of `open`.
    """
    # Without waiting for the writer of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = b""
        if about.st_size <= max_bytes:
            with open(descriptor, "rb", closefd=False) as file:
                # One byte more: the file may grow while it is read.
                content = file.read(max_bytes + 1)
        if max(about.st_size, len(content)) > max_bytes:
            raise ValueError(f"{path} is larger than the {max_bytes} bytes that are read of such a file")
    finally:
        os.close(descriptor)
    return content.decode()
