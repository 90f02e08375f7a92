"""Thoughts in a path: where their steps end, what is in one, what is said behind it."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from beamwright.engine.endings import StopFinder, begins_thought, delimiters, row_limit
from beamwright.engine.row import Decoding, Row
from beamwright.kv.segments import Segment
from beamwright.models.hub import BUNDLED
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import StepSettings
from beamwright.tree import Node, SearchTree, StopReason

CONTEXT = 1000


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "generator" / "tokenizer.json"))
    marks = [AddedToken(token, normalized=False) for token in ("<think>", "</think>")]
    tokenizer.add_tokens(marks)
    return TextCodec(tokenizer)


class Written:
    """A reply that is written as a text says, step by step."""

    def __init__(self, codec: TextCodec, prompt: str = "How many?", **settings: object) -> None:
        self.codec, self.stops = codec, StopFinder(codec)
        self.step = StepSettings.model_validate(settings)
        self.tree = SearchTree(0, tuple(codec.encode(prompt)), prompt)
        self.last = self.tree.root

    def write(self, text: str) -> list[Node]:
        """Its steps; the last one has not ended."""
        nodes, left = list[Node](), self.codec.encode(text)
        while left:
            (node,) = self.tree.expand(self.last, 1)
            begins = begins_thought(node, self.codec.thoughts)
            limit, otherwise = (
                row_limit(node, self.step, CONTEXT, thought=thought) for thought in (True, False)
            )
            row = Row(node, Segment(), Decoding(step=self.step), limit, 0, begins, otherwise)
            while left and row.stop is None:
                row.stop = self.stops.reason(row, left[:1])
                row.tokens.append(left.pop(0))
            stop = row.stop or StopReason.STEP_LIMIT
            row.stop = stop
            said = row.decoded(self.codec.reply_text(row.reply_ids()))
            self.tree.commit(**vars(said))
            self.tree.keep(node)
            self.last = node
            nodes.append(node)
        return nodes


@pytest.mark.parametrize(
    ("prompt", "reply", "thoughts", "said"),
    [
        ("?", "<think>\nAda has 3.\n</think>\n\n3.\n\nSo 3.", [True, False, False], "3.\n\nSo 3."),
        ("?", "<think>\nAda has 3.\n\nWait, 4.\n</think>\n\n4.", [True, True, False], "4."),
        ("?<think>\n", "Ada has 3.\n</think>\n\nIt is 3.", [True, False], "It is 3."),
        ("?<think>\n\n</think>\n\n", "It is 3.", [False], "It is 3."),
        ("?", "Ada has 3.\n</think>\n\nIt is 3.", [True, False], "It is 3."),
        ("?", "<think>\nAda <think> has 3.\n</think>\n\nIt is 3.", [True, False], "It is 3."),
        ("?", "Well.<think>\nAda has 3.\n</think>\n\n3.", [False, True, False], "3."),
        ("?", "<think>\nAda has 3.", [True], ""),
    ],
)
def test_where_thoughts_end_and_what_is_said(codec, prompt, reply, thoughts, said) -> None:
    """A template may begin one, or close it; an end without a start ends what was a thought."""
    steps = Written(codec, "How many" + prompt).write(reply)
    found = [step.thought for step in steps]
    assert found[: len(thoughts)] == thoughts
    assert not any(found[len(thoughts) :])
    assert steps[-1].said == said
    assert steps[-1].thinking is (said == "")
    ended = [step for step in steps if step.thought and not step.thinking]
    assert [step.stop for step in ended] == [StopReason.THOUGHT_END] * len(ended)


@pytest.mark.parametrize(
    ("mode", "count"), [("whole", 1), ("paragraphs", 2), ("sentences", 4), ("markers", 2), (6, 5)]
)
def test_thoughts_are_cut_as_asked(codec: TextCodec, mode: str | int, count: int) -> None:
    thought = "<think>\nAda has 3. She has 3 plums.\n\nWait, that is 4.\n</think>"
    steps = Written(codec, thought_steps=mode, max_step_tokens=100).write(thought)
    assert all(step.thought for step in steps)
    if isinstance(mode, int):
        assert {len(step.token_ids) for step in steps[:-1]} == {mode}
        assert {step.stop for step in steps[:-1]} == {StopReason.STEP_LENGTH}
    else:
        assert len(steps) == count
    assert steps[-1].stop is StopReason.THOUGHT_END


def test_a_whole_thought_may_be_longer_than_a_step(codec: TextCodec) -> None:
    settings = {"thought_steps": "whole", "max_step_tokens": 4}
    steps = Written(codec, **settings).write("<think>\nAda has 3 plums.\n</think>Ada has 3 plums.")
    assert len(steps[0].token_ids) > 4
    assert {len(step.token_ids) for step in steps[1:-1]} == {4}
    first = Written(codec, **settings).write("Ada has 3 plums and more of them.")[0]
    assert len(first.token_ids) == 4


def test_what_cuts_steps_outside_thoughts_is_the_delimiter() -> None:
    step = StepSettings(thought_steps="sentences")
    assert delimiters(step, thought=False) == (b"\n\n",)
    assert b". " in delimiters(step, thought=True)
    assert delimiters(StepSettings(step_tokens=4), thought=True) == ()
