"""A run over a problem set, its records, and the folder that it goes on from. Knows no solver.

Solving is injected. settings.json is written first; results.jsonl holds a problem a line. A problem
is finished when its whole line is on disk. A process killed at any moment leaves at most one torn
line, the last, which is dropped when the run goes on. One process at a time may hold a folder.
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
from beamwright.io import describe_fault, open_private, read_object, write_whole
from beamwright.saved.identity import plugin_code
from beamwright.search.alike import options_of
from beamwright.search.answers import make_answers
from beamwright.search.choose import CHOICES, choose
from beamwright.solver.solution import Solution
from beamwright.tree import COMPLETE_STOPS, Node, SearchTree

if sys.platform != "win32":
    import fcntl

_MOST_UNANSWERED = 16
"""Problems in a row that a generator elsewhere has failed, before it counts as gone."""

_KEPT = ("answer", "vote", "score", "stop", "tokens", "notes", "thought_tokens")  # of a candidate
_COPIED = (
    "score", "stop", "rounds", "tokens", "kv", "time", "goodput_tok_s", "tree_hash", "exact",
)  # fmt: skip


SolveMany = Callable[
    [Sequence[tuple[str | int, str]]], Iterable[tuple[str | int, Solution | BeamwrightError]]
]
"""Solves (id, text) pairs and gives (id, outcome) in the order in which they finish.

A problem's own error (an InputError; a NotFiniteError, numbers that overflow with this one; an
UnavailableError, where something elsewhere has failed it) is its outcome, never raised."""


# --- records -----------------------------------------------------------------------------------


def make_record(
    problem: Problem,
    solution: Mapping[str, Any],
    checker: AnswerChecker,
    tree: SearchTree | None = None,
) -> Record:
    """Judge a solution (the object that `solve --json` prints). tree: whose paths are kept."""
    candidates = [
        {name: candidate[name] for name in _KEPT if name in candidate}
        for candidate in solution["candidates"]
    ]
    answers = [candidate["answer"] for candidate in candidates]
    votes = [candidate["vote"] for candidate in candidates]
    found = dict(zip(answers, votes, strict=True))
    right = {**verdicts(problem.answer, solution, found, checker, problem.problem)}
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
            *(f"the answer checker gave up on {answer}: counted as wrong" for answer in hung),
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
    """Token ids of each step of a path; none where the user was made to say something in it."""
    path = end.path()[1:]
    return [] if any(node.turn for node in path) else [[*node.token_ids] for node in path]


def verdicts(
    gold: str | None,
    solution: Mapping[str, Any],
    votes: Mapping[str | None, str | None],
    checker: AnswerChecker,
    problem: str,
) -> Mapping[str | None, bool | None]:
    """Which answers are right; None where that could not be told in time.

    votes: of each; beside mathematics, the right one's decides. problem: its text, with options.
    """
    search = solution.get("settings", {}).get("search", {})
    name = search.get("answers", "math")
    if gold is None or name == "math":
        return checker.judge(gold, [solution["answer"], *votes], options_of(problem))
    right = make_answers(name, search).key(gold, {})
    return {None: False, **{each: vote == right for each, vote in votes.items() if each}}


def make_error_record(problem: Problem, error: Exception) -> Record:
    """A problem that could not be attempted counts as wrong, with the reason beside it."""
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
    """Records of the whole lines by unique id, and where these end. path: for messages.

    A torn last line, what a killed run leaves, is left out; a field that a line leaves out has its
    default.

    Raises:
        InputError: for a line that is no record.
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
            raise InputError(f"{where}: not a result ({describe_fault(error)})") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{where}: not JSON of a result") from error
        if record.unique_id in records:
            raise InputError(f"{where}: {record.unique_id!r} appears twice")
        records[record.unique_id] = record
        end += len(line)
    return records, end


class ResultsFolder:
    """An open `--out` folder, locked until `close`.

    records: the finished problems by unique id, those of earlier runs included.

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
                    # The kernel drops it with the process: a killed run never blocks the next one.
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
        """Write one finished problem through to the disk.

        Raises:
            InputError: if it cannot be written; what was written before stays.
        """
        # In ASCII: a model's text may hold what UTF-8 cannot.
        line = (json.dumps(asdict(record)) + "\n").encode("ascii")
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            # A torn last line is dropped when the run goes on.
            raise InputError(
                f"{self._results}: cannot be written ({error.strerror or error}); "
                f"{len(self.records)} problems are kept: run again with --out {self._folder}"
            ) from error
        self.records[record.unique_id] = record

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self._folder / "settings.json"
        # What JSON makes of the settings is what is compared (tuples become lists).
        wanted = json.loads(json.dumps(settings))
        if not self._results.stat().st_size:  # nothing finished: the folder is anybody's
            write_whole(path, json.dumps(wanted, indent=2) + "\n")
            return
        found = read_object(path)
        if found.get("dataset_sha256") == wanted["dataset_sha256"]:
            found["dataset"] = wanted["dataset"]  # ./set.jsonl is set.jsonl
        differences = list(_differences(found, wanted, ""))
        if differences:
            raise InputError(
                f"--out {self._folder} holds a run with other settings: {'; '.join(differences)}"
            )


def _differences(found: Any, wanted: Any, name: str) -> Iterator[str]:
    """`name: old -> new` for every leaf in which two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*found, *wanted]):
            yield from _differences(found.get(key), wanted.get(key), f"{name}.{key}".lstrip("."))
    elif found != wanted:
        yield f"{name} was {found!r}, is {wanted!r}"


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
    """Solve every problem that is not finished yet and return the object of `eval --json`.

    out: folder to write and resume from; every problem is on disk as soon as it has finished. A
    limit may grow, as problems do not interact. paths: keep those of candidates, in tokens.
    on_record: called with a finished record, the
    number of finished problems and that of all; on resuming, first for what was finished before.

    Raises:
        InputError: if the folder belongs to another run.
        BeamwrightError: what solving raised; everything finished before is kept.
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
                "code": plugin_code(settings) or None,
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
    """Records as they finish; raises what is no problem's own fault."""
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
            raise outcome  # not this problem's fault; what has finished is kept
        else:
            tree = outcome.tree if paths else None
            yield make_record(problem, outcome.to_json(), checker, tree)
            for failed, error in unanswered:  # what answers others is there: it is their own
                yield make_error_record(failed, error)
            unanswered.clear()
    for _, error in unanswered:
        raise error
