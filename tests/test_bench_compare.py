"""Intervals have the promised coverage, changes are flagged, noise mostly is not, and machines are kept apart."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
from rich.console import Console

from fusedtp.bench import store
from fusedtp.bench.compare import compare, conditions, show
from fusedtp.bench.intervals import Interval, Timing, busy, measured, ratio
from fusedtp.bench.store import Measurement

from .command import command, folded
from .harness import LARGE

MakeRow = Callable[..., Measurement]
SIZES = (256, 512, 1024, 2048, 4096)


def drawn(make_row: MakeRow, rng: np.random.Generator, centre: float, rounds: int, **values: object) -> Measurement:
    """Return a row of rounds around `centre` ms, as on a shared machine: 8 % noise, and thrice that in one of ten."""
    spread = 0.08 * np.where(rng.random(rounds) < 0.1, 3.0, 1.0)
    return make_row(**asdict(Timing.of((centre * np.exp(spread * rng.standard_normal(rounds))).tolist())), **values)


def timing_of(row: Measurement) -> Timing:
    found = measured(row)
    assert found is not None
    return found


def run(make_row: MakeRow, seed: int, *, slow: float = 1.0, machine: float = 1.0) -> list[Measurement]:
    """Return fifteen cases in two variants. `slow`: factor of the decomposed variant; `machine`: factor of all."""
    rng, rows = np.random.default_rng(seed), []
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for size in SIZES:
            for variant, factor in (("unfused", 1.0), ("decomposed", 0.7 * slow)):
                centre = machine * factor * size / 100
                rows.append(drawn(make_row, rng, centre, 20, op=op, M=size, variant=variant))
    return rows


@pytest.mark.parametrize("rounds", [3, 20])
def test_interval_covers_the_true_ratio(make_row: MakeRow, rounds: int) -> None:
    rng, inside, trials = np.random.default_rng(rounds), {2: 0, 4: 0}, 300
    for _ in range(trials):
        a, b, c, d = (timing_of(drawn(make_row, rng, centre, rounds)) for centre in (3.0, 2.0, 5.0, 7.0))
        for terms, true, interval in ((2, 1.5, ratio(a, b)), (4, 15 / 14, ratio(a.over(b), d.over(c)))):
            inside[terms] += interval.low <= true <= interval.high
    for terms, count in inside.items():
        # at most three standard errors below 95 %; above 0.999 the interval is much too wide
        assert 0.912 <= count / trials <= 0.999, f"{terms} terms: {count / trials:.3f}"


def autocorrelated(rng: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Return standard normal numbers of which neighbours correlate."""
    found = rng.standard_normal(count)
    for at in range(1, count):
        found[at] = correlation * found[at - 1] + math.sqrt(1 - correlation**2) * found[at]
    return found


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.93), (0.5, 0.88), (0.7, 0.84)])
@pytest.mark.parametrize("rounds", [10, 20, 50])
def test_interval_covers_where_rounds_are_not_independent(correlation: float, least: float, rounds: int) -> None:
    """Without a correction the coverage at 0.5 is 76 to 88 %, at 0.7 down to 62 %."""
    rng, trials = np.random.default_rng(rounds), 600 if LARGE else 200
    inside = {"same run": 0, "two runs": 0}
    for _ in range(trials):
        a, b = (Timing.of(np.exp(0.05 * autocorrelated(rng, rounds, correlation)).tolist()) for _ in range(2))
        for name, same_run in (("same run", True), ("two runs", False)):
            interval = ratio(a, b, same_run=same_run)
            inside[name] += interval.low <= 1 <= interval.high
    assert all(least <= count / trials <= 0.99 for count in inside.values()), inside


