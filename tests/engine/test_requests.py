"""What is asked: prompts that cannot be used, long ones, and requests of all kinds in a batch."""

import json
from datetime import datetime
from functools import cache, partial

import pytest

from beamwright.engine import chains
from beamwright.errors import InputError, ProblemTooLongError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run
from beamwright.models.tokenizer import TextCodec
from engines import PROBLEM, assert_nothing_allocated, exact_dtype, facts, tiny_solver


@pytest.mark.parametrize("text", ["\ud800 eggs", "eggs \udfff", "\ud83d"])
def test_half_a_character_is_no_text(make_solver, text):
    with make_solver(n=4) as solver, pytest.raises(InputError, match="is a lone surrogate"):
        solver.solve(text)
    with pytest.raises(InputError, match=r"system[-_]prompt"):
        make_solver(n=4, system_prompt=text).solve(PROBLEM)


def test_a_long_text_is_not_tokenised_to_its_end(make_solver, monkeypatch):
    seen = []
    real = TextCodec.encode

    def encode(codec, text):
        seen.append(len(text))
        return real(codec, text)

    with make_solver(n=4) as solver:
        monkeypatch.setattr(TextCodec, "encode", encode)
        with pytest.raises(ProblemTooLongError, match="30,000,002 characters"):
            solver.solve("the 12 " * 4_000_000 + "x" * 2_000_000)
    assert sum(seen) < 200_000


def test_an_eval_goes_on_past_problems_that_cannot_be_used(make_solver, tmp_path):
    problems = ["\ud800 eggs", PROBLEM, "x" * 2_000_000, PROBLEM]
    file = tmp_path / "set.jsonl"
    rows = [json.dumps({"problem": text, "answer": "1", "id": "\ud800"}) for text in problems]
    file.write_text("\ufeff" + "\n".join(rows), encoding="utf-8")
    records = []
    with make_solver(n=4, max_rounds=2) as solver, AnswerChecker() as checker:
        keep = {"on_record": lambda record, done, total: records.append(record)}
        problems = load_problems(str(file))
        solve_many = partial(solver.solve_many, in_flight="auto")
        report = run(problems, solve_many, solver.settings, checker, **keep)
    assert report["errors"] == 2
    errors = sorted(each.error for each in records if each.error)
    assert len(records) == 4
    assert "surrogate" in "".join(errors)
    assert "2,000,002 characters" in "".join(errors)


def test_a_context_too_short_for_anything(make_solver):
    for context in (1, 2, 12, 19):
        with pytest.raises(InputError, match="--context must be at least 20"):
            make_solver(n=4, context=context)
    with make_solver(n=4, context=20) as solver:
        assert solver.solve("12").candidates


# --- long prompts, read in pieces ------------------------------------------------------------

LONG = "a cab " * 30


@pytest.mark.parametrize("place", [{}, {"kv_memory": 48 * 4096, "host_memory": "1MiB"}])
def test_a_prompt_that_is_read_in_pieces_leads_to_the_same_tree(make_solver, monkeypatch, place):
    options = {"n": 4, "dtype": exact_dtype(), **place}
    problems = [("long", LONG), ("short", "a cab"), ("other", LONG[::-1])]

    def found():
        with make_solver(**options) as solver:
            solutions = dict(solver.solve_many(problems, in_flight=3))
            assert_nothing_allocated(solver)
        return {name: each.tree_hash for name, each in solutions.items()}

    expected = found()
    monkeypatch.setattr(chains, "_PIECE_TOKENS", 8)
    assert found() == expected


def test_between_two_pieces_deadlines_are_heard(make_solver, monkeypatch):
    monkeypatch.setattr(chains, "_PIECE_TOKENS", 8)
    with make_solver(n=4, deadline=1e-6) as solver:
        with pytest.raises(InputError, match="had passed before the prompt was read"):
            solver.solve(LONG)
        assert_nothing_allocated(solver)
        assert solver.solve("a cab").candidates  # its first steps are waited for


def test_the_time_that_a_template_reads_is_part_of_the_search(make_solver, monkeypatch, tmp_path):
    """Begun on one day, resumed and grown again on the next."""

    class Clock(datetime):
        day = 1

        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, cls.day, tzinfo=tz)

    monkeypatch.setattr("beamwright.solver.request.datetime", Clock)
    template = "{{ strftime_now('%A') }} {{ messages[-1].content }}\n\n"
    file, options = tmp_path / "search.json", {"n": 4, "max_rounds": 3, "chat_template": template}
    with make_solver(**options) as solver:
        whole = solver.solve(PROBLEM)
        solver.solve(PROBLEM, checkpoint=file, token_budget=1)
    now = whole.receipt["settings"]["now"]
    assert now == "2026-11-01T00:00:00"
    Clock.day = 2
    with make_solver(**options) as solver:
        assert solver.resume(file).receipt["settings"]["now"] == now
        assert solver.solve(PROBLEM, now=now).receipt["prompt"] == whole.receipt["prompt"]
        assert solver.solve(PROBLEM).receipt["prompt"] != whole.receipt["prompt"]
    with make_solver(n=4) as solver:
        assert "now" not in solver.solve(PROBLEM).receipt["settings"]


# --- requests that are decoded each in its own way, in one batch --------------------------------


COMMON = {"n": 4, "width": 2, "max_rounds": 3, "dtype": "float64"}
LIMITS = {"delimiter": "e", "max_step_tokens": 12, "max_tokens": 40}
REQUESTS = {
    "plain": {},
    "greedy": {"temperature": 0.0, "max_step_tokens": 30},
    "top-p": {"temperature": 0.7, "top_p": 0.9, "seed": 1, "delimiter": "a"},
    "min-p": {"temperature": 1.3, "min_p": 0.1, "seed": 2, "delimiter": " t", "max_tokens": 60},
    "top-k": {"top_k": 7, "seed": 3, "max_tokens": 25},
    "fixed": {"step_tokens": 9, "seed": 4, "ignore_eos": True},
    "stops": {"stop_strings": ["a", "th", "e"], "seed": 5, "delimiter": "x"},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "step_limits": "3,30"},
}


def together(solver, requests):
    """The trees of these requests, all in flight at a time."""
    handles = {
        name: solver.submit(PROBLEM, problem_id=name, **{**LIMITS, **options})
        for name, options in requests.items()
    }
    trees = {name: handle.result(600).tree for name, handle in handles.items()}
    solver.close()
    assert_nothing_allocated(solver)
    return {name: facts(tree) for name, tree in trees.items()}


@pytest.fixture(scope="module")
def alone(generator_folder):
    """What each request's tree is where the whole solver has its settings."""

    @cache
    def solve(name):
        with tiny_solver(generator_folder, **{**COMMON, **LIMITS, **REQUESTS[name]}) as solver:
            return facts(solver.solve(PROBLEM, problem_id=name).tree)

    return solve


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": "on", "max_batch": 11},
        {
            "schedule": "locality",
            "kv_memory": 15 * 8192,
            "host_memory": "4MiB",
            "batching": "continuous",
        },
    ],
    ids=str,
)
def test_mixed_requests_grow_the_trees_that_they_grow_alone(make_solver, alone, options):
    with make_solver(**COMMON, **options) as solver:
        found = together(solver, REQUESTS)
    assert {name: alone(name) for name in REQUESTS} == found
    assert len({str(tree) for tree in found.values()}) == len(REQUESTS)
