"""Which schedule wins where, by how much, and from which size on.

A case is won or lost where the interval of its speed-up leaves out 1; what is between is a tie.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from .frames import compared, parts, records


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
        line |= {"mean": stats.gmean(ratios), "best": ratios.max(), "worst": least["speedup"]}
        line["worst at"] = least["where"]
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
