"""`docs/pair.md` says what `beamwright plan` says today."""

import json

from beamwright_lab import pairs, publish


def test_plan_still_says_what_the_file_says():
    said = publish.read("pairs")
    assert json.loads(json.dumps(pairs.rows())) == said["rows"]
    assert pairs.sample() == said["sample"]


def test_every_pair_fits():
    assert all(row["fits"] for row in publish.read("pairs")["rows"])
