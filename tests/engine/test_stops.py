import pytest
import torch

import fakes
from beamwright.engine.stops import (
    CODE_STOP_STRING,
    DelimiterTable,
    RowLimit,
    StopWords,
    row_limit,
    stop_reason,
)
from beamwright.sections import StepSettings
from beamwright.tree import StopReason

CPU = torch.device("cpu")
PIECES = [
    b"",
    b"",
    b"\n",
    b"\n\n",
    b"a",
    b".\n",
    b"\n\nb",
    b"a\n\n\nc",
    b"\r",
    b"ab",
    b"aab",
    b"b\na",
]
EOS = 1


def tokens_until_hit(delimiter, texts):
    """Index of the first piece that completes the delimiter, by the table; None if none does."""
    table = DelimiterTable(delimiter, PIECES, CPU)
    state = 0
    for i, text in enumerate(texts):
        token = PIECES.index(text)
        if table.hit[state, token]:
            return i
        state = int(table.next_state[state, token])
    return None


@pytest.mark.parametrize(
    ("delimiter", "texts", "at"),
    [
        (b"\n\n", [b"\n\n"], 0),
        (b"\n\n", [b"a", b"\n", b"\n"], 2),
        (b"\n\n", [b".\n", b"\n\nb"], 1),
        (b"\n\n", [b"\n", b"a", b"\n", b"a"], None),
        (b"\n\n", [b"\n", b"\r", b"\n"], None),
        (b"\n\n", [b"\n", b"", b"\n"], 2),
        (b"\n\n", [b"a\n\n\nc"], 0),
        (b"\n\n\n", [b"\n", b"\n\n"], 1),
        (b"\n\n\n", [b"\n\nb", b"\n"], None),
        (b"aab", [b"a", b"a", b"a", b"b\na"], 3),
        (b"aab", [b"a", b"aab"], 1),
        (b"aab", [b"ab"], None),
        (b"aab", [b"a", b"ab"], 1),
        (b"b\nab", [b"b\na", b"b\na", b"ab"], 1),
    ],
)
def test_delimiters_are_found_across_tokens(delimiter, texts, at):
    assert tokens_until_hit(delimiter, texts) == at


@pytest.mark.parametrize("delimiter", [b"\n", b"\n\n", b"aab", b"b\nab", b"\n\n\n"])
def test_the_table_agrees_with_searching_the_text(delimiter):
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        ids = torch.randint(len(PIECES), (12,), generator=generator).tolist()
        texts = [PIECES[i] for i in ids]
        text, expected = b"", None
        for i, piece in enumerate(texts):
            text += piece
            if delimiter in text:
                expected = i
                break
        table = DelimiterTable(delimiter, PIECES, CPU)
        state, found = 0, None
        for i, token in enumerate(ids):
            if table.hit[state, token]:
                found = i
                break
            state = int(table.next_state[state, token])
        assert found == expected, texts


# --- detection -------------------------------------------------------------------------------


class Rows:
    """Rows whose tokens are observed together, with what the device and the host know of each."""

    def __init__(self, limits, eos=(EOS,), **settings):
        self.words = StopWords(frozenset(eos), lambda: PIECES, CPU)
        self.limits, self.steps = limits, [StepSettings(**settings)] * len(limits)
        self.load([0] * len(limits), [limit.tokens for limit in limits])

    def load(self, matched, left):
        self.state = self.words.new_state(torch.tensor(matched), torch.tensor(left))
        self.words.load(self.steps, self.state)
        self.state.state += torch.tensor([self.words.first_state(step) for step in self.steps])

    @property
    def matched(self):
        """Bytes of their delimiters that the rows' texts end with."""
        pairs = zip(self.state.state.tolist(), self.steps, strict=True)
        return [state - self.words.first_state(step) for state, step in pairs]

    def feed(self, *pieces):
        """Why rows stop with these tokens, by row."""
        ids = torch.tensor([PIECES.index(p) if isinstance(p, bytes) else p for p in pieces])
        codes = self.words.observe(ids, self.state)
        assert (codes.dtype, codes.shape) == (torch.uint8, ids.shape)
        return {
            row: stop_reason(code, limit)
            for row, (code, limit) in enumerate(zip(codes.tolist(), self.limits, strict=True))
            if code
        }


