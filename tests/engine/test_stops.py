"""Steps and paths end where a search of their whole text says it, however their tokens come."""

import random
from itertools import chain

import pytest

import fakes
from beamwright.engine.endings import StopFinder, row_limit
from beamwright.engine.row import DecodingSettings, Row, RowLimit
from beamwright.io import read_toml_beside
from beamwright.kv.segments import Segment
from beamwright.sections import StepSettings
from beamwright.tree import StopReason, Turn
from engines import CHAT, grow

FAR = RowLimit(1000, StopReason.STEP_LIMIT)
EOS = 0
PIECES = [
    b"",
    *b"\n|\n\n|a|b|ab|aab| a|.\n|\n\nb|a\n\n\nc|b\na|ba\n|\r|\xc3|\xa9|\xc3\xa9".split(b"|"),
]


class Codec:
    """Tokens that are nothing but their bytes. strips: it drops the blank before a text."""

    eos_ids = frozenset({EOS})
    thoughts = None

    def __init__(self, strips=False):
        self.strips = strips

    @property
    def token_bytes(self):
        return PIECES

    def decode(self, token_ids):
        text = b"".join(PIECES[token] for token in token_ids).decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text


def make_row(steps=(), limit=FAR, **settings):
    """A row whose path has these steps, the tokens of each, since the prompt."""
    tree = fakes.new_tree()
    node = tree.root
    for tokens in steps:
        node = fakes.add_step(tree, tree.expand(node, 1)[0], "", tokens)
        tree.keep(node)
    node = tree.expand(node, 1)[0]
    return Row(node, Segment(), DecodingSettings(step=StepSettings(**settings)), limit)


def ids(*pieces):
    return [piece if isinstance(piece, int) else PIECES.index(piece) for piece in pieces]


def end_of(row, tokens, codec=None, sizes=(1,) * 1000):
    """(tokens that a row takes, why it ends); tokens come so many at a time. None: it goes on.

    Asked about its possible_stops only, as in the engine.
    """
    stops, rest = StopFinder(codec or Codec()), list(tokens)
    for size in sizes:
        if not rest:
            break
        drawn = []
        possible_stops, most = stops.possible_stops(row)
        for token in rest[:size]:
            drawn.append(token)
            asked = len(drawn) >= most or (possible_stops is not None and possible_stops[token])
            if asked and (reason := stops.find_reason(row, drawn)):
                return len(row.tokens) + len(drawn), reason
        row.tokens += drawn
        del rest[:size]
    return None


def sizes_of(rng, total):
    """A schedule: tokens per iteration."""
    while total > 0:
        size = min(total, rng.randint(1, 16))
        yield size
        total -= size


# --- texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", ["\n", "\n\n", "aab", "b\nab", "\n\n\n", "é"])
def test_a_step_ends_with_the_token_that_completes_its_delimiter(delimiter):
    """Wherever its bytes begin, within the step."""
    rng, ends = random.Random(0), set()
    for _ in range(300):
        tokens = rng.choices(range(1, len(PIECES)), k=12)
        texts = [b"".join(PIECES[t] for t in tokens[: n + 1]) for n in range(len(tokens))]
        found = [delimiter.encode() in text for text in texts]
        expected = (found.index(True) + 1, StopReason.DELIMITER) if any(found) else None
        row = make_row([ids(b"a", b"\n")], delimiter=delimiter)
        assert end_of(row, tokens, sizes=sizes_of(rng, 12)) == expected
        ends.add(expected)
    assert len(ends) > 3


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize(
    "strings",
    [("ab",), ("a\n", "ba"), ("\n\n",), ("aabaab", "bb"), ("é",), ("éa", "b\né"), (" a a",)],
    ids=str,
)
def test_a_path_ends_where_its_text_first_holds_a_string(strings, strips):
    rng, codec, ends = random.Random(0), Codec(strips), set()
    for _ in range(200):
        before = []  # a path whose earlier steps hold none
        for _ in range(rng.randint(0, 3)):
            step = rng.choices(range(1, len(PIECES)), k=rng.randint(1, 3))
            if not any(s in codec.decode([*chain(*before), *step]) for s in strings):
                before.append(step)
        tokens = rng.choices(range(1, len(PIECES)), k=30)
        path = [*chain(*before)]
        texts = [codec.decode(path + tokens[: n + 1]) for n in range(len(tokens))]
        found = [any(string in text for string in strings) for text in texts]
        expected = (found.index(True) + 1, StopReason.STOP_STRING) if any(found) else None
        row = make_row(before, stop_strings=strings, step_tokens=99)
        assert end_of(row, tokens, codec, sizes_of(rng, len(tokens))) == expected
        ends.add(expected)
    assert len(ends) > 3


