"""Which strategy and verifier stand where none are given, and what is refused without scores."""

import pytest

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.search import STRATEGIES
from beamwright.search.defaults import vote_note, with_strategy_and_verifier
from tables import beside

CASES = beside(__file__)

WAYS = ("--verifier PATH", "docs/guides/verifiers.md")


def names(**options):
    found = with_strategy_and_verifier(Settings.build(**options))
    return found.search.search, found.model.verifier


@pytest.mark.parametrize(("options", "search", "verifier"), CASES["defaults"])
def test_what_stands_where_none_is_given(options, search, verifier):
    assert names(**options) == (search, verifier)


@pytest.mark.parametrize("search", STRATEGIES)
@pytest.mark.parametrize("model", [{"model": "own"}, {"verifier": "none"}])
def test_what_cannot_do_without_scores_says_where_to_get_them(search, model):
    options = {"search": search, **model}
    row = STRATEGIES[search]
    if row.choose == "majority" or (row.scorer and "model" in model):
        assert names(**options)[0] == search
        return
    with pytest.raises(InputError) as caught:
        names(**options)
    line = str(caught.value)
    assert line.startswith(f"--search {search} needs scores")
    assert all(way in line for way in WAYS)
    assert ("--search majority" in line) is row.needs_scores
    if not row.needs_scores:  # it needs them for the choice alone
        assert names(**options, choose="majority")[0] == search
        assert names(**options, n=1)[0] == search


def test_only_a_vote_by_default_is_worth_a_line():
    note = vote_note(Settings.build(model="own", n=8))
    assert note.startswith(
        "--model own runs without a verifier: the answer is a majority vote of 8 paths"
    )
    assert all(way in note for way in WAYS)
    for options in (
        {},
        {"model": "own", "search": "majority"},
        {"model": "own", "verifier": "logprob"},
        {"model": "random:opt-6.7b"},
        {"model": "random:opt-6.7b", "verifier": "none"},
    ):
        assert vote_note(Settings.build(**options)) is None
