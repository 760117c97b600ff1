"""Files as pytest-benchmark saves them for `fusedtp.bench.ratios`, made without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pytest_benchmark.stats import Stats

from fusedtp.machine import Machine


def saved(samples: Mapping[str, Sequence[float]], machine: Machine) -> bytes:
    """Return the content of a file with these launches."""
    benchmarks = []
    for key, values in samples.items():
        stats, name = Stats(), f"test_ratio[{key}]"
        stats.data = list(values)
        names = {"group": "ratios", "name": name, "fullname": f"ratios.py::{name}", "params": {"key": key}}
        about = {"param": key, "extra_info": {"matmul_ms": 3.0}, "options": {"min_rounds": 5, "timer": "stopwatch"}}
        benchmarks.append(names | about | {"stats": stats.as_dict() | {"iterations": 1, "data": stats.data}})
    about: dict[str, Any] = asdict(machine)
    commit = {"id": about.pop("commit"), "dirty": about.pop("dirty")}
    made = {"machine_info": about, "commit_info": commit, "benchmarks": benchmarks}
    return json.dumps(made | {"datetime": "2026-01-02T03:04:05+00:00", "version": "5.3.1"}, indent=4).encode()
