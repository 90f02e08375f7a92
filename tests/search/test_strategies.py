"""The table of strategies: every row plays whole searches; knobs and their errors."""

import pytest

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.search import STRATEGIES, make_strategy
from beamwright.search.defaults import with_defaults
from beamwright.sections import SearchSettings
from declared import samples
from played import play

FILLING = [name for name, row in STRATEGIES.items() if row.fills]
VALUES = samples()


@pytest.mark.parametrize("name", FILLING)
def test_every_search_ends_with_exactly_n_finished_candidates(name):
    for seed in range(15):
        n, width = [(4, 2), (8, 4), (6, 3), (1, 1), (9, 3)][seed % 5]
        enough = {"nodes": 10_000} if "nodes" in STRATEGIES[name].options else {}
        settings = SearchSettings(search=name, n=n, width=width, max_rounds=150, **enough)
        strategy = make_strategy(settings)
        tree, reason = play(strategy, seed)
        assert len(tree.finished()) == n
        assert reason is None
        assert not tree.open_nodes()


@pytest.mark.parametrize("name", FILLING)
def test_the_round_limit_is_named(name):
    strategy = make_strategy(SearchSettings(search=name, n=4, width=2, max_rounds=3))
    tree, reason = play(strategy, 1, ends=0.0)
    assert reason == "4 of 4 paths reached --max-rounds"
    assert tree.finished() == []
    assert {node.depth for node in tree.candidates()} == {3}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_scores_give_the_same_tree(name):
    settings = SearchSettings(search=name, n=8, width=2, max_rounds=50)
    trees = [play(make_strategy(settings), 5)[0] for _ in range(2)]
    one, two = ([(n.lineage, n.state, n.text) for n in tree.nodes()] for tree in trees)
    assert one == two


@pytest.mark.parametrize("option", VALUES)
def test_an_option_of_another_strategy_is_an_error(option):
    flag = option.replace("_", "-")
    for name, row in STRATEGIES.items():
        settings = Settings.build(search=name, width=2, **{option: VALUES[option]}).search
        if option in row.options:
            assert getattr(make_strategy(settings), option) == VALUES[option]
        else:
            with pytest.raises(InputError, match=f"--{flag} is not an option of --search {name}"):
                make_strategy(settings)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_table_says_whose_tree_depends_on_the_width(name):
    def shape(width):
        settings = SearchSettings(search=name, n=8, width=width, max_rounds=50)
        return [node.lineage for node in play(make_strategy(settings), 3)[0].nodes()]

    assert (shape(2) != shape(4)) is STRATEGIES[name].reads_width


def test_an_option_that_was_never_declared_is_unknown_however_it_came():
    with pytest.raises(InputError, match=r"unknown option 'search.serach'. Did you mean search\?"):
        make_strategy(SearchSettings(serach="beam"))


def test_a_strategy_brings_its_own_choice_and_step_lengths():
    assert with_defaults(Settings.build(search="majority")).search.choose == "majority"
    assert with_defaults(Settings.build(search="weighted")).search.choose == "weighted"
    assert with_defaults(Settings.build(search="majority", choose="best")).search.choose == "best"
    assert with_defaults(Settings.build(search="varying")).step.step_limits == (64, 64, 64, 2048)
    given = with_defaults(Settings.build(search="varying", step_limits="8,16"))
    assert given.step.step_limits == (8, 16)
    assert with_defaults(Settings.build(search="varying", step_tokens=4)).step.step_limits is None
    assert with_defaults(Settings.build()).step.step_limits is None


@pytest.mark.parametrize("text", ["", "4,x", "0", "4,,5"])
def test_step_limits_must_be_numbers(text):
    with pytest.raises(InputError, match="step-limits"):
        Settings.build(step_limits=text)
