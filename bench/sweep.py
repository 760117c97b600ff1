"""The sweep: every case through the gate, then the clock, on ranks of our own or on torchrun's.

A job is one case with the variants and directions to run. With a GPU for each rank all variants are timed. Otherwise
our kernels are checked at small sizes and not timed: on a CPU they run in Triton's interpreter, and ranks that share a
GPU take turns. A variant that fails its check, or a job whose ranks fail, gives a row with the failure and without
numbers. A variant that cannot run here gives a row with the reason, once for each op, world size and direction.

Ranks that hang, die or fall out of step in a provider's call are ended. The provider's row says so, the job runs again
without the provider on fresh ranks, and no later job tries the provider.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fusedtp.machine import Machine

from . import ranks
from .cases import ALONE, OWN, SCHEDULES, SEQUENTIAL
from .intervals import Timing
from .jobs import INTERPRET, Job, seconds_of, wait_seconds
from .ranks import NotJoined, RankError, RankPool
from .store import Measurement, Outcome, rows_of
from .suites import SUITE_OF, SUITES
from .timing import Verdict, gate, measure_checked

# A rank of a launcher says after this time for whom it waits.
NOTICE_SECONDS = 5.0


def run_job(group: Any, job: Job, launched: bool = False) -> list[Outcome]:
    """Run one job on this rank; collective over `group`.

    launched: the ranks are a launcher's, which ends them all if one ends. If the operands cannot be made, on a rank
    without memory for them, the job fails on all ranks. A `RankPool`'s ranks raise.
    """
    import torch
    import torch.distributed as dist

    import fusedtp
    from fusedtp.machine import gpu_state

    from .operands import device_here

    device, suite = device_here(), SUITE_OF[job.case.op]
    fusedtp.set_timeout(wait_seconds(job))
    steps = itertools.count()
    ranks.tell("")

    def at(direction: str, variant: str) -> None:
        ranks.tell(f"{next(steps)} {direction} {variant}")

    def state() -> str:
        return gpu_state(device.index) if device.type == "cuda" and job.timed else ""

    outcome = partial(
        Outcome, threads=torch.get_num_threads(), backend=str(dist.get_backend(group)), nodes=num_nodes(group)
    )  # fmt: skip
    before_gpu = state()
    outcomes, once = [], job.is_long or suite.once
    with torch.no_grad():
        if launched:
            try:
                problem, why = suite.setup(job.case, group, device), ""
            except Exception:
                why = f"rank {group.rank()} {traceback.format_exc().rstrip()}"
            reasons: list[Any] = [None] * group.size()
            dist.all_gather_object(reasons, why, group=group)
            if any(reasons):
                return failed(job, "\n\n".join(filter(None, reasons)))
        else:
            problem = suite.setup(job.case, group, device)
        for direction in job.directions:
            verdicts: dict[str, Verdict] = {}
            paths: dict[str, str] = {}
            peaks: dict[str, float | None] = {}
            variants = job.variants_of(direction)
            for variant in variants:
                at(direction, variant)
                peak = Peak(device)
                verdicts |= gate(problem, (variant,), group, direction, once=once, counted=peak)
                paths[variant], peaks[variant] = problem.said or _path(variant), peak.num_bytes
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, peaks, group=group)
            for name in peaks:
                peaks[name] = max((each[name] for each in everyone if each[name] is not None), default=None)
            correct = [name for name in variants if job.timed and not (verdicts[name].error or verdicts[name].missing)]
            runners: dict[str, Callable[[], object]] = {}
            for name in correct:
                at(direction, name)
                runners[name] = repeated(problem.runner(name, direction), suite.calls)
                if job.graph:
                    runners[name], why = captured(runners[name], group)
                    paths[name] += f"; not captured: {why}" if why else "; captured"
            before = partial(at, direction)
            found = measure_checked(
                problem, runners, group, direction, seconds=job.seconds, rounds=job.rounds, before=before
            )
            # A variant that is wrong in the timed rounds has no time.
            timings = {name: timing.each_of(suite.calls) for name, (timing, late) in found.items() if not late.error}
            verdicts |= {name: late for name, (_, late) in found.items() if late.error}
            outcomes += [
                Outcome(name, direction, not_run=verdicts[name].missing) if verdicts[name].missing
                else outcome(name, direction, verdicts[name], timings.get(name), paths[name].removeprefix("; "),
                             peak_bytes=peaks[name], graph=job.graph)
                for name in variants
            ]  # fmt: skip
            del runners
            problem.forget_runners(at)
    # Of each rank's machine, as it was before and is now; the load is that of rank 0's.
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, (before_gpu, state(), os.getloadavg()[0] if job.timed else None), group=group)
    firsts, lasts, (load, *_) = zip(*told, strict=True)
    seen = {"gpu_before": of_ranks(firsts), "gpu_after": of_ranks(lasts), "load": load}
    return [*job.absent, *(replace(each, **seen) for each in outcomes)]


def of_ranks(states: Sequence[str]) -> str:
    """Return the state of rank 0's GPU, and that of the GPU with the slowest clock if it differs: all wait for it."""
    clocks = {rank: int(found[1]) for rank, text in enumerate(states) if (found := re.match(r"SM (\d+) MHz", text))}
    slowest = min(clocks, key=clocks.__getitem__, default=0)
    if clocks.get(slowest) == clocks.get(0):
        return states[0]
    return f"{states[0]}; slowest, rank {slowest}: {states[slowest]}".removeprefix("; ")


