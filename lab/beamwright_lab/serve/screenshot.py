"""A picture of the live page with a tree in the middle of growing: docs/images/page.png.

A real search of the bundled models (demo.txt), held after some round while the picture is taken.

    python -m beamwright_lab.serve.screenshot [--out FILE] [--dark] [--phone] [--round 4]
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

from beamwright.protocols import RoundReport
from beamwright.serve.app import make_app
from beamwright.serve.body import ServerLimits
from beamwright.serve.job import SearchJob
from beamwright.serve.queue import RequestQueue
from beamwright.solver.solver import Solver
from beamwright_lab.common import say
from beamwright_lab.serve.browser import chromium, running

OPTIONS: dict[str, Any] = {"search": "beam", "n": 16, "width": 4}

# The best of the deepest steps that go on.
SELECT_DEEPEST = """() => {
  const { pane } = window.beamwright;
  const kept = pane.tree.nodes.filter((node) => node.state === "kept" && node.parent !== null);
  kept.sort((a, b) => b.depth - a.depth || (b.score ?? -1) - (a.score ?? -1));
  window.beamwright.select(kept[0].i);
}"""


class Hold:
    """A listener that has the search stand still after a round until it may go on."""

    def __init__(self, at_round: int) -> None:
        self.at_round, self.go_on = at_round, threading.Event()

    def begun(self, job: SearchJob) -> None:
        pass

    def round(self, job: SearchJob, report: RoundReport) -> None:
        if report.round == self.at_round:
            self.go_on.wait()

    def ended(self, job: SearchJob, outcome: object) -> None:
        pass


def take(queue: RequestQueue, hold: Hold, out: Path, *, dark: bool, phone: bool) -> None:
    app = make_app(queue)
    queue.listeners.append(hold)
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
        while page.evaluate("window.beamwright.pane.tree.rounds") < hold.at_round:
            page.wait_for_timeout(50)
        page.evaluate(SELECT_DEEPEST)
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(2500)  # gauges say rates from their second look on
        page.screenshot(path=out, full_page=phone)
        hold.go_on.set()
        while queue.jobs:
            page.wait_for_timeout(50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--round", type=int, default=4)
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with Solver(model="bundled", verifier="bundled", **OPTIONS) as solver:
        queue, hold = RequestQueue(solver, "bundled", ServerLimits(), seed=0), Hold(asked.round)
        try:
            take(queue, hold, asked.out, dark=asked.dark, phone=asked.phone)
        finally:
            hold.go_on.set()
    say(f"{asked.out}: {asked.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
