"""Accuracy of sparse decoding against its budget: the ledger's look-ups, the bundled problems.

`ledger`: greedy, free-running, every look-up checked (`ledger.py`); both variants decode together,
in one step, so that predictions and TOVA never begin anew. `bundled`: samples of `bundled:test` and
the one of them that the verifier likes best; steps end where the model ends them. All rows select
from their first token on. Budgets are tokens of each KV head; 16 of them are always the first four
and the newest twelve, so that all methods but `tova` are `window` there.

    python -m beamwright_lab.sparse.accuracy
    python -m beamwright_lab.sparse.accuracy --what ledger --tokens 4096 --problems 2 --select 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml

from beamwright import Solution, Solver
from beamwright.evaluate import AnswerChecker, load_problems
from beamwright_lab.common import fingerprint, finish, say, table
from beamwright_lab.sparse.ledger import MODEL, load_maker

METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "exact": {"sparse": "exact"},
        "exact, first layer in full": {"sparse": "exact", "sparse_layers": 1},
        "pages": {"sparse": "pages"},
        "pages, first layer in full": {"sparse": "pages", "sparse_layers": 1},
        "quest": {"sparse": "quest"},
        "ahead": {"sparse": "ahead"},
        "ahead, first layer in full": {"sparse": "ahead", "sparse_layers": 1},
        "ahead, corrected below .8": {"sparse": "ahead", "sparse_correct": 0.8},
        "ahead-pages": {"sparse": "ahead-pages"},
        "ahead-pages, corrected below .8": {"sparse": "ahead-pages", "sparse_correct": 0.8},
        "tova": {"sparse": "tova"},
        "window": {"sparse": "window"},
        "last": {"sparse": "last"},
        "harmonic": {"sparse": "harmonic"},
        "asyncspade, post": {"sparse": "asyncspade"},
        "asyncspade, pre": {"sparse": "asyncspade", "sparse_frame": "pre"},
        "asyncspade, pre, two layers in full": {
            "sparse": "asyncspade",
            "sparse_frame": "pre",
            "sparse_layers": 2,
        },
        "algorithm-1": {"sparse": "algorithm-1"},
        "asyncspade, corrected below .8": {"sparse": "asyncspade", "sparse_correct": 0.8},
        "full attention": {},
    }
)
"""Options of the Solver, by what a row is called."""

COLUMNS = ("method", "select", "visible", "left out", "corrected")
SHARES = ("recall", "copied", "right_tokens", "complete")
VARIANTS = ("plain", "announced")
LEDGER = tuple(f"{variant} {share}" for variant in VARIANTS for share in SHARES)
BUNDLED = ("one sample", "best of n", "tokens / sample")
Cell = Callable[[Mapping[str, Any]], dict[str, Any]]
"""From a method's options to what one row shows."""


def selects(options: Mapping[str, Any], budgets: Sequence[int | float]) -> Sequence[Any]:
    """The budgets that a method is run with; TOVA keeps numbers only, full attention has none."""
    if not options:
        return [None]
    shares = options["sparse"] != "tova"
    return [each for each in budgets if shares or isinstance(each, int)]


def seen(solver: Solver, solutions: Sequence[Solution]) -> dict[str, Any]:
    """What the solver says of the selections; corrected: the share of KV heads."""
    shape = solver.generator.decoder.shape
    # Of all in flight until a problem ends: the last one knows of all.
    known = [each.sparse for each in solutions if each.sparse is not None and each.sparse.tokens]
    if not known:
        return {}
    stats = max(known, key=lambda each: each.tokens)
    left_out, heads = stats.left_out_mean, stats.tokens * shape.layers * shape.kv_heads
    return {
        "visible": round(stats.visible_mean or 0),
        "left out": None if left_out is None else float(f"{left_out:.2g}"),
        "corrected": round(stats.corrections / heads, 3) if stats.corrections else None,
    }


# --- what is solved --------------------------------------------------------------------------


