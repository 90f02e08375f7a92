"""`ClusterSolver.solve_many`: whole solutions from engines elsewhere, as they are here."""

import pytest

from beamwright import Solver
from clusters import local_ray

pytest.importorskip("ray.serve")

from beamwright import Settings
from beamwright.cluster.serving import Cluster
from beamwright.cluster.solver import ClusterSolver

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # Ray has its own
OPTIONS = {"n": 8, "width": 4, "max_rounds": 6}
PROBLEMS = [(f"p{i}", f"Ann has {i + 3} apples. Ann eats {i}. How many?", {}) for i in range(3)]


@pytest.fixture(scope="module")
def cluster():
    with local_ray(cpus=2):
        yield


@pytest.fixture(scope="module")
def solver():
    with Solver(model="bundled", **OPTIONS) as solver:
        yield solver


def test_solve_many_on_ray_gives_what_it_gives_here(cluster, solver):
    """Whole solutions, options of single ones included."""
    problems = [*PROBLEMS, ("mine", PROBLEMS[0][1], {"n": 4, "seed": 3})]
    here = solver.solve_many(problems)
    settings = Settings.build(model="bundled", **OPTIONS)
    with ClusterSolver(Cluster(replicas=2), settings) as cluster_solver:
        ended = dict(cluster_solver.solve_many(problems, tells="tree"))
    far = [ended[problem[0]] for problem in problems]
    assert [each.tree_hash for each in far] == [each.tree_hash for each in here]
    for found, expected in zip(far, here, strict=True):
        assert found.candidates == expected.candidates
        assert found.settings == expected.settings
        steps = [(n.lineage, n.text, n.score, n.state) for n in found.tree.nodes()]
        assert steps == [(n.lineage, n.text, n.score, n.state) for n in expected.tree.nodes()]


def test_trees_of_an_evaluation_are_pages_here(cluster, tmp_path, monkeypatch):
    from contextlib import ExitStack

    from beamwright.cli.eval import Evaluation
    from beamwright.cli.live import Status
    from beamwright.evaluate.equivalence import AnswerChecker
    from beamwright.evaluate.problems import load_problems

    problem_set = load_problems("bundled:test", 2)
    first, second = problem_set.problems
    work = Evaluation(problem_set, tmp_path, None, 1, AnswerChecker(), Cluster(replicas=1))
    settings = Settings.build(model="bundled", **OPTIONS)
    with ExitStack() as stack:
        pages = {first.unique_id: tmp_path / "trees" / "0000.html"}
        solve_many = work.solving(settings, pages, stack, Status())
        pairs = [(each.unique_id, each.problem) for each in (first, second)]
        found = dict(solve_many(pairs, in_flight="auto"))
    assert len(found) == 2
    assert not work.failures
    (page,) = (tmp_path / "trees").iterdir()
    assert found[first.unique_id].tree_hash[:8]
    assert "<html" in page.read_text()
