"""FlashTTS: speculation, order and memory for verifier-guided search (Chen and others)."""

from __future__ import annotations

from typing import Any

from beamwright_lab.claims import Found, Judge, Judged, grade, is_near, read_claims


def _summary(found: Found, ratio: str) -> dict[str, Any]:
    return next(row for row in found["summary"] if row["ratio"] == ratio)


def _beam_counts(found: Found) -> str:
    beams = sorted({row["n"] for row in found["13: latency"]})
    return "n = " + " and ".join(map(str, beams))


def _goodput(found: Found) -> Judged:
    row, other = (
        _summary(found, f"goodput, full / {each}") for each in ("baseline", "baseline, uncached")
    )
    mean = float(row["mean"])
    said = (
        f"{row['mean']}x on average, {row['least']} to {row['most']}x ({_beam_counts(found)}); "
        f"{other['mean']}x if the baseline's verifier has no prefix cache"
    )
    return said, grade(is_near(mean, 2.2), "partly" if mean > 1 else "not reproduced")


def _methods(found: Found) -> Judged:
    rows = [row for row in found["3 left and 11: methods"] if row["search"] != "best-of-n"]
    values = sorted(float(row["P+M+S / baseline"]) for row in rows)
    said = f"{values[0]} to {values[-1]}x (n = {rows[0]['n']})"
    return said, grade(is_near(values[-1], 3.9), "partly" if values[0] > 1 else "not reproduced")


def _change(ratio: object) -> int:
    """Return a ratio as a change in percent: 0.7 becomes -30."""
    return round(100 * (float(str(ratio)) - 1))


def _reduction(ratio: str, low: int, high: int) -> Judge:
    """Return a judge of how much a time falls. low, high: percent that the paper reports."""

    def judge(found: Found) -> Judged:
        start = f"{ratio}, full / baseline"
        row, other = _summary(found, start), _summary(found, f"{start}, uncached")
        mean, uncached = _change(row["mean"]), _change(other["mean"])
        least, most = _change(row["least"]), _change(row["most"])
        said = (
            f"{mean:+d} % ({least:+d} to {most:+d}); {uncached:+d} % if the baseline's verifier "
            "has no prefix cache"
        )
        inside = [low <= -each <= high for each in (mean, uncached)]
        return said, grade(all(inside), "partly" if min(mean, uncached) < 0 else "not reproduced")

    return judge


def _speculation(found: Found) -> Judged:
    exact, auto = found["gains"]["P+M+S"], found["gains"]["auto"]
    least, most = found["n"]
    said = (
        f"{exact[0]:.2f} to {exact[1]:.2f}x goodput at n = {least} to {most}; {auto[0]:.2f} to "
        f"{auto[1]:.2f}x with the default, which decides by predicted time"
    )
    return said, grade(exact[0] > 1.1, "partly")


def _look_ahead(found: Found) -> Judged:
    ahead, plain = found["gains"]["P+M+S+L"], found["gains"]["P+M+S"]
    said = (
        f"speculation gives {ahead[0]:.2f} to {ahead[1]:.2f}x with LookAhead, {plain[0]:.2f} to "
        f"{plain[1]:.2f}x without it"
    )
    return said, grade(ahead[0] > plain[0], "not reproduced")


def _sensitivity(found: Found) -> Judged:
    rows = found["sensitivity"]
    least, most = (end(rows, key=lambda row: row["P+M+S"]) for end in (min, max))
    worst = min(row["P+M+S+L"] / row["P+M+S"] for row in rows)
    ends = (
        f"{row['P+M+S']:.2f}x (spread {row['spread']}, share {row['inherited']})"
        for row in (least, most)
    )
    said = (
        f"the speedup grows with the spread of log step lengths and depends little on the share "
        f"of a score that is inherited from the parent: {' to '.join(ends)}. LookAhead lowers "
        f"these speedups by at most {100 * (1 - worst):.0f} %"
    )
    return said, grade(least["P+M+S"] > 1, "partly")


def _utilisation(found: Found) -> Judged:
    without, with_it = found["4 and 16 left: utilisation"]
    last = "rows, fifth 5"
    said = (
        f"in the last fifth of a round {with_it[last]} rows with speculation, {without[last]} "
        f"without; decoding uses {with_it['FLOP/s, decoding']} of the FLOP/s instead of "
        f"{without['FLOP/s, decoding']}"
    )
    return said, grade(float(with_it[last]) > float(without[last]), "not reproduced")


def _memory_of_stages(found: Found) -> Judged:
    row = next(row for row in found["6: throughput and KV"] if row["model"] == "1.5B")
    prefill, decode = float(row["prefill, GiB at 80 %"]), float(row["decode, GiB at 80 %"])
    said = f"prefill {prefill:g} GiB, decoding {decode:g} GiB"
    return said, grade(prefill < 1 and decode / prefill >= 5)


def _split(found: Found) -> Judged:
    rows = [row for row in found["10: split"] if "throughput over half and half" in row]
    values = [(float(row["throughput over half and half"]), row["KV, GiB"]) for row in rows]
    (most, least_kv), (least, most_kv) = max(values), min(values)
    said = f"{least:g}x ({most_kv} GiB of KV) to {most:g}x ({least_kv} GiB) the speed of two halves"
    return said, grade(least > 1, "partly")


def _short_memory(found: Found) -> Judged:
    row = next(row for row in found["17 right: memory"] if row["KV, GiB"] == 1.5)
    order, both = (100 * (float(row[f"{name} / baseline"]) - 1) for name in ("P", "P+M"))
    strong = 100 * (float(row["strong / baseline"]) - 1)
    said = (
        f"+{order:.0f} % and +{both:.0f} %; our engine has +{strong:.0f} % without either of them"
    )
    return said, grade(is_near(order, 58) and is_near(both, 145))


CLAIMS = read_claims(__name__)
