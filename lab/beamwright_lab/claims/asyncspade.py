"""AsyncSpade: sparse decoding that selects keys before the query is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beamwright_lab.claims import NEAR, Found, Judge, Judged, grade, is_near, read_claims


def _flops(found: Found) -> Judged:
    rows = found["tables"]["FLOPs"]
    (row,) = (each for each in rows if (each["model"], each["context"]) == ("8B", 32768))
    others = min(row["full"], row["exact"], row["quest"])
    said = (
        f"Qwen3-8B at 32k tokens: {row['asyncspade']} GFLOP per token on the inference GPU, "
        f"{row['both ranks']} on both GPUs; Quest {row['quest']}, full attention {row['full']}"
    )
    return said, grade(row["asyncspade"] < others, "not reproduced")


def _bandwidth(found: Found) -> Judged:
    rows = found["tables"]["Table 2"]
    off = [abs(row["query heads, MiB/ms"] / row["printed GB/s"] - 1) for row in rows]
    need = [row["K and V, GB/s"] for row in rows]
    said = (
        f"all {len(rows)} cases within {100 * max(off):.1f} % if each query head gets its own KV; "
        f"sent once per KV head, {min(need):.0f} to {max(need):.0f} GB/s are enough"
    )
    return said, grade(max(off) < 0.1)


def _hidden(found: Found) -> Judged:
    waits = max(row["waits, ms"] for row in found["tables"]["Table 2"])
    rows = found["tables"]["conditions"]
    said = [
        "selection and copies are hidden if neither takes longer than the compute; all three "
        f"overlap. With the times of Table 2, the inference GPU waits {waits:.1f} ms per token"
    ]
    for name in ("8B", "32B"):
        first = next(row for row in rows if row["case"].startswith(name))
        said.append(
            f"with roofline times, {name} needs per token {first['inference']} ms of compute, "
            f"{first['cache rank']} ms of selection and {first['link down']} ms of copies: "
            f"{'hidden' if first['hidden'] else 'not hidden'} (with an infinitely fast link, "
            f"hidden up to {first['hidden by a link of no time up to, tokens'] // 1000}k tokens in "
            "all paths together)"
        )
    return "; ".join(said), grade(all(row["hidden"] for row in rows) and not waits)


def _single_layer_rows(found: Found) -> list[dict[str, Any]]:
    """Return the rows without packs, one per context length."""
    return [row for row in found["rows"] if row["sparse"] == "asyncspade"]


def _is_hidden(row: Mapping[str, Any]) -> bool:
    """Return whether the cache rank needs at most a tenth more CPU time than the forward pass."""
    return bool(row["rank CPU"] <= (1 + NEAR) * row["forward CPU"])


def _cache_rank(found: Found) -> Judged:
    rows = _single_layer_rows(found)
    said = "; ".join(
        f"{row['tokens']:,} tokens of context: per token, the cache rank needs "
        f"{row['rank CPU']:.0f} ms of CPU time ({row['copies CPU']:.0f} ms for copies), the "
        f"forward pass only {row['forward CPU']:.0f} ms"
        for row in rows
    )
    return said, grade(all(map(_is_hidden, rows)), "not reproduced")


def _packs(found: Found) -> Judged:
    said, packed = [], [row for row in found["rows"] if "pack" in row["sparse"]]
    for alone in _single_layer_rows(found):
        rows = [row for row in packed if row["tokens"] == alone["tokens"]]
        said.append(
            f"{alone['tokens']:,} tokens of context: the cache rank takes "
            f"{_format_range([row['rank CPU'] / alone['rank CPU'] for row in rows])} of the time "
            f"that it takes without packs; {sum(map(_is_hidden, rows))} of {len(rows)} pack sizes "
            "hide it"
        )
    return "; ".join(said), grade(all(map(_is_hidden, packed)))


def _faster(column: str, claimed: int) -> Judge:
    """Make a judge of the time per token that AsyncSpade saves, in percent.

    column: of the table TPOT, whose cells read "-11; -3; -20": by the roofline; with the overhead
    over the roofline that the paper's times show, in every method; as the paper claims.
    claimed: percent saved, as the paper claims.
    """

    def judge(found: Found) -> Judged:
        cells = [row[column].split("; ") for row in found["tables"]["TPOT"]]
        roofline, above = (sorted(int(cell[place]) for cell in cells) for place in (0, 1))
        said = (
            f"{-roofline[-1]} to {-roofline[0]} % less by the roofline alone. The paper's "
            "times are longer than the roofline; with that excess added to every method, "
            f"{-above[-1]} to {-above[0]} % less"
        )
        return said, grade(max(roofline[-1], above[-1]) <= -claimed)

    return judge


def _selection_share(found: Found) -> Judged:
    rows = {row["batch"]: row for row in found["tables"]["Figure 2"]}
    most = max(value for row in rows.values() for name, value in row.items() if name != "batch")
    said = f"{rows[8]['32k']} % of a block's time with 8 rows at 32k tokens, never above {most} %"
    return said, grade(most > 50)


def _rows_of_model(found: Found, model: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["model"] == model]


def _format_range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _locality(found: Found) -> Judged:
    far = {
        model: [row["16 before"] for row in _rows_of_model(found, model)]
        for model in ("ledger", "bundled")
    }
    said = "; ".join(
        f"{_format_range(values)} in the layers of our {name} model" for name, values in far.items()
    )
    return f"overlap {said}", grade(min(map(min, far.values())) > 0.4, "not reproduced")


def _prediction(reading: str) -> Judge:
    def judge(found: Found) -> Judged:
        rows, chance = found["rows"], found["share"]
        values = [row[f"predicted, {reading}"] for row in rows]
        better = sum(row[f"predicted, {reading}"] > row["1 before"] for row in rows)
        said = (
            f"overlap with the true query's keys {_format_range(values)} by layer (random "
            f"keys: {chance}); better than reusing the last query in {better} of {len(rows)} layers"
        )
        return said, grade(min(values) > 0.4)

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
        said.append(f"{without:.2f} -> {with_it:.2f}")
    return (
        f"overlap without -> with the shift, for the three readings above: {', '.join(said)}",
        grade(max(losses) < 0.02, "not reproduced"),
    )


def _accuracy(found: Found) -> Judged:
    tokens = found["options"]["select"]
    rows: dict[str, list[float]] = {}
    for row in found["rows"]:
        rows.setdefault(row["sparse"], []).append(row["looked_up"])
    mean = {name: sum(values) / len(values) for name, values in rows.items()}
    said = (
        f"correct look-ups with {tokens} of {found['rows'][0]['tokens']:,} tokens selected: "
        f"AsyncSpade {mean['asyncspade']:.2f} (Eq. 2 as printed {mean['asyncspade-printed']:.2f}, "
        f"no softmax {mean['asyncspade-ridge']:.2f}), Quest {mean['quest']:.2f}, query from the "
        f"layer before {mean['ahead']:.2f}, true query {mean['exact']:.2f}; full attention "
        f"{mean['off']:.2f}"
    )
    return said, grade(is_near(mean["asyncspade"], mean["off"]), "not reproduced")


CLAIMS = read_claims(__name__)
