"""Searches (points) that reproduce the LBS paper's figures, most important first.

Regimes: `paper` has 7 GiB of KV, prompt 128 and 1,920 tokens; a search cut off at its deadline is
compared over the rounds that both sides finished. `scaled` has whole searches of 256 tokens, with
KV reduced in proportion to path length, so that the same share fits. `12GB` has one memory limit
for everything, as on Figure 13's card.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from beamwright.plan.costs import Layout
from beamwright.plan.workload import Workload, tree_steps
from beamwright_lab.lbs.cases import (
    BASELINE,
    GENERATE_TOKENS,
    LBS,
    OURS,
    PAPER_KV_BYTES,
    PROMPT_TOKENS,
)

WIDTH = 2
SCALED_TOKENS = 256
CARD_12GB = 12_000_000_000
SEVEN_B = ("opt-6.7b", "llama-2-7b", "qwen1.5-7b")
TWELVE_GB = ("opt-2.7b", "qwen1.5-4b")
_BLOCK = 8
_DENSE, _TREE = Layout.DENSE, Layout.TREE

# Speedup over layer-wise with a copy per beam, over all n and steps (Figures 9 and 13).
PAPER_SPEEDUP: Mapping[str, str] = MappingProxyType(
    {
        "opt-6.7b": "3.39-9.72",
        "llama-2-7b": "3.60-8.74",
        "qwen1.5-7b": "4.17-7.99",
        "opt-2.7b": "up to 6.85",
        "qwen1.5-4b": "up to 3.52",
    }
)


@dataclass(frozen=True)
class Point:
    """One search. variant: of `lbs.VARIANTS`. weight: its share of the stage's time.

    kv_bytes: device KV budget, unused by in-gpu; None if `memory_bytes` limits all memory instead.
    """

    model: str
    n: int
    step: int
    variant: str
    layout: Layout
    regime: str = "paper"
    kv_bytes: int | None = PAPER_KV_BYTES
    memory_bytes: int | None = None
    prompt: int = PROMPT_TOKENS
    generate: int = GENERATE_TOKENS
    weight: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.model} {self.regime} n={self.n} step={self.step} {self.side}"

    @property
    def side(self) -> str:
        return f"{self.layout} {self.variant}"

    @property
    def search(self) -> tuple[str, str, int, int]:
        """Identity of the search without its schedule; points with an equal one can be compared."""
        return self.model, self.regime, self.n, self.step

    @property
    def max_rounds(self) -> int:
        return -(-self.generate // self.step)

    @property
    def shared_tokens(self) -> int:
        """Peak KV tokens if paths share prefixes, plus a margin."""
        work = Workload(self.n, WIDTH, self.prompt, self.generate, self.step)
        partial_blocks = _BLOCK * self.n * 2
        peak = max(step.union_tokens + self.n * step.num_tokens for step in tree_steps(work))
        return int(1.3 * peak) + partial_blocks + _BLOCK

    @property
    def copied_tokens(self) -> int:
        """Peak KV tokens with a copy per beam."""
        return self.n * (self.prompt + self.generate + 2 * _BLOCK)

    def row(self) -> dict[str, Any]:
        """Return the fields for a result file."""
        return {"name": self.name, **asdict(self), "layout": str(self.layout)}


_LAYERWISE = ((BASELINE, _DENSE), (BASELINE, _TREE))
_COPIES = ((OURS, _DENSE), (LBS, _DENSE))
_MAIN = ((OURS, _TREE), ("in-gpu", _TREE), *_COPIES, *_LAYERWISE)
_ABLATION = (("lbs-prefetch", _DENSE), ("lbs-inter-token", _DENSE))
_SHORT = ((OURS, _TREE), *_COPIES, *_LAYERWISE)


def _points(
    model: str, n: int, step: int, sides: Iterable[tuple[str, Layout]], **changes: Any
) -> Iterator[Point]:
    for variant, layout in sides:
        weight = 2.5 if (variant, layout) == (BASELINE, _DENSE) else 1.0
        yield Point(model, n, step, variant, layout, weight=weight, **changes)


def _scaled(model: str, n: int, step: int, sides: Iterable[tuple[str, Layout]]) -> Iterator[Point]:
    whole, short = PROMPT_TOKENS + GENERATE_TOKENS, PROMPT_TOKENS + SCALED_TOKENS
    yield from _points(
        model,
        n,
        step,
        sides,
        regime="scaled",
        kv_bytes=PAPER_KV_BYTES * short // whole,
        generate=SCALED_TOKENS,
    )


def first_points() -> list[Point]:
    """Points of OPT-6.7B: Figures 4, 5 and 9-12."""
    model = SEVEN_B[0]
    found = [*_scaled(model, 64, 32, _MAIN), *_points(model, 64, 32, _MAIN)]
    found += _scaled(model, 64, 32, _ABLATION)
    found += _points(model, 256, 32, ((OURS, _TREE),))
    for n in (32, 16):
        found += _scaled(model, n, 32, _SHORT)
    for step in (64, 128):
        found += _scaled(model, 64, step, _SHORT)
    found += _points(model, 512, 32, ((OURS, _TREE),))
    for step in (64, 128):
        found += _points(model, 64, step, _SHORT)
    for n in (32, 16, 8, 4):
        found += _points(model, n, 32, _SHORT)
    found += _points(model, 64, 32, _ABLATION)
    return found


def family_points(model: str) -> list[Point]:
    """Points of one of the other two 7B models."""
    return [
        *_scaled(model, 64, 32, _MAIN),
        *_points(model, 64, 32, _MAIN),
        *_scaled(model, 64, 128, _SHORT),
        *_scaled(model, 16, 32, _SHORT),
    ]


def small_card_points() -> list[Point]:
    """Points of Figure 13, with a memory limit of 12 GB."""
    card = {"regime": "12GB", "kv_bytes": None, "memory_bytes": CARD_12GB}
    found: list[Point] = []
    for n, step in ((64, 32), (16, 32)):
        for model in TWELVE_GB:
            found += _points(model, n, step, _SHORT, **card)
    return found


def stage_points(stage: str) -> list[Point]:
    """Return the points of stage `figures-MODEL` or `figures-12gb`."""
    name = stage.removeprefix("figures-")
    if name == "12gb":
        return small_card_points()
    return first_points() if name == SEVEN_B[0] else family_points(name)


def shrunk(points: Sequence[Point]) -> list[Point]:
    """Return a few of the points, small enough for a CPU to run in a second or two."""
    tiny = (
        "llama,layers=4,hidden=32,heads=4,kv_heads=4,intermediate=64,vocab=128,context=128",
        2 * 4 * 32 * 4,
    )
    shape, token_bytes = tiny
    kept = [p for p in points if p.regime in ("scaled", "12GB")][: len(_MAIN)]
    small = [
        replace(
            point,
            model=shape,
            n=4,
            step=9,
            prompt=16,
            generate=36,
            kv_bytes=point.kv_bytes and 108 * token_bytes,
            memory_bytes=point.memory_bytes and 5_660_000,
        )
        for point in kept
    ]
    return list(dict.fromkeys(small))


# --- comparing -------------------------------------------------------------------------------


def done_s(row: Mapping[str, Any], num_rounds: int) -> float:
    """Seconds of a measured point's first rounds."""
    return float(sum(row["round_s"][:num_rounds]))


def with_speedups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its speedups over layer-wise, over the rounds that both finished.

    speedup: over layer-wise with a copy per beam, the paper's baseline. speedup_shared: over
    layer-wise with shared KV, which shows what scheduling alone gains.
    """
    return [
        {
            **row,
            "speedup": _speedup(row, rows, _DENSE),
            "speedup_shared": _speedup(row, rows, _TREE),
        }
        for row in rows
    ]


def _speedup(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], layout: Layout
) -> float | None:
    for other in rows:
        side = (other["variant"], other["layout"]) == (BASELINE, str(layout))
        same = side and _search_of(other) == _search_of(row)
        if same and other.get("round_s") and row.get("round_s"):
            over = min(len(other["round_s"]), len(row["round_s"]))
            return round(done_s(other, over) / done_s(row, over), 2)
    return None


def _search_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["regime"], row["n"], row["step"]
