"""AsyncSpade: sparse decoding that selects keys before the query is known."""

from __future__ import annotations

from typing import Any

from beamwright_lab.claims import Claim, Found, Judge, Judged, near, of


def _flops(found: Found) -> Judged:
    rows = found["tables"]["FLOPs"]
    (row,) = (each for each in rows if (each["model"], each["context"]) == ("8B", 32768))
    others = min(row["full"], row["exact"], row["quest"])
    said = (
        f"{row['asyncspade']} GFLOP a token at 32k (8B), full attention {row['full']}, Quest "
        f"{row['quest']}; with the second GPU's {row['both ranks']}"
    )
    return said, of(row["asyncspade"] < others, "not reproduced")


def _bandwidth(found: Found) -> Judged:
    rows = found["tables"]["Table 2"]
    off = [abs(row["query heads, MiB/ms"] / row["printed GB/s"] - 1) for row in rows]
    need = [row["K and V, GB/s"] for row in rows]
    said = (
        f"all {len(rows)} within {100 * max(off):.1f} %, counting query heads; K and V of their "
        f"heads need {min(need):.0f} to {max(need):.0f}"
    )
    return said, of(max(off) < 0.1)


def _hidden(found: Found) -> Judged:
    waits = max(row["waits, ms"] for row in found["tables"]["Table 2"])
    rows = found["tables"]["conditions"]
    hidden = {name: [row["hidden"] for row in rows if row["case"].startswith(name)] for name in
              ("8B", "32B")}  # fmt: skip
    said = f"with Table 2's times nobody waits ({waits:.1f} ms)"
    words = [
        f"{name} {'is' if all(each) else 'is not' if not any(each) else 'is partly'}"
        for name, each in hidden.items()
    ]
    said += f"; by the roofline {', '.join(words)} hidden"
    return said, of(all(map(all, hidden.values())) and not waits)


def _faster(column: str, claimed: int) -> Judge:
    """column: "-11; -3; -20" by the roofline, where all is as much above it as the paper's own
    times, and what it claims."""

    def judge(found: Found) -> Judged:
        cells = [row[column].split("; ") for row in found["tables"]["TPOT"]]
        roofline, above = (sorted(int(cell[place]) for cell in cells) for place in (0, 1))
        said = (
            f"{roofline[0]} to {roofline[-1]} % by the roofline; {above[0]} to {above[-1]} % if "
            f"all methods are as far above it as the paper's own times"
        )
        return said, of(max(roofline[-1], above[-1]) <= -claimed)

    return judge


def _selection_share(found: Found) -> Judged:
    rows = {row["batch"]: row for row in found["tables"]["Figure 2"]}
    most = max(value for row in rows.values() for name, value in row.items() if name != "batch")
    said = f"{rows[8]['32k']} % of a block at 8 rows and 32k, at most {most} %"
    return said, of(most > 50)


def _layers(found: Found, model: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["model"] == model]


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _locality(found: Found) -> Judged:
    far = {
        model: [row["16 before"] for row in _layers(found, model)]
        for model in ("ledger", "bundled")
    }
    said = "; ".join(f"{_range(values)} in the {name} model" for name, values in far.items())
    return f"{said}, by layer", of(min(map(min, far.values())) > 0.4, "not reproduced")


def _prediction(found: Found) -> Judged:
    rows = found["rows"]
    better = sum(row["predicted"] > row["1 before"] for row in rows)
    values = [row["predicted"] for row in rows]
    said = (
        f"overlap {_range(values)}; above the last query's in {better} of {len(rows)} layers "
        f"(chance: {found['share']})"
    )
    return said, of(min(values) > 0.4)


def _accuracy(found: Found) -> Judged:
    tokens = found["options"]["select"]
    rows: dict[str, list[float]] = {}
    for row in found["rows"]:
        rows.setdefault(row["sparse"], []).append(row["looked_up"])
    mean = {name: sum(values) / len(values) for name, values in rows.items()}
    said = (
        f"look-ups right with {tokens} of {found['rows'][0]['tokens']:,} tokens, ledger model: "
        f"{mean['asyncspade']:.2f}, Quest {mean['quest']:.2f}, the true query "
        f"{mean['exact']:.2f}, all tokens {mean['off']:.2f}"
    )
    return said, of(near(mean["asyncspade"], mean["off"]), "not reproduced")


CLAIMS = (
    Claim(
        "Fewest operations a token", "Fig. 9, Eq. 6 to 11", "sparse_paper", _flops, "computed",
    ),
    Claim(
        "Bandwidth between the GPUs", "105 to 230 GB/s (Table 2)", "sparse_paper", _bandwidth,
        "computed",
    ),
    Claim(
        "Selection hides behind the forward pass", "in all 16 cases (Table 2)", "sparse_paper",
        _hidden, "simulated",
    ),
    Claim(
        "Time per token against Quest", "over 20 % less (Fig. 10)", "sparse_paper",
        _faster("against quest %: roofline; so much above; claimed", 20), "computed",
    ),
    Claim(
        "Time per token against full attention", "at least 50 % less (Fig. 10)",
        "sparse_paper", _faster("against full %", 50), "computed",
    ),
    Claim(
        "Selecting dominates a block's time", "in large batches or contexts (Fig. 2)",
        "sparse_paper", _selection_share, "computed",
    ),
    Claim(
        "Queries 16 tokens apart select alike", "overlap above 40 % (Fig. 4)",
        "sparse_locality", _locality, "measured",
    ),
    Claim(
        "The predicted query selects what the true one does", "no number in the text (Fig. 5)",
        "sparse_locality", _prediction, "measured",
    ),
    Claim(
        "Accuracy of full attention", "matched or surpassed (Fig. 9)", "sparse_ledger",
        _accuracy, "measured",
    ),
    Claim("Qwen3 on AIME, GPQA and MATH-500; two GPUs", "sections 5.2 and 5.3"),
)  # fmt: skip
