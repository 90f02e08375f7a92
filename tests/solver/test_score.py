"""Steps that somebody gives, scored by the verifier: alone, and beside searches."""

import pytest

from beamwright import Solver
from beamwright.cli.demo import PROBLEM as ASKED
from beamwright.errors import BeamwrightError, CapacityError, InputError
from engines import PROBLEM, assert_nothing_allocated
from tables import beside

CASES = beside(__file__)

LONG_S = 120.0
SMALL = {"n": 4, "width": 2, "max_rounds": 3, "dtype": "float64"}


def paths_of(solution):
    ends = [solution.tree.node(candidate.lineage) for candidate in solution.candidates]
    return [[step.step_text for step in end.reply()] for end in ends]


def assert_same_scores(found, expected, within=1e-6):
    for given, drawn in zip(found, expected, strict=True):
        assert given.step_scores == pytest.approx(drawn.step_scores, rel=0, abs=within)
        assert given.score == pytest.approx(drawn.score, rel=0, abs=within)


# --- of models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled():
    with Solver(n=8, width=4) as solver:
        yield solver
    assert_nothing_allocated(solver)


def test_scores_are_those_of_a_search_that_wrote_the_same_steps(bundled):
    drawn = bundled.solve(ASKED)
    paths = paths_of(drawn)
    given = bundled.score_many(ASKED, paths, delimiter="")
    assert_same_scores(given, drawn.candidates, within=1e-4)
    found = bundled.submit_score(ASKED, paths).result(LONG_S)
    alone = [bundled.submit_score(ASKED, [path]).result(LONG_S) for path in paths]
    each_alone = [each.candidates[0] for each in alone]
    assert_same_scores(found.candidates, each_alone, within=0 if bundled.exact else 1e-4)
    assert found.tokens.generated == found.tokens.generator_prefilled == 0
    together, apart = found.tokens, [each.tokens.verifier_prefilled for each in alone]
    assert max(apart) <= together.verifier_prefilled < sum(apart), "what paths share is read once"
    assert found.receipt["unrepeatable"] == "its steps were given, not sampled"
    assert found.goodput_tok_s is None
    assert found.answer == drawn.answer


def test_steps_without_delimiters_are_the_same_path(bundled):
    steps = ["Ann has 12-3=9 apples.\n\n", "Then there are 9.\n\n", "The answer is \\boxed{9}."]
    bare = [step.removesuffix("\n\n") for step in steps]
    expected = bundled.score(ASKED, steps, delimiter="")
    assert bundled.score(ASKED, bare) == bundled.score(ASKED, steps) == expected
    scores = bundled.score(ASKED, steps).step_scores
    assert bundled.score(ASKED, steps, aggregate="mean").score == pytest.approx(sum(scores) / 3)
    assert bundled.score(ASKED, steps, aggregate="min").score == min(scores)


@pytest.mark.parametrize("options", [{"split": "auto"}, {"executor": "overlapped"}, {"n": 1}])
def test_scores_of_a_prm_over_little_memory(make_solver, verifier_folder, options):
    options = {"search": "beam", **SMALL, "verifier": str(verifier_folder), **options}
    if options["n"] == 1:
        options |= {"width": 1, "schedule": "in-gpu"}
    solver = make_solver(**options)
    drawn = solver.solve(PROBLEM)
    assert_same_scores(solver.score_many(PROBLEM, paths_of(drawn), delimiter=""), drawn.candidates)
    solver.close()
    assert_nothing_allocated(solver)


@pytest.mark.parametrize(
    "options",
    [
        {"explore": "lockstep"},
        {"explore": "decoupled", "executor": "overlapped"},
        {"speculation": "exact", "verify_ahead": "slack", "executor": "overlapped"},
        {"split": "auto", "kv_memory": "1MiB", "schedule": "locality"},
    ],
)
def test_searches_have_their_trees_whatever_is_scored_beside_them(
    make_solver, verifier_folder, options
):
    made = {**SMALL, "max_rounds": 6, "verifier": str(verifier_folder), "search": "beam", **options}
    solver, scores = make_solver(**made), []
    paths = [["one, e", "two"], ["one, e", "three, e", "4"]]
    alone = [solver.solve(PROBLEM, seed=seed).tree_hash for seed in range(4)]
    expected = solver.score_many(PROBLEM, paths)

    def on_round(report):
        scores.append(solver.submit_score(PROBLEM, paths))

    searches = [solver.submit(PROBLEM, seed=seed, on_round=on_round) for seed in range(4)]
    assert [search.result(LONG_S).tree_hash for search in searches] == alone
    assert len(scores) > 4
    for score in scores:
        assert_same_scores(score.result(LONG_S).candidates, expected)
    solver.close()
    assert_nothing_allocated(solver)


