"""Problems that cannot be used are an error of their own, found before they cost anything."""

import json
from datetime import datetime
from functools import partial

import pytest

from beamwright.engine import chains
from beamwright.engine.engine import Engine
from beamwright.errors import InputError, ProblemTooLongError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run
from beamwright.models.tokenizer import TextCodec
from beamwright.protocols import StepAwaited
from engines import PROBLEM, assert_nothing_allocated, exact_dtype


@pytest.mark.parametrize("text", ["\ud800 eggs", "eggs \udfff", "\ud83d"])
def test_half_a_character_is_no_text(make_solver, text):
    with make_solver(n=4) as solver, pytest.raises(InputError, match="is half of one"):
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


@pytest.mark.parametrize("template", ["{{ '' }}", "{% if false %}x{% endif %}"])
def test_a_template_that_renders_nothing(make_solver, template):
    solver = make_solver(n=4, chat_template=template)
    with solver, pytest.raises(InputError, match="leaves the problem out of the prompt"):
        solver.solve(PROBLEM)


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
    assert "half of one" in "".join(errors)
    assert "2,000,002 characters" in "".join(errors)


def test_a_context_too_short_for_anything(make_solver):
    for context in (1, 2, 12, 19):
        with pytest.raises(InputError, match="--context must be at least 20"):
            make_solver(n=4, context=context)
    with make_solver(n=4, context=20) as solver:
        assert solver.solve("12").candidates


# --- long prompts, read in pieces ------------------------------------------------------------

LONG = "a cab " * 30


@pytest.fixture
def pieces(monkeypatch):
    """Prompts are read eight tokens at a time; open steps that wait for more, piece by piece."""
    found, commit = [], Engine._settle

    def noted(engine, run, event):
        found.extend([event] * isinstance(event, StepAwaited))
        commit(engine, run, event)

    monkeypatch.setattr(chains, "_PIECE_TOKENS", 8)
    monkeypatch.setattr(Engine, "_settle", noted)
    return found


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


def test_between_two_pieces_deadlines_are_heard(make_solver, pieces):
    with make_solver(n=4, deadline=1e-6) as solver:
        with pytest.raises(InputError, match="had passed while the prompt was read"):
            solver.solve(LONG)
        assert len(pieces) == 1
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
