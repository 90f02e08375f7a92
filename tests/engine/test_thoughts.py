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
            if begins is False:
                row.limit = otherwise
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


def test_the_end_of_a_thought_ends_its_step_and_what_follows_is_said(codec: TextCodec) -> None:
    steps = Written(codec).write("<think>\nAda has 3.\n</think>\n\nIt is 3.\n\nSo 3.")
    assert [step.stop for step in steps[:1]] == [StopReason.THOUGHT_END]
    assert [step.thought for step in steps] == [True] + [False] * (len(steps) - 1)
    assert [step.thinking for step in steps] == [False] * len(steps)
    assert steps[-1].said == "It is 3.\n\nSo 3."
    assert steps[0].said == ""


def test_paragraphs_of_a_thought_are_steps_of_it(codec: TextCodec) -> None:
    steps = Written(codec).write("<think>\nAda has 3.\n\nWait, 4.\n</think>\n\n4.")
    assert [step.thought for step in steps[:2]] == [True, True]
    assert [step.thinking for step in steps[:2]] == [True, False]
    assert steps[0].said == ""


def test_a_start_that_the_template_wrote_counts(codec: TextCodec) -> None:
    steps = Written(codec, "How many?<think>\n").write("Ada has 3.\n</think>\n\nIt is 3.")
    assert steps[0].thought
    assert steps[0].stop is StopReason.THOUGHT_END
    assert steps[-1].said == "It is 3."


def test_a_thought_that_is_closed_in_the_prompt_is_none_of_the_reply(codec: TextCodec) -> None:
    steps = Written(codec, "How many?<think>\n\n</think>\n\n").write("It is 3.")
    assert [step.thought for step in steps] == [False]
    assert steps[-1].said == "It is 3."


def test_a_thought_without_an_end_says_nothing(codec: TextCodec) -> None:
    (step,) = Written(codec).write("<think>\nAda has 3.")
    assert step.thinking
    assert step.said == ""


def test_an_end_without_a_start_ends_what_was_a_thought(codec: TextCodec) -> None:
    steps = Written(codec).write("Ada has 3.\n</think>\n\nIt is 3.")
    assert steps[0].thought
    assert steps[-1].said == "It is 3."


def test_a_start_in_a_thought_opens_no_second_one(codec: TextCodec) -> None:
    steps = Written(codec).write("<think>\nAda <think> has 3.\n</think>\n\nIt is 3.")
    assert steps[0].stop is StopReason.THOUGHT_END
    assert steps[-1].said == "It is 3."


def test_a_thought_behind_text_begins_a_step_of_its_own(codec: TextCodec) -> None:
    steps = Written(codec).write("Well.<think>\nAda has 3.\n</think>\n\nIt is 3.")
    assert [step.thought for step in steps[:2]] == [False, True]
    assert steps[0].stop is StopReason.DELIMITER
    assert steps[-1].said == "It is 3."


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
