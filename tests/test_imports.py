"""The house rules that a reader of the code relies on, read from the code itself."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import beamwright
from beamwright.io import read_toml_beside

SRC = Path(beamwright.__file__).parent
PARSED = {path: ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}

LEVELS = [level.split() for level in read_toml_beside(__file__)["levels"]]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
POLICIES = ("plan", "search", "schedule", "tree", *LEVELS[0])


def room_of(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def is_type_checking(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imports(node, types_only=False):
    """Yield (module name, only for types, line) of every import below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, types_only, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports hide the room"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from ((name, types_only, child.lineno) for name in names)
        else:
            yield from imports(child, types_only or is_type_checking(child))


def imported_rooms(path):
    """Yield (room, only for types, line) of every import of this package."""
    for module, types_only, line in imports(PARSED[path]):
        parts = module.split(".")
        if parts[0] == "beamwright" and len(parts) > 1:
            yield (parts[1] if parts[1] in LEVEL else "__init__", types_only, line)


def test_every_file_belongs_to_a_known_room_and_none_knows_the_lab():
    for path, tree in PARSED.items():
        assert room_of(path) in LEVEL
        assert not any(name.startswith("beamwright_lab") for name, _, _ in imports(tree)), path


def test_rooms_import_only_from_rooms_below():
    upward = []
    for path in PARSED:
        own = room_of(path)
        for room, types_only, line in imported_rooms(path):
            allowed = LEVEL[room] <= LEVEL[own] if LEVEL[own] <= 0 else LEVEL[room] < LEVEL[own]
            seam = own == "protocols" and types_only
            if not (allowed or seam or own in (room, "__init__")):
                upward.append(f"{path.relative_to(SRC)}:{line} imports {room}")
    assert not upward


def module_name(path):
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_files_import_each_other_not_even_for_types():
    known = {module_name(path) for path in PARSED}
    graph = {}
    for path, tree in PARSED.items():
        named = [module for module, _, _ in imports(tree)]
        found = {name if name in known else name.rpartition(".")[0] for name in named}
        graph[module_name(path)] = found & known
    assert sum(map(len, graph.values())) > len(PARSED)
    TopologicalSorter(graph).prepare()  # raises a CycleError that names a circle


def test_seams_import_rooms_for_their_types_only():
    found = {room: types_only for room, types_only, _ in imported_rooms(SRC / "protocols.py")}
    assert found == {"tree": True, "errors": True, "plan": True, "counters": True}


def test_policies_never_import_torch():
    found = [
        f"{path.relative_to(SRC)}:{line}"
        for path, tree in PARSED.items()
        if room_of(path) in POLICIES
        for module, _, line in imports(tree)
        if module.split(".")[0] in ("torch", "transformers")
    ]
    assert not found


def test_policies_load_without_torch():
    rooms = "beamwright.search, beamwright.schedule, beamwright.tree, beamwright.plan"
    code = f"import sys, beamwright, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_two_public_classes_share_a_name():
    places = {}
    for path, tree in PARSED.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SRC)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_files_are_short_and_keep_no_hidden_state():
    for path, tree in PARSED.items():
        name = path.relative_to(SRC)
        assert len(path.read_text().splitlines()) <= 450, name  # a class that is one idea is whole
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), f"{name}:{node.lineno}: a global"
            if isinstance(node, ast.Attribute):
                where = f"{name}:{node.lineno}: the environment"
                allowed = str(name) == "cores.py"  # which says why
                assert allowed or node.attr not in ("environ", "getenv"), where
