"""Steps that a generator elsewhere writes: what is asked, what becomes of it, what is given up."""

import pytest

from beamwright.engine.row import DecodingSettings
from beamwright.protocols import Plan, StepDecoded, StepFailed
from beamwright.remote.dialects import Continuation
from beamwright.remote.writer import RemoteStepWriter
from beamwright.sections import SamplingSettings, StepSettings
from beamwright.tree import NodeState, SearchTree, StopReason
from scripted_server import Script

DELIMITED = StepSettings(delimiter="\n\n", max_step_tokens=20, max_tokens=60)


@pytest.fixture
def tree(codec):
    return SearchTree("p", tuple(codec.encode("what?")), "what?")


@pytest.fixture
def steps_of(codec):
    def make(step=DELIMITED, **sampling):
        return RemoteStepWriter(
            Script(codec), DecodingSettings(SamplingSettings(**sampling), step, 7)
        )

    return make


def wrote(codec, text, ended="stop"):
    ids = tuple(codec.encode(text))
    return Continuation(text, ids, (-0.5,) * len(ids), ended)


def opened(steps, nodes):
    steps.submit(Plan((tuple(nodes),)))
    steps.iterate()
    return list(steps.source.asked.items())


def test_siblings_are_asked_for_together(codec, tree, steps_of):
    steps = steps_of()
    nodes = tree.expand(tree.root, 3)
    ((key, asked),) = opened(steps, nodes)
    assert asked.count == 3
    assert asked.token_ids == tree.root.token_ids
    assert asked.max_tokens == 20
    assert asked.stops == ("\n\n",)
    assert asked.text() == "what?"
    steps.source.answer(key, *(wrote(codec, f"{n}.\n\n") for n in range(3)), prompt_tokens=9)
    events = steps.iterate()
    assert [event.node for event in events] == nodes
    assert [event.text for event in events] == ["0.\n\n", "1.\n\n", "2.\n\n"]
    assert all(event.stop is StopReason.DELIMITER for event in events)
    assert not steps.busy
    assert (steps.counts.requests, steps.counts.prompt_tokens) == (1, 9)
    assert steps.counts.untold_cached == 1  # nobody has said so


def test_children_of_different_nodes_are_not_and_a_seed_is_of_the_lineage(tree, steps_of):
    steps = steps_of()
    one, two = tree.expand(tree.root, 2)
    for node in (one, two):
        node.state, node.token_ids, node.text = NodeState.KEPT, (5, 6), "##"
    children = [*tree.expand(one, 2), *tree.expand(two, 2)]
    found = opened(steps, children)
    assert [asked.count for _, asked in found] == [2, 2]
    assert {asked.token_ids for _, asked in found} == {(*tree.root.token_ids, 5, 6)}
    backward = opened(steps_of(), children[::-1])
    assert [asked.seed for _, asked in found] == [asked.seed for _, asked in backward[::-1]]
    assert len({asked.seed for _, asked in found}) == 2


@pytest.fixture
def alone(tree, steps_of):
    """Answers one step's question: its event."""

    def answer(*written, **options):
        steps = steps_of(**options)
        ((key, _),) = opened(steps, tree.expand(tree.root, 1))
        steps.source.answer(key, *written)
        (event,) = steps.iterate()
        assert not steps.busy
        return event

    return answer


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, False), (0.8, True)])
def test_greedy_steps_are_asked_for_one_by_one(tree, steps_of, temperature, greedy):
    steps = steps_of(temperature=temperature)
    found = opened(steps, tree.expand(tree.root, 2, greedy=greedy))
    assert [(asked.count, asked.sampling.temperature) for _, asked in found] == [(1, 0.0)] * 2


def test_what_a_server_left_out_is_asked_for_again(codec, tree, steps_of):
    """Some give one text whatever n says; from then on they are asked for one."""
    steps = steps_of()
    nodes = tree.expand(tree.root, 3)
    ((key, _),) = opened(steps, nodes)
    steps.source.answer(key, wrote(codec, "a\n\n"))
    (event,) = steps.iterate()
    assert event.node is nodes[0]
    assert steps.busy
    steps.iterate()
    counts = [asked.count for asked in steps.source.asked.values()]
    assert counts == [3, 1, 1]


def test_a_stop_string_may_begin_in_the_step_before(codec, tree, steps_of):
    steps = steps_of(step=DELIMITED.model_copy(update={"stop_strings": ("xyz",)}))
    (node,) = tree.expand(tree.root, 1)
    node.state, node.token_ids, node.text = NodeState.KEPT, tuple(codec.encode("ax")), "ax"
    ((key, _),) = opened(steps, tree.expand(node, 1))
    steps.source.answer(key, wrote(codec, "yz\n\n"))
    (event,) = steps.iterate()
    assert (event.stop, event.text) == (StopReason.STOP_STRING, "a")


def test_texts_are_tokenised_here_and_what_is_no_text_is_a_failure(codec, alone):
    event = alone(Continuation("the a\n\n", None, (), "stop"))
    assert (event.token_ids, event.text) == (tuple(codec.encode("the a\n\n")), "the a\n\n")
    drawn = (-0.5,) * (len(event.token_ids) + 2)  # as other tokens than they are here
    assert alone(Continuation("the a\n\n", None, drawn, "stop")).logprobs == drawn
    assert isinstance(alone(Continuation("x", (10**6,), (-0.5,), "stop")), StepFailed)
    assert isinstance(alone(), StepFailed)


def test_who_is_given_up_leaves_when_nobody_else_is_asked_for(codec, tree, steps_of):
    steps = steps_of()
    nodes = tree.expand(tree.root, 2)
    ((key, _),) = opened(steps, nodes)
    steps.cancel([nodes[0]])
    assert steps.source.cancelled == []
    steps.source.answer(key, wrote(codec, "a\n\n"), wrote(codec, "b\n\n"))
    (event,) = steps.iterate()
    assert isinstance(event, StepDecoded)
    assert (event.node, event.text) == (nodes[1], "b\n\n")
    assert steps.counts.row_tokens > len(event.token_ids)  # what was written for nobody counts

    more = tree.expand(tree.root, 2)
    *_, (key, _) = opened(steps, more)
    steps.release(more)
    assert steps.source.cancelled == [key]
    assert not steps.busy
    steps.source.answer(key, wrote(codec, "a\n\n"))  # it was under way already
    assert steps.iterate() == []
    opened(steps, tree.expand(tree.root, 6))
    steps.abort()
    assert not steps.busy
