"""The protocol of `kernels.signal`, checked in every order of its steps: in all ops, and with planted bugs.

Recordings of the real kernels and schedules (`protocol.record`) are checked, with their slots, halves, epochs and
waits. FUSEDTP_SOAK=large (`nox -s soak`) adds pairs, and every op on four ranks; FUSEDTP_PROTOCOL=large adds all pairs,
eight ranks and more shards. FUSEDTP_PROTOCOL=write writes the table of docs/protocol.md.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from fusedtp import PeerTimeout
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import signal
from fusedtp.kernels.steps import step
from fusedtp.op import ALL_GATHER
from fusedtp.workspaces.steps import HostSteps
from fusedtp.workspaces.workspace import Workspace

from . import generated, harness
from .harness import spread
from .protocol import cases
from .protocol.events import Access, Advance, Arrive, Barrier, Event, Kernel, Raise, Wait
from .protocol.explore import explore
from .protocol.live import live
from .protocol.model import Calls, Model, build
from .protocol.mutants import MUTANTS, Mutant, planted
from .protocol.naive import explore_naively, random_calls
from .protocol.record import Recorder

LARGE = os.environ.get("FUSEDTP_PROTOCOL") == "large"
SOAK = harness.LARGE or LARGE
DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"

# Two programs share three rows in two tiles; an empty shard comes first, last or in between.
TWO = [(3, 1), (3, 0), *([(3, 3), (5, 2), (0, 3)] if LARGE else [])]
MORE = [(3, 0, 1), *([(2, 0, 1, 3)] if SOAK else []),
        *([(3, 3, 3), (1, 1, 1, 1), (1, 2, 0, 3, 1, 1, 1, 1)] if LARGE else [])]  # fmt: skip
# Ops that send and wait in ways of their own: they run on four ranks too.
OF_FOUR = ("gather rows, joined, in pieces", "matmul two_shot", "ring all_reduce", "copied: gather rows")
# Ranks that a program signals, one of which has nothing to send.
PEERS = (1, 2, 0, 3, *((1, 1, 1, 1) if SOAK else ()))


def check(calls: Calls, what: str, **options: int) -> None:
    """Check that no order is wrong."""
    verdict = explore(build(calls, **options))
    assert not verdict.wrong, f"{what}: {verdict.wrong}\n" + "\n".join(verdict.path)


# Recording kernels is slow; pairs cover two ranks of all ops.
FAMILIES = {
    "fused": cases.FUSED, "copied": cases.COPIED, "copy": cases.COPY, "in place": cases.IN_PLACE, "lane": cases.LANE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sizes"),
    [*itertools.product(FAMILIES, MORE), *spread(list(FAMILIES)[0 if LARGE else 2 :], TWO, large=LARGE)],
    ids=str,
)
def test_every_order_of_every_op_is_right(family: str, sizes: tuple[int, ...]) -> None:
    every_order_is_right(FAMILIES[family], sizes)


def test_every_order_on_four_ranks_is_right() -> None:
    every_order_is_right(OF_FOUR, (2, 0, 1, 3))


def every_order_is_right(names: Iterable[str], sizes: tuple[int, ...]) -> None:
    for name in names:
        calls = cases.sequence([name] * 4, sizes)
        # All programs of a kernel at once, and one after another as in the interpreter.
        for residency in (0, 1) if name in cases.FUSED or name in cases.COPIED else (0,):
            check(calls, f"{name}, {sizes}, residency {residency}", residency=residency)


def test_every_order_of_mixed_ops_is_right() -> None:
    pairs = list(itertools.combinations(cases.OPS, 2))[:: 1 if LARGE else 3 if SOAK else 8]
    assert SOAK or set(itertools.chain(*pairs)) == set(cases.OPS)
    for one, two in pairs:
        # Each op after the other, on the other half and on the same half.
        check(cases.sequence([one, two, two, one], (3, 1)), f"{one}, {two}")


def lanes(ordinary: str, *others: str, num_calls: int = 2) -> Model:
    """Return the model of calls of one op in lane 0 beside calls of others in lanes of their own."""
    every = [cases.sequence([name] * num_calls, (3, 1)) for name in (ordinary, *others)]
    return build(every[0], beside=every[1:])


# Each fills the multiprocessors and waits in a kernel.
FILLING = ("gather rows", "scatter rows", "matmul one_shot", "two_shot", "copied: gather rows")


@pytest.mark.parametrize("ordinary", tuple(cases.FUSED | cases.COPIED) if LARGE else FILLING)
def test_ops_of_other_lanes_end_beside_kernels_that_fill_the_device(ordinary: str) -> None:
    """Kernels of all lanes get the multiprocessors one at a time, in every order."""
    verdict = explore(lanes(ordinary, *cases.LANE, num_calls=3))
    assert not verdict.wrong, f"{verdict.wrong}\n" + "\n".join(verdict.path)
    # The order matters: there is more than one.
    assert verdict.states > 20


@pytest.mark.parametrize("waits", ["all_gather", "copied: all_gather", "reduce_scatter"])
def test_a_kernel_that_waits_in_another_lane_is_a_deadlock(waits: str) -> None:
    """The model finds the deadlock for which `Schedule.check_lane` refuses schedules that wait inside kernels."""
    verdict = explore(lanes("gather rows", waits))
    assert verdict.wrong.startswith("deadlock: never: "), verdict.wrong or "nothing was found"
    assert "gets the multiprocessors" in verdict.wrong


@pytest.mark.parametrize("name", cases.LANE)
def test_a_kernel_in_another_lane_finds_what_its_stream_has_waited_for(name: str) -> None:
    for ops in cases.sequence([name] * 2, (3, 0, 1)):
        for kernels in ops:
            *host, leave = kernels
            waited, found = (
                {event for each in some for events in each.programs for event in events if isinstance(event, Wait)}
                for some in (host, [leave])
            )
            assert leave.name == "step"
            assert len(found) == 2
            assert found <= waited


def test_sequences_are_what_a_run_of_them_records() -> None:
    """Also around the wrap of epochs, which kernels and host compare."""
    names, first = ("gather rows", "in place: two_shot", "scatter rows", "copy: all_gather"), 2**31 - 3
    run = cases.record(names, (3, 1), first - 1)
    put_together = cases.sequence(names, (3, 1))
    for rank, ops in enumerate(put_together):
        for call, kernels in enumerate(ops):
            assert [cases.shifted(each, first - 1) for each in kernels] == run[rank][call], (rank, names[call])


def fences_in_a_row(events: Sequence[Event]) -> int:
    """Return the most fences of a program without data or a wait between: signals of one instruction share a fence."""
    most = fences = 0
    before: Event | None = None
    for event in events:
        if isinstance(event, Access) and all(cell < 0 for cell in event.cells):
            continue  # a fingerprint, which is relaxed
        if isinstance(event, Raise):
            fences += not isinstance(before, Raise)
        elif not isinstance(event, Barrier):
            fences = 0
        most, before = max(most, fences), event
    return most


@pytest.mark.parametrize("name", [*cases.FUSED, *cases.COPIED])
def test_a_program_does_not_wait_for_one_fence_after_another(name: str) -> None:
    """Each fence at system scope takes a round trip to the peers, however many signals follow it."""
    with cases.virtual_ranks(len(PEERS)) as ranks, Recorder(ranks[3]) as recorder:
        kernels = recorder.call(partial(cases.OPS[name], ranks[3], PEERS))
    programs = [(kernel.name, events) for kernel in kernels if kernel.name != "host" for events in kernel.programs]
    assert any(isinstance(event, Raise) for _, events in programs for event in events) or name in cases.COPIED
    counted = [(kernel, fences_in_a_row(events)) for kernel, events in programs]
    assert all(count <= 2 for _, count in counted), counted


# Ops whose sum is a kernel behind the one that makes its parts.
SUMS = (
    "scatter rows", "scatter rows, joined", "scatter columns", "scatter and gather", "matmul one_shot, split",
    "matmul two_shot, split", "two_shot", "copied: scatter and gather", "copied: two_shot",
)  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_kernel_signals_once_what_the_next_one_waits_for(name: str) -> None:
    """No program stands in a fence at system scope after a tile: the next kernel begins behind this one anyway."""
    with cases.virtual_ranks(3) as ranks, Recorder(ranks[1]) as recorder:
        kernels = recorder.call(partial(cases.OPS[name], ranks[1], (6, 5, 8)))
    # The entry and the end, or the end alone.
    most = {"matmul_scatter": 2, "reduce": 1}
    found = [kernel for kernel in kernels if kernel.name in most]
    assert found
    for kernel in found:
        slots = {event.slot for events in kernel.programs for event in events if isinstance(event, Raise)}
        assert len(slots) <= most[kernel.name], (kernel.name, slots)


@pytest.mark.parametrize("name", ["matmul one_shot", "matmul two_shot"])
def test_one_kernel_zeroes_no_counters(name: str) -> None:
    """An op that is captured would zero counters of its own at every replay."""
    with cases.virtual_ranks(2) as ranks, Recorder(ranks[0]) as recorder:
        zeroes = mock.patch.object(torch, "zeros", side_effect=AssertionError("an op zeroes memory"))
        with zeroes:
            recorder.call(partial(cases.OPS[name], ranks[0], (1, 2)))
        assert not ranks[0].counters.any()


LEAD = signal.LEAD.value


@pytest.mark.parametrize(
    ("distance", "far"),
    [(-4, -(2**31)), (-3, -LEAD), (-2, -2), (-1, -1), (0, 0), (1, 1), (1, LEAD - 1), (2, LEAD), (3, 2**31 - 1)],
)
def test_waits_accept_what_the_model_does(distance: int, far: int) -> None:
    """The model's words have modulus 8. Real words: both kinds of wait, also at the wrap of int32."""
    model = build(cases.sequence(["in place: all_gather"], (3, 1)), modulus=8)
    for epoch in (0, 2**31 - 2):
        for wait in ("kernel", "host"):
            with cases.virtual_ranks(2, epoch) as ranks:
                ws, slot = ranks[0], signal.FIRST_SLOT.value
                word = signal.SIGNALS.value + slot * ws.world_size + 1
                ws.words[word] = (epoch + 1 + far + 2**31) % 2**32 - 2**31
                try:
                    if wait == "kernel":
                        step(ws.channel(), ALL_GATHER.number, "wait", 1, slot)
                    else:
                        HostSteps.beside(ws, "all_gather").wait(1, slot)
                    ws.check()
                    accepted = True
                except PeerTimeout:
                    accepted = False
            assert accepted == model.accepted(distance, 0), f"{wait}, epoch {epoch}"


