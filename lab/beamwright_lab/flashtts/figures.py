"""FlashTTS's figures, simulated, beside the numbers in the paper's text: a table per figure.

The same trees run on the paper's baseline (`flashtts.baseline`) and on this engine, with and
without three parts. P is prefix order: schedule locality, else a random order. M is moving memory:
split `auto`, else half and half. S is exact speculation; with L, also LookAhead Verification.
"Strong" is this engine without P, M and S.

    python -m beamwright_lab.flashtts.figures
    python -m beamwright_lab.flashtts.figures --only 5 11
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
    Rules,
    Workload,
    baseline_of,
    simulate_baseline,
)
from beamwright_lab.flashtts.split import PAIRS, costs_of, split_cases
from beamwright_lab.rivals.requests import requests_by_round
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
PAPER: Mapping[str, str] = MappingProxyType(
    {
        "goodput": "mean 2.2, 1.2 to 5.4 (7B+1.5B, n = 512)",
        "latency": "-38 to -68 %",
        "generation": "-36 to -66 %",
        "verification": "-75 to -85 %",
    }
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


# --- Figures 12, 13 and 15: goodput, latency, ablation ----------------------------------------


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
    """Run a search on three baselines and the named variants; those that do not fit are absent.

    Waiting for the link counts as the generator's time.
    """
    by_row, once = simulate_baseline(case)
    uncached, _ = simulate_baseline(replace(case, rules=Rules(verifier_prefix_cache=False)))
    named = {"baseline": by_row, "baseline, KV once": once, "baseline, uncached": uncached}
    found = {
        name: Run(each.time_s, each.decode_s, each.verify_s, each.goodput_tok_s)
        for name, each in named.items()
    }
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


def searches(work: Workload, beams: Sequence[int], names: Sequence[str]) -> list[Row]:
    """Run the named variants; return a row per model pair and n."""
    rows: list[Row] = []
    for num_beams in beams:
        for pair in PAIRS:
            began = time.perf_counter()
            all_runs = [
                compare(baseline_of(pair, tree_of(work, num_beams, seed), num_beams), work, names)
                for seed in seeds_of(num_beams)
            ]
            fit = [name for name in all_runs[0] if all(name in runs for runs in all_runs)]
            runs = {name: mean_run([each[name] for each in all_runs]) for name in fit}
            rows.append({"pair": pair, "n": num_beams, "runs": runs})
            say(pair, num_beams, f"{time.perf_counter() - began:.1f} s")
    return rows


def goodput_rows(rows: Sequence[Row]) -> list[Row]:
    """Return goodput and its ratios (Figures 12 and 15)."""
    shown: list[Row] = []
    for row in rows:
        runs: dict[str, Run] = row["runs"]
        base, strong = runs["baseline"], runs["strong"]
        each: Row = {"pair": row["pair"], "n": row["n"], "baseline, tok/s": _short(base.goodput)}
        for name in ("baseline, KV once", "strong", "P", "P+M", FULL, "auto"):
            if name in runs:
                each[f"{name} / baseline"] = _short(runs[name].goodput / base.goodput)
        if FULL in runs:
            full = runs[FULL]
            each["full / strong"] = _short(full.goodput / strong.goodput)
            each["full / uncached"] = _short(full.goodput / runs["baseline, uncached"].goodput)
            parts = {"P": "M+S", "M": "P+S", "S": "P+M"}
            for part, without in parts.items():
                if without in runs:
                    each[f"without {part} / full"] = _short(runs[without].goodput / full.goodput)
        shown.append(each)
    return shown


def latency_rows(rows: Sequence[Row]) -> list[Row]:
    """Return seconds, and their change by the whole engine (Figure 13)."""
    shown: list[Row] = []
    for row in rows:
        runs: dict[str, Run] = row["runs"]
        each: Row = {"pair": row["pair"], "n": row["n"]}
        for name in ("baseline", "baseline, uncached", "strong", FULL):
            if name in runs:
                run = runs[name]
                each[f"{name}, s"] = f"{run.time_s:.1f} ({run.decode_s:.1f} + {run.verify_s:.1f})"
        if FULL in runs:
            full, base = runs[FULL], runs["baseline"]
            uncached = runs["baseline, uncached"]
            each["latency"] = _change(full.time_s, base.time_s)
            each["generation"] = _change(full.decode_s, base.decode_s)
            each["verification"] = _change(full.verify_s, base.verify_s)
            each["latency, uncached"] = _change(full.time_s, uncached.time_s)
            each["verification, uncached"] = _change(full.verify_s, uncached.verify_s)
        shown.append(each)
    return shown


def summary(rows: Sequence[Row], label: str) -> list[Row]:
    """Return mean and range of each ratio over pairs and n, where the whole engine fits."""
    runs = [row["runs"] for row in rows if FULL in row["runs"]]
    if not runs:
        return []
    ratios: dict[str, tuple[list[float], str]] = {
        f"goodput, full / {name}": (
            [each[FULL].goodput / each[name].goodput for each in runs],
            PAPER["goodput"] if name == "baseline" else "",
        )
        for name in ("baseline", "baseline, KV once", "baseline, uncached", "strong")
    }
    ratios["goodput, strong / baseline"] = (
        [each["strong"].goodput / each["baseline"].goodput for each in runs],
        "",
    )
    for paper, attribute in (
        ("latency", "time_s"), ("generation", "decode_s"), ("verification", "verify_s")
    ):  # fmt: skip
        for name in ("baseline", "baseline, uncached"):
            found = [
                getattr(each[FULL], attribute) / getattr(each[name], attribute) for each in runs
            ]
            ratios[f"{paper}, full / {name}"] = (found, PAPER[paper])
    return [
        {
            "searches": label,
            "ratio": name,
            "mean": _short(statistics.mean(found)),
            "least": _short(min(found)),
            "most": _short(max(found)),
            "paper": said,
        }
        for name, (found, said) in ratios.items()
    ]


# --- Figure 17 (right): memory ----------------------------------------------------------------


def memory_rows(work: Workload, num_beams: int, sizes: Sequence[float]) -> list[Row]:
    """Return goodput ratios of 1.5B+1.5B for each KV memory in `sizes` (GiB)."""
    pair, rows = "1.5B+1.5B", []
    for size in sizes:
        tree = tree_of(work, num_beams, 0)
        case = replace(baseline_of(pair, tree, num_beams), kv_bytes=int(size * GIB))
        runs = compare(case, work, ("strong", "P", "P+M", FULL))
        base, strong = runs["baseline"].goodput, runs["strong"].goodput
        row: Row = {"KV, GiB": size, "n": num_beams, "baseline, tok/s": _short(base)}
        for name in ("strong", "P", "P+M", FULL):
            if name in runs:
                row[f"{name} / baseline"] = _short(runs[name].goodput / base)
                if name != "strong":
                    row[f"{name} / strong"] = _short(runs[name].goodput / strong)
        rows.append(row)
        say("memory", row)
    return rows


# --- Figures 3, 5 left and 11: methods --------------------------------------------------------

# Methods of Figure 11, and best-of-n of Figures 3 and 5, with their `SyntheticSearch` options.
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
                found.append(compare(case, work, ("strong", FULL), foresight(method)))
            rows.append({"search": search, "n": num_beams, **_method_row(found)})
            say("methods", rows[-1])
    return rows


def _method_row(found: Sequence[Mapping[str, Run]]) -> Row:
    runs = {
        name: mean_run([each[name] for each in found])
        for name in found[0]
        if all(name in each for each in found)
    }
    base, sides = runs["baseline"], ("baseline", "strong", FULL)
    row: Row = {f"{name}, s": _short(runs[name].time_s) for name in sides if name in runs}
    row["baseline, tok/s"] = _short(base.goodput)
    for name in ("strong", FULL):
        if name in runs:
            row[f"{name} / baseline"] = _short(runs[name].goodput / base.goodput)
    if FULL in runs:
        uncached = runs["baseline, uncached"]
        row["full / uncached"] = _short(runs[FULL].goodput / uncached.goodput)
    return row


def sharing_rows(work: Workload, beams: Sequence[int]) -> list[Row]:
    """Return the most KV of a round (Figure 5 left), with a copy per beam and shared; 1.5B.

    It counts complete steps, without pruned and finished paths.
    """
    token_bytes = costs_of("1.5B+1.5B")[0].kv_bytes_per_token
    rows = []
    for num_beams in beams:
        for search in METHODS:
            copies, shared = most_kv(grow(synthetic_search(work, search, num_beams, 0)))
            rows.append(
                {
                    "search": search,
                    "n": num_beams,
                    "copies, GiB": _short(copies * token_bytes / GIB),
                    "shared, GiB": _short(shared * token_bytes / GIB),
                    "saved": f"{1 - shared / copies:.0%}",
                }
            )
    return rows


def most_kv(tree: RecordedTree) -> tuple[int, int]:
    """Return the most tokens of a round's paths: their sum, and their distinct tokens."""
    lengths = {(): tree.prompt_tokens, **{node.lineage: node.tokens for node in tree.nodes}}
    copies = shared = 0
    for requests in requests_by_round(tree.prompt_tokens, tree.nodes):
        nodes = {node for each in requests for node in (*each.path, each.node)}
        copies = max(copies, sum(each.final_tokens for each in requests))
        shared = max(shared, sum(lengths[node] for node in nodes))
    return copies, shared


