"""The size of the house, by room: statements and files of the wheel, the lab and the tests.

`python tests/house.py` writes what stands today into `tests/house.toml`, where that is smaller.
"""

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_name("house.toml")
HOUSES = {"wheel": "src/beamwright", "lab": "lab/beamwright_lab", "tests": "tests"}


def count_statements(source):
    """Statements of a file, without docstrings. `a, b = 1, 2` counts as the two that it is."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        value = getattr(node, "value", None)
        if isinstance(node, ast.Expr) and isinstance(value, ast.Constant):
            continue
        parallel = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        count += len(value.elts) if parallel and isinstance(value, ast.Tuple) else 1
    return count


def measure_rooms():
    """By house and room: [statements, files]. Files beside the rooms are of the room "root"."""
    houses = {}
    for house, folder in HOUSES.items():
        rooms = houses[house] = defaultdict(lambda: [0, 0])
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).parts
            room = rooms[parts[0] if len(parts) > 1 else "root"]
            room[0] += count_statements(path.read_text(encoding="utf-8"))
            room[1] += 1
    return houses


def read_limits():
    """The table that `house.toml` holds."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8"))


def lowered(limits, measured):
    """The text of `house.toml` with every room at the smaller of its limit and today's size."""
    comment = LIMITS.read_text(encoding="utf-8").partition("[wheel]")[0]
    tables = []
    for house, rooms in measured.items():
        rows = [f"[{house}]"]
        for room, size in sorted(rooms.items()):
            known = limits[house].get(room, size)
            rows.append(f"{room} = {[min(pair) for pair in zip(size, known, strict=True)]}")
        tables.append("\n".join(rows))
    return comment + "\n\n".join(tables) + "\n"


if __name__ == "__main__":
    LIMITS.write_text(lowered(read_limits(), measure_rooms()), encoding="utf-8")
