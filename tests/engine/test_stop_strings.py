"""Stop strings are found where a search of the whole text finds them, however it comes."""

import random
from itertools import chain

import pytest

import fakes
from beamwright.engine.request import Decoding
from beamwright.engine.row import Row
from beamwright.engine.stop_strings import StopStrings, text_before
from beamwright.engine.stops import CODE_STOP_STRING, RowLimit
from beamwright.kv.segments import Segment
from beamwright.sections import StepSettings
from beamwright.tree import StopReason, Turn

FAR = RowLimit(1000, StopReason.STEP_LIMIT)
PIECES = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"aab",
    b" a",
    b"\n",
    b"\n\n",
    b"ba\n",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9",
]
SETS = [("ab",), ("a\n", "ba"), ("\n\n",), ("aabaab", "bb"), ("é",), ("éa", "b\né"), (" a a",)]


class Codec:
    """Tokens that are nothing but their bytes. strips: it drops the blank before a text."""

    def __init__(self, strips=False):
        self.strips = strips

    def token_bytes(self):
        return PIECES

    def decode(self, token_ids):
        text = b"".join(PIECES[token] for token in token_ids).decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text


def row_behind(steps, strings):
    """A row whose path has these steps, the tokens of each, since the prompt."""
    tree = fakes.new_tree()
    node = tree.root
    for tokens in steps:
        node = fakes.add_step(tree, tree.expand(node, 1)[0], "", tokens)
        tree.keep(node)
    node = tree.expand(node, 1)[0]
    return Row(node, Segment(), Decoding(step=StepSettings(stop_strings=strings)), FAR)


def end_of(row, tokens, sizes, codec):
    """How many of these tokens a row takes that draws so many at a time; None for all of them."""
    stops, rest = StopStrings(codec), list(tokens)
    for size in sizes:
        drawn, rest = rest[:size], rest[size:]
        codes = [0] * len(drawn)
        stops.mark(row, drawn, codes)
        assert set(codes) <= {0, CODE_STOP_STRING}
        if any(codes):
            return len(row.tokens) + codes.index(CODE_STOP_STRING) + 1
        row.tokens += drawn
    assert not rest
    return None


def sizes_of(rng, total):
    """A schedule: tokens per iteration."""
    while total > 0:
        size = min(total, rng.randint(1, 16))
        yield size
        total -= size


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("strings", SETS, ids=str)
def test_a_path_ends_where_its_text_first_holds_one(strings, strips):
    rng, codec, ends = random.Random(0), Codec(strips), set()
    for _ in range(200):
        before = []  # a path whose earlier steps hold none
        for _ in range(rng.randint(0, 3)):
            step = rng.choices(range(len(PIECES)), k=rng.randint(1, 3))
            if not any(s in codec.decode([*chain(*before), *step]) for s in strings):
                before.append(step)
        tokens = rng.choices(range(len(PIECES)), k=30)
        path = [*chain(*before)]
        texts = [codec.decode(path + tokens[: n + 1]) for n in range(len(tokens))]
        expected = next(
            (n + 1 for n, text in enumerate(texts) if any(s in text for s in strings)), None
        )
        row = row_behind(before, strings)
        assert end_of(row, tokens, sizes_of(rng, len(tokens)), codec) == expected
        ends.add(expected)
    assert len(ends) > 3


def test_the_prompt_and_an_earlier_reply_are_not_searched():
    tree = fakes.new_tree()
    tree.root.token_ids = (1, 1)
    first = fakes.add_step(tree, tree.expand(tree.root, 1)[0], "", (2, 1), StopReason.EOS)
    tree.keep(first)
    asked = tree.ask(first, Turn("again?", answers=True), (1,))
    for parent in (tree.root, asked):
        node = tree.expand(parent, 1)[0]
        row = Row(node, Segment(), Decoding(step=StepSettings(stop_strings=("ab",))), FAR)
        assert end_of(row, [2, 1, 2, 1], [4], Codec()) == 3


def test_tokens_that_a_row_began_with_count():
    row = row_behind([[1]], ("aab",))
    row.tokens = [1]
    assert end_of(row, [2, 2], [1, 1], Codec()) == 2


def test_a_row_that_begins_again_forgets_what_it_drew():
    row, stops = row_behind([], ("ab",)), StopStrings(Codec())
    stops.mark(row, [1], [0])
    row.tokens = [1]
    row.restart()
    codes = [0]
    stops.mark(row, [2], codes)
    assert codes == [0]


def test_without_a_tokenizer_there_are_no_strings():
    row = row_behind([], ("a",))
    assert end_of(row, [1, 1], [2], None) is None
    assert row.ending is None


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("abcd", ("c",), "ab"),
        ("abcd", ("cd", "bc"), "a"),
        ("abcabc", ("c", "abc"), ""),
        ("abcd", ("x",), "abcd"),
        ("abcd", (), "abcd"),
    ],
)
def test_a_text_is_cut_before_the_first_of_them(text, strings, expected):
    assert text_before(text, strings) == expected