FAR = RowLimit(1000, StopReason.STEP_LIMIT)


def test_each_row_stops_for_its_own_reason():
    limits = [FAR, FAR, RowLimit(1, StopReason.CONTEXT_LIMIT), RowLimit(1, StopReason.PATH_LIMIT)]
    limits += [RowLimit(1, StopReason.STEP_LIMIT), FAR]
    assert Rows(limits).feed(b"\n\n", EOS, b"a", b"a", b"a", b"a") == {
        0: StopReason.DELIMITER,
        1: StopReason.EOS,
        2: StopReason.CONTEXT_LIMIT,
        3: StopReason.PATH_LIMIT,
        4: StopReason.STEP_LIMIT,
    }


@pytest.mark.parametrize(
    ("limit", "piece", "reason"),
    [
        (StopReason.CONTEXT_LIMIT, EOS, StopReason.EOS),
        (StopReason.PATH_LIMIT, EOS, StopReason.EOS),
        (StopReason.STEP_LIMIT, EOS, StopReason.EOS),
        (StopReason.CONTEXT_LIMIT, b"\n\n", StopReason.CONTEXT_LIMIT),
        (StopReason.PATH_LIMIT, b"\n\n", StopReason.PATH_LIMIT),
        (StopReason.STEP_LIMIT, b"\n\n", StopReason.DELIMITER),
    ],
)
def test_precedence_where_two_reasons_coincide(limit, piece, reason):
    assert Rows([RowLimit(1, limit)]).feed(piece) == {0: reason}


