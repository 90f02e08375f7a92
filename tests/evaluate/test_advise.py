"""Advice from records: a sharp verifier is worth a choice, a blunt one a vote."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.evaluate.advise import make_advice, trial_settings
from beamwright.evaluate.metrics import Record


def records(count: int, paths: int, *, sharp: float, rate: float = 0.4) -> list[Record]:
    """Problems whose paths are right so often, and whose scores say so, sharply or not."""
    rng, made = random.Random(f"{sharp} {rate}"), []
    for index in range(count):
        candidates: list[dict[str, Any]] = []
        for _ in range(paths):
            right = rng.random() < rate
            answer = "7" if right else str(rng.randrange(10, 13))
            path = {"answer": answer, "vote": answer, "score": rng.gauss(sharp * right, 0.2)}
            candidates.append({**path, "stop": "eos", "tokens": 10})
        spent = {"tokens": {"generated": 10 * paths}}
        spent |= {"time": {"total_s": 1.0 * paths, "verify_s": 0.5 * paths}}
        right = candidates[0]["answer"] == "7"
        given = ("?", "7", None, None, right)  # problem, gold, level, answer
        made.append(Record(f"p{index}", index, *given, candidates=candidates, **spent))
    return made


def searched(samples: list[Record], rate: float, tokens: int = 80) -> list[Record]:
    """A search of the same problems that is right so often."""
    return [
        replace(
            record,
            candidates=(),
            correct=(record.index + 1) * rate % 1 < rate,
            tokens={"generated": tokens},
            time={"total_s": tokens / 10},
        )
        for record in samples
    ]


def judge(record: Record) -> dict[str | None, bool | None]:
    return {each["answer"]: each["answer"] == "7" for each in record.candidates}


def test_a_sharp_verifier_is_worth_a_choice():
    samples = records(60, 16, sharp=2.0, rate=0.2)
    said = make_advice(samples, searched(samples, 0.3), "beam", judge)
    assert said["say"].startswith(("Use best of n, n = 8: +", "Use weighted vote, n = 8: +"))
    assert said["noise"]["ranked"] > 0.99
    assert said["noise"]["width"] > 100
    assert said["tokens"]["ways"]["vote"]["k"] == 8  # 80 tokens, 10 a sample
    assert said["seconds"]["ways"]["best of n"]["k"] == 8
    assert said["seconds"]["ways"]["vote"]["k"] == 16  # no verifier to wait for


def test_a_blunt_one_is_worth_a_vote():
    samples = records(60, 16, sharp=0.0)
    said = make_advice(samples, searched(samples, 0.4), "beam", judge)
    assert said["say"].startswith("Do not search, use a vote of 8:")
    assert 1.0 <= said["noise"]["width"] < 1.2
    assert abs(said["noise"]["ranked"] - 0.5) < 0.1


def test_a_search_that_is_ahead_is_named():
    samples = records(60, 16, sharp=0.0)
    said = make_advice(samples, searched(samples, 1.0), "dvts", judge)
    assert said["say"].startswith("Use dvts: +")
    assert said["tokens"]["ways"]["dvts"]["accuracy"]["value"] == 1.0


def test_without_scores_it_is_a_vote_or_one_sample():
    votes = make_advice(records(60, 16, sharp=0.0), (), "beam", judge)
    assert votes["say"].startswith("Vote: 16 samples are +")
    assert votes["noise"] is None
    same = make_advice(records(60, 16, sharp=0.0, rate=1.0), (), "beam", judge)
    assert same["say"].startswith("One sample")


def test_a_problem_that_could_not_be_attempted_is_wrong():
    samples = [*records(10, 4, sharp=1.0), Record("e", 10, "?", "7", None, None, False, error="no")]
    said = make_advice(samples, searched(samples, 0.5), "beam", judge)
    assert said["one"]["accuracy"]["value"] < 1


def test_the_runs_are_of_samples_and_of_the_search():
    both = trial_settings(Settings.build(n=4))
    assert (both["samples"].search.search, both["samples"].search.n) == ("best-of-n", 8)
    assert (both["search"].search.search, both["search"].search.n) == ("beam", 4)
    assert trial_settings(Settings.build(search="dvts"))["search"].search.search == "dvts"
    assert trial_settings(Settings.build(search="majority"))["search"].search.search == "beam"
    assert [*trial_settings(Settings.build(verifier="none"))] == ["samples"]
    with pytest.raises(InputError, match="--n 65536 exceeds"):
        trial_settings(Settings.build(n=2**16))
