"""docs/guide: every Python block runs on the ranks that its page names; every page and public name is listed."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.rank_main import load_module
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


# The groups that a process has made in worlds of a group, by its name.
_named: Counter[str] = Counter()


@contextlib.contextmanager
def world(group: ProcessGroup) -> Iterator[None]:
    """Make `group` torch's default group, as in a program that torchrun has started on that many ranks.

    torch numbers the groups that a process makes. The pool's other ranks make none here, so these get names instead:
    the numbers stay the same on all ranks.
    """
    c10d: Any = dist.distributed_c10d
    before = c10d._get_default_group()

    def named(*_: object, **options: object) -> str:
        _named[group.group_name] += 1
        return f"{group.group_name}/{_named[group.group_name]}"

    c10d._update_default_pg(group)
    try:
        with mock.patch.object(c10d, "_process_group_name", named):
            yield
    finally:
        c10d._update_default_pg(before)


def run_page(group: ProcessGroup, page: str, folder: str) -> tuple[int, str]:
    """Run all blocks of a page in order, in one namespace, and return their number and what they printed."""
    blocks = list(BLOCK.finditer(Path(page).read_text()))
    scope: dict[str, Any] = {"__name__": "guide"}
    with world(group), contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            # Line numbers are those of the page.
            first = block.string[: block.start(1)].count("\n")
            exec(compile("\n" * first + block[1], page, "exec"), scope)
    return len(blocks), printed.getvalue()


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[mark for each, mark in NEEDED.items() if re.search(f"(import|from) {each}", text)])
    for name, text in ((name, PAGES[name].read_text()) for name in PROGRAMS)
])  # fmt: skip
def test_every_block_runs(pool: RankPool, tmp_path: Path, name: str) -> None:
    asked = set(re.findall(r"torchrun --nproc-per-node (\d)", PAGES[name].read_text()))
    assert len(asked) == 1, f"{name} must say once on how many ranks it runs"
    page = PAGES[name].read_text()
    count, printed = pool.run(run_page, str(PAGES[name]), str(tmp_path), world_size=int(asked.pop()))[0]
    assert count == page.count("\n```python\n") > 0
    for shown in re.findall(r"\n```text\n(Path\(.*?)```", page, re.DOTALL):
        assert "".join(shown.split()) in "".join(printed.split())


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^<!-- api: fusedtp\.(\w+) -->$", PAGES["api.md"].read_text(), re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(shown) == set(fusedtp.__all__)
    for name in shown:
        assert getattr(fusedtp, name).__doc__, f"{name} has no docstring to show"


def test_the_site_has_every_page() -> None:
    shown = re.findall(r"^ +- ([\w/-]+\.md)$", SITE, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(shown) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nsite_name: fusedtp {version}\n" in SITE


make_site: Any = load_module("make_site", str(DOCS / "make_site.py"))


@pytest.mark.parametrize("repository", ["https://example.org/a/b", ""])
def test_links_of_the_site_lead_to_its_pages_or_to_the_repository(tmp_path: Path, repository: str) -> None:
    make_site.copy(tmp_path / "site", repository)
    pages = sorted((tmp_path / "site").rglob("*.md"))
    found = {(page, target) for page in pages for _, target in make_site.LINK.findall(page.read_text())}
    sources = {target for _, target in found if target.startswith("https://example.org/")}
    assert f"{repository}/blob/HEAD/fusedtp/op.py" in sources if repository else not sources
    for target in sources:
        path = target.removeprefix(f"{repository}/blob/HEAD/").partition("#")[0]
        assert (ROOT / path).exists(), target
    for page, target in found:
        # `layers[0](x)` in a block of code has the form of a link.
        if Path(target).suffix and not re.match(r"\w+:", target):
            assert (page.parent / target.partition("#")[0]).exists(), (page, target)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/a/b.git\n", "https://example.org/a/b"),
        ("https://name:secret@example.org/a/b", "https://example.org/a/b"),
        ("git@example.org:a/b.git", "https://example.org/a/b"),
        ("ssh://git@example.org/a/b.git", "https://example.org/a/b"),
        ("/srv/git/b.git", ""),
        ("", ""),
    ],
)
def test_the_repository_is_the_remote_without_credentials(remote: str, address: str) -> None:
    assert make_site.address(remote) == address
