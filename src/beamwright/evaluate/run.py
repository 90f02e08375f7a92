"""Run an evaluation: solve a problem set, grade the answers, and write resumable records.

settings.json is written first. results.jsonl holds one line per problem. A problem is finished when
its complete line is on disk. A killed process leaves at most one incomplete line, the last, which
is dropped on resume. One process at a time may use a folder.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError, NotFiniteError, UnavailableError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record, summarise
from beamwright.evaluate.problems import Problem, ProblemSet
from beamwright.io import (
    describe_validation_error,
    open_private,
    read_json_object,
    write_atomically,
)
from beamwright.saved.identity import plugin_fingerprints
from beamwright.search.answer_keys import read_options
from beamwright.search.answers import make_answers
from beamwright.search.choose import CHOICES, choose
from beamwright.solver.solution import Solution
from beamwright.tree import COMPLETE_STOPS, Node, SearchTree

if sys.platform != "win32":
    import fcntl

# After this many failed problems in a row, a remote generator counts as unavailable.
_MOST_UNANSWERED = 16

# Fields of a candidate that its record keeps.
_KEPT = ("answer", "vote", "score", "stop", "tokens", "notes", "thought_tokens")
_COPIED = (
    "score", "stop", "rounds", "tokens", "kv", "time", "goodput_tok_s", "tree_hash", "exact",
)  # fmt: skip


# Function that solves (id, text) pairs, and yields (id, outcome) in the order in which they finish.
# An error of a single problem is its outcome and is not raised: InputError, NotFiniteError, or
# UnavailableError of a remote server.
SolveMany = Callable[
    [Sequence[tuple[str | int, str]]], Iterable[tuple[str | int, Solution | BeamwrightError]]
]


# --- records -----------------------------------------------------------------------------------


def make_record(
    problem: Problem,
    solution: Mapping[str, Any],
    checker: AnswerChecker,
    tree: SearchTree | None = None,
) -> Record:
    """Grade a solution, given as the object that `solve --json` prints.

    tree: if given, the record keeps the token ids of its candidates' paths.
    """
    candidates = [
        {name: candidate[name] for name in _KEPT if name in candidate}
        for candidate in solution["candidates"]
    ]
    answers = [candidate["answer"] for candidate in candidates]
    votes = [candidate["vote"] for candidate in candidates]
    found = dict(zip(answers, votes, strict=True))
    right = {**judge_votes(problem.answer, solution, found, checker, problem.problem)}
    hung = [each for each, known in right.items() if known is None and problem.answer is not None]
    right |= dict.fromkeys(hung, False)
    complete = [candidate["stop"] in COMPLETE_STOPS for candidate in candidates]
    scores = [candidate["score"] for candidate in candidates]
    chosen = {
        how: answers[choose(votes, scores, complete, how)] if answers else None for how in CHOICES
    }
    ended = [answer for answer, whole in zip(answers, complete, strict=True) if whole]
    lengths = [candidate["tokens"] for candidate in candidates]
    if tree is not None:
        for kept, given, whole in zip(candidates, solution["candidates"], complete, strict=True):
            verdict = right[kept["answer"]]
            kept["correct"] = verdict and whole
            kept["steps"] = step_tokens(tree.node(tuple(given["lineage"])))
    return Record(
        **_asked(problem),
        prompt_ids=() if tree is None else tree.root.token_ids,
        answer=solution["answer"],
        correct=right[solution["answer"]],
        reason_fewer=solution.get("reason_fewer"),
        warnings=[
            *solution.get("warnings", ()),
            *(
                f"the answer checker timed out on {answer}, which counts as wrong"
                for answer in hung
            ),
        ],
        system_prompt=solution.get("settings", {}).get("model", {}).get("system_prompt"),
        candidates=candidates,
        choices={how: {"answer": a, "correct": right[a]} for how, a in chosen.items()},
        num_correct=None if problem.answer is None else sum(bool(right[a]) for a in ended),
        mean_path_tokens=sum(lengths) / len(lengths) if lengths else None,
        receipt=solution.get("receipt"),
        **{name: solution[name] for name in _COPIED},
    )


def step_tokens(end: Node) -> list[list[int]]:
    """Return the token ids of each step of a path; empty if the path contains a user turn."""
    path = end.path()[1:]
    return [] if any(node.turn for node in path) else [[*node.token_ids] for node in path]


def judge_votes(
    gold: str | None,
    solution: Mapping[str, Any],
    votes: Mapping[str | None, str | None],
    checker: AnswerChecker,
    problem: str,
) -> Mapping[str | None, bool | None]:
    """Return for each answer whether it is right; None if the comparison timed out.

    votes: the vote of each answer. For answer formats other than mathematics, an answer is right if
        its vote equals the right answer's.
    problem: the problem's text with its options.
    """
    search = solution.get("settings", {}).get("search", {})
    name = search.get("answers", "math")
    if gold is None or name == "math":
        return checker.judge(gold, [solution["answer"], *votes], read_options(problem))
    right = make_answers(name, search, problem).key(gold, {})
    return {None: False, **{each: vote == right for each, vote in votes.items() if each}}


def make_error_record(problem: Problem, error: Exception) -> Record:
    """Make the record of a problem that failed; it counts as wrong and holds the error."""
    known = problem.answer is not None
    return Record(
        **_asked(problem),
        correct=False if known else None,
        num_correct=0 if known else None,
        error=str(error),
    )


def _asked(problem: Problem) -> dict[str, Any]:
    given = asdict(problem)
    return {"gold": given.pop("answer"), **given}


def parse_records(path: Path, content: bytes) -> tuple[dict[str, Record], int]:
    """Return the records of all complete lines by unique id, and the offset where they end.

    An incomplete last line, left by a killed run, is ignored. Missing fields get their defaults.

    path: the file's name for messages.

    Raises:
        InputError: for a line that is not a record.
    """
    records: dict[str, Record] = {}
    end = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        where = f"{path}, line {number}"
        try:
            record = Record(**json.loads(line))
        except ValidationError as error:
            raise InputError(
                f"{where}: not a result ({describe_validation_error(error)})"
            ) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{where}: not the JSON of a result; the file is damaged") from error
        if record.unique_id in records:
            raise InputError(f"{where}: {record.unique_id!r} appears twice")
        records[record.unique_id] = record
        end += len(line)
    return records, end


class ResultsFolder:
    """An open `--out` folder, locked until `close`.

    records: all finished problems by unique id, including those of earlier runs.

    Raises:
        InputError: if the folder belongs to a run with other settings, is in use, or its
            results are damaged anywhere but in the last line.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._results = folder / "results.jsonl"
        with ExitStack() as opened:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file: IO[bytes] = opened.enter_context(
                    open(self._results, "a+b", buffering=0, opener=open_private)
                )
                if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    raise InputError(f"{self._results}: not a regular file")
                if sys.platform != "win32":
                    # The kernel releases the lock when the process dies.
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._check_settings(settings)
                content = self._results.read_bytes()
                self.records, end = parse_records(self._results, content)
                if end < len(content):
                    self._file.truncate(end)
                    os.fsync(self._file.fileno())
            except BlockingIOError as error:
                raise InputError(f"--out {folder}: another run is writing there") from error
            except OSError as error:
                raise InputError(f"--out {folder}: cannot be used ({error.strerror})") from error
            self.close = opened.pop_all().close

    def add(self, record: Record) -> None:
        """Write one finished problem and sync it to disk.

        Raises:
            InputError: if it cannot be written. Earlier records are not lost.
        """
        # ASCII, because a model's text may hold lone surrogates, which UTF-8 cannot encode.
        line = (json.dumps(asdict(record)) + "\n").encode("ascii")
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            # An incomplete last line is dropped on resume.
            raise InputError(
                f"{self._results}: cannot be written ({error.strerror or error}); "
                f"{len(self.records)} problems are saved; run again with --out {self._folder}"
            ) from error
        self.records[record.unique_id] = record

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self._folder / "settings.json"
        # Compare after a round trip through JSON, which turns tuples into lists.
        wanted = json.loads(json.dumps(settings))
        if not self._results.stat().st_size:  # no finished problem: any settings may use it
            write_atomically(path, json.dumps(wanted, indent=2) + "\n")
            return
        found = read_json_object(path)
        if found.get("dataset_sha256") == wanted["dataset_sha256"]:
            found["dataset"] = wanted["dataset"]  # ./set.jsonl equals set.jsonl
        differences = list(_differences(found, wanted, ""))
        if differences:
            raise InputError(
                f"--out {self._folder} holds a run with other settings: {'; '.join(differences)}"
            )


