import pytest
import torch

import fakes
from beamwright.config import StepSettings
from beamwright.runtime.stops import DelimiterTable, RowLimit, StopDetector, row_limit
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


# --- detector --------------------------------------------------------------------------------


def detector(limits, num_rows=None, eos=(EOS,), **settings):
    step = StepSettings(**settings)
    table = DelimiterTable(step.delimiter.encode(), PIECES, CPU)
    rows = num_rows or len(limits)
    return StopDetector(step, frozenset(eos), table, limits, rows, CPU)


FAR = RowLimit(1000, StopReason.STEP_LIMIT)


def feed(stops, *pieces):
    return stops.feed(
        torch.tensor([PIECES.index(p) if isinstance(p, bytes) else p for p in pieces])
    )


def test_each_row_stops_for_its_own_reason():
    limits = [FAR, FAR, RowLimit(1, StopReason.CONTEXT_LIMIT), RowLimit(1, StopReason.PATH_LIMIT)]
    limits += [RowLimit(1, StopReason.STEP_LIMIT), FAR]
    assert feed(detector(limits), b"\n\n", EOS, b"a", b"a", b"a", b"a") == {
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
    assert feed(detector([RowLimit(1, limit)]), piece) == {0: reason}


def test_a_limit_counts_the_tokens_of_the_step():
    stops = detector([RowLimit(3, StopReason.STEP_LIMIT), FAR])
    assert [feed(stops, b"a", b"a") for _ in range(2)] == [{}, {}]
    assert feed(stops, b"a", b"a") == {0: StopReason.STEP_LIMIT}


def test_any_of_several_eos_ids_ends_a_path():
    assert feed(detector([FAR, FAR, FAR], eos=(EOS, 4)), b"a", EOS, b"ab") == {
        0: StopReason.EOS,
        1: StopReason.EOS,
    }


def test_eos_can_be_ignored():
    assert feed(detector([FAR], ignore_eos=True), EOS) == {}


def test_fixed_steps_do_not_look_for_the_delimiter():
    stops = detector([RowLimit(2, StopReason.STEP_LENGTH)], step_tokens=2)
    assert feed(stops, b"\n\n") == {}
    assert feed(stops, b"\n\n") == {0: StopReason.STEP_LENGTH}


def test_rows_that_stay_keep_their_state_and_limits():
    limits = [FAR, RowLimit(3, StopReason.PATH_LIMIT), FAR, RowLimit(2, StopReason.STEP_LIMIT)]
    stops = detector(limits, num_rows=8)
    assert feed(stops, b"a", b"a", b"\n", b"a", *[b"a"] * 4) == {}
    stops.keep_rows([2, 1, 7])
    assert feed(stops, b"\n", b"\n", b"a") == {0: StopReason.DELIMITER}
    assert feed(stops, b"a", b"a", b"a") == {1: StopReason.PATH_LIMIT}


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
