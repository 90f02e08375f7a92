"""Condense a GPU check into `docs/figures/gpu-NAME.json`, from which `tables` renders the docs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beamwright_lab.gpu.context import commit_of
from beamwright_lab.gpu.points import with_speedups
from beamwright_lab.gpu.runner import Journal

Found = Mapping[str, Any]
Row = dict[str, Any]
CHECK = "python -m beamwright_lab.gpu.check"

_KERNELS = {"qwen2.5-1.5b", "qwen2.5-7b", "opt-6.7b", "vocabulary of 151936"}
_WORKS = {
    *("draw", "decode, tree", "decode, tree of long steps", "decode, KV copied per path"),
    "prefill that continues a path",
}
_KEPT: Mapping[str, tuple[str, ...]] = {
    "graphs": ("rows",),
    "tests": ("summary",),
    "roofline": ("ceiling", "steps", "hosts"),
    "search": ("rows",),
    "search-7b": ("rows",),
    "split": ("rows",),
    "speculation": ("rows",),
    "peers": ("model", "n", "prompt", "tokens", "rows"),
    "vllm": ("rows", "engines"),
    "vllm-7b": ("rows", "engines"),
    "kernels": ("copy_gb_s", "product_tflops", "rows"),
    "link": ("rates", "link_peaks", "own_transfers"),
    "simulator": ("points",),
}
_DROPPED = {"recorded", "warnings", "top", "round_s", "round_h2d_bytes", "round_d2h_bytes"}


def figures(folder: Path) -> Row:
    """Merge all `*.jsonl` of a folder in the order of their names; a stage's latest result counts.

    Raises:
        ValueError: if nothing was measured on a card.
    """
    results: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        results |= Journal(file).results()
    facts = results.pop("environment", {})
    if not results or "driver_version" not in facts.get("card", {}):
        raise ValueError(f"{folder}: no *.jsonl with results measured on a card")
    commits = {each["sources"]: commit_of(each["sources"]) for each in results.values()}
    stages = {
        name: {
            "status": result["status"],
            "error": result["error"],
            "date": result["date"][:10],
            "commit": commits[result["sources"]] or f"unknown, sources {result['sources']}",
            "command": result.get("command", CHECK),
            **_kept(name, result["data"]),
        }
        for name, result in results.items()
    }
    latest = max(stages.values(), key=lambda each: str(each["date"]))
    return {
        "benchmark": folder.name,
        "command": CHECK,
        "commit": latest["commit"],
        "machine": {
            "date": latest["date"],
            "card": facts["card"]["name"],
            "driver": facts["card"]["driver_version"],
            "memory_mib": int(facts["card"]["memory.total"]),
            "python": facts["python"],
            **{name: facts["versions"][name] for name in ("torch", "triton", "transformers")},
        },
        "stages": stages,
    }


def _kept(stage: str, data: Found) -> Row:
    names = ("points",) if stage.startswith("figures") else _KEPT.get(stage, ())
    found = {name: data[name] for name in names if name in data}
    if stage.startswith("figures"):
        found["points"] = with_speedups(found.get("points", []))
    for name, rows in found.items():
        if isinstance(rows, list):
            kept = rows if stage != "kernels" else filter(_is_quoted, rows)
            found[name] = [
                {key: value for key, value in row.items() if key not in _DROPPED} for row in kept
            ]
    return found


def _is_quoted(kernel: Found) -> bool:
    ours = kernel.get("backend", "").startswith("triton")
    return ours and kernel["model"] in _KERNELS and kernel["work"] in _WORKS
