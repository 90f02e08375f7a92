"""Entry points: packages that are installed declare without being named."""

import sys

import pytest

from beamwright.cli import main
from beamwright.declare import VERIFIERS
from beamwright.plugins import load_installed
from beamwright.registry import restored

GOOD = """
from beamwright.declare import verifier


@verifier("packaged", meaning="of a package")
def packaged(problem, steps):
    return 0.5
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put packages of one module each on the path, as an installer leaves them."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            points = f"[beamwright.plugins]\n{name}-plugin = {name}\n"
            (info / "entry_points.txt").write_text(points)
        return tmp_path

    before = set(sys.modules)
    with restored():
        yield put
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_package_declares(install, make_solver):
    install(good_one=GOOD)
    solver = make_solver(n=2, width=1, max_rounds=2, verifier="packaged")
    assert solver.solve("p").score == 0.5
    assert VERIFIERS["packaged"].source == GOOD, "its whole file is known again"


def test_a_broken_package_is_a_line_and_stops_no_other(install, capsys):
    install(
        a_broken="import nowhere_at_all",
        b_broken="import sys; sys.exit(7)",
        good_two=GOOD,
        z_broken="raise ValueError('a\\nb')",
    )
    assert "packaged" not in VERIFIERS
    assert load_installed() == [
        "plugin a_broken-plugin (a_broken): ModuleNotFoundError: No module named 'nowhere_at_all'",
        "plugin b_broken-plugin (b_broken): SystemExit: 7",
        "plugin z_broken-plugin (z_broken): ValueError: a b",
    ]
    assert "packaged" in VERIFIERS
    assert main(["plan", "--model", "opt-2.7b", "--verifier", "packaged", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 3
    assert "plugin a_broken-plugin (a_broken): ModuleNotFoundError" in captured.err
    assert captured.out.startswith("{")


def test_a_package_that_takes_a_name_is_a_line(install):
    install(greedy=GOOD.replace('"packaged"', '"logprob"'))
    (line,) = load_installed()
    assert "plugin greedy-plugin (greedy): InputError: greedy.packaged: --verifier logprob" in line
