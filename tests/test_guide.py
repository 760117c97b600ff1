"""docs/guide: every Python block runs on the ranks that its page names; every page and public name is listed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDE = DOCS / "guide"
SITE = (ROOT / "mkdocs.yml").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {page.name: page for page in sorted(GUIDE.glob("*.md"))}
PROGRAMS = [name for name, page in PAGES.items() if BLOCK.search(page.read_text())]
NEEDED = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}") for name in ("transformers", "peft")
}  # fmt: skip


@contextlib.contextmanager
def world(group: ProcessGroup) -> Iterator[None]:
    """Make `group` torch's default group, as in a program that torchrun has started on that many ranks."""
    c10d: Any = dist.distributed_c10d
    before = c10d._get_default_group()
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)


def run_page(group: ProcessGroup, page: str, folder: str) -> int:
    """Run all blocks of a page in order, in one namespace, and return their number."""
    blocks = list(BLOCK.finditer(Path(page).read_text()))
    scope: dict[str, Any] = {"__name__": "guide"}
    with world(group), contextlib.chdir(folder):
        for block in blocks:
            # Line numbers are those of the page.
            first = block.string[: block.start(1)].count("\n")
            exec(compile("\n" * first + block[1], page, "exec"), scope)
    return len(blocks)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[mark for each, mark in NEEDED.items() if re.search(f"(import|from) {each}", text)])
    for name, text in ((name, PAGES[name].read_text()) for name in PROGRAMS)
])  # fmt: skip
def test_every_block_runs(pool: RankPool, tmp_path: Path, name: str) -> None:
    asked = set(re.findall(r"torchrun --nproc-per-node (\d)", PAGES[name].read_text()))
    assert len(asked) == 1, f"{name} must say once on how many ranks it runs"
    ran = pool.run(run_page, str(PAGES[name]), str(tmp_path), world_size=int(asked.pop()))
    assert ran[0] == PAGES[name].read_text().count("\n```python\n") > 0


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^::: fusedtp\.(\w+)$", PAGES["api.md"].read_text(), re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(shown) == set(fusedtp.__all__)
    for name in shown:
        assert getattr(fusedtp, name).__doc__, f"{name} has no docstring to show"


def test_the_site_has_every_page() -> None:
    shown = re.findall(r"^ +- ([\w/-]+\.md)$", SITE, re.MULTILINE)
    assert len(shown) == len(set(shown))
    (excluded,) = re.findall(r"^exclude_docs: \|\n((?:  .*\n)+)", SITE, re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert {*shown, *excluded.split()} == pages
    for page in excluded.split():
        assert "](../" in (DOCS / page).read_text(), f"{page} leads to no source file: it can be in the site"
