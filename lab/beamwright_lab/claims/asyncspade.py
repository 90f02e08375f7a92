"""AsyncSpade: sparse decoding that selects keys before the query is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beamwright_lab.claims import NEAR, Found, Judge, Judged, near, of, read_claims


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
    said = [f"with Table 2's times nobody waits ({waits:.1f} ms)"]
    for name in ("8B", "32B"):
        first = next(row for row in rows if row["case"].startswith(name))
        said.append(
            f"by the roofline {name} computes {first['inference']} ms, selects "
            f"{first['cache rank']}, copies {first['link down']}: "
            f"{'hidden' if first['hidden'] else 'not hidden'} (but for the link it is up to "
            f"{first['hidden by a link of no time up to, tokens'] // 1000}k tokens)"
        )
    return "; ".join(said), of(all(row["hidden"] for row in rows) and not waits)


def _alone(found: Found) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["sparse"] == "asyncspade"]


def _is_hidden(row: Mapping[str, Any]) -> bool:
    return bool(row["rank CPU"] <= (1 + NEAR) * row["forward CPU"])


def _beside(found: Found) -> Judged:
    rows = _alone(found)
    said = "; ".join(
        f"{row['tokens']:,} tokens: {row['forward CPU']:.0f} ms of CPU, the rank's "
        f"{row['rank CPU']:.0f}, of which copies {row['copies CPU']:.0f}"
        for row in rows
    )
    return said, of(all(map(_is_hidden, rows)), "not reproduced")


def _packs(found: Found) -> Judged:
    said, packed = [], [row for row in found["rows"] if "pack" in row["sparse"]]
    for alone in _alone(found):
        rows = [row for row in packed if row["tokens"] == alone["tokens"]]
        said.append(
            f"{alone['tokens']:,} tokens: the rank takes "
            f"{_range([row['rank CPU'] / alone['rank CPU'] for row in rows])} of single layers', "
            f"{sum(map(_is_hidden, rows))} of {len(rows)} hidden"
        )
    return "; ".join(said), of(all(map(_is_hidden, packed)))


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


def _prediction(reading: str) -> Judge:
    def judge(found: Found) -> Judged:
        rows, chance = found["rows"], found["share"]
        values = [row[f"predicted, {reading}"] for row in rows]
        better = sum(row[f"predicted, {reading}"] > row["1 before"] for row in rows)
        said = (
            f"overlap {_range(values)}; above the last query's in {better} of {len(rows)} layers "
            f"(chance: {chance})"
        )
        return said, of(min(values) > 0.4)

    return judge


def _shift(found: Found) -> Judged:
    readings, losses = ("text", "printed", "ridge"), []
    said = []
    for reading in readings:
        with_it, without = (
            sum(row[f"{how}, {reading}"] for row in found["rows"]) / len(found["rows"])
            for how in ("shifted", "not shifted")
        )
        losses.append(without - with_it)
        said.append(f"{reading} {without:.2f} without, {with_it:.2f} with it")
    return f"overlap, {'; '.join(said)}", of(max(losses) < 0.02, "not reproduced")


def _accuracy(found: Found) -> Judged:
    tokens = found["options"]["select"]
    rows: dict[str, list[float]] = {}
    for row in found["rows"]:
        rows.setdefault(row["sparse"], []).append(row["looked_up"])
    mean = {name: sum(values) / len(values) for name, values in rows.items()}
    said = (
        f"look-ups right with {tokens} of {found['rows'][0]['tokens']:,} tokens, ledger model: "
        f"{mean['asyncspade']:.2f}, as printed {mean['asyncspade-printed']:.2f}, without softmax "
        f"{mean['asyncspade-ridge']:.2f}, Quest {mean['quest']:.2f}, the layer before "
        f"{mean['ahead']:.2f}, the true query {mean['exact']:.2f}, all tokens {mean['off']:.2f}"
    )
    return said, of(near(mean["asyncspade"], mean["off"]), "not reproduced")


CLAIMS = read_claims(__name__)
