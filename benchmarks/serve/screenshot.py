"""A picture of the live page with a tree in the middle of growing: docs/images/page.png.

A real search of the bundled models (demo.txt), held after some round while the picture is taken.

    python -m benchmarks.serve.screenshot [--out FILE] [--dark] [--phone] [--round 4]
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from beamwright.protocols import RoundReport
from beamwright.serve.feed import Feed
from beamwright.serve.feed_routes import feed_routes, page_routes
from beamwright.serve.places import Places
from beamwright.solver.solver import Solver
from benchmarks.common import say
from benchmarks.serve.browser import chromium, running

OPTIONS = {"search": "beam", "n": 16, "width": 4, "seed": 0}

# The best of the deepest steps that go on.
SELECT_DEEPEST = """() => {
  const { pane } = window.beamwright;
  const kept = pane.tree.nodes.filter((node) => node.state === "kept" && node.parent !== null);
  kept.sort((a, b) => b.depth - a.depth || (b.score ?? -1) - (a.score ?? -1));
  window.beamwright.select(kept[0].i);
}"""


class HeldDesk:
    """Searches one problem, and stands still after a round until it may go on."""

    def __init__(self, solver: Solver, places: Places, hold_at: int) -> None:
        self.solver, self.hold_at, self.go_on = solver, hold_at, threading.Event()
        self.feed = Feed(
            lambda job: {
                "problem": job.problem, "model": "bundled", "method": OPTIONS["search"],
                "n": OPTIONS["n"], "width": OPTIONS["width"], "seed": OPTIONS["seed"],
            },
            places=places.place,
        )  # fmt: skip
        self.handle: Any = None

    def begin_search(self, problem: str, options: dict[str, Any]) -> Any:
        del options
        job = SimpleNamespace(id="search-1", problem=problem)
        job.cancel = self.cancel
        self.feed.begun(job)

        def hear(report: RoundReport) -> None:
            self.feed.round(job, report)
            if report.round == self.hold_at:
                self.go_on.wait()

        self.handle = self.solver.submit(problem, on_round=hear, **OPTIONS)
        return job

    def cancel(self) -> None:
        self.handle.cancel()


def take(desk: HeldDesk, out: Path, *, dark: bool, phone: bool) -> None:
    app = FastAPI()
    app.include_router(feed_routes(desk.feed, desk))
    app.include_router(page_routes())
    size = {"width": 390, "height": 844} if phone else {"width": 1400, "height": 900}
    with running(app) as address, chromium() as browser:
        page = browser.new_page(
            viewport=size,
            color_scheme="dark" if dark else "light",
            is_mobile=phone,
            has_touch=phone,
        )
        page.goto(address)
        page.fill("#ask-problem", Path("demo.txt").read_text(encoding="utf-8").strip())
        page.click("#ask-go")
        while page.evaluate("window.beamwright.pane.tree.rounds") < desk.hold_at:
            page.wait_for_timeout(50)
        page.evaluate(SELECT_DEEPEST)
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(2500)  # gauges say rates from their second look on
        page.screenshot(path=out, full_page=phone)
        desk.go_on.set()
        desk.handle.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--round", type=int, default=4)
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    places = Places()
    with Solver(model="bundled", verifier="bundled", timeline=places) as solver:
        desk = HeldDesk(solver, places, asked.round)
        try:
            take(desk, asked.out, dark=asked.dark, phone=asked.phone)
        finally:
            desk.go_on.set()
    say(f"{asked.out}: {asked.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
