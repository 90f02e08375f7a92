"""Exact speculation: the tree is the same, whatever was decoded ahead and whatever became of it."""

import itertools
import random

import pytest
import torch

from beamwright import Solver
from beamwright.counters import Counters
from beamwright.engine.batch import RunningBatch
from beamwright.engine.decisions import collect_prospects
from beamwright.engine.scoring import VerifierCaller
from beamwright.engine.speculation import Payoff
from beamwright.errors import PolicyError
from beamwright.evaluate.problems import load_problems
from beamwright.protocols import Prospect
from beamwright.search import STRATEGIES
from beamwright.tree import StopReason
from declared import real_options
from engines import PROBLEM, assert_nothing_allocated, exact_dtype, facts, logprobs
from fakes import add_step, new_tree

FAST = {"n": 8, "width": 2, "max_rounds": 12, "max_step_tokens": 24, "max_tokens": 48}


def searched(solver, problem=PROBLEM):
    """Everything that a search finds; nothing is held when it is over."""
    solution = solver.solve(problem)
    assert_nothing_allocated(solver)
    return (solution.tree_hash, facts(solution.tree)), solution


class Chaos:
    """Drops, parks and forbids speculative rows whenever a coin says so."""

    def __init__(self, monkeypatch):
        self.rng, self.num_dropped, self.num_parked = random.Random(0), 0, 0
        iterate, fill = RunningBatch.iterate, RunningBatch._fill_idle_slots
        chaos = self

        def and_drop(batch):
            events = iterate(batch)
            while batch._spec_queue.last_admitted() is not None and chaos.rng.random() < 0.5:
                batch._drop_last_child()
                chaos.num_dropped += 1
            ahead = [row for row in batch.running if row.node.speculative]
            if ahead and chaos.rng.random() < 0.5:
                row = chaos.rng.choice(ahead)
                batch.running.remove(row)
                batch._preempt(row)
                chaos.num_parked += 1
            return events

        def sometimes(batch):
            if chaos.rng.random() < 0.8:
                fill(batch)

        monkeypatch.setattr(RunningBatch, "iterate", and_drop)
        monkeypatch.setattr(RunningBatch, "_fill_idle_slots", sometimes)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_tree_is_the_same_with_every_strategy(make_solver, monkeypatch, name):
    options = {**real_options(name, **FAST), "dtype": exact_dtype()}
    expected, plain = searched(make_solver(**options))
    assert plain.tokens.speculated == 0
    with make_solver(**options, speculation="exact") as solver:
        found, solution = searched(solver)
        assert found == expected
        assert 0 < solution.tokens.speculated_kept <= solution.tokens.speculated
        chaos = Chaos(monkeypatch)
        assert searched(solver)[0] == expected
    assert chaos.num_dropped + chaos.num_parked


def test_the_verifier_may_be_kept_from_what_is_ahead(monkeypatch):
    """Decoupled exploration, Alg. 4: the PRM never scores speculation; the tree is the same."""
    score, ahead = VerifierCaller.score, []

    def noted(scoring, nodes):
        ahead.extend(node for node in nodes if node.speculative)
        return score(scoring, nodes)

    problem = load_problems("bundled:test", 2).problems[1].problem
    options = {"model": "bundled", "verifier": "bundled", "search": "beam", "n": 16, "width": 2}
    options |= {"dtype": exact_dtype(), "speculation": "exact"}
    found = {}
    monkeypatch.setattr(VerifierCaller, "score", noted)
    for verify_ahead in ("never", "slack"):
        with Solver(**options, verify_ahead=verify_ahead) as solver:
            found[verify_ahead], solution = searched(solver, problem)
            assert solution.tokens.speculated > 0
        assert bool(ahead) == (verify_ahead == "slack")
    assert found["never"] == found["slack"]


def test_truncated_duplicates_are_written_as_any_step_is(make_solver):
    """The paper's way changes the tree, and says so; tokens, KV and ends still fit together."""
    options = {**FAST, "search": "beam", "dtype": "float64", "max_step_tokens": 40}
    options |= {"max_tokens": 90, "n": 12, "width": 4}
    (exact_hash, _), plain = searched(make_solver(**options))
    with make_solver(**options, speculation="truncate") as solver:
        _, solution = searched(solver)
        tree = solution.tree
        families = [node.children for node in tree.nodes() if len(node.children) > 1]
        shared = [common(*family[:2]) for family in families if family[0].parent is not tree.root]
        assert max(shared) > 3, "siblings begin alike"
        for node in tree.finished():
            found = [logprob for step in node.path()[1:] for logprob in step.logprobs]
            tokens = node.path_token_ids()
            said = logprobs(solver.generator.decoder, tuple(tokens))
            start = node.root.end
            expected = said[start - 1 : -1].gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
            assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(solution.candidates) == len(plain.candidates)
    assert solution.tree_hash != exact_hash
    assert (plain.exact, solution.exact) == (True, False)
    assert any("--speculation truncate" in line for line in solution.warnings)


def test_r_is_what_copies_keep(make_solver):
    """FlashTTS's truncation ratio, which a recipe may name."""
    options = {**FAST, "search": "beam", "dtype": "float64", "max_step_tokens": 40, "n": 12}
    kept = {}
    for ratio in (0.0, 0.5, 1.0):
        with make_solver(**options, speculation="truncate", truncation=ratio) as solver:
            tree = solver.solve(PROBLEM).tree
        families = [node.children for node in tree.nodes() if node.parent is not None]
        pairs = [family[:2] for family in families if len(family) > 1]
        kept[ratio] = sum(common(*pair) for pair in pairs) / len(pairs)
    assert kept[0.0] < kept[0.5] < kept[1.0]


