"""Which schedule wins where, by how much, from which size on: in numbers and in sentences.

A case is won or lost where the interval of its speed-up leaves out 1; what is between is a tie.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from .frames import BASELINE, compared, parts, records, timed


def crossover(ratios: Sequence[float], where: Sequence[str]) -> str:
    """From which size on a speed-up is at least 1, in words; sizes in the order of their arithmetic."""
    wins = [ratio >= 1.0 for ratio in ratios]
    if all(wins) or not any(wins):
        return "always" if all(wins) else "never"
    if not wins[-1]:
        return f"at {sum(wins)} of {len(wins)}, not the largest"
    return f"from {where[len(wins) - wins[::-1].index(False)]}"


def standings(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Every schedule against unfused over the cases on two ranks or more that share these columns, a line each."""
    from scipy import stats

    lines = []
    for key, members in parts(compared(frame), *columns, "variant"):
        ratios = members["speedup"]
        least = min(records(members), key=lambda line: line["speedup"])
        won, lost = (members["low"] > 1).sum(), (members["high"] < 1).sum()
        line = dict(zip((*columns, "schedule"), key, strict=True))
        line |= {"cases": len(members), "faster": won, "same": len(members) - won - lost, "slower": lost}
        line |= {
            "mean": stats.gmean(ratios),
            "best": ratios.max(),
            "worst": least["speedup"],
            "worst at": least["where"],
        }
        line["communication hidden"] = members["overlap_efficiency"].median()
        line["shorter median"] = crossover(list(ratios), list(members["where"]))
        lines.append(line)
    return pd.DataFrame(lines)


def overall(frame: pd.DataFrame) -> pd.DataFrame:
    """`standings` by direction, the best first."""
    found = standings(frame, "direction")
    if found.empty:
        return found
    by_direction = found.groupby("direction", sort=False)
    return pd.concat([part.sort_values("mean", ascending=False) for _, part in by_direction], ignore_index=True)


def headlines(frame: pd.DataFrame) -> list[str]:
    """Which schedule is the fastest, a sentence a direction, and what the numbers should not be taken for."""
    lines = []
    found = overall(frame)
    for _, best in found.drop_duplicates("direction").iterrows() if len(found) else ():
        begin = f"{best['schedule']} is the fastest on average, at"
        if best["mean"] < 1.0:
            begin = f"{BASELINE} is the fastest on average; next is {best['schedule']} at"
        lines.append(
            f"{best['direction'].capitalize()}: {begin} {best['mean']:.2f}x the speed of {BASELINE} (geometric mean "
            f"over {best['cases']} case{'s' if best['cases'] > 1 else ''} with 2 or more ranks; from "
            f"{best['worst']:.2f}x to {best['best']:.2f}x). It is faster in {best['faster']}, slower in "
            f"{best['slower']}, and cannot be told apart in {best['same']}."
        )
    here = compared(frame)
    if not here["rounds_ms"].map(bool).all():
        lines.append(
            "Some rows are without their rounds, as older files have them: for these no interval can be computed, and "
            "what counts is whether the ranges from the 20th to the 80th percentile overlap."
        )
    here = timed(frame)
    crowded = here[(here["gpu"] == "") & (here["cores"] > 0) & (here["world_size"] * here["threads"] > here["cores"])]
    if len(crowded):
        sizes = " and ".join(map(str, sorted(set(crowded["world_size"]))))
        lines.append(
            f"With {sizes} ranks there are more threads than cores: ranks take turns, and those times say how a "
            "schedule bears that, not what it would take on cores of its own."
        )
    return lines
