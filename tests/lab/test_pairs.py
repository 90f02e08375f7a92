"""`docs/pair.md` says what `beamwright plan` says today."""

import json

from beamwright_lab import pairs, publish


def test_plan_still_says_what_the_file_says():
    assert json.loads(json.dumps(pairs.rows())) == publish.read("pairs")["rows"]


def test_every_pair_fits():
    assert all(row["fits"] for row in publish.read("pairs")["rows"])