@pytest.mark.parametrize("device", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("limit", [StopReason.PATH_LIMIT, StopReason.STEP_LIMIT])
def test_a_stop_string_comes_before_everything_else(device, limit):
    code = device | CODE_STOP_STRING
    assert stop_reason(code, RowLimit(1, limit)) is StopReason.STOP_STRING


def test_a_limit_counts_the_tokens_of_the_step():
    stops = Rows([RowLimit(3, StopReason.STEP_LIMIT), FAR])
    assert [stops.feed(b"a", b"a") for _ in range(2)] == [{}, {}]
    assert stops.feed(b"a", b"a") == {0: StopReason.STEP_LIMIT}


def test_any_of_several_eos_ids_ends_a_path():
    assert Rows([FAR, FAR, FAR], eos=(EOS, 4)).feed(b"a", EOS, b"ab") == {
        0: StopReason.EOS,
        1: StopReason.EOS,
    }


def test_eos_can_be_ignored():
    assert Rows([FAR], ignore_eos=True).feed(EOS) == {}


def test_fixed_steps_do_not_look_for_the_delimiter():
    stops = Rows([RowLimit(2, StopReason.STEP_LENGTH)], step_tokens=2)
    assert stops.feed(b"\n\n") == {}
    assert stops.feed(b"\n\n") == {0: StopReason.STEP_LENGTH}


def test_rows_that_stay_keep_their_state_and_limits():
    """In another batch, beside other rows: all of a row's state is two numbers."""
    limits = [FAR, RowLimit(3, StopReason.PATH_LIMIT), FAR, RowLimit(2, StopReason.STEP_LIMIT)]
    stops = Rows(limits)
    assert stops.feed(b"a", b"a", b"\n", b"a") == {}
    matched, left = stops.matched, stops.state.left.tolist()
    assert (matched, left) == ([0, 0, 1, 0], [999, 2, 999, 1])
    stops.limits = [limits[2], limits[1], FAR]
    stops.steps.pop()
    stops.load([matched[2], matched[1], 0], [left[2], left[1], FAR.tokens])
    assert stops.feed(b"\n", b"\n", b"\n") == {0: StopReason.DELIMITER}
    assert stops.feed(b"a", b"a", b"\n") == {1: StopReason.PATH_LIMIT, 2: StopReason.DELIMITER}


def test_the_state_stays_in_place():
    """A captured step holds its addresses."""
    stops = Rows([FAR, FAR])
    before = [(each, each.data_ptr()) for each in (stops.state.state, stops.state.left)]
    stops.feed(b"\n", b"a")
    after = (stops.state.state, stops.state.left)
    assert all(
        now is then and now.data_ptr() == place
        for now, (then, place) in zip(after, before, strict=True)
    )
    assert [stops.matched, stops.state.left.tolist()] == [[1, 0], [999, 999]]


# --- rows with settings of their own ---------------------------------------------------------


def test_every_row_ends_at_its_own_delimiter():
    steps = [{"delimiter": "\n\n"}, {"delimiter": "aab"}, {"step_tokens": 9}, {"delimiter": "a"}]
    stops = Rows([FAR] * 4)
    stops.steps = [StepSettings(**step) for step in steps]
    stops.load([0] * 4, [FAR.tokens] * 4)
    assert stops.feed(b"\n", b"a", b"\n\n", b"\n") == {}
    assert stops.matched == [1, 1, 0, 0]
    assert stops.feed(b"\n", b"ab", b"aab", b"ab") == {
        0: StopReason.DELIMITER,
        1: StopReason.DELIMITER,
        3: StopReason.DELIMITER,
    }


def test_rows_may_ignore_the_end_of_sequence_beside_others():
    stops = Rows([FAR] * 3)
    stops.steps = [StepSettings(ignore_eos=ignores) for ignores in (False, True, False)]
    stops.load([0] * 3, [FAR.tokens] * 3)
    assert stops.feed(EOS, EOS, b"a") == {0: StopReason.EOS}


def test_tables_are_made_once_and_few_are_kept():
    words, made = StopWords(frozenset(), lambda: PIECES, CPU), []
    for number in range(100):
        words.learn([StepSettings(delimiter=f"{number % 40}")])
        made.append(words.num_moves)
        words.learn([StepSettings(delimiter=f"{number % 40}"), StepSettings(step_tokens=3)])
        assert words.num_moves == made[-1]
        assert len(words._tables) <= 32
    assert not words.learn([StepSettings(step_tokens=3)])


def test_a_state_means_the_same_bytes_after_the_tables_were_made_anew():
    stops = Rows([FAR])
    stops.feed(b"\n")
    matched, left = stops.matched, stops.state.left.tolist()
    stops.words.learn([StepSettings(delimiter=f"{number}") for number in range(33)])
    stops.load(matched, left)
    assert stops.feed(b"\n") == {0: StopReason.DELIMITER}


def test_without_a_tokenizer_there_are_no_delimiters():
    words = StopWords(frozenset(), None, CPU)
    state = words.new_state(torch.zeros(2, dtype=torch.long), torch.tensor([9, 1]))
    words.load([StepSettings()] * 2, state)
    assert words.observe(torch.tensor([3, 3]), state).tolist() == [0, 2]


# --- limits ----------------------------------------------------------------------------------


@pytest.fixture
def node():
    """A node that starts at position 20 of a path whose prompt is 12 tokens long."""
    tree = fakes.new_tree(num_prompt_tokens=12)
    first = fakes.add_step(tree, tree.expand(tree.root, 1)[0], "a", tokens=range(8))
    tree.keep(first)
    return tree.expand(first, 1)[0]


@pytest.mark.parametrize(
    ("settings", "context", "tokens", "reason"),
    [
        ({"max_step_tokens": 7}, 100, 7, StopReason.STEP_LIMIT),
        ({"step_tokens": 5}, 100, 5, StopReason.STEP_LENGTH),
        ({"step_tokens": 300, "max_step_tokens": 5}, 1000, 300, StopReason.STEP_LENGTH),
        ({"step_limits": (3, 9)}, 100, 9, StopReason.STEP_LIMIT),
        ({"step_limits": (3,), "max_step_tokens": 9}, 100, 3, StopReason.STEP_LIMIT),
        ({"step_limits": (1, 2, 40)}, 100, 2, StopReason.STEP_LIMIT),
        ({"max_tokens": 10}, 100, 2, StopReason.PATH_LIMIT),
        ({}, 24, 4, StopReason.CONTEXT_LIMIT),
        ({"max_tokens": 12, "step_tokens": 4}, 24, 4, StopReason.CONTEXT_LIMIT),
        ({"max_tokens": 12, "step_tokens": 4}, 25, 4, StopReason.PATH_LIMIT),
        ({"max_tokens": 13, "step_tokens": 4}, 25, 4, StopReason.STEP_LENGTH),
    ],
)
def test_the_nearest_limit_counts(node, settings, context, tokens, reason):
    assert row_limit(node, StepSettings(**settings), context) == RowLimit(tokens, reason)
