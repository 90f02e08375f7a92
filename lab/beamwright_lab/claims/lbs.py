"""LBS: locality-aware beam scheduling (Wang, Shiao, Yang)."""

from __future__ import annotations

from beamwright_lab.claims import (
    NEAR,
    Found,
    Judge,
    Judged,
    near,
    of,
    read_claims,
    span,
)


def _lbs(found: Found, figure: str, start: str) -> str:
    """Ours, of the row of a figure whose words begin so."""
    return next(
        str(row["ours"])
        for row in found["table"]
        if row["figure"] == figure and row["what"].startswith(start)
    )


def _lbs_steps(found: Found, figure: str, start: str) -> list[str]:
    """The same for steps of 32, 64 and 128."""
    return [
        str(row["ours"])
        for step in (32, 64, 128)
        for row in found["table"]
        if row["figure"] == figure
        and row["what"].startswith(start)
        and f"steps of {step}" in row["what"]
    ]


def _layerwise_bytes(found: Found) -> Judged:
    exact, streamed = (_lbs(found, "7", start) for start in ("layer-wise", "the same"))
    said = f"{exact} GiB; {streamed} with two stream buffers, which Eq. 1 leaves out"
    return said, of(exact == "53,012")


def _grouped_bytes(found: Found) -> Judged:
    values = _lbs_steps(found, "7", "group by group")
    said = " / ".join(values)
    return f"{said} GiB, lengths taken at a step's end", of(values == ["2,052", "1,044", "540"])


def _inter_token(found: Found) -> Judged:
    values = [float(each) for each in _lbs_steps(found, "10a", "inter-token")]
    holds = all(near(*each) for each in zip(values, (3.7, 1.8, 0.9), strict=True))
    return " / ".join(f"{each:.2f} %" for each in values), of(holds)


def _prefix_reuse(found: Found) -> Judged:
    values = [each.partition(" ")[0] for each in _lbs_steps(found, "10b", "LBS without")]
    return " / ".join(f"{each}x" for each in values), of(min(map(float, values)) > 2)


def _io_share(found: Found) -> Judged:
    before, after = (_lbs(found, "11", f"I/O share, {each}") for each in ("layer-wise", "LBS"))
    low, high = span(before)
    holds = low >= 0.7 and high <= 0.9 and span(after)[1] < 0.15
    said = f"{before} before (one constant fitted to 64 beams), {after} after, 16 to 64 beams"
    return said, of(holds)


def _lbs_speedup(model: str, paper: float) -> Judge:
    def judge(found: Found) -> Judged:
        said = _lbs(found, "9", f"LBS as published over layer-wise, {model}")
        return f"{said}x, 16 to 64 beams", of(near(span(said)[1], paper))

    return judge


def _longer_steps(found: Found) -> Judged:
    said = _lbs(found, "9", "longer steps win")
    first, *_, last = (float(each) for each in said.split(" / "))
    return f"{first}x at 32, {last}x at 128", of(last / first > 1 + NEAR)


def _other_card(found: Found) -> Judged:
    values = [
        float(_lbs(found, "13", f"LBS as published, {model}, RTX 3080 Ti, PCIe 4.0 x8")[6:])
        for model in ("opt-2.7b", "qwen1.5-4b")
    ]
    holds = all(near(*each) for each in zip(values, (6.85, 3.52), strict=True))
    return " / ".join(f"{each}x" for each in values) + ", on PCIe 4.0 x8", of(holds)


def _shared_speedup(found: Found) -> Judged:
    said = _lbs(found, "9", "Beamwright, shared KV, opt-6.7b")
    (row,) = (each for each in found["sensitivity"] if each["passes"] == 6)
    rest = row["shared over layer-wise, shared"]
    return (
        f"{said}x over layer-wise with a copy per beam; at 64 beams {rest}x over layer-wise "
        f"with shared KV: the factor is the sharing",
        "beyond the paper",
    )


def _fair(found: Found) -> Judged:
    quarter, tenth = (found["shares"][each]["once"] for each in ("25 %", "10 %"))
    said = (
        f"they need {quarter['least']:.2f} to {quarter['most']:.2f} of our time with a quarter of "
        f"the KV, {tenth['least']:.2f} to {tenth['most']:.2f} with a tenth (below 1 they are "
        "faster)"
    )
    return said, "beyond the paper"


CLAIMS = read_claims(__name__)
