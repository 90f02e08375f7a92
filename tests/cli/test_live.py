import io

import pytest
from rich.console import Console

from beamwright.cli.live import LiveTree, StatusLine, draw_answers, draw_tree
from beamwright.engine.decisions import store_answers
from beamwright.search.answers import Mathematics
from beamwright.tree import StopReason
from beamwright_lab.simulator.clock import VirtualClock
from fakes import grow, new_tree


def render(drawing, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width, height=40, force_terminal=False).print(drawing)
    return stream.getvalue()


def test_the_path_grows_down_the_tree(reports):
    *_, last = reports(num_rounds=2)
    lines = render(draw_tree(last.tree)).splitlines()
    assert len(lines) == 8
    assert "\u2022" in lines[0]
    assert "0.90  step 1.0" in lines[0]
    assert "\u2713" in lines[1]
    assert lines[1].index("step 2.0") > lines[0].index("step 1.0")
    assert all("\u2717" in line for line in lines[2:])


def test_detail_gives_way_when_lines_are_few(reports):
    *_, last = reports(num_rounds=10)
    whole = render(draw_tree(last.tree)).splitlines()
    assert len(whole) == 40
    newest = render(draw_tree(last.tree, max_lines=30)).splitlines()
    assert len(newest) == 10 + 9 + 3
    assert any("3 pruned, best 0.80" in line for line in newest)
    few = render(draw_tree(last.tree, max_lines=12)).splitlines()
    assert len(few) <= 12
    assert "earlier steps" in few[0]
    assert any("step 10.0" in line for line in few)


def test_a_line_never_wraps_and_control_characters_do_not_pass(reports):
    *_, last = reports(text="\x1b[31m red [bold]markup[/bold] " + "long " * 100 + "\n\n")
    out = render(draw_tree(last.tree), width=60)
    assert all(len(line) <= 60 for line in out.splitlines())
    assert "\x1b" not in out
    assert "[bold]markup" in out


def test_equal_siblings_are_one_line_with_their_number_and_best_score():
    """Eight children of which five write the same; two of those go on, to the same two ends."""
    tree = new_tree()
    nodes = grow(tree, tree.root, ["same\n"] * 5 + ["else"] * 3)
    for number, node in enumerate(nodes):
        node.score = number / 10
    for node in nodes[:2]:
        tree.keep(node)
        for leaf in grow(tree, node, ["is 42", "is 43"], StopReason.EOS):
            leaf.score = 0.5
            tree.finish(leaf)
    for node in nodes[2:]:
        tree.prune(node)
    lines = [line.partition("0.")[2].split() for line in render(draw_tree(tree)).splitlines()]
    assert [" ".join(line) for line in lines] == [
        "10 x2 same",
        "50 x2 is 42",
        "50 x2 is 43",
        "40 x3 same",
        "70 x3 else",
    ]
    few = render(draw_tree(tree, max_lines=4)).splitlines()
    assert "6 pruned, best 0.70" in few[-1]


def test_answers_are_counted():
    tree = new_tree()
    ends = ["The answer is 41.", *["So \\boxed{42}."] * 3, "No idea."]
    for number, node in enumerate(grow(tree, tree.root, ends, StopReason.EOS)):
        node.score = number / 10
    assert draw_answers(tree) is None
    store_answers(Mathematics(), tree.candidates())
    for node in tree.candidates():
        tree.finish(node)
    assert draw_answers(tree).plain == (
        "Answers  42 x3 (best 0.30) | 41 x1 (best 0.00) | no answer x1 (best 0.40)"
    )


def test_the_status_says_what_goes_on_and_how_fast():
    clock = VirtualClock()
    status = StatusLine(clock)
    status.doing("loading the generator bundled")
    clock.advance(2.0)
    assert str(status) == "loading the generator bundled | 2 s"
    status.wrote(0)
    status.doing("round 3: decoding 8 beams")
    clock.advance(10.0)
    status.wrote(5000)
    assert str(status) == "round 3: decoding 8 beams | 5,000 tokens | 500 tok/s | 12 s"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_live_view_on_any_terminal(reports, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=70, height=12, force_terminal=True)
    with LiveTree(console, "What is 6*7?", StatusLine()) as live:
        for report in reports(num_rounds=6):
            live.show(report)
    stream.flush()
    out = stream.buffer.getvalue().decode(encoding)
    assert "starting | 0 s" in out
    last = out[out.rindex("What is 6*7?") :]
    assert "starting" not in last, "the picture that stays has no status"
    assert all(f"step {number}.0" in last for number in range(1, 7)), "it may scroll"
