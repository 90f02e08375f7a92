"""A headless Chromium, where this machine has one and Playwright to drive it."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest

from beamwright.serve.events import Event, StepEvent, begin, end
from beamwright_lab.serve import browser


@contextmanager
def chromium():
    """The browser; skips a test where there is none."""
    pytest.importorskip("playwright.sync_api")
    if browser.chromium_path() is None:
        pytest.skip("there is no Chromium")
    with browser.chromium() as found:
        yield found


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
