"""Where a rank is, for whoever must say what it failed in.

A rank of a `RankPool` has a file without a name that its parent reads (`ranks.RankProcess`); the parent learns of a
rank that hangs or dies what it was at. Under a launcher nobody reads, and a rank that is late says it itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

# As `rank_main` sets it, which imports nothing of the package.
DESCRIPTOR = "FUSEDTP_NOTE_FD"
NUM_BYTES = 256

_last = ""


def tell(text: str) -> None:
    """Leave `text`, of at most 256 bytes, in place of what was told before."""
    global _last
    _last = text
    if fd := os.environ.get(DESCRIPTOR):
        os.pwrite(int(fd), text.encode()[:NUM_BYTES].ljust(NUM_BYTES), 0)


@contextlib.contextmanager
def bounded(seconds: float, what: str) -> Iterator[None]:
    """End this process, with its stacks and last note on standard error, if it is in here for longer than that.

    For a rank that nobody watches: a launcher ends the others when one has ended.
    """

    def end() -> None:
        print(f"{what}: no answer within {seconds:g} s, at {_last or 'its start'}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
