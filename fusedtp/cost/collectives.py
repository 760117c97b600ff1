"""Closed forms of the time that a collective takes alone: NCCL's, and ours through the NVLink switch.

S is the bytes of the whole tensor, n the number of ranks, W the link. Times are microseconds. The library is NCCL
inside one domain, with its fastest algorithm:

    gather, scatter   ring of short messages (LL)      start + (n-1) ll_hop + (n-1) S / (n W ll_fraction)
                      ring of long ones (Simple)       start + (n-1) simple_hop + (n-1) S / (n W collective_fraction)
                      in the switch (NVLS)             start + switch_start + S / (W switch_fraction)
    all-reduce        tree of short messages (LL)      start + 2 log2 n ll_hop + 2 (n-1) S / (n W ll_fraction)
                      ring of long ones (LL128)        start + 2 (n-1) ll128_hop + 2 (n-1) S / (n W collective_fraction)
                      in the switch (NVLS)             start + switch_start + (n+1) S / (n W switch_fraction)

Short messages carry a flag with each word: less latency, less bandwidth. In an all-reduce in the switch, the link of a
rank carries the whole tensor once to the switch, and 1/n of the sums back. A machine whose `switch_fraction` is None
has no NVLS. NCCL chooses by a table of its own, which is not always the fastest: between 2 and 4 MB its times are up to
14 % longer than these.

The hop latencies are those of NCCL's own tuning; `hardware` says what else was fitted to which rows.
"""

from __future__ import annotations

from math import ceil, log2

from .hardware import Hardware


def library_us(kind: str, num_bytes: float, num_ranks: int, machine: Hardware) -> float:
    """Return the microseconds of the library's collective of `num_bytes`, whole, among ranks that reach each other."""
    n, sums = num_ranks, kind == "all_reduce"
    link = machine.link(n)
    sent = (2 if sums else 1) * (n - 1) / n * num_bytes / link
    if machine.in_place:
        hops = 2 * ceil(log2(n)) if sums else n - 1
        return machine.collective_start_us + hops * machine.flag_us + sent / machine.collective_fraction
    short, long = sent / machine.ll_fraction, sent / machine.collective_fraction
    if sums:
        ways = [2 * ceil(log2(n)) * machine.ll_hop_us + short, 2 * (n - 1) * machine.ll128_hop_us + long]
    else:
        ways = [(n - 1) * machine.ll_hop_us + short, (n - 1) * machine.simple_hop_us + long]
    if machine.switch_fraction is not None:
        carried = num_bytes * ((n + 1) / n if sums else 1)
        ways.append(machine.switch_start_us + carried / link / machine.switch_fraction)
    return machine.collective_start_us + min(ways)


def multicast_us(kind: str, num_bytes: float, num_ranks: int, machine: Hardware) -> float | None:
    """Return the microseconds of the collective as one multimem kernel, or None if the switch cannot add and multicast.

    The kernel reads sums from the switch and stores to all ranks at once. It is timed alone, with two waits of all
    ranks for all ranks, a signal and a poll each. `overlap.Model.in_switch` is the time inside `fused`.
    """
    if machine.multicast_fraction is None or machine.multicast_sum_fraction is None:
        return None
    n, sums = num_ranks, kind == "all_reduce"
    fraction = machine.multicast_sum_fraction if sums else machine.multicast_fraction
    carried = num_bytes * ((n + 1) / n if sums else 1)
    waits = 2 * (machine.flag_us + machine.poll_us)
    return machine.lone_us + waits + carried / (machine.link(n) * fraction)


def elementwise_us(num_bytes: float, machine: Hardware) -> float:
    """Return the microseconds of a lone kernel whose memory reads and writes sum to `num_bytes`."""
    return machine.lone_us + num_bytes / (machine.memory_gbps * 1e3 * machine.reduce_fraction)
