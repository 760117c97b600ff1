"""The measured rows that README and docs/measured.md show."""

from __future__ import annotations

from pathlib import Path

from fusedtp.bench.machine import git

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def folder() -> Path:
    """The folder of the rows that the pictures are made from."""
    return (ROOT / "docs" / "pictures" / "sweep.png").resolve().parent


def rows(scratch: Path) -> Path:
    """The file of these rows; as it is committed, in `scratch`, unless README is about to change with it.

    Who sweeps on such a machine has rows of his own in that place.
    """
    path = folder() / "sweep.csv"
    if not git(ROOT, "status", "--porcelain", "--", "README.md"):
        text = git(ROOT, "show", f"HEAD:{path.relative_to(ROOT)}")
        if text:
            path = scratch / path.name
            path.write_text(text + "\n")
    return path
