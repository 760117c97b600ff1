"""Build the site: copy docs/ to build/docs, give its links to source files the repository's address, run Zensical.

    python docs/make_site.py    # nox -s docs; arguments go to `zensical build`

The repository is the clone's `origin`. Without one, links to source files become plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def address(remote: str) -> str:
    """Return the web address of a git remote, without credentials; "" if it has none."""
    address = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", remote.strip())
    address = re.sub(r"^https://[^/]*@", "https://", address)
    return address.removesuffix(".git") if address.startswith("https://") else ""


def copy(folder: Path, repository: str) -> None:
    """Copy docs/ to a new `folder`. A link to a file outside of docs/ leads to `repository`, if that is not ""."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns(Path(__file__).name, "__pycache__"))
    for page in folder.rglob("*.md"):
        original = DOCS / page.relative_to(folder)

        def led(link: re.Match[str], folder_of: Path = original.parent) -> str:
            text, target = link.groups()
            file = Path(os.path.normpath(folder_of / target))
            if re.match(r"\w+:|#", target) or file.is_relative_to(DOCS):
                return link[0]
            return f"[{text}]({repository}/blob/HEAD/{file.relative_to(ROOT)})" if repository else text

        page.write_text(LINK.sub(led, original.read_text()))


def main() -> int:
    """Build, and return Zensical's exit code. A warning is an error."""
    remote = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
    repository = address(remote)
    folder = ROOT / "build" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    copy(folder, repository)
    command = ["zensical", "build", "--clean", "--strict", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "FUSEDTP_REPOSITORY": repository}).returncode


if __name__ == "__main__":
    sys.exit(main())
