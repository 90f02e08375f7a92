"""The models in the package: small, readable by `transformers`, and worth searching with."""

import json
from pathlib import Path

import pytest

import beamwright
from beamwright import Solver
from beamwright.checks.model import check_parity
from beamwright.cli.demo import ANSWER, PROBLEM
from beamwright.sections import ModelSettings
from engines import grow

BUNDLED = Path(beamwright.__file__).parent / "bundled"
NUM_SOLVED = 16


@pytest.fixture(scope="module")
def problems():
    lines = (BUNDLED / "dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def beam():
    return Solver(n=16, width=4, kv_memory="64MiB")


@pytest.fixture(scope="module")
def solved(beam, problems):
    """What beam search makes of the first problems, all of them together."""
    asked = [(i, problem["problem"]) for i, problem in enumerate(problems[:NUM_SOLVED])]
    return beam.solve_many(asked)


def test_the_weights_are_half_precision_and_small():
    files = [*BUNDLED.glob("*/*.safetensors")]
    assert {file.parent.name for file in files} == {"generator", "verifier", "thinking"}
    assert sum(file.stat().st_size for file in files) < 12 * 1024**2
    for role in ("generator", "verifier", "thinking"):
        assert json.loads((BUNDLED / role / "config.json").read_text())["torch_dtype"] == "float16"
        assert (BUNDLED / role / "README.md").is_file()


@pytest.mark.parametrize(
    ("role", "most"), [("generator", 3e-4), ("verifier", 3e-4), ("thinking", 1e-3)]
)
def test_transformers_reads_them_with_equal_logits(role, most):
    """Trained logits reach 20, where transformers itself is 1e-4 away from its float64."""
    assert max(check_parity(ModelSettings(model=str(BUNDLED / role))).values()) <= most


def test_paths_end_by_themselves_with_an_answer(beam, problems):
    solution, tree = grow(beam, problems[2]["problem"])
    assert solution.reason_fewer is None
    assert len(solution.candidates) == 16
    assert sum(c.stop == "eos" and c.answer is not None for c in solution.candidates) >= 14
    assert "\\boxed{" + solution.answer + "}" in solution.text
    assert all(0 <= node.step_score <= 1 for node in tree.nodes() if node.parent)


@pytest.mark.nightly
def test_kv_on_the_tree_spares_the_verifier_most_of_its_tokens(solved):
    """Against re-encoding every path of every round, at n = 16 (at least 4 times fewer)."""
    spent = whole = 0
    for solution in solved:
        spent += solution.tokens.verifier_prefilled
        states = [node for node in solution.tree.nodes() if node.parent]
        whole += sum(n.usage["verifier_prefilled"] + n.usage["verifier_reused"] for n in states)
    assert whole >= 4 * spent


def test_searching_solves_more_than_one_sample(solved, problems):
    right = [problem["answer"] for problem in problems[:NUM_SOLVED]]

    def num_correct(solutions):
        pairs = zip(solutions, right, strict=True)
        return sum(solution.answer == truth for solution, truth in pairs)

    one = Solver(search="best-of-n", n=1, kv_memory="64MiB")
    asked = [(i, problem["problem"]) for i, problem in enumerate(problems[:NUM_SOLVED])]
    assert num_correct(solved) > num_correct(one.solve_many(asked))


def test_the_demo_is_a_problem_that_needs_the_search():
    """With the demo's seed, in float64, where another CPU's rounding flips no token."""
    greedy = Solver(search="best-of-n", n=1, temperature=0.0, dtype="float64", seed=1)
    votes = Solver(search="best-of-n", n=16, choose="majority", dtype="float64", seed=1)
    found = Solver(n=16, width=4, dtype="float64", seed=1).solve(PROBLEM)
    answers = [each.answer for each in votes.solve(PROBLEM).candidates]
    assert found.answer == ANSWER
    assert found.score > 0.5
    assert greedy.solve(PROBLEM).answer != ANSWER
    assert answers[0] != ANSWER
    assert max(set(answers), key=answers.count) != ANSWER
