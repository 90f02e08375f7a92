"""What search buys: accuracy of each method beside a vote at equal tokens and at equal seconds.

    python -m beamwright_lab.gains.study [--model smollm2|gemma|FILE.gguf] [--heads FOLDER]
    python -m beamwright_lab.gains.study --model bundled --verifier bundled --kinds bundled

The problems are those of `kinds`. A verifier's head scores problems of one kind and was trained on
other problems of the other kinds. A vote of k samples is counted over disjoint groups of one run of
samples; its seconds are those of runs of k samples. Between these widths, accuracy and seconds are
interpolated. Intervals are 95 % over problems.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from beamwright import Solver
from beamwright.cli.app import main as beamwright
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record, estimate_mean, estimate_share
from beamwright.evaluate.problems import Problem, ProblemSet
from beamwright.evaluate.run import run
from beamwright.search.answers import make_answers
from beamwright.search.choose import choose
from beamwright.sections import AnswerChoice
from beamwright.tree import COMPLETE_STOPS
from beamwright_lab.common import finish, say, table
from beamwright_lab.gains.kinds import BUNDLED, KINDS, Task, tasks_of
from beamwright_lab.models.published_files import FILES

WIDTHS = (1, 4, 8, 16, 32)  # numbers of samples whose seconds are measured
_N = 16
_SHARED = {"max_tokens": 96, "max_step_tokens": 96, "temperature": 0.6, "stop_strings": "Q:"}
_SAMPLES = {"search": "best-of-n", "choose": "majority"}
# Step-wise searches get steps of a few tokens: these replies have one paragraph.
_STEPS = {"step_tokens": 8, "max_step_tokens": 8, "max_rounds": 12}


# As the problems are examples and a question, so is a prompt that shows replies to it.
_WRITE_AGAIN = """\
{problem}

Possible replies to the last question, of which some are wrong:

{solutions}

