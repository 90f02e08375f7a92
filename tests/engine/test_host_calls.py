"""What the host does between two passes, in calls of Python functions: a card waits for all of it.

Calls are the same on any machine; seconds are not. Limits have a third to spare.
"""

import sys
import threading

import pytest

from beamwright import Solver
from beamwright.models.packed import Replay

SHAPE = "llama,layers=1,hidden=32,heads=2,kv_heads=1,intermediate=32,vocab=512,context=512"
STEP = 8


@pytest.fixture
def calls_between_passes(monkeypatch):
    """Of plain paths, so many at once: in any thread, between each two passes."""
    run = Replay.run

    def counted(num_paths):
        found, calls = [], [0]

        def count(frame, event, argument):
            calls[0] += event == "call"

        def passing(*arguments):
            sys.setprofile(None)
            found.append(calls[0])
            run(*arguments)
            calls[0] = 0
            sys.setprofile(count)

        monkeypatch.setattr(Replay, "run", passing)
        with Solver(
            model=f"random:{SHAPE}", verifier="none", search="best-of-n", n=num_paths, width=1,
            max_rounds=3, step_tokens=STEP, max_tokens=3 * STEP, ignore_eos=True,
            schedule="in-gpu", device="cpu",
        ) as solver:  # fmt: skip
            solver.synthetic(16)
            found.clear()
            threading.setprofile(count)
            try:
                solver.synthetic(16)
            finally:
                threading.setprofile(None)
                sys.setprofile(None)
        return found

    return counted


def test_a_token_costs_the_host_as_much_whatever_the_rows_and_a_step_is_counted(
    calls_between_passes,
):
    few, many = calls_between_passes(8), calls_between_passes(24)
    assert len(few) == len(many) == 3 * STEP - 1, "a pass a token but for the prompt's"
    inside = slice(STEP + 2, 2 * STEP - 1)
    assert max(many[inside]) == max(few[inside]) <= 13
    round_few, round_many = few[2 * STEP], many[2 * STEP]
    of_a_row = (round_many - round_few) / 16
    assert of_a_row <= 305
    assert round_few - 8 * of_a_row <= 1500
