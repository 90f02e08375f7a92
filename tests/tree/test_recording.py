"""Recorded trees: round trip, and one clear line for everything that can be wrong."""

import json
from itertools import count

import pytest

from beamwright import Solver
from beamwright.engine.decisions import StopRule
from beamwright.engine.timeline import PhaseTimer
from beamwright.errors import InputError
from beamwright.protocols import Direction
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import NodeState, StopReason
from beamwright.tree.recording import record_tree, write_tree_record
from beamwright_lab.simulator.bench import Bench
from beamwright_lab.simulator.recorded import read_recorded
from beamwright_lab.simulator.replay import ReplayStrategy, Script
from fakes import Grouping, ScriptedExecutor, add_step, new_tree
from played import Loop, new_run
from simulated import GIB, case, longest
from tables import beside


def test_a_recorded_tree_comes_back_as_it_was(searched, tmp_path):
    tree, _ = searched
    write_tree_record(tree, tmp_path / "tree.json")
    found = read_recorded(tmp_path / "tree.json")
    assert (found.problem_id, found.prompt_tokens, found.rounds) == (0, 5, 2)
    assert [(n.lineage, n.tokens, n.stop, n.state, n.score, n.round) for n in found.nodes] == [
        ((0,), 1, StopReason.DELIMITER, NodeState.KEPT, 0.9, 1),
        ((0, 0), 3, StopReason.EOS, NodeState.FINISHED, 0.75, 2),
        ((0, 1), 2, StopReason.STEP_LIMIT, NodeState.CANDIDATE, None, 2),
        ((1,), 1, StopReason.DELIMITER, NodeState.PRUNED, 0.25, 1),
        ((2,), 1, StopReason.DELIMITER, NodeState.CANDIDATE, None, 1),
    ]


@pytest.mark.parametrize("deadline", range(1, 12))
@pytest.mark.parametrize("size", [1, 3])
def test_a_search_that_was_cut_off_within_a_round_is_replayed(tmp_path, deadline, size):
    """Later siblings may have been decoded, and earlier ones not: no gaps are recorded."""
    clock = count(100)
    executor = ScriptedExecutor(lambda node: (StopReason.DELIMITER, 1 / (1 + node.lineage[-1])))
    search = SearchSettings(n=8, width=4)
    run = new_run(new_tree(), rule=StopRule(StopSettings(deadline=deadline), search))
    play(executor, Grouping(size, reverse=True), make_strategy(search), run, lambda: next(clock))
    write_tree_record(run.tree, tmp_path / "tree.json")
    found = read_recorded(tmp_path / "tree.json")
    script = Script(found)
    again = new_run(script.search_tree())
    replayed = ScriptedExecutor(lambda node: (script.step(node).stop, script.step(node).score))
    play(replayed, Grouping(), ReplayStrategy(script), again, lambda: 0.0)
    decoded = [node for node in run.tree.nodes() if node.parent and node.token_ids]
    assert len(found.nodes) == len(decoded) == sum(1 for _ in again.tree.nodes()) - 1
    assert sum(map(len, executor.groups)) == sum(map(len, replayed.groups))


def play(executor, schedule, strategy, run, clock):
    Loop(executor, strategy, schedule, phase_timer=PhaseTimer(lambda: 0.0), clock=clock).run([run])


def test_a_search_that_an_error_stopped_within_a_round_is_recorded(searched, tmp_path):
    """What was decoded of a round that never became complete is one level deeper."""
    tree, _ = searched
    (waiting, *_) = tree.candidates()
    tree.keep(waiting)
    (child,) = tree.expand(waiting, 1)
    add_step(tree, child, "on")
    assert child.depth > tree.rounds
    write_tree_record(tree, tmp_path / "tree.json")
    assert read_recorded(tmp_path / "tree.json").rounds == 3


def test_no_token_ids_and_no_text_are_recorded(searched):
    recorded = record_tree(searched[0])
    assert set(recorded) == {"version", "problem_id", "prompt_tokens", "rounds", "nodes"}
    for node in recorded["nodes"]:
        assert set(node) == {"lineage", "tokens", "stop", "state", "score", "began", "turn"}
        assert isinstance(node["tokens"], int)


@pytest.mark.parametrize(
    ("search", "budget"),
    [("aggregate", 8 * GIB), ("aggregate", GIB // 4), ("revise", 8 * GIB), ("revise", GIB // 8)],
)
def test_a_search_that_asks_again_is_simulated(tmp_path, search, budget):
    """Turns, and prompts of their own with the beginnings that they share."""
    options = {"n": 8, "max_tokens": 40, "context": 1024} | (
        {"aggregate_size": 2} if search == "aggregate" else {}
    )
    with Solver(search=search, temperature=0.6, **options) as solver:
        tree = solver.solve("Jack has 70 eggs and buys 5. How many has he now?").tree
    write_tree_record(tree, tmp_path / "tree.json")
    found = read_recorded(tmp_path / "tree.json")
    assert {node.turn for node in found.nodes} == {
        None,
        "alone" if search == "aggregate" else "follows",
    }
    bench = Bench([case(tree=found, step=longest(found), budget=budget)])
    (run,) = bench.run(1)
    nodes = [*run.tree.nodes()][1:]
    assert [(node.lineage[1:], len(node.token_ids), node.round) for node in nodes] == [
        (node.lineage, node.tokens, node.round) for node in found.nodes
    ]
    assert (bench.link.bytes_moved[Direction.H2D] > 0) == (budget < GIB)


MALFORMED = beside(__file__)
HUGE = {"path": "nodes.1.score", "value": 10**400, "message": "nodes.1.score: "}


@pytest.mark.parametrize("row", [*MALFORMED, HUGE], ids=lambda row: row["message"])
def test_a_malformed_recording_is_named_with_its_fault(searched, tmp_path, row):
    recorded = target = record_tree(searched[0])
    *way, last = [int(part) if part.isdigit() else part for part in row["path"].split(".")]
    for part in way:
        target = target[part]
    target[last] = row.get("value")
    if "value" not in row:
        del target[last]
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(recorded))
    with pytest.raises(InputError) as caught:
        read_recorded(file)
    assert str(caught.value).startswith(f"{file}: not a recorded tree: {row['message']}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"[]"], ids=len)
def test_a_file_that_is_something_else(tmp_path, content):
    file = tmp_path / "tree.json"
    file.write_bytes(content)
    words = "not a recorded tree" if content == b"[]" else "not a recorded tree, or"
    with pytest.raises(InputError, match=words):
        read_recorded(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: cannot be read \(No such file"):
        read_recorded(tmp_path / "none.json")
