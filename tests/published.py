"""The measured rows that README and docs/measured.md show."""

from __future__ import annotations

from pathlib import Path

from fusedtp.machine import git

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def folder() -> Path:
    """Return the folder of the rows that the pictures are made from."""
    return (ROOT / "docs" / "pictures" / "sweep.png").resolve().parent


def rows(scratch: Path) -> Path:
    """Return the file of these rows: the committed file, copied to `scratch`, unless README has uncommitted changes.

    A sweep on the same machine overwrites the file in the work tree.
    """
    path = folder() / "sweep.csv"
    if not git(ROOT, "status", "--porcelain", "--", "README.md"):
        text = git(ROOT, "show", f"HEAD:{path.relative_to(ROOT)}")
        if text:
            path = scratch / path.name
            path.write_text(text + "\n")
    return path
