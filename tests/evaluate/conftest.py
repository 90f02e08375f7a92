"""A scripted solver in place of the engine: evaluation is tested in milliseconds."""

import json
from dataclasses import dataclass, field

import pytest

from beamwright.evaluate.equivalence import AnswerChecker


def solution_json(answers, scores=None, stops=None, **changes):
    """The object of `solve --json` for candidates of 10, 20, ... tokens."""
    scores = scores or [0.5] * len(answers)
    stops = stops or ["eos"] * len(answers)
    return {
        "answer": answers[0] if answers else None,
        "text": "steps",
        "score": scores[0] if scores else None,
        "stop": stops[0] if stops else None,
        "rounds": 3,
        "reason_fewer": None,
        "candidates": [
            {"answer": answer, "score": score, "stop": stop, "tokens": 10 * (i + 1)}
            for i, (answer, score, stop) in enumerate(zip(answers, scores, stops, strict=True))
        ],
        "tree": {"nodes": 4, "pruned": 1, "unique_tokens": 30, "path_tokens": 40},
        "tokens": {"generated": 30, "kept": 20, "speculated": None},
        "kv": {"device_peak_bytes": 1024},
        "time": {"total_s": 1.5, "decode_s": 1.0, "stall_s": None},
        "io_share": None,
        "goodput_tok_s": 10.0,
        "tree_hash": "abc",
        "exact": True,
        "seed": 0,
        "schedule": "in-gpu",
        "attention": "tree",
        **changes,
    }


@dataclass
class FakeSolution:
    content: dict

    def to_json(self):
        return self.content


@dataclass
class FakeSolver:
    """Answers each problem with its scripted outcome, else with "1"; remembers the calls."""

    outcomes: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    in_flight: int | None = None

    def __call__(self, problems, *, in_flight):
        self.in_flight = in_flight
        for i, _ in problems:
            self.asked.append(i)
            yield i, self.outcomes.get(i, FakeSolution(solution_json(["1"])))


@pytest.fixture
def fake_solver():
    return FakeSolver()


@pytest.fixture
def make_solution():
    return lambda *args, **changes: FakeSolution(solution_json(*args, **changes))


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
