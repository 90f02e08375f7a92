"""`eval --ray` on a cluster, on paper: throughput, the tail, cost, and what breaks first.

Nothing here has run on a GPU. What a problem takes on a card is simulated (`simulate_many`: trees
that are made up, with steps of 40 tokens on average, on the cost model's card). Their lengths are
spread as those of the bundled problems are, about a mean that is put in. What it takes the driver
was measured (`benchmarks.scale.driver (882e61b)`, on two cores). The cluster is
`simulator.cluster`.

    python -m beamwright_lab.scale.cluster
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from beamwright_lab.common import finish, say, table
from beamwright_lab.decoupled.throughput import Machine, Setting
from beamwright_lab.simulator.cluster import (
    ClusterRun,
    Driver,
    Failures,
    SimulatedReplicas,
    saturating_count,
    simulate_cluster,
)
from beamwright_lab.simulator.many import simulate_many
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow

STEP_TOKENS, SIGMA, PROMPT_TOKENS, WIDTH = 40, 0.7, 128, 4
IN_FLIGHT = (1, 2, 3, 4, 6, 8, 12, 16)
AUTO_HELD = 4  # of 64 candidates, `--in-flight auto`
NODE = 8
DRAWS = 3  # of deaths
WHAT = ("in flight", "failures", "judging", "limits")
HOUR_S = 3600


@dataclass(frozen=True)
class DriverSeconds:
    """What `benchmarks.scale.driver (882e61b)` found on two cores, n = 64, least of its rounds.

    path_tokens: of the bundled problems, the mean of each one's candidates. take_s, take_each_s:
    of a `long` result over Ray, and what each replica adds. judge_s: by how many of a
    problem's answers are different and need mathematics. write_s: a line, on the disk.
    result_bytes: a `long` one, pickled. line_bytes: in results.jsonl. read_s, summary_s: of each
    record, when a run goes on, and of the report at its end. record_bytes: of each, in memory.
    """

    path_tokens: tuple[int, ...]
    take_s: float
    take_each_s: float
    judge_s: Mapping[int, float]
    write_s: float
    result_bytes: int
    line_bytes: int
    read_s: float
    summary_s: float
    record_bytes: float

    def driver(self, replicas: int, latex: int) -> Driver:
        """latex: different answers that need mathematics, of each problem."""
        taking_s = self.take_s + replicas * self.take_each_s
        return Driver(taking_s, self.judge_s[latex], self.write_s)


MEASURED = DriverSeconds(
    path_tokens=(
        48, 122, 97, 72, 72, 146, 121, 89, 95, 49, 116, 95, 87, 58, 42, 106, 121, 77, 75, 110,
        120, 89, 92, 38, 127, 116, 92, 51, 39, 114, 100, 74, 70, 140, 140, 99, 82, 50, 117, 110,
    ),
    take_s=0.00127,
    take_each_s=2.7e-6,
    judge_s={0: 0.00025, 1: 0.0066, 4: 0.0110, 16: 0.0284, 64: 0.283},
    write_s=0.00074,
    result_bytes=170_435,
    line_bytes=6514,
    read_s=14.15e-5,
    summary_s=21.94e-5,
    record_bytes=42_800,
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """What problems take on one card. work_s: of each, alone. speeds: see `SimulatedReplicas`."""

    work_s: tuple[float, ...]
    speeds: tuple[float, ...]

    def rate(self, in_flight: int) -> float:
        """Problems per second of a card that always has so many."""
        return in_flight * self.speeds[in_flight - 1] / mean(self.work_s)


def device(measured: DriverSeconds, args: argparse.Namespace) -> Device:
    """Trees on a card: each alone, and so many in flight, until the last one begins."""
    machine = Machine.of(args.gpu, args.model, args.verifier)
    average = mean(measured.path_tokens)
    lengths = [round(args.tokens * each / average) for each in measured.path_tokens]
    lengths = [lengths[i % len(lengths)] for i in range(args.trees)]
    random.Random(0).shuffle(lengths)
    trees = [
        grow(
            SyntheticSearch(
                args.n, WIDTH, PROMPT_TOKENS, length, STEP_TOKENS, SIGMA, survival="score", seed=i
            ),
            i,
        )
        for i, length in enumerate(lengths)
    ]
    gains: dict[int, float] = {}
    work_s: tuple[float, ...] = ()
    for count in IN_FLIGHT:
        result = simulate_many(machine.cases(trees, Setting(count)), count)
        if count == 1:
            work_s = tuple(run.ended_s for run in result.runs)
            say(
                f"one problem alone: median {median(work_s):.1f} s, {min(work_s):.1f} to "
                f"{max(work_s):.1f} s; of the time, the generator's {result.decode_share:.2f}"
            )
        ends = [(run.started_s or 0.0) + run.ended_s for run in result.runs]
        done_s = sum(s for s, end in zip(work_s, ends, strict=True) if end <= result.begun_s)
        gains[count] = done_s / result.begun_s
        say(f"{count} in flight: {gains[count]:.2f} times one")
    filled = dict(gains)
    for low, high in pairwise(IN_FLIGHT):
        for count in range(low + 1, high):
            part = (count - low) / (high - low)
            filled[count] = gains[low] + part * (gains[high] - gains[low])
    first = gains[1]  # what is in flight at the end is not counted: nearly 1
    return Device(work_s, tuple(filled[j] / first / j for j in sorted(filled)))


@dataclass(frozen=True)
class ClusterCase:
    """A cluster, and what it is asked."""

    found: Device
    measured: DriverSeconds
    args: argparse.Namespace

    def work_s(self, problems: int) -> list[float]:
        return random.Random(1).choices(self.found.work_s, k=problems)

    def replicas(self, count: int, in_flight: int, held: int | None = None) -> SimulatedReplicas:
        speeds = self.found.speeds[:in_flight]
        return SimulatedReplicas(
            count, held or in_flight, speeds, self.args.start, self.args.message
        )

    def run(
        self,
        replicas: SimulatedReplicas,
        problems: int | None = None,
        latex: int = 4,
        failures: Failures | None = None,
        seed: int = 0,
    ) -> ClusterRun:
        driver = self.measured.driver(replicas.count, latex)
        works = self.work_s(problems or self.args.problems)
        return simulate_cluster(works, replicas, driver, failures, seed)

    def row(self, run: ClusterRun) -> dict[str, Any]:
        """What is said of a run."""
        price = self.args.price * run.device_s_per_problem / HOUR_S
        return {
            "hours": round(run.seconds / HOUR_S, 2),
            "problems/h": round(run.problems_per_hour),
            "efficiency": round(run.efficiency, 3),
            "GPU-s a problem": round(run.device_s_per_problem, 1),
            "price a problem": round(price, 5),
            "last 1 %, s": round(run.last_percent_s),
            "driver busy": round(run.driver_share, 3),
            "waits, ms": round(1000 * run.waited_s, 1),
            "most waiting": run.most_results,
        }


def in_flight(case: ClusterCase) -> list[dict[str, Any]]:
    """How many problems each engine has in flight."""
    rows = []
    for count in (1, 2, 4, 8, 16):
        held = AUTO_HELD if count == 1 else None
        replicas = case.replicas(case.args.gpus, count, held)
        rows.append({"in flight": count, "held": replicas.held, **case.row(case.run(replicas))})
    return rows


def failing(case: ClusterCase) -> list[dict[str, Any]]:
    """Deaths of replicas and of nodes; means of a few draws."""
    replicas = case.replicas(case.args.gpus, 8)
    rows = []
    for replica_h, node_h in ((0, 0), (24, 0), (0, 24), (24, 24), (6, 6), (1, 0)):
        failures = Failures(
            replica_h * HOUR_S or float("inf"), node_h * HOUR_S or float("inf"), NODE,
            case.args.again,
        )  # fmt: skip
        runs = [case.run(replicas, failures=failures, seed=seed) for seed in range(DRAWS)]
        rows.append(
            {
                "replica dies every, h": replica_h or "never", "node, h": node_h or "never",
                "hours": round(mean(run.seconds for run in runs) / HOUR_S, 2),
                "efficiency": round(mean(run.efficiency for run in runs), 3),
                "deaths": round(mean(run.deaths for run in runs)),
                "problems again": round(mean(run.again for run in runs)),
                "work lost": round(mean(run.lost_s / run.work_s for run in runs), 4),
                "most deaths of a problem": max(run.most_deaths for run in runs),
            }
        )  # fmt: skip
    return rows


def judging(case: ClusterCase) -> list[dict[str, Any]]:
    """What the answers cost the driver, which judges them one problem after the other."""
    rows = []
    for latex in sorted(case.measured.judge_s):
        replicas = case.replicas(case.args.gpus, 8)
        run = case.run(replicas, latex=latex)
        driver = case.measured.driver(0, latex)
        count = saturating_count(case.found.rate(8), driver.result_s, case.measured.take_each_s)
        rows.append(
            {
                "different answers in LaTeX": latex,
                "judging, ms": round(1000 * driver.judge_s, 1), **case.row(run),
                "driver full at GPUs": round(count),
            }
        )  # fmt: skip
    return rows


def limits(case: ClusterCase) -> list[dict[str, Any]]:
    """Each part alone: how full at this many GPUs, and at how many it is full."""
    measured, args, rate = case.measured, case.args, case.found.rate(8)
    driver = measured.driver(0, 4)
    held = case.replicas(1, 8).held
    parts = {
        "judging, 64 different answers in LaTeX": (measured.judge_s[64], 0.0),
        "judging, 4 different answers in LaTeX": (driver.judge_s, 0.0),
        "a line on the disk": (driver.write_s, 0.0),
        "Ray in the driver": (driver.take_s, measured.take_each_s),
    }
    rows = []
    for name, (seconds, each_s) in parts.items():
        share = args.gpus * rate * (seconds + args.gpus * each_s)
        full = saturating_count(rate, seconds, each_s)
        said = f"{1000 * (seconds + args.gpus * each_s):.2f} ms a problem"
        rows.append({"part": name, "needs": said, "share": share, "full at GPUs": full})
    flight_bytes = held * measured.result_bytes
    link = measured.result_bytes * rate
    for name, each, limit, unit in (
        ("results that nobody has taken", flight_bytes, args.store_gb, "GB of object store"),
        ("results over the driver's network", link, args.network_gb, "GB/s"),
    ):
        said = f"{args.gpus * each / 1e9:.3f} of {limit} {unit}"
        share = args.gpus * each / 1e9 / limit
        rows.append(
            {"part": name, "needs": said, "share": share, "full at GPUs": args.gpus / share}
        )
    memory_gb = args.problems * measured.record_bytes / 1e9
    rows += [
        {
            "part": "records in the driver's memory",
            "needs": f"{memory_gb:.1f} GB for {args.problems:,} problems, however many GPUs",
        },
        {
            "part": "results.jsonl",
            "needs": f"{args.problems * measured.line_bytes / 1e9:.2f} GB; read again in "
            f"{args.problems * measured.read_s:.0f} s, report in "
            f"{args.problems * measured.summary_s:.0f} s",
        },
    ]  # fmt: skip
    rows.sort(key=lambda each: -each.get("share", 0.0))
    for each in rows:
        if "share" in each:
            each["share"] = round(each["share"], 4)
            each["full at GPUs"] = round(each["full at GPUs"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--model", default="qwen2.5-math-7b")
    parser.add_argument("--verifier", default="skywork-prm-7b")
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=640, help="of a path, on average")
    parser.add_argument("--trees", type=int, default=40, help="that are simulated on a card")
    parser.add_argument("--price", type=float, default=1.0, help="of a GPU for an hour")
    parser.add_argument("--start", type=float, default=120.0, help="seconds to load the models")
    parser.add_argument("--again", type=float, default=300.0, help="seconds until a device is back")
    parser.add_argument("--message", type=float, default=0.001, help="seconds, one way")
    parser.add_argument("--store-gb", type=float, default=8.0, help="object store of the driver")
    parser.add_argument("--network-gb", type=float, default=1.25, help="of the driver, a second")
    parser.add_argument("--what", nargs="+", default=WHAT, choices=WHAT)
    args = parser.parse_args()
    found = device(MEASURED, args)
    case = ClusterCase(found, MEASURED, args)
    report: dict[str, Any] = {
        "settings": {name: str(each) for name, each in vars(args).items()},
        "device": {
            "work_s": [round(each, 2) for each in found.work_s],
            "gains": {j + 1: round((j + 1) * s, 2) for j, s in enumerate(found.speeds)},
        },
    }
    parts = {
        "in flight": in_flight, "failures": failing, "judging": judging, "limits": limits,
    }  # fmt: skip
    for name in args.what:
        rows = parts[name](case)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        say(f"\n{name}\n{table(rows, columns)}")
        report[name] = rows
    finish("scale_cluster", report)


if __name__ == "__main__":
    main()
