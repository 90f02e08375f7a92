"""A scripted solver in place of the engine: evaluation is tested in milliseconds."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.search.answer_keys import normalise_answer


def vote_of(answer):
    return normalise_answer(answer) if answer and answer.strip() else None


def solution_of(answers, scores=None, stops=None, **changes):
    """What `solve --json` prints, as far as it is looked at; candidates of 10, 20, ... tokens."""
    scores = scores or [0.5] * len(answers)
    stops = stops or ["eos"] * len(answers)
    candidates = [
        {"answer": answer, "vote": vote_of(answer), "score": score, "stop": stop}
        | {"tokens": 10 * number}
        for number, (answer, score, stop) in enumerate(zip(answers, scores, stops, strict=True), 1)
    ]
    first = candidates[0] if candidates else dict.fromkeys(("answer", "score", "stop"))
    content = {
        **{name: first[name] for name in ("answer", "score", "stop")},
        **{"rounds": 3, "candidates": candidates, "goodput_tok_s": 10.0},
        "tokens": {"generated": 30, "kept": 20, "speculated": None},
        "kv": {"device_peak_bytes": 1024},
        "time": {"total_s": 1.5, "decode_s": 1.0, "stall_s": None},
        **{"tree_hash": "abc", "exact": True},
        **changes,
    }
    return SimpleNamespace(to_json=lambda: content)


@dataclass
class FakeSolver:
    """Answers each problem with its scripted outcome, else with "1"; remembers the calls."""

    outcomes: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)

    def __call__(self, problems):
        for i, _ in problems:
            self.asked.append(i)
            yield i, self.outcomes.get(i, solution_of(["1"]))


@pytest.fixture
def fake_solver():
    return FakeSolver()


@pytest.fixture
def make_solution():
    return solution_of


@pytest.fixture
def write_jsonl(tmp_path):
    def write(*lines, name="set.jsonl"):
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return str(path)

    return write


@pytest.fixture(scope="session")
def checker():
    with AnswerChecker() as shared:
        yield shared
