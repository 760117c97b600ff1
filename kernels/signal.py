"""Signals between ranks: the arena's header, and the only device code that waits for or signals another rank.

Every rank owns one arena: a header, one int32 signal per (slot, source rank), and two halves of data. `peers` is an
int64 table in device memory: the address of every rank's arena as seen from here, then that of the host block, then one
of all arenas together (`multicast`).

Ordering. A producer stores, passes a CTA barrier, and releases a signal at system scope. A consumer acquires the signal
at system scope before it loads. A signal holds the epoch, an int32 that grows by one with every op. Epochs are compared
by wrapping subtraction: nothing is ever reset, and a captured graph can be replayed. A wait ends when the slot is less
than `LEAD` ahead of the wait's epoch; a peer is at most one ahead. A slot last raised 2^31 epochs ago or more looks
later by its sign, but counts as old as long as it is `LEAD` or more ahead. An op at epoch e uses half e % 2.

Reuse. `enter` tells every peer that this rank has begun epoch e. `leave` does not let an op end before every peer has
begun it too. So a rank at epoch e + 2 knows that its peers have left epoch e, and may write their half e % 2 without
asking.

Agreement. With its entry a rank gives every peer a fingerprint: 64 bits, made by the host, of all that ranks must agree
on for the op. Even and odd epochs have a place each, like the halves. `leave` compares fingerprints, and so does a long
wait. If a peer's fingerprint differs, this rank reports that like a timeout, and the hosts exchange their meanings. The
entry then stands, so that every rank finds out. `leave` still waits for the peers to begin the op: a peer may still be
in the previous op, which is legal.

Bounded waits. The host block holds a clock in milliseconds that the host advances, as a program cannot read the time
portably. A wait whose budget is spent reports itself in the host block and falls through; the host raises PeerTimeout
from the report. One thread reads the inputs of every decision of a wait, such as clock, budget and epoch, and tells the
others (`read`). Before a timeout falls through, it takes this rank's `enter` back from every peer, and this rank enters
no more. So no peer can end this op or a later one, and no peer returns results of this rank from then on: this rank
passes on NaN for missing data, and two epochs later may write to a half that a late peer still reads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)

# Upper bound of the numbers by which kernels and reports know an op.
NUM_OPS = tl.constexpr(16)

# Header words (int32) of an arena. Kernels use only those of their own rank. Hosts read their peers' too.
EPOCH = tl.constexpr(0)  # the last op that this rank has finished
ARRIVED = tl.constexpr(1)  # programs of the running kernel that have come to `finish` or `leave`
BUDGET_MS = tl.constexpr(2)
WAITING_FOR = tl.constexpr(3)  # 1 + a rank that some program has been waiting for, or 0
# 0, or 1 + the rank whose signal a wait gave up on, or DIFFERS or OVER. Unless 0, the workspace is not used again.
GIVEN_UP = tl.constexpr(4)
DIFFERS = tl.constexpr(1 << 16)  # the ranks disagree about the running op: only the waits of its `leave` go on
OVER = tl.constexpr(1 << 17)  # after DIFFERS: the op has ended, or a wait of its `leave` was given up; no wait goes on
WAITING_SLOT = tl.constexpr(5)  # the slot that the program of WAITING_FOR waits on
# Why this rank raises no more signals: 1 destroyed, 2 an exception left an op, 3 creation broken off; or 0.
LEFT = tl.constexpr(6)
# This rank's GPU (`hardware.number_of`): all ranks use rank 0's. On a CPU 1 if the rank interprets kernels, else 0.
HARDWARE = tl.constexpr(7)
GROWING = tl.constexpr(10)  # steps that this rank has taken in growing the workspace; for hosts only
OUTCOME = tl.constexpr(11)  # two words, the outcome of the last growth on this rank; for hosts only
TICKETS = tl.constexpr(13)  # turns that programs of the running kernel have taken, if they take any
SIGNALS = tl.constexpr(16)  # the signal of (slot, source) is word SIGNALS + slot * world_size + source

# Four slots hold fingerprints instead of signals, 64 bits a source: those of even epochs, then those of odd epochs.
# These slots come first, so that every fingerprint is aligned.
FINGERPRINT_SLOT = tl.constexpr(0)
ENTRY_SLOT = tl.constexpr(4)  # "this rank has begun the epoch"
FIRST_SLOT = tl.constexpr(5)  # first slot of an op's own signals
GROWTH_SLOT = tl.constexpr(-1)  # in WAITING_SLOT: the wait is for GROWING, not for a signal

# A signal this far or farther ahead of the wait's epoch counts as old. A peer is at most one ahead; the rest of the
# range is for timing a kernel with all signals raised in advance.
LEAD = tl.constexpr(1 << 20)

# Words (int32) of the host block, which is in host memory, one for each workspace.
CLOCK_MS = tl.constexpr(0)
REPORT = tl.constexpr(1)  # 0, or 1 + the peer of a wait that was given up; written after the words below
REPORT_WAIT = tl.constexpr(2)  # slot * NUM_OPS + the op's number
REPORT_EXPECTED = tl.constexpr(3)
REPORT_SEEN = tl.constexpr(4)
BEGUN = tl.constexpr(5)  # the epoch that the stream of a lane has begun, and the one that it has ended
ENDED = tl.constexpr(6)
HOST_WORDS = 16

# Ranks that one instruction signals, a lane each: a warp's, which execute one fence. Not the number of ranks, which is
# no constant in kernels that give their link a name.
LANES = tl.constexpr(32)

# Polls before the first look at the clock, and between two looks: each is a trip to host memory on a GPU. Most waits
# end before the first. Interpreted polls sleep up to 4 ms.
POLLS_PER_LOOK = tl.constexpr(16 if INTERPRETED else 32)


class RankGroup(NamedTuple):
    """The ranks' arenas as a launch passes them: their table, the place of the halves, and the op's number."""

    peers: tl.tensor
    half_bytes: tl.tensor
    data_offset: tl.tensor
    WORLD_SIZE: tl.constexpr
    OP: tl.constexpr


class Link(NamedTuple):
    """A program's link to its peers: their arenas, its rank, the op's epoch and fingerprint.

    END: any constant, as in every tuple that holds tuples. Triton 3.6 keeps a tuple's type as of the last of its own
    fields that was set, constants last. Without END the constants of inner tuples are lost in the next loop.
    """

    group: RankGroup
    rank: tl.tensor
    epoch: tl.tensor
    fingerprint: tl.tensor
    END: tl.constexpr


@triton.jit
def cdiv(a, b):
    """Return a / b rounded up; `tl.cdiv` is a nested call, which takes the interpreter a millisecond."""
    return (a + b - 1) // b


@triton.jit
def header(group, rank):
    """Return the pointer to the int32 words at the start of `rank`'s arena."""
    return tl.load(group.peers + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def read(word):
    """Return an integer that others write: one thread reads it and tells all, so that all decide alike.

    A plain load, whatever its cache modifier, is made by every thread. When the word changes, some warps see the old
    value and some the new one. They then leave a loop at different times and meet at different barriers.
    """
    return tl.atomic_add(word, 0, sem="relaxed", scope="sys")


@triton.jit
def begin(group, rank):
    """Return the epoch of the op that this program belongs to."""
    return read(header(group, rank) + EPOCH) + 1


@triton.jit
def raise_signal(link, dst, slot):
    """Release everything that this program has stored to rank `dst`, under `slot`."""
    # The release orders one thread's stores. The barrier puts the whole program's stores before it.
    tl.debug_barrier()
    signal = header(link.group, dst) + SIGNALS + slot * link.group.WORLD_SIZE + link.rank
    tl.atomic_xchg(signal, link.epoch, sem="release", scope="sys")


@triton.jit
def lanes(link, first):
    """Return a lane for each rank from `first` on, the mask of lanes that are ranks, and their arenas' headers."""
    ranks = first + tl.arange(0, LANES)
    mask = ranks < link.group.WORLD_SIZE
    return ranks, mask, tl.load(link.group.peers + ranks, mask=mask).to(tl.pointer_type(tl.int32))


@triton.jit
def raise_lanes(link, headers, slots, mask):
    """Release what was stored before the last barrier under each lane's slot: one instruction, and one fence."""
    signals = headers + SIGNALS + slots * link.group.WORLD_SIZE + link.rank
    tl.atomic_xchg(signals, link.epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def raise_to_all(link, slot, WITH_OWN: tl.constexpr = False):
    """Release everything that this program has stored to every peer, or with WITH_OWN to every rank, under `slot`.

    One exchange of a lane for each rank: the fence is executed once, and the signals travel side by side. Raised one
    after another, each signal waits for a fence of its own, which takes a round trip to the peers.
    """
    tl.debug_barrier()
    for first in range(0, link.group.WORLD_SIZE, LANES):
        ranks, mask, headers = lanes(link, first)
        if not WITH_OWN:
            mask &= ranks != link.rank
        raise_lanes(link, headers, slot, mask)


@triton.jit
def fingerprint_of(link, words, src):
    """Return the pointer at which the rank of header `words` finds the fingerprint of `src` for this epoch."""
    place = (FINGERPRINT_SLOT + 2 * (link.epoch & 1)) * link.group.WORLD_SIZE + 2 * src
    return (words + SIGNALS + place).to(tl.pointer_type(tl.int64))


@triton.jit
def _store_fingerprints(link):
    # Atomic, as two kernels of one op may enter side by side. The cast is for the interpreter, which takes a small
    # number for an int32. The own copy is for the host, which may have issued other ops by the time it is asked about
    # this op.
    for first in range(0, link.group.WORLD_SIZE, LANES):
        _, mask, headers = lanes(link, first)
        places = fingerprint_of(link, headers, link.rank)
        tl.atomic_xchg(places, link.fingerprint.to(tl.int64), mask=mask, sem="relaxed", scope="sys")


@triton.jit
def disagrees(link, src):
    """Return 1 if rank `src`, whose entry has been seen, means another op than this rank, else 0."""
    theirs = read(fingerprint_of(link, header(link.group, link.rank), src))
    return (theirs != link.fingerprint.to(tl.int64)).to(tl.int32)


@triton.jit
def _entered_otherwise(link, words, src):
    # 1 if rank `src` has entered this epoch with another op than this rank, else 0.
    entered = tl.atomic_add(words + SIGNALS + ENTRY_SLOT * link.group.WORLD_SIZE + src, 0, sem="acquire", scope="sys")
    return disagrees(link, src) * (((entered - link.epoch) & -LEAD) == 0).to(tl.int32)


@triton.jit
def fenced(FENCE: tl.constexpr, index, ok):
    """Return `index`, passed through a proxy fence after the wait that gave `ok`: no use moves before the fence."""
    if _INTERPRETED:
        return index
    else:
        # Triton has no op for these fences.
        return tl.inline_asm_elementwise(
            FENCE + "; mov.b32 $0, $1;", "=r,r,r", [index, ok], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def before_descriptor(index, ok):
    """Return `index` after a fence, as a coordinate of a descriptor's load after a wait; `ok`: the wait's result.

    Such a load runs in the asynchronous proxy, which an acquire does not order: a proxy fence must follow the acquire
    (PTX ISA, "Memory consistency model", proxies). Nothing else emits that fence. The coordinate passes through the
    fence, so no load can move before it.
    """
    return fenced("fence.proxy.async.global", index, ok)


@triton.jit
def _give_up(link, words, host, src, slot, seen, stands):
    # Only atomics, so that one thread does all of it. A barrier here, inside the loop over tiles, would keep the
    # compiler from pipelining that loop.
    #
    # Unless the entry stands, every wait that gives up takes the entry back, as another wait may not have done so yet.
    # The entry gets an epoch so old that no later op of a peer accepts it either.
    #
    # Not `range`: the compiler would unroll it and keep every peer's address in registers from tile to tile. It would
    # also keep the epoch and the stored constants. So the epoch is read again, and the constants are computed from
    # values that vary.
    epoch = begin(link.group, link.rank)
    dst = (link.rank + 1 - stands) % link.group.WORLD_SIZE
    while dst != link.rank:
        entry = header(link.group, dst) + SIGNALS + ENTRY_SLOT * link.group.WORLD_SIZE
        tl.atomic_xchg(entry + link.rank, epoch - LEAD, sem="release", scope="sys")
        dst = (dst + 1) % link.group.WORLD_SIZE
    _report(link, words, host, src, slot, seen, epoch, (src + 1) * (1 - stands) + DIFFERS * stands)
    if stands == 0:
        tl.atomic_cas(words + GIVEN_UP, DIFFERS, OVER, sem="relaxed", scope="gpu")


@triton.jit
def _report(link, words, host, src, slot, seen, epoch, why):
    # Only the first report is written. REPORT is released after the other words.
    if tl.atomic_cas(words + GIVEN_UP, 0, why, sem="relaxed", scope="gpu") == 0:
        tl.atomic_xchg(host + REPORT_WAIT, slot * NUM_OPS + link.group.OP, sem="relaxed", scope="sys")
        tl.atomic_xchg(host + REPORT_EXPECTED, epoch, sem="relaxed", scope="sys")
        tl.atomic_xchg(host + REPORT_SEEN, seen, sem="relaxed", scope="sys")
        tl.atomic_xchg(host + REPORT, src + 1, sem="release", scope="sys")


@triton.jit
def wait(link, src, slot, ENDS: tl.constexpr = -1):
    """Wait until rank `src` has raised `slot` here for this epoch; return 1, or 0 if the wait was given up.

    ENDS: the bits of GIVEN_UP that end the wait.
    Waits for: `raise_signal(dst=this rank, slot)` on rank `src`.
    """
    words = header(link.group, link.rank)
    signal = words + SIGNALS + slot * link.group.WORLD_SIZE + src
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    # Not 0 <= seen - epoch < LEAD.
    if ((seen - link.epoch) & -LEAD) != 0:
        host = tl.load(link.group.peers + link.group.WORLD_SIZE).to(tl.pointer_type(tl.int32))
        # A rank that has given up does not wait again, in this op or in a later one.
        given_up = read(words + GIVEN_UP) & ENDS
        waiting = (given_up == 0).to(tl.int32)
        polls = 0
        start = 0
        differs = 0
        while (((seen - link.epoch) & -LEAD) != 0) & (waiting != 0):
            polls += 1
            if polls % POLLS_PER_LOOK == 0:
                tl.store(words + WAITING_SLOT, slot)
                tl.store(words + WAITING_FOR, src + 1)
                given_up = read(words + GIVEN_UP) & ENDS
                now = read(host + CLOCK_MS)
                budget = read(words + BUDGET_MS)
                # The time counts from the first look on.
                start = tl.where(polls == POLLS_PER_LOOK, now, start)
                polls = POLLS_PER_LOOK
                differs = _entered_otherwise(link, words, src)
                waiting = ((given_up == 0) & (now - start < budget) & (differs == 0)).to(tl.int32)
            # Poll after the look at the clock: a rank that was stopped in between finds what arrived meanwhile.
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
        if ((seen - link.epoch) & -LEAD) != 0:
            stands = differs | ((given_up & (DIFFERS | OVER)) != 0).to(tl.int32)
            _give_up(link, words, host, src, slot, seen, stands)
        else:
            tl.store(words + WAITING_FOR, 0)
    return (((seen - link.epoch) & -LEAD) == 0).to(tl.int32)


@triton.jit
def or_nan(x, ok):
    """Return x, or NaN everywhere if `ok` is 0, which means that a wait was given up."""
    # The interpreter has no constant in bfloat16, nor the compiler one in float8.
    return tl.where(ok != 0, x, tl.cast(float("nan"), tl.float32).to(x.dtype))


@triton.jit
def enter(link):
    """Tell every peer that this rank has begun the epoch.

    One program of an op's first kernel does this before it waits; no program that begins before it waits either. A rank
    that has given up enters no more: its host may have issued ops before it learned of that.
    """
    if read(header(link.group, link.rank) + GIVEN_UP) == 0:
        _store_fingerprints(link)
        raise_to_all(link, ENTRY_SLOT)


@triton.jit
def turn(link, num_programs):
    """Return how many programs of this kernel have begun before this one: 0, 1, .. num_programs - 1, once each.

    A program may wait for those before it, which are running or over, in whatever order a device starts programs.
    """
    tickets = header(link.group, link.rank) + TICKETS
    place = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    if place == num_programs - 1:
        # No program takes another ticket before the next kernel.
        tl.store(tickets, 0)
    return place


@triton.jit
def arrives_last(link, num_programs):
    """Return whether this program is its kernel's last to arrive; it then sees what all programs have stored before.

    Every program calls this once, at its end.
    """
    arrivals = header(link.group, link.rank) + ARRIVED
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == num_programs - 1:
        # No program arrives again before the next kernel.
        tl.store(arrivals, 0)
    return arrived == num_programs - 1


@triton.jit
def finish(link, num_programs, slot):
    """Release everything that all programs of this kernel have stored to every peer, under `slot`.

    Every program calls this once, at its end, if the next kernel on the peers waits for all of it: one fence at system
    scope for the kernel, none for a tile.
    """
    if arrives_last(link, num_programs):
        raise_to_all(link, slot)


@triton.jit
def leave(link, num_programs):
    """End the op: the last program to arrive waits for every peer's `enter` and advances the epoch.

    Every program of an op's last kernel calls this once.
    Waits for: `enter` on every peer.
    """
    if arrives_last(link, num_programs):
        words = header(link.group, link.rank)
        differs = 0
        for i in range(1, link.group.WORLD_SIZE):
            src = (link.rank + i) % link.group.WORLD_SIZE
            if wait(link, src, ENTRY_SLOT, ~DIFFERS) != 0:
                if disagrees(link, src) != 0:
                    host = tl.load(link.group.peers + link.group.WORLD_SIZE).to(tl.pointer_type(tl.int32))
                    _report(link, words, host, src, ENTRY_SLOT, link.epoch, link.epoch, DIFFERS)
                    differs = 1
        if differs != 0:
            # Every peer has begun this op or never will: no peer still reads the half that a later op writes.
            tl.atomic_cas(words + GIVEN_UP, DIFFERS, OVER, sem="relaxed", scope="gpu")
        tl.store(words + EPOCH, link.epoch)


@triton.jit
def half(link, rank, dtype: tl.constexpr):
    """Return the start of this epoch's half of `rank`'s arena, as a 16-byte aligned pointer to `dtype`."""
    begin = link.group.data_offset + (link.epoch & 1).to(tl.int64) * link.group.half_bytes
    address = tl.load(link.group.peers + rank) + begin
    # An address from a table has no known alignment; without the hint every store to a peer is 2 bytes wide.
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