def common(first, second):
    """Tokens that two steps begin with."""
    pairs = zip(first.token_ids, second.token_ids, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


# --- prospects that cannot be ----------------------------------------------------------------


class Foreseeing:
    foresees_by_score = True

    def __init__(self, *found):
        self.found = found

    def prospects(self, tree, beams, ahead):
        return self.found


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda first, ended: "x", "is not a Prospect"),
        (lambda first, ended: Prospect(ended, 1), "extends a path that has ended"),
        (lambda first, ended: Prospect(first, 0), "gives 0 children"),
        (lambda first, ended: Prospect(new_tree().root, 1), "not a node of this tree"),
    ],
)
def test_prospects_are_checked(wrong, words):
    tree = new_tree()
    first, ended = tree.expand(tree.root, 2)
    add_step(tree, first, "x.")
    add_step(tree, ended, "x.", stop=StopReason.EOS)
    assert collect_prospects(Foreseeing(Prospect(first, 2)), tree, [first], []) == [
        Prospect(first, 2)
    ]
    assert collect_prospects(object(), tree, [first], []) == []
    with pytest.raises(PolicyError, match=words):
        collect_prospects(Foreseeing(wrong(first, ended)), tree, [first, ended], [])


class Ranks:
    """A listwise judge: a step's score is its place among those of the call."""

    def __init__(self, **says):
        self.calls = []
        vars(self).update(says)

    def score(self, nodes):
        self.calls.append(len(nodes))
        order = sorted(nodes, key=lambda node: (len(node.step_text), node.step_text))
        return [order.index(node) / len(nodes) for node in nodes]


@pytest.mark.parametrize("says", [{}, {"listwise": True, "beside_decoding": True}])
@pytest.mark.parametrize("explore", ["continuous", "decoupled"])
def test_scores_that_depend_on_the_call_make_the_same_tree(make_solver, says, explore):
    """A verifier object that does not say that a path's score is its own gets whole rounds."""
    trees, calls = [], []
    for speculation in ("off", "exact"):
        ranks = Ranks(**says)
        options = {**FAST, "search": "beam", "dtype": exact_dtype(), "verifier": ranks}
        with make_solver(**options, speculation=speculation, explore=explore) as solver:
            found, solution = searched(solver)
            problems = [("a", PROBLEM), ("b", "Ann has two.")]
            others = solver.solve_many(problems, in_flight=2)
            trees.append((found, {name: each.tree_hash for name, each in others}))
            calls.append(sorted(ranks.calls))
    assert solution.tokens.speculated_kept
    assert trees[0] == trees[1]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("says", [{"listwise": False}, {"beside_decoding": True}])
def test_who_says_that_scores_are_each_their_own_is_asked_early(make_solver, says):
    ranks = Ranks(**says)
    with make_solver(
        **FAST, search="beam", dtype=exact_dtype(), verifier=ranks, speculation="exact"
    ) as solver:
        solution = solver.solve(PROBLEM)
    assert len(ranks.calls) > solution.rounds


@pytest.mark.nightly
def test_what_a_row_that_has_left_read_may_leave_the_device_before_the_batch_is_smaller():
    """Without a copy on the host nothing of it is left, and its place in the batch is still there
    until the next rows join."""
    options = {"search": "dynamic", "n": 4, "width": 4, "max_rounds": 3, "seed": 61}
    problems = [(p.unique_id, p.problem) for p in load_problems("bundled:test", 3).problems]
    hashes = []
    for places in ({}, {"kv_memory": "4MiB", "evict": "recompute", "attention": "reference"}):
        with Solver(speculation="exact", dtype="float64", **options, **places) as solver:
            solved = dict(solver.solve_many(problems, in_flight=3))
        hashes.append({name: solution.tree_hash for name, solution in solved.items()})
    assert hashes[0] == hashes[1]


# --- whether it pays, from made-up rounds --------------------------------------------------------


UNEVEN, EVEN = [10, 20, 30, 140], [30, 31, 32, 30]


def after(rounds, of_a_call, lengths):
    """What is known when rounds of so many calls of the verifier are over."""
    payoff = Payoff()
    for calls in rounds:
        verify_s = calls * of_a_call + len(lengths) * 0.001
        spent = Counters(
            decode_s=1.0, verify_s=verify_s, verifier_calls=calls, scored_tokens=sum(lengths)
        )
        payoff.record_round(lengths, spent, calls)
    return payoff


@pytest.mark.parametrize(
    ("rounds", "of_a_call", "lengths", "pays"),
    [
        ([1], 0.0, UNEVEN, False),  # nothing is known before the second round
        ([1, 1], 0.0, UNEVEN, True),
        ([1, 5], 0.005, UNEVEN, True),
        ([1, 5], 0.5, UNEVEN, False),  # dear calls
        ([1, 5], 0.02, EVEN, False),  # nobody waits for long
        ([1, 5], 0.0, [12, 17, 20, 24], False),  # too short for rows that join
    ],
)
def test_uneven_steps_and_cheap_calls_pay(rounds, of_a_call, lengths, pays):
    assert after(rounds, of_a_call, lengths).pays is pays
