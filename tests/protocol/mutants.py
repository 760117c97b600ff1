"""Planted protocol bugs: one-line edits of the real kernels and schedules, undone afterwards.

Each edit names a function and the text that it replaces. The text must exist, so a bug cannot silently vanish.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusedtp.kernels import gather_matmul, layout, matmul_scatter, push, reduce, signal
from fusedtp.schedules import decomposed, fused, producer
from fusedtp.workspaces import steps
from fusedtp.workspaces.workspace import Workspace


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in function `name` of `owner` (a module or class)."""

    owner: Any
    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A bug, the op and shards that reveal it, and the number of programs that run at a time (0: all)."""

    bug: str
    op: str
    edits: tuple[Edit, ...]
    sizes: tuple[int, ...] = (3, 1)
    residency: int = 0
    # Part of the checker's message.
    says: str = ""


def _edit(owner: Any, name: str, old: str, new: str) -> tuple[Edit, ...]:
    return (Edit(owner, name, old, new),)


_WRITES = "steps.write(dst, region.slot + first_piece, -(-end // piece) - first_piece)"
_FINISH = "    finish(Link(group, rank, epoch, fingerprint, 0), tl.num_programs(0), FIRST_SLOT)"

MUTANTS = (
    Mutant(
        "no barrier before the release", "gather rows",
        _edit(signal, "raise_signal", "tl.debug_barrier()", "pass"), says="is read",
    ),
    Mutant(
        "relaxed signal", "gather rows",
        _edit(signal, "raise_signal", 'sem="release"', 'sem="relaxed"'), says="is read",
    ),
    Mutant(
        "signal for the own device only", "two_shot",
        _edit(signal, "raise_lanes", 'scope="sys"', 'scope="gpu"'), says="is read",
    ),
    Mutant(
        "no barrier before signals to all", "matmul one_shot",
        _edit(signal, "raise_to_all", "tl.debug_barrier()", "pass"), says="is read",
    ),
    Mutant(
        "relaxed signals to all", "matmul two_shot",
        _edit(signal, "raise_lanes", 'sem="release"', 'sem="relaxed"'), says="is read",
    ),
    Mutant(
        "no signal to the last rank of all", "two_shot",
        _edit(signal, "raise_to_all", "slot, mask)", "slot, mask & (ranks < link.group.WORLD_SIZE - 1))"),
        says="deadlock",
    ),
    Mutant(
        "relaxed poll", "all_gather", _edit(signal, "wait", 'sem="acquire"', 'sem="relaxed"'),
        says="is read",
    ),
    Mutant(
        "signal before the stores", "all_gather",
        (
            Edit(push, "push_rows", "raise_signal(link, dst, piece + first_slot)", "pass"),
            Edit(
                push, "push_rows", "    send_block(",
                "    raise_signal(link, dst, piece + first_slot)\n        send_block(",
            ),
        ),
        says="is read",
    ),
    Mutant(
        "one half instead of two", "gather rows", _edit(signal, "half", "link.epoch & 1", "link.epoch & 0"),
        says="overwritten",
    ),
    Mutant(
        "one half instead of two, host", "in place: all_gather",
        _edit(Workspace, "view", "epoch & 1", "epoch & 0"), says="overwritten",
    ),
    Mutant(
        "flag reset after the wait", "gather rows",
        _edit(signal, "wait", "return (", "tl.store(signal, 0)\n    return ("), says="deadlock",
    ),
    Mutant(
        "flag reset after the wait, host", "in place: two_shot",
        _edit(
            steps.HostSteps, "wait", "self._wait_slowly(lambda: load_acquire(address), src, slot, self.epoch)",
            "self._wait_slowly(lambda: load_acquire(address), src, slot, self.epoch)\n    store_release(address, 0)",
        ),
        says="deadlock",
    ),
    Mutant(
        "wait for the epoch before", "scatter rows",
        _edit(signal, "wait", "seen - link.epoch", "seen + 1 - link.epoch"), says="is read",
    ),
    Mutant(
        "wait for the epoch before, host", "copy: gather rows",
        _edit(
            steps.HostSteps, "wait", "raised(load_acquire(address), self.epoch)",
            "raised(load_acquire(address), self.epoch - 1)",
        ),
        says="is read",
    ),
    Mutant(
        "wait for a later program", "gather rows",
        _edit(
            gather_matmul, "_gather_matmul_kernel", "pid = tl.program_id(0)",
            "pid = tl.num_programs(0) - 1 - tl.program_id(0)",
        ),
        residency=1, says="deadlock",
    ),
    Mutant(
        "no signal for an empty shard", "gather contraction",
        _edit(
            push, "push_rows", "        raise_signal(",
            "        if src.cols > 0:\n            raise_signal(",
        ),
        sizes=(3, 0), says="deadlock",
    ),
    Mutant(
        "no signal for an empty shard, host", "copy: all_gather",
        _edit(decomposed.DecomposedGather, "_push", "with travelling(ws):",
              "if rows.numel() == 0:\n        return\n    with travelling(ws):"),
        sizes=(3, 0), says="deadlock",
    ),
    Mutant(
        "leaves without its peers' entry", "all_gather",
        _edit(signal, "leave", "range(1, link.group.WORLD_SIZE)", "range(1, 1)"), says="overwritten",
        sizes=(3, 0),
    ),
    Mutant(
        "every program signals its own end", "scatter rows",
        _edit(signal, "finish", "if arrives_last(link, num_programs):", "if num_programs > 0:"), says="is read",
    ),
    Mutant(
        "arrivals that order nothing", "scatter rows, joined",
        _edit(signal, "arrives_last", 'sem="acq_rel"', 'sem="relaxed"'), says="is read",
    ),
    Mutant(
        "no barrier before an arrival", "scatter rows",
        _edit(signal, "arrives_last", "tl.debug_barrier()", "pass"), says="arrives without a barrier",
    ),
    Mutant(
        "signals before the tiles", "matmul one_shot, split",
        (
            Edit(matmul_scatter, "_matmul_scatter_kernel", _FINISH, "    pass"),
            Edit(matmul_scatter, "_matmul_scatter_kernel", "    matmul_tiles(", f"{_FINISH}\n    matmul_tiles("),
        ),
        says="not the last to arrive",
    ),
    Mutant(
        "a sum that waits for one peer", "scatter rows",
        _edit(reduce, "wait_for_parts", "link.group.WORLD_SIZE):", "2):"), sizes=(2, 1, 1), says="is read",
    ),
    Mutant(
        "a collector that does not wait for sums", "two_shot",
        _edit(push, "_collect_kernel", "ok = wait(link, src, first_slot)", "ok = one"), says="is read",
    ),
    Mutant(
        "nobody enters", "ring reduce_scatter", _edit(signal, "enter", "+ GIVEN_UP) == 0", "+ GIVEN_UP) != 0"),
        says="that nobody stores to in this call",
    ),
    Mutant(
        "fingerprint behind the entry", "all_gather",
        _edit(
            signal, "enter",
            "_store_fingerprints(link)\n", "raise_to_all(link, ENTRY_SLOT)\n        _store_fingerprints(link)\n",
        ),
        sizes=(3, 0), says="is read",
    ),
    Mutant(
        "one place for all fingerprints", "gather rows",
        _edit(signal, "fingerprint_of", "2 * (link.epoch & 1)", "0"), says="overwritten",
    ),
    Mutant(
        "all pieces under one slot", "gather rows",
        _edit(push, "push_rows", "piece + first_slot", "first_slot"), says="is read",
    ),
    Mutant(
        "two phases under the same slots", "two_shot",
        _edit(layout.Layout, "take", "slot + slots", "slot"),
        says="is read",
    ),
    Mutant(
        "read without a wait", "copy: two_shot",
        _edit(decomposed.DecomposedGather, "whole", "steps.wait(src, self._slot)", "pass"),
        says="is read",
    ),
    Mutant(
        "the first to arrive leaves", "scatter rows",
        _edit(
            signal, "arrives_last", "return arrived == num_programs - 1", "return arrived == 0"
        ),
        says="not the last to arrive",
    ),
    Mutant(
        "waits for the first piece of a tile", "gather rows, in pieces",
        _edit(push, "wait_for_rows", "piece * PIECE < end_row", "piece < begin_row"), says="is read",
    ),
    Mutant(
        "waits for the first rank of a tile", "gather rows, joined",
        _edit(gather_matmul, "_wait_for_shards", "(row < end_row).to(tl.int32)", "0"), says="is read",
    ),
    Mutant(
        "waits for the first piece of each rank", "gather rows, joined, in pieces",
        _edit(
            gather_matmul, "_wait_for_shards",
            "row = min(begin + (piece + 1) * ctx.chunks.PIECE, tl.load(ctx.chunks.table + src + 1))",
            "row = tl.load(ctx.chunks.table + src + 1)",
        ),
        says="is read",
    ),
    Mutant(
        "signal before the copy", "copied: gather rows",
        (
            Edit(producer, "_copy", _WRITES, "pass"),
            Edit(
                producer, "_copy", "            if cols:\n",
                f"            first_piece = begin // piece\n            {_WRITES}\n            if cols:\n",
            ),
        ),
        says="is read",
    ),
    Mutant(
        "no signal for copies of nothing", "copied: gather contraction",
        _edit(producer, "_copy", "range(0, count, part)", "range(0, count if cols else 0, part)"),
        sizes=(3, 0), says="deadlock",
    ),
    Mutant(
        "one signal for all pieces of a copy", "copied: gather rows",
        _edit(producer, "_copy", "-(-end // piece) - first_piece)", "1)"), says="deadlock",
    ),
    Mutant(
        "copies to the half before", "copied: gather rows",
        _edit(producer, "_copy", "ws.view(dst, steps.epoch,", "ws.view(dst, steps.epoch + 1,"), says="",
    ),
    Mutant(
        "ends before its copies", "copied: gather rows",
        _edit(producer, "finish", "settle(ws)", "pass"), says="may still run",
    ),
    Mutant(
        "ends before its side stream", "scatter and gather",
        _edit(fused.FusedGather, "_collect", "transport.settle(ws)", "pass"), says="may still run",
    ),
)  # fmt: skip


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant the bug wherever the function is imported."""
    with contextlib.ExitStack() as stack:
        for edit in mutant.edits:
            _plant(edit, stack)
        yield


def _plant(edit: Edit, stack: contextlib.ExitStack) -> None:
    original = inspect.getattr_static(edit.owner, edit.name)
    function = getattr(original, "fn", original)
    source = textwrap.dedent(inspect.getsource(function))
    assert edit.old in source, f"{edit.name} has no {edit.old!r} any more"
    source = source.replace(edit.old, edit.new)
    # Triton reads the source of the functions that it interprets.
    file = f"<{edit.name} with {edit.new!r}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    stack.callback(linecache.cache.pop, file, None)
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), function.__globals__, names)
    owners = [edit.owner] if inspect.isclass(edit.owner) else [
        module for name, module in list(sys.modules.items()) if name.startswith("fusedtp.")
    ]  # fmt: skip
    for owner in owners:
        if owner.__dict__.get(edit.name) is original:
            stack.callback(setattr, owner, edit.name, original)
            setattr(owner, edit.name, names[edit.name])
