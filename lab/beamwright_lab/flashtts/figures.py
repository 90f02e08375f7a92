"""FlashTTS's figures, simulated: a table per figure.

The same trees run on the paper's baseline (`flashtts.baseline`) and on this engine, with and
without three parts. P is prefix order: schedule locality, else a random order. M is moving memory:
split `auto`, else half and half. S is exact speculation; with L, also LookAhead Verification.
"Strong" is this engine without P, M and S.

    python -m beamwright_lab.flashtts.figures
    python -m beamwright_lab.flashtts.figures --only 6 11
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import beamwright_lab.flashtts.order  # noqa: F401 (declares `random-order`)
from beamwright.errors import CapacityError
from beamwright.plan.costs import Layout, Roofline
from beamwright.plan.machines import find_profile
from beamwright.protocols import Foresees
from beamwright.search.beam import VARYING_LIMITS
from beamwright.sections import ScheduleSettings, Speculation, StepSettings
from beamwright_lab.common import finish, say, table
from beamwright_lab.flashtts.baseline import (
    BEAMS,
    CARD,
    Baseline,
    Workload,
    baseline_of,
    simulate_baseline,
)
from beamwright_lab.flashtts.split import PAIRS, costs_of, split_cases
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts, Work
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.run import SimulationResult, simulate
from beamwright_lab.simulator.split import best_split, fixed_split
from beamwright_lab.simulator.synthetic import SyntheticSearch, foresight, grow
from beamwright_lab.simulator.verifier import VerifierCase

GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class EngineParts:
    """This engine with some of FlashTTS's parts.

    order, memory: P and M of this module.
    look_ahead: LookAhead Verification (4.1.3).
    """

    order: bool
    memory: bool
    speculation: Speculation
    look_ahead: bool = False

    @property
    def schedule(self) -> ScheduleSettings:
        options: dict[str, Any] = {"schedule": "locality"}
        if not self.order:
            options = {"schedule": "random-order"}
        return ScheduleSettings.model_validate(
            {
                **options,
                "batching": "continuous",
                "verify_ahead": "slack" if self.look_ahead else "never",
            }
        )


VARIANTS: Mapping[str, EngineParts] = MappingProxyType(
    {
        "strong": EngineParts(False, False, "off"),
        "P": EngineParts(True, False, "off"),
        "P+M": EngineParts(True, True, "off"),
        "P+M+S": EngineParts(True, True, "exact"),
        "M+S": EngineParts(False, True, "exact"),
        "P+S": EngineParts(True, False, "exact"),
        "auto": EngineParts(True, True, "auto"),
        "P+M+S+L": EngineParts(True, True, "exact", look_ahead=True),
        "auto+L": EngineParts(True, True, "auto", look_ahead=True),
    }
)
FULL = "P+M+S"
BASELINES = ("baseline", "baseline, uncached")
TIMES: Mapping[str, str] = MappingProxyType(
    {"latency": "time_s", "generation": "decode_s", "verification": "verify_s"}
)


def simulate_ours(
    case: Baseline, variant: EngineParts, work: Workload, foresees: Foresees | None = None
) -> SimulationResult | None:
    """Simulate the baseline's search and memory on this engine; None if it does not fit."""
    half = int(0.5 * case.kv_bytes)
    generator, verifier = (
        RooflineCosts.of(model, case.hardware, Layout.TREE)
        for model in (case.generator, case.verifier)
    )
    return run_if_fits(
        Simulation(
            case.tree,
            case.generator,
            generator,
            half,
            variant.schedule,
            StepSettings(
                max_step_tokens=max(node.tokens for node in case.tree.nodes),
                max_tokens=work.generate_tokens,
            ),
            verifier=VerifierCase(case.verifier, verifier, case.kv_bytes - half),
            split="auto" if variant.memory else None,
            hardware=case.hardware,
            speculation=variant.speculation,
            foresees=foresees,
        )
    )


def run_if_fits(case: Simulation) -> SimulationResult | None:
    try:
        return simulate(case)
    except CapacityError as error:
        say("does not fit:", error)
        return None


@lru_cache(maxsize=4)
def tree_of(work: Workload, num_beams: int, seed: int) -> RecordedTree:
    return work.tree(num_beams, seed)