def test_a_signal_of_one_step_is_the_peers() -> None:
    with cases.virtual_ranks(2, 0) as ranks:
        slot = signal.FIRST_SLOT.value
        step(ranks[0].channel(), ALL_GATHER.number, "signal", 1, slot)
        word = signal.SIGNALS.value + slot * 2
        assert [ws.words[word].item() for ws in ranks] == [0, 1]


def test_nobody_is_two_epochs_ahead() -> None:
    """No signal is ever more than one epoch ahead, so waits need not accept LEAD epochs to stay live."""
    for name in cases.OPS:
        check(cases.sequence([name] * 3, (3, 1)), name, modulus=8)


@pytest.mark.parametrize("idle", range(1, 8))
def test_slots_that_few_ops_use_grow_old(idle: int) -> None:
    """An op of many slots runs again after `idle` ops of few slots. If the sign alone told old words from new, a slot
    unused for half the modulus (2^31 epochs) would pass for raised; with `LEAD` it takes the whole modulus less the
    lead.
    """
    calls = cases.sequence(["gather rows", *["in place: all_gather"] * idle, "gather rows"], (3, 1))
    by_sign = explore(build(calls, modulus=8, accepts=lambda distance: distance >= 0))
    assert ("is read" in by_sign.wrong) == (idle + 1 > 4)
    assert bool(explore(build(calls, modulus=8)).wrong) == (idle + 1 > 8 - 2)


