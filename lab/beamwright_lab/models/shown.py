"""Render the docs' tables of architectures, formats, the adapter's speed and published files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from beamwright_lab.common import table

Found = Mapping[str, Any]
_TOLERANCE = 1e-4
_WORDS = {True: "yes", False: "**no**", None: "-"}
FORMAT_COLUMNS = (
    *("format", "bits", "error against the definition", "error against `transformers`"),
    *("error of products", "load, s", "peak, MiB", "file, MiB", "refused / loaded"),
)


# --- families --------------------------------------------------------------------------------


def verdict(row: Found) -> str:
    """Return "runs", "refused", or "wrong" (error, other tree, log-probabilities too far off)."""
    if row.get("refused"):
        return "refused"
    same = row.get("resumed") and row.get("locality") and row.get("parity", 1.0) <= _TOLERANCE
    return "runs" if same and not row.get("error") else "wrong"


def _family(row: Found) -> dict[str, Any]:
    return {
        "architecture": f"`{row['architecture']}`",
        "decoder": row["decoder"],
        "log-probabilities": f"{row['parity']:.0e}" if "parity" in row else "-",
        "same tree with a quarter of the KV": _WORDS[row.get("locality")],
        "same tree when resumed": _WORDS[row.get("resumed")],
        "exact": _WORDS[row.get("exact")],
        "tokens/s": f"{row['tok_s']:,.0f}" if "tok_s" in row else None,
        "`generate`, tokens/s": f"{row['generate_tok_s']:,.0f}" if "tok_s" in row else None,
    }


def family_rows(rows: list[dict[str, Any]]) -> str:
    """Render the architectures that run or are wrong."""
    shown = [_family(row) for row in rows if verdict(row) != "refused"]
    return table(shown, list(shown[0])) if shown else ""


def refusals(rows: list[dict[str, Any]]) -> str:
    """Render the refused architectures with reasons."""
    shown = [
        {"architecture": f"`{row['architecture']}`", "why": row["error"].partition("; ")[0]}
        for row in rows
        if verdict(row) == "refused"
    ]
    return table(shown, list(shown[0])) if shown else ""


# --- files -----------------------------------------------------------------------------------


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Render each format's errors, load seconds, memory, and outcomes of damaged files."""
    return table([_format(row) for row in rows], FORMAT_COLUMNS)


def _format(facts: Found) -> dict[str, Any]:
    def error(value: Any) -> str:
        if not isinstance(value, float):
            return "-"
        return "0" if value == 0 else f"{value:.0e}"

    whole = facts.get("large", {})
    load = whole.get("load", {})
    outcomes = facts["damaged"]["outcomes"]
    shown = f"{outcomes.get('refused', 0)} / {outcomes.get('loaded', 0)}"
    others = {kind: n for kind, n in outcomes.items() if kind not in ("refused", "loaded")}
    return {
        "format": facts["format"],
        "bits": f"{whole['bits']:.2f}" if whole else None,
        "error against the definition": error(facts.get("definition")),
        "error against `transformers`": error(facts.get("transformers")),
        "error of products": error(facts.get("computed")),
        "load, s": f"{load['seconds']:.0f}" if "seconds" in load else load.get("outcome"),
        "peak, MiB": f"{load['peak_bytes'] >> 20:,}" if "peak_bytes" in load else None,
        "file, MiB": f"{whole['file_bytes'] >> 20:,}" if whole else None,
        "refused / loaded": shown + (f", **{others}**" if others else ""),
    }


# --- speed -----------------------------------------------------------------------------------


def speed_rows(rows: list[dict[str, Any]]) -> str:
    """Render the adapter's speed beside our decoder and `transformers`."""
    return table(rows, list(rows[0]))


# --- published files -------------------------------------------------------------------------


def published_rows(rows: list[dict[str, Any]]) -> str:
    """Render each side's error against float32 of a file's values."""
    shown = [line for row in rows for line in _published(row)]
    columns = [name for name in shown[2] if any(line.get(name) for line in shown)]
    return table(shown, columns)


def _published(row: Found) -> Iterator[dict[str, Any]]:
    yield {"": f"**{row['file']}**"}
    for each in row["sides"]:
        far = each["side"] != ""
        yield {
            "": {"": "`transformers`, dequantised to float32", "llama.cpp": "llama.cpp"}.get(
                each["side"], f"Beamwright, {each['side']}"
            ),
            "perplexity": f"{each['perplexity']:.2f}",
            "error: median": f"{each['median']:.3f}" if far else None,
            "error: largest": f"{each['largest']:.2f}" if far else None,
            "same top token": f"{100 * each['same_best']:.1f} %" if far else None,
        }