# --- Figures 12 and 13: goodput, latency ------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Seconds of one search, in all, of generator and of verifier; goodput in tokens per second."""

    time_s: float
    decode_s: float
    verify_s: float
    goodput: float


def compare(
    case: Baseline, work: Workload, names: Iterable[str], foresees: Foresees | None = None
) -> dict[str, Run]:
    """Run a search on both baselines and the named variants; those that do not fit are absent.

    Waiting for the link counts as the generator's time.
    """
    found: dict[str, Run] = {}
    for name, cached in zip(BASELINES, (True, False), strict=True):
        rules = replace(case.rules, verifier_prefix_cache=cached)
        each = simulate_baseline(replace(case, rules=rules))
        found[name] = Run(each.time_s, each.decode_s, each.verify_s, each.goodput_tok_s)
    for name in names:
        ran = simulate_ours(case, VARIANTS[name], work, foresees)
        if ran is not None:
            decode_s = ran.time_s - ran.verify_s
            found[name] = Run(ran.time_s, decode_s, ran.verify_s, ran.goodput_tok_s)
    return found


def mean_run(runs: Sequence[Run]) -> Run:
    return Run(
        *(
            statistics.mean(getattr(run, name) for run in runs)
            for name in ("time_s", "decode_s", "verify_s", "goodput")
        )
    )


def seeds_of(num_beams: int) -> range:
    """Return the seeds to average over: more for small searches, which vary more."""
    return range(3) if num_beams <= 64 else range(1)


def mean_runs(found: Sequence[Mapping[str, Run]]) -> dict[str, Run]:
    """Return the means over seeds of what fits with every seed."""
    fit = [name for name in found[0] if all(name in runs for runs in found)]
    return {name: mean_run([runs[name] for runs in found]) for name in fit}


def ratios(runs: Mapping[str, Run], names: Iterable[str]) -> Row:
    """Return the goodput of those of the named variants that fit, over the baseline's."""
    base = runs["baseline"].goodput
    return {
        f"{name} / baseline": _short(runs[name].goodput / base) for name in names if name in runs
    }


def searches(work: Workload, beams: Sequence[int]) -> list[Row]:
    """Run the whole engine; return a row per model pair and n with which it fits."""
    rows: list[Row] = []
    for num_beams in beams:
        for pair in PAIRS:
            began = time.perf_counter()
            cases = [
                baseline_of(pair, tree_of(work, num_beams, seed), num_beams)
                for seed in seeds_of(num_beams)
            ]
            runs = mean_runs([compare(case, work, (FULL,)) for case in cases])
            if FULL in runs:
                rows.append({"pair": pair, "n": num_beams, "runs": runs})
            say(pair, num_beams, f"{time.perf_counter() - began:.1f} s")
    return rows


def over(runs: Mapping[str, Run], attribute: str, base: str) -> float:
    """Return a time or the goodput of the whole engine over that of a baseline."""
    full, other = (float(getattr(runs[name], attribute)) for name in (FULL, base))
    return full / other


def latency_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the change of times by the whole engine (Figure 13)."""
    return [
        {
            "pair": row["pair"],
            "n": row["n"],
            **{
                name: f"{over(row['runs'], attribute, 'baseline') - 1:+.0%}"
                for name, attribute in TIMES.items()
            },
        }
        for row in rows
    ]


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return mean and range of each ratio over pairs and n."""
    shown = []
    for name, attribute in {"goodput": "goodput", **TIMES}.items():
        for base in BASELINES:
            found = [over(row["runs"], attribute, base) for row in rows]
            shown.append(
                {
                    "ratio": f"{name}, full / {base}",
                    "mean": _short(statistics.mean(found)),
                    "least": _short(min(found)),
                    "most": _short(max(found)),
                }
            )
    return shown


# --- Figure 17 (right): memory ----------------------------------------------------------------


def memory_rows(work: Workload, num_beams: int, sizes: Sequence[float]) -> list[Row]:
    """Return goodput ratios of 1.5B+1.5B for each KV memory in `sizes` (GiB)."""
    rows = []
    whole = baseline_of("1.5B+1.5B", tree_of(work, num_beams, 0), num_beams)
    for size in sizes:
        case = replace(whole, kv_bytes=int(size * GIB))
        runs = compare(case, work, ("strong", "P", "P+M"))
        rows.append(
            {
                "KV, GiB": size,
                "n": num_beams,
                "baseline, tok/s": _short(runs["baseline"].goodput),
                **ratios(runs, ("strong", "P", "P+M")),
            }
        )
        say("memory", rows[-1])
    return rows


