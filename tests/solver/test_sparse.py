"""What `--sparse auto` stands for: the cost model's word, where host and device are two."""

import pytest

from beamwright import Settings
from beamwright.errors import InputError
from beamwright.models.shape import NAMED_SHAPES
from beamwright.plan.machines import find_profile
from beamwright.solver import sparse
from beamwright.solver.memory import ModelBytes

GENERATOR = ModelBytes(NAMED_SHAPES["llama-3.1-8b"], 2)
KV_BYTES = 4 * 2**30


@pytest.fixture
def settled(monkeypatch):
    """As on a card whose cost model promises so much."""

    def find(gain=None, **options):
        if gain is not None:
            monkeypatch.setattr(sparse, "LEAST_GAIN", gain)
        monkeypatch.setattr(sparse, "machine_profile", lambda _: find_profile("rtx-4090"))
        settings = Settings.build(**{"device": "cuda", "sparse": "auto", **options})
        return sparse.settled_sparse(settings, GENERATOR, KV_BYTES)

    return find


def test_auto_goes_by_the_gain(settled):
    options = {"n": 64, "width": 1, "select": 512, "sparse_from": 512, "max_tokens": 8192}
    assert settled(**options).sparse == "off", "keys on the host are slower"
    on = settled(gain=0.01, **options)
    assert (on.sparse, on.sparse_home, on.sparse_correct) == ("ahead", "host", 0.8)
    assert (on.select, on.sparse_from) == (512, 512)


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        {"schedule": "locality"},
        {"evict": "recompute"},
        {"attention": "dense"},
        {"deterministic": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_auto_is_off_where_it_could_not_be_on(settled, options):
    assert settled(gain=0.0, **options).sparse == "off"


def test_a_home_on_the_host_is_an_order(settled):
    on = settled(gain=100.0, device="cpu", sparse_home="host")
    assert (on.sparse, on.sparse_home) == ("ahead", "host")


def test_others_are_what_they_are(settled):
    assert settled(gain=0.0, sparse="quest").sparse_home == "device"
    assert settled(gain=0.0, sparse="off").sparse == "off"
    with pytest.raises(InputError, match="--sparse-window 4: does nothing with --sparse auto"):
        settled(sparse_window=4)
