"""The command of `nox -s soak`: run `runs` with the given options and print progress."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from fusedtp.bench import arguments
from fusedtp.bench.ranks import RankError, RankPool

from .endurance import check_flat, check_wrapped, growth
from .runs import SAMPLES, run_programs, soak


def command(
    calls: Annotated[int, typer.Option(min=1, help="How many calls.")] = 10_000,
    seed: Annotated[int | None, typer.Option(help="Which calls; by default others every time.")] = None,
    world_size: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 4,
    shapes: Annotated[int | None, typer.Option(min=1, help="Different shapes; by default a quarter of calls.")] = None,
    first: Annotated[int, typer.Option(min=0, help="The number of the first call, to begin again near a failure.")] = 0,
    programs: Annotated[bool, typer.Option("--programs", help="Random programs; --first is one's number.")] = False,
) -> None:
    """Make thousands of mixed calls, check every result, and that neither memory nor descriptors grow."""
    seed = secrets.randbelow(10**9) if seed is None else seed
    typer.echo(f"seed {seed}: {calls} calls from {first} on {world_size} ranks")
    try:
        if programs:
            with RankPool(world_size, timeout=300.0) as pool:
                counts = run_programs(pool, calls, seed, first=first, say=typer.echo)
            typer.echo("\n".join(f"{count:8d}  {what}" for what, count in sorted(counts.items())))
            return
        with RankPool(world_size, timeout=300.0) as pool:
            by_rank = soak(pool, calls, seed, num_shapes=shapes, first=first, say=typer.echo)
    except RankError as error:
        typer.echo("\n".join([str(error), "", *error.__notes__]), err=True)
        raise typer.Exit(1) from error
    # A replay, of a few calls near a failure, ends before memory is flat.
    if calls >= SAMPLES and first == 0:
        check_wrapped(by_rank)
        check_flat(by_rank)
        for rank, samples in enumerate(by_rank):
            grown_bytes, _ = growth(samples)
            typer.echo(f"rank {rank}: {grown_bytes / 2**20:+.2f} MiB from the second quarter to the last")


if __name__ == "__main__":
    arguments.run(command)
