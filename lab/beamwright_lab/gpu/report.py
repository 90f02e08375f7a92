"""The table of a run, also of a partial one, from the stages' result files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from beamwright_lab.common import table
from beamwright_lab.gpu.goals import goal_rows
from beamwright_lab.gpu.points import PAPER_SPEEDUP, with_speedups
from beamwright_lab.paper.cases import LBS

GIB = 2**30
_RATES = ("copy_bandwidth", "weights_bandwidth", "copies_bandwidth", "gemm_flops")


def machine_of(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The device's short name, from whichever stage has run."""
    return next((r["key"]["machine"] for r in results.values() if "key" in r), None)


# --- the text --------------------------------------------------------------------------------


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of what there is, in the order of the stages."""
    sections = [_stages(results)]
    data = {name: result.get("data") or {} for name, result in results.items()}
    figures = [d for name, d in data.items() if name.startswith("figures")]
    for section in (
        _section("Goals", goal_rows(data)) if machine_of(results) else "",
        _graphs(data.get("graphs", {}), data.get("tests", {})),
        _roofline(data.get("roofline", {})),
        _kernels(data.get("kernels", {})),
        _search(data.get("search", {})),
        _link(data.get("link", {})),
        _parity(data.get("parity", {})),
        _points(figures, data.get("simulator", {})),
        _speculation(data.get("speculation", {})),
        _peers(data.get("peers", {})),
    ):
        if section:
            sections.append(section)
    return "\n\n".join(sections)


def _section(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{title}\n\n{table(rows, list(rows[0]))}" if rows else ""


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
                "error": _short(result.get("error") or result["data"].get("skipped")),
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
    """Driver and packages of the latest run, and what it lacked."""
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
    rows = [
        {
            "dtype": dtype,
            "attention": attention,
            "largest relative error": _largest(data["logits"], dtype, attention),
            "limit": data["limits"][dtype],
        }
        for dtype, attention in dict.fromkeys(
            (row["dtype"], row["attention"]) for row in data.get("logits", [])
        )
    ]
    trees = data.get("trees", [])
    equal = f"trees equal to the first: {sum(t['as_first'] for t in trees)} of {len(trees)}"
    return _section(f"Parity; {equal}", rows)


def _largest(rows: Sequence[Mapping[str, Any]], dtype: str, attention: str) -> Any:
    own = [row for row in rows if (row["dtype"], row["attention"]) == (dtype, attention)]
    errors = [row["error"] for row in own if "error" in row]
    return _short(errors[0]) if errors else f"{max(row['relative_error'] for row in own):.2e}"


def _graphs(data: Mapping[str, Any], tests: Mapping[str, Any]) -> str:
    rows = [
        {
            "what": row["what"],
            "equal": row.get("equal"),
            "said": _short(row.get("error") or "; ".join(row.get("warnings", []))),
        }
        for row in data.get("rows", [])
    ]
    failed = [row for row in tests.get("tests", []) if row["outcome"] == "failed"]
    rows += [{"what": r["test"], "equal": False, "said": _short(r["error"][-90:])} for r in failed]
    ran = tests.get("summary") or f"{len(tests.get('tests', []))} so far"
    return _section(f"Graphs against plain steps, draws; device tests: {ran}", rows)


def _kernels(data: Mapping[str, Any]) -> str:
    columns = ("model", "work", "rows", "backend", "us", "eager_us", "floor_us", "share_of_floor")
    rows = [
        {name: row.get(name) for name in columns} | {"error": _short(row.get("error"))}
        for row in data.get("rows", [])
    ]
    return _section(f"Kernels; copy {data.get('copy_gb_s')} GB/s", rows)


def _search(data: Mapping[str, Any]) -> str:
    columns = ("what", "n", "tokens", "s", "decode_s", "verify_s", "tokens_per_s")
    rows = [
        {name: row.get(name) for name in columns} | {"error": _short(row.get("error"))}
        for row in data.get("rows", [])
    ]
    top = next((row["top"] for row in data.get("rows", []) if "top" in row), [])
    return "\n\n".join(filter(None, [_section("Searches", rows), _section("Profile", top[:8])]))


def _roofline(data: Mapping[str, Any]) -> str:
    rows = [
        {
            "model": row.get("model"),
            "batch": row["batch"],
            "graphs": row["graphs"],
            "ms / step": row.get("step_ms"),
            "tokens/s": row.get("tokens_per_s"),
            "share of the bandwidth ceiling": row.get("share_of_ceiling"),
            "error": _short(row.get("error")),
        }
        for row in data.get("steps", [])
    ]
    host = data.get("host", {})
    gap = host.get("host_gap_share_unprofiled", _short(host.get("error")))
    title = f"Decode step; host gap at {host.get('model')}, batch {host.get('batch')}: {gap}"
    plain = data.get("host_token_by_token", {}).get("host_gap_share_unprofiled")
    if plain is not None:
        title += f" (without graphs {plain})"
    return _section(title + _deterministic(data.get("deterministic", {})), rows)


def _deterministic(data: Mapping[str, Any]) -> str:
    if "cost" not in data:
        return f"; --deterministic: {_short(data['error'])}" if "error" in data else ""
    exact = f"exact {data['deterministic_exact']}, without it {data['exact']}"
    return f"; --deterministic at batch {data['batch']}: {100 * data['cost']:+.1f} % ({exact})"


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
        "error": _short(row.get("error")),
    }


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / GIB, 2)


def _speculation(data: Mapping[str, Any]) -> str:
    rows = [
        {
            "n": row["n"],
            "deterministic": row["deterministic"],
            "exact": row.get("exact"),
            "s: off, exact, auto": _join(row, ("off_s", "exact_s", "auto_s")),
            "of off's time": _join(row, ("exact_over_off", "auto_over_off")),
            "equal trees": _join(row, ("exact_equal", "auto_equal", "problems")),
            "kept": _join(row, ("exact_kept", "auto_kept")),
            "error": _short(row.get("error")),
        }
        for row in data.get("rows", [])
    ]
    return _section("Speculation, bundled pair; equal trees: exact, auto, of", rows)


def _join(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    if "error" in row:
        return None
    return ", ".join("-" if row[name] is None else str(row[name]) for name in names)


def _peers(data: Mapping[str, Any]) -> str:
    rows = [
        {
            "n": row["n"],
            "side": row["side"],
            "tokens/s": row.get("tokens_per_s"),
            "rounds": len(row.get("rounds_s", [])),
            "error": _short(row.get("error")),
        }
        for row in data.get("sides", [])
    ]
    case = data.get("case", {})
    return _section(f"Peers; {case.get('shape')}, {case.get('tokens')} tokens each", rows)
