"""Render the docs' text and tables for a card from `docs/figures/gpu-NAME.json` (`published`).

Measured searches stand beside the simulator's prediction, which uses this card's measured profile;
predictions from counted launches and bytes are in `costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill

from beamwright_lab.common import table
from beamwright_lab.gpu.published import CHECK, Found, Row
from beamwright_lab.gpu.runner import OK

NOTHING = "Not measured."
_LINE = 118


def _stage(found: Found, name: str, shown: Callable[[Found], str]) -> str:
    """Render a stage's results below its command, date and commit."""
    stage = found["stages"].get(name)
    if stage is None:
        return NOTHING
    note = "" if stage["status"] == OK else f", {stage['status']}"
    origin = f"`{CHECK} --only {name}`\n({stage['date']}, commit {stage['commit']}{note})"
    return f"{origin}\n\n{shown(stage)}"


def _wrapped(text: str) -> str:
    return fill(text, _LINE, break_long_words=False, break_on_hyphens=False)


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return table(rows, columns) if rows else NOTHING


def machine(found: Found) -> str:
    """Describe the card in one sentence."""
    facts = found["machine"]
    packages = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "transformers"))
    gigabytes = found["stages"]["roofline"]["ceiling"] / 1e9
    return _wrapped(
        f"One {facts['card']}, driver {facts['driver']}, {packages}; a copy on the card "
        f"reads and writes {gigabytes:,.0f} GB/s in total."
    )


def sentence(found: Found) -> str:
    """Summarise the comparison with vLLM, for cards that have run it."""
    if "vllm" not in found["stages"]:
        return NOTHING
    paths, half = (_beside_vllm(found)[key] for key in (("64 paths", None), ("search", 0.5)))
    engine = found["stages"]["vllm"]["engines"][0]["version"].replace("vllm", "vLLM")
    card = found["machine"]["card"].removeprefix("NVIDIA ")
    return _wrapped(
        f"On an {card}, with random weights in the shape of a 1.5B model, 64 paths generate "
        f"{_rate(paths[0]):,.0f} tokens a second; {engine} generates {_rate(paths[1]):,.0f}. In a "
        f"beam search within half of vLLM's peak KV memory, Beamwright generates "
        f"{_rate(half[0]):,.0f} tokens a second, vLLM {_rate(half[1]):,.0f}. "
        "Beamwright's tree is the same as with full memory."
    )


def _rate(row: Found) -> float:
    """Tokens per second of the fastest call, warm-up included."""
    return float(row["tokens"] / min(row["s"], row["first_s"]))


def _beside_vllm(found: Found) -> dict[tuple[str, float | None], tuple[Found, Found]]:
    """Pair our rows with vLLM's, by work and share of KV."""
    rows = [row for row in found["stages"]["vllm"]["rows"] if "error" not in row]
    sides = {(row["side"], row["what"], row.get("kv_share")): row for row in rows}
    return {
        (what, share): (row, sides["vllm", what, share])
        for (side, what, share), row in sides.items()
        if side == "beamwright" and ("vllm", what, share) in sides
    }


def vllm(found: Found) -> str:
    """Compare with vLLM: paths, and a beam search under shrinking KV budgets; best calls."""
    return _stage(
        found,
        "vllm",
        lambda _: _table([_beside_row(*each) for each in _beside_vllm(found).items()]),
    )


def _beside_row(work: tuple[str, float | None], sides: tuple[Found, Found]) -> Row:
    (what, share), (own, other) = work, sides
    return {
        "1.5B model": what
        + (f", {share:.0%} of the KV that vLLM uses when memory is ample" if share else ""),
        "Beamwright, tokens/s": f"{_rate(own):,.0f}",
        "vLLM, tokens/s": f"{_rate(other):,.0f}",
        "ratio": f"{_rate(own) / _rate(other):.2f}",
        "loaded from the host by Beamwright, MB": f"{own['h2d_bytes'] / 1e6:,.0f}",
        "preemptions in vLLM": other["preempted"],
    }


def _each(found: Found, name: str, line: Callable[[Found], Row]) -> str:
    """Render a line for each row of a stage that has no error."""

    def shown(stage: Found) -> str:
        return _table([line(row) for row in stage["rows"] if "error" not in row])

    return _stage(found, name, shown)


def split(found: Found) -> str:
    """Compare one verifier with two, and moving with fixed memory."""

    def line(row: Found) -> Row:
        return {
            "1.5B, 1.5B verifier, n = 64": row["what"],
            "s": f"{row['s']:.2f}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "moves of memory": row.get("moves"),
            "blocks moved": row.get("relocated_blocks"),
        }

    return _each(found, "split", line)