@pytest.mark.parametrize("name", cases.OPS)
def test_the_largest_states_tell_of_all(name: str) -> None:
    """Both searches find the code right, or both find it wrong; so too if its barriers before releases are gone."""
    calls = cases.sequence([name] * 2, (3, 1))
    bare = [[[_without_barriers(kernel) for kernel in kernels] for kernels in ops] for ops in calls]
    for each in (calls, bare):
        model = build(each)
        assert bool(explore(model).wrong) == bool(explore(model, one_by_one=True).wrong)


def test_random_programs_against_store_buffers() -> None:
    """The model of windows finds a wrong order exactly if executing each access by itself shows one; so do the largest
    states, where they tell of all.
    """
    found = [0, 0]
    for seed in range(2000 if LARGE else 250):
        calls = random_calls(seed)
        naive, model = explore_naively(calls), build(calls)
        for verdict in (explore(model), explore(model, one_by_one=True)):
            assert bool(verdict.wrong) == bool(naive), f"seed {seed}: {verdict.wrong!r} but {naive!r}"
        found[bool(naive)] += 1
    assert min(found) > 30, found


ROWS: dict[str, str] = {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_planted_bug_is_found(mutant: Mutant) -> None:
    # The host would refuse words that some bugs leave, before the checker sees them.
    with planted(mutant), mock.patch.object(Workspace, "_refuse_words"):
        calls = cases.record([mutant.op] * 3, mutant.sizes)
    verdict = explore(build(calls, residency=mutant.residency))
    assert mutant.says in verdict.wrong, verdict.wrong or "nothing was found"
    check(cases.sequence([mutant.op] * 3, mutant.sizes), mutant.op, residency=mutant.residency)
    found = verdict.wrong.split(":")[0] if verdict.states else "without exploring: " + verdict.wrong.split(": ")[-1]
    ROWS[mutant.bug] = f"| {mutant.bug} | {mutant.op} | {found} | {verdict.states} |"


def test_the_table_of_planted_bugs_is_in_the_document() -> None:
    if len(ROWS) < len(MUTANTS):
        pytest.skip("comes with the tests of all planted bugs")
    lines = [
        "| planted bug | in | what is found | states looked at |",
        "|---|---|---|---:|",
        *(ROWS[each.bug] for each in MUTANTS),
    ]
    generated.as_written(DOCUMENT, "planted", "\n".join(lines), "FUSEDTP_PROTOCOL")


@pytest.mark.parametrize(
    ("op", "late"),
    [
        *((op, 0.0) for op in ("all_gather_matmul", "matmul_reduce_scatter", "ring", "two_shot", "decomposed")),
        ("all_gather_matmul", 1.5),
    ],
)
def test_every_order_of_what_real_ranks_do_is_right(pool: RankPool, op: str, late: float) -> None:
    """Real processes and real polls; each rank records by itself, and the recordings are combined."""
    calls = pool.run(live, op, 3, late, world_size=3)
    events = [event for kernel in calls[0][0] for events in kernel.programs for event in events]
    first_epoch = min(event.epoch for event in events if isinstance(event, Advance)) - 1
    check(calls, op, first_epoch=first_epoch)
    # The same recordings without barriers before releases, and with arrivals that release nothing.
    bare = [[[_without_barriers(kernel) for kernel in kernels] for kernels in ops] for ops in calls]
    assert " is read" in explore(build(bare, first_epoch=first_epoch)).wrong


def _without_barriers(kernel: Kernel) -> Kernel:
    programs = [
        [
            Arrive(False) if isinstance(event, Arrive) else event
            for event, after in zip(events, [*events, None][1:], strict=True)
            if not _orders(event, after)
        ]
        for events in kernel.programs
    ]
    return replace(kernel, programs=programs)


def _orders(event: Event, after: Event | None) -> bool:
    return isinstance(event, Barrier) and isinstance(after, Raise)
