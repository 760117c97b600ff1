"""Randomly broken files: in bytes, in lines, and for JSON and CSV in one value.

A mutated value says whether a reader must refuse it: if it has another kind, or is beyond any limit. Mutated bytes
cannot say so, as a digit may have become another digit.
"""

from __future__ import annotations

import copy
import csv
import json
import random
from collections.abc import Iterator
from io import StringIO
from typing import Any

# Values that are neither a number nor a name, or out of range.
WRONG_JSON: tuple[Any, ...] = (
    None, True, "", "many", "\ud800", "[bold]", -1e300, 1e300, -(10**25), [], [[]], {}, {"ms": 1}, float("nan"),
    float("inf"), "\x1b[31m",
)  # fmt: skip
# A placeholder that is replaced by digits: `json` cannot write integers of thousands of digits.
_LONG = "@long@"
LONG_DIGITS = (31, 400, 5000)
WRONG_CELLS = (
    "many", "nan", "inf", "-inf", "1e999", "1e300", "0x1", "1_0", " 1", "\u0663", "9" * 400, "[/]", "[bold", "$\\frac$",
    "True ", "none", ":boom:", "<b>", "<!-- measured:end -->", "a\nb",
)  # fmt: skip
_BYTES = b"\0\n\r\t \"',[]{}:.-+eE0123456789\xff\xc3nNtTfF$<>|"


def of_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one to four mutations: bytes changed, a part cut or doubled, lines swapped, the end cut."""
    made = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(made):
            made[at] = rng.choice(_BYTES)
        elif kind == 1 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            made[at:at] = bytes(rng.choices(_BYTES, k=rng.randint(1, 5)))
        elif kind == 3:
            del made[at : at + rng.randint(1, 40)]
        elif kind == 4:
            made[at:at] = made[at : at + rng.randint(1, 200)]
        elif kind == 5 and rng.random() < 0.3:
            del made[at:]
        else:
            lines = bytes(made).splitlines(keepends=True)
            one, other = rng.randrange(len(lines) or 1), rng.randrange(len(lines) or 1)
            if lines:
                lines[one], lines[other] = lines[other], lines[one]
            made = bytearray(b"".join(lines))
    return bytes(made)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key and index of a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield (*at, key)
        yield from places(each, (*at, key))


def of_json(content: bytes, rng: random.Random) -> tuple[bytes, tuple[Any, ...]]:
    """Return the JSON with one mutation, and its path: another kind, no key, another key, or a doubled key."""
    made = copy.deepcopy(json.loads(content))
    place = rng.choice(list(places(made)))
    holder = made
    for key in place[:-1]:
        holder = holder[key]
    kind = rng.randrange(6)
    if kind == 0 and isinstance(holder, dict):
        del holder[place[-1]]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "\udcff", "x" * 3000, f"{place[-1]} "))] = holder.pop(place[-1])
    elif kind == 2:
        holder[place[-1]] = _LONG
    else:
        same = [each for each in WRONG_JSON if type(each) is type(holder[place[-1]]) and each in ("", "many", [], {})]
        holder[place[-1]] = rng.choice([each for each in WRONG_JSON if not any(each is other for other in same)])
    text = json.dumps(made, indent=1).replace(f'"{_LONG}"', "7" * rng.choice(LONG_DIGITS))
    if kind == 5 and isinstance(place[-1], str):
        # A doubled key: readers cannot know which value is meant.
        text = text.replace(f'"{place[-1]}":', f'"{place[-1]}": 1, "{place[-1]}":', 1)
    return text.encode(), place


def of_cell(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return the CSV with one cell that is no number, flag or name, and the cell's column."""
    head, *rows = csv.reader(StringIO(content.decode(), newline=""))
    row, column = rng.choice(rows), rng.randrange(len(head))
    row[column] = rng.choice(WRONG_CELLS)
    text = StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue().encode(), head[column]
