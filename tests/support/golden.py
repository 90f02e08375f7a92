"""What the program prints today, pinned.

`python tests/support/golden.py [NAME ...]` writes it again.

Write it again where a change of it is meant, and say why in the changelog. Everything is asked for
through the command line or HTTP, so that a golden outlives the modules behind it.
"""

import json
import math
import sys
from pathlib import Path

import golden_cases as asked

FOLDER = Path(__file__).parents[1] / "data" / "golden"
DIGITS = 12
"""Significant digits of a float that is kept; as far as two may differ in the last bits."""
COMPUTED = 1e-5
"""How far floats of models may be apart: processors differ in the last bits of float32."""

GOLDENS = {
    "simulate": (asked.CASES["simulate"], asked.simulated),
    "plan": (asked.CASES["plan"], asked.planned),
    "solve": (asked.CASES["solve"], asked.solved),
    "eval": (asked.CASES["eval"], asked.evaluated),
    "serve": (asked.SERVED, asked.said),
}
"""By file: its cases, and what is found of one."""


def differences(found, pinned, tolerance=10 ** (1 - DIGITS), place=""):
    """Where two JSON values are not the same: lines of place, what is pinned, what is found."""
    if isinstance(found, dict) and isinstance(pinned, dict):
        for key in sorted(found.keys() & pinned.keys()):
            yield from differences(found[key], pinned[key], tolerance, f"{place}/{key}")
        for key in sorted(found.keys() ^ pinned.keys()):
            yield f"{place}/{key}: is {'not pinned' if key in found else 'not found'}"
    elif isinstance(found, list) and isinstance(pinned, list) and len(found) == len(pinned):
        for i, inner in enumerate(zip(found, pinned, strict=True)):
            yield from differences(*inner, tolerance, f"{place}/{i}")
    elif not _same(found, pinned, tolerance):
        yield f"{place}: {pinned!r} is pinned, {found!r} is found"


def _same(found, pinned, tolerance):
    if type(found) is not type(pinned):
        return False
    if isinstance(found, float):
        return math.isclose(found, pinned, rel_tol=tolerance)
    return found == pinned


def _rounded(value, before, tolerance):
    """A value to be pinned; a number that is as it was, but for this processor, stays."""
    if isinstance(value, dict):
        was = before if isinstance(before, dict) else {}
        return {key: _rounded(inner, was.get(key), tolerance) for key, inner in value.items()}
    if isinstance(value, list):
        was = before if isinstance(before, list) and len(before) == len(value) else value
        return [_rounded(*pair, tolerance) for pair in zip(value, was, strict=True)]
    if isinstance(value, float):
        kept = isinstance(before, float) and _same(value, before, tolerance)
        return before if kept else float(f"{value:.{DIGITS}g}")
    return value


def pinned(name):
    """What a file holds, by case."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def tolerance_of(name):
    """Simulations and plans are arithmetic alone, the same anywhere."""
    return {} if name in ("simulate", "plan") else {"tolerance": COMPUTED}


def write(name):
    cases, find = GOLDENS[name]
    before, tolerance = pinned(name), tolerance_of(name).get("tolerance", 10 ** (1 - DIGITS))
    found = {case: _rounded(find(case), before.get(case), tolerance) for case in cases}
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for golden in sys.argv[1:] or GOLDENS:
        write(golden)
