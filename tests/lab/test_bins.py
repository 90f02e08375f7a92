"""FlashTTS's SelectSPEC: whose children are speculated, by the score before."""

import pytest

from beamwright.errors import InputError
from beamwright.search import make_strategy
from beamwright.search.prospects import FORESIGHTS
from beamwright.sections import SearchSettings
from search.test_prospects import second_round


def made(name, **options):
    return make_strategy(SearchSettings(search=name, foresight="bins", **options))


def test_bins_are_quantiles_of_the_scores_before():
    """No score is wanted before the round is over: SelectSPEC costs no call."""
    beams, policy = second_round([0.9, 0.1, 0.5, 0.7]), made("beam", n=8, width=4)
    found = policy.prospects(None, beams, [])
    assert [each.children for each in found] == [4, 4, 3, 3, 2, 2, 1, 1]
    by_beam = {each.node: each.children for each in found}
    assert [by_beam[beam] for beam in beams] == [4, 4, 1, 1, 2, 2, 3, 3]
    assert not policy.foresees_by_score


def test_subtrees_of_dvts_have_bins_of_their_own():
    beams = second_round([0.9, 0.8, 0.2, 0.1], children=1, complete=4)
    found = made("dvts", n=4, width=2, max_rounds=3).prospects(None, beams, [])
    assert [(each.node, each.children) for each in sorted(found, key=lambda e: e.node.lineage)] == [
        *zip(beams, [2, 1, 2, 1], strict=True)
    ]


def test_bins_are_refused_by_name_where_the_lab_is_not(monkeypatch):
    monkeypatch.delitem(FORESIGHTS, "bins")
    with pytest.raises(InputError, match=r"^--foresight bins: needs the lab. Run pip install"):
        made("beam", n=4, width=2)
