"""KV across the link, both ways, against bounds: what the engine moves, and what it has to.

Simulated, which moves the bytes of the real engine (tests hold them equal): beam search of width 2
and 4, short and long, at 75 to 10 % of the KV that it takes in one piece. "load" and "store" are
bounds for one who knows the whole tree, runs one beam at a time and keeps candidates until they are
scored (`cost.clairvoyant`); "Belady" is what the batches that ran would load if the device evicted
with known survival. A share below the least that works is raised to it. `--link` is another table:
512 and 256 beams on a card with 7 GiB for KV, seconds beside their floors.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from beamwright.models.shape import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import RecordedTree
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator import (
    Moments,
    RooflineCosts,
    Simulation,
    SimulationResult,
    SyntheticSearch,
    grow,
    simulate,
)
from beamwright_lab.studies.clairvoyant import known_future_loads

SHAPE = "llama,layers=32,hidden=128,heads=4,kv_heads=4,intermediate=256,vocab=512,context=4096"
CARD = find_profile("rtx-4090")
PROMPT_TOKENS = 128
SHARES = (0.75, 0.5, 0.25, 0.15, 0.1)
AMPLE_BYTES = 2**36
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Search:
    """A beam search. generate: tokens of each path behind the prompt."""

    n: int
    width: int
    step: int
    generate: int

    @property
    def name(self) -> str:
        return f"n={self.n} width={self.width} {self.step}/{self.generate}"

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            step_tokens=self.step, max_step_tokens=self.step, max_tokens=self.generate
        )

    def least_blocks(self) -> int:
        """The longest path, and a block."""
        steps, rest = divmod(self.generate, self.step)
        blocks = steps * -(-self.step // BLOCK_TOKENS) + -(-rest // BLOCK_TOKENS)
        return PROMPT_TOKENS // BLOCK_TOKENS + blocks + 1


SHORT = [Search(48, 2, 24, 288), Search(48, 4, 24, 288)]
LONG = [Search(64, 2, 32, 1920), Search(64, 4, 32, 1920), Search(256, 4, 32, 960)]
LINKED = [Search(256, 2, 32, 1920), Search(512, 2, 32, 1920)]


@lru_cache(maxsize=2)
def tree_of(search: Search) -> RecordedTree:
    return grow(
        SyntheticSearch(search.n, search.width, PROMPT_TOKENS, search.generate, search.step)
    )


def run(
    search: Search,
    model: ModelCosts,
    budget: int,
    options: Mapping[str, Any],
    moments: Moments | None = None,
) -> SimulationResult:
    """One search with shared KV."""
    costs = RooflineCosts.of(model, CARD, Layout.TREE)
    schedule = ScheduleSettings.model_validate({"schedule": "locality", **options})
    case = Simulation(tree_of(search), model, costs, budget, schedule, search.settings)
    return simulate(case, moments=moments)


def traffic_row(
    search: Search, share: float, peak: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Bytes of one budget, in MiB."""
    model = ModelCosts.of(shape_from_text(SHAPE), 4)
    block = BLOCK_TOKENS * model.kv_bytes_per_token
    budget = max(int(share * peak), search.least_blocks() * block)
    moments: Moments = []
    found = run(search, model, budget, options, moments)
    known = known_future_loads(moments, budget // block) * block
    bound = found.load_bound_bytes
    return {
        "search": search.name,
        "share": f"{budget / peak:.2f}",
        "in": found.h2d_bytes // MIB,
        "load": bound // MIB,
        "Belady": known // MIB,
        "in/load": round(found.h2d_bytes / bound, 2) if bound else None,
        "in/Belady": round(found.h2d_bytes / known, 2) if known else None,
        "out": found.d2h_bytes // MIB,
        "store": found.blind_store_bound_bytes // MIB,
        "known": found.store_bound_bytes // MIB,
        "s": round(found.time_s, 2),
        "I/O": round(found.io_share, 3),
        "groups": found.groups,
    }


def link_row(search: Search, options: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds on a card whose link matters. floor: of what must be loaded, at the link's rate."""
    model = ModelCosts.of(shape_from_text("opt-6.7b"), 2)
    found = run(search, model, 7 * GIB, options)
    floor = found.load_bound_bytes / (CARD.h2d_bandwidth * CARD.link_share)
    return {
        "search": search.name,
        "s": round(found.time_s, 1),
        "compute s": round(found.decode_s, 1),
        "stall s": round(found.stall_s, 1),
        "I/O": round(found.io_share, 3),
        "link floor s": round(floor, 1),
        "over floors": round(found.time_s / max(found.decode_s, floor), 3),
        "in GiB": round(found.h2d_bytes / GIB, 1),
        "load GiB": round(found.load_bound_bytes / GIB, 1),
        "out GiB": round(found.d2h_bytes / GIB, 1),
        "groups": found.groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", action="store_true", help="seconds with 7 GiB of KV instead")
    parser.add_argument("--short", action="store_true", help="the short searches alone")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="schedule")
    args = parser.parse_args()
    options = dict(each.split("=", 1) for each in args.set)
    rows = []
    if args.link:
        for search in LINKED:
            rows.append(link_row(search, options))
            say(f"  {rows[-1]}")
    else:
        searches = SHORT if args.short else SHORT + LONG
        peaks: dict[Search, int] = {}
        for search, share in product(searches, SHARES):
            if search not in peaks:
                model = ModelCosts.of(shape_from_text(SHAPE), 4)
                resident = run(search, model, AMPLE_BYTES, {"schedule": "in-gpu"})
                peaks[search] = resident.device_peak_bytes
            row = traffic_row(search, share, peaks[search], options)
            if row not in rows:  # raised to the least that works, as the one before
                rows.append(row)
            say(f"  {row}")
    say(table(rows, list(rows[0])))
    finish("traffic_link" if args.link else "traffic", {"settings": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
