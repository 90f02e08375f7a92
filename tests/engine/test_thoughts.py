"""Thoughts in a path: where their steps end, what is in one, what is said behind it."""

import json
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer

from beamwright import Solution, Solver
from beamwright.engine.endings import StopFinder, begins_in_thought, row_limit
from beamwright.engine.row import DecodingSettings, Row
from beamwright.errors import InputError
from beamwright.kv.segments import Segment
from beamwright.models.hub import BUNDLED
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import StepSettings
from beamwright.tree import Node, SearchTree, StopReason


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
            begins = begins_in_thought(node, self.codec.thoughts)
            limit, otherwise = (
                row_limit(node, self.step, 1000, thought=thought) for thought in (True, False)
            )
            row = Row(
                node, Segment(), DecodingSettings(step=self.step), limit, 0, begins, otherwise
            )
            while left and row.stop is None:
                row.stop = self.stops.find_reason(row, left[:1])
                row.tokens.append(left.pop(0))
            stop = row.stop or StopReason.STEP_LIMIT
            row.stop = stop
            said = row.make_event(self.codec.reply_text(row.reply_ids()))
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


# --- `--thinking`: budgets, soft and hard closes, on the bundled thinking model -----------------


PROBLEM = json.loads((BUNDLED / "test.jsonl").read_text().splitlines()[0])["problem"]
THINKING = {"model": "bundled:thinking", "verifier": "none", "max_tokens": 500}


def solved(**options) -> tuple[Solution, list[Node]]:
    """A search, and its steps."""
    trees = []
    named = {**THINKING, "search": "majority", "n": 2, "thought_steps": "whole", **options}
    with Solver(**named) as solver:
        found = solver.solve(PROBLEM, on_round=lambda report: trees.append(report.tree))
    return found, [node for node in trees[-1].nodes() if node.parent is not None]


def thought_tokens(steps: list[Node]) -> list[int]:
    """Of each path's first step, where thoughts are whole."""
    return [len(step.token_ids) for step in steps if step.thought and step.depth == 1]


def test_without_a_budget_every_path_has_one_thought_and_an_answer_behind_it():
    found, steps = solved()
    assert len(thought_tokens(steps)) == 2
    assert {step.stop for step in steps if step.thought} == {"thought_end"}
    ends = [step for step in steps if step.complete]
    assert all("\\boxed{" in end.said and len(end.said) < len(end.text) for end in ends)
    assert found.answer is not None


def test_a_budget_is_a_hard_one_and_an_answer_follows():
    _, steps = solved(thinking=20, soft_close=2)
    marked = [step for step in steps if step.thought]
    assert {len(step.token_ids) for step in marked} == {21}  # and the end
    assert {step.stop for step in marked} == {"thought_end"}
    assert all(step.logprobs[-1] < 0 for step in marked)  # as likely as it was, imposed or not
    assert all("\\boxed{" in step.said for step in steps if step.complete)


def test_off_tells_the_template_and_closes_what_is_begun_all_the_same():
    _, steps = solved(thinking="off")
    assert not any(step.thought for step in steps)
    told = {"template_args": {"enable_thinking": True}, "thinking": "off"}
    _, steps = solved(**told)
    assert {len(step.token_ids) for step in steps if step.thought} <= {2}
    assert all("\\boxed{" in step.said for step in steps if step.complete)


def test_a_message_is_said_before_the_end_even_where_it_ends_a_step():
    message = "\n\nTime is up.\n\n"
    for cut in ("whole", "paragraphs"):
        _, steps = solved(thinking=20, soft_close=2, close_message=message, thought_steps=cut)
        last = [step for step in steps if step.thought and not step.thinking]
        assert len(last) == 2
        assert all(step.text.endswith(message) for step in last)


def test_a_soft_close_comes_in_the_last_quarter_where_the_end_is_likely():
    _, steps = solved(thinking=40, soft_close=1e-9)
    assert all(30 < length < 41 for length in thought_tokens(steps))
    _, hard = solved(thinking=40, soft_close=2)
    assert set(thought_tokens(hard)) == {41}


def test_the_last_token_of_a_path_is_a_limit_above_all():
    found, steps = solved(thinking=40, max_tokens=30, soft_close=2)
    assert {step.stop for step in steps} == {"path_limit"}
    assert all(step.thinking and step.said == "" for step in steps)
    assert found.answer is None


@pytest.mark.parametrize("thinking", ["on", 100])
def test_a_model_that_marks_no_thoughts_cannot_be_made_to_think(thinking):
    with (
        pytest.raises(InputError, match=r"--thinking .*no tokens for thoughts \(<think>"),
        Solver(thinking=thinking) as solver,
    ):
        solver.solve(PROBLEM)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("thinking", "some", "write auto, on, off or a number of tokens"),
        ("thinking", -1, "write auto, on, off or a number of tokens"),
        ("thought_steps", "words", "is not a way to cut thoughts"),
        ("close_message", "x" * 201, "has 201 bytes, the limit is 200"),
        ("soft_close", 0, "soft"),
    ],
)
def test_what_is_no_setting_is_said(option, value, said):
    with pytest.raises(InputError, match=said):
        Solver(**{option: value})


MESSAGE = {
    **{"thinking": 40, "soft_close": 0.001, "close_message": "\n\nStop.\n", "thought_steps": 8},
    **{"temperature": 1.2, "search": "beam", "n": 4, "verifier": "logprob"},
}


@pytest.fixture(scope="module")
def plain_message() -> Solution:
    return solved(**MESSAGE)[0]


@pytest.mark.parametrize(
    "way",
    [
        {"max_batch": 3, "drafts": 4},
        {"kv_memory": "400KiB", "speculation": "exact"},
        {"batching": "grouped", "kv_memory": "420KiB", "attention": "dense"},
    ],
    ids=str,
)
def test_trees_do_not_depend_on_the_schedule(plain_message, way):
    assert solved(**MESSAGE, **way)[0].tree_hash == plain_message.tree_hash


@pytest.mark.nightly
def test_a_search_is_resumed_in_the_middle_of_its_thoughts(tmp_path):
    file, kept = tmp_path / "saved", tmp_path / "kept"

    def keep(report):
        if report.round == 3:
            shutil.copy(file, kept)

    named = {**THINKING, **MESSAGE, "thinking": 45, "dtype": "float64"}
    with Solver(**named) as solver:
        whole = solver.solve(PROBLEM, checkpoint=file, on_round=keep)
        assert solver.resume(kept).tree_hash == whole.tree_hash
    with Solver(**{**named, "thinking": 30}) as solver, pytest.raises(InputError, match="thinking"):
        solver.resume(kept)