def _differences(found: Any, wanted: Any, name: str) -> Iterator[str]:
    """Yield a line for each leaf in which two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*found, *wanted]):
            yield from _differences(found.get(key), wanted.get(key), f"{name}.{key}".lstrip("."))
    elif found != wanted:
        yield f"{name} was {found!r}, but is {wanted!r}"


# --- the run -----------------------------------------------------------------------------------


def run(
    problem_set: ProblemSet,
    solve_many: SolveMany,
    settings: Settings,
    checker: AnswerChecker,
    out: Path | None = None,
    *,
    paths: bool = False,
    on_record: Callable[[Record, int, int], None] = lambda record, done, total: None,
) -> dict[str, Any]:
    """Solve every unfinished problem and return the object of `eval --json`.

    out: the folder to write to and resume from. Each problem is on disk as soon as it is finished.
        The limit may be larger on resume, because problems do not interact.
    paths: keep the token ids of the candidates' paths.
    on_record: called with each record, the number of finished problems and the number of problems;
        on resume, first for the problems that were already finished.

    Raises:
        InputError: if the folder belongs to another run.
        BeamwrightError: raised by solving; finished problems are kept.
    """
    problems = problem_set.problems
    records: dict[str, Record] = {}

    def take(record: Record) -> None:
        records[record.unique_id] = record
        on_record(record, len(records), len(problems))

    with ExitStack() as stack:
        folder = None
        if out is not None:
            identity = {
                "dataset": problem_set.name,
                "dataset_sha256": problem_set.fingerprint,
                "settings": settings.model_dump(mode="json"),
                "code": plugin_fingerprints(settings) or None,
            }
            folder = ResultsFolder(out, identity)
            stack.callback(folder.close)
            for problem in problems:
                if problem.unique_id in folder.records:
                    take(folder.records[problem.unique_id])
        unfinished = [problem for problem in problems if problem.unique_id not in records]
        for record in _solved(unfinished, solve_many, checker, paths=paths):
            if folder is not None:
                folder.add(record)
            take(record)
    return {
        "dataset": problem_set.name,
        **summarise([records[problem.unique_id] for problem in problems], settings.search.n),
        "settings": settings.model_dump(mode="json"),
    }


def _solved(
    problems: Sequence[Problem], solve_many: SolveMany, checker: AnswerChecker, *, paths: bool
) -> Iterator[Record]:
    """Solve and grade problems, and yield their records as they finish.

    Errors that no single problem caused are raised.
    """
    by_id: dict[str | int, Problem] = {problem.unique_id: problem for problem in problems}
    pairs = [(problem.unique_id, problem.problem) for problem in problems]
    unanswered: list[tuple[Problem, UnavailableError]] = []
    for unique_id, outcome in solve_many(pairs) if pairs else ():
        problem = by_id[unique_id]
        if isinstance(outcome, UnavailableError) and len(unanswered) < _MOST_UNANSWERED:
            unanswered.append((problem, outcome))
        elif isinstance(outcome, InputError | NotFiniteError):
            yield make_error_record(problem, outcome)
        elif isinstance(outcome, BeamwrightError):
            raise outcome  # not caused by this problem; finished records are kept
        else:
            tree = outcome.tree if paths else None
            yield make_record(problem, outcome.to_json(), checker, tree)
            for failed, error in unanswered:  # the server works, so these failed by themselves
                yield make_error_record(failed, error)
            unanswered.clear()
    for _, error in unanswered:
        raise error
