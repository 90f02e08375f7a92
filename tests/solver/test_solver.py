import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import pytest

from beamwright import Solution, Solver
from beamwright.config import Settings
from beamwright.errors import InputError, ProblemTooLongError
from beamwright.search.beam import BeamSearch
from beamwright.tree import NodeState, tree_hash
from engines import PROBLEM, assert_nothing_allocated, grow
from tables import beside

CASES = beside(__file__)

RANDOM = "random:llama,layers=2,hidden=32,heads=4,kv_heads=2,intermediate=48,vocab=90,context=256"
SYNTHETIC = {"model": RANDOM, "verifier": "logprob", "n": 4, "width": 2, "step_tokens": 6}


@pytest.fixture
def with_prm(make_solver, verifier_folder):
    """A solver whose verifier is a PRM with a tokenizer of its own."""

    def make(**changes):
        return make_solver(verifier=str(verifier_folder), **changes)

    return make


# --- one problem -----------------------------------------------------------------------------


def test_a_solution_describes_its_tree(make_solver):
    solver = make_solver()
    solution, tree = grow(solver)
    assert solution.tree is tree
    assert solution.settings == solver.settings
    nodes = [node for node in tree.nodes() if node.parent]
    final = tree.finished() + tree.candidates()
    assert solution.tree_stats.nodes == len(nodes)
    assert solution.tree_stats.pruned == sum(node.state is NodeState.PRUNED for node in nodes)
    assert solution.tree_stats.path_tokens == sum(node.num_path_tokens for node in final)
    assert [c.text for c in solution.candidates] == [node.text for node in final]
    for candidate, node in zip(solution.candidates, final, strict=True):
        assert tree.node(candidate.lineage) is node
        assert candidate.step_scores == tuple(each.step_score for each in node.path()[1:])
    assert solution.rounds == tree.rounds
    assert len(solution.candidates) == 16
    assert solution.reason_fewer is None
    (chosen,) = [c for c in solution.candidates if c.lineage == solution.lineage]
    assert (solution.text, solution.score) == (chosen.text, chosen.score)
    assert solution.kv.device_peak_bytes > 0


def test_hits_and_misses_of_both_models(with_prm, make_solver):
    """Where everything fits, what is computed is computed once and never leaves."""
    solution, tree = grow(with_prm(n=8))
    found = solution.to_json()["cache"]
    for role in ("generator", "verifier"):
        each = found[role]
        parts = ("reused_tokens", "loaded_tokens", "recomputed_tokens", "prefilled_tokens")
        assert each["needed_tokens"] == sum(each[part] for part in parts)
        assert each["prefilled_tokens"] == getattr(solution.tokens, f"{role}_prefilled")
        assert each["hit_rate"] == each["reused_tokens"] / each["needed_tokens"] > 0.5
        assert not any(count for name, count in each.items() if name.endswith("blocks"))
    assert found["verifier"]["reused_tokens"] == solution.tokens.verifier_reused
    scored = [node for node in tree.nodes() if node.parent and node.step_text]
    for node in scored:  # by the spec's aggregate
        steps = [step.step_score for step in node.path()[1:] if step.step_score is not None]
        assert 0 < min(steps) == node.score < 1
    joined = [node for node in tree.nodes() if node.parent is not None]
    needed = sum(node.start for node in joined) + tree.root.end
    assert found["generator"]["needed_tokens"] == needed
    assert grow(make_solver())[0].cache.verifier is None


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_what_equal_paths_cost_the_verifier(with_prm, temperature):
    """Each is read once, however its round is cut into calls."""
    found = [
        grow(with_prm(n=16, width=4, temperature=temperature, speculation=how))
        for how in ("off", "exact")
    ]
    assert len({tree_hash(tree) for _, tree in found}) == 1
    assert len({solution.tokens.verifier_prefilled for solution, _ in found}) == 1
    assert found[0][0].score == found[1][0].score
    solution, tree = found[0]
    new: dict[tuple[int, ...], int] = {}
    for node in tree.nodes():
        length = new.setdefault(tuple(node.path_token_ids()), node.usage["verifier_prefilled"])
        assert node.usage["verifier_prefilled"] in (0, length)
    assert solution.tokens.verifier_prefilled == sum(new.values())
    assert (solution.tokens.repeated > 0) == (len(new) < len(list(tree.nodes())))
    assert solution.tokens.repeated <= solution.tokens.generated


@pytest.mark.parametrize("evict", ["host", "recompute"])
def test_what_had_left_and_is_needed_again_is_counted(make_solver, evict):
    options = {"n": 8, "max_step_tokens": 24, "max_rounds": 3, "speculation": "off"}
    peak = grow(make_solver(**options))[0].kv.device_peak_bytes
    tight = make_solver(
        **options, evict=evict, kv_memory=peak // 2, host_memory="8MiB", prefetch=False
    )
    solution, _ = grow(tight)
    found = solution.cache.generator
    back = found.loaded_blocks + found.recomputed_blocks
    assert found.evicted_blocks >= back > 0
    assert (found.loaded_blocks == 0) == (evict == "recompute")
    assert (found.recomputed_blocks == 0) == (evict == "host")
    assert found.hit_rate < grow(make_solver(**options))[0].cache.generator.hit_rate
    block_bytes = tight.generator.store.device.bytes_per_block
    assert found.loaded_blocks * block_bytes == solution.kv.h2d_bytes


# --- several problems ------------------------------------------------------------------------

PROBLEMS = [(i, f"Ann has {i} apples. " * (1 + i % 3)) for i in range(5)]