def step_rows(sigmas: Sequence[float], num_beams: int) -> list[Row]:
    """Return mean and longest assumed step by depth (Figure 3 right)."""
    rows = []
    for sigma in sigmas:
        tree = tree_of(Workload(step_sigma=sigma), num_beams, 0)
        for depth in (1, 2, 4, 8):
            lengths = [node.tokens for node in tree.nodes if len(node.lineage) == depth]
            if lengths:
                rows.append(
                    {
                        "sigma": sigma,
                        "n": num_beams,
                        "step": depth,
                        "average": round(statistics.mean(lengths)),
                        "longest": max(lengths),
                        "ratio": _short(max(lengths) / statistics.mean(lengths)),
                    }
                )
    return rows


# --- Figures 4 and 16: utilisation ------------------------------------------------------------


@dataclass(frozen=True)
class LoggedCosts(RooflineCosts):
    """Roofline costs that log every pass.

    log: (is a decode step, rows or prefilled tokens, FLOPs, seconds) of each pass.
    """

    log: list[tuple[bool, int, float, float]] = field(default_factory=list)

    def tokens(
        self, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        each = self.roofline.decode_step_s
        for i in range(count):
            seconds = each(num_rows, read_tokens + i * grow, seen_tokens + i * grow, self.layout)
            self.log.append(
                (True, num_rows, self._flops(num_rows, seen_tokens + i * grow), seconds)
            )
        return super().tokens(num_rows, read_tokens, seen_tokens, grow, count)

    def prefill(self, num_tokens: int, read_tokens: int, seen_tokens: int) -> Work:
        work = super().prefill(num_tokens, read_tokens, seen_tokens)
        flops = self._flops(num_tokens, seen_tokens)
        self.log.append((False, num_tokens, flops, work.seconds))
        return work

    def _flops(self, num_tokens: int, seen_tokens: int) -> float:
        model = self.roofline.model
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * seen_tokens
        return 2.0 * model.num_parameters * num_tokens + attention


def utilisation_rows(work: Workload, num_beams: int) -> list[Row]:
    """Return rows in each fifth of the first round, and FLOP/s of whole searches."""
    rows = []
    case = baseline_of("1.5B+1.5B", tree_of(work, num_beams, 0), num_beams)
    first = max(node.tokens for node in case.tree.nodes if len(node.lineage) == 1)
    peak = case.hardware.flops
    for name in ("P+M", FULL):
        generator = LoggedCosts(Roofline(case.generator, case.hardware), Layout.TREE)
        verifier = LoggedCosts(Roofline(case.verifier, case.hardware), Layout.TREE)
        variant, half = VARIANTS[name], case.kv_bytes // 2
        simulate(
            Simulation(
                case.tree, case.generator, generator, half, variant.schedule,
                StepSettings(max_step_tokens=first, max_tokens=work.generate_tokens),
                verifier=VerifierCase(case.verifier, verifier, half), split="auto",
                hardware=case.hardware, speculation=variant.speculation,
            )
        )  # fmt: skip
        passes = [each for each in generator.log if each[0]]
        row: Row = {"engine": "with S" if variant.speculation != "off" else "without S"}
        for fifth in range(5):
            part = passes[first * fifth // 5 : first * (fifth + 1) // 5]
            row[f"rows, fifth {fifth + 1}"] = _short(statistics.mean(each[1] for each in part))
        seconds = sum(each[3] for each in passes)
        few = sum(each[3] for each in passes if each[1] < num_beams / 4)
        row["time below n / 4 rows"] = f"{few / seconds:.0%}"
        row["FLOP/s, decoding"] = f"{sum(each[2] for each in passes) / seconds / peak:.1%}"
        scored = verifier.log
        row["FLOP/s, scoring"] = (
            f"{sum(each[2] for each in scored) / sum(each[3] for each in scored) / peak:.1%}"
        )
        row["decoding, s"] = _short(seconds)
        rows.append(row)
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
            row[f"{name}, batch"] = batch
        row["ratio"] = _short(row["decode, batch"] / row["prefill, batch"])
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


def _change(new: float, old: float) -> str:
    return f"{new / old - 1:+.0%}"


def figures(args: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """Yield the wanted tables, named by the paper's figures; quick ones first."""
    main_work, other = Workload(), Workload(step_sigma=args.other_sigma)
    single: Mapping[str, Callable[[], list[Row]]] = {
        "3 right: steps": lambda: step_rows((args.other_sigma, main_work.step_sigma), 64),
        "4 and 16 left: utilisation": lambda: utilisation_rows(main_work, 64),
        "5 left: memory of methods": lambda: sharing_rows(main_work, args.methods_n),
        "6: throughput and KV": throughput_rows,
        "10: split": split_rows,
        "3 left and 11: methods": lambda: method_rows(main_work, args.methods_n),
        "17 right: memory": lambda: memory_rows(main_work, args.memory_n, args.sizes),
    }
    for name, rows in single.items():
        if is_wanted(name, args.only):
            yield name, rows()
    if is_wanted("12, 13 and 15", args.only):
        yield from search_figures(args, main_work, other)


def is_wanted(name: str, numbers: Sequence[int]) -> bool:
    """Return True if the table belongs to one of these figures, or if no figure is given."""
    return not numbers or any(str(number) in re.findall(r"\d+", name) for number in numbers)


def search_figures(
    args: argparse.Namespace, main_work: Workload, other: Workload
) -> Iterator[tuple[str, list[Row]]]:
    """Yield the tables of Figures 12, 13 and 15, which share searches, and their summary."""
    found = searches(other, [n for n in args.n if n <= args.other_most], ("strong", "P+M", FULL))
    sigma = f"sigma {other.step_sigma}"
    yield f"12, {sigma}", goodput_rows(found)
    yield f"13, {sigma}", latency_rows(found)
    summaries = summary(found, sigma)
    found = searches(main_work, args.n, [name for name in VARIANTS if not name.endswith("+L")])
    yield "12 and 15: goodput", goodput_rows(found)
    yield "13: latency", latency_rows(found)
    summaries += summary(found, f"sigma {main_work.step_sigma}")
    common = [row for row in found if row["n"] <= args.other_most]
    summaries += summary(common, f"sigma {main_work.step_sigma}, n <= {args.other_most}")
    yield "summary", summaries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", default=[], help="figures (default: all)")
    parser.add_argument("--n", type=int, nargs="+", default=list(BEAMS), help="paths per search")
    parser.add_argument(
        "--other-sigma", type=float, default=0.5, help="second spread of step lengths"
    )
    parser.add_argument("--other-most", type=int, default=128, help="largest n for --other-sigma")
    parser.add_argument(
        "--methods-n", type=int, nargs="+", default=[16, 64, 256], help="n of Figures 3, 5 and 11"
    )
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