def test_the_prompt_and_an_earlier_reply_are_not_searched():
    tree = fakes.new_tree()
    tree.root.token_ids = tuple(ids(b"a", b"a"))
    first = fakes.add_step(tree, tree.expand(tree.root, 1)[0], "", ids(b"b", b"a"), StopReason.EOS)
    tree.keep(first)
    asked = tree.ask(first, Turn("again?", answers=True), tuple(ids(b"a")))
    for parent in (tree.root, asked):
        node = tree.expand(parent, 1)[0]
        row = Row(node, Segment(), DecodingSettings(step=StepSettings(stop_strings=("ab",))), FAR)
        assert end_of(row, ids(b"b", b"a", b"b")) == (3, StopReason.STOP_STRING)


def test_without_a_tokenizer_there_are_only_limits():
    row = make_row([], RowLimit(3, StopReason.STEP_LIMIT), stop_strings=("a",), delimiter="a")
    stops = StopFinder(None)
    assert [stops.find_reason(row, [3] * count) for count in (1, 2, 3)] == [
        None,
        None,
        "step_limit",
    ]


# --- reasons ---------------------------------------------------------------------------------


TABLES = read_toml_beside(__file__)


@pytest.mark.parametrize("row", TABLES["precedence"], ids=str)
def test_precedence_where_two_reasons_coincide(row):
    piece = EOS if row["piece"] == "eos" else row["piece"].encode()
    limit = RowLimit(1, StopReason(row["limit"]))
    found = end_of(make_row([], limit, **row.get("settings", {})), ids(piece))
    assert found == (1, row["reason"])


# --- limits ----------------------------------------------------------------------------------


@pytest.fixture
def node():
    """A node that starts at position 20 of a path whose prompt is 12 tokens long."""
    tree = fakes.new_tree(num_prompt_tokens=12)
    first = fakes.add_step(tree, tree.expand(tree.root, 1)[0], "a", tokens=range(8))
    tree.keep(first)
    return tree.expand(first, 1)[0]


@pytest.mark.parametrize(("settings", "context", "tokens", "reason"), TABLES["limits"])
def test_the_nearest_limit_counts(node, settings, context, tokens, reason):
    found = row_limit(node, StepSettings(**settings), context)
    assert found == RowLimit(tokens, StopReason(reason))


# --- searches whose paths end at strings ---


STOPS = ["M", "a", " 7", *(f"e{letter}" for letter in "tTgGkKpP#$%&")]
BEAM = {
    **{"search": "beam", "n": 8, "width": 2, "max_rounds": 8, "stop_strings": STOPS},
    **{"delimiter": "e", "max_step_tokens": 12, "max_tokens": 60},
}
TALK = {
    **{"search": "revise", "chat_template": CHAT, "n": 4, "max_rounds": 60, "max_tokens": 200},
    **{"critique_prompt": "be a cab", "revision_prompt": "dab", "seed": 1},
}


def texts_of(codec, node):
    """The text of a node's reply after each token of its own, as it would be without stops."""
    before = node.parent.path_token_ids()[node.replies_to.end :]
    return [codec.decode([*before, *node.token_ids[: n + 1]]) for n in range(len(node.token_ids))]


def check_ends(tree, codec, strings):
    """By a search of the whole text after every token; returns the nodes that strings ended."""
    ended = []
    for node in (node for node in tree.nodes() if node.parent and not node.turn):
        texts = texts_of(codec, node)
        found = [any(string in text for string in strings) for text in texts]
        assert not any(found[:-1]), "no token behind the one that completes it"
        assert found[-1] == (node.stop == "stop_string")
        if not found[-1]:
            assert node.text == texts[-1]
            continue
        starts = [texts[-1].find(string) for string in strings]
        assert node.text == texts[-1][: min(start for start in starts if start >= 0)]
        assert node.ended
        assert all(child.turn is not None for child in node.children)
        ended.append(node)
    return ended


@pytest.mark.parametrize("talks", [False, True])
def test_paths_end_with_the_token_that_completes_a_string(make_solver, talks):
    """Each reply is searched for itself."""
    solver = make_solver(**{**BEAM, **TALK} if talks else BEAM)
    solution, tree = grow(solver)
    ended = check_ends(tree, solver._machinery.reader.codec, STOPS)
    if talks:
        assert any(node.replies_to.turn is not None for node in ended)
        return
    assert any(node.depth > 1 for node in ended)
    straddling = [node for node in ended if len(node.text) < len(node.parent.text)]
    assert straddling, "a string began in the step before"
    assert all(node.step_text == "" for node in straddling)
    assert not any(string in each.text for string in STOPS for each in solution.candidates)
    assert "stop_string" in {candidate.stop for candidate in solution.candidates}
