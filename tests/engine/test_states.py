"""Searches with recurrent layers: same trees on every schedule, and a state where one is needed.

The model looks at whose state it gets (`recurring`): that of another row or token fails.
"""

import pytest

from checksums import check_transfers
from engines import PROBLEM
from recurring import load_recurring

PLENTY, SCARCE = {"schedule": "in-gpu"}, {"schedule": "locality", "host_memory": "8MiB"}


@pytest.fixture
def make_hybrid(make_solver, monkeypatch):
    """A solver whose states are looked at after every round, and whatever comes over the link."""
    monkeypatch.setattr("beamwright.solver.machinery.load_model", load_recurring)

    def make(**changes):
        solver = make_solver(**changes)
        if solver.generator.store.host is not None:
            solver.compared = check_transfers(solver.generator.store)
        return solver

    return make


def test_states_are_kept_where_paths_go_on_and_nowhere_else(make_hybrid):
    solver = make_hybrid(n=16, width=4, max_rounds=6, max_tokens=80, **PLENTY)

    def on_round(report):
        tree = report.tree
        if tree.done:
            return
        begun = {node.parent for node in tree.open_nodes()} | {tree.root}
        for node in tree.nodes():
            held = node.handles.get("generator")
            state = held and held.segment.group_segments[-1]
            assert bool(state and state.copies) == (node in begun)

    solver.solve(PROBLEM, on_round=on_round)
