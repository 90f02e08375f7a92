"""Render the results of a GPU check, complete or partial, as text tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from beamwright_lab.common import table
from beamwright_lab.gpu.points import PAPER_SPEEDUP, done_s, with_speedups
from beamwright_lab.lbs.cases import LBS, OURS

GIB = 2**30
UNMEASURED = "unmeasured"
_BEAMS, _STEP = 64, 32  # the search that the goals refer to
_TOP = 16
_RATES = ("copy_bandwidth", "weights_bandwidth", "copies_bandwidth", "gemm_flops")


def machine_of(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the device's short name; None if no stage has run."""
    return next((r["key"]["machine"] for r in results.values() if "key" in r), None)


# --- the text --------------------------------------------------------------------------------


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Render all sections that have results, in the order of the stages."""
    sections = [_stages(results)]
    data = {name: result.get("data") or {} for name, result in results.items()}
    figures = [d for name, d in data.items() if name.startswith("figures")]
    for section in (
        _section("Goals", goal_rows(data)) if machine_of(results) else "",
        _graphs(data.get("graphs", {}), data.get("tests", {})),
        _roofline(data.get("roofline", {})),
        _section(
            f"Kernels; copy {data.get('kernels', {}).get('copy_gb_s')} GB/s",
            data.get("kernels", {}).get("rows", []),
            ("model", "work", "rows", "backend", "us", "eager_us", "floor_us", "share_of_floor"),
        ),
        _search(data.get("search", {}), data.get("search-7b", {})),
        _section(
            "Generator and verifier together",
            data.get("split", {}).get("rows", []),
            (
                *("what", "n", "tokens", "s", "verify_s", "tokens_per_s", "kv_budget_bytes"),
                *("moves", "moved_bytes", "relocated_blocks", "h2d_bytes", "exact"),
            ),
        ),
        _peers(data.get("peers", {})),
        _section("Narrow products", data.get("narrow", {}).get("rows", [])),
        _section("Steps with narrow products", data.get("narrow", {}).get("steps", [])),
        *(_vllm(data.get(name, {})) for name in ("vllm", "vllm-7b")),
        _link(data.get("link", {})),
        _parity(data.get("parity", {})),
        _points(figures, data.get("simulator", {})),
        _section(
            "Speculation, bundled pair; equal trees: of `problems`",
            data.get("speculation", {}).get("rows", []),
            (
                *("n", "deterministic", "exact", "off_s", "exact_s", "auto_s", "exact_over_off"),
                *("auto_over_off", "exact_equal", "auto_equal", "problems", "exact_kept"),
            ),
        ),
    ):
        if section:
            sections.append(section)
    return "\n\n".join(sections)


def _section(
    title: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None
) -> str:
    """Render a titled table with an error column; empty text without rows."""
    shown = [{**row, "error": _short(row.get("error"))} for row in rows]
    if not shown:
        return ""
    named = columns or [name for name in shown[0] if name != "error"]
    return f"{title}\n\n{table(shown, [*named, 'error'])}"


def _stages(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, result in results.items():
        if name == "environment":
            continue
        rows.append(
            {
                "stage": name,
                "status": result["status"],
                "seconds": result.get("took_s"),
                "given": result.get("given_s"),
                "date": result.get("date"),
                "sources": result.get("sources"),
                "left out": len(result["data"].get("not_run", [])) or None,
                "error": result.get("error") or result["data"].get("skipped"),
            }
        )
    machine = machine_of(results)
    emulated = {r["key"].get("link_bandwidth") for r in results.values() if "key" in r} - {None}
    title = f"GPU check: {machine or 'nothing has run'}{_software(results)}"
    if emulated:
        title += f" - link EMULATED at {', '.join(sorted(emulated))}"
    if any(r["key"].get("smoke") for r in results.values() if "key" in r):
        title += " - SMOKE RUN: tiny sizes, the numbers mean nothing"
    return _section(title, rows)


def _software(results: Mapping[str, Mapping[str, Any]]) -> str:
    """List driver and packages of the latest run, and missing wheels."""
    found = results.get("environment", {})
    known = {**found.get("versions", {}), "driver": found.get("card", {}).get("driver_version")}
    wanted = ("driver", "torch", "triton", "transformers")
    text = "".join(f", {name} {known[name]}" for name in wanted if known.get(name))
    missing = found.get("missing")
    return f"{text}; missing wheels: {', '.join(missing)}" if missing else text


def _short(text: Any) -> str | None:
    return str(text).replace("|", "/")[:90] if text else None


def _link(data: Mapping[str, Any]) -> str:
    if "link_peaks" not in data:
        return ""
    rates, peaks = {**dict.fromkeys(_RATES, 0.0), **data["rates"]}, data["link_peaks"]
    rows = [
        {"what": "copy within the device", "GB/s": _giga(rates["copy_bandwidth"])},
        {"what": "reading weights, few rows", "GB/s": _giga(rates["weights_bandwidth"])},
        {"what": "attention over copies", "GB/s": _giga(rates["copies_bandwidth"])},
    ]
    rows += [{"what": f"link peak, {name}", "GB/s": _giga(rate)} for name, rate in peaks.items()]
    for own in [*data.get("own_transfers", []), *data.get("own_small_blocks", [])]:
        rows.append(
            {
                "what": f"our KV blocks of {own['block_kib']:g} KiB, {own['direction']}",
                "GB/s": own["gb_s"],
                "of the peak": own["efficiency"],
                "hidden behind compute": own["hidden"],
            }
        )
    columns = ("what", "GB/s", "of the peak", "hidden behind compute")
    flops = f"matrix product {rates['gemm_flops'] / 1e12:.3g} TFLOP/s ({data['dtype']})"
    return f"Ceilings and the link; {flops}\n\n{table(rows, columns)}"


def _giga(rate: float) -> float:
    return round(rate / 1e9, 2)


def _parity(data: Mapping[str, Any]) -> str:
    largest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in data.get("logits", []):
        side = row["dtype"], row["attention"]
        worst = largest.setdefault(side, row)
        if row.get("relative_error", math.inf) > worst.get("relative_error", math.inf):
            largest[side] = row
    trees = data.get("trees", [])
    alike = sum(row.get("as_first", False) for row in trees)
    equal = f"trees equal to the first: {alike} of {len(trees)}"
    columns = ("dtype", "attention", "relative_error", "within")
    return _section(f"Parity, largest errors; {equal}", largest.values(), columns)


def _graphs(data: Mapping[str, Any], tests: Mapping[str, Any]) -> str:
    rows = [
        {**row, "said": _short("; ".join(row.get("warnings", [])))} for row in data.get("rows", [])
    ]
    rows += [
        {"what": row["test"], "equal": False, "error": row["error"][-90:]}
        for row in tests.get("tests", [])
        if row["outcome"] == "failed"
    ]
    ran = tests.get("summary") or f"{len(tests.get('tests', []))} so far"
    title = f"Graphs against plain steps, draws; device tests: {ran}"
    return _section(title, rows, ("what", "equal", "said"))


def _search(*stages: Mapping[str, Any]) -> str:
    rows = [row for data in stages for row in data.get("rows", [])]
    columns = ("what", "generator", "schedule", "n", "tokens", "s", "decode_s", "verify_s")
    more = ("tokens_per_s", "io_share", "exact", "tree")
    found = [{**row, "tree": row.get("tree_hash", "")[:8]} for row in rows]
    step = next((row["step"] for row in rows if row.get("step", {}).get("kernels")), None)
    parts = [_section("Searches", found, (*columns, *more)), _step(step) if step else ""]
    return "\n\n".join(filter(None, parts))


def _step(step: Mapping[str, Any]) -> str:
    """Render one profiled decode step by kernel, with idle times in the title."""
    waits = zip(step["longer_waits_us"], step["busy_in_longer_waits_us"], strict=True)
    title = (
        f"A replayed step of {step['kernels_a_step']} kernels: {step['span_us']} us, of which "
        f"{step['busy_us']} busy; {step['between_kernels_us']} us between kernels, "
        f"{step['between_steps_us']} between steps, longer waits (of which busy): "
    )
    title += ", ".join(f"{wait} ({busy})" for wait, busy in waits) or "none"
    return _section(title, step["kernels"][:_TOP])


def _peers(data: Mapping[str, Any]) -> str:
    title = f"Paths of {data.get('tokens')} tokens after {data.get('prompt')}, {data.get('model')}"
    rows = [{"n": data.get("n"), **row} for row in data.get("rows", [])]
    columns = ("side", "n", "s", "tokens_per_s", "first_s", "said")
    return _section(title, sorted(rows, key=lambda row: row["n"] or 0), columns)


def _vllm(data: Mapping[str, Any]) -> str:
    engines = [
        f"{each['version']}, {'/'.join(each['attention'])} {each['flash_attention']}"
        for each in data.get("engines", [])
    ]
    columns = ("model", "what", "side", "kv_share", "s", "tokens_per_s", "first_s", "preempted")
    return _section(f"Compared with {'; '.join(engines) or 'vLLM'}", data.get("rows", []), columns)


def _roofline(data: Mapping[str, Any]) -> str:
    gaps = [
        f"{row['model']}, batch {row['batch']}: "
        f"{row.get('host_gap_share_unprofiled', _short(row.get('error')))}"
        for row in data.get("hosts", [])
    ]
    title = f"Decode step; host gap: {'; '.join(gaps) or UNMEASURED}"
    columns = ("model", "batch", "graphs", "deterministic", "exact", "step_ms", "tokens_per_s")
    return _section(title, data.get("steps", []), (*columns, "share_of_ceiling"))


def _points(figures: Sequence[Mapping[str, Any]], simulator: Mapping[str, Any]) -> str:
    measured = [row for data in figures for row in data.get("points", [])]
    predicted = {row["name"]: row for row in simulator.get("points", [])}
    rows = [_point(row, predicted.get(row["name"], {})) for row in with_speedups(measured)]
    within, count = simulator.get("within_20_percent"), simulator.get("num_compared")
    checked = f"; simulator within 20 % in {within} of {count}" if count else ""
    return _section(f"The paper's figures{checked}", rows)


def _point(row: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, Any]:
    papers = (row["layout"], row["variant"]) == ("dense", LBS)
    cut = None if row.get("whole", True) else f"cut at {row.get('tokens')}"
    return {
        "model": row["model"].partition(",")[0],
        "regime": row["regime"],
        "n": row["n"],
        "step": row["step"],
        "side": f"{row['layout']} {row['variant']}",
        "tokens": cut or row["generate"],
        "s": row.get("time_s"),
        "simulated / measured": predicted.get("time_ratio", _short(predicted.get("error"))),
        "I/O share": row.get("io_share"),
        "simulated I/O": predicted.get("simulated_io_share"),
        "to device GiB": _gib(row.get("h2d_bytes")),
        "simulated GiB": _gib(predicted.get("simulated_h2d_bytes")),
        "over layer-wise, copies": row["speedup"],
        "over layer-wise, shared": row["speedup_shared"],
        "paper": PAPER_SPEEDUP.get(row["model"]) if papers else None,
        "error": row.get("error"),
    }


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / GIB, 2)


# --- goals -----------------------------------------------------------------------------------


def goal_rows(data: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of goal, wanted and measured value.

    Figure points count if they are of a 7B model with n = 64 and steps of 32 tokens.
    """
    points = [
        row
        for name, each in data.items()
        if name.startswith("figures") and name != "figures-12gb"
        for row in with_speedups(each.get("points", []))
        if (row["n"], row["step"]) == (_BEAMS, _STEP) and row.get("round_s")
    ]
    tree = [row for row in points if _side(row) == ("tree", OURS)]
    dense = [row for row in points if _side(row) == ("dense", OURS)]
    roofline, simulator = data.get("roofline", {}), data.get("simulator", {})
    own = {
        row["direction"]: row["efficiency"] for row in data.get("link", {}).get("own_transfers", [])
    }
    compared = simulator.get("num_compared")
    ahead = [row for row in data.get("speculation", {}).get("rows", []) if "error" not in row]
    rows = [
        ("KV transfers to the device, of the link's peak", ">= 0.80", own.get("h2d")),
        ("KV transfers to the host, of the link's peak", ">= 0.80", own.get("d2h")),
        ("decode step of a 1.5B shape, of the bandwidth ceiling (least)", ">= 0.80",
         _minimum(row.get("share_of_ceiling") for row in roofline.get("steps", [])
                if row["graphs"] == "auto" and not row.get("deterministic")
                and "0.5b" not in row["model"])),
        ("host's share of a step, 7B shape, batch 16", "< 0.05",
         next((row.get("host_gap_share_unprofiled") for row in roofline.get("hosts", [])), None)),
        ("speedup over layer-wise, copies, n = 64", ">= 9.72", _list_values(dense, "speedup")),
        ("speedup over layer-wise, shared KV, n = 64", ">= 40", _list_values(tree, "speedup")),
        ("speedup of scheduling alone: both with shared KV, n = 64", "> 1",
         _list_values(tree, "speedup_shared")),
        ("I/O share, shared KV, n = 64", "< 0.05", _list_values(tree, "io_share")),
        ("time, shared KV over the link / in-GPU, n = 64", "<= 1.15", _over_in_gpu(points, tree)),
        ("time, speculation auto / off (most)", "<= 1.02",
         max((row["auto_over_off"] for row in ahead), default=None)),
        ("trees equal with speculation, --deterministic", "all", _equal_trees(ahead)),
        ("simulator within 20 % of the measured time", "all",
         f"{simulator['within_20_percent']} of {compared}" if compared else None),
    ]  # fmt: skip
    return [
        {"goal": goal, "wanted": wanted, "measured": UNMEASURED if found is None else found}
        for goal, wanted, found in rows
    ]