def repeated(run: Callable[[], Any], calls: int) -> Callable[[], Any]:
    """Return a runner of so many calls in a row, each finished before the next, and the last one's results."""
    if calls == 1:
        return run

    def runs() -> Any:
        for _ in range(calls - 1):
            run()
        return run()

    return runs


def captured(run: Callable[[], Any], group: Any) -> tuple[Callable[[], Any], str]:
    """Return the replay of a call that was captured as a CUDA graph, or the call and why not; collective.

    A graph is used only if all ranks have captured it.
    """
    import torch
    import torch.distributed as dist

    graph, results, why = torch.cuda.CUDAGraph(), None, ""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        # The end of a capture that failed warns that the graph is empty.
        with warnings.catch_warnings(action="ignore"), torch.cuda.graph(graph):
            results = run()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, why, group=group)
    if why := next(filter(None, everyone), ""):
        torch.cuda.synchronize()
        return run, why

    def replay() -> Any:
        graph.replay()
        return results

    return replay, ""


class Peak:
    """Context that counts the memory that a call takes beyond what is held before it; the last call counts.

    On a GPU what torch allocates. On a CPU what is resident, by Linux, which misses what an allocator has kept.
    `num_bytes` is None where nobody counts.
    """

    def __init__(self, device: Any) -> None:
        self._device, self._held = device, 0
        self.num_bytes: float | None = None

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._held = self._resident("VmRSS")

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()
            self.num_bytes = float(torch.cuda.max_memory_allocated() - self._held)
        elif self._held:
            self.num_bytes = float(max(0, self._resident("VmHWM") - self._held))

    @staticmethod
    def _resident(name: str) -> int:
        found = re.search(rf"(?m)^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(found[1]) if found else 0


def num_nodes(group: Any) -> int:
    """Return the number of hosts of a group's ranks, by their boot and their network; collective on the first call."""
    import torch.distributed as dist

    if group.group_name not in _nodes:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = boot, os.readlink("/proc/self/ns/net")
        except OSError:
            host = socket.gethostname(), ""
        hosts: list[Any] = [None] * group.size()
        dist.all_gather_object(hosts, host, group=group)
        _nodes[group.group_name] = len(set(hosts))
    return _nodes[group.group_name]


_nodes: dict[str, int] = {}


def _path(variant: str) -> str:
    # Return the schedule that has just run, and why.
    import fusedtp

    taken = fusedtp.last_path() if variant in (*SCHEDULES, "auto") else None
    return f"{taken.schedule}: {taken.reason}" if taken else ""


def failed(job: Job, text: str) -> list[Outcome]:
    """Return the outcomes of a job whose ranks failed: no variant has a number."""
    verdict = Verdict(error=text)
    tried = [(name, direction) for direction in job.directions for name in job.variants_of(direction)]
    return [*job.absent, *(Outcome(name, direction, verdict) for name, direction in tried)]


def blamed(error: RankError) -> tuple[str, str]:
    """Return the variant and direction in which ranks first failed; ("", "") if none had begun."""
    begun = [note.split(" ", 2) for note in error.notes.values() if note]
    _, direction, variant = min(begun, key=lambda note: int(note[0]), default=["", "", ""])
    return variant, direction


def rank_environment(num_gpus: int, num_ranks: int) -> dict[str, str]:
    """Return the environment variables that ranks need before they import torch and Triton."""
    if not num_gpus:
        return dict([INTERPRET])
    # torch's symmetric memory refuses ranks that share a GPU, unless this is set.
    return {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if num_ranks > num_gpus else {}


class Budget(NamedTuple):
    """Limits of a run: its end by time.monotonic(), the most seconds of a job, and how many failures alike end it.

    What is not reached has a row that says so. least: seconds without which no job begins.
    """

    end: float
    job_seconds: float = 60.0
    least: float = 4.0
    alike: int = 3

    def refused(self, failures: Counter[str]) -> str:
        """Return why no further job begins, or "". failures: their texts without numbers."""
        if most := [text for text, count in failures.items() if count >= self.alike]:
            return f"{self.alike} failures alike: {most[0]}"
        return NOT_REACHED if self.end - time.monotonic() < self.least else ""


NOT_REACHED = "not reached: the run's time is over"


def run_spawned(
    jobs: Sequence[Job], machine: Machine, done: Callable[[Job, list[Measurement]], None], launches: int = 1, *,
    budget: Budget | None = None, env: Mapping[str, str] | None = None,
) -> list[Measurement]:  # fmt: skip
    """Run the jobs on ranks started here; `done` is called with the rows of each.

    launches: how often to run the timed jobs, each time on fresh ranks. Rows have the rounds of all launches so far.
    env: of the ranks, beside `rank_environment`.
    """
    num_ranks = max(job.case.world_size for job in jobs)
    env = rank_environment(machine.num_gpus, num_ranks) | dict(env or {})
    failures = Counter[str]()
    rows: dict[int, list[Measurement]] = {}
    outcomes_of: dict[int, list[list[Outcome]]] = {}
    # Providers in whose calls ranks failed, and the case.
    lost: dict[str, str] = {}
    for launch in range(launches):
        # All jobs, then all again: what drifts from minute to minute is then part of the spread over launches.
        with RankPool(num_ranks, timeout=max(seconds_of(job) for job in jobs), env=env) as pool:
            for at, job in enumerate(jobs):
                if launch and not job.timed:
                    continue
                if budget and (why := budget.refused(failures)):
                    outcomes = [Outcome(name, each, not_run=why) for each in job.directions for name in job.variants]
                else:
                    outcomes = run_on(pool, job, lost, budget)
                outcomes_of.setdefault(at, []).append(outcomes)
                rows[at] = rows_of(job.case, together(outcomes_of[at]), machine)
                if errors := [each.verdict.error for each in outcomes if each.verdict and each.verdict.error]:
                    failures.update({_without_numbers(error) for error in errors})
                    # A workspace that lost a peer refuses further use, which would fail the next job too.
                    pool.close()
                done(job, rows[at])
    return [row for new in rows.values() for row in new]


def _without_numbers(error: str) -> str:
    return re.sub(r"[0-9.e+-]*[0-9]", "#", error.strip().splitlines()[-1])[:200]


def together(launches: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Return the outcomes of several launches of one job as one of all rounds, or as the first one without a time."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in (outcome for outcomes in launches for outcome in outcomes):
        found.setdefault((outcome.variant, outcome.direction), []).append(outcome)
    joined = []
    for turns in found.values():
        untimed = [outcome for outcome in turns if outcome.timing is None]
        timings = [outcome.timing for outcome in turns if outcome.timing]
        joined.append(untimed[0] if untimed else replace(turns[0], timing=Timing.together(timings)))
    return joined


def run_on(pool: RankPool, job: Job, lost: dict[str, str], budget: Budget | None = None) -> list[Outcome]:
    """Run a job without the providers in `lost`, to which those are added in whose calls ranks fail.

    A variant of ours in whose calls ranks fail is left out of this job alone: the others keep their times, if the
    budget has time to run them again.
    """
    left = job
    for name in lost:
        left = left.without(name, f"not tried again: it failed at {lost[name]}")
    while True:
        if budget:
            if why := budget.refused(Counter()):
                rest = [(each, name) for each in left.directions for name in left.variants_of(each)]
                return [*left.absent, *(Outcome(name, each, not_run=why) for each, name in rest)]
            left = replace(left, patience=min(budget.job_seconds, budget.end - time.monotonic()))
        try:
            outcomes: list[Outcome] = pool.run(run_job, left, world_size=job.case.world_size, timeout=seconds_of(left))[
                0
            ]
            return outcomes
        except RankError as error:
            name, direction = blamed(error)
            if name in ALONE or name == "unfused" or name not in left.variants:
                return failed(left, str(error))
            text = f"{name} failed at {job.case}, {direction}: {error}"
            left = left.without(name, Verdict(error=text))
            if name not in OWN and job.case.op != "kernel":
                lost[name] = str(job.case)


class Launched(NamedTuple):
    """This process as one rank of several that a launcher, or a cluster, has started."""

    rank: int
    world_size: int
    host: str
    port: int
    # Ranks on this node.
    local: int

    def num_gpus(self, on_node: int) -> int:
        """Return the GPUs of all ranks, given those of this node: one for each, or fewer if ranks share them."""
        return self.world_size if on_node >= self.local else on_node

    def __str__(self) -> str:
        return f"fusedtp takes itself for rank {self.rank} of {self.world_size}, as RANK and WORLD_SIZE are set"


REMEDY = "`env -u RANK -u WORLD_SIZE fusedtp sweep` starts ranks of its own"


def launched() -> Launched | None:
    """Return this process as a launcher such as torchrun sees it, or None if RANK or WORLD_SIZE is not set.

    ValueError for an incomplete or impossible environment.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    numbers: dict[str, int] = {}
    for name, least, most in (("WORLD_SIZE", 1, 2**31 - 1), ("RANK", 0, 2**31 - 1), ("MASTER_PORT", 0, 65535)):
        text = os.environ.get(name)
        most = numbers["WORLD_SIZE"] - 1 if name == "RANK" else most
        if text is None or not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            unset = "is not set, while RANK and WORLD_SIZE are"
            told = unset if text is None else f"must be an integer from {least} to {most}, got {text!r}"
            raise ValueError(f"{name} of the environment {told}; {REMEDY}")
        numbers[name] = int(text)
    if not (host := os.environ.get("MASTER_ADDR")):
        raise ValueError(f"MASTER_ADDR of the environment is not set, while RANK and WORLD_SIZE are; {REMEDY}")
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    local_size = int(local) if re.fullmatch("[0-9]{1,9}", local) and int(local) else numbers["WORLD_SIZE"]
    return Launched(numbers["RANK"], numbers["WORLD_SIZE"], host, numbers["MASTER_PORT"], local_size)


def join(here: Launched, jobs: Sequence[Job]) -> None:
    """Make the default process group with the launcher's other ranks. NotJoined, with the absent ranks, if they fail.

    After some seconds, says on standard error for whom it waits.
    """
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    else:
        os.environ.setdefault(*INTERPRET)
    seconds = max(seconds_of(job) for job in jobs)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=_met(here, seconds),
            rank=here.rank,
            world_size=here.world_size,
            timeout=timedelta(seconds=seconds),
        )
    except NotJoined:
        raise
    except RuntimeError as error:
        raise NotJoined(f"{here}, and cannot join the others: {_first_line(error)}; {REMEDY}") from error


def _met(here: Launched, seconds: float) -> Any:
    """Return the ranks' store, which rank 0 or the launcher hosts, when all ranks have come to it."""
    import torch.distributed as dist

    at, begin, noticed = f"{here.host}:{here.port}", time.monotonic(), False

    def wait(whom: str, why: str = "") -> None:
        nonlocal noticed
        waited = time.monotonic() - begin
        if waited > seconds:
            raise NotJoined(f"{here}, and {whom} has not come to {at} within {seconds:.0f} s{why}; {REMEDY}")
        if waited > NOTICE_SECONDS and not noticed:
            noticed = True
            told = f"{here}, and waits for {whom} at {at}, {seconds:.0f} s at most"
            print(f"{told}; {REMEDY}", file=sys.stderr, flush=True)
        time.sleep(0.1)

    hosts = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not hosts:
        try:
            # torch's own attempts would write to standard error, and Ctrl-C would not end them.
            socket.create_connection((here.host, here.port), timeout=2.0).close()
            break
        except OSError as error:
            wait("rank 0" if here.rank else "its launcher", f" ({error.strerror or error})")
    limit = timedelta(seconds=seconds)
    try:
        host = "localhost" if hosts else here.host
        whole = dist.TCPStore(  # type: ignore[attr-defined]
            host, here.port, is_master=hosts, timeout=limit, wait_for_workers=False
        )
        # A launcher that starts ranks anew keeps its store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"fusedtp/{attempt}", whole)  # type: ignore[attr-defined]
        store.set(f"rank {here.rank}", "")
        while absent := [str(rank) for rank in range(here.world_size) if not store.check([f"rank {rank}"])]:
            wait(f"rank {', '.join(absent)}")
    except dist.DistError as error:
        raise NotJoined(f"{here}, and has no store at {at}: {_first_line(error)}; {REMEDY}") from error
    return store


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def bounded(seconds: float, what: str) -> Iterator[None]:
    """End this process if the body takes longer than `seconds`, with its stacks and last note on standard error.

    For ranks of a launcher, which ends the others when one rank ends.
    """

    def end() -> None:
        print(
            f"{what}: no answer within {seconds:g} s, at {ranks.last_note or 'its start'}", file=sys.stderr, flush=True
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Variants whose ranks reach each other's memory: ours, and those of torch.
OVER_MEMORY = (
    SEQUENTIAL, *SCHEDULES[1:], "torch_symm_mem", "async_tp", "tree", "switch", *SUITES["collectives"].others
)  # fmt: skip


def run_launched(
    jobs: Sequence[Job], machine: Machine, done: Callable[[Job, list[Measurement]], None]
) -> list[Measurement]:
    """Run the jobs as one rank of a launcher, after `join`.

    Every rank calls this with the same jobs; rank 0 gets the rows. Where ranks do not share memory, as on several
    nodes, what needs that is not run.
    """
    import torch.distributed as dist

    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # Each rank planned its own jobs, so use those of rank 0.
        agreed: list[Any] = [list(jobs)]
        dist.broadcast_object_list(agreed, 0)
        jobs = agreed[0]
        groups = {size: dist.new_group(list(range(size))) for size in sorted({job.case.world_size for job in jobs})}
        apart: dict[int, str] = {}
        rows: list[Measurement] = []
        for job in jobs:
            size = job.case.world_size
            if rank < size <= world_size:
                with bounded(seconds_of(job), str(job.case)):
                    if size not in apart:
                        apart[size] = _apart(groups[size])
                    for name in [each for each in job.variants if each in OVER_MEMORY] if apart[size] else ():
                        job = job.without(name, apart[size])
                    new = rows_of(job.case, run_job(groups[size], job, launched=True), machine)
                rows += new
                done(job, new)
            # Ranks outside the group must not start the next job's barrier while this job is timed.
            dist.barrier()
        return rows
    finally:
        dist.destroy_process_group()


def _apart(group: Any) -> str:
    # Return why the ranks of a group do not share memory, "" if they do; collective.
    from fusedtp.workspaces import registry

    from .operands import device_here

    if group.size() == 1:
        return ""
    reached, detail = registry.reachable(group, device_here())
    return "" if reached else f"ranks do not share memory: {detail.splitlines()[0]}"