# --- Figures 3 left and 11: methods -----------------------------------------------------------

# Methods of Figure 11, and best-of-n of Figure 3, with their `SyntheticSearch` options.
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "best-of-n": {},
        "beam": {},
        "dvts": {},
        # "Each beam branches proportionally to its verifier score". Synthetic scores are normal.
        "dynamic": {"options": {"branching": "linear"}},
        "varying": {"step_limits": VARYING_LIMITS},
    }
)


def synthetic_search(work: Workload, search: str, num_beams: int, seed: int) -> SyntheticSearch:
    return SyntheticSearch(
        num_beams, work.width, work.prompt_tokens, work.generate_tokens, work.step_tokens,
        work.step_sigma, search=search, survival="score", seed=seed, **METHODS[search],
    )  # fmt: skip


def method_rows(work: Workload, beams: Sequence[int]) -> list[Row]:
    """Return the seconds (Figure 3 left) and goodput (Figure 11) of each method, 1.5B+1.5B."""
    rows = []
    for num_beams in beams:
        for search in METHODS:
            found = []
            for seed in seeds_of(num_beams):
                method = synthetic_search(work, search, num_beams, seed)
                case = baseline_of("1.5B+1.5B", grow(method), num_beams)
                found.append(compare(case, work, (FULL,), foresight(method)))
            runs = mean_runs(found)
            rows.append(
                {
                    "search": search,
                    "n": num_beams,
                    **{
                        f"{name}, s": _short(runs[name].time_s)
                        for name in ("baseline", FULL)
                        if name in runs
                    },
                    **ratios(runs, (FULL,)),
                }
            )
            say("methods", rows[-1])
    return rows


# --- Figures 4 and 16: utilisation ------------------------------------------------------------


