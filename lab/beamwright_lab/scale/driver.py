"""What the driver of `eval --ray` does for each problem, and for all of them at the end.

`sizes`: bytes of a real result as it crosses processes and as a line of results.jsonl. `turns`:
seconds of `RaySolving` per problem with as many replicas as wished, which are stubs that answer at
once with that result (few processes stand for all of them). `record`: judging answers, and writing
a line through to the disk. `resume`: reading a file of many records, and the report of them, in a
process of its own whose memory is measured.

Real results are of the bundled pair. `long` is the same with candidates' texts of `--characters`,
for what a larger model writes; that figure is put in.

    python -m beamwright_lab.scale.driver
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from beamwright import Settings, Solver
from beamwright.cluster import ray_solving
from beamwright.cluster.cluster import Cluster
from beamwright.cluster.ray_solving import RaySolving
from beamwright.cluster.replica import FarSolution
from beamwright.evaluate import AnswerChecker, Record, load_problems
from beamwright.evaluate.equivalence import _decide
from beamwright.evaluate.metrics import summarise
from beamwright.evaluate.problems import Problem
from beamwright.evaluate.results import ResultsFolder, make_record, read_run
from beamwright.search.answers import normalise_answer
from beamwright_lab.common import finish, say, table

PAIRS = Path(__file__).resolve().parents[3] / "tests" / "data" / "answer_pairs.jsonl"
WHAT = ("sizes", "turns", "record", "resume")


# --- results -----------------------------------------------------------------------------------


def solve(num: int, n: int) -> list[tuple[Problem, dict[str, Any]]]:
    """Problems of `bundled:test`, one of each tenth, and what solving them says."""
    found = load_problems("bundled:test", None).problems
    problems = [found[i * len(found) // num] for i in range(num)]
    pairs = [(each.unique_id, each.problem) for each in problems]
    with Solver(Settings.build(model="bundled", n=n, width=4)) as solver:
        solved = dict(solver.solve_many(pairs, in_flight=2))  # type: ignore[call-overload]
    return [(each, solved[each.unique_id].to_json()) for each in problems]


def lengthened(content: Mapping[str, Any], characters: int) -> dict[str, Any]:
    """The same result with texts of so many characters, for each candidate."""

    def text(old: str) -> str:
        return (old * (characters // max(1, len(old)) + 1))[:characters]

    candidates = [{**each, "text": text(each["text"])} for each in content["candidates"]]
    return {**content, "candidates": candidates}


def sizes(
    solved: Sequence[tuple[Problem, dict[str, Any]]], characters: int, checker: AnswerChecker
) -> dict[str, Any]:
    """Means over the problems, in bytes."""
    crossing = [len(pickle.dumps(FarSolution(each))) for _, each in solved]
    longer = [len(pickle.dumps(FarSolution(lengthened(each, characters)))) for _, each in solved]
    records = [make_record(problem, each, checker) for problem, each in solved]
    stated = [{each["answer"] for each in record.candidates} - {None} for record in records]
    return {
        "problems": len(solved),
        "pickled_bytes": round(mean(crossing)),
        "pickled_long_bytes": round(mean(longer)),
        "line_bytes": round(mean(len(each.to_line()) for each in records)),
        "most_line_bytes": max(len(each.to_line()) for each in records),
        "different_answers": round(mean(map(len, stated)), 1),
        "most_different_answers": max(map(len, stated)),
        "rounds": [record.rounds for record in records],
        "path_tokens": [round(record.mean_path_tokens or 0) for record in records],
    }


# --- Ray ---------------------------------------------------------------------------------------


def stub(content: dict[str, Any], delay_s: float) -> type:
    """A replica that gives the same result to whatever it is asked."""

    class Replica:
        def __init__(self, *_settings: object) -> None:
            self._outcome = FarSolution(content)

        def ready(self) -> bool:
            return True

        def solve(self, _problem_id: str, _problem: str) -> FarSolution:
            time.sleep(delay_s)
            return self._outcome

        def give_back(self, _most: int) -> int:
            return 0

    return Replica


class FewProcesses(RaySolving):
    """As many replicas as wished; each process stands for several of them."""

    def __init__(self, settings: Settings, replicas: int, processes: int, most: int) -> None:
        super().__init__(settings, Cluster(None, replicas=replicas))
        self._actors: list[Any] = []
        self._num, self._processes, self._most = replicas, processes, most
        self._cluster.num_replicas = lambda: replicas  # type: ignore[method-assign]

    def _worker(self) -> Any:
        self._concurrency = self._most * -(-self._num // self._processes) + 1
        if len(self._actors) < self._processes:
            self._actors.append(super()._worker().actor)
        actor = self._actors.pop(0)
        self._actors.append(actor)
        return ray_solving._Worker(actor)


def turns(
    content: dict[str, Any], args: argparse.Namespace, delays: Sequence[float]
) -> list[dict[str, Any]]:
    """Seconds per problem: as fast as it goes, and of the processor where replicas are slow."""
    import ray

    settings = Settings.build(model="bundled")
    long = lengthened(content, args.characters)
    ray.init(
        num_cpus=args.processes * len(args.replicas), include_dashboard=False,
        configure_logging=False, log_to_driver=False,
    )  # fmt: skip
    rows = []
    for name, given in (("bundled", content), ("long", long)):
        for delay_s in delays:
            with patch.object(ray_solving, "Replica", stub(given, delay_s)):
                rows += [
                    {"result": name, "delay_s": delay_s, **row} for row in _turns(settings, args)
                ]
                say(table(rows[-len(args.replicas) :], list(rows[-1])))
    ray.shutdown()
    return rows


def _turns(settings: Settings, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    problems = [(f"p{i}", "Ann has 3 apples. How many?") for i in range(args.turns)]
    seconds: dict[int, list[tuple[float, float, float]]] = {}
    sides = {
        count: FewProcesses(settings, count, args.processes, args.held) for count in args.replicas
    }
    try:
        for number in range(args.rounds + 1):
            for count, spread in sides.items():
                clocks = time.perf_counter, time.thread_time, time.process_time
                began = [clock() for clock in clocks]
                assert sum(1 for _ in spread(problems, in_flight=args.held)) == len(problems)
                took = [clock() - start for clock, start in zip(clocks, began, strict=True)]
                if number:  # the first round starts processes
                    seconds.setdefault(count, []).append(tuple(took))  # type: ignore[arg-type]
    finally:
        for spread in sides.values():
            spread.__exit__()
    for count, rounds in seconds.items():
        each = [[1000 * s / len(problems) for s in column] for column in zip(*rounds, strict=True)]
        yield {
            "replicas": count,
            "refs": count * args.held,
            "wall_ms": round(min(each[0]), 3),
            "wall_ms_median": round(median(each[0]), 3),
            "thread_ms": round(min(each[1]), 3),
            "thread_ms_median": round(median(each[1]), 3),
            "process_ms": round(min(each[2]), 3),
        }


# --- records -----------------------------------------------------------------------------------


def judging(
    solved: Sequence[tuple[Problem, dict[str, Any]]],
    rounds: int,
    spellings: Sequence[int],
    workers: Sequence[int],
) -> list[dict[str, Any]]:
    """Milliseconds to make a record, by how many different answers need mathematics."""
    answers = [json.loads(line)["answer"] for line in PAIRS.read_text().splitlines()]
    distinct = [each for each in dict.fromkeys(answers) if "\\" in each]
    mathematics = [each for each in distinct if isinstance(_decide("\\frac{2}{7}", each), tuple)]
    say(f"{len(mathematics)} answers that need mathematics")
    problem, content = solved[0]

    def made(count: int, checker: AnswerChecker, gold: str) -> float:
        """Nothing is remembered of another gold answer."""
        given = [
            mathematics[i % min(count, len(mathematics))] for i in range(len(content["candidates"]))
        ]
        candidates = [
            {**each, "answer": answer}
            for each, answer in zip(content["candidates"], given, strict=True)
        ]
        solution = {**content, "answer": given[0], "candidates": candidates}
        began = time.perf_counter()
        make_record(replace(problem, answer=gold), solution, checker)
        return time.perf_counter() - began

    rows = []
    with AnswerChecker() as checker:
        make_record(problem, content, checker)
        plain = []
        for _ in range(rounds):
            for each, solution in solved:
                normalise_answer.cache_clear()  # another problem has other answers
                began = time.perf_counter()
                make_record(each, solution, checker)
                plain.append(time.perf_counter() - began)
        rows.append(_ms("numbers, as of the bundled problems", plain))
    with ExitStack() as stack:
        checkers = {num: stack.enter_context(AnswerChecker(num_workers=num)) for num in workers}
        for checker in checkers.values():  # starts its processes
            checker.judge("\\sqrt{2}", mathematics[:8])
        for count in spellings:
            golds = [f"\\frac{{{i + 2}}}{{{97 + count}}}" for i in range(rounds)]
            seconds: dict[int, list[float]] = {num: [] for num in checkers}
            for gold in golds:  # in turns
                for num, each in checkers.items():
                    seconds[num].append(made(count, each, gold))
            rows += [
                {**_ms(f"{count} in LaTeX", took), "processes": num}
                for num, took in seconds.items()
            ]
    return rows


def _ms(what: str, seconds: Sequence[float]) -> dict[str, Any]:
    least, middle = 1000 * min(seconds), 1000 * median(seconds)
    return {"what": what, "ms": round(least, 3), "ms_median": round(middle, 3)}


def writing(record: Record, count: int) -> list[dict[str, Any]]:
    """Milliseconds to make a line, and to have it on the disk."""
    rows = []
    with tempfile.TemporaryDirectory() as name, ResultsFolder(Path(name), {}) as folder:
        lines, whole = [], []
        for number in range(count):
            each = replace(record, unique_id=f"p{number}")
            began = time.perf_counter()
            each.to_line()
            lines.append(time.perf_counter() - began)
            began = time.perf_counter()
            folder.add(each)
            whole.append(time.perf_counter() - began)
        rows += [_ms("to a line", lines), _ms("to the disk, the line included", whole)]
        rows[-1]["ms_mean"] = round(1000 * mean(whole), 3)
    return rows


# --- many records ------------------------------------------------------------------------------


def many(records: Sequence[Record], count: int, folder: Path) -> None:
    """A folder with so many finished problems: the same few under other names."""
    (folder / "settings.json").write_text(json.dumps(_identity(records)))
    with (folder / "results.jsonl").open("wb") as file:
        for number in range(count):
            each = replace(records[number % len(records)], unique_id=f"p{number}", index=number)
            file.write(each.to_line())


def _identity(records: Sequence[Record]) -> dict[str, Any]:
    n = len(records[0].candidates)
    return {"dataset": "many", "settings": {"search": {"n": n, "search": "beam"}}}


def resumed(folder: Path, records: Sequence[Record], found: Any) -> None:
    """In a process of its own: what going on with a run, and its report, take."""
    from beamwright.cli.eval import _progress
    from beamwright.cli.in_flight import ProblemsInFlight

    stages: dict[str, Any] = {"start_gb": round(peak_gb(), 2)}
    with staged("read", stages):
        opened = ResultsFolder(folder, _identity(records))
    ordered = list(opened.records.values())
    with _progress(None, ProblemsInFlight()) as tally, staged("progress", stages):
        for number, record in enumerate(ordered, start=1):
            tally(record, number, len(ordered))
    with staged("summary", stages):
        summarise(ordered, len(records[0].candidates))
    found.put(stages)


def paged(folder: Path, records: Sequence[Record], found: Any) -> None:
    """In a process of its own: `beamwright report`, without pictures."""
    from beamwright.evaluate.charts import EvaluatedRun
    from beamwright.evaluate.report import write_report

    stages: dict[str, Any] = {}
    with staged("report", stages):
        run = read_run(folder)
        summary = summarise(run.records, len(records[0].candidates))
    made = EvaluatedRun("many", run.dataset, run.settings, summary, ())
    with staged("page", stages):
        write_report([made], folder / "report.html", "many")
    found.put(stages)


@contextmanager
def staged(name: str, stages: dict[str, Any]) -> Iterator[None]:
    """Note the seconds, and the most memory so far."""
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began
    stages[name] = {"seconds": round(took, 2), "peak_gb": round(peak_gb(), 2)}


def peak_gb() -> float:
    """The most memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says includes the parent's, before exec
        found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(found[0].split()[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def resuming(records: Sequence[Record], counts: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    context = multiprocessing.get_context("spawn")
    for count in counts:
        with tempfile.TemporaryDirectory() as name:
            many(records, count, Path(name))
            size = (Path(name) / "results.jsonl").stat().st_size
            found = context.Queue()
            stages: dict[str, Any] = {}
            for target in (resumed, paged):
                process = context.Process(target=target, args=(Path(name), records, found))
                process.start()
                stages |= found.get(timeout=600)
                process.join()
        rows.append({"records": count, "file_gb": round(size / 1e9, 3), **stages})
        say(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--characters", type=int, default=2500, help="of a candidate, in `long`")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--held", type=int, default=4, help="problems that a replica is given")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spellings", type=int, nargs="+", default=[1, 4, 16, 64], help="in LaTeX")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="that judge")
    parser.add_argument("--appends", type=int, default=500)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--what", nargs="+", default=WHAT, choices=WHAT)
    args = parser.parse_args()
    report: dict[str, Any] = {"settings": vars(args)}
    solved = solve(args.problems, args.n)
    with AnswerChecker() as checker:
        records = [make_record(problem, each, checker) for problem, each in solved]
        if "sizes" in args.what:
            report["sizes"] = sizes(solved, args.characters, checker)
            say(report["sizes"])
    content = max((each for _, each in solved), key=lambda each: len(pickle.dumps(each)))
    if "turns" in args.what:
        report["turns"] = turns(content, args, args.delays)
    if "record" in args.what:
        report["record"] = judging(solved, args.rounds, args.spellings, args.workers)
        report["record"] += writing(records[-1], args.appends)
        say(table(report["record"], ["what", "processes", "ms", "ms_median", "ms_mean"]))
    if "resume" in args.what:
        report["resume"] = resuming(records, args.records)
    finish("scale_driver", report)


if __name__ == "__main__":
    main()