def ledger_cell(tokens: int, num: int, seed: int) -> Cell:
    """Problems of both variants, `num` of each."""
    maker = load_maker()
    found = [
        each for announced in (False, True) for each in maker.ledgers(tokens, num, announced, seed)
    ]
    limits = [len(maker.solution_pieces(each)) for each in found]
    asked = [
        (place, maker.question_text(each), {"max_tokens": limit})
        for place, (each, limit) in enumerate(zip(found, limits, strict=True))
    ]

    def cell(options: Mapping[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        with Solver(
            model=MODEL, verifier="none", search="best-of-n", n=1, temperature=0.0,
            max_step_tokens=max(limits), **options,
        ) as solver:  # fmt: skip
            solutions = solved(solver.solve_many(asked))
            shown = seen(solver, solutions)
        verdicts = [
            maker.judge(each, solution.candidates[0].text)
            for each, solution in zip(found, solutions, strict=True)
        ]
        for variant, part in zip(VARIANTS, (verdicts[:num], verdicts[num:]), strict=True):
            mean = maker.mean_verdict(part)
            shown |= {f"{variant} {share}": round(mean[share], 3) for share in SHARES}
        return {**shown, "seconds": round(time.perf_counter() - begin, 1)}

    return cell


def bundled_cell(num: int, n: int, seed: int) -> Cell:
    """Samples of problems, judged."""
    problems, checker = load_problems("bundled:test", num).problems, AnswerChecker()

    def cell(options: Mapping[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        with Solver(
            model="bundled", verifier="bundled", search="best-of-n", n=n, seed=seed, **options
        ) as solver:
            solutions = solved(solver.solve_many([each.problem for each in problems]))
            shown = seen(solver, solutions)
        ones, best, tokens = [], [], []
        for problem, solution in zip(problems, solutions, strict=True):
            best.append(bool(checker.is_correct(problem.answer, solution.answer)))
            for each in solution.candidates:
                ones.append(bool(checker.is_correct(problem.answer, each.answer)))
                tokens.append(each.tokens)
        return {
            **shown,
            "one sample": round(sum(ones) / len(ones), 3),
            "best of n": round(sum(best) / len(best), 3),
            "tokens / sample": round(sum(tokens) / len(tokens)),
            "seconds": round(time.perf_counter() - begin, 1),
        }

    return cell


def solved(outcomes: Sequence[Any]) -> list[Solution]:
    """Raises the first problem's error."""
    for each in outcomes:
        if isinstance(each, Exception):
            raise each
    return list(outcomes)


def rows(
    cell: Cell, names: Sequence[str], budgets: Sequence[int | float]
) -> Iterator[dict[str, Any]]:
    """Every method with every budget; a line of progress each."""
    for name in names:
        options = METHODS[name]
        for select in selects(options, budgets):
            given = {**options, "select": select, "sparse_from": 0} if options else {}
            shown = {"method": name, "select": select, **cell(given)}
            say(*(f"{key}: {value};" for key, value in shown.items()))
            yield shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--what", choices=["ledger", "bundled"], default="ledger")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--select", type=yaml.safe_load, nargs="+", default=[24, 32, 64, 128, 256])
    parser.add_argument("--tokens", type=int, default=1024, help="of a ledger's problem")
    parser.add_argument("--problems", type=int, help="default: 4 of each variant; 64")
    parser.add_argument("--n", type=int, default=4, help="samples of a bundled problem")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "ledger":
        cell = ledger_cell(args.tokens, args.problems or 4, args.seed)
        columns = (*COLUMNS, *LEDGER, "seconds")
    else:
        cell = bundled_cell(args.problems or 64, args.n, args.seed)
        columns = (*COLUMNS, *BUNDLED, "seconds")
    found = list(rows(cell, args.methods, args.select))
    say(table(found, columns))
    asked = {key: value for key, value in vars(args).items() if key != "methods"}
    finish(
        f"sparse_accuracy_{args.what}",
        {"ledger_model": fingerprint(MODEL), "asked": asked, "rows": found},
    )


if __name__ == "__main__":
    main()
