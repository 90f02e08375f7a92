"""One evaluated problem: a line of results.jsonl. Knows the solution's JSON, no solver."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from beamwright.errors import InputError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import Problem
from beamwright.search.answers import normalise_answer
from beamwright.search.choose import CHOICES, choose
from beamwright.tree import COMPLETE_STOPS

_KEPT = ("answer", "score", "stop", "tokens", "notes")  # of a candidate
_BOUNDS = Field(gt=-(2**63), lt=2**63)  # of tokens, bytes, seconds
_Count = Annotated[int, _BOUNDS]
_Figure = Annotated[float, _BOUNDS]
_NEEDED = frozenset({"unique_id", "index", "problem", "gold", "level"})


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Record:
    """What is kept of one problem; enough to compute every metric again.

    correct: None when the file names no answer; a problem with an `error` is wrong.
    choices: for best, majority and weighted what it would have answered, from these candidates.
    num_correct: candidates that ended by themselves with the right answer; None when the file
    names no answer. candidates: without their texts, which are many times the rest. kv: the
    solution's KV figures, in bytes. mean_path_tokens: over the final candidates, after the prompt.
    """

    unique_id: str
    index: Annotated[int, Field(ge=0)]
    problem: str
    gold: str | None
    level: str | int | bool | None
    answer: str | None = None
    correct: bool | None = None
    score: float | None = None
    stop: str | None = None
    rounds: int | None = None
    reason_fewer: str | None = None
    warnings: Sequence[str] = ()
    system_prompt: str | None = None
    error: str | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_correct: int | None = None
    tokens: Mapping[str, _Count | None] = field(default_factory=dict)
    kv: Mapping[str, _Count | None] = field(default_factory=dict)
    time: Mapping[str, _Figure | None] = field(default_factory=dict)
    mean_path_tokens: _Figure | None = None
    goodput_tok_s: _Figure | None = None
    tree_hash: str | None = None
    exact: bool | None = None

    def to_line(self) -> bytes:
        """One line of JSON in ASCII (a model's text may hold what UTF-8 cannot), with newline."""
        return (json.dumps(asdict(self)) + "\n").encode("ascii")

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """The record on a line; a field that the line leaves out keeps its default.

        Raises:
            ValueError: if the line is not JSON.
            InputError: if it is JSON, but not a record.
        """
        try:
            content = json.loads(line)
        except RecursionError as error:
            raise InputError("not a result: nested too deeply") from error
        known = {each.name for each in fields(cls)}
        if not isinstance(content, dict) or not _NEEDED <= set(content) <= known:
            raise InputError("not a result of this version")
        try:
            record = cls(**content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{place:.80}: {first['msg']}") from error
        _check_values(record)
        return record


def _check_values(record: Record) -> None:
    """Raises InputError for what has the right type, and cannot be of a problem."""
    if not 0 <= (record.num_correct or 0) <= len(record.candidates):
        raise InputError(f"num_correct: there are {len(record.candidates)} candidates")
    for how, chosen in record.choices.items():
        if not isinstance(chosen.get("correct"), bool | None) or "correct" not in chosen:
            raise InputError(f"choices.{how:.80}.correct: neither a verdict nor null")


def make_record(problem: Problem, solution: Mapping[str, Any], checker: AnswerChecker) -> Record:
    """Judge a solution (the object that `solve --json` prints)."""
    candidates = [
        {name: each[name] for name in _KEPT if name in each} for each in solution["candidates"]
    ]
    stated = [solution["answer"], *(candidate["answer"] for candidate in candidates)]
    judged = _Judge(problem.answer, stated, checker)
    lengths = [candidate["tokens"] for candidate in candidates]
    return Record(
        **_identity(problem),
        answer=solution["answer"],
        correct=judged(solution["answer"]),
        score=solution["score"],
        stop=solution["stop"],
        rounds=solution["rounds"],
        reason_fewer=solution.get("reason_fewer"),
        warnings=solution.get("warnings", ()),
        system_prompt=solution.get("settings", {}).get("model", {}).get("system_prompt"),
        candidates=candidates,
        choices=_choices(candidates, judged),
        num_correct=_num_correct(candidates, judged),
        tokens=solution["tokens"],
        kv=solution["kv"],
        time=solution["time"],
        mean_path_tokens=sum(lengths) / len(lengths) if lengths else None,
        goodput_tok_s=solution["goodput_tok_s"],
        tree_hash=solution["tree_hash"],
        exact=solution["exact"],
    )


def make_error_record(problem: Problem, error: Exception) -> Record:
    """A problem that could not be attempted counts as wrong, with the reason beside it."""
    known = problem.answer is not None
    return Record(
        **_identity(problem),
        correct=False if known else None,
        num_correct=0 if known else None,
        error=str(error),
    )


def _identity(problem: Problem) -> dict[str, Any]:
    return {
        "unique_id": problem.unique_id,
        "index": problem.index,
        "problem": problem.problem,
        "gold": problem.answer,
        "level": problem.level,
    }


class _Judge:
    """Judges answers against one gold answer, each spelling once, all of them together."""

    def __init__(
        self, gold: str | None, answers: Sequence[str | None], checker: AnswerChecker
    ) -> None:
        self._gold = gold
        spellings: dict[str, str] = {}
        for answer in answers:
            if answer is not None:
                spellings.setdefault(normalise_answer(answer), answer)
        verdicts = [] if gold is None else checker.judge(gold, list(spellings.values()))
        self._known = dict(zip(spellings, verdicts, strict=False))

    def __call__(self, answer: str | None) -> bool | None:
        """None when nobody knows what is right. answer: one of those that were given."""
        if self._gold is None:
            return None
        return answer is not None and self._known[normalise_answer(answer)]


def _num_correct(candidates: Sequence[Mapping[str, Any]], judged: _Judge) -> int | None:
    if judged(None) is None:  # nobody knows what is right
        return None
    ended = [each["answer"] for each in candidates if each["stop"] in COMPLETE_STOPS]
    return sum(judged(answer) is True for answer in ended)


def _choices(candidates: Sequence[Mapping[str, Any]], judged: _Judge) -> dict[str, dict[str, Any]]:
    if not candidates:
        return {how: {"answer": None, "correct": judged(None)} for how in CHOICES}
    answers = [candidate["answer"] for candidate in candidates]
    scores = [candidate["score"] for candidate in candidates]
    complete = [candidate["stop"] in COMPLETE_STOPS for candidate in candidates]
    chosen = {how: answers[choose(answers, scores, complete, how)] for how in CHOICES}
    return {how: {"answer": answer, "correct": judged(answer)} for how, answer in chosen.items()}