def _equal_trees(rows: Sequence[Mapping[str, Any]]) -> str | None:
    fixed = [row for row in rows if row["deterministic"]]
    equal = sum(row["exact_equal"] + row["auto_equal"] for row in fixed)
    return f"{equal} of {sum(2 * row['problems'] for row in fixed)}" if fixed else None


def _side(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["layout"], row["variant"]


def _minimum(values: Any) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _list_values(rows: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """List a value of each search, labelled with model and regime."""
    found = [f"{row[key]} ({_which_search(row)})" for row in rows if row.get(key) is not None]
    return ", ".join(found) or None


def _which_search(row: Mapping[str, Any]) -> str:
    cut = "" if row.get("whole") else f", cut at {row.get('tokens')}"
    return f"{row['model'].partition(',')[0]}, {row['regime']}{cut}"


def _over_in_gpu(
    points: Sequence[Mapping[str, Any]], tree: Sequence[Mapping[str, Any]]
) -> str | None:
    found = []
    for row in tree:
        for whole in points:
            same = (whole["model"], whole["regime"]) == (row["model"], row["regime"])
            if same and _side(whole) == ("tree", "in-gpu"):
                rounds = min(len(whole["round_s"]), len(row["round_s"]))
                ratio = done_s(row, rounds) / done_s(whole, rounds)
                found.append(f"{ratio:.3f} ({_which_search(row)})")
    return ", ".join(found) or None