def drifting(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.linspace(0.0, 0.2, count) + 0.02 * rng.standard_normal(count)


def two_states(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return a clock that has two rates and changes every ten rounds or so."""
    return 0.3 * (np.cumsum(rng.random(count) < 0.1) % 2) + 0.02 * rng.standard_normal(count)


DISTURBED = {
    "drift": drifting,
    "two states": two_states,
    "lag": lambda rng, count: 0.05 * autocorrelated(rng, count, 0.6),
}


@pytest.mark.parametrize("how", DISTURBED)
def test_rounds_that_are_not_independent_are_said(make_row: MakeRow, how: str) -> None:
    """A disturbance that all variants of a round share cancels in their ratio."""
    warned = {"disturbed": 0, "quiet": 0}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows: dict[str, list[Measurement]] = {"disturbed": [], "quiet": []}
        for size in range(1, 6):
            common = DISTURBED[how](rng, 50)
            for variant, centre in (("unfused", 3.0), ("decomposed", 2.0)):
                own = 0.02 * rng.standard_normal(50)
                for name, rounds in (("disturbed", common + own), ("quiet", own)):
                    timing = Timing.of((centre * np.exp(rounds)).tolist())
                    rows[name].append(make_row(**asdict(timing), variant=variant, M=size))
        for name, found in rows.items():
            warned[name] += "rounds are not independent" in busy(found)
        for unfused, decomposed in zip(rows["disturbed"][::2], rows["disturbed"][1::2], strict=True):
            interval = ratio(timing_of(unfused), timing_of(decomposed))
            # Either the ratio of medians is about right, or the interval is only widened to contain it.
            assert 1.47 < max(interval.low, min(interval.high, 1.5)) < 1.53
    assert warned["disturbed"] >= 19
    assert warned["quiet"] <= 1


def launched(
    make_row: MakeRow, rng: np.random.Generator, centre: float, spread: float, launches: int = 3, **values: object
) -> Measurement:
    """Return a row of launches that differ by `spread`, of 20 rounds each."""
    shifts = spread * rng.standard_normal(launches)
    turns = [Timing.of((centre * np.exp(shift + 0.03 * rng.standard_normal(20))).tolist()) for shift in shifts]
    return make_row(**asdict(Timing.together(turns)), **values)


def test_differences_by_chance_are_as_many_as_compare_says(
    make_row: MakeRow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal code, launches 1 to 4 % apart, A and B by different amounts: 5 +- 2 % of the ratios."""
    rng, false, total, said = np.random.default_rng(0), 0, 0, 0.0
    for _ in range(40):
        files: list[list[Measurement]] = [[], []]
        for size in range(1, 16):
            for rows in files:
                for variant in ("unfused", "decomposed"):
                    spread = rng.uniform(0.01, 0.04)
                    rows.append(launched(make_row, rng, 3.0, spread, M=size, variant=variant))
        found = compare(*files)
        show(found, Console(width=200), absolute=False, confidence=0.95, everything=False)
        (number,) = re.findall(r"about ([\d.]+) of 15 ratios over launches differ by chance", capsys.readouterr().out)
        said += float(number)
        false += sum(change.verdict != "" for change in found.changes)
        total += len(found.changes)
    assert 0.03 <= false / total <= 0.07
    assert said / total == pytest.approx(0.05, abs=0.005)


def test_launches_of_one_file_stand_for_those_of_the_other(make_row: MakeRow) -> None:
    """One launch beside three is judged by their spread; two single launches by their rounds, which is too strict."""
    rng, trials = np.random.default_rng(1), 400
    outside = {(3, 1): 0, (1, 3): 0, (1, 1): 0}
    for _ in range(trials):
        for counts in outside:
            a, b = (timing_of(launched(make_row, rng, 3.0, 0.03, launches)) for launches in counts)
            interval = ratio(a, b, same_run=False)
            outside[counts] += not interval.low <= 1 <= interval.high
    assert 0.03 <= outside[3, 1] / trials <= 0.07
    assert 0.03 <= outside[1, 3] / trials <= 0.07
    assert outside[1, 1] / trials > 0.2


def test_variants_of_one_run_are_compared_launch_by_launch(make_row: MakeRow) -> None:
    rng, inside, trials = np.random.default_rng(2), 0, 300
    for _ in range(trials):
        common = 0.1 * rng.standard_normal(3)
        a, b = (
            Timing.together([Timing.of((ms * np.exp(each + own + 0.02 * rng.standard_normal(10))).tolist())
                             for each, own in zip(common, 0.01 * rng.standard_normal(3), strict=True)])
            for ms in (3.0, 2.0)
        )  # fmt: skip
        interval = ratio(a, b)
        inside += interval.low <= 1.5 <= interval.high
        # The launches' common 10 % are not part of it.
        assert interval.high / interval.low < 1.4
    assert 0.92 <= inside / trials <= 0.98


def test_confidence_widens_the_interval_and_the_normal_limit_is_met(make_row: MakeRow) -> None:
    rng = np.random.default_rng(0)
    a, b = (Timing.of((centre * np.exp(0.02 * rng.standard_normal(10_000))).tolist()) for centre in (3.0, 2.0))
    one, other = (timing_of(make_row(**asdict(each))) for each in (a, b))
    widths = [math.log(each.high / each.low) for each in (ratio(one, other, level) for level in (0.8, 0.95, 0.99))]
    # The variance of a mean trimmed by a fifth at each end is 1.143 times that of the mean, for normal numbers.
    error = math.sqrt(2 * 1.143) * 0.02 / math.sqrt(10_000)
    assert widths == pytest.approx([2 * z * error for z in (1.2816, 1.9600, 2.5758)], rel=0.03)
    with pytest.raises(ValueError, match="confidence must be"):
        ratio(one, other, 1.0)


def test_rounds_that_are_all_alike_have_an_interval_of_one_point(make_row: MakeRow) -> None:
    a, b = (timing_of(make_row(**asdict(Timing.of([ms] * 5)))) for ms in (3.0, 2.0))
    assert ratio(a, b) == Interval(1.5, 1.5, 1.5)
    assert ratio(a.over(b), a.over(b)) == Interval(1.0, 1.0, 1.0)
    # one sample with noise raises no warning and gives no NaN
    c = timing_of(make_row(**asdict(Timing.of([1.9, 2.0, 2.0, 2.0, 2.1]))))
    assert ratio(a, c).low <= 1.5 <= ratio(a, c).high


def test_rows_without_their_rounds_have_what_their_percentiles_leave_open(make_row: MakeRow) -> None:
    """Older files: at any confidence, from one row's 20th percentile over the other's 80th to the reverse."""
    old = [make_row(median_ms=median, p20_ms=low, p80_ms=high) for median, low, high in ((3, 2.5, 4.0), (2, 1.6, 2.5))]
    a, b = map(timing_of, old)
    for confidence in (0.8, 0.99):
        assert ratio(a, b, confidence) == Interval(1.5, 1.0, 2.5)
    # a row with rounds does not narrow the interval beside a row without
    new = timing_of(replace(old[0], rounds_ms=(3.0,) * 20))
    assert ratio(new, b) == ratio(a, b)
    assert ratio(a.over(b), b.over(a)).low == pytest.approx(1.0 / 1.0)


def test_a_slowdown_is_flagged_and_nothing_else(make_row: MakeRow) -> None:
    """Noise is not flagged; nor, in ratios, a machine that is slower as a whole."""
    for seed in range(2):
        before, after = run(make_row, seed), run(make_row, seed + 100, slow=1.3, machine=1.0 + 0.4 * seed)
        found = compare(before, after)
        assert [(change.after.variant, change.verdict) for change in found.changes] == [("decomposed", "slower")] * 15
        assert [change.verdict for change in compare(after, before).changes] == ["faster"] * 15
        assert geometric_mean(found.drifts) == pytest.approx(1.0 + 0.4 * seed, rel=0.05)
        unchanged = compare(before, run(make_row, seed + 1000)).changes
        assert sum(change.verdict != "" for change in unchanged) <= 2
        verdicts = [(each.after.variant, each.verdict) for each in compare(before, after, absolute=True).changes]
        assert verdicts.count(("decomposed", "slower")) == 15
        assert verdicts.count(("unfused", "" if seed == 0 else "slower")) >= 12


def test_what_cannot_be_compared_is_kept_apart(make_row: MakeRow) -> None:
    base, ours = make_row(median_ms=2.0), make_row(median_ms=1.0, variant="decomposed")
    old_only, new_only = replace(base, M=7), replace(base, M=8)
    refused = replace(ours, median_ms=None, p20_ms=None, p80_ms=None, rounds=0, gate="wrong")
    alone = make_row(median_ms=1.0, variant="decomposed", M=9)
    predicted = replace(ours, predicted=True, median_ms=50.0)
    found = compare([base, ours, old_only, alone], [base, refused, new_only, alone, predicted])
    assert found.changes == []
    assert (found.only_before, found.only_after) == ([old_only], [new_only])
    assert found.lost == [(ours, refused)]
    assert found.without_baseline == [alone]
    assert [change.after for change in compare([alone], [alone], absolute=True).changes] == [alone]
    assert measured(predicted) is None
    # another direction of the same matmul is a different case
    assert compare([base, ours], [replace(row, direction="backward") for row in (base, ours)]).changes == []
    # What sends nothing has no ratio to the baseline.
    matmul = replace(base, variant="matmul")
    for absolute, variants in ((False, ["decomposed"]), (True, ["decomposed", "matmul", "unfused"])):
        changes = compare([base, ours, matmul], [base, ours, matmul], absolute=absolute).changes
        assert sorted(change.after.variant for change in changes) == variants
    assert conditions([base], [base]) == []
    assert conditions([base], [replace(base, threads=2)]) == ["threads: 0 in A, 2 in B"]
    others = [replace(base, cuda="13.0", nccl="2.28.9", nccl_env="NCCL_ALGO=Ring")]
    named = [line.partition(":")[0] for line in conditions([base], others)]
    assert named == ["cuda", "nccl", "nccl_env"]


def test_command(make_row: MakeRow, tmp_path: Path) -> None:
    before, after = run(make_row, 3), run(make_row, 4, slow=1.3)
    decomposed = [row for row in before if row.variant == "decomposed"]
    nothing = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "total_ms"), None) | {"rounds": 0, "rounds_ms": ()}
    files = {
        "a": before, "b": [*after, make_row(median_ms=1.0, M=3)], "untimed": [], "alone": decomposed,
        "elsewhere": [replace(row, machine="cpu-other-8c") for row in after],
        "other": [replace(row, M=row.M + 1, variant="fused") for row in before[::2]],
        "refused": [row if row.variant == "unfused" else replace(row, gate="wrong", **nothing) for row in before],
    }  # fmt: skip
    for name, rows in files.items():
        store.write(tmp_path / f"{name}.csv", rows)
    for line, code, texts in (
        ("a b", 0, ("slower in B: 15", " of (time / unfused): 15 slower, ", "only in B: all-gather + matmul 3 x 1024")),
        ("a b --absolute", 0, ("30 ratios, B / A of times: ",)),
        ("a a --all", 0, ("no significant difference in B",)),
        ("a elsewhere", 2, ("give --across-machines",)),
        ("a elsewhere --across-machines", 0, ("Warning",)),
        ("a untimed", 2, (f"there is no time to compare in {tmp_path}/untimed.csv",)),
        # Rows that are in one file only are counted, and listed with --all.
        ("a other", 2, ("30 in A, 15 in B, 0 in both", "only in A: 30 rows; --all", "only in B: 15 rows; --all")),
        ("a other --all", 2, ("only in A: all-gather + matmul 256 x 1024",)),
        ("a refused", 2, ("timed in A, not in B (wrong): 15 rows; --all lists", "30 in A, 15 in B, 15 in both")),
        ("alone alone", 2, ("no time of unfused in the same case, compared with --absolute only: 15",)),
    ):
        given = [word if word.startswith("--") else tmp_path / f"{word}.csv" for word in line.split()]
        said = folded(command("compare", *given, code=code))
        assert all(text in said for text in texts), said
