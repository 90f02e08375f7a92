"""Probes: what paths answer in between, whatever runs beside them, and what follows from it."""

from __future__ import annotations

from collections import Counter

import pytest

from beamwright import Solver
from beamwright.errors import CapacityError, InputError
from beamwright.tree import NodeState, RawPrompt, StopReason
from engines import assert_nothing_allocated, exact_dtype, grow, tiny_checkpoint

ASKED = {"probe_every": 10, "probe_text": "xy", "probe_tokens": 5, "certainty_window": 2}
SCARCE = {"schedule": "locality", "kv_memory": 20 * 8192, "host_memory": "2MiB"}
MANY = (
    "Ann has 8 apples. In May Ann gets 4 apples. In June Ann loses 2 apples. In July Ann gets 5 "
    "apples. In August Ann loses 3 apples. How many apples does Ann have now?"
)


def probed(tree):
    return {node.lineage: node.probe for node in tree.nodes() if node.probe is not None}


# --- the aside -------------------------------------------------------------------------------


@pytest.fixture
def asked(make_solver):
    def make(**changes):
        return make_solver(**{"dtype": "float64", "n": 8, **ASKED, **changes})

    return make


def test_asking_leaves_the_tree_as_it_is(asked):
    plain, asks = grow(asked(**dict.fromkeys(ASKED)))[0], asked()
    solution, tree = grow(asks)
    assert solution.tree_hash == plain.tree_hash
    assert probed(tree)
    assert_nothing_allocated(asks)