The right reply to the last question, in the same form:
A:"""
_AGGREGATE = {"search": "aggregate", "verifier": "none", "aggregate_prompt": _WRITE_AGAIN}
_SYNTHESIS = {"choose": "synthesis", "synthesis_prompt": _WRITE_AGAIN, "search": "majority"}

How = AnswerChoice | Literal["chosen"]  # "chosen": what the search itself answers


@dataclass(frozen=True)
class Method:
    """One way to answer. how: how it picks the answer among its candidates."""

    name: str
    settings: Mapping[str, Any]
    how: How = "majority"


def methods(verifier: str | None, called: str) -> Sequence[Method]:
    """Return the methods beside the vote.

    verifier: None: only log-probabilities score. called: the verifier in the names of methods.
    """
    logprob, n = {"verifier": "logprob"}, {"n": _N}
    beam = {"search": "beam", "width": 4, **_STEPS, **n}
    found = [
        Method("greedy", {**_SAMPLES, **logprob, "n": 1, "temperature": 0.0}),
        Method("weighted vote, logprob", {**_SAMPLES, **logprob, **n}, "weighted"),
        Method("best of n, logprob", {**_SAMPLES, **logprob, **n}, "best"),
        Method("beam, logprob", {**beam, **logprob}, "best"),
        Method("beam, logprob, then a vote", {**beam, **logprob}),
        Method("aggregate, 4 answers, 2 rounds", {**_AGGREGATE, "n": 4, "aggregate_size": 3}),
        Method(
            "aggregate, 8 answers, 1 round",
            {**_AGGREGATE, "n": 8, "aggregate_size": 4, "aggregate_rounds": 1},
        ),
        Method("synthesis from 8", {**_SYNTHESIS, "verifier": "none", "n": 8}, "chosen"),
    ]
    if verifier is not None:
        by = {"verifier": verifier}
        found += [
            Method(f"weighted vote, {called}", {**_SAMPLES, **by, **n}, "weighted"),
            Method(f"best of n, {called}", {**_SAMPLES, **by, **n}, "best"),
            Method(f"beam, {called}", {**beam, **by}, "best"),
            Method(f"beam, {called}, then a vote", {**beam, **by}),
            Method(f"synthesis from the {called}'s best 4 of 16", {
                **_SYNTHESIS, **by, **n, "synthesis_size": 4
            }, "chosen"),
            Method(f"aggregate, guided by the {called}, 8 answers, 1 round", {
                **_AGGREGATE, **by, "n": 8, "aggregate_rounds": 1, "guide": True
            }, "weighted"),
        ]  # fmt: skip
    return found


def train_heads(model: str, kinds: Sequence[str], count: int, folder: Path) -> None:
    """Train a head for each kind on samples of the other kinds; keep what is there already."""
    for kind in kinds:
        if not (folder / kind / "results.jsonl").exists():
            say(f"samples of {kind} to train heads on")
            settings = {**_SHARED, **_SAMPLES, "verifier": "logprob", "n": _N}
            answer_all({"model": model, "system_prompt": "", **settings}, [kind], count, folder, 1)
    for kind in kinds:
        runs = [str(folder / other) for other in kinds if other != kind]
        head = folder / f"{kind}.head"
        if not head.exists() and beamwright(["probe", "train", *runs, "--out", str(head)]):
            raise SystemExit(f"no head could be trained for {kind}")


class Answered:
    """One run over all kinds: for each problem its candidates, tokens and seconds."""

    def __init__(self, runs: Mapping[str, tuple[Sequence[Task], Sequence[Record]]]) -> None:
        self._problems = [
            (kind, _candidates(task, record), record)
            for kind, (tasks, records) in runs.items()
            for task, record in zip(tasks, records, strict=True)
        ]
        self.kinds = [kind for kind, _, _ in self._problems]

    @property
    def failed(self) -> str | None:
        """Why some problem has no result, such as a prompt that exceeds the context; or None."""
        return next((each.error for *_, each in self._problems if each.error), None)

    @property
    def tokens(self) -> float:
        """Mean generated tokens of a problem."""
        return fmean(float(record.tokens["generated"] or 0) for *_, record in self._problems)

    @property
    def seconds(self) -> float:
        return fmean(float(record.time["total_s"] or 0) for *_, record in self._problems)

    def right(self, how: How, k: int | None = None) -> list[float]:
        """Return for each problem the share of right choices, over disjoint groups of k."""
        if how == "chosen":
            return [
                float(any(each.right and each.answer == record.answer for each in candidates))
                for _, candidates, record in self._problems
            ]
        return [_right(candidates, how, k) for _, candidates, _ in self._problems]

    def by_kind(self, right: Sequence[float]) -> dict[str, float]:
        """Return the mean of figures, one per problem, for each kind."""
        found: dict[str, list[float]] = {}
        for kind, value in zip(self.kinds, right, strict=True):
            found.setdefault(kind, []).append(value)
        return {kind: fmean(values) for kind, values in found.items()}


@dataclass(frozen=True)
class _Candidate:
    answer: str | None
    vote: str | None
    score: float | None
    complete: bool
    right: bool


def _candidates(task: Task, record: Record) -> Sequence[_Candidate]:
    gold = make_answers(task.answers, {}, task.problem).key(task.gold, {})
    return [
        _Candidate(
            each["answer"],
            each["vote"],
            each["score"],
            each["stop"] in COMPLETE_STOPS,
            each["vote"] == gold,
        )
        for each in record.candidates
    ]


def _right(candidates: Sequence[_Candidate], how: AnswerChoice, k: int | None) -> float:
    if not candidates:
        return 0.0
    size = min(k or len(candidates), len(candidates))
    groups = [candidates[at : at + size] for at in range(0, len(candidates) - size + 1, size)]
    return fmean(
        group[
            choose(
                [each.vote for each in group],
                [each.score for each in group],
                [each.complete for each in group],
                how,
            )
        ].right
        for group in groups
    )


class Vote:
    """The vote of k samples for any k: its accuracy of each problem, tokens and seconds."""

    def __init__(self, samples: Mapping[int, Answered]) -> None:
        self._samples = samples
        self._pool = samples[max(samples)]
        widths = range(1, max(samples) + 1)
        self._curve = np.array([self._pool.right("majority", k) for k in widths])
        self.token_share = self._pool.tokens / max(samples)

    def width_for(self, *, tokens: float | None = None, seconds: float | None = None) -> float:
        """Return how many samples cost this much, within the measured widths."""
        if tokens is not None:
            return float(np.clip(tokens / self.token_share, 1, max(self._samples)))
        widths = sorted(self._samples)
        spent = np.maximum.accumulate([self._samples[k].seconds for k in widths])
        return float(np.interp(seconds or 0.0, spent, widths))

    def right(self, width: float) -> list[float]:
        """Return the accuracy of each problem, interpolated between whole widths."""
        low = int(width)
        high, part = min(low + 1, len(self._curve)), width - low
        mixed = (1 - part) * self._curve[low - 1] + part * self._curve[high - 1]
        return [float(each) for each in mixed]


def row_of(name: str, answered: Answered, right: Sequence[float], vote: Vote) -> dict[str, Any]:
    """Return the figures of one method: accuracy, cost, and its lead over votes of equal cost."""
    whole = estimate_share(right)
    assert whole is not None
    leads = {
        unit: (width, estimate_mean([a - b for a, b in zip(right, vote.right(width), strict=True)]))
        for unit, width in {
            "tokens": vote.width_for(tokens=answered.tokens),
            "seconds": vote.width_for(seconds=answered.seconds),
        }.items()
    }
    return {
        "method": name,
        "accuracy": whole,
        **{kind: round(share, 3) for kind, share in answered.by_kind(right).items()},
        "tokens": round(answered.tokens, 1),
        "seconds": round(answered.seconds, 3),
        **{
            f"beside vote, equal {unit}": {"width": round(width, 1), "lead": lead}
            for unit, (width, lead) in leads.items()
        },
    }


def shown(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> str:
    """Return the table as Markdown, in percent.

    Without columns for single kinds if there is only one: it has the figures of `all`.
    """
    lines, own = [], kinds if len(kinds) > 1 else ()
    for row in rows:
        accuracy = row["accuracy"]
        line = {
            "method": row["method"],
            **{kind: f"{100 * row[kind]:.0f}" for kind in own},
            "all": _percent(accuracy),
            "tokens": f"{row['tokens']:.0f}",
            "seconds": f"{row['seconds']:.2f}",
        }
        for unit in ("tokens", "seconds"):
            beside = row[f"beside vote, equal {unit}"]
            line[f"lead at equal {unit}"] = f"{_percent(beside['lead'], signed=True)}"
        lines.append(line)
    return table(lines, list(lines[0]))


def block(found: Mapping[str, Any]) -> str:
    """Return the table of a stored result, as `main` wrote it."""
    return shown(found["rows"], found["kinds"])


def _percent(estimate: Mapping[str, Any], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    value, low, high = (
        f"{round(100 * each):{sign}d}" for each in (estimate["value"], *estimate["interval"])
    )
    return f"{value} ({low} to {high})"


def _keep(records: list[Record], record: Record, *_: int) -> None:
    records.append(record)


def answer_all(
    settings: Mapping[str, Any],
    kinds: Sequence[str],
    count: int,
    out: Path | None = None,
    seed: int = 0,
) -> Answered:
    """Answer the problems of all kinds, one at a time, with one solver for each kind.

    settings: options of the solver; `{kind}` in the verifier stands for the kind.
    out: the folder for the records, with the token ids of the paths; None: they are not kept.
    seed: the seed of the problems.
    """
    runs = {}
    for kind in kinds:
        tasks = tasks_of(kind, count, seed)
        problems = tuple(
            Problem(task.problem, task.gold, f"{kind}-{number}", number, task.level)
            for number, task in enumerate(tasks)
        )
        options = {**settings, "verifier": str(settings["verifier"]).replace("{kind}", kind)}
        with Solver(answers=tasks[0].answers, **options) as solver, AnswerChecker() as checker:
            solver.solve(tasks[0].problem, max_tokens=8)  # the first search also warms up
            records: list[Record] = []
            run(
                ProblemSet(kind, problems, f"{kind} {seed}"),
                partial(solver.solve_many, in_flight=1), solver.settings, checker,
                None if out is None else out / kind, paths=out is not None,
                on_record=partial(_keep, records),
            )  # fmt: skip
        runs[kind] = tasks, sorted(records, key=lambda record: record.index)
    return Answered(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="Also the name of a published file.")
    parser.add_argument("--heads", type=Path, help="Folder for trained heads; none without it.")
    parser.add_argument("--verifier", help="Instead of heads.")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, BUNDLED], default=list(KINDS))
    parser.add_argument("--problems", type=int, default=40, help="Problems of each kind.")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--out", default="small", help="Ending of the result's name.")
    args = parser.parse_args()
    model = str(FILES[args.model].path) if args.model in FILES else args.model

    def answered(settings: Mapping[str, Any]) -> Answered:
        return answer_all(
            {"model": model, "system_prompt": "", **_SHARED, **settings},
            args.kinds, args.problems,
        )  # fmt: skip

    if args.heads is not None:
        train_heads(model, args.kinds, args.problems, args.heads)
    samples = {}
    for k in args.widths:
        samples[k] = answered({**_SAMPLES, "verifier": "logprob", "n": k})
        say(f"{k} samples: {samples[k].tokens:.0f} tokens, {samples[k].seconds:.2f} s a problem")
    vote, pool = Vote(samples), samples[max(samples)]
    rows = [
        row_of("one sample" if k == 1 else f"vote of {k}", of, pool.right("majority", k), vote)
        for k, of in samples.items()
    ]
    known: dict[str, Answered] = {}
    verifier = args.verifier or (args.heads and f"probe:{args.heads}/{{kind}}.head")
    for method in methods(verifier, "verifier" if args.verifier else "head"):
        key = str(method.settings)
        known[key] = known.get(key) or answered(method.settings)
        if known[key].failed is not None:
            say(f"{method.name} is left out: {known[key].failed}")
            continue
        rows.append(row_of(method.name, known[key], known[key].right(method.how), vote))
        say(shown(rows[-1:], args.kinds))
    print(shown(rows, args.kinds))
    given = {**vars(args), "heads": args.heads and str(args.heads)}
    finish(f"gains_{args.out}", {**given, "settings": _SHARED, "rows": rows})


if __name__ == "__main__":
    main()