def speculation(found: Found) -> str:
    """Compare seconds with and without speculation."""

    def line(row: Found) -> Row:
        return {
            "n (bundled pair)": row["n"],
            "`--deterministic`": _said(row["deterministic"]),
            "without speculation, s": f"{row['off_s']:.2f}",
            "time with `exact` / without": f"{row['exact_over_off']:.2f}",
            "time with `auto` / without": f"{row['auto_over_off']:.2f}",
            "equal trees": f"{row['exact_equal'] + row['auto_equal']} of {2 * row['problems']}",
        }

    return _each(found, "speculation", line)


def _usual(found: Found) -> list[Found]:
    """Return the decode steps that ran with graphs and without `--deterministic`."""
    steps: Sequence[Found] = found["stages"]["roofline"]["steps"]
    return [
        row
        for row in steps
        if "error" not in row and row["graphs"] == "auto" and not row.get("deterministic")
    ]


def steps(found: Found) -> str:
    """Compare decode steps: default, `--deterministic`, and without graphs."""

    def shown(stage: Found) -> str:
        rows = [row for row in stage["steps"] if "error" not in row]
        fixed = {(r["model"], r["batch"]): r for r in rows if r.get("deterministic")}
        plain = {(r["model"], r["batch"]): r for r in rows if r["graphs"] == "off"}
        usual = sorted(_usual(found), key=lambda row: (row["model"], row["batch"]))
        return _table([_beside(row, fixed, plain) for row in usual])

    return _stage(found, "roofline", shown)


def _beside(
    row: Found, fixed: Mapping[tuple[str, int], Found], plain: Mapping[tuple[str, int], Found]
) -> Row:
    key = row["model"], row["batch"]
    return {
        "model (random weights)": row["model"],
        "paths": row["batch"],
        "ms per token": f"{row['step_ms']:.2f}",
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "share of the bandwidth": f"{row['share_of_ceiling']:.2f}",
        "`exact`": _said(row.get("exact")),
        "`--deterministic`, ms": _ms(fixed.get(key)),
        "`--graphs off`, ms": _ms(plain.get(key)),
    }


def _ms(row: Found | None) -> str | None:
    return None if row is None else f"{row['step_ms']:.2f}"