@pytest.mark.parametrize(
    "changes",
    [
        SCARCE,
        {**SCARCE, "evict": "recompute"},
        {**SCARCE, "batching": "grouped"},
        {**SCARCE, "speculation": "exact"},
        {"kv_memory": 20 * 8192, "schedule": "layerwise", "host_memory": "2MiB"},
        {"max_batch": 3, "speculation": "exact"},
        {"drafts": 4},
        {"attention": "dense"},
        {"executor": "overlapped"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_answers_depend_on_nothing_but_the_path(asked, changes):
    expected, tree = grow(asked())
    solution, other = grow(asked(**changes))
    assert solution.tree_hash == expected.tree_hash
    assert probed(other) == probed(tree)


def test_windows_see_as_much_of_a_path(tmp_path):
    make, options = tiny_checkpoint(tmp_path, "qwen3"), {"dtype": "float64", "n": 8, **ASKED}
    options |= {"max_step_tokens": 40, "max_tokens": 120}
    _, tree = grow(make(**options))
    assert probed(tree)
    for changes in ({**SCARCE, "kv_memory": 50 * 8192}, {"max_batch": 3}):
        assert probed(grow(make(**options, **changes))[1]) == probed(tree)


@pytest.mark.parametrize("method", ["exact", "pages"])
def test_selected_tokens_are_a_paths_own(asked, method):
    sparse = {"sparse": method, "select": 8, "sparse_from": 0}
    _, tree = grow(asked(**sparse))
    assert probed(grow(asked(**sparse, max_batch=3))[1]) == probed(tree)


@pytest.mark.parametrize("verifier", ["entropy", "deepconf"])
def test_what_a_probe_has_written_has_no_confidence(verifier):
    options = {"model": "bundled", "verifier": verifier, "n": 4, "search": "best-of-n"}
    with Solver(**options, probe_every=8, certainty_window=1) as solver:
        solution = solver.solve(MANY)
    assert "probe" in {candidate.stop for candidate in solution.candidates}
    assert all(candidate.score is not None for candidate in solution.candidates)


def test_in_float32_too(make_solver):
    options = {"dtype": exact_dtype(), **ASKED}
    _, tree = grow(make_solver(**options))
    for changes in (SCARCE, {"max_batch": 3}):
        assert probed(grow(make_solver(**options, **changes))[1]) == probed(tree)


def test_an_answer_is_what_the_path_would_go_on_with(asked):
    solver = asked()
    _, tree = grow(solver)
    lineage, said = next((k, v) for k, v in sorted(probed(tree).items()) if k[1:] > (0, 5))
    node, given = tree.node(lineage), solver.codec.encode(ASKED["probe_text"])
    prompt = RawPrompt((*node.path_token_ids(), *given))
    greedy = {"temperature": 0, "n": 1, "width": 1, "search": "best-of-n", **dict.fromkeys(ASKED)}
    again = asked(**greedy, step_tokens=5, max_rounds=1).solve(prompt)
    assert said[: len(given)] == tuple(given)
    assert said[len(given) :] == next(n for n in again.tree.nodes() if n.parent).token_ids


def test_they_are_counted(asked):
    solution, tree = grow(asked())
    lengths = Counter[str]()
    for said in probed(tree).values():
        lengths["read"] += 2
        lengths["written"] += len(said) - 2
    assert solution.tokens.probe_prefilled == lengths["read"]
    assert solution.tokens.probe_tokens == lengths["written"]


def test_a_path_is_asked_once_in_so_many_tokens(asked):
    _, tree = grow(asked())
    root = tree.root.end
    for node in tree.nodes():
        crossed = (node.start - root) // 10 != (node.end - root) // 10
        waited = node.parent is not None and node.state is not NodeState.OPEN and not node.ended
        assert (node.probe is not None) == (waited and crossed)


def test_one_that_does_not_fit_alone_fails_as_a_step_does(asked):
    few = {"n": 1, "width": 1, "search": "best-of-n", "schedule": "locality", "context": 512}
    few |= {"ignore_eos": True, "step_tokens": 10, "max_tokens": 20}
    needed = grow(asked(**few, **dict.fromkeys(ASKED)))[0].kv.device_peak_bytes
    solver = asked(**{**few, "probe_text": "xy" * 100}, kv_memory=needed)
    with pytest.raises(CapacityError, match="KV"):
        grow(solver)
    assert_nothing_allocated(solver)


def test_a_search_with_probes_is_resumed(asked, tmp_path):
    expected, tree = grow(asked())
    file, saved = tmp_path / "search.json", tmp_path / "second.json"

    def keep(report):
        if report.round == 2:
            saved.write_bytes(file.read_bytes())

    asked().solve("Ann has 12 apples. She eats 3.", on_round=keep, checkpoint=file)
    solution = asked().resume(saved)
    assert solution.tree_hash == expected.tree_hash
    assert probed(solution.tree) == probed(tree)
    with pytest.raises(InputError, match="--probe-every 10, not 11"):
        asked(probe_every=11).resume(saved)


# --- what follows ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking():
    options = {"model": "bundled:thinking", "verifier": "none", "search": "majority", "n": 8}
    with Solver(**options) as solver:
        yield solver


ENDS = {"probe_every": 16, "certainty_window": 2}


def test_a_path_whose_answers_agree_ends_with_them(thinking):
    solution = thinking.solve(MANY, **ENDS)
    concluded = [n for n in solution.tree.nodes() if n.stop is StopReason.PROBE]
    assert concluded
    for node in concluded:
        *_, before, last = [step for step in node.reply() if step.probe is not None]
        assert before.vote == last.vote == node.vote
        assert (node.token_ids, node.thought, node.state) == (
            last.probe,
            False,
            NodeState.FINISHED,
        )
        assert node.said == f"The final answer is \\boxed{{{node.answer}}}."
    assert solution.tokens.generated < thinking.solve(MANY).tokens.generated
    assert {"probe"} <= {candidate.stop for candidate in solution.candidates}


def test_a_search_ends_when_enough_paths_agree(thinking):
    plain = thinking.solve(MANY, **ENDS)
    solution = thinking.solve(MANY, **ENDS, stop_probes=0.25)
    assert solution.tokens.generated < plain.tokens.generated
    assert {candidate.stop for candidate in solution.candidates} <= {"probe", "eos"}
    assert len(solution.candidates) == 8


def test_paths_that_repeat_an_answer_end(thinking):
    asks = {"probe_every": 16, "certainty_window": 3}
    solution = thinking.solve(MANY, **asks, prune_repeats=True)
    assert solution.tokens.generated < thinking.solve(MANY, **asks).tokens.generated
    assert len(solution.candidates) == 8


def test_where_paths_compete_repeats_are_pruned():
    options = {"model": "bundled", "n": 8, "width": 2, "probe_every": 8, "certainty_window": 2}
    with Solver(**options) as solver:
        solution = solver.solve(MANY, prune_repeats=True)
        tree = solution.tree
        plain = solver.solve(MANY)
    pruned = {number: set() for number in range(solution.rounds + 1)}
    for node in tree.nodes():
        if node.probe is not None and node.state is NodeState.KEPT:
            assert node.vote not in pruned[node.round]
            pruned[node.round].add(node.vote)
    assert solution.tree_stats.pruned != plain.tree_stats.pruned


def test_a_search_ends_with_its_first_paths(thinking):
    solution = thinking.solve(MANY, first_k=2, **ENDS)
    finished = [c for c in solution.candidates if c.stop in ("eos", "probe")]
    assert 2 <= len(finished) < 8
    assert "the first 2 had finished (--first-k)" in solution.reason_fewer
    assert solution.receipt["unrepeatable"] is None


def test_batches_and_company_change_nothing(thinking):
    expected = thinking.solve(MANY, **ENDS, stop_probes=0.75)
    with Solver(thinking.settings.changed(max_batch=3, kv_memory="1MiB")) as other:
        assert other.solve(MANY, **ENDS, stop_probes=0.75).tree_hash == expected.tree_hash
    problems = [(number, MANY, {**ENDS, "stop_probes": 0.75}) for number in (0, 1)]
    first = next(each for each in thinking.solve_many(problems) if each.problem_id == 0)
    assert first.tree_hash == expected.tree_hash


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop_probes": 0.5}, "--stop-probes 0.5: does nothing with no --probe-every"),
        ({"prune_repeats": True}, "--prune-repeats: does nothing with no --probe-every"),
    ],
)
def test_options_need_probes(thinking, options, words):
    with pytest.raises(InputError, match=words):
        thinking.solve(MANY, **options)