@dataclass(frozen=True)
class LoggedCosts(RooflineCosts):
    """Roofline costs that log every decode step: its rows, FLOPs and seconds."""

    log: list[tuple[int, float, float]] = field(default_factory=list)

    def tokens(
        self, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        each, model = self.roofline.decode_step_s, self.roofline.model
        attention = 4 * model.num_layers * model.num_heads * model.head_dim
        for i in range(count):
            seen = seen_tokens + i * grow
            seconds = each(num_rows, read_tokens + i * grow, seen, self.layout)
            flops = 2.0 * model.num_parameters * num_rows + attention * seen
            self.log.append((num_rows, flops, seconds))
        return super().tokens(num_rows, read_tokens, seen_tokens, grow, count)


def utilisation_rows(work: Workload, num_beams: int) -> list[Row]:
    """Return rows in the last fifth of the first round, and FLOP/s of whole searches."""
    rows = []
    case = baseline_of("1.5B+1.5B", tree_of(work, num_beams, 0), num_beams)
    first = max(node.tokens for node in case.tree.nodes if len(node.lineage) == 1)
    for name in ("P+M", FULL):
        generator = LoggedCosts(Roofline(case.generator, case.hardware), Layout.TREE)
        verifier = RooflineCosts.of(case.verifier, case.hardware, Layout.TREE)
        variant, half = VARIANTS[name], case.kv_bytes // 2
        simulate(
            Simulation(
                case.tree, case.generator, generator, half, variant.schedule,
                StepSettings(max_step_tokens=first, max_tokens=work.generate_tokens),
                verifier=VerifierCase(case.verifier, verifier, half), split="auto",
                hardware=case.hardware, speculation=variant.speculation,
            )
        )  # fmt: skip
        last = generator.log[first * 4 // 5 : first]
        flops, seconds = (sum(each[place] for each in generator.log) for place in (1, 2))
        rows.append(
            {
                "engine": "with S" if variant.speculation != "off" else "without S",
                "rows, fifth 5": _short(statistics.mean(each[0] for each in last)),
                "FLOP/s, decoding": f"{flops / seconds / case.hardware.flops:.1%}",
            }
        )
    return rows


# --- Figures 6 and 10: by the cost model alone ------------------------------------------------


def throughput_rows(path_tokens: int = 1024) -> list[Row]:
    """Return the KV with which each stage reaches 80 % of its throughput with 16 GiB (Figure 6).

    Paths share no prefix.
    """
    card, rows = find_profile(CARD), []
    for label, model in (("1.5B", costs_of("1.5B+1.5B")[0]), ("7B", costs_of("7B+1.5B")[0])):
        roofline = Roofline(model, card)
        path = path_tokens * model.kv_bytes_per_token
        most = 16 * GIB // path
        stages: dict[str, Callable[[int], float]] = {
            "prefill": lambda batch, r=roofline: _prefill_rate(r, batch, path_tokens),
            "decode": lambda batch, r=roofline: _decode_rate(r, batch, path_tokens),
        }
        row: Row = {"model": label, "path": path_tokens}
        for name, rate in stages.items():
            full = rate(most)
            batch = next(b for b in range(1, most + 1) if rate(b) >= 0.8 * full)
            row[f"{name}, GiB at 80 %"] = _short(batch * path / GIB)
        rows.append(row)
    return rows


def _prefill_rate(roofline: Roofline, batch: int, path: int) -> float:
    tokens = batch * path
    return tokens / roofline.decode_step_s(tokens, tokens, batch * path * (path + 1) / 2)


def _decode_rate(roofline: Roofline, batch: int, path: int) -> float:
    tokens = batch * path
    return batch / roofline.decode_step_s(batch, tokens, tokens, Layout.TREE)


def split_rows(num_beams: int = 512) -> list[Row]:
    """Return the best batch sizes by T_tot for whole paths (Figure 10), 1.5B+1.5B."""
    rows = []
    _, case = next(iter(split_cases("1.5B+1.5B", num_beams, find_profile(CARD))))
    for size in (1, 2, 4, 8, 14):
        memory = size * GIB
        best, half = best_split(case, memory), fixed_split(case, memory // 2, memory // 2)
        if best is not None and half is not None:
            rows.append(
                {
                    "KV, GiB": size,
                    "n": num_beams,
                    "B_pre": best.prefill_batch,
                    "B_dec": best.decode_batch,
                    "generator's share": _short(best.generator_bytes / memory),
                    "throughput over half and half": _short(half.total_s / best.total_s),
                }
            )
    return rows


# --- all --------------------------------------------------------------------------------------


def _short(number: float) -> str:
    return f"{number:.3g}"


def figures(args: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """Yield the wanted tables, named by the paper's figures; quick ones first."""
    work = Workload()
    single: Mapping[str, Callable[[], list[Row]]] = {
        "4 and 16 left: utilisation": lambda: utilisation_rows(work, 64),
        "6: throughput and KV": throughput_rows,
        "10: split": split_rows,
        "3 left and 11: methods": lambda: method_rows(work, args.methods_n),
        "17 right: memory": lambda: memory_rows(work, args.memory_n, args.sizes),
    }
    for name, rows in single.items():
        if is_wanted(name, args.only):
            yield name, rows()
    if is_wanted("12 and 13", args.only):
        found = searches(work, args.n)
        yield "13: latency", latency_rows(found)
        yield "summary", summary(found) if found else []


def is_wanted(name: str, numbers: Sequence[int]) -> bool:
    """Return True if the table belongs to one of these figures, or if no figure is given."""
    return not numbers or any(str(number) in re.findall(r"\d+", name) for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", default=[], help="figures (default: all)")
    parser.add_argument("--n", type=int, nargs="+", default=list(BEAMS), help="paths per search")
    parser.add_argument(
        "--methods-n", type=int, nargs="+", default=[16, 64, 256], help="n of Figures 3 and 11"
    )
    # Ignored. The command of docs/figures/flashtts_figures.json has it.
    parser.add_argument("--memory-n", type=int, default=256, help="n of Figure 17")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[1.5, 3, 6, 14], help="KV in GiB of Figure 17"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for name, rows in figures(args):
        columns = Counter(key for row in rows for key in row)
        say(f"\nFigure {name}\n" if name != "summary" else "\nAll\n")
        say(table(rows, list(columns)))
        result[name] = rows
    finish("flashtts_figures", result)


if __name__ == "__main__":
    main()