def test_what_does_not_fit_ends_alone_and_says_what_helps(make_solver, verifier_folder):
    options = {**SMALL, "verifier": str(verifier_folder), "search": "beam"}
    solver = make_solver(**options, kv_memory="200KiB", schedule="in-gpu")
    expected = solver.solve(PROBLEM).tree_hash
    search = solver.submit(PROBLEM)
    paths = [[4 * f"{number:02}abcdfgh" for number in range(i, i + 6)] for i in range(40)]
    with pytest.raises(CapacityError, match="give fewer paths at a time"):
        solver.score_many(PROBLEM, paths)
    assert solver.score_many(PROBLEM, paths[:1])[0].score is not None
    assert search.result(LONG_S).tree_hash == expected
    solver.close()
    assert_nothing_allocated(solver)


# --- of a function ---------------------------------------------------------------------------


class Lengths:
    """Remembers what it was asked. The first step that says so fails."""

    def __init__(self):
        self.asked = []

    def __call__(self, problem, steps):
        self.asked.append((problem, steps))
        if "fail" in steps[-1]:
            raise ValueError("as it says")
        return 1 / (1 + len(steps[-1]))


@pytest.fixture
def solver(make_solver):
    made = make_solver(**SMALL, search="beam", verifier=Lengths())
    yield made
    made.close()
    assert_nothing_allocated(made)


def test_a_function_is_asked_about_each_step_as_it_stands(solver):
    first, second = solver.score_many("1+1", [["one, e", "", "two"], ["three"]], delimiter="")
    assert first.step_scores == (1 / 7, None, 1 / 4)
    assert (first.score, first.text) == (1 / 4, "one, etwo")
    assert second.step_scores == (1 / 6,)
    assert solver.verifier.function.asked == [
        ("1+1", ["one, e"]), ("1+1", ["three"]), ("1+1", ["one, e", "two"]),
    ]  # fmt: skip


def test_scores_come_while_a_search_has_all_places(solver):
    solver.most_submitted = 1
    expected, scores, done = solver.solve(PROBLEM, seed=1), [], []

    def on_round(report):
        done.append([score.done() for score in scores])
        if report.round == 1:
            scores.append(solver.submit_score("1+1", [["two"]]))

    search = solver.submit(PROBLEM, seed=1, on_round=on_round)
    waiting = solver.submit(PROBLEM, seed=2)
    found = search.result(LONG_S)
    assert done == [[], [False], [True]], "it came between two iterations of the search"
    assert scores[0].result(LONG_S).candidates[0].score == 1 / 4
    assert found.tree_hash == expected.tree_hash
    assert waiting.result(LONG_S).tree_hash == solver.solve(PROBLEM, seed=2).tree_hash


def test_a_failure_is_of_its_own_scores_alone(solver):
    expected, scores = solver.solve(PROBLEM), []

    def on_round(report):
        if report.round == 1:
            scores.append(solver.submit_score("1+1", [["good, e", "fail"], ["good"]]))

    assert solver.submit(PROBLEM, on_round=on_round).result(LONG_S).tree_hash == expected.tree_hash
    with pytest.raises(InputError, match="step 2: it raised ValueError: as it says"):
        scores[0].result(LONG_S)
    assert solver.score("1+1", ["good"]).score == 1 / 5


def test_a_deadline_leaves_no_half_of_the_scores(solver):
    with pytest.raises(BeamwrightError, match="had passed before all steps were scored"):
        solver.score("1+1", ["one, e", "two"], deadline=1e-6)
    assert solver.score("1+1", ["two"], deadline=1e-6).score == 1 / 4


# --- what is refused -------------------------------------------------------------------------


class Drawn:
    token_stats = frozenset({"entropy"})

    def score(self, nodes):
        return [0.0 for _ in nodes]


class Ids(Drawn):
    token_stats = frozenset()
    reads_drawn = True


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ("logprob", "--verifier logprob scores only sampled tokens"),
        ("deepconf:8", "--verifier deepconf:8 scores only sampled tokens"),
        ("none", "--verifier none scores no steps"),
        (Drawn(), "verifier Drawn scores only sampled tokens"),
        (Ids(), "scores only sampled tokens"),
    ],
)
def test_a_verifier_says_that_it_reads_what_was_drawn(make_solver, verifier, words):
    with make_solver(search="majority", verifier=verifier) as solver:
        with pytest.raises(InputError, match=words):
            solver.score("1+1", ["two"])
        assert solver.solve(PROBLEM).candidates


@pytest.mark.parametrize(
    ("paths", "options", "words"),
    [
        *CASES["refused"],
        ([["two"] * 1025], {}, r"path 0.* tokens long"),
        ([["abc" * 1025]], {}, r"path 0.* tokens long"),
    ],
    ids=lambda each: str(each)[:30].encode("ascii", "replace").decode(),
)
def test_bad_paths_and_options_are_refused(solver, paths, options, words):
    with pytest.raises(InputError, match=words):
        solver.score_many(**{"problem": "1+1", "paths": paths, **options})
