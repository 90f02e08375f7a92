"""LBS: locality-aware beam scheduling (Wang, Shiao, Yang)."""

from __future__ import annotations

from beamwright_lab.claims import (
    NEAR,
    Found,
    Judge,
    Judged,
    grade,
    is_near,
    parse_range,
    read_claims,
)


def _value(found: Found, figure: str, start: str) -> str:
    """Return our value of the first row of a figure whose description begins with `start`."""
    return next(
        str(row["ours"])
        for row in found["table"]
        if row["figure"] == figure and row["what"].startswith(start)
    )


def _values_by_step(found: Found, figure: str, start: str) -> list[str]:
    """Return our values for steps of 32, 64 and 128 tokens."""
    return [
        str(row["ours"])
        for step in (32, 64, 128)
        for row in found["table"]
        if row["figure"] == figure
        and row["what"].startswith(start)
        and f"steps of {step}" in row["what"]
    ]


def _layerwise_bytes(found: Found) -> Judged:
    exact, streamed = (_value(found, "7", start) for start in ("layer-wise", "the same"))
    said = f"{exact} GiB by Eq. 1; {streamed} when a real pipeline keeps two stream buffers as well"
    return said, grade(exact == "53,012")


def _grouped_bytes(found: Found) -> Judged:
    values = _values_by_step(found, "7", "group by group")
    said = " / ".join(values)
    return f"{said} GiB, if Eq. 4 takes each path's length at the end of its step", grade(
        values == ["2,052", "1,044", "540"]
    )


def _inter_token(found: Found) -> Judged:
    values = [float(each) for each in _values_by_step(found, "10a", "inter-token")]
    holds = all(is_near(*each) for each in zip(values, (3.7, 1.8, 0.9), strict=True))
    return " / ".join(f"{each:.2f}" for each in values) + " %", grade(holds)


def _prefix_reuse(found: Found) -> Judged:
    values = [each.partition(" ")[0] for each in _values_by_step(found, "10b", "LBS without")]
    return f"{' / '.join(values)} times fewer bytes", grade(min(map(float, values)) > 2)


def _io_share(found: Found) -> Judged:
    before, after = (_value(found, "11", f"I/O share, {each}") for each in ("layer-wise", "LBS"))
    low, high = parse_range(before)
    holds = low >= 0.7 and high <= 0.9 and parse_range(after)[1] < 0.15
    said = (
        f"{before} layer-wise, {after} with LBS, 16 to 64 beams (one constant fitted at 64 beams)"
    )
    return said, grade(holds)


def _lbs_speedup(model: str, paper: float) -> Judge:
    def judge(found: Found) -> Judged:
        said = _value(found, "9", f"LBS as published, speedup over layer-wise: {model}")
        return f"{said}x, 16 to 64 beams", grade(is_near(parse_range(said)[1], paper))

    return judge


def _longer_steps(found: Found) -> Judged:
    said = _value(found, "9", "longer steps win")
    first, *_, last = (float(each) for each in said.split(" / "))
    return f"{first}x with 32 tokens, {last}x with 128", grade(last / first > 1 + NEAR)


def _other_card(found: Found) -> Judged:
    values = [
        float(
            _value(found, "13", f"LBS as published, speedup: {model}, RTX 3080 Ti, PCIe 4.0 x8")[6:]
        )
        for model in ("opt-2.7b", "qwen1.5-4b")
    ]
    holds = all(is_near(*each) for each in zip(values, (6.85, 3.52), strict=True))
    return " / ".join(f"{each}x" for each in values) + " with a PCIe 4.0 x8 link", grade(holds)


def _shared_speedup(found: Found) -> Judged:
    said = _value(found, "9", "Beamwright, shared KV, opt-6.7b")
    (row,) = (each for each in found["sensitivity"] if each["passes"] == 6)
    rest = row["shared over layer-wise, shared"]
    return (
        f"{said}x over layer-wise offloading with one copy per beam; but {rest}x over layer-wise "
        f"offloading that shares KV too (64 beams), so the gain is the sharing",
        "beyond the paper",
    )


def _fair(found: Found) -> Judged:
    quarter, tenth = (found["shares"][each]["once"] for each in ("25 %", "10 %"))
    said = (
        f"the fastest one takes {quarter['least']:.2f} to {quarter['most']:.2f} of our time with a "
        f"quarter of the KV on the GPU, {tenth['least']:.2f} to {tenth['most']:.2f} with a tenth "
        "(below 1: it is faster than we are)"
    )
    return said, "beyond the paper"


CLAIMS = read_claims(__name__)
