"""Random option sets: the plain tree, or one line."""

import pytest

from beamwright_lab.checks import options


def test_some_sets_of_all_options_on_a_tiny_model(generator_folder):
    found = options.run_random_sets(str(generator_folder), range(4), seed=1)
    assert found["ok"], found["bad"]
    assert found["counts"]["equal"] >= 2


@pytest.mark.parametrize(
    ("free", "outcome"),
    [
        ({"seed": [99], "temperature": [1.5]}, "unequal"),
        ({"kv_memory": [10]}, "least fails"),
        ({"kv_memory": [0.2]}, "capacity"),
    ],
)
def test_what_is_bad_is_found(generator_folder, monkeypatch, free, outcome):
    monkeypatch.setattr(options, "FREE", free)
    found = options.draw_and_run(str(generator_folder), 0, seed=1)
    assert found["outcome"] == outcome


@pytest.mark.nightly
def test_sets_on_a_published_model(smollm2):
    found = options.run_random_sets(str(smollm2), range(12), seed=0)
    assert found["ok"], found["bad"]


@pytest.mark.nightly
def test_many_sets_on_the_bundled_model():
    found = options.run_random_sets("bundled", range(60), seed=0)
    assert found["ok"], found["bad"]
    assert options.run_matrix("bundled")["ok"]
