"""Thoughts of generators elsewhere: found in what comes back, closed at their budget."""

import json

import pytest

from beamwright import Solver
from beamwright.engine.row import DecodingSettings
from beamwright.errors import InputError
from beamwright.models.hub import BUNDLED
from beamwright.models.tokenizer import TextCodec
from beamwright.protocols import Plan
from beamwright.remote.dialects import Continuation
from beamwright.remote.writer import RemoteStepWriter
from beamwright.sections import SamplingSettings, StepSettings
from beamwright.tree import SearchTree, StopReason
from scripted_server import Script
from served import Served
from tables import beside

FOLDER = BUNDLED / "thinking"
PROBLEM = json.loads((BUNDLED / "test.jsonl").read_text().splitlines()[0])["problem"]
LIKELIEST = {"search": "majority", "n": 1, "verifier": "none", "temperature": 0, "max_tokens": 500}


@pytest.fixture(scope="module")
def thinker():
    return TextCodec.load(FOLDER)


@pytest.fixture
def written(thinker):
    """What becomes of a text: the question, and the step."""

    def make(text, *, prompt="How many?", ids=True, ended="stop", tokens=None, **settings):
        source = Script(thinker)
        source.token_ids = ids
        step = StepSettings(**{"thought_steps": "whole", "max_tokens": 60, **settings})
        steps = RemoteStepWriter(source, DecodingSettings(SamplingSettings(), step, 7))
        tree = SearchTree("p", tuple(thinker.encode(prompt)), prompt)
        (node,) = tree.expand(tree.root, 1)
        steps.submit(Plan(((node,),)))
        steps.iterate()
        ((key, asked),) = source.asked.items()
        drawn = tuple(thinker.encode(text)[:tokens])
        text = thinker.decode(drawn)
        logprobs = (-0.5,) * len(drawn)
        said = Continuation(text, drawn if ids else None, logprobs if ids else (), ended)
        source.answer(key, said)
        (event,) = steps.iterate()
        return asked, event

    return make


THOUGHT = "<think>\nAda has 3.\n\nWait, 4.\n</think>"

OPENED = "How many?<think>\n"


STEPS = beside(__file__)


@pytest.mark.parametrize(("text", "options", "stops", "shown", "stop"), STEPS)
def test_what_is_asked_and_where_a_step_ends(written, thinker, text, options, stops, shown, stop):
    asked, event = written(text, **options)
    assert ([*asked.stops], event.stop.name) == (stops, stop)
    assert event.thought == (text.startswith("<think>") or ("prompt" in options and "<" in text))
    assert shown is None or event.text == shown
    assert stop != "EOS" or event.token_ids[-1] in thinker.eos_ids


def test_what_is_behind_the_end_of_a_thought_is_dropped_and_counted(written, thinker):
    _, event = written(f"{THOUGHT}\n\nIt is 4.", ended="eos")
    assert event.token_ids == tuple(thinker.encode(THOUGHT))
    assert len(event.logprobs) == len(event.token_ids)
    assert event.node.usage["overrun"] == len(thinker.encode("\n\nIt is 4.")) + 1


@pytest.mark.parametrize("ids", [True, False])
def test_a_budget_is_asked_for_and_the_end_put_behind_it(written, thinker, ids):
    drawn = thinker.encode("<think>\nAda has 3 plums and more")[:8]
    asked, event = written(
        thinker.decode(drawn), ids=ids, ended="length", thinking=8, close_message=" Stop."
    )
    assert asked.max_tokens == 8
    assert event.token_ids == (*drawn, *thinker.encode(" Stop."), *thinker.thoughts.end)
    assert (event.thought, event.stop) == (True, StopReason.THOUGHT_END)
    assert event.text.endswith(" Stop.")
    asked, event = written("Ada", prompt=OPENED, ended="length", tokens=1, thinking=0, ids=ids)
    assert (asked.max_tokens, event.token_ids) == (1, thinker.thoughts.end), "before it says any"


# --- a server, and what it writes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with Solver(model="bundled:thinking", verifier="none") as solver, Served(solver) as server:
        yield server


def far(server, **options):
    model = f"openai:{server.url}/v1#tiny:plain"
    return Solver(model=model, tokenizer=str(FOLDER), context=2048, **{**LIKELIEST, **options})


@pytest.mark.parametrize("options", [{}, {"thinking": 20, "soft_close": 2}, {"thinking": "off"}])
def test_the_likeliest_reply_is_that_of_a_generator_here(server, options):
    with Solver(model="bundled:thinking", **{**LIKELIEST, **options}) as solver:
        here = solver.solve(PROBLEM).chosen
    with far(server, **options) as solver:
        there = solver.solve(PROBLEM).chosen
    assert (there.thought, there.said) == (here.thought, here.said)
    assert there.thought_tokens == here.thought_tokens
    assert there.answer is not None


def test_a_search_by_paragraphs_of_thoughts_goes_through(server):
    options = {"n": 4, "temperature": 0.8, "thought_steps": "paragraphs", "thinking": 60}
    with far(server, **options) as solver:
        solution = solver.solve(PROBLEM)
    assert all(0 < each.thought_tokens <= 61 for each in solution.candidates)
    assert any("\\boxed{" in each.said for each in solution.candidates)


def test_ends_that_nobody_shows_have_no_budget(thinker, monkeypatch):
    monkeypatch.setitem(vars(thinker), "special_ids", frozenset(thinker.thoughts.end))
    source = Script(thinker)
    source.token_ids = False
    steps = RemoteStepWriter(source, DecodingSettings(step=StepSettings()))
    with pytest.raises(InputError, match=r"--thinking 9: .* no token ids"):
        steps.set_decoding(
            SearchTree("p", (1,), "?").root, DecodingSettings(step=StepSettings(thinking=9))
        )
