"""The live page on a large tree in Chromium: milliseconds to take a round in, and per frame.

A made-up beam search arrives round by round; then the tree is dragged and zoomed, in every way of
drawing pruned steps. A frame's time is that between two animation frames, raster included (in
software: nothing here uses a GPU).

    python -m beamwright_lab.serve.page_frames [--n 512] [--rounds 40] [--width 4]
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from beamwright.serve.events import Event, StepEvent, begin, end
from beamwright_lab.common import finish, say
from beamwright_lab.serve.browser import chromium, running

# Round by round: what main.js does when events come, with its layout, and one drawing.
TAKE_IN = """async () => {
  const page = window.beamwright, events = page.pane.run.events, times = [];
  const { Run } = await import("/page/run.js");
  page.pane.run = new Run("again");
  page.pane.panel.selected = null;
  for (const event of events) {
    const start = performance.now();
    page.pane.run.add([event]);
    page.show();
    page.pane.panel.view.paint();
    document.body.getBoundingClientRect();
    times.push(performance.now() - start);
    await new Promise(requestAnimationFrame);
  }
  return times;
}"""
DRAG = """async ([mode, zoomed]) => {
  const { panel } = window.beamwright.pane, times = [];
  panel.setMode(mode);
  if (zoomed) panel.view.zoom(1000);
  let last = await new Promise(requestAnimationFrame);
  for (let i = 0; i < 60; i++) {
    panel.view.moveBy(i % 2 ? 7 : -3, i % 2 ? -9 : 15);
    panel.view.ask();
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
  }
  const start = performance.now();
  panel.view.paint();
  return { frames: times.slice(5), paint: performance.now() - start, rows: panel.layout.rows };
}"""
REPLAY = """async () => {
  const times = [];
  for (const round of [0, 10, 11, 12, 5, 30, 31, 3]) {
    const start = performance.now();
    window.beamwright.replay.round = round;
    window.beamwright.show();
    times.push(performance.now() - start);
  }
  window.beamwright.replay.round = null;
  window.beamwright.show();
  return times;
}"""


def made_up_search(n: int, width: int, rounds: int, seed: int = 0) -> list[Event]:
    """n candidates a round, of which n / width survive; some end from half way on."""
    rng = random.Random(seed)
    events: list[Event] = [
        begin("large", {
            "problem": "A made-up search.", "model": "none", "method": "beam", "n": n,
            "width": width, "seed": seed,
        })
    ]  # fmt: skip
    beams, tokens = [""], 0
    for number in range(1, rounds + 1):
        children = [n] if number == 1 else [width] * len(beams)
        nodes: list[StepEvent] = (
            [] if number > 1 else [{"lineage": "", "state": "kept", "tokens": 60}]
        )
        opened = [
            f"{beam}.{i}".lstrip(".")
            for beam, num in zip(beams, children, strict=True)
            for i in range(num)
        ]
        scores = {lineage: rng.random() for lineage in opened}
        kept = set(sorted(opened, key=scores.__getitem__)[-(n // width) :])
        last = number == rounds
        for lineage in opened:
            step: StepEvent = {
                "lineage": lineage, "round": number, "tokens": 40, "score": scores[lineage],
                "step_score": scores[lineage], "text": f"Step {lineage} of a path. " * 5,
                "state": ("finished" if last else "kept") if lineage in kept else "pruned",
                "stop": "eos" if last else "delimiter",
            }  # fmt: skip
            if last and lineage in kept:
                step["answer"] = step["vote"] = str(rng.randrange(20))
            nodes.append(step)
        tokens += 40 * len(opened)
        beams = [lineage for lineage in opened if lineage in kept]
        events.append({
            "event": "round", "round": number, "nodes": nodes, "tokens": tokens,
            "elapsed_s": float(number),
        })  # fmt: skip
    events.append(end("done", chosen=beams[0], answer="1", elapsed_s=float(rounds)))
    return events


def spread(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(times)
    return {
        "median_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        "max_ms": round(ordered[-1], 1),
    }


def measure(page: Any) -> dict[str, Any]:
    """All figures of the open page."""
    found: dict[str, Any] = {"round": spread(page.evaluate(TAKE_IN)[1:-1])}
    for mode in ("group", "hide", "show"):
        for zoomed in (False, True):
            drag = page.evaluate(DRAG, [mode, zoomed])
            name = f"{mode}, {'zoomed in' if zoomed else 'whole'}"
            found[name] = {
                **spread(drag["frames"]), "paint_ms": round(drag["paint"], 1), "rows": drag["rows"],
            }  # fmt: skip
    found["replay"] = spread(page.evaluate(REPLAY))
    return found


def main() -> None:
    from beamwright.cli.view import make_app

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    events = made_up_search(asked.n, asked.width, asked.rounds)
    with running(make_app([events])) as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(address)
        while not page.evaluate("window.beamwright?.pane.tree.over"):
            page.wait_for_timeout(50)
        found = measure(page)
        version = browser.version
    for name, figures in found.items():
        say(f"{name:20}", figures)
    nodes = sum(len(event.get("nodes", ())) for event in events)
    finish("page_frames", {"nodes": nodes, "chromium": version, **vars(asked), "figures": found})


if __name__ == "__main__":
    main()
