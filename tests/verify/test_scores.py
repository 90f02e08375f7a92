import math
import random

import pytest

from beamwright.errors import InputError
from beamwright.sections import ModelSettings
from beamwright.verify.find import resolve_verifier
from beamwright.verify.scorers import (
    bottom_groups,
    deepconf,
    group_confidences,
    lowest_group,
    make_scorer,
    tail_confidence,
)
from beamwright.verify.spec import aggregate
from fakes import add_step, new_tree


@pytest.mark.parametrize(
    ("how", "expected"), [("last", 0.4), ("min", 0.2), ("prod", 0.04), ("mean", 1.1 / 3)]
)
def test_aggregates_leave_steps_without_a_score_out(how, expected):
    assert aggregate([0.5, None, 0.2, 0.4, None], how) == pytest.approx(expected)
    assert aggregate([None, None], how) is None
    assert aggregate([], how) is None


def test_logprob_is_the_geometric_mean_of_the_steps_probabilities():
    tree = new_tree()
    node = tree.expand(tree.root, 1)[0]
    add_step(tree, node, "ab", tokens=(1, 2))
    node.logprobs = (math.log(0.9), math.log(0.4))
    assert make_scorer("logprob", None).score([node]) == pytest.approx([0.6])
    node.logprobs = ()
    assert make_scorer("logprob", None).score([node]) == [None]


def path_of(*steps):
    """A path whose steps have these probabilities; returns its nodes."""
    tree = new_tree()
    nodes = [tree.root]
    for probabilities in steps:
        (node,) = tree.expand(nodes[-1], 1)
        add_step(tree, node, "x", tokens=(7,) * len(probabilities))
        node.logprobs = tuple(map(math.log, probabilities))
        tree.keep(node)
        nodes.append(node)
    return nodes[1:]


def test_min_logprob_is_the_least_likely_token():
    first, second = path_of((0.9, 0.4, 0.8), ())
    assert make_scorer("min-logprob", None).score([first, second]) == [pytest.approx(0.4), None]
    assert make_scorer("min-logprob", None).default_aggregate == "min"


def stats_path(name, *steps):
    """A path whose steps' tokens have these statistics; returns its nodes."""
    nodes = path_of(*((1.0,) * len(values) for values in steps))
    for node, values in zip(nodes, steps, strict=True):
        node.stats = {name: tuple(values)} if values else {}
    return nodes


def test_entropy_falls_with_a_steps_mean_entropy():
    nodes = stats_path("entropy", (0.0, 0.0), (0.5, 1.5), (math.log(4),), ())
    scores = make_scorer("entropy", None).score(nodes)
    assert scores[:3] == pytest.approx([1.0, math.exp(-1.0), 0.25])
    assert scores[3] is None
    assert make_scorer("entropy", None).default_aggregate == "mean"


CONFIDENCES = ((5.0, 3.0), (6.0, 6.0), (1.0, 7.0), ())


def test_deepconf_is_the_lowest_group_of_the_path_so_far():
    # Groups may span two steps: (3, 6) is no lower than (5, 3), (6, 1) is.
    scores = deepconf(window=2).score(stats_path("confidence", *CONFIDENCES))
    assert scores[:3] == pytest.approx([4.0, 4.0, 3.5])
    assert scores[3] is None
    assert deepconf().default_aggregate == "last"


def plain_groups(confidences, window):
    """The paper's groups, each summed on its own."""
    starts = range(max(1, len(confidences) - window + 1))
    groups = [confidences[start : start + window] for start in starts]
    return [sum(group) / len(group) for group in groups]


@pytest.mark.parametrize("length", [1, 6, 7, 8, 36, 37, 90])
def test_measures_against_the_papers_formulas(length):
    rng = random.Random(length)
    confidences = [rng.uniform(3.0, 25.0) for _ in range(length)]
    groups = plain_groups(confidences, 7)
    assert group_confidences(confidences, 7) == pytest.approx(groups)
    assert lowest_group(confidences, 7) == pytest.approx(min(groups))
    lowest = sorted(groups)[: max(1, int(0.1 * len(groups)))]
    assert bottom_groups(confidences, 7) == pytest.approx(sum(lowest) / len(lowest))
    last = confidences[-7:]
    assert tail_confidence(confidences, 7) == pytest.approx(sum(last) / len(last))


@pytest.mark.parametrize("option", ["logprob", "min-logprob", "entropy", "none"])
def test_a_scorer_takes_no_option(option):
    assert resolve_verifier(ModelSettings(verifier=option)).without_model is not None
    with pytest.raises(InputError, match="takes no option"):
        resolve_verifier(ModelSettings(verifier=f"{option}:3"))


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("deepconf", lowest_group),
        ("deepconf-bottom", bottom_groups),
        ("deepconf-tail", tail_confidence),
    ],
)
def test_deepconfs_window_is_named(name, measure):
    confidences = [float(7 * i % 31) for i in range(200)]
    nodes = stats_path("confidence", confidences)
    for option, window in (("", 128), (":16", 16)):
        source = resolve_verifier(ModelSettings(verifier=f"{name}{option}"))
        assert source.without_model.score(nodes) == [measure(confidences, window)]
    for window in ("0", "-1", "wide", ""):
        with pytest.raises(InputError, match=f"--verifier {name}:{window}: the window must be"):
            resolve_verifier(ModelSettings(verifier=f"{name}:{window}"))
