"""How long others' collectives take by themselves: the library's, and sums made in the switch. Closed forms.

S bytes over n ranks, whole; W the link; microseconds. The library is NCCL, the fastest of its ways on one domain:

    gather, scatter   ring of short messages (LL)      start + (n-1) ll_hop + (n-1) S / (n W ll_fraction)
                      ring of long ones (Simple)       start + (n-1) simple_hop + (n-1) S / (n W collective_fraction)
                      in the switch (NVLS)             start + switch_start + S / (W switch_fraction)
    all-reduce        tree of short messages (LL)      start + 2 log2 n ll_hop + 2 (n-1) S / (n W ll_fraction)
                      ring of long ones (LL128)        start + 2 (n-1) ll128_hop + 2 (n-1) S / (n W collective_fraction)
                      in the switch (NVLS)             start + switch_start + (n+1) S / (n W switch_fraction)

Short messages carry a flag with each word, which costs bandwidth instead of latency. In the switch a rank's link
carries all of what it has once towards the sum, which the switch makes, and 1/n of the sums back. Where the machine's
switch cannot (`switch_fraction` of None) the last way is not there. NCCL takes its choice by a table of its own, which
is not always the fastest: its times between 2 and 4 MB are up to 14 % longer.

The latencies of hops are what NCCL's own choice goes by; what else was fitted to which rows is said in `hardware`.
"""

from __future__ import annotations

from math import ceil, log2

from .hardware import Hardware


def library_us(kind: str, num_bytes: float, num_ranks: int, machine: Hardware) -> float:
    """A collective of `num_bytes`, whole, among ranks that reach each other; kind: gather, scatter or all_reduce."""
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
    """The same by a kernel that reads sums from the switch and stores to all at once (multimem), timed by itself.

    Two waits of everybody for everybody, a signal and a poll each. None where the switch cannot. Of what it takes in a
    kernel of `fused` see `overlap.Model.in_switch`.
    """
    if machine.multicast_fraction is None or machine.multicast_sum_fraction is None:
        return None
    n, sums = num_ranks, kind == "all_reduce"
    fraction = machine.multicast_sum_fraction if sums else machine.multicast_fraction
    carried = num_bytes * ((n + 1) / n if sums else 1)
    waits = 2 * (machine.flag_us + machine.poll_us)
    return machine.lone_us + waits + carried / (machine.link(n) * fraction)


def elementwise_us(num_bytes: float, machine: Hardware) -> float:
    """A kernel that reads and writes `num_bytes` of its memory together, timed by itself."""
    return machine.lone_us + num_bytes / (machine.memory_gbps * 1e3 * machine.reduce_fraction)