def test_a_problems_own_error_takes_its_place(make_solver):
    solver = make_solver(n=4, width=2)
    found = solver.solve_many([(0, "1+1"), (1, " \n"), (2, "x" * 1100), (3, "2+2")])
    kinds = [Solution, InputError, ProblemTooLongError, Solution]
    assert [type(each) for each in found] == kinds
    assert found[3].tree_hash == solver.solve("2+2", problem_id=3).tree_hash
    assert [type(each) for each in solver.solve_many([(0, "")])] == [InputError]
    assert solver.solve_many([]) == []


# --- threads ---------------------------------------------------------------------------------


def test_calls_from_several_threads_run_one_after_another(make_solver):
    """The budget holds one search; of four at once, some would run out."""
    solver = make_solver(n=8, schedule="in-gpu", kv_memory=48 * 4096)
    alone = [solver.solve(problem, problem_id=i).tree_hash for i, problem in PROBLEMS[:4]]
    seen, start = [], threading.Barrier(4)

    def solve(problem_id, problem):
        start.wait()
        seen_by = lambda report: seen.append(report.tree.root.problem_id)  # noqa: E731
        return solver.solve(problem, problem_id=problem_id, on_round=seen_by)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(solve, *zip(*PROBLEMS[:4], strict=True)))
    assert [solution.tree_hash for solution in found] == alone
    assert len([*groupby(seen)]) == 4, "rounds of two searches took turns"
    assert_nothing_allocated(solver)


# --- bad input -------------------------------------------------------------------------------


def test_a_problem_that_fills_the_context_names_both_lengths(make_solver):
    solver = make_solver(context=40)
    with pytest.raises(ProblemTooLongError, match=r"42 tokens long, .*context of 40"):
        solver.solve("x" * 41)  # and the blank line after it, one token
    assert solver.solve("x" * 38).candidates


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        *CASES["options"],
        ({"strategy": BeamSearch, "search": "beam"}, "either strategy= .* or search="),
        ({"settings": Settings()}, "not both"),
    ],
    ids=str,
)
def test_bad_options_are_input_errors(generator_folder, options, complaint):
    with pytest.raises(InputError, match=complaint) as found:
        Solver(**{"model": str(generator_folder), "verifier": "logprob", **options})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("method", "given", "options", "complaint"),
    [
        *CASES["calls"],
        *(("solve_many", [(0, "1+1", own)], {}, words) for own, words in CASES["own"]),
    ],
)
def test_a_wrong_type_is_one_clear_error(make_solver, method, given, options, complaint):
    with pytest.raises(InputError, match=complaint) as found:
        getattr(make_solver(n=4, width=2), method)(given, **options)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_a_str_or_a_path(generator_folder, tmp_path, kind):
    file, recipe = kind(tmp_path / "search.json"), tmp_path / "recipe.yaml"
    recipe.write_text("search: {n: 4, width: 2}\nstep: {max_step_tokens: 9}\n")
    settings = Settings.build(kind(recipe), model=kind(generator_folder), verifier="logprob")
    solver = Solver(settings)
    assert solver.solve("1+1", checkpoint=file).tree_hash == solver.resume(file).tree_hash


# --- random shapes ---------------------------------------------------------------------------


def test_a_random_shape_searches_from_a_synthetic_prompt():
    solver = Solver(**SYNTHETIC, max_tokens=18, kv_memory="16MiB")
    solution = solver.synthetic(20)
    assert {c.stop for c in solution.candidates} == {"path_limit"}
    assert {c.tokens for c in solution.candidates} == {18}
    assert solution.tokens.generator_prefilled == 20
    assert solution.text == ""
    assert solution.answer is None
    assert solver.synthetic(20).tree_hash == solution.tree_hash
    assert_nothing_allocated(solver)
    with pytest.raises(InputError, match="has no tokenizer: use --prompt-tokens"):
        solver.solve("1+1")
    with pytest.raises(ProblemTooLongError):
        solver.synthetic(256)


def test_a_prm_cannot_score_steps_without_text(verifier_folder):
    with pytest.raises(InputError, match="no text to score"):
        Solver(**{**SYNTHETIC, "verifier": str(verifier_folder)})


def test_a_function_can_be_the_verifier(make_solver):
    """A path's score is the number of its characters that are not blank."""
    seen = set()

    def length(problem, steps):
        seen.add((problem, len(steps)))
        return len("".join("".join(steps).split())) / 1000

    solution = make_solver(verifier=length, n=8, width=4, max_rounds=3).solve("1+1?")
    assert seen == {("1+1?", number) for number in (1, 2, 3)}
    scored = [each for each in solution.candidates if each.score is not None]
    assert len(scored) > 1
    assert all(each.score == length("1+1?", [each.text]) for each in scored)


# --- what a model is asked, and what is doubtful -----------------------------------------------


def test_without_an_answer_the_last_step_stands(make_solver):
    solution = make_solver(n=4, width=2).solve(PROBLEM)
    assert solution.answer is None
    assert solution.last_step
    assert solution.text.strip().endswith(solution.last_step)
    assert "no candidate states an answer" in solution.warnings[-1]


# --- as they finish --------------------------------------------------------------------------


def test_a_stream_that_is_closed_frees_everything_and_the_solver(make_solver):
    solver = make_solver(n=8)
    expected = solver.solve("1+1").tree_hash
    stream = solver.solve_many(PROBLEMS, in_flight=2)
    next(stream)
    with pytest.raises(InputError, match="is running a search"):
        solver.solve("1+1")
    stream.close()
    assert_nothing_allocated(solver)
    assert solver.solve("1+1").tree_hash == expected