def _said(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()


def searches(found: Found) -> str:
    """Render whole searches, including those under shrinking KV budgets."""
    large = found["stages"].get("search-7b", {}).get("rows", [])
    if "search" not in found["stages"]:
        return _stage(found, "search-7b", lambda stage: _table(_searches(stage["rows"])))
    return _stage(found, "search", lambda stage: _table(_searches([*stage["rows"], *large])))


def _searches(rows: Sequence[Found]) -> list[Row]:
    first: dict[str | None, str] = {}
    found = []
    for row in rows:
        if row["what"] == "profile":
            continue
        if "error" in row:
            found.append({"search": _name(row), "s": row["error"].partition(":")[0]})
            continue
        compared = row.get("kv_share") and row["exact"]
        tree = row.get("tree_hash", "")
        first.setdefault(row.get("generator"), tree)
        found.append(
            {
                "search": _name(row),
                "s": f"{row['s']:.2f}" + (" (stopped early)" if row.get("cut") else ""),
                "tokens/s": f"{row['tokens_per_s']:,.0f}",
                "verifier, s": f"{row['verify_s']:.2f}",
                "KV on the card, MB": f"{row['kv_peak_bytes'] / 1e6:,.0f}"
                if row.get("kv_share")
                else None,
                "I/O share": f"{row['io_share']:.3f}" if "io_share" in row else None,
                "same tree": _said(tree == first[row["generator"]]) if compared else None,
            }
        )
    return found


def _name(row: Found) -> str:
    if "kv_share" not in row:
        return f"{row['what']}, n = {row['n']}" if "n" in row else str(row["what"])
    size = row["generator"].rpartition("-")[2].upper()
    shares = {1.0: "all the KV it can use", 0.5: "half of it", 0.25: "a quarter"}
    return f"{size}, 1.5B verifier, {row['schedule']}: {shares[row['kv_share']]}"


def one_step(found: Found) -> str:
    """Render a replayed decode step by kernel, and idle times of the profiled search."""

    def shown(stage: Found) -> str:
        step = next((r["step"] for r in stage["rows"] if r.get("step", {}).get("kernels")), None)
        if step is None:
            return NOTHING
        longer = zip(step["longer_waits_us"], step["busy_in_longer_waits_us"], strict=True)
        waits = ", ".join(
            f"{1e-3 * w:.0f} ms (other kernels ran in {1e-3 * b:.0f} ms of it)" for w, b in longer
        )
        said = (
            f"{step['kernels_a_step']} kernels in {step['span_us']:,.0f} us; their own times add "
            f"up to {step['busy_us']:,.0f} us. Decode steps are {step['between_steps_us']} us "
            f"apart. Longer gaps between steps in one search: {waits or 'none'}."
        )
        return f"{_wrapped(said)}\n\n{_table(step['kernels'][:14])}"

    return _stage(found, "search", shown)


def peers(found: Found) -> str:
    """Compare other engines with ours, by n; old rows without n have that of their stage."""

    def shown(stage: Found) -> str:
        known = [{"n": stage.get("n"), **row} for row in stage["rows"] if "error" not in row]
        own = {row["n"]: row["tokens_per_s"] for row in known if row["side"] == "beamwright"}
        rows = [
            {
                f"paths of {stage['tokens']} tokens": row["n"],
                "engine": row["side"],
                "s": f"{row['s']:.2f}",
                "tokens/s": f"{row['tokens_per_s']:,.0f}",
                "relative to Beamwright": _share(row["tokens_per_s"], own.get(row["n"])),
            }
            for row in sorted(known, key=lambda row: int(row["n"]))
        ]
        return _table(rows)

    return _stage(found, "peers", shown)


def _share(part: float, whole: float | None) -> str | None:
    return f"{part / whole:.2f}" if whole else None


def kernels(found: Found) -> str:
    """Compare our kernels' times with a cold cache to the floor set by their bytes."""

    def shown(stage: Found) -> str:
        columns = {"shape": "model", "work": "work", "rows": "rows", "us": "us"}
        columns |= {"minimum, us": "floor_us", "minimum / measured": "share_of_floor"}
        return _table([{name: row[key] for name, key in columns.items()} for row in stage["rows"]])

    return _stage(found, "kernels", shown)


def link(found: Found) -> str:
    """Compare our KV transfers to the link's peak."""

    def shown(stage: Found) -> str:
        rows = [
            {
                "direction": own["direction"],
                "peak, GB/s": f"{stage['link_peaks'][own['direction']] / 1e9:.1f}",
                "KV transfers, GB/s": own["gb_s"],
                "share of the peak": own["efficiency"],
                "share hidden behind compute": own["hidden"],
            }
            for own in stage.get("own_transfers", [])
        ]
        return _table(rows)

    return _stage(found, "link", shown)


def points(found: Found) -> str:
    """Render the LBS paper's searches: measured, simulated, and speedups over layer-wise.

    The last column assumes that layer-wise loads at the link's peak.
    """
    name = "figures-opt-6.7b"
    peak = found["stages"].get("link", {}).get("link_peaks", {}).get("h2d")
    simulator = found["stages"].get("simulator", {}).get("points", [])
    predicted = {row["name"]: row for row in simulator}

    def shown(stage: Found) -> str:
        rows = []
        for row in stage["points"]:
            if "error" in row:
                continue
            cut = "" if row["whole"] else f", stopped after {row['tokens']}"
            simulated = predicted.get(row["name"], {})
            rows.append(
                {
                    "OPT-6.7B": f"n = {row['n']}, {row['generate']} tokens{cut}",
                    "KV, schedule": f"{row['layout']} {row['variant']}",
                    "s": f"{row['time_s']:.1f}",
                    "simulated s": _rounded(simulated.get("simulated_s")),
                    "I/O share": f"{row['io_share']:.3f}",
                    "loaded, GB/s": _rounded(row["h2d_bytes"] / row["time_s"] / 1e9),
                    "speedup over layer-wise, in the rounds that both finished": row["speedup"],
                    "the same, layer-wise at the link's peak": _at_peak(row, stage["points"], peak),
                }
            )
        return _table(rows)

    return _stage(found, name, shown)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _at_peak(row: Found, points: Sequence[Found], peak: float | None) -> float | None:
    """Speedup over layer-wise with copies if its loads ran at the link's peak bytes/s; or None."""
    base = next((p for p in points if (p["layout"], p["variant"]) == ("dense", "layerwise")), None)
    if peak is None or base is None or row["speedup"] is None:
        return None
    return round(row["speedup"] * min(1.0, base["h2d_bytes"] / base["time_s"] / peak), 2)


# Renderers of the docs' blocks, by the last part of a block's name.
BLOCKS: Mapping[str, Callable[[Found], str]] = {
    "sentence": sentence,
    "machine": machine,
    "steps": steps,
    "searches": searches,
    "one-step": one_step,
    "peers": peers,
    "kernels": kernels,
    "link": link,
    "points": points,
    "vllm": vllm,
    "split": split,
    "speculation": speculation,
}
